"""Sends a model's tensors from all ranks to rank 0, one after the other.

In one round every rank brings the metadata of its arrays, and rank 0 decides what to send or
refuses. The arrays follow in that order (`Wire`), point to point, so wrappers, meshes and degrees
make no difference. A rank that fails goes on sending and receiving bytes, which nobody uses, until
all ranks `settle`. So nobody waits for it, and all raise its error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from smckpt.errors import CheckpointError, as_checkpoint_error
from smckpt.layout.entries import DTYPES
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Piece, execute, meet
from smckpt.state_dict.select import Selector
from smckpt.state_dict.views import ModelView

_PIECE = 16 << 20  # bytes in one message

T = TypeVar("T")


@dataclass(frozen=True)
class ArrayMetadata:
    """A rank's array under one name.

    shape: of the whole tensor. numel: of the array. ranks: those that share the tensor. dims: name,
    size and this rank's index of each dimension of the mesh that cuts it.
    """

    dtype: str
    shape: Shape
    numel: int
    pieces: tuple[Piece, ...]
    ranks: tuple[int, ...]
    dims: tuple[tuple[str, int, int], ...]
    device: str

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Array:
    tensor: torch.Tensor
    metadata: ArrayMetadata


def own_rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if gathers() else 0


def in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its elements in row-major order, as they are sent, and as they are: one may
    only be marked as conjugated or negated."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def gathers() -> bool:
    """Whether FULL state is gathered; without a process group its tensors are the live ones."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def arrays_of(view: ModelView) -> dict[str, Array]:
    """This rank's live arrays by canonical name. No collective runs."""
    state = view.tensors("SHARDED")
    rank = own_rank()
    chosen = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if not chosen:
        return {}
    selection = Selector(rank).select(chosen)
    arrays = {}
    for entry, tensor in zip(selection.entries, selection.tensors, strict=True):
        geometry = entry.geometry
        (fqn,) = geometry.fqns  # SHARDED state has one parameter per entry
        metadata = ArrayMetadata(
            entry.dtype, geometry.shape_of(fqn), tensor.numel(), tuple(geometry.pieces(rank)),
            tuple(geometry.ranks), geometry.named_coordinate(rank), tensor.device.type,
        )  # fmt: skip
        arrays[str(entry.path[0])] = Array(tensor, metadata)
    return arrays


def from_all(value: Any, group: Any = None) -> list[Any]:
    """The values of all ranks of a process group, in order."""
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def anywhere(mine: bool, groups: Iterable[Any]) -> bool:
    """Whether `mine` is true on any of the ranks that meet; `groups` as in `Attempt.settle`."""
    for group in groups if gathers() else ():
        mine = any(from_all(mine, group))
    return mine


class Attempt:
    """Calls functions until one fails, and none after that. Then it releases the objects that it
    holds.

    step: the number of the current step; the caller counts it.
    """

    def __init__(self, *held: dict[Any, Any]) -> None:
        self.failure: Exception | None = None
        self.step = 0
        self._failed_at = 0
        self._held = held

    def __call__(self, act: Callable[[], T]) -> T | None:
        if self.failure is not None:
            return None
        try:
            return act()
        except Exception as error:
            self.failure, self._failed_at = error, self.step
            for held in self._held:
                held.clear()
            return None

    def settle(self, groups: Iterable[Any] = (None,)) -> None:
        """Raise one rank's failure on every rank; return where none failed. All ranks call it.

        Of several failures it raises that of the earliest step; within a step, rank 0's comes last,
        since another rank's failure may have caused it.

        Args:
            groups: this rank's group in each mesh dimension of the ranks that meet; None is the
                job.
        """
        own: tuple[tuple[int, bool, int], CheckpointError] | None = None
        if self.failure is not None:
            rank = own_rank()
            own = (self._failed_at, rank == 0, rank), as_checkpoint_error(self.failure, rank)
        first = own
        for group in groups if gathers() else ():
            first = min(
                filter(None, from_all(first, group)), key=lambda metadata: metadata[0], default=None
            )
        if first is not None and own is not None and first[0] == own[0]:
            assert self.failure is not None
            raise self.failure
        if first is not None:
            raise first[1]


class Wire:
    """Moves tensors between this rank and rank 0, on the device that the job's backend supports:
    NCCL on the GPU (or any accelerator that torch names), gloo on the CPU, both together on
    either.

    A tensor travels in messages of 16 MiB. A rank that has failed passes None, and `Wire` sends or
    fills a spare buffer in its place.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self._only = None  # the one device that the job's backend supports
        if gathers():
            known = dist.Backend.backend_capability.get(dist.get_backend(), [])
            self._only = "cpu" if "cpu" in known else next(iter(known), None)
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kinds = ["cpu", *([accelerator.type] if accelerator else [])] if gathers() else []
        self._spare = {
            device.type: torch.empty(_PIECE, dtype=torch.uint8, device=device)
            for device in {self._device(kind) for kind in kinds}
        }

    def packed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its bytes, on the device from which they are sent."""
        flat = in_rows(tensor.detach()).view(-1).view(torch.uint8)
        return flat.to(self._device(flat.device.type))

    def placed(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        """The tensor, on the device that `share` uses."""
        return tensor.to(self._device(device))

    def room(self, dtype: str, shape: Shape, device: str) -> torch.Tensor:
        """An empty tensor, on the device on which one from `device` arrives."""
        return torch.empty(shape, dtype=getattr(torch, dtype), device=self._device(device))

    def send(self, metadata: ArrayMetadata, packed: torch.Tensor | None) -> None:
        """Send to rank 0, which must be receiving."""
        import torch.distributed as dist

        for piece in self._pieces(packed, metadata.nbytes, metadata.device):
            self._run(dist.isend, piece, 0)

    def receive(self, metadata: ArrayMetadata, rank: int, flat: torch.Tensor | None) -> None:
        """Receive the array of another rank."""
        import torch.distributed as dist

        for piece in self._pieces(flat, metadata.nbytes, metadata.device):
            self._run(dist.irecv, piece, rank)

    def share(self, tensor: torch.Tensor | None, dtype: str, shape: Shape, device: str) -> None:
        """Broadcast rank 0's tensor to all ranks."""
        import torch.distributed as dist

        if gathers():
            nbytes = math.prod(shape) * DTYPES[dtype].itemsize
            for piece in self._pieces(tensor, nbytes, device):
                dist.broadcast(piece, src=0)

    def _pieces(
        self, tensor: torch.Tensor | None, nbytes: int, device: str
    ) -> Iterable[torch.Tensor]:
        spare = self._spare[self._device(device).type]
        flat = None if tensor is None or not nbytes else tensor.view(-1).view(torch.uint8)
        for start in range(0, nbytes, _PIECE):
            stop = min(nbytes, start + _PIECE)
            yield spare[: stop - start] if flat is None else flat[start:stop]

    def _device(self, kind: str) -> torch.device:
        """The device that sends and receives tensors of a device of that kind."""
        chosen = self._only or kind
        if chosen == "cpu":
            return torch.device("cpu")
        return torch.device(chosen, torch.accelerator.current_device_index())

    @staticmethod
    def _run(operation: Any, flat: torch.Tensor, peer: int) -> None:
        import torch.distributed as dist

        # In a batch, NCCL uses the job's communicator and makes none for each pair.
        for work in dist.batch_isend_irecv([dist.P2POp(operation, flat, peer)]):
            work.wait()


def assembled(
    shape: Shape, dtype: str, parts: Sequence[tuple[torch.Tensor, Sequence[Piece]]]
) -> torch.Tensor:
    """The tensor, joined from flat arrays that hold its pieces."""
    device = parts[0][0].device if parts else None  # None: it has no elements
    out = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    for flat, pieces in parts:
        for piece in pieces:
            copy = meet(piece, Piece.whole(piece.name, shape))
            if copy is not None:
                execute(copy, flat, out)
    return out
