"""Reports the progress of long work to the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

__all__ = ["Meter", "Progress"]

Progress: TypeAlias = Callable[[int, int], None]  # called with bytes done and bytes in all


class Meter:
    """Counts bytes of several threads, and reports one count at a time."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)
