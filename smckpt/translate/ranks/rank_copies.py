"""Finds ranks that hold the same: one rank's file copied as another's. Names, shapes and the proof
of a translation do not show it, and the model would have one part twice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from smckpt.errors import UsageError
from smckpt.layout.entries import DTYPES
from smckpt.translate.ranks.translated import Translated, TranslatedSource, whole
from smckpt.translate.sources.rank_files import TensorReader
from smckpt.translate.tables.degrees import Degrees
from smckpt.translate.tables.pieces import TensorKey
from smckpt.translate.writing.stream import CHUNK, read_elements

__all__ = ["EQUAL_EXPERTS", "refuse_equal_ranks"]

_COMPARED = 64 << 10  # bytes of a tensor that are read before all of it
EQUAL_EXPERTS = (
    "if the ranks' experts are equal because all were made from one (upcycled), pass "
    "allow_equal_ranks=True (--allow-equal-ranks)"
)


@dataclass(frozen=True)
class _Rank:
    """A rank of a stage. parts: what tells it from the others of its stage."""

    number: int
    stage: int
    parts: tuple[int, ...]
    tensors: Mapping[str, Translated]


def refuse_equal_ranks(
    stages: Sequence[TensorReader], degrees: Degrees, names: Sequence[str] = ()
) -> None:
    """Compare the ranks of all pipeline stages, as far as they hold tensors of the same names and
    shapes. Most differ in the first bytes of their largest tensor.

    Args:
        names: the ranks' files, tensor-parallel ranks innermost.

    Raises:
        UsageError: all tensors of two ranks are equal.
    """
    if any(held.whole is not None for stage in stages for held in stage.held.values()):
        return  # what is cut is distributed; each rank has copies of the rest
    alike: dict[object, list[_Rank]] = {}
    for rank in _ranks(stages, degrees):
        shapes = frozenset((n, t.dtype, tuple(t.shape)) for n, t in rank.tensors.items())
        alike.setdefault(shapes, []).append(rank)
    sources = [TranslatedSource(stage) for stage in stages]
    for group in alike.values():
        # parts of several ranks each whose tensors all begin alike
        largest = sorted(group[0].tensors, key=lambda n: (-math.prod(group[0].tensors[n].shape), n))
        parts = [list(group)]
        for name in largest:
            apart: list[list[_Rank]] = []
            for part in parts:
                by_bytes: dict[bytes, list[_Rank]] = {}
                for rank in part:
                    begins = _elements(sources[rank.stage], rank.tensors[name], 0, _COMPARED)
                    by_bytes.setdefault(begins, []).append(rank)
                apart += [ranks for ranks in by_bytes.values() if len(ranks) > 1]
            if not (parts := apart):
                break
        for first, *others in parts:
            for other in others:
                if (first.stage, first.parts) != (other.stage, other.parts):
                    _refuse_equal(sources, first, other, names, stages[other.stage].url)


def _ranks(stages: Sequence[TensorReader], degrees: Degrees) -> Iterable[_Rank]:
    for number, stage in enumerate(stages):
        for coordinates in sorted({p for held in stage.held.values() for p in held.shards}):
            tensors = {
                name: whole(TensorKey(name, *coordinates), held.shards[coordinates], held.dtype)
                for name, held in stage.held.items()
                if coordinates in held.shards and 0 not in held.shards[coordinates]
            }
            at = number * degrees.ranks + coordinates[1] * degrees.tp + coordinates[0]
            yield _Rank(at, number, (coordinates[0], *degrees.of_expert(*coordinates)), tensors)


def _elements(source: TranslatedSource, tensor: Translated, start: int, most: int) -> bytes:
    """At most so many bytes, from an element on."""
    count = max(1, most // DTYPES[tensor.source_dtype].itemsize)
    stop = min(math.prod(tensor.shape), start + count)
    return bytes(read_elements(source, tensor, start, stop))


def _refuse_equal(
    sources: Sequence[TranslatedSource], one: _Rank, two: _Rank, names: Sequence[str], url: str
) -> None:
    for name, tensor in one.tensors.items():
        step = CHUNK // DTYPES[tensor.source_dtype].itemsize
        for start in range(0, math.prod(tensor.shape), step):
            if _elements(sources[one.stage], tensor, start, CHUNK) != _elements(
                sources[two.stage], two.tensors[name], start, CHUNK
            ):
                return
    first, second = (names[rank.number] if names else f"rank {rank.number}" for rank in (one, two))
    experts = one.stage == two.stage and one.parts[0] == two.parts[0]
    raise UsageError(
        f"all tensors of {second} are those of {first}, so it is a copy of another rank's",
        remedy="fetch each rank's own file, or save each rank's own part"
        + (f"; {EQUAL_EXPERTS}" if experts else ""),
        path=url,
    )
