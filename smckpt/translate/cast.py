"""Casts between floating dtypes, exact to the bit, on NumPy arrays that may hold bfloat16 bits.

NumPy has no bfloat16, so such values are held as `uint16`. Every cast rounds once, to nearest, ties
to even. NaNs stay NaNs with their sign. A finite value that would become infinity is an error,
because it would silently ruin a model.

Count NaN and infinity among the elements that an export or import writes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from smckpt.errors import UsageError, few
from smckpt.layout.entries import count_nonfinite

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

# torch's name → the NumPy type that holds an element's bits
CASTABLE: dict[str, str] = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}


def stored_type(dtype: str) -> np.dtype[Any]:
    """The NumPy dtype in which `cast` takes and gives values of `dtype`, a key of `CASTABLE`."""
    return np.dtype(CASTABLE[dtype])


def cast(values: Array, source: str, target: str) -> Array:
    """`values` of dtype `source`, rounded to dtype `target` (keys of `CASTABLE`).

    Raises:
        OverflowError: a finite value is beyond the target's range.
    """
    if source == target:
        return values
    wide = values
    if source == "bfloat16":
        wide = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    out: Array
    if target == "bfloat16":
        out = _to_bfloat16(wide)
        infinite = (out & np.uint16(0x7FFF)) == np.uint16(0x7F80)
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            out = wide.astype(stored_type(target))
        infinite = np.isinf(out)
    if infinite.any():
        lost = infinite & ~np.isinf(wide)
        if lost.any():
            raise OverflowError(f"{wide[lost].ravel()[0]} is outside the range of {target}")
    return out


def _to_bfloat16(values: Array) -> Array:
    if values.dtype.itemsize == 8:
        # float64 to float32, with inexact results rounded to the odd neighbour, so that the next
        # rounding is exact: rounding to nearest twice can fall on the wrong side of a tie
        with np.errstate(over="ignore", invalid="ignore"):
            nearest = values.astype(np.float32)
            back = nearest.astype(np.float64)
            inexact = (back != values) & ~np.isnan(values)
            even = (nearest.view(np.uint32) & np.uint32(1)) == 0
            toward = np.where(values > back, np.float32(np.inf), np.float32(-np.inf))
            other = np.nextafter(nearest, toward)
        values = np.where(inexact & even, other, nearest)
    single = np.ascontiguousarray(values, np.float32)
    bits = single.view(np.uint32)
    # Half of the last kept place, minus one if that place is even, so that a tie rounds down.
    work = bits >> np.uint32(16)
    work &= np.uint32(1)
    work += np.uint32(0x7FFF)
    work += bits
    work >>= np.uint32(16)
    out: Array = work.astype(np.uint16)
    nan = np.isnan(single)
    if nan.any():  # a NaN whose payload is cut off must not become infinity
        out[nan] = (bits[nan] >> np.uint32(16)) | np.uint32(0x0040)
    return out


class NonFinite:
    """Counts by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def look(self, name: str, dtype: str, data: memoryview) -> None:
        count = count_nonfinite(data, dtype)
        if count:
            with self._lock:
                self._counts[name] = self._counts.get(name, 0) + count

    @property
    def counts(self) -> dict[str, int]:
        return dict(sorted(self._counts.items()))


def refuse_nonfinite(counts: Mapping[str, int], allowed: bool, url: str, remedy: str) -> list[str]:
    """The notes for the report.

    Raises:
        UsageError: there are some, and they are not `allowed`.
    """
    if not counts:
        return []
    worst = few([f"{name} ({count:,})" for name, count in counts.items()])
    text = f"{len(counts)} tensors have NaN or infinite elements: {worst}"
    if not allowed:
        raise UsageError(
            text, remedy=f"{remedy}, or pass options with allow_nonfinite=True", path=url
        )
    return [text]
