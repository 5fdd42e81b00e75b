"""Count NaN and infinity among the elements that an export or import writes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from smckpt.errors import UsageError

__all__ = ["NonFinite", "refuse_nonfinite"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

# dtype → integers of its size, all bits but the sign, the least of those that is not finite
_BITS: Mapping[str, tuple[str, int, int]] = {
    "float64": ("<u8", (1 << 63) - 1, 0x7FF << 52),
    "float32": ("<u4", 0x7FFFFFFF, 0x7F800000),
    "float16": ("<u2", 0x7FFF, 0x7C00),
    "bfloat16": ("<u2", 0x7FFF, 0x7F80),
    "float8_e5m2": ("<u1", 0x7F, 0x7C),
    "float8_e4m3fn": ("<u1", 0x7F, 0x7F),
}
_AT_ONCE = 1 << 17  # elements whose intermediate arrays stay in the processor's cache


class NonFinite:
    """Counts by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def look(self, name: str, dtype: str, data: memoryview) -> None:
        if dtype not in _BITS:
            return
        code, mask, least = _BITS[dtype]
        values = np.frombuffer(data, code)
        kind = values.dtype.type
        count = 0
        for at in range(0, len(values), _AT_ONCE):
            piece = values[at : at + _AT_ONCE] & kind(mask)
            if piece.max() >= least:
                count += int((piece >= kind(least)).sum())
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
    worst = ", ".join(f"{name} ({count:,})" for name, count in list(counts.items())[:8])
    more = f" and {len(counts) - 8} more" if len(counts) > 8 else ""
    text = f"{len(counts)} tensors have NaN or infinite elements: {worst}{more}"
    if not allowed:
        raise UsageError(text, remedy=f"{remedy}, or pass allow_nonfinite=True", path=url)
    return [text]
