"""Reading boxes of logical tensors out of a checkpoint, verified, a few at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from smckpt.checkpoint.catalogue import Catalogue, LogicalTensor
from smckpt.checkpoint.plan import plan_logical
from smckpt.checkpoint.read import execute
from smckpt.errors import KeysMismatchError
from smckpt.layout.entries import DTYPES, Entry
from smckpt.translate.files import aligned
from smckpt.translate.targets import Same

__all__ = ["Source"]


class Source:
    """A catalogue as something to read from; used by several threads at once."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue

    def read(self, entries: Sequence[Entry], buffers: Sequence[memoryview]) -> None:
        """Fill `buffers[i]` with the array of `entries[i]`, every block verified.

        Raises:
            KeysMismatchError, TensorMismatchError, CorruptCheckpointError.
        """
        plan = plan_logical(self.catalogue, entries, rank=0, group_ranks=(0,), strict=False)
        if plan.missing:
            raise KeysMismatchError(
                f"not in the checkpoint: {sorted(plan.missing)[:8]}",
                remedy="this is a fault of smckpt: please report it",
                path=self.catalogue.url,
            )
        execute(plan, buffers, threads=1)

    def equal(self, a: LogicalTensor, b: LogicalTensor, length: int) -> bool:
        """Whether two tensors are bitwise equal; at most 2 × `length` bytes are held."""
        if (a.dtype, tuple(a.shape)) != (b.dtype, tuple(b.shape)):
            return False
        itemsize = DTYPES[a.dtype].itemsize
        numel, step = math.prod(a.shape), length // itemsize
        one, two = (Same(t.name, t.dtype, tuple(t.shape), t.name, t.dtype) for t in (a, b))
        left, right = aligned(step * itemsize), aligned(step * itemsize)
        for start in range(0, numel, step):
            stop = min(numel, start + step)
            views = [memory[: (stop - start) * itemsize] for memory in (left, right)]
            self.read([one.entry(start, stop), two.entry(start, stop)], views)
            if not np.array_equal(*(np.frombuffer(view, np.uint8) for view in views)):
                return False
        return True
