"""The full state of a live, tensor-parallel model, in Hugging Face's names or in its own.

Rank 0 learns what all ranks hold, proves the translation as `export_hf` does, and receives the
arrays one by one: each tensor is put together from its FSDP shards and goes, block by block, into
the tensors that are made of it, which go to the CPU when they are whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smckpt.errors import CheckpointError, KeysMismatchError, TensorMismatchError, UsageError
from smckpt.layout.geometry import Piece, Shape
from smckpt.state_dict.gather import (
    Array,
    Told,
    Wire,
    agree,
    arrays_of,
    assembled,
    meet,
    names_of,
    own_rank,
)
from smckpt.topology import ParallelState
from smckpt.translate.compile import Block, Span
from smckpt.translate.config import ModelConfig, read_config
from smckpt.translate.detect import looks_transformed
from smckpt.translate.hub import FAMILIES
from smckpt.translate.live_ranks import Places, places_of_ranks
from smckpt.translate.model import prove, target_of
from smckpt.translate.pieces import Key, Side
from smckpt.translate.table import Layout
from smckpt.translate.translated import Translated

__all__ = [
    "FullWishes",
    "check_full_load",
    "check_full_optimizer",
    "full_state",
    "is_transformed",
    "job_of",
]


@dataclass(frozen=True)
class FullWishes:
    """How a full state is to come out, and what a translation goes by."""

    rank0_only: bool
    offload_to_cpu: bool
    translate: bool
    parallel_state: ParallelState | None = None
    layout: str | Layout | None = None
    config: Any = None


def is_transformed(model: nn.Module, wishes: FullWishes) -> bool:
    """Whether the model is tensor-parallel in a way that its names, or the caller, tell; without
    communication, and the same on every rank."""
    state = wishes.parallel_state
    parallel = state is not None and state.tp_size * state.ep_size > 1
    return parallel or wishes.layout is not None or looks_transformed(names_of(model), None)


def full_state(model: nn.Module, wishes: FullWishes) -> dict[str, Any] | None:
    """The whole model on rank 0, or on all ranks; {} on those that shall hold nothing. None where
    torch's own gathering does it: nothing to translate, and no tensor-parallel ranks. Every rank of
    the job takes part.

    Raises:
        UsageError, KeysMismatchError: no config; names fit no layout, or several.
        TopologyError: which rank is which is not known, or degrees do not fit.
        TensorMismatchError: shapes do not fit; copies, or tied tensors, differ.
    """
    arrays: dict[str, Array] = {}

    def take() -> dict[str, Told]:
        arrays.update(arrays_of(model))
        return {name: array.told for name, array in arrays.items()}

    _, everyone = meet(take)
    job: list[_Job] = []

    def decide() -> tuple[_Step, ...] | None:
        assert everyone is not None
        for said in everyone:
            if isinstance(said, CheckpointError):
                raise said
        told: list[dict[str, Told]] = everyone  # type: ignore[assignment]
        made = job_of(model, told, wishes)
        if made is None:
            return None
        job.append(made)
        return made.steps()

    steps = agree(decide)
    if steps is None:
        return None
    wire = Wire()
    if not job:
        return _follow(steps, arrays, wire, wishes)
    return _lead(job[0], steps, arrays, wire, wishes)


def check_full_load(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Whether a full state, held by rank 0, is one that torch can spread over this model.

    Raises:
        KeysMismatchError, TensorMismatchError: it has other names, or is of all tensor-parallel
            ranks where each has tensors of its own; on every rank.
    """

    def decide() -> None:
        own = arrays_of(model)
        tensors = {name: v for name, v in given.items() if isinstance(v, torch.Tensor)}
        other = sorted(tensors.keys() - own.keys())
        if other:
            raise KeysMismatchError(
                f"the model has no {other[:8]}: this full state was translated, or is another's",
                remedy="take it with translate_on_save=False; to start from Hugging Face's files "
                "use import_hf",
            )
        for name, value in tensors.items():
            shape = own[name].told.shape
            if tuple(value.shape) != shape:
                raise TensorMismatchError(
                    f"{name} is {list(value.shape)} in the full state, and {list(shape)} on a rank",
                    remedy="tensor-parallel ranks that hold plain tensors load LOCAL checkpoints",
                )

    agree(decide)


def check_full_optimizer(model: nn.Module, state: ParallelState | None) -> None:
    """Raises UsageError: tensor-parallel ranks hold plain tensors, so that FSDP's own gathering
    would give one rank's part of the optimizer for the whole. On every rank."""
    if state is None or state.tp_size * state.ep_size == 1:
        return
    ranker = state.ranker
    for name, array in arrays_of(model).items():
        places = {(ranker.get_tp_rank(r), ranker.get_ep_rank(r)) for r in array.told.ranks}
        if len(array.told.shape) > 1 and len(places) == 1:
            raise UsageError(
                f"the full optimizer state is not gathered over tensor-parallel ranks, and {name} "
                "is a tensor of each rank's own",
                remedy="save the optimizer LOCAL or SHARDED",
            )


# -- what is to be done: known to rank 0 ---------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """One stored tensor: who has its parts, where its blocks go, what it must be equal to."""

    key: Key
    shape: Shape
    dtype: str
    parts: tuple[tuple[int, Told, tuple[Piece, ...]], ...]
    blocks: tuple[tuple[str, Block], ...]
    copy_of: Key | None


@dataclass(frozen=True)
class _Step:
    """One stored tensor, as the other ranks see it: who sends; what is whole afterwards."""

    name: str
    senders: tuple[int, ...]
    done: tuple[tuple[str, str, Shape], ...]
    device: str


@dataclass(frozen=True)
class _Job:
    """targets: dtype and shape of each, in order. tied: (name, name of the tensor that it is)."""

    tasks: tuple[_Task, ...]
    targets: Mapping[str, tuple[str, Shape]]
    tied: tuple[tuple[str, str], ...]

    def steps(self) -> tuple[_Step, ...]:
        left: dict[str, int] = {}
        for task in self.tasks:
            for name, _ in task.blocks:
                left[name] = left.get(name, 0) + 1
        out = []
        for task in self.tasks:
            done = []
            for name, _ in task.blocks:
                left[name] -= 1
                if not left[name]:
                    done.append((name, *self.targets[name]))
            senders = tuple(rank for rank, *_ in task.parts)
            device = "cuda" if any(told.device == "cuda" for _, told, _ in task.parts) else "cpu"
            out.append(_Step(task.key.name, senders, tuple(done), device))
        return tuple(out)


def job_of(model: nn.Module, told: list[dict[str, Told]], wishes: FullWishes) -> _Job | None:
    """What rank 0 does, on what all ranks told; None where there is nothing to do.

    Raises:
        as `full_state`.
    """
    places = places_of_ranks(told, wishes.parallel_state)
    if not wishes.translate and not places.many:
        return None
    try:
        proof = prove(places, _config(model, wishes), wishes.layout, places.tp, places.ep)
    except CheckpointError as error:
        if wishes.translate:
            error.remedy += "; or pass translate_on_save=False for the model's own names"
        raise
    if not wishes.translate:
        return _untranslated(places, proof.side)
    hub, side = proof.hub, proof.side
    dtypes = {key: places.held[key.name].dtype for key in side.shapes}
    made = [target_of(key, side, hub, proof.blocks[key], dtypes) for key in hub.shapes]
    _refuse_computed(made)
    blocks: dict[Key, list[tuple[str, Block]]] = {}
    for target in made:
        for block in target.blocks:
            blocks.setdefault(block.source, []).append((target.name, block))
    targets = {target.name: (target.dtype, target.shape) for target in made}
    return _Job(tuple(_tasks(places, side, blocks)), targets, _tied(side))


def _refuse_computed(made: Sequence[Translated]) -> None:
    names = [target.name for target in made if target.computed or target.view is not None]
    if names:
        raise UsageError(
            f"{len(names)} tensors have to be computed or folded, not only moved: {names[:8]}",
            remedy="save LOCAL, and translate with export_hf",
        )


def _tied(side: Side) -> tuple[tuple[str, str], ...]:
    if not side.dims.tied:
        return ()
    rows = FAMILIES[side.dims.family].rows
    names = {row.roles[0]: row.name for row in rows if row.roles[0] in ("embed", "head")}
    return ((names["head"], names["embed"]),)


def _tasks(
    places: Places, side: Side, blocks: Mapping[Key, list[tuple[str, Block]]]
) -> Iterator[_Task]:
    copies = {copy: first for first, copy in side.copies}
    for key, shape in side.shapes.items():
        yield _Task(
            key, shape, places.held[key.name].dtype, places.parts(key, shape),
            tuple(blocks.get(key, ())), copies.get(key),
        )  # fmt: skip


def _untranslated(places: Places, side: Side) -> _Job:
    """Each tensor under its own name: arrays of tensor-parallel ranks one after the other."""
    copies = {copy for _, copy in side.copies}
    ends: dict[str, list[int]] = {}
    blocks = {}
    for key, shape in side.shapes.items():
        if key not in copies:
            blocks[key] = [(key.name, _joined(key, shape, side, ends))]
    targets = {name: (places.held[name].dtype, tuple(end)) for name, end in ends.items()}
    return _Job(tuple(_tasks(places, side, blocks)), targets, ())


def _joined(key: Key, shape: Shape, side: Side, ends: dict[str, list[int]]) -> Block:
    """Where one rank's array goes; `ends` grows by it."""
    at = [0] * len(shape)
    if key.name not in ends:
        ends[key.name] = list(shape)
    elif key.ep > 0 or side.along(key) is None:
        raise UsageError(
            f"{key.name} is another tensor on each parallel rank, not a part of one: there is no "
            "full state in the model's own names",
            remedy="pass translate_on_save=True, or save LOCAL and translate with export_hf",
        )
    else:
        along = side.along(key)
        assert along is not None
        at[along] = ends[key.name][along]
        ends[key.name][along] += shape[along]
    spans = tuple(Span(n, d, 0, 1, d, at[d], 1) for d, n in enumerate(shape))
    return Block(key, spans)


def _config(model: nn.Module, wishes: FullWishes) -> ModelConfig | None:
    if wishes.config is not None:
        return read_config(wishes.config)
    for owner in (model, getattr(model, "module", None)):
        config = getattr(owner, "config", None)
        if isinstance(config, dict) or hasattr(config, "to_dict"):
            return read_config(config)
    return None


# -- doing it ------------------------------------------------------------------------------------


def _follow(
    steps: tuple[_Step, ...], arrays: Mapping[str, Array], wire: Wire, wishes: FullWishes
) -> dict[str, Any]:
    rank, out = own_rank(), {}
    for step in steps:
        if rank in step.senders:
            wire.send(arrays[step.name].tensor)
        if not wishes.rank0_only:
            for name, dtype, shape in step.done:
                whole = wire.share(None, dtype, shape, step.device)
                out[name] = whole.cpu() if wishes.offload_to_cpu else whole
    order, tied = agree(lambda: ((), ()))
    return _in_order(out, order, tied)


def _lead(
    job: _Job, steps: tuple[_Step, ...], arrays: Mapping[str, Array], wire: Wire,
    wishes: FullWishes,
) -> dict[str, Any]:  # fmt: skip
    making: dict[str, torch.Tensor] = {}
    out: dict[str, Any] = {}
    originals = {task.copy_of for task in job.tasks if task.copy_of is not None}
    first: dict[Key, torch.Tensor] = {}
    differ: list[str] = []
    for task, step in zip(job.tasks, steps, strict=True):
        whole = _received(task, arrays, wire)
        if any(key.name != task.key.name for key in first):
            first.clear()
        if task.key in originals:
            first[task.key] = whole
        if task.copy_of is not None and not _equal(first[task.copy_of], whole):
            differ.append(f"{task.key.name} on (tp, ep) {task.key[1:]} and {task.copy_of[1:]}")
        for name, block in task.blocks:
            if name not in making:
                dtype, shape = job.targets[name]
                kind = getattr(torch, dtype)
                making[name] = torch.empty(shape, dtype=kind, device=whole.device)
            _copy(block, whole, making[name])
        for name, dtype, shape in step.done:
            made = making.pop(name)
            if not wishes.rank0_only:
                made = wire.share(made, dtype, shape, step.device)
            out[name] = made.cpu() if wishes.offload_to_cpu else made

    def verdict() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        _refuse(differ, [pair for pair in job.tied if _tie_differs(out, *pair)])
        return tuple(job.targets), job.tied

    return _in_order(out, *agree(verdict))


def _received(task: _Task, arrays: Mapping[str, Array], wire: Wire) -> torch.Tensor:
    parts = []
    for rank, told, pieces in task.parts:
        if rank == own_rank():
            flat = arrays[task.key.name].tensor.detach().contiguous().view(-1)
        else:
            flat = wire.receive(told, rank)
        parts.append((flat, pieces))
    devices = {flat.device for flat, _ in parts}
    if len(devices) > 1:  # what came by another way, to where this rank's own is
        gpu = next(device for device in devices if device.type != "cpu")
        parts = [(flat.to(gpu), pieces) for flat, pieces in parts]
    return assembled(task.shape, task.dtype, parts)


def _copy(block: Block, source: torch.Tensor, target: torch.Tensor) -> None:
    start = block.index * source.stride(0) if block.index >= 0 else 0
    to = block.to_index * target.stride(0) if block.to_index >= 0 else 0
    sizes, strides, places = [], [], []
    for span in block.spans:
        start += span.at * source.stride(span.dim)
        to += span.to_at * target.stride(span.to_dim)
        sizes.append(span.count)
        strides.append(span.step * source.stride(span.dim))
        places.append(span.to_step * target.stride(span.to_dim))
    torch.as_strided(target, sizes, places, to).copy_(
        torch.as_strided(source, sizes, strides, start)
    )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise."""
    one, two = (t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(one, two.to(one.device))


def _tie_differs(out: Mapping[str, Any], head: str, embedding: str) -> bool:
    return head in out and not _equal(out[head], out[embedding])


def _refuse(differ: list[str], tied: list[tuple[str, str]]) -> None:
    if differ:
        raise TensorMismatchError(
            f"{len(differ)} tensors that ranks hold in copies differ: {'; '.join(differ[:8])}",
            remedy="the ranks have drifted apart, or layout= or parallel_state= is wrong",
        )
    if tied:
        raise TensorMismatchError(
            f"tie_word_embeddings is true, but {tied[0][0]} and {tied[0][1]} differ",
            remedy="set tie_word_embeddings to false in the config if the model was trained with "
            "both",
        )


def _in_order(
    out: dict[str, Any], order: tuple[str, ...], tied: tuple[tuple[str, str], ...]
) -> dict[str, Any]:
    """The targets in the table's order; tied names stand for one tensor, as in the model."""
    if out:
        out = {name: out[name] for name in order}
        out.update({head: out[embedding] for head, embedding in tied})
    return out
