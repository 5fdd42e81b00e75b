"""`__main__` of a process that a script spawned by multiprocessing: see `smckpt.run.script`."""

from smckpt.run.script import main_of_child

if __name__ == "__mp_main__":
    globals().update({k: v for k, v in main_of_child().items() if not k.startswith("__")})
