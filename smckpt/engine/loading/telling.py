"""One line in the log each half minute of a long save or load, on rank 0.

Errors are logged by every rank. The log is the logger `smckpt`, at the level INFO.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["EVERY", "telling"]

log = logging.getLogger("smckpt")

EVERY = 30.0  # seconds


@contextmanager
def telling(rank: int, text: Callable[[], str], every: float = EVERY) -> Iterator[None]:
    """Log what is under way each `every` seconds of the block.

    Args:
        rank: this global rank. Any other than 0 is silent.
        text: what is done so far; called in a thread.
    """
    if rank != 0 or not log.isEnabledFor(logging.INFO):
        yield
        return
    ended, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not ended.wait(every):
            log.info("%s, for %.0f s", text(), time.monotonic() - began)

    thread = threading.Thread(target=tell, name="smckpt-telling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
