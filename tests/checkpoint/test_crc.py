"""The checksum is CRC-64/NVME, and composes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smckpt.checkpoint.records.crc import BLOCK, combine, crc64, hex64


def slow_crc64_nvme(data: bytes) -> int:
    """From the definition: reflected, polynomial AD93D23594C93659, inverted in and out."""
    polynomial = int(f"{0xAD93D23594C93659:064b}"[::-1], 2)
    crc = (1 << 64) - 1
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (polynomial if crc & 1 else 0)
    return crc ^ ((1 << 64) - 1)


def test_the_check_value_is_that_of_the_nvme_specification():
    assert hex64(crc64(b"123456789")) == "ae8b14860a799888"


@given(st.binary(max_size=200))
def test_it_agrees_with_the_definition(data):
    assert crc64(data) == slow_crc64_nvme(data) == crc64(memoryview(data))


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_a_checksum_is_continued_and_combined(first, second):
    whole = crc64(first + second)
    assert crc64(second, crc64(first)) == whole
    assert combine(crc64(first), crc64(second), len(second)) == whole


def test_a_file_s_checksum_follows_from_its_blocks():
    data = bytes(range(256)) * (BLOCK // 100)
    total = 0
    for at in range(0, len(data), BLOCK):
        block = data[at : at + BLOCK]
        total = combine(total, crc64(block), len(block))
    assert total == crc64(data)


def test_hex_has_sixteen_digits():
    assert hex64(1) == "0000000000000001"
