"""Statistics of saved tensors, without torch. Every block is compared with its checksum."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smckpt.checkpoint.numbers import CODES, numbers

if TYPE_CHECKING:
    from smckpt.checkpoint.catalogue import Catalogue

__all__ = ["Sums", "countable", "statistics", "stretches"]

_AT_ONCE = 8 << 20  # bytes read and counted at a time


@dataclass
class Sums:
    """Sums over the finite elements so far."""

    count: int = 0
    nonfinite: int = 0
    least: float = math.inf
    most: float = -math.inf
    mean: float = 0.0
    squares: float = 0.0  # sum of the squared distances from the mean

    def add(self, values: Any) -> None:
        import numpy as np

        values = values.astype(np.float64)
        finite = values[np.isfinite(values)]
        self.nonfinite += len(values) - len(finite)
        if not len(finite):
            return
        self.least = min(self.least, float(finite.min()))
        self.most = max(self.most, float(finite.max()))
        mean, total = float(finite.mean()), self.count + len(finite)
        apart = mean - self.mean
        # Chan, Golub and LeVeque 1979: the variance of two sets joined
        self.squares += float(((finite - mean) ** 2).sum())
        self.squares += apart**2 * self.count * len(finite) / total
        self.mean += apart * len(finite) / total
        self.count = total

    def to_json(self) -> dict[str, Any]:
        if not self.count:
            return {"nonfinite": self.nonfinite}
        deviation = math.sqrt(self.squares / self.count)
        return {
            "min": self.least,
            "max": self.most,
            "mean": self.mean,
            "std": deviation,
            "nonfinite": self.nonfinite,
        }


def statistics(catalogue: Catalogue, name: str) -> dict[str, Any] | None:
    """min, max, mean, std (of the population) and the number of elements that are not finite.

    For a per-rank tensor, over all ranks. None for a dtype without NumPy arithmetic, and for a flat
    parameter of several tensors.

    Raises:
        CorruptCheckpointError: a block does not fit its checksum.
    """
    if not countable(catalogue, name):
        return None
    dtype = catalogue.logical[name].dtype
    sums = Sums()
    for data in stretches(catalogue, name):
        sums.add(numbers(data, dtype))
    return sums.to_json()


def countable(catalogue: Catalogue, name: str) -> bool:
    """Whether the tensor's elements are numbers to NumPy, and those of its rows are its own."""
    rows = catalogue.pieces.by_name[name]
    return catalogue.logical[name].dtype in CODES and all(len(row.fqns) == 1 for row, _ in rows)


def stretches(catalogue: Catalogue, name: str) -> Iterator[bytearray]:
    """The bytes of the tensor's elements, each once, in any order."""
    for row, _ in catalogue.pieces.by_name[name]:
        for holders in catalogue.holders(row):
            numel = math.prod(row.geometry.local_shape(holders[0]))
            done = 0
            for file, slot in catalogue.slots(row, holders) if numel else ():
                for start in range(max(slot.start, done), slot.stop, _AT_ONCE):
                    stop = min(start + _AT_ONCE, slot.stop)
                    offset = slot.offset + start - slot.start
                    yield catalogue.readers.of(file).read(offset, offset + stop - start)
                done = max(done, slot.stop)
