"""CRC-64/NVME. S3 computes and keeps it for an object. One core computes 9–11 GB/s. The values of
two parts can be combined."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from awscrt import checksums

BLOCK = 1 << 20  # bytes that one checksum covers, so a changed byte is found within one MiB


def crc64(data: bytes | memoryview, previous: int = 0) -> int:
    """CRC-64/NVME of `data` after bytes whose value is `previous`. Releases the GIL on long
    data."""
    value: int = checksums.crc64nvme(data, previous)
    return value


def combine(first: int, second: int, second_length: int) -> int:
    """The CRC of two consecutive pieces. The second has `second_length` bytes."""
    value: int = checksums.combine_crc64nvme(first, second, second_length)
    return value


def hex64(value: int) -> str:
    """16 hex digits, as in the JSON files."""
    return f"{value:016x}"


def combined(sums: Sequence[int], size: int) -> int:
    """The checksum of a file of `size` bytes from those of its blocks."""
    whole = 0
    for block, value in enumerate(sums):
        whole = combine(whole, value, max(min(BLOCK, size - block * BLOCK), 0))
    return whole


def packed_sums(sums: Sequence[int]) -> bytes:
    """The bytes of a file of checksums."""
    return struct.pack(f"<{len(sums)}Q", *sums)


def unpacked_sums(data: bytes) -> tuple[int, ...]:
    """The checksums in a file of them; an incomplete last one is left out."""
    return struct.unpack(f"<{len(data) // 8}Q", data[: len(data) // 8 * 8])
