"""A signal between the processes of one host ("it happened again"): the time stamp of a file.

No process waits for another, and there is no server. Without a temporary directory of this user the
signal is not shared; each process then finds out by itself.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import threading
import time
from pathlib import Path

__all__ = ["HostSignal"]

_LOOK = 0.05  # seconds; the file is not looked at more often


class HostSignal:
    """The signal `name` between processes of one user with one temporary directory. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._path = _folder() / name
        self._seen = self._stamp()
        self._looked = time.monotonic()

    def raised(self) -> bool:
        """Whether another process has raised the signal since the last call."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked < _LOOK:
                return False
            self._looked = now
            stamp, before = self._stamp(), self._seen
            self._seen = stamp
            return stamp not in (before, 0)

    def raise_(self) -> None:
        """Raise the signal for the other processes."""
        with self._lock, contextlib.suppress(OSError):
            _own(self._path.parent)
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            handle = os.open(self._path, flags, 0o600)
            try:
                os.utime(handle)
            finally:
                os.close(handle)
            self._seen = self._stamp()

    def _stamp(self) -> int:
        try:
            _own(self._path.parent)
            return self._path.lstat().st_mtime_ns
        except OSError:
            return 0


def _folder() -> Path:
    return Path(tempfile.gettempdir(), f"smckpt-{os.getuid()}")


def _own(folder: Path) -> None:
    """Make the folder for this user alone. Other users can guess names in a temporary directory.

    Raises:
        OSError: it belongs to somebody else, or cannot be made.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
