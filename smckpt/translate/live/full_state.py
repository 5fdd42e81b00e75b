"""The full state of a live, tensor-parallel model, in Hugging Face's names or in its own.

Rank 0 learns what all ranks hold, proves the translation as `export_hf` does, and receives the
arrays one by one. It joins each tensor from its FSDP shards and copies it, block by block, into the
target tensors. A target goes to the CPU when it is whole.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from smckpt.errors import CheckpointError, UsageError
from smckpt.formats.degrees import Degrees
from smckpt.formats.tensors import Block, TensorKey
from smckpt.full.parallel import Brought, FullWishes, by_rank, refuse_others
from smckpt.full.wire import Array, ArrayMetadata, Wire, arrays_of
from smckpt.layout.strided import Box, Copy, Piece, Strided
from smckpt.meeting.round import over_group
from smckpt.state_dict.views import ModelView
from smckpt.translate.config import read_config
from smckpt.translate.live.move import MoveJob, MovePlan, MoveTask, follow, lead
from smckpt.translate.live.ranks import LiveTensors, live_tensors
from smckpt.translate.models.model import prove, target_of
from smckpt.translate.tables.pieces import Side

__all__ = [
    "full_state",
    "job_of",
]


def full_state(view: ModelView, wishes: FullWishes) -> dict[str, Any] | None:
    """As `smckpt.full.parallel.full_state`, which calls it."""
    arrays: dict[str, Array] = {}
    wires: list[Wire] = []

    def take() -> tuple[dict[str, Any], dict[str, ArrayMetadata]]:
        arrays.update(arrays_of(view))
        wires.append(Wire())
        return wishes.arguments, {name: array.metadata for name, array in arrays.items()}

    job: list[MoveJob] = []

    def decide(
        brought: Brought[tuple[dict[str, Any], dict[str, ArrayMetadata]]],
    ) -> MovePlan | None:
        given, metadata = zip(*by_rank(brought()), strict=True)
        refuse_others(given)
        made = job_of(view.model, list(metadata), wishes)
        if made is None:
            return None
        job.append(replace(made, equal_ranks=wishes.equal_ranks))
        return MovePlan(made.steps(), tuple(made.targets), made.tied, wishes.rank0_only)

    plan = over_group().round("full state", take, decide)
    if plan is None:
        return None
    to_cpu = wishes.offload_to_cpu
    if not job:
        return follow(plan, arrays, wires[0], wishes.rank0_only, to_cpu)
    return lead(job[0], plan, arrays, wires[0], to_cpu)


# -- the plan, which rank 0 makes ----------------------------------------------------------------


def job_of(
    model: nn.Module, metadata: list[dict[str, ArrayMetadata]], wishes: FullWishes
) -> MoveJob | None:
    """Rank 0's plan, made from the array metadata of all ranks; None if there is nothing to do.

    Raises:
        as `full_state`.
    """
    live = live_tensors(metadata, wishes.parallel_state)
    if not wishes.translate and not live.many:
        return None
    degrees = Degrees.of(live.tp, live.ep)
    try:
        config = wishes.config
        for owner in (model, getattr(model, "module", None)) if config is None else ():
            own_config = getattr(owner, "config", None)
            if config is None and (isinstance(own_config, dict) or hasattr(own_config, "to_dict")):
                config = own_config
        config, padded = read_config(config), wishes.padded_vocab_size
        proof = prove(live, config, wishes.layout, degrees, padded, trims=wishes.translate)
    except CheckpointError as error:
        if wishes.translate:
            error.remedy += "; or pass translate_on_save=False for the model's own names"
        raise
    if not wishes.translate:
        return _untranslated(live, proof.side)
    hub, side = proof.hub, proof.side
    dtypes = {key: live.held[key.name].dtype for key in side.shapes}
    made = [target_of(key, side, hub, proof.blocks[key], dtypes) for key in hub.shapes]
    blocks: dict[TensorKey, list[tuple[str, Block]]] = {}
    for target in made:
        for block in itertools.chain(target.blocks, *target.terms):
            blocks.setdefault(block.source, []).append((target.name, block))
    targets = {target.name: (target.dtype, target.shape) for target in made}
    computed = {target.name: target for target in made if target.computed}
    rows = side.dims.family.rows
    names = {row.roles[0]: row.name for row in rows if row.roles[0] in ("embed", "head")}
    tied = ((names["head"], names["embed"]),) if side.dims.tied else ()
    return MoveJob(tuple(_tasks(live, side, blocks)), targets, tied, computed)


def _tasks(
    live: LiveTensors, side: Side, blocks: Mapping[TensorKey, list[tuple[str, Block]]]
) -> Iterator[MoveTask]:
    """One task for each tensor, and one more for a replica of each kind, to detect a wrong
    parallel_state."""
    copies = {copy: first for first, copy in side.copies}
    seen: set[tuple[str, int, int]] = set()
    for key, view in side.shapes.items():
        shape = side.stored.get(key, view)
        yield MoveTask(
            key, shape, live.held[key.name].dtype, live.parts(key, shape),
            tuple(blocks.get(key, ())), copies.get(key),
        )  # fmt: skip
        kind = re.sub(r"\d+", "#", key.name), key.tp, key.ep
        replica = () if kind in seen else live.replica(key)
        seen.add(kind)
        if replica:
            dtype = live.held[key.name].dtype
            yield MoveTask(key, shape, dtype, replica, (), None, replica=True)


def _untranslated(live: LiveTensors, side: Side) -> MoveJob:
    """Each tensor under its own name, joined from the arrays of tensor-parallel ranks in order."""
    if side.stored:
        names = sorted({key.name for key in side.stored})
        raise UsageError(
            f"{names[:8]} are folded: the ranks' arrays, joined in order, are not the tensor",
            remedy="pass translate_on_save=True, or save LOCAL",
        )
    copies = {copy for _, copy in side.copies}
    ends: dict[str, list[int]] = {}
    boxes: dict[TensorKey, Box] = {}  # of each rank's array in the whole
    for key, shape in side.shapes.items():
        if key in copies:
            continue
        at, along = [0] * len(shape), side.along(key)
        if key.name not in ends:
            ends[key.name] = list(shape)
        elif key.ep > 0 or along is None:
            raise UsageError(
                f"{key.name} is a different tensor on each parallel rank, not a part of one: there "
                "is no full state in the model's own names",
                remedy="pass translate_on_save=True, or save LOCAL and translate with export_hf",
            )
        else:
            at[along] = ends[key.name][along]
            ends[key.name][along] += shape[along]
        boxes[key] = Box(tuple(at), tuple(shape))
    blocks = {}
    for key, box in boxes.items():
        to = Piece.whole(key.name, ends[key.name]).part(box)
        blocks[key] = [(key.name, Block(key, Copy(Strided.whole(box.sizes), to)))]
    targets = {name: (live.held[name].dtype, tuple(end)) for name, end in ends.items()}
    return MoveJob(tuple(_tasks(live, side, blocks)), targets, ())
