"""Checksums with S3's names and spelling. The memory is not copied."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from smckpt.storage.s3.faults import BadBody

__all__ = ["Checksum", "kept_crc64"]

_KINDS = {"crc64nvme": ("CRC64NVME", 8), "crc32": ("CRC32", 4)}  # S3's name, bytes


class Checksum:
    """One kind of checksum, "crc64nvme", "crc32" or "none": computes values and makes the fields of
    requests."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.algorithm, self._width = _KINDS.get(kind, ("", 0))

    def __bool__(self) -> bool:
        return bool(self.algorithm)

    def of(self, data: memoryview | bytes) -> int:
        from awscrt import checksums

        return int(getattr(checksums, self.kind)(data)) if self else 0

    def combine(self, first: int, second: int, second_length: int) -> int:
        """Combine the values of two consecutive parts."""
        from awscrt import checksums

        join = getattr(checksums, f"combine_{self.kind}", None)
        return int(join(first, second, second_length)) if join else 0

    def field(self, value: int) -> dict[str, Any]:
        """The field for a request, such as {"ChecksumCRC64NVME": …}; empty for "none"."""
        text = base64.b64encode(value.to_bytes(self._width, "big")).decode() if self else ""
        return {f"Checksum{self.algorithm}": text} if self else {}


def kept_crc64(answer: Mapping[str, Any]) -> int | None:
    """The CRC-64/NVME that the store keeps for a whole object; None if it keeps none."""
    whole = answer.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
    found = answer.get("ChecksumCRC64NVME") if whole else None
    if found is None:
        return None
    try:
        return int.from_bytes(base64.b64decode(found, validate=True), "big")
    except ValueError as error:
        raise BadBody(f"the answer has the checksum {found!r}") from error
