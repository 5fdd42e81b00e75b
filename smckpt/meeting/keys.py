"""Keys of the job's c10d store, under a prefix.

A client belongs to one thread: a wait on a shared one blocks its other users.

Messages under them are frozen dataclasses, written as JSON text; `decode` reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, Protocol

from smckpt.calls import started
from smckpt.errors import JobStoreError, PeerError

log = logging.getLogger("smckpt")

BATCH = 64  # values that two requests read, if so many are set
_CONNECT_SECONDS = 30.0
_LOOK_SECONDS = 5.0  # a look costs the host a connection
_CUT_SECONDS = 60  # for which the host of the store may be out of reach


class Store(Protocol):
    """The methods of a c10d store that this module uses."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def add(self, key: str, amount: int) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...
    def clone(self) -> Store: ...


class Keys:
    """JSON values under a prefix of a store. Every method raises `JobStoreError` where the store
    no longer answers, and `PeerError` where a value is not JSON. A wait that runs out
    returns None."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def sub(self, name: str) -> Keys:
        return Keys(self._store, f"{self._prefix}/{name}")

    def over(self, store: Store) -> Keys:
        """The same keys over another client."""
        return Keys(store, self._prefix)

    def set(self, key: str, value: Any) -> None:
        _asked(self._store.set, self._at(key), to_text(value))

    def peek(self, key: str) -> Any:
        """The value, or None if it is not set yet."""
        if not _asked(self._store.check, [self._at(key)]):
            return None
        return _value(_asked(self._store.get, self._at(key)), key)

    def peek_all(self, keys: Sequence[str]) -> list[Any]:
        """The values of all these keys; an empty list if one of them is not set yet."""
        at = [self._at(key) for key in keys]
        if not _asked(self._store.check, at):
            return []
        found = _asked(self._store.multi_get, at)
        return [_value(value, key) for value, key in zip(found, keys, strict=True)]

    def peek_each(self, members: Iterable[int], key: Callable[[int], str]) -> list[tuple[int, Any]]:
        """The members whose keys are set, each with the value."""
        out, left = [], list(members)
        while left:
            some, left = left[:BATCH], left[BATCH:]
            found = self.peek_all(list(map(key, some))) or [self.peek(key(m)) for m in some]
            out += [(m, value) for m, value in zip(some, found, strict=True) if value is not None]
        return out

    def wait(self, key: str, seconds: float) -> Any:
        """The value, or None if it was not set in time."""
        try:
            self._store.wait([self._at(key)], timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError as error:  # DistStoreError and DistNetworkError are RuntimeErrors
            text = str(error).lower()
            if "timeout" in text or "timed out" in text:
                return None
            raise _gone(error) from error
        return _value(_asked(self._store.get, self._at(key)), key)

    def first(self, key: str, value: Any) -> Any:
        """Set a write-once value; returns the value that came first, this one or another's."""
        stands = _asked(self._store.compare_set, self._at(key), "", to_text(value))
        return _value(stands, key)

    def count(self, key: str) -> int:
        """Count a call. Returns the number of calls so far, this one included."""
        return int(_asked(self._store.add, self._at(key), 1))

    def drop(self, keys: Sequence[str]) -> None:
        """Delete them. A failure is logged and not raised: nobody waits for these keys any more."""
        try:
            for key in keys:
                self._store.delete_key(self._at(key))
        except RuntimeError as error:  # a store that cannot delete, or that is gone
            log.debug("keys below %s stay in the store: %s", self._prefix, error)

    def _at(self, key: str) -> str:
        return f"{self._prefix}/{key}"


class Clients:
    """This process's connections to a job's store: one for each thread, since a wait on a shared
    one blocks its other users, and one on which nobody waits.

    At each connection c10d looks up the name of the other side, also in the one thread that serves
    all ranks: where a resolver drops one packet, all of them wait 5 s. So there are few.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.spare: Store | None = None  # the one on which nobody waits, once it is made
        self.absent = set[str]()  # names of peers for which a wait was in vain
        self._lock = threading.Lock()
        self._own = threading.local()  # a thread's connection is closed when it ends

    def own(self) -> Store:
        """This thread's connection. Raises what `client_of` raises."""
        made: Store | None = getattr(self._own, "made", None)
        if made is None:
            try:
                made = client_of(self.store, self.unused())
            except JobStoreError:  # that one alone may be cut
                with self._lock:
                    self.spare = None
                made = client_of(self.store, self.unused())
            self._own.made = made
        return made

    def unused(self) -> Store:
        """The connection on which nobody waits. Raises what `client_of` raises."""
        with self._lock:
            if self.spare is None:
                self.spare = client_of(self.store)
            return self.spare


def client_of(store: Store, beside: Store | None = None) -> Store:
    """A connection of its own to the same store.

    Args:
        beside: a connection of this process on which nobody waits, if there is one.

    Raises:
        JobStoreError: at once if the process that hosts the store has ended, and soon if its host
            is out of reach. torch itself would try to connect for minutes.
    """
    if beside is None:
        _refuse_ended(store)
    else:
        _asked(beside.check, ["smckpt"])  # costs no further connection
    before = _sockets()
    client: Store = _asked(_cloned, store)
    for fd in _sockets() - before:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as made:
            if made.type == socket.SOCK_STREAM and made.family != socket.AF_UNIX:
                _give_up_when_cut(made)
    return client


def _cloned(store: Store) -> Store:
    """`store.clone()`, for as long as its host is there: if that ends now, torch tries on for as
    long as the store's timeout, 30 minutes as a rule."""
    made: Future[Store] = Future()

    def clone() -> None:
        try:
            made.set_result(store.clone())
        except BaseException as error:
            made.set_exception(error)

    if not started(threading.Thread(target=clone, name="smckpt-store", daemon=True)):
        clone()
    while not wait([made], _LOOK_SECONDS).done:
        _refuse_ended(store)
    return made.result()


def _sockets() -> set[int]:
    """The sockets of this process. c10d does not say which of them is a client's."""
    found = set[int]()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    found.add(int(name))
    return found


def _give_up_when_cut(made: socket.socket) -> None:
    """Let the kernel end a connection whose other side it does not reach any more. c10d waits for
    an answer without a limit, so a rank would hang while the link is cut."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _CUT_SECONDS // 4),
        (socket.TCP_KEEPINTVL, _CUT_SECONDS // 4),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, _CUT_SECONDS * 1000),  # of what was sent: ms
    ):
        made.setsockopt(socket.IPPROTO_TCP, option, value)


def _refuse_ended(store: Any) -> None:
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if not host or not port:
        return
    until = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            return socket.create_connection((host, port), _CONNECT_SECONDS).close()
        except ConnectionRefusedError as error:
            raise _gone(RuntimeError(f"{host}:{port} refuses connections")) from error
        except socket.gaierror as error:  # a name that torch may find otherwise
            return log.debug("the job's store at %s:%s is not found: %s", host, port, error)
        except OSError as error:  # its host is busy, or the link is cut
            if time.monotonic() >= until:
                raise _gone(RuntimeError(f"{host}:{port} is not reached: {error}")) from error
            time.sleep(1)


def _value(text: bytes, key: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PeerError(
            f"the value under {key} in the job's store cannot be decoded: {error}",
            remedy="all ranks must run one version of smckpt, and no other program write there",
        ) from error


def _asked(ask: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return ask(*arguments)
    except RuntimeError as error:
        raise _gone(error) from error


def _gone(error: RuntimeError) -> JobStoreError:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return JobStoreError(
        f"the job's c10d store no longer answers: {text}",
        remedy="the process that hosts the store (rank 0 or the torchrun agent) is gone, or no "
        "link leads to its host; look at its log and restart the job",
    )


def to_text(message: Any) -> str:
    """A message, or JSON data with messages in it, as compact JSON."""
    return json.dumps(message, separators=(",", ":"), default=_fields)


def _fields(message: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(message):
        raise TypeError(f"a {type(message).__name__} is not a message")
    return {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
