"""CRC-64/NVME. S3 computes and keeps it for an object. One core computes 9–11 GB/s. The values of
two parts can be combined."""

from __future__ import annotations

from awscrt import checksums

__all__ = ["BLOCK", "combine", "crc64", "hex64"]

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
