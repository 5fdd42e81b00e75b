"""The names of `nvidia_resiliency_ext.checkpointing` (NVIDIA resiliency extension 0.7).

`smckpt run --for nvrx` provides them under NVRx's own name. `worker/` is ours: the process in which
a request's function runs.
"""

VERSION = "0.7.0"  # of NVRx, whose names these are
