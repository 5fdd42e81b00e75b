"""Checksums as S3 names and spells them, over memory that is not copied."""

from __future__ import annotations

import base64
from typing import Any

__all__ = ["Checksum"]

_FIELDS = {"crc64nvme": ("CRC64NVME", 8), "crc32": ("CRC32", 4)}


class Checksum:
    """The chosen checksum, or none: values of bytes, their combination, fields of requests."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.algorithm, self._width = _FIELDS.get(kind, ("", 0))

    def __bool__(self) -> bool:
        return bool(self.algorithm)

    def of(self, data: memoryview | bytes) -> int:
        from awscrt import checksums

        if not self:
            return 0
        function = checksums.crc64nvme if self.kind == "crc64nvme" else checksums.crc32
        value: int = function(data)
        return value

    def combine(self, first: int, second: int, second_length: int) -> int:
        from awscrt import checksums

        if not self:
            return 0
        join = checksums.combine_crc64nvme
        if self.kind == "crc32":
            join = checksums.combine_crc32
        value: int = join(first, second, second_length)
        return value

    def text(self, value: int) -> str:
        return base64.b64encode(value.to_bytes(self._width, "big")).decode()

    def field(self, value: int) -> dict[str, str]:
        """{"ChecksumCRC64NVME": …}, or nothing."""
        return {f"Checksum{self.algorithm}": self.text(value)} if self else {}

    def stored(self, answer: dict[str, Any]) -> str | None:
        """What the store keeps for a whole object, if it says."""
        if answer.get("ChecksumType", "FULL_OBJECT") != "FULL_OBJECT":
            return None
        found: str | None = answer.get(f"Checksum{self.algorithm}")
        return found

    def stored_value(self, answer: dict[str, Any]) -> int | None:
        """The same as a number."""
        found = self.stored(answer)
        return None if found is None else int.from_bytes(base64.b64decode(found), "big")
