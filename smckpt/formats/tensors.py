"""How a translation reads stored tensors: by key, in blocks, from whatever holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Copy


class TensorKey(NamedTuple):
    """A stored tensor of one tensor-parallel rank and column of ranks (usually an expert-parallel
    rank, see `Degrees`); (-1, -1): one tensor for all ranks."""

    name: str
    tp: int = -1
    ep: int = -1


@dataclass(frozen=True)
class RankTensors:
    """The stored tensors under one name: a shape for each rank, or one for all (`whole`)."""

    name: str
    dtype: str
    shards: Mapping[tuple[int, int], Shape]
    whole: Shape | None = None

    @property
    def keyed(self) -> dict[TensorKey, Shape]:
        """The shape of each stored tensor."""
        if self.whole is not None:
            return {TensorKey(self.name): self.whole}
        return {TensorKey(self.name, *rank): shape for rank, shape in self.shards.items()}


@dataclass(frozen=True, slots=True)
class Block:
    """Elements of the stored tensor `source` that go unchanged into a target; or, with several
    buffers, those that go into buffer number `buffer`. sample: they are only looked at, so a
    checksum of more than them need not be compared."""

    source: TensorKey
    copy: Copy
    buffer: int = 0
    sample: bool = False


class Holder(Protocol):
    """The part of a reader that a proof needs."""

    @property
    def url(self) -> str: ...

    @property
    def held(self) -> Mapping[str, RankTensors]: ...


class TensorReader(Holder, Protocol):
    def plan(self, blocks: Sequence[Block]) -> Any:
        """Plan how to read the blocks. One thread calls it."""

    def read(self, plan: Any, buffers: Sequence[memoryview]) -> None:
        """Carry out a plan. Several threads may call it at once."""

    def close(self) -> None: ...
