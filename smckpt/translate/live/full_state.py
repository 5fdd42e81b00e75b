"""The full state of a live, tensor-parallel model, in Hugging Face's names or in its own.

Rank 0 learns what all ranks hold, proves the translation as `export_hf` does, and receives the
arrays one by one. It joins each tensor from its FSDP shards and copies it, block by block, into the
target tensors. A target goes to the CPU when it is whole.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from smckpt.errors import CheckpointError, TensorMismatchError, TopologyError, UsageError
from smckpt.formats.degrees import Degrees
from smckpt.formats.tensors import Block, RankTensors, TensorKey
from smckpt.full.parallel import Brought, FullWishes, by_rank, refuse_others
from smckpt.full.wire import Array, ArrayMetadata, Wire, arrays_of
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Box, Copy, Piece, Strided
from smckpt.meeting.round import over_group
from smckpt.state_dict.views import ModelView
from smckpt.topology import ParallelState, role_of
from smckpt.translate.config import read_config
from smckpt.translate.live.move import MoveJob, MovePlan, MoveTask, follow, lead
from smckpt.translate.models.model import prove, target_of
from smckpt.translate.tables.pieces import Side


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


_Rows = dict[int, ArrayMetadata]
Coordinate = tuple[int, int]  # tensor-parallel, expert-parallel


def live_tensors(
    metadata: list[dict[str, ArrayMetadata]], state: ParallelState | None
) -> LiveTensors:
    """The ranks' array metadata, in order of rank, with each rank's coordinate.

    Raises:
        TopologyError: the ranks' coordinates are not known; `state` is not this job's, or
            contradicts the meshes.
    """
    meshes = [_from_meshes(rows, known=state is None) for rows in metadata]
    if state is not None:
        ranks = len(metadata)
        if state.world_size != ranks:
            raise TopologyError(
                f"parallel_state has {state.world_size} ranks, the job has {ranks}",
                remedy="pass the ParallelState of this job",
            )
        if state.pp_size > 1:
            raise TopologyError(
                f"parallel_state has {state.pp_size} pipeline stages, and each numbers its "
                "layers from 0",
                remedy="take the full state of a model without pipeline parallelism",
            )
        at = [(state.ranker.get_tp_rank(r), state.ranker.get_ep_rank(r)) for r in range(ranks)]
        for rank, (mesh, here) in enumerate(zip(meshes, at, strict=True)):
            ours = (("tp", here[0], state.tp_size), ("ep", here[1], state.ep_size))
            for role, index, size in ours:
                if mesh[role] not in ((1, 0), (size, index)):
                    raise TopologyError(
                        f"rank {rank} is {role} rank {index} of {size} by parallel_state, and "
                        f"{mesh[role][1]} of {mesh[role][0]} by its device mesh",
                        remedy="pass the parallel_state that the mesh was made from",
                    )
        return LiveTensors(metadata, at, state.tp_size, state.ep_size)
    sizes = {(m["tp"][0], m["ep"][0]) for m in meshes}
    everywhere = len(metadata) == 1 or any(
        len(row.ranks) == len(metadata) for rows in metadata for row in rows.values()
    )
    if len(sizes) > 1 or (sizes == {(1, 1)} and not everywhere):
        raise TopologyError(
            "ranks hold tensors of their own, and it is not known which tensor-parallel "
            "rank each of them is",
            remedy="pass parallel_state= to sm_state_dict_type",
        )
    ((tp, ep),) = sizes
    return LiveTensors(metadata, [(m["tp"][1], m["ep"][1]) for m in meshes], tp, ep)


def _from_meshes(rows: Mapping[str, ArrayMetadata], *, known: bool) -> dict[str, tuple[int, int]]:
    """Size and index of the tensor- and the expert-parallel dimension of one rank's meshes.

    Args:
        known: refuse a dimension whose name tells no role.
    """
    found = {"tp": (1, 0), "ep": (1, 0)}
    for dims in {row.dims for row in rows.values()}:
        for name, size, index in dims:
            role = role_of(name) if size > 1 else "rep"
            if role in ("tp", "ep", "pp") and found.setdefault(role, (1, 0)) not in (
                (1, 0), (size, index)
            ):  # fmt: skip
                raise TopologyError(
                    f"meshes of the model have {role} dimensions of different sizes",
                    remedy="pass parallel_state= to sm_state_dict_type",
                )
            if role in ("tp", "ep"):
                found[role] = (size, index)
            if known and role in (None, "pp"):
                raise TopologyError(
                    f"the name of mesh dimension {name!r} does not tell whether it is "
                    "tensor-parallel",
                    remedy="pass parallel_state= to sm_state_dict_type, or call the dimensions tp, "
                    "ep, dp_shard, dp_replicate",
                )
    return found


@dataclass
class LiveTensors:
    """The tensors of all ranks, each with its rank's coordinate: the source of a proof."""

    metadata: list[dict[str, ArrayMetadata]]
    coordinates: list[Coordinate]
    tp: int
    ep: int
    url: str = ""
    rows: dict[str, _Rows] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank, names in enumerate(self.metadata):
            for name, row in names.items():
                self.rows.setdefault(name, {})[rank] = row
        self.held: Mapping[str, RankTensors] = _Lazily(self)

    @property
    def many(self) -> bool:
        return self.tp * self.ep > 1

    def holders(self, row: ArrayMetadata) -> set[Coordinate]:
        return {self.coordinates[rank] for rank in row.ranks}

    def hold(self, name: str) -> RankTensors:
        """Raises TopologyError, TensorMismatchError: the ranks' arrays do not form one tensor."""
        rows = self.rows[name]
        dtypes = {row.dtype for row in rows.values()}
        if len(dtypes) > 1:
            raise TensorMismatchError(
                f"{name} is {' and '.join(sorted(dtypes))} on different ranks",
                remedy="give it one dtype on all ranks",
            )
        shards: dict[Coordinate, Shape] = {}
        whole: Shape | None = None
        for rank, row in rows.items():
            holders = self.holders(row)
            if len(holders) == 1:
                known = shards.setdefault(self.coordinates[rank], row.shape)
            else:
                known = whole = row.shape if whole is None else whole
            if known != row.shape or len(holders) not in (1, self.tp * self.ep):
                raise TopologyError(
                    f"{name} is shared by ranks {list(row.ranks)}, which are neither all tensor- "
                    "and expert-parallel ranks nor one of them, or its shapes differ",
                    remedy="check that parallel_state= and the model's meshes are of one job",
                )
        if whole is not None and shards:
            raise TopologyError(
                f"{name} is distributed over tensor-parallel ranks on some ranks and not on others",
                remedy="distribute it in the same way on all ranks",
            )
        (dtype,) = dtypes
        return RankTensors(name, dtype, shards, whole)

    def parts(
        self, key: TensorKey, shape: Shape
    ) -> tuple[tuple[int, ArrayMetadata, tuple[Piece, ...]], ...]:
        """The senders of a stored tensor's pieces; of replicas, the first.

        Raises:
            TopologyError: the pieces do not cover it exactly.
        """
        seen: set[Box] = set()
        out = []
        for rank, row in self.rows[key.name].items():
            if key.tp >= 0 and self.coordinates[rank] != (key.tp, key.ep):
                continue
            new = tuple(piece for piece in row.pieces if piece.box not in seen)
            if new:
                seen.update(piece.box for piece in new)
                out.append((rank, row, new))
        if sum(box.numel for box in seen) != math.prod(shape):
            raise TopologyError(
                f"the ranks' parts of {key.name} do not cover its shape {list(shape)} exactly",
                remedy="check that parallel_state= and the model's meshes are of one job",
            )
        return tuple(out)

    def replica(self, key: TensorKey) -> tuple[tuple[int, ArrayMetadata, tuple[Piece, ...]], ...]:
        """The senders, as in `parts`, for the last rank that holds a copy of the tensor; () if
        there is only one."""
        found = [
            (rank, row, row.pieces) for rank, row in self.rows[key.name].items()
            if self.coordinates[rank] == (key.tp, key.ep) and row.ranks == (rank,)
        ]  # fmt: skip
        return tuple(found[-1:]) if len(found) > 1 else ()


class _Lazily(Mapping[str, RankTensors]):
    """Looks at a tensor only when a caller asks for it. Names alone show the layout, and a tensor
    that is not a weight may have any form."""

    def __init__(self, live: LiveTensors) -> None:
        self._live = live
        self._known: dict[str, RankTensors] = {}

    def __getitem__(self, name: str) -> RankTensors:
        if name not in self._known:
            self._known[name] = self._live.hold(name)
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._live.rows)

    def __len__(self) -> int:
        return len(self._live.rows)

    def __contains__(self, name: object) -> bool:
        return name in self._live.rows
