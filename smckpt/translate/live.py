"""The full state of a live, tensor-parallel model, in Hugging Face's names or in its own.

Rank 0 learns what all ranks hold, proves the translation as `export_hf` does, and receives the
arrays one by one: each tensor is put together from its FSDP shards and goes, block by block, into
the tensors that are made of it, which go to the CPU when they are whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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
from smckpt.translate.cast import cast
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
    """One stored tensor: who has its parts, where its blocks go, what it must be equal to. view:
    the shape that its blocks are of, where it is held in another."""

    key: Key
    shape: Shape
    view: Shape
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
    """targets: dtype and shape of each, in order. tied: (name, name of the tensor that it is).
    computed: targets that are not moved alone."""

    tasks: tuple[_Task, ...]
    targets: Mapping[str, tuple[str, Shape]]
    tied: tuple[tuple[str, str], ...]
    computed: Mapping[str, Translated] = field(default_factory=dict)

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
    blocks: dict[Key, list[tuple[str, Block]]] = {}
    for target in made:
        for block in itertools.chain(target.blocks, *target.terms):
            blocks.setdefault(block.source, []).append((target.name, block))
    targets = {target.name: (target.dtype, target.shape) for target in made}
    computed = {target.name: target for target in made if target.computed}
    return _Job(tuple(_tasks(places, side, blocks)), targets, _tied(side), computed)


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
    for key, view in side.shapes.items():
        shape = side.stored.get(key, view)
        yield _Task(
            key, shape, view, places.held[key.name].dtype, places.parts(key, shape),
            tuple(blocks.get(key, ())), copies.get(key),
        )  # fmt: skip


def _untranslated(places: Places, side: Side) -> _Job:
    """Each tensor under its own name: arrays of tensor-parallel ranks one after the other."""
    if side.stored:
        names = sorted({key.name for key in side.stored})
        raise UsageError(
            f"{names[:8]} are held folded: ranks' arrays one after the other would not be one",
            remedy="pass translate_on_save=True, or save LOCAL",
        )
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
    making, out, check = _Making(job), dict[str, Any](), _Check(job)
    attempt = _Attempt(making.under_way, out, check.first)
    for task, step in zip(job.tasks, steps, strict=True):
        parts: list[torch.Tensor] = []
        whole = attempt(lambda: _received(task, arrays, wire, parts))  # noqa: B023  # run at once
        for rank, told, _ in task.parts[len(parts) :]:  # after a failure; they send all the same
            if rank != own_rank():
                wire.receive(told, rank)
        attempt(lambda: check.look(task, whole))  # noqa: B023
        attempt(lambda: making.take(task, whole))  # noqa: B023
        for name, dtype, shape in step.done:
            made = attempt(lambda: making.done(name))  # noqa: B023
            if not wishes.rank0_only:
                made = wire.share(made, dtype, shape, step.device)
            attempt(lambda: out.update({name: made.cpu() if wishes.offload_to_cpu else made}))  # noqa: B023

    def verdict() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        if attempt.failure is not None:
            raise attempt.failure
        _refuse(check.differ, [pair for pair in job.tied if _tie_differs(out, *pair)])
        return tuple(job.targets), job.tied

    return _in_order(out, *agree(verdict))


class _Attempt:
    """Does things until one fails, and nothing from then on; what it was given is let go then."""

    def __init__(self, *held: dict[Any, Any]) -> None:
        self.failure: Exception | None = None
        self._held = held

    def __call__(self, act: Callable[[], Any]) -> Any:
        if self.failure is not None:
            return None
        try:
            return act()
        except Exception as error:
            self.failure = error
            for held in self._held:
                held.clear()
            return None


class _Check:
    """Whether tensors that ranks hold in copies are equal."""

    def __init__(self, job: _Job) -> None:
        self.differ: list[str] = []
        self.first: dict[Key, torch.Tensor] = {}
        self._originals = {task.copy_of for task in job.tasks if task.copy_of is not None}

    def look(self, task: _Task, whole: torch.Tensor) -> None:
        key, other = task.key, task.copy_of
        if any(known.name != key.name for known in self.first):
            self.first.clear()
        if key in self._originals:
            self.first[key] = whole
        if other is not None and not _equal(self.first[other], whole):
            self.differ.append(f"{key.name} on (tp, ep) {key[1:]} and {other[1:]}")


class _Making:
    """The targets that are begun. Those that are computed add up in float64 and are rounded once,
    on the CPU, as an export does."""

    def __init__(self, job: _Job) -> None:
        self.under_way: dict[str, torch.Tensor] = {}
        self._job = job

    def take(self, task: _Task, whole: torch.Tensor) -> None:
        for name, block in task.blocks:
            dtype, shape = self._job.targets[name]
            computed = name in self._job.computed
            if name not in self.under_way:
                kind = torch.float64 if computed else getattr(torch, dtype)
                device = "cpu" if computed else whole.device
                self.under_way[name] = torch.zeros(shape, dtype=kind, device=device)
            if computed:
                term = torch.zeros(shape, dtype=torch.float64)
                _copy(block, whole.to("cpu", torch.float64), term)
                self.under_way[name] += term
            else:
                _copy(block, whole, self.under_way[name])

    def done(self, name: str) -> torch.Tensor:
        made = self.under_way.pop(name)
        target = self._job.computed.get(name)
        if target is None:
            return made
        total = made.numpy() / (len(target.terms) + 1 if target.mean else 1) + target.shift
        try:
            rounded = torch.from_numpy(cast(total, "float64", target.dtype))
        except OverflowError as error:
            raise UsageError(
                f"{name} cannot be computed in {target.dtype}: {error}",
                remedy="the ranks' copies are not what layout= says, or the model has diverged",
            ) from error
        return rounded.view(getattr(torch, target.dtype))


def _received(
    task: _Task, arrays: Mapping[str, Array], wire: Wire, flats: list[torch.Tensor]
) -> torch.Tensor:
    """The tensor, and on the way the parts of it."""
    for rank, told, _ in task.parts:
        own = rank == own_rank()
        flats.append(
            arrays[task.key.name].tensor.detach().contiguous().view(-1)
            if own
            else wire.receive(told, rank)
        )
    devices = {flat.device for flat in flats}
    parts = [(flat, pieces) for flat, (*_, pieces) in zip(flats, task.parts, strict=True)]
    if len(devices) > 1:  # what came by another way, to where this rank's own is
        gpu = next(device for device in devices if device.type != "cpu")
        parts = [(flat.to(gpu), pieces) for flat, pieces in parts]
    return assembled(task.shape, task.dtype, parts).view(task.view)


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
