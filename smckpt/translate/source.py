"""Reading boxes of logical tensors out of a checkpoint, verified, a few at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from smckpt.checkpoint.catalogue import Catalogue, LogicalTensor
from smckpt.checkpoint.plan import ReadPlan, plan_logical
from smckpt.checkpoint.read import Readers, execute
from smckpt.errors import KeysMismatchError
from smckpt.layout.entries import DTYPES, Entry
from smckpt.translate.files import aligned
from smckpt.translate.targets import Chunk, Same

__all__ = ["Source"]


class Source:
    """A catalogue as something to read from; its files stay open until `close`.

    Plans are made by one thread, reads by several at once.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.url = catalogue.url
        self._readers = Readers(verify=True)

    def plans(self, batches: Sequence[Sequence[Entry]]) -> list[ReadPlan]:
        """A plan for each batch of entries, found together: names are looked up once.

        Raises:
            KeysMismatchError, TensorMismatchError, CorruptCheckpointError: some elements are not
                in the checkpoint.
        """
        entries = [entry for batch in batches for entry in batch]
        plan = plan_logical(self.catalogue, entries, rank=0, group_ranks=(0,), strict=False)
        if plan.missing:
            raise KeysMismatchError(
                f"not in the checkpoint: {sorted(plan.missing)[:8]}",
                remedy="this is a fault of smckpt: please report it",
                path=self.catalogue.url,
            )
        homes = [(number, i) for number, batch in enumerate(batches) for i in range(len(batch))]
        out = [ReadPlan() for _ in batches]
        for direct in plan.directs:
            number, target = homes[direct.target]
            out[number].directs.append(direct._replace(target=target))
        for gather in plan.gathers:
            number, target = homes[gather.target]
            out[number].gathers.append(replace(gather, target=target))
        return out

    def plans_of(self, chunks: Sequence[Chunk]) -> list[ReadPlan]:
        """A plan for each chunk; names are looked up once."""
        return self.plans([chunk.entries for chunk in chunks])

    def read(self, plan: ReadPlan, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers of a batch, every block verified.

        Raises:
            CorruptCheckpointError: a block differs; names file and offset.
        """
        execute(plan, buffers, threads=1, readers=self._readers)

    def close(self) -> None:
        self._readers.close()

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
            (plan,) = self.plans([[one.entry(start, stop), two.entry(start, stop)]])
            self.read(plan, views)
            if not np.array_equal(np.frombuffer(views[0], "u1"), np.frombuffer(views[1], "u1")):
                return False
        return True
