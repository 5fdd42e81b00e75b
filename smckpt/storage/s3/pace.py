"""Keep this process within its share of the requests that a bucket answers per second.

Every try of a request counts.
"""

from __future__ import annotations

import hashlib
import os
import threading
from functools import lru_cache
from typing import Any

from smckpt.errors import CheckpointError
from smckpt.storage.budget import Share, TokenBucket
from smckpt.storage.host_signal import HostSignal
from smckpt.storage.s3.config import S3Config
from smckpt.storage.s3.faults import BadBody, code_of, failed_there, status_of

__all__ = [
    "Pace",
    "PacedClient",
    "pace_of",
]

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

    def __init__(self, config: S3Config, bucket: str, share: Share) -> None:
        place = f"{config.endpoint or os.environ.get('AWS_ENDPOINT_URL_S3', '')}/{bucket}"
        name = f"s3-{hashlib.sha256(place.encode()).hexdigest()[:16]}"
        self.writes = _Lane(f"{name}-writes", config.write_rate, share.writes, share.phase)
        self.reads = _Lane(f"{name}-reads", config.read_rate, share.reads, share.phase)


def pace_of(config: S3Config, bucket: str, share: Share) -> Pace:
    """The pace of this process in a bucket. All prefixes share it, because a bucket that is new or
    seldom used is a single partition."""
    with _MAKING:  # two threads must not make two paces
        return _pace(config, bucket, share, os.getpid())


@lru_cache(maxsize=64)
def _pace(config: S3Config, bucket: str, share: Share, pid: int) -> Pace:
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
