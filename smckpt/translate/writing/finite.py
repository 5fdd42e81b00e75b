"""Count NaN and infinity among the elements that an export or import writes."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from smckpt.checkpoint.records.numbers import count_nonfinite
from smckpt.errors import UsageError

__all__ = ["NonFinite", "refuse_nonfinite"]


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
    worst = ", ".join(f"{name} ({count:,})" for name, count in list(counts.items())[:8])
    more = f" and {len(counts) - 8} more" if len(counts) > 8 else ""
    text = f"{len(counts)} tensors have NaN or infinite elements: {worst}{more}"
    if not allowed:
        raise UsageError(text, remedy=f"{remedy}, or pass allow_nonfinite=True", path=url)
    return [text]
