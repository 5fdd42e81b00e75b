"""A wrong clock, in this process and in the workers that it starts."""

from __future__ import annotations

import time

from smckpt.engine.background import worker_client

__all__ = ["shift"]

# The real clock, as far off as a host's wrong one.
_SHIFT = (
    "import time; time.time = lambda at=time.time: at() + {0}; "
    "time.time_ns = lambda at=time.time_ns: at() + int({0} * 1e9); "
)


def shift(seconds: float) -> None:
    """From now on the clock is off by so many seconds. Workers that run already keep theirs."""
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + int(seconds * 1e9)
    worker_client._PROGRAM = _SHIFT.format(seconds) + worker_client._PROGRAM
