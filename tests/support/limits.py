"""The limits of time in the tests, in one place.

They are there so that what hangs ends, not to measure: each is many times what a quiet machine
needs. SMCKPT_TEST_PATIENCE scales them all, for a machine that is slower or has more to do.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["seconds", "within"]

PATIENCE = float(os.environ.get("SMCKPT_TEST_PATIENCE", "1"))


def seconds(limit: float) -> float:
    """`limit`, scaled."""
    return limit * PATIENCE


@contextmanager
def within(limit: float) -> Iterator[None]:
    """Fail a block that waits longer than `limit` seconds, and end its wait. The limit of the whole
    test, for which pytest-timeout uses the same timer, goes on afterwards."""

    def late(*_: object) -> None:
        raise AssertionError(f"not done within {limit} s")

    before = signal.signal(signal.SIGALRM, late)
    outer = signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *outer)
        signal.signal(signal.SIGALRM, before)
