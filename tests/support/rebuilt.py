"""boto3 as a later version may be built: it does what it did, and nothing private bears the name it
had."""

from __future__ import annotations

import io
from typing import Any

from botocore.response import StreamingBody

__all__ = ["OtherBody", "client_with_another_session"]


def client_with_another_session(**settings: Any) -> Any:
    """A factory of clients whose connections are made elsewhere."""
    import boto3

    client = boto3.Session().client("s3", **settings)
    client._endpoint.http_session = _OtherSession(client._endpoint.http_session)
    return client


class _OtherSession:
    """What botocore asks of a session, and no more."""

    def __init__(self, real: Any) -> None:
        self.send, self.close = real.send, real.close


class OtherBody(io.RawIOBase):
    """A StreamingBody that keeps what lies below it under another name."""

    def __init__(self, raw: Any, length: Any) -> None:
        self._below = StreamingBody(raw, length)

    def readable(self) -> bool:
        return True

    def read(self, amount: int | None = None) -> bytes:  # type: ignore[override]
        return self._below.read(amount)

    def readinto(self, buffer: Any) -> int:
        return self._below.readinto(buffer)

    def close(self) -> None:
        self._below.close()

    def __del__(self) -> None:
        """As StreamingBody: what lies below may have another body by now."""
