"""Requests to a bucket: the client of this process, and the only place that retries requests.

A job may run longer than its credentials last. Those of boto3's chain refresh themselves. Those
from a rewritten file, or from a function that assumes a role once, do not. So when the store says
that credentials have expired, a new client is made.
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

from smckpt.storage.budget import Share
from smckpt.storage.s3.bodies import in_time
from smckpt.storage.s3.client import make_client
from smckpt.storage.s3.config import StoreOptions
from smckpt.storage.s3.faults import (
    Unanswered,
    failed_there,
    is_transient,
    lacks_credentials,
    s3_error,
)
from smckpt.storage.s3.pace import PacedClient, pace_of

__all__ = ["Requests"]

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
