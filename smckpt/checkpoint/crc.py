"""CRC-64/NVME: what S3 computes and keeps for an object, 9–11 GB/s a core, composable."""

from __future__ import annotations

from awscrt import checksums

__all__ = ["BLOCK", "combine", "crc64", "hex64"]

BLOCK = 1 << 20  # the unit of the sidecars: a changed byte is found within one MiB


def crc64(data: bytes | memoryview, previous: int = 0) -> int:
    """CRC-64/NVME of `data`, going on from `previous`. Lets go of the GIL on long data."""
    value: int = checksums.crc64nvme(data, previous)
    return value


def combine(first: int, second: int, second_length: int) -> int:
    """The CRC of two pieces one after the other, the second `second_length` bytes long."""
    value: int = checksums.combine_crc64nvme(first, second, second_length)
    return value


def hex64(value: int) -> str:
    """16 hex digits, as the JSON files have it."""
    return f"{value:016x}"
