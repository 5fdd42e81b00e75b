"""`torchrun … -m smckpt.run script.py …`."""

import sys

from smckpt.errors import CheckpointError
from smckpt.run.command import run

if __name__ == "__main__":
    try:
        run(prog_name="python -m smckpt.run")
    except CheckpointError as error:
        print(f"smckpt run: {error}", file=sys.stderr)
        sys.exit(2)
