"""Entries: what selection makes of a rank's state.

From here on FSDP1 and FSDP2 look the same. An `Entry` describes one local array, an `ObjectLeaf`
one value that is not a tensor. Here are the dtypes, too, and what NumPy makes of their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smckpt.layout.geometry import Geometry
from smckpt.layout.mesh import Shape, remembered

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class DType:
    """A torch dtype by name, its bytes per element, and safetensors' code for it.

    Where safetensors has no code the bytes are stored as U8 with one more dimension, and only the
    manifest knows the true dtype.
    """

    name: str
    itemsize: int
    code: str | None


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("float64", 8, "F64"),
        DType("float32", 4, "F32"),
        DType("float16", 2, "F16"),
        DType("bfloat16", 2, "BF16"),
        DType("float8_e4m3fn", 1, "F8_E4M3"),
        DType("float8_e5m2", 1, "F8_E5M2"),
        DType("float8_e4m3fnuz", 1, None),
        DType("float8_e5m2fnuz", 1, None),
        DType("float8_e8m0fnu", 1, None),
        DType("float4_e2m1fn_x2", 1, None),
        DType("int64", 8, "I64"),
        DType("int32", 4, "I32"),
        DType("int16", 2, "I16"),
        DType("int8", 1, "I8"),
        DType("uint64", 8, "U64"),
        DType("uint32", 4, "U32"),
        DType("uint16", 2, "U16"),
        DType("uint8", 1, "U8"),
        DType("bool", 1, "BOOL"),
        DType("complex32", 4, None),
        DType("complex64", 8, "C64"),
        DType("complex128", 16, None),
    )
}


def dotted(path: Path) -> str:
    """("optimizer", "state", 0, "exp_avg") → "optimizer.state.0.exp_avg"."""
    return ".".join(map(str, path))


@dataclass(frozen=True)
class Entry:
    """A tensor of a state: its name, the rule by which ranks hold it, and the ranks that have it.

    Args:
        path: its place in the user's nested state dict; the dotted form is the key in the shard
            file.
        dtype: a name in `DTYPES`.
        geometry: which pieces of which fqns a rank's array holds.
        before, after: the logical path of fqn `f` is `before + (f,) + after`. For
            ("optimizer", "state", 0, "exp_avg") of parameter "wte": before ("optimizer", "state"),
            after ("exp_avg",).
        ranks: the ranks that have it under this path. A live entry has this rank alone; a saved
            entry has all ranks for which the other fields are equal.
    """

    path: Path
    dtype: str
    geometry: Geometry
    before: Path
    after: Path
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.key}: dtype {self.dtype} is not supported")

    @remembered
    def key(self) -> str:
        return dotted(self.path)

    @property
    def fqns(self) -> tuple[str, ...]:
        return self.geometry.fqns

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @remembered
    def shape(self) -> Shape:
        """The local shape on the first of `ranks`. `numel` and `nbytes` are of this array too."""
        return self.geometry.local_shape(self.ranks[0])

    @remembered
    def numel(self) -> int:
        return math.prod(self.shape)

    @remembered
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    def logical_path(self, fqn: str) -> Path:
        return (*self.before, fqn, *self.after)

    def logical_name(self, fqn: str) -> str:
        return dotted(self.logical_path(fqn))


@dataclass(frozen=True)
class ObjectLeaf:
    """A subtree of the state dict without tensors, as large as possible. Each rank has its own."""

    path: Path
    value: Any

    @remembered
    def key(self) -> str:
        return dotted(self.path)


# -- stored elements as NumPy numbers, for the dtypes that NumPy can calculate with ----------------

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
