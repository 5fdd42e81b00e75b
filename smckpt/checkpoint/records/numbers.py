"""Stored elements as NumPy numbers, for the dtypes that NumPy can calculate with; and the count of
those that are NaN or infinite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# bfloat16 is read as its bits
CODES = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "bool": "u1",
    "int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "i1",
    "uint64": "<u8", "uint32": "<u4", "uint16": "<u2", "uint8": "u1",
}  # fmt: skip

# dtype → the integer type of its size, a mask of all bits except the sign, the smallest masked
# value that is not finite
_BITS: Mapping[str, tuple[str, int, int]] = {
    "float64": ("<u8", (1 << 63) - 1, 0x7FF << 52),
    "float32": ("<u4", 0x7FFFFFFF, 0x7F800000),
    "float16": ("<u2", 0x7FFF, 0x7C00),
    "bfloat16": ("<u2", 0x7FFF, 0x7F80),
    "float8_e5m2": ("<u1", 0x7F, 0x7C),
    "float8_e4m3fn": ("<u1", 0x7F, 0x7F),
}
HAS_NONFINITE = frozenset(_BITS)  # the dtypes whose NaN and infinite elements can be counted
_AT_ONCE = 1 << 17  # elements whose intermediate arrays stay in the processor's cache


def numbers(data: Any, dtype: str) -> Any:
    """Bytes of elements of `dtype`, a key of `CODES`, as a flat array. bfloat16 becomes float32."""
    import numpy as np

    values = np.frombuffer(data, CODES[dtype])
    if dtype == "bfloat16":
        values = (values.astype("<u4") << 16).view("<f4")
    return values


def count_nonfinite(data: Any, dtype: str) -> int:
    """How many elements of `dtype` are NaN or infinite; 0 for a dtype not in `HAS_NONFINITE`."""
    import numpy as np

    if dtype not in _BITS:
        return 0
    code, mask, least = _BITS[dtype]
    values = np.frombuffer(data, code)
    kind = values.dtype.type
    count = 0
    for at in range(0, len(values), _AT_ONCE):
        piece = values[at : at + _AT_ONCE] & kind(mask)
        if piece.max() >= least:
            count += int((piece >= kind(least)).sum())
    return count
