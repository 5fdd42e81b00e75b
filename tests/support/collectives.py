"""Counting collectives: everything that goes through c10d's or the functional operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CollectiveCounter", "count_collectives"]


class CollectiveCounter(TorchDispatchMode):
    """A dispatch mode that counts operators of the namespaces c10d and _c10d_functional."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.calls.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def count_collectives() -> Iterator[CollectiveCounter]:
    with CollectiveCounter() as counter:
        yield counter
