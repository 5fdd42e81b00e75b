"""A model's tensors from all ranks to rank 0, one after the other.

Every rank tells what its arrays hold (`meet`), rank 0 decides what is to be sent and says so, or
says why not (`agree`), and the arrays follow in that order (`Wire`): point to point, so that it
makes no difference which wrapper, mesh or parallelism cut them. A rank that fails on the way goes
on sending and receiving as was agreed, bytes that nobody uses, until all `settle`: nobody waits
for it, and all raise what it raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from smckpt.errors import CheckpointError, PeerError
from smckpt.layout.entries import DTYPES
from smckpt.layout.geometry import FlatGeometry, Geometry, MeshGeometry, Piece
from smckpt.layout.mesh import Shape
from smckpt.state_dict.model import view_of
from smckpt.state_dict.names import canonical
from smckpt.state_dict.private import fsdp1_units
from smckpt.state_dict.select import Selector

__all__ = [
    "Array",
    "Attempt",
    "Told",
    "Wire",
    "agree",
    "anywhere",
    "arrays_of",
    "assembled",
    "meet",
    "names_of",
    "own_rank",
]

_PIECE = 16 << 20  # bytes that travel at a time

T = TypeVar("T")


@dataclass(frozen=True)
class Told:
    """What a rank says of its array under one name.

    shape: of the tensor that it is a part of. numel: of the array. ranks: those that share the
    tensor. dims: name, size and this rank's index of each dimension of the mesh that cuts it.
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
    told: Told


def own_rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if _many() else 0


def _many() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def names_of(model: nn.Module) -> set[str]:
    """The canonical names of the model's parameters, however it is wrapped."""
    ddp = type(model).__name__ == "DistributedDataParallel"
    names = {canonical(n, ddp=ddp) for n, _ in model.named_parameters(remove_duplicate=False)}
    for raw, _, handle in fsdp1_units(model):
        prefix = canonical(raw)
        dotted = f"{prefix}." if prefix else ""
        names.update(f"{dotted}{canonical(fqn)}" for fqn in handle.flat_param._fqns)
    return names


def arrays_of(model: nn.Module) -> dict[str, Array]:
    """This rank's arrays by canonical name, live, without a collective."""
    state = view_of(model).tensors("SHARDED")
    rank = own_rank()
    chosen = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if not chosen:
        return {}
    selection = Selector(rank).select(chosen)
    return {
        str(entry.path[0]): Array(tensor, _told(entry.dtype, tensor, entry.geometry, rank))
        for entry, tensor in zip(selection.entries, selection.tensors, strict=True)
    }


def _told(dtype: str, tensor: torch.Tensor, geometry: Geometry, rank: int) -> Told:
    dims: tuple[tuple[str, int, int], ...] = ()
    if isinstance(geometry, FlatGeometry):
        assert geometry.member is not None  # SHARDED state is by parameter
        shape = geometry.unit.segments[geometry.member].shape
    else:
        shape = geometry.shape
    if isinstance(geometry, (FlatGeometry, MeshGeometry)):
        mesh = geometry.mesh
        dims = tuple(zip(mesh.dim_names, mesh.shape, mesh.coordinate(rank), strict=True))
    return Told(
        dtype, tuple(shape), tensor.numel(), tuple(geometry.pieces(rank)), tuple(geometry.ranks),
        dims, tensor.device.type,
    )  # fmt: skip


def meet(take: Callable[[], T]) -> tuple[T | None, list[T | CheckpointError] | None]:
    """(what `take` gives here, what it gave on every rank: on rank 0). An error on a rank travels
    instead of its answer, so that nobody waits for it."""
    import torch.distributed as dist

    answer: T | None = None
    failure: CheckpointError | None = None
    try:
        answer = take()
    except Exception as error:
        failure = _as_ours(error)
    said: Any = answer if failure is None else failure
    if not _many():
        return answer, [said]
    everyone: list[Any] | None = [None] * dist.get_world_size() if own_rank() == 0 else None
    dist.gather_object(said, everyone, dst=0)
    return answer, everyone


def agree(decide: Callable[[], T]) -> T:
    """What `decide` gives on rank 0, everywhere; what it raises is raised everywhere."""
    import torch.distributed as dist

    said: list[Any] = [None, None]
    cause: Exception | None = None
    if own_rank() == 0:
        try:
            said[0] = decide()
        except Exception as error:
            cause = error
            said[1] = _as_ours(error)
    if _many():
        dist.broadcast_object_list(said, src=0)
    if cause is not None:
        raise cause
    if said[1] is not None:
        raise said[1]
    out: T = said[0]
    return out


def anywhere(mine: bool, groups: Iterable[Any]) -> bool:
    """Whether it is so on this rank or on another of those that meet: as in `Attempt.settle`."""
    import torch.distributed as dist

    for group in groups if _many() else ():
        said: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(said, mine, group)
        mine = any(said)
    return mine


def _as_ours(error: Exception) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    return PeerError(
        f"gathering the state failed: {type(error).__name__}: {error}",
        remedy="see that rank's own traceback",
        rank=own_rank(),
    )


class Attempt:
    """Does things until one fails, and nothing from then on; what it was given is let go then.

    step: which of the steps of all ranks is under way; counted by who uses it.
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
        """Raise on every rank what one of them has failed with. All call it, and return when none
        has. Of several it is the first failure, and of one step rank 0's comes last: what it got
        from a rank that has failed makes no sense, and it may have failed of that.

        Args:
            groups: this rank's group in each dimension of the mesh of those that meet; None is the
                job.
        """
        import torch.distributed as dist

        own: tuple[tuple[int, bool, int], CheckpointError] | None = None
        if self.failure is not None:
            rank = own_rank()
            own = (self._failed_at, rank == 0, rank), _as_ours(self.failure)
        first = own
        for group in groups if _many() else ():
            said: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(said, first, group)
            first = min(filter(None, said), key=lambda told: told[0], default=None)
        if first is not None and own is not None and first[0] == own[0]:
            assert self.failure is not None
            raise self.failure
        if first is not None:
            raise first[1]


class Wire:
    """Bytes of tensors between this rank and rank 0, on the device that the job's backend knows:
    NCCL takes them from the GPU, gloo from the CPU, both together from where they are.

    They travel in pieces. Who has failed passes None for the tensor, and a buffer that is made
    beforehand is sent, or filled, in its place.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        only = {"nccl": "cuda", "gloo": "cpu"}
        self._only = only.get(dist.get_backend()) if _many() else None
        kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])] if _many() else []
        self._spare = {
            device.type: torch.empty(_PIECE, dtype=torch.uint8, device=device)
            for device in {self._device(kind) for kind in kinds}
        }

    def packed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its bytes, where they travel from."""
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        return flat.to(self._device(flat.device.type))

    def placed(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        """The tensor, where `share` has it."""
        return tensor.to(self._device(device))

    def room(self, dtype: str, shape: Shape, device: str) -> torch.Tensor:
        """Where a tensor arrives that lies on such a device."""
        return torch.empty(shape, dtype=getattr(torch, dtype), device=self._device(device))

    def send(self, told: Told, packed: torch.Tensor | None) -> None:
        """To rank 0, which must be receiving."""
        import torch.distributed as dist

        for piece in self._pieces(packed, told.nbytes, told.device):
            self._run(dist.isend, piece, 0)

    def receive(self, told: Told, rank: int, flat: torch.Tensor | None) -> None:
        """The array of another rank."""
        import torch.distributed as dist

        for piece in self._pieces(flat, told.nbytes, told.device):
            self._run(dist.irecv, piece, rank)

    def share(self, tensor: torch.Tensor | None, dtype: str, shape: Shape, device: str) -> None:
        """Rank 0's tensor, into that of all ranks."""
        import torch.distributed as dist

        if _many():
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
        """Where a tensor that lies on a device of that kind travels from and to."""
        if (self._only or kind) == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    @staticmethod
    def _run(operation: Any, flat: torch.Tensor, peer: int) -> None:
        import torch.distributed as dist

        # In a batch, for NCCL then uses the job's communicator and makes none for each pair.
        for work in dist.batch_isend_irecv([dist.P2POp(operation, flat, peer)]):
            work.wait()


def assembled(
    shape: Shape, dtype: str, parts: Sequence[tuple[torch.Tensor, Sequence[Piece]]]
) -> torch.Tensor:
    """The tensor of which each flat array holds pieces."""
    device = parts[0][0].device if parts else None  # None: it has no elements
    out = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    for flat, pieces in parts:
        for piece in pieces:
            box = piece.box
            target = out[
                tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            ]
            target.copy_(
                torch.as_strided(
                    flat, box.sizes, piece.strides, flat.storage_offset() + piece.start
                )
            )
    return out
