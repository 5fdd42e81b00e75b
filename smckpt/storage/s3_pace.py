"""Holding this process to its share of what a bucket answers a second.

Every request counts when it is sent, botocore's own repetitions included: the client tells us
before each (`before-send`) and after each answer (`response-received`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from smckpt.storage.budget import Share, TokenBucket
from smckpt.storage.host_signal import HostSignal
from smckpt.storage.s3_config import S3Config

__all__ = [
    "Pace",
    "Turns",
    "current_share",
    "pace_of",
    "paced",
    "sharing",
    "watch",
]

_READS = ("GET", "HEAD")
_BUSY = frozenset({"SlowDown", "ServiceUnavailable", "TooManyRequests", "RequestLimitExceeded"})
_MAKING = threading.Lock()


class _Lane:
    """Requests of one kind: the bucket of this process, slowed with those of its neighbours."""

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

    def lane(self, method: str) -> _Lane:
        return self.reads if method in _READS else self.writes


def pace_of(config: S3Config, bucket: str, share: Share) -> Pace:
    """The one of this process: all that it opens in a bucket shares it, under whatever prefix,
    since a bucket that is new, or seldom used, is a single partition."""
    with _MAKING:  # two threads must not make two
        return _pace(config, bucket, share, os.getpid())


@lru_cache(maxsize=64)
def _pace(config: S3Config, bucket: str, share: Share, pid: int) -> Pace:
    return Pace(config, bucket, share)


# -- whose share ------------------------------------------------------------------------------

_SHARE: ContextVar[Share | None] = ContextVar("smckpt_s3_share", default=None)


def current_share() -> Share:
    """Of stores that are opened here: what `sharing` says, else the whole budget."""
    return _SHARE.get() or Share()


@contextlib.contextmanager
def sharing(share: Share | None) -> Iterator[None]:
    """Stores that this thread opens inside the block are held to `share`; None changes nothing."""
    if share is None:
        yield
        return
    token = _SHARE.set(share)
    try:
        yield
    finally:
        _SHARE.reset(token)


# -- which requests ---------------------------------------------------------------------------


@dataclass
class Turns:
    """The requests of one action: under which pace, on which lane the last one went, and the
    seconds that they waited for their turns."""

    pace: Pace
    method: str = "GET"
    waited: float = 0.0


_TURNS: ContextVar[Turns | None] = ContextVar("smckpt_s3_turns", default=None)


@contextlib.contextmanager
def paced(pace: Pace) -> Iterator[Turns]:
    """Requests that this thread sends inside the block keep `pace`."""
    turns = Turns(pace)
    token = _TURNS.set(turns)
    try:
        yield turns
    finally:
        _TURNS.reset(token)


def watch(client: Any) -> None:
    """Let a client tell of each request and each answer."""
    client.meta.events.register("before-send.s3", _before, unique_id="smckpt-turn")
    client.meta.events.register("response-received.s3", _after, unique_id="smckpt-busy")


def _before(request: Any, **_: Any) -> None:
    turns = _TURNS.get()
    if turns is not None:
        turns.method = request.method
        turns.waited += turns.pace.lane(request.method).take()


def _after(parsed_response: Any, **_: Any) -> None:
    turns = _TURNS.get()
    if turns is None or not parsed_response:
        return
    status = parsed_response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    # The end of an upload answers 200 first and may say in its body that it came to nothing.
    if status in (429, 503) or parsed_response.get("Error", {}).get("Code") in _BUSY:
        turns.pace.lane(turns.method).slow_down()
