"""Keep this process within its share of the requests that a bucket answers per second.

Every try of a request counts.

The processes of one host hear of a slow-down by the time stamp of a file. No process waits for
another, and there is no server. Without a temporary directory of this user the
signal is not shared; each process then finds out by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from smckpt.errors import CheckpointError
from smckpt.storage.budget import Share, TokenBucket
from smckpt.storage.s3.config import StoreOptions
from smckpt.storage.s3.faults import BadBody, code_of, failed_there, status_of

__all__ = ["HostSignal", "Pace", "PacedClient", "pace_of"]

_READS = ("get_", "head_", "list_")
_BUSY = frozenset({"SlowDown", "ServiceUnavailable", "TooManyRequests", "RequestLimitExceeded"})
_MAKING = threading.Lock()


class _Lane:
    """Requests of one kind: a token bucket of this process that slows down together with those of
    other processes of the host."""

    def __init__(self, name: str, limit: float, fraction: float, phase: float) -> None:
        self.bucket = TokenBucket(limit * fraction, phase=phase)
        self._signal = HostSignal(name)

    def take(self) -> float:
        if self._signal.raised():
            self.bucket.slow_down()
        return self.bucket.take()

    def slow_down(self) -> None:
        if self.bucket.slow_down():
            self._signal.raise_()


class Pace:
    """This process's share of a bucket's budget. Thread-safe."""

    def __init__(self, config: StoreOptions, bucket: str, share: Share) -> None:
        bucket_url = f"{config.endpoint or os.environ.get('AWS_ENDPOINT_URL_S3', '')}/{bucket}"
        name = f"s3-{hashlib.sha256(bucket_url.encode()).hexdigest()[:16]}"
        self.writes = _Lane(f"{name}-writes", config.write_rate, share.writes, share.phase)
        self.reads = _Lane(f"{name}-reads", config.read_rate, share.reads, share.phase)


def pace_of(config: StoreOptions, bucket: str, share: Share) -> Pace:
    """The pace of this process in a bucket. All prefixes share it, because a bucket that is new or
    seldom used is a single partition."""
    with _MAKING:  # two threads must not make two paces
        return _pace(config, bucket, share, os.getpid())


@lru_cache(maxsize=64)
def _pace(config: StoreOptions, bucket: str, share: Share, pid: int) -> Pace:
    return Pace(config, bucket, share)


class PacedClient:
    """boto3's client, slowed down: each operation waits for its turn, and a 503 slows down the
    following ones. (Requests that botocore repeats in another region are not counted.)

    waited: seconds that all operations waited.
    """

    def __init__(self, client: Any, pace: Pace) -> None:
        self._client = client
        self._pace = pace
        self.waited = 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if not callable(found):
            return found
        lane = self._pace.reads if name.startswith(_READS) else self._pace.writes

        def call(*args: Any, **fields: Any) -> Any:
            self.waited += lane.take()
            try:
                return found(*args, **fields)
            except Exception as error:
                if status_of(error) in (429, 503) or code_of(error) in _BUSY:
                    lane.slow_down()
                if failed_there(error) or isinstance(error, (CheckpointError, MemoryError)):
                    raise
                # botocore parses answers without a guard: a changed digit is a ValueError there
                what = f"{type(error).__name__}: {error}"
                raise BadBody(f"the answer to {name} cannot be read ({what})") from error

        return call


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
