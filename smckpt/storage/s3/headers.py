"""Refuse answers whose headers broke off.

http.client takes the end of the connection for the end of the headers, and a number of which only
the first digits arrived for the number.
"""

from __future__ import annotations

import email.errors
import functools
import http.client
from typing import Any

__all__ = ["refuse_half_headers"]

_BLANK = (b"\r\n", b"\n")
_DEFECTS = (  # a line that is no header
    email.errors.MissingHeaderBodySeparatorDefect,
    email.errors.FirstHeaderLineIsContinuationDefect,
)


class _Lines:
    """A file whose lines are headers; remembers the last one."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.last = b""

    def readline(self, limit: int = -1) -> bytes:
        self.last = self._file.readline(limit)
        return self.last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _WholeHeaders(http.client.HTTPResponse):
    """An answer that is refused unless a blank line ends its headers, and each of them is one."""

    def begin(self) -> None:
        if self.headers is not None:
            return
        fp = self.fp
        lines: Any = _Lines(fp)
        self.fp = lines
        try:
            super().begin()
        finally:
            if self.fp is lines:
                self.fp = fp
        if lines.last not in _BLANK or any(isinstance(d, _DEFECTS) for d in self.headers.defects):
            self._close_conn()
            raise http.client.RemoteDisconnected("the headers of the answer broke off")


def _whole(answer: Any) -> type:
    return type("Answer", (_WholeHeaders, answer), {})


class _Continues(http.client.HTTPConnection):
    """What botocore's connection does with an answer to `Expect: 100-continue`, mended."""

    def _handle_expect_response(self: Any, message_body: Any) -> None:
        botocores: Any = super()
        botocores._handle_expect_response(message_body)
        early = self.response_class  # botocore's own, with the status that it has read
        if isinstance(early, functools.partial):
            self.response_class = functools.partial(_whole(early.func), **early.keywords)

    def _consume_headers(self, fp: Any) -> None:
        while (line := fp.readline()) not in _BLANK:
            if not line:  # botocore would read on without end
                raise http.client.RemoteDisconnected("the answer broke off after 100 Continue")


def refuse_half_headers(client: Any) -> None:
    """Make the connections of this client refuse them. A client of another make stays as it is."""
    session = getattr(getattr(client, "_endpoint", None), "http_session", None)
    pools = getattr(session, "_pool_classes_by_scheme", {})
    for scheme, pool in list(pools.items()):
        connection = pool.ConnectionCls
        answer = connection.response_class
        if not issubclass(answer, http.client.HTTPResponse) or issubclass(answer, _WholeHeaders):
            continue
        members = {"response_class": _whole(answer)}
        checked = type("Connection", (_Continues, connection), members)
        pools[scheme] = type("Pool", (pool,), {"ConnectionCls": checked})
