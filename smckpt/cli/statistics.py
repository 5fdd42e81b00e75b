"""Statistics of saved tensors, without torch. Every block is compared with its checksum."""

from __future__ import annotations

import bisect
import functools
import math
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smckpt.checkpoint.reading.blocks import SavedFile
from smckpt.checkpoint.upkeep.scan import ScannedFile, ScannedPiece, Sink, WantedBytes, scan
from smckpt.errors import CheckpointError
from smckpt.layout.entries import CODES, numbers

if TYPE_CHECKING:
    from smckpt.checkpoint.reading.committed import CommittedCatalogue


@dataclass
class Sums:
    """Sums over the finite elements so far."""

    count: int = 0
    nonfinite: int = 0
    least: float = math.inf
    most: float = -math.inf
    mean: float = 0.0
    squares: float = 0.0  # sum of the squared distances from the mean

    zeros: int = 0

    @classmethod
    def of(cls, values: Any) -> Sums:
        import numpy as np

        values = values.astype(np.float64)
        finite = values[np.isfinite(values)]
        sums = cls(len(finite), len(values) - len(finite), zeros=int((values == 0).sum()))
        if len(finite):
            sums.least, sums.most = float(finite.min()), float(finite.max())
            sums.mean = float(finite.mean())
            sums.squares = float(((finite - sums.mean) ** 2).sum())
        return sums

    def __add__(self, other: Sums) -> Sums:
        total, apart = self.count + other.count, other.mean - self.mean
        share = other.count / total if total else 0.0
        # Chan, Golub and LeVeque 1979: the variance of two sets joined
        return Sums(
            total, self.nonfinite + other.nonfinite,
            min(self.least, other.least), max(self.most, other.most),
            self.mean + apart * share,
            self.squares + other.squares + apart**2 * self.count * share,
            self.zeros + other.zeros,
        )  # fmt: skip

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


class Elements(Sink):
    """Gives the stored elements of tensors to `add`, each once. Of a per-rank tensor: those of all
    ranks.

    faults: a tensor's name → why its elements are not all known. Tensors of a dtype without NumPy
        arithmetic, and flat parameters of several tensors, are not in `names`.
    """

    def __init__(self, catalogue: CommittedCatalogue, names: Iterable[str]) -> None:
        self.catalogue = catalogue
        self.faults: dict[str, CheckpointError] = {}
        self.names = [
            name
            for name in names
            if catalogue.logical[name].dtype in CODES
            and all(len(row.fqns) == 1 for row, _ in catalogue.pieces.by_name[name])
        ]
        self._spans: dict[SavedFile, list[tuple[int, int, str]]] = {}
        for name in self.names:
            try:
                for file, low, high in _spans(catalogue, name):
                    self._spans.setdefault(file, []).append((high, low, name))
            except CheckpointError as error:
                self.faults[name] = error
        for spans in self._spans.values():
            spans.sort()

    def add(self, name: str, at: tuple[str, int], values: Any) -> None:
        """Take elements that are stored from `at` on, as NumPy numbers; by several threads."""
        raise NotImplementedError

    def begin(self, file: ScannedFile) -> WantedBytes | None:
        spans = self._spans.get(file.saved, ())
        return WantedBytes([(low, high) for high, low, _ in spans]) if spans else None

    def take(self, piece: ScannedPiece) -> None:
        spans, stop = self._spans[piece.file.saved], piece.low + len(piece)
        for high, low, name in spans[bisect.bisect_right(spans, (piece.low, stop, "")) :]:
            if low >= stop:
                break
            start = max(low, piece.low)
            try:
                data = piece.part(start, min(high, stop))
            except CheckpointError as error:
                self.faults.setdefault(name, error)
                continue
            dtype = self.catalogue.logical[name].dtype
            self.add(name, (piece.file.path, start), numbers(data, dtype))


def _spans(catalogue: CommittedCatalogue, name: str) -> Iterator[tuple[SavedFile, int, int]]:
    """Where the tensor's elements are in files, each once.

    Raises:
        CorruptCheckpointError: a header is damaged.
    """
    for row, _ in catalogue.pieces.by_name[name]:
        for holders in catalogue.pieces.holders(row).values():
            done = 0
            numel = math.prod(row.geometry.local_shape(holders[0]))
            for file, slot in catalogue.slots(row, holders) if numel else ():
                start = max(slot.start, done)
                if start < slot.stop:
                    yield file, slot.offset + start - slot.start, slot.offset + slot.nbytes
                done = max(done, slot.stop)


class Statistics(Elements):
    """Sums over the elements of each tensor, and up to `keep` bytes of elements of whole tensors.

    kept: a tensor's name → its elements.
    """

    def __init__(self, catalogue: CommittedCatalogue, names: Iterable[str], keep: int = 0) -> None:
        super().__init__(catalogue, names)
        self.kept: dict[str, list[Any]] = {name: [] for name in self.names if keep}
        self._room = keep
        self._lock = threading.Lock()
        self._sums: dict[str, dict[tuple[str, int], Sums]] = {name: {} for name in self.names}

    def add(self, name: str, at: tuple[str, int], values: Any) -> None:
        self._sums[name][at] = Sums.of(values)
        with self._lock:
            if name not in self.kept:
                return
            if values.nbytes <= self._room:
                self._room -= values.nbytes
                self.kept[name].append(values.copy())
            else:
                self._room += sum(each.nbytes for each in self.kept.pop(name))

    def of(self, name: str) -> Sums | None:
        """Of one tensor; None for one that is not counted. Whatever thread was first, the same.

        Raises:
            CheckpointError: not all of its elements are known.
        """
        if name in self.faults:
            raise self.faults[name]
        if name not in self._sums:
            return None
        return functools.reduce(
            Sums.__add__, (s for _, s in sorted(self._sums[name].items())), Sums()
        )


def statistics(
    catalogue: CommittedCatalogue, names: Iterable[str]
) -> dict[str, dict[str, Any] | None]:
    """min, max, mean, std (of the population) and the number of elements that are not finite, of
    each tensor; None for one that is not counted (see `Elements`).

    Raises:
        CorruptCheckpointError: a block does not fit its checksum.
    """
    names = [*names]
    sink = Statistics(catalogue, names)
    scan(catalogue.files, [sink])
    found = {name: sink.of(name) for name in names}
    return {name: None if sums is None else sums.to_json() for name, sums in found.items()}
