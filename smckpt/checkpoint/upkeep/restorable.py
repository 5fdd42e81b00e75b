"""Whether a checkpoint loads on a job of other degrees, by its metadata alone: `restorable_at`.

Each kind of rank that such a job has is planned as `load` plans it, for the whole of each tensor.
So the answer holds for any sharding. Records, manifests, parts and the sizes of files are read, and
no byte of a data file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from smckpt.checkpoint.commits.contents import what_is_missing
from smckpt.checkpoint.commits.discover import find_checkpoints
from smckpt.checkpoint.reading.committed import CommittedCatalogue, open_catalogue
from smckpt.checkpoint.reading.loading_rank import LoadingRank
from smckpt.checkpoint.reading.plan import Planner
from smckpt.checkpoint.upkeep.difference import values_apart
from smckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UsageError,
    few,
)
from smckpt.layout.entries import Entry
from smckpt.layout.geometry import BoxGeometry
from smckpt.layout.strided import Box
from smckpt.storage import StoreOptions, access_to
from smckpt.topology import ParallelState

_KEYS: Mapping[str, str] = {
    "world": "world_size", "tp": "tensor_parallel_degree", "ep": "expert_parallel_degree",
    "cp": "context_parallel_degree", "pp": "pipeline_parallel_degree",
    "shard": "hybrid_shard_degree", "replicas": "",
}  # fmt: skip
_FACTORS = ("tp", "ep", "pp", "shard", "replicas")


@dataclass(frozen=True)
class Obstacle:
    """Why it does not load. names: the tensors concerned; () if it concerns all of them."""

    what: str
    remedy: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Restorable:
    """What was found.

    Args:
        url, step, kind, ranks: of the checkpoint; its number of ranks.
        world_size: of the job that would load it.
        obstacles: why it does not load; () if it does.
        per_rank: names of which each saved rank has a version of its own. The job's rank i takes
            that of saved rank i, or of i mod n where it has not as many ranks.
        same_ranks: whether each rank finds its own version.
    """

    url: str
    step: int | None
    kind: str | None
    ranks: int
    world_size: int
    obstacles: tuple[Obstacle, ...]
    per_rank: tuple[str, ...]
    same_ranks: bool

    @property
    def loads(self) -> bool:
        return not self.obstacles

    def to_json(self) -> dict[str, Any]:
        return {"loads": self.loads, **asdict(self)}


def parse_geometry(text: str) -> ParallelState:
    """The degrees in a text such as "tp=2,shard=64".

    The keys are tp, ep, cp, pp, shard, replicas and world. world is the product of the others if it
    is left out; shard fills the world if only that is given.

    Raises:
        UsageError: a key is unknown or there twice, or a value is no number.
        TopologyError: the degrees do not fit the world.
    """
    remedy = 'pass degrees such as "tp=2,shard=64"; the keys are ' + ", ".join(_KEYS)
    sizes: dict[str, int] = {}
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"([a-z]+)=([0-9]{1,7})", part)
        if match is None or match.group(1) not in _KEYS or match.group(1) in sizes:
            raise UsageError(f"the geometry {text!r} has {part!r}", remedy=remedy)
        sizes[match.group(1)] = int(match.group(2))
    if not all(sizes.values()):
        raise UsageError(f"the geometry {text!r} has a degree of 0", remedy=remedy)
    product = 1
    for key in _FACTORS:
        product *= sizes.get(key, 1)
    world = sizes.get("world", product)
    if world % product or ("replicas" in sizes and "shard" in sizes and world != product):
        raise UsageError(
            f"the degrees in {text!r} give {product} ranks, which do not fit world={world}",
            remedy=remedy,
        )
    if "shard" not in sizes and "replicas" in sizes:
        sizes["shard"] = world // product
    elif "shard" not in sizes and "world" not in sizes:
        sizes["shard"] = 1
    degrees = {_KEYS[key]: n for key, n in sizes.items() if _KEYS[key]}
    return ParallelState.from_json({**degrees, "world_size": world}, rank=0)


def restorable_at(
    directory: str | os.PathLike[str],
    geometry: ParallelState,
    *,
    storage: StoreOptions | Mapping[str, Any] | None = None,
) -> Restorable:
    """Say whether the newest checkpoint at or below `directory` loads on a job of these degrees,
    under SHARDED or FULL; under LOCAL it also needs the shard degree that was saved.

    Args:
        directory: a checkpoint, or a directory above checkpoints: then the newest step.
        geometry: the degrees of the job.
        storage: as for `smckpt.load`.

    Raises:
        CheckpointNotFoundError, FormatVersionError: there is no checkpoint that can be judged.
    """
    access = access_to(directory, storage=storage)
    opened = access.open(directory)
    found = _Found()
    try:
        catalogue = open_catalogue(opened)
    except CheckpointNotFoundError:
        below = find_checkpoints(os.fspath(directory), storage=storage)
        if not below:
            raise
        opened = access.open(below[-1].path)
        catalogue = open_catalogue(opened)
    except CorruptCheckpointError as error:
        found.add(error)
        return Restorable(
            opened.url, None, None, 0, geometry.world_size, found.obstacles, (), False
        )
    if catalogue.whole:
        try:
            if missing := what_is_missing(opened, catalogue.identity):
                remedy = f"`smckpt repair {opened.url} --from COPY`, or use an older step"
                found.add(CorruptCheckpointError(missing, remedy=remedy))
        except CheckpointError as error:
            found.add(error)
    else:
        found.obstacles += (
            Obstacle(
                f"this is one group of a step, with ranks {few(catalogue.object_ranks, 8)}; the "
                "other groups are missing here",
                f"judge the directory of the step, {catalogue.above}",
            ),
        )
    if not found.obstacles:
        _plan(catalogue, geometry, found)
    ranks = len(catalogue.object_ranks)
    per_rank = () if not catalogue.whole else _per_rank(catalogue, found)
    same = catalogue.object_ranks == tuple(range(geometry.world_size))
    return Restorable(
        catalogue.url, catalogue.step, catalogue.kind, ranks, geometry.world_size,
        found.obstacles, per_rank, same,
    )  # fmt: skip


class _Found:
    """The obstacles so far. One that concerns many tensors is there once, with their names."""

    def __init__(self) -> None:
        self.obstacles: tuple[Obstacle, ...] = ()
        self._of: dict[tuple[str, str], list[str]] = {}

    def add(self, error: CheckpointError, name: str = "") -> None:
        what = error.message if not name else error.message.partition(": ")[2] or error.message
        names = self._of.setdefault((what, error.remedy), [])
        if name and name not in names:
            names.append(name)
        self.obstacles = tuple(
            Obstacle(what, remedy, tuple(names)) for (what, remedy), names in self._of.items()
        )


def _plan(catalogue: CommittedCatalogue, geometry: ParallelState, found: _Found) -> None:
    """Plan each tensor whole, for one rank of each tensor-, expert- and pipeline-parallel
    coordinate: the others of it find the same."""
    group = range(geometry.world_size)
    ranker = geometry.ranker
    seen: dict[tuple[int, ...], int] = {}
    for rank in group:
        at = ranker.get_tp_rank(rank), ranker.get_ep_rank(rank), ranker.get_pp_rank(rank)
        seen.setdefault(at, rank)
    for rank in seen.values():
        live = ParallelState.from_json(geometry.to_json(), rank=rank)
        planner = Planner(LoadingRank.of(catalogue, rank, group, live=live))
        for name in catalogue.logical:
            try:
                dtype, shape = planner.form(name)
                rule = BoxGeometry(name, shape, (Box.whole(shape),), (rank,))
                planner.check(Entry((name,), dtype, rule, (), (), (rank,)))
            except CheckpointError as error:
                found.add(error, name)


def _per_rank(catalogue: CommittedCatalogue, found: _Found) -> tuple[str, ...]:
    """The names of tensors and values of which ranks have their own."""
    names: set[str] = set()
    for name, rows in catalogue.pieces.by_name.items():
        own = {rank for row, _ in rows if row.geometry.per_rank for rank in row.ranks}
        beside = any(catalogue.pieces.filled(row, fqn) for row, fqn in rows)  # a parameter's step
        if len(own) > 1 and not beside:
            names.add(name)
    try:
        names.update(values_apart(catalogue))
    except CheckpointError as error:
        found.add(error)
    return tuple(sorted(names))
