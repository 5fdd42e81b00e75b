"""Stored elements as NumPy numbers, for the dtypes that NumPy can calculate with."""

from __future__ import annotations

from typing import Any

__all__ = ["CODES", "numbers"]

# bfloat16 is read as its bits
CODES = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "bool": "u1",
    "int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "i1",
    "uint64": "<u8", "uint32": "<u4", "uint16": "<u2", "uint8": "u1",
}  # fmt: skip


def numbers(data: Any, dtype: str) -> Any:
    """Bytes of elements of `dtype`, a key of `CODES`, as a flat array. bfloat16 becomes float32."""
    import numpy as np

    values = np.frombuffer(data, CODES[dtype])
    if dtype == "bfloat16":
        values = (values.astype("<u4") << 16).view("<f4")
    return values
