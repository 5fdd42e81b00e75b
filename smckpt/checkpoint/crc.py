"""CRC-64/NVME: what checks every byte of a checkpoint.

Fast (about 10 GB/s a core), composable (the checksum of a file follows from those of its blocks),
and the one that S3 computes itself.
"""

from __future__ import annotations

from typing import cast

from awscrt import checksums

__all__ = ["BLOCK", "combine", "crc64", "hex64"]

BLOCK = 1 << 20  # bytes that have a checksum of their own in a file's sidecar


def crc64(data: bytes | bytearray | memoryview, previous: int = 0) -> int:
    """Of `data`; or of what `previous` is the checksum of, followed by `data`."""
    return cast(int, checksums.crc64nvme(cast(bytes, data), previous))


def combine(first: int, second: int, second_length: int) -> int:
    """The checksum of two runs of bytes from theirs; the second has `second_length` bytes."""
    return cast(int, checksums.combine_crc64nvme(first, second, second_length))


def hex64(value: int) -> str:
    """16 lower-case hex digits."""
    return f"{value:016x}"
