"""One boto3 client per process and set of options, and the retries of everything that may pass.

boto3 is imported with the first request: neither `import smckpt` nor a save to a disk waits for it.

Jobs outlive credentials. Those of boto3's chain refresh themselves; those of a file that someone
rewrites, or of a function that assumes a role once, do not: when the store says that they are over,
the client is made anew.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from smckpt.storage.budget import Share
from smckpt.storage.s3_answers import refuse_strange
from smckpt.storage.s3_config import S3Config
from smckpt.storage.s3_factory import client_from
from smckpt.storage.s3_faults import Unanswered, is_transient, lacks_credentials, s3_error
from smckpt.storage.s3_late import in_time, refresh_in_time
from smckpt.storage.s3_pace import Turns, pace_of, paced, watch
from smckpt.storage.s3_read import reads_below
from smckpt.storage.s3_send import hand_over_pages

__all__ = ["Requests"]

Result = TypeVar("Result")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 20.0  # seconds; doubled with each try
_BOTOCORE_TRIES = 3  # quick ones below ours, which rewind bodies by themselves
_CONNECT_SECONDS = 10

_MAKE_SECONDS = 5.0  # the least that a client is given, which imports boto3 first
log = logging.getLogger("smckpt")
_MAKING = threading.Lock()  # boto3's session is not thread-safe while it makes a client


class Requests:
    """Requests to a bucket under one set of options, at the pace of `share`. Thread-safe."""

    def __init__(self, config: S3Config, bucket: str, share: Share) -> None:
        self.config = config
        self._bucket = bucket
        self._share = share

    @property
    def client(self) -> Any:
        """This process's: connections and locks of a client do not survive a fork."""
        return self._made.client

    @property
    def direct(self) -> bool:
        """Whether bytes pass between memory and socket by our own ways, not by boto3's public
        methods alone."""
        return self._made.direct

    @property
    def _made(self) -> _Made:
        slot = _slot(self.config, os.getpid())
        return slot.made or _make(self.config, slot)

    def run(self, action: str, url: str, request: Callable[[Any], Result]) -> Result:
        """`request(client)`, tried again with jitter while its failures are passing ones.

        Raises:
            CheckpointError: it failed for good, or tries or time are used up.
        """
        with paced(pace_of(self.config, self._bucket, self._share)) as turns:
            return self._tried(action, url, request, turns)

    def _tried(
        self, action: str, url: str, request: Callable[[Any], Result], turns: Turns
    ) -> Result:
        began = time.monotonic()
        tries = 0
        while True:
            tries += 1
            made = None
            try:
                made = self._made
                result = request(made.client)
                made.proven = True
                return result
            except Exception as error:
                spent = time.monotonic() - began - turns.waited
                pause = random.uniform(0.5, 1) * min(_FIRST_PAUSE * 2**tries, _LONGEST_PAUSE)
                if not _boto_error(error):
                    raise
                if not (is_transient(error) or self._renewed(made, error)):
                    raise s3_error(error, url, action) from error
                if tries > self.config.retries or spent + pause > self.config.timeout_s:
                    tried = f"{tries} times in {spent:.1f} s"
                    raise s3_error(error, url, action, tried) from error
                log.debug("%s of %s: try %d failed: %s", action, url, tries, error)
                time.sleep(pause)

    def _renewed(self, made: _Made | None, error: BaseException) -> bool:
        """Whether `error` tells of credentials that were good and may be so again: the next request
        makes a client, which reads them anew. Where the way to them hangs, this one's time is
        over."""
        from botocore.exceptions import ClientError

        if made is None or not lacks_credentials(error):
            return False
        slot = _slot(self.config, os.getpid())
        # What botocore raises of credentials that it could not get, it asks for again by itself.
        if isinstance(error, (ClientError, Unanswered)) and slot.made is made:
            slot.made = None
        return made.proven and not isinstance(error, Unanswered)


def _boto_error(error: BaseException) -> bool:
    """Whether the store or the way to it failed, and not our own code."""
    from botocore.exceptions import BotoCoreError, ClientError

    from smckpt.errors import CheckpointError
    from smckpt.storage.s3_faults import BadBody

    if isinstance(error, CheckpointError):
        return False
    return isinstance(error, (BotoCoreError, ClientError, BadBody, Unanswered, OSError))


@dataclass(eq=False)
class _Made:
    """A client. proven: it has carried out a request, so its credentials were good."""

    client: Any
    direct: bool
    proven: bool = False


@dataclass(eq=False)
class _Slot:
    """Where a process keeps its client for a set of options, until its credentials are over."""

    made: _Made | None = None


@lru_cache(maxsize=8)
def _slot(config: S3Config, pid: int) -> _Slot:
    return _Slot()


def _make(config: S3Config, slot: _Slot) -> _Made:
    """Once, whoever asks for it at one time."""
    from botocore.exceptions import BotoCoreError

    seconds = max(config.timeout_s, _MAKE_SECONDS)
    ends = time.monotonic() + seconds
    try:
        if not _MAKING.acquire(timeout=seconds):
            raise Unanswered(seconds)
        try:
            if slot.made is None:
                # A function of the user's, or a program that tells credentials, may hang.
                slot.made = in_time(partial(_client, config), ends - time.monotonic(), seconds)
            return slot.made
        finally:
            _MAKING.release()
    except (BotoCoreError, ValueError, Unanswered) as error:
        raise s3_error(error, config.endpoint or "s3://", "make a client") from error


def _client(config: S3Config) -> _Made:
    client = client_from(config, _settings(config))
    if _needs_signing(client.meta.endpoint_url):  # the user's AWS settings may name it, too
        client = client_from(config, _settings(config, signs=True))
    watch(client)
    refuse_strange(client)
    refresh_in_time(client, config.timeout_s)
    return _Made(client, config.client == "direct" and _goes_directly(client))


def _settings(config: S3Config, signs: bool = False) -> Any:
    from botocore.config import Config

    return Config(
        retries={"mode": "standard", "total_max_attempts": _BOTOCORE_TRIES},
        max_pool_connections=max(config.max_write_concurrency, config.max_read_concurrency) + 4,
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=config.read_timeout_s,
        tcp_keepalive=True,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        # Nothing else of its s3 section, so that the user's AWS settings hold: some stores need
        # addressing_style = virtual. Left alone, boto3 names the bucket in the path of an endpoint.
        s3={"payload_signing_enabled": signs},
    )


def _goes_directly(client: Any) -> bool:
    """Let it, if what that takes of botocore's and urllib3's private names is there."""
    differs = hand_over_pages(client) if reads_below() else "bodies of answers are built otherwise"
    if differs:
        _say_once(differs)
    return not differs


@lru_cache(maxsize=1)
def _say_once(differs: str) -> None:
    from importlib.metadata import version

    log.warning(
        "S3: botocore %s with urllib3 %s is not built as smckpt's own client needs it (%s); "
        'requests go by public methods (S3Config(client="s3transfer")): as safe, but each byte '
        "costs the processor up to twice as much",
        version("botocore"),
        version("urllib3"),
        differs,
    )


def _needs_signing(endpoint: str) -> bool:
    """Bodies are signed (at the price of a SHA-256) only where nothing else protects them: plain
    HTTP to another host. TLS does; a loopback needs none; the CRC is checked in any case."""
    where = urlsplit(endpoint)
    return where.scheme == "http" and where.hostname not in ("127.0.0.1", "localhost", "::1")
