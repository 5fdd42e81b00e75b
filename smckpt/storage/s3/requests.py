"""Requests to S3: who sends them, how many a second, and which are sent again."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from smckpt.errors import CheckpointError
from smckpt.storage.budget import Share, TokenBucket
from smckpt.storage.s3.bodies import in_time
from smckpt.storage.s3.client import make_client
from smckpt.storage.s3.config import StoreOptions
from smckpt.storage.s3.faults import (
    BadBody,
    Unanswered,
    code_of,
    failed_there,
    is_transient,
    lacks_credentials,
    s3_error,
    status_of,
)

Result = TypeVar("Result")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 20.0  # seconds; doubled with each try
_MAKE_SECONDS = 5.0  # a new client gets at least this long, because it imports boto3 first
log = logging.getLogger("smckpt")
_MAKING = threading.Lock()  # boto3's session is not thread-safe while it makes a client


class Requests:
    """Requests to a bucket with one set of options, within `share` of its budget. Thread-safe.

    sent_again: how many tries followed a failed one.
    """

    def __init__(self, config: StoreOptions, bucket: str, share: Share) -> None:
        self.config = config
        self.bucket = bucket
        self._share = share
        self._lock = threading.Lock()
        self.sent_again = 0

    def run(self, action: str, url: str, request: Callable[[Any], Result]) -> Result:
        """Call `request(client)`, and again (after random pauses) while its failures are temporary.

        Raises:
            CheckpointError: the failure is permanent, or tries or time are used up.
        """
        pace = pace_of(self.config, self.bucket, self._share)
        # The client belongs to this process: its connections and locks do not survive a fork.
        slot = _slot(self.config, os.getpid())
        began = time.monotonic()
        tries, waited = 0, 0.0
        while True:
            tries += 1
            made = client = None
            try:
                made = slot.made or _make(self.config, slot)
                client = PacedClient(made.client, pace)
                result = request(client)
                made.proven = True
                return result
            except Exception as error:
                if not failed_there(error):
                    raise
                waited += client.waited if client is not None else 0.0
                spent = time.monotonic() - began - waited
                pause = random.uniform(0.5, 1) * min(_FIRST_PAUSE * 2**tries, _LONGEST_PAUSE)
                if not (is_transient(error) or slot.renews(made, error)):
                    raise s3_error(error, url, action) from error
                if tries > self.config.retries or spent + pause > self.config.timeout_s:
                    tried = f"{tries} times in {spent:.1f} s"
                    raise s3_error(error, url, action, tried) from error
                log.debug("%s of %s: try %d failed: %s", action, url, tries, error)
                with self._lock:
                    self.sent_again += 1
                time.sleep(pause)


@dataclass(eq=False)
class _Made:
    """A client. proven: it has carried out a request, so its credentials were valid."""

    client: Any
    proven: bool = False


@dataclass(eq=False)
class _Slot:
    """Holds a process's client for one set of options until its credentials expire."""

    made: _Made | None = None

    def renews(self, made: _Made | None, error: BaseException) -> bool:
        """Whether `error` says that credentials which were valid have expired. Then the next
        request makes a new client, which reads them again. If their provider hangs, the time of
        this request is used up."""
        from botocore.exceptions import ClientError

        if made is None or not lacks_credentials(error):
            return False
        # botocore itself retries to get credentials.
        if isinstance(error, (ClientError, Unanswered)) and self.made is made:
            self.made = None
        return made.proven and not isinstance(error, Unanswered)


@lru_cache(maxsize=8)
def _slot(config: StoreOptions, pid: int) -> _Slot:
    return _Slot()


def _make(config: StoreOptions, slot: _Slot) -> _Made:
    """Make a client; threads that ask at the same time share one."""
    from botocore.exceptions import BotoCoreError

    seconds = max(config.timeout_s, _MAKE_SECONDS)
    ends = time.monotonic() + seconds
    try:
        if not _MAKING.acquire(timeout=seconds):
            raise Unanswered(seconds)
        try:
            if slot.made is None:
                # The user's function, or the program that provides credentials, may hang.
                left = ends - time.monotonic()
                slot.made = _Made(in_time(partial(make_client, config), left, seconds))
            return slot.made
        finally:
            _MAKING.release()
    except (BotoCoreError, ValueError, Unanswered) as error:
        raise s3_error(error, config.endpoint or "s3://", "make a client") from error


_READS = ("get_", "head_", "list_")
_BUSY = frozenset({"SlowDown", "ServiceUnavailable", "TooManyRequests", "RequestLimitExceeded"})
_ONE_PACE = threading.Lock()


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
    with _ONE_PACE:  # two threads must not make two paces
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
        self._path = Path(tempfile.gettempdir(), f"smckpt-{os.getuid()}") / name
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


def _own(folder: Path) -> None:
    """Make the folder for this user alone. Other users can guess names in a temporary directory.

    Raises:
        OSError: it belongs to somebody else, or cannot be made.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
