"""boto3 as a later version may be built: it does what it did, and nothing private bears the name it
had."""

from __future__ import annotations

import io
from typing import Any

from botocore.response import StreamingBody

__all__ = ["OtherBody"]


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
