"""The full state of a live, tensor-parallel model, in Hugging Face's names or in its own.

Rank 0 learns what all ranks hold, proves the translation as `export_hf` does, and receives the
arrays one by one: each tensor is put together from its FSDP shards and goes, block by block, into
the tensors that are made of it, which go to the CPU when they are whole.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from smckpt.errors import CheckpointError, KeysMismatchError, TensorMismatchError, UsageError
from smckpt.layout.mesh import Shape
from smckpt.state_dict.gather import (
    Array,
    Told,
    Wire,
    agree,
    arrays_of,
    meet,
    names_of,
)
from smckpt.topology import ParallelState
from smckpt.translate.compile import Block, Span
from smckpt.translate.config import ModelConfig, read_config
from smckpt.translate.degrees import Degrees
from smckpt.translate.detect import looks_transformed
from smckpt.translate.hub import FAMILIES
from smckpt.translate.live_move import Job, Plan, Task, follow, lead
from smckpt.translate.live_ranks import Places, places_of_ranks
from smckpt.translate.model import prove, target_of
from smckpt.translate.pieces import Key, Side
from smckpt.translate.table import Layout

__all__ = [
    "FullWishes",
    "check_full_load",
    "check_full_optimizer",
    "full_state",
    "is_transformed",
    "job_of",
]

T = TypeVar("T")


@dataclass(frozen=True)
class FullWishes:
    """How a full state is to come out, and what a translation goes by."""

    rank0_only: bool
    offload_to_cpu: bool
    translate: bool
    parallel_state: ParallelState | None = None
    layout: str | Layout | None = None
    config: Any = None
    padded_vocab_size: int | None = None

    @property
    def said(self) -> dict[str, Any]:
        """What all ranks must pass alike; the config is rank 0's."""
        state = None if self.parallel_state is None else self.parallel_state.to_json()
        return {
            "translate_on_save": self.translate, "parallel_state": state, "layout": self.layout,
            "padded_vocab_size": self.padded_vocab_size,
        }  # fmt: skip


def is_transformed(model: nn.Module, wishes: FullWishes) -> bool:
    """Whether the model is tensor-parallel in a way that its names, or the caller, tell; without
    communication."""
    state = wishes.parallel_state
    parallel = state is not None and state.tp_size * state.ep_size > 1
    asked = wishes.layout is not None or wishes.padded_vocab_size is not None
    return parallel or asked or looks_transformed(names_of(model), None)


def full_state(model: nn.Module, wishes: FullWishes) -> dict[str, Any] | None:
    """The whole model on rank 0, or on all ranks; {} on those that shall hold nothing. None where
    torch's own gathering does it: nothing to translate, and no tensor-parallel ranks. Every rank of
    the job takes part.

    Raises:
        UsageError, KeysMismatchError: no config; names fit no layout, or several; ranks pass
            different things.
        TopologyError: which rank is which is not known, or degrees do not fit.
        TensorMismatchError: shapes do not fit; copies, or tied tensors, differ.
    """
    arrays: dict[str, Array] = {}
    wires: list[Wire] = []

    def take() -> tuple[dict[str, Any], dict[str, Told]]:
        arrays.update(arrays_of(model))
        wires.append(Wire())
        return wishes.said, {name: array.told for name, array in arrays.items()}

    _, everyone = meet(take)
    job: list[Job] = []

    def decide() -> Plan | None:
        given, told = zip(*_answers(everyone), strict=True)
        _refuse_others(given)
        made = job_of(model, list(told), wishes)
        if made is None:
            return None
        job.append(made)
        return Plan(made.steps(), tuple(made.targets), made.tied, wishes.rank0_only)

    plan = agree(decide)
    if plan is None:
        return None
    to_cpu = wishes.offload_to_cpu
    if not job:
        return follow(plan, arrays, wires[0], wishes.rank0_only, to_cpu)
    return lead(job[0], plan, arrays, wires[0], to_cpu)


def _answers(everyone: list[T | CheckpointError] | None) -> list[T]:
    """Of all ranks; raises what one has failed with."""
    out: list[T] = []
    for answer in everyone or ():
        if isinstance(answer, CheckpointError):
            raise answer
        out.append(answer)
    return out


def _refuse_others(said: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what ranks pass differently."""
    for rank, own in enumerate(said):
        for name, value in own.items():
            if value != said[0][name]:
                raise UsageError(
                    f"{name}={_shown(value)} on rank {rank}, and {_shown(said[0][name])} on rank 0",
                    remedy="pass the same on all ranks",
                    rank=rank,
                )


def _shown(value: Any) -> Any:
    return f"the layout {value.name}" if isinstance(value, Layout) else repr(value)


def check_full_load(model: nn.Module, given: Mapping[str, Any], wishes: FullWishes) -> None:
    """Whether a full state, held by rank 0, is one that torch can spread over this model.

    Raises:
        KeysMismatchError, TensorMismatchError: it has other names, or is of all tensor-parallel
            ranks where each has tensors of its own; on every rank.
        UsageError: ranks pass different things.
    """
    _, everyone = meet(lambda: wishes.said)

    def decide() -> None:
        said = _answers(everyone)
        _refuse_others(said)
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


def job_of(model: nn.Module, told: list[dict[str, Told]], wishes: FullWishes) -> Job | None:
    """What rank 0 does, on what all ranks told; None where there is nothing to do.

    Raises:
        as `full_state`.
    """
    places = places_of_ranks(told, wishes.parallel_state)
    if not wishes.translate and not places.many:
        return None
    degrees = Degrees.of(places.tp, places.ep)
    try:
        config, padded = _config(model, wishes), wishes.padded_vocab_size
        proof = prove(places, config, wishes.layout, degrees, padded, trims=wishes.translate)
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
    return Job(tuple(_tasks(places, side, blocks)), targets, _tied(side), computed)


def _tied(side: Side) -> tuple[tuple[str, str], ...]:
    if not side.dims.tied:
        return ()
    rows = FAMILIES[side.dims.family].rows
    names = {row.roles[0]: row.name for row in rows if row.roles[0] in ("embed", "head")}
    return ((names["head"], names["embed"]),)


def _tasks(
    places: Places, side: Side, blocks: Mapping[Key, list[tuple[str, Block]]]
) -> Iterator[Task]:
    """And one of each kind of tensor as another rank has it, to tell a wrong parallel_state."""
    copies = {copy: first for first, copy in side.copies}
    seen: set[tuple[str, int, int]] = set()
    for key, view in side.shapes.items():
        shape = side.stored.get(key, view)
        yield Task(
            key, shape, view, places.held[key.name].dtype, places.parts(key, shape),
            tuple(blocks.get(key, ())), copies.get(key),
        )  # fmt: skip
        kind = re.sub(r"\d+", "#", key.name), key.tp, key.ep
        replica = () if kind in seen else places.replica(key)
        seen.add(kind)
        if replica:
            dtype = places.held[key.name].dtype
            yield Task(key, shape, view, dtype, replica, (), None, replica=True)


def _untranslated(places: Places, side: Side) -> Job:
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
    return Job(tuple(_tasks(places, side, blocks)), targets, ())


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
