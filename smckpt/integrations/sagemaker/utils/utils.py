"""`timeit`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["timeit"]

log = logging.getLogger("smckpt")


@contextmanager
def timeit(enabled: bool = True, message: str = "", rank: int = 0) -> Iterator[None]:
    """Log how long the block took."""
    began = time.perf_counter()
    yield
    if enabled:
        log.info("%s took %.2f s on rank %d", message, time.perf_counter() - began, rank)
