"""Sending a body over plain HTTP without a copy: the kernel takes the caller's pages themselves.

`vmsplice` puts them into a pipe, `splice` moves them on into the socket; `sendall` would copy them
to the kernel first. TLS has to encrypt what it sends, so there is nothing to be gained there.

A connection refers to the pages until the far end has acknowledged them. After a try that failed it
may therefore go on to send what is in that memory by then. So pages are only handed over where the
request names the checksum of its body: a store that gets other bytes refuses them.

What a page costs depends on how many are on their way: the kernel keeps a record of each, and with
a few MiB a connection these leave the caches before the far end has taken the bytes. A near far end
needs no more than `_NEAR_BUFFER`; it halves the kernel's part (docs/benchmarks-s3.md).
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import socket
import struct
import sys
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

__all__ = ["hand_over_pages"]

_LEAST = 256 << 10  # bytes for which it is worth while
_PIPE = 1 << 20  # bytes; the most that Linux gives to everyone
_BLOCK = 8 << 20  # bytes that a body is asked for at once
_CHECKSUM = "x-amz-checksum-"
_NEAR = 500  # microseconds there and back
_NEAR_BUFFER = 384 << 10  # bytes; Linux doubles it: 1.5 GB/s for each connection where it is least
_TCP_INFO, _LEAST_RTT = 11, 148  # linux/tcp.h: the socket option, and where tcpi_min_rtt stands

log = logging.getLogger("smckpt")


def hand_over_pages(client: Any) -> str:
    """Let a boto3 client send memory that way, where the system can.

    Returns:
        What differs, where botocore is not as we know it, and the client as it was; else "". What
        is changed is private to it.
    """
    if not _works():
        return ""
    try:
        pools = client._endpoint.http_session._pool_classes_by_scheme
        own = _pool_class()
        if not issubclass(own, pools["http"]):
            return f"plain HTTP is spoken by {pools['http']!r}"
        pools["http"] = own
    except (AttributeError, ImportError, KeyError, TypeError) as error:
        return str(error)
    return ""


@lru_cache(maxsize=1)
def _pool_class() -> Any:
    from botocore.awsrequest import AWSHTTPConnection, AWSHTTPConnectionPool

    class Connection(AWSHTTPConnection):  # type: ignore[misc]
        """Hands the pages of large memoryviews over, if the request names their checksum."""

        _pipe: _Pipe | None = None
        _checked = False

        def request(
            self,
            method: str,
            url: str,
            body: Any = None,
            headers: Any = None,
            *args: Any,
            **kw: Any,
        ) -> Any:
            self._checked = _names_checksum(headers or {})
            if self._checked:
                self.blocksize = _BLOCK
            return super().request(method, url, body, headers, *args, **kw)

        def send(self, data: Any) -> None:
            large = isinstance(data, memoryview) and data.nbytes >= _LEAST
            # Whose request is refused before its body must not send it: botocore sees to that.
            refused = getattr(self, "_response_received", True)
            if not (self._checked and large) or refused:
                super().send(data)
                return
            if self._pipe is None:
                self._pipe = _Pipe()
                _keep_short(self.sock)
            try:
                self._pipe.send(data, self.sock)
            except BaseException:
                self._drop_pipe()  # with what is left in it
                raise

        def close(self) -> None:
            self._drop_pipe()
            super().close()

        def _drop_pipe(self) -> None:
            pipe, self._pipe = self._pipe, None
            if pipe is not None:
                pipe.close()

    class Pool(AWSHTTPConnectionPool):  # type: ignore[misc]
        ConnectionCls = Connection

    return Pool


def _names_checksum(headers: Mapping[Any, Any]) -> bool:
    names = (name.decode() if isinstance(name, bytes) else name for name in headers)
    return any(name.lower().startswith(_CHECKSUM) for name in names)


class _Pipe:
    """A pipe that is empty between two calls."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        try:
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, _PIPE)
        except OSError as error:  # this user has too many: it keeps its first size
            log.debug("a pipe stays small: %s", error)

    def send(self, data: memoryview, sock: Any) -> None:
        """All of `data`; each MiB within the socket's timeout, as `sendall` has it."""
        import numpy

        address = numpy.frombuffer(data, numpy.uint8).__array_interface__["data"][0]
        give, move, out, to = _vmsplice(), os.splice, self._out, sock.fileno()
        pages = _Pages()
        given = ctypes.byref(pages)
        ends = address + data.nbytes
        while address < ends:
            pages.base, pages.length = address, min(_PIPE, ends - address)
            left = give(self._in, given, 1, 0)
            if left < 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
            address += left
            since = None
            while left:
                try:
                    left -= move(out, to, left)
                except BlockingIOError:
                    since = _wait_for_room(sock, since)

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)


def _keep_short(sock: Any) -> None:
    """Let little be on its way to a near far end. The system sizes a buffer for any distance."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _LEAST_RTT + 4)
        if len(info) == _LEAST_RTT + 4 and 0 < _microseconds(info) <= _NEAR:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _NEAR_BUFFER)
    except OSError as error:
        log.debug("a send buffer keeps its size: %s", error)


def _microseconds(info: bytes) -> int:
    (least,) = struct.unpack_from("=I", info, _LEAST_RTT)
    return int(least)


def _wait_for_room(sock: Any, since: float | None) -> float:
    """Wait until the socket takes more. Its timeout counts from `since`, or from now on; gives
    back which."""
    from urllib3.util import wait_for_write

    now = time.monotonic()
    since = now if since is None else since
    timeout = sock.gettimeout()
    rest = None if timeout is None else since + timeout - now
    if (rest is not None and rest <= 0) or not wait_for_write(sock, rest):
        raise TimeoutError("timed out")
    return since


class _Pages(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@lru_cache(maxsize=1)
def _vmsplice() -> Any:
    call = ctypes.CDLL(None, use_errno=True).vmsplice
    call.argtypes = (ctypes.c_int, ctypes.POINTER(_Pages), ctypes.c_ulong, ctypes.c_uint)
    call.restype = ctypes.c_ssize_t
    return call


@lru_cache(maxsize=1)
def _works() -> bool:
    """Whether a byte comes through. A sandbox may lack these calls."""
    if not sys.platform.startswith("linux"):
        return False
    here, there = socket.socketpair()
    with here, there:
        try:
            pipe = _Pipe()
            try:
                pipe.send(memoryview(b"x"), here)
            finally:
                pipe.close()
            return there.recv(1) == b"x"
        except (AttributeError, OSError) as error:
            log.debug("bodies are copied on their way: %s", error)
            return False
