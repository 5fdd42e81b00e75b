"""Lets torch.distributed.checkpoint save in smckpt's format.

DCP plans with its collectives which rank writes which box. Each rank writes its boxes as a part,
and the coordinator's `finish` publishes the manifest. Until then a reader finds nothing new, and
committed files are not touched.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import io
import logging
import os
import socket
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from pathlib import PurePosixPath
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from smckpt.checkpoint.commits.choose import choose_commit, refuse_committed
from smckpt.checkpoint.commits.commit import probe, publish_manifest, take_lease
from smckpt.checkpoint.commits.part import part_body
from smckpt.checkpoint.commits.sweep import sweep
from smckpt.checkpoint.records.format import attempt_of
from smckpt.checkpoint.records.objects import encode_object
from smckpt.checkpoint.records.prefixes import spread_of
from smckpt.checkpoint.records.rows import encode_rows
from smckpt.engine.background.commands import ArenaFile, WritePart
from smckpt.engine.background.worker_write import write_part
from smckpt.engine.saving.differing import ranks_text, refuse_different
from smckpt.engine.saving.moment import Moment, moment_of, moment_read
from smckpt.errors import CheckpointError, StateError, UsageError
from smckpt.integrations.dcp.reader import WHOLE_VALUES
from smckpt.layout.containers import joined
from smckpt.layout.entries import DTYPES, Entry, ObjectLeaf, Path, dotted
from smckpt.layout.geometry import BoxGeometry
from smckpt.layout.image import Layout, compile_layout
from smckpt.layout.strided import Box
from smckpt.staging.arena import Arena, check_memory
from smckpt.staging.copies import stage
from smckpt.state_dict.modes import neutral
from smckpt.state_dict.select import Selection
from smckpt.storage import StoreOptions, open_storage, own_access
from smckpt.storage.budget import Share, Spread
from smckpt.storage.preflight import refuse_save
from smckpt.storage.urls import bucket_url, normal_url

__all__ = ["DistributedFileSystemWriter"]

log = logging.getLogger("smckpt")

# Beside what torch takes: types of values that smckpt stores, and that run nothing of the user's.
_PLAIN: list[Any] = [
    *(argparse.Namespace, collections.defaultdict, datetime.timedelta, io.BytesIO),
    *(type(FilePath()), PurePosixPath, list, dict, int, float, str),
]


@dataclass(frozen=True)
class _Ticket:
    """The coordinator's message to each rank of a save, inside its plan.

    ranks: global ranks, by rank of the process group. objects: names that the global plan keeps.
    spread: the prefixes of the ranks' files.
    """

    session: str
    number: int
    rank: int
    ranks: tuple[int, ...]
    objects: frozenset[str]
    spread: Spread | None = None

    @property
    def attempt(self) -> str:
        return attempt_of(self.session, self.number)


class DistributedFileSystemWriter(StorageWriter):
    """Writes a checkpoint of smckpt for `torch.distributed.checkpoint.save` and `async_save`.

    Each rank saves its own values that are not tensors; DCP's own writer keeps those of one rank.
    With `smckpt.async_save` and no planner, the writer only names the directory, and the engine
    saves.

    Args:
        path: the checkpoint's directory. A second save there commits a newer state, and then
            deletes the files that it supersedes.
        step: the training step to record.
        metadata: JSON values to record.
        threads: number of writing threads.
        sweep: whether a new commit deletes the files that it supersedes.
        per_rank: as in `SaveOptions`.
        overwrite: False refuses a save where a checkpoint is committed, before anything is written.
        storage: as in `smckpt.save`; None takes the environment's.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        threads: int = 4,
        sweep: bool = True,
        overwrite: bool = True,
        per_rank: Sequence[str] = (),
        storage: StoreOptions | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._per_rank = tuple(per_rank)
        self.checkpoint_id = normal_url(os.fspath(path))
        self.access = own_access(self.checkpoint_id, storage)
        self._step = step
        self._metadata = dict(metadata or {})
        self._threads = threads
        self._sweep = sweep
        self.overwrite = overwrite
        self._session = uuid.uuid4().hex[:12]
        self._numbers = 0
        self._tokens: dict[str, int] = {}
        self._own: tuple[WriteItem, ...] = ()
        self._ticket: _Ticket | None = None
        self._whole = False  # DCP's planner has not cut nested values (flatten_state_dict=False)
        self.used_by_engine = False  # the engine saves, and the writer only names the directory

    @property
    def save_id(self) -> str:
        """Of the save that DCP has under way or was the last, as DCP's own writer has it; or of the
        newest commit here, where the engine saves. A reader's metadata has the same."""
        if self._ticket is not None:
            return self._ticket.attempt
        if self.used_by_engine:
            ((_, manifest), *_) = choose_commit(self.access.open(self.checkpoint_id)).manifests
            return manifest.attempt
        return attempt_of(self._session, self._numbers)

    @property
    def path(self) -> str:
        return self.checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a store of smckpt is known for it."""
        try:
            open_storage(checkpoint_id)
        except UsageError:
            return False
        return True

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save."""
        if checkpoint_id:
            self.checkpoint_id = normal_url(os.fspath(checkpoint_id))
        self._ticket = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by DCP.

        Raises:
            UsageError: DCP was told to save without coordination.
        """
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "use_collectives=False would commit each rank's part as a checkpoint of its own",
                remedy="leave it True, or call smckpt.async_save, which runs no collective",
                path=self.checkpoint_id,
            )
        _forget_cached_plans()  # the planner then makes whole plans

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Called by DCP on each rank."""
        self._refuse_cached([plan])
        self._own = tuple(plan.items)
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return replace(plan, storage_data=rank)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Called by DCP on the coordinator: opens the attempt and takes the lease of the directory.

        Raises:
            UsageError: a plan comes from a planner's own cache, or `overwrite` is False and a
                checkpoint is committed there.
            StorageError: the directory cannot be used.
        """
        self._refuse_cached(plans)
        storage = self.access.open(self.checkpoint_id)
        refuse_save(storage, len(plans), by_worker=False)
        if not self.overwrite:
            refuse_committed(storage)
        spread = spread_of(storage)
        if self.checkpoint_id not in self._tokens:
            if not self._tokens and bucket_url(self.checkpoint_id):
                probe(self.access, self.checkpoint_id, self._session, create=True, leave=False)
            lease = take_lease(
                self.access.holding(self.access.share, spread),
                self.checkpoint_id,
                self._session,
                socket.gethostname(),
            )
            self._tokens[self.checkpoint_id] = int(lease["fencing_token"])
        own = [plan.storage_data for plan in plans]
        known = all(isinstance(rank, int) for rank in own) and len(set(own)) == len(own)
        ranks = tuple(own) if known else tuple(range(len(plans)))
        objects = frozenset(
            item.index.fqn
            for plan in plans
            for item in plan.items
            if item.type == WriteItemType.BYTE_IO
        )
        number, self._numbers = self._numbers, self._numbers + 1
        self._ticket = _Ticket(self._session, number, -1, ranks, objects, spread)
        return [
            replace(plan, storage_data=replace(self._ticket, rank=rank))
            for plan, rank in zip(plans, ranks, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Called by DCP: write this rank's part; durable on return.

        Raises:
            StateError: a value cannot be stored safely; names it.
            StorageError: the store refused; the files written so far are removed.
        """
        _forget_cached_plans()  # another writer would not know this one's
        ticket = plan.storage_data
        if not isinstance(ticket, _Ticket):
            raise UsageError(
                f"the planner {type(planner).__name__} lost the plan's storage_data",
                remedy="make plans with dataclasses.replace, so that storage_data stays",
                path=self.checkpoint_id,
            )
        paths = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
        chosen = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        self._whole = not isinstance(plan.planner_data, Mapping)
        entries, tensors = _entries(chosen, planner, paths, ticket.rank)
        layout = compile_layout(entries, rank=ticket.rank, group_ranks=ticket.ranks)
        values = self._values(plan, planner, paths, ticket)
        lists = {  # in DCP's paths only these have numbers
            entry.path[:depth]: "list"
            for entry in layout.entries
            for depth, key in enumerate(entry.path)
            if isinstance(key, int)
        }
        part = part_body(
            layout,
            encode_rows(layout.entries, lists),
            checkpoint_id=self.checkpoint_id,
            kind="SHARDED",
            step=self._step,
            objects={
                dotted(path): {"path": list(path), "value": encode_object(value, path=dotted(path))}
                for path, value in values
            },
            metadata=self._metadata,
            versions={
                "torch": str(torch.__version__),
                **({WHOLE_VALUES: "DCP's planner did not cut them"} if self._whole else {}),
            },
        )
        done = self._write(ticket, layout, dict(zip(map(id, entries), tensors, strict=True)), part)
        done["host"] = part["host"]
        done["moment"] = vars(self._moment(planner, paths, values, ticket.rank))
        results = []
        for item in plan.items:
            size = 0
            if (data := item.tensor_data) is not None:
                size = data.chunk.sizes.numel() * data.properties.dtype.itemsize
            results.append(WriteResult(item.index, size, None))
        results.append(WriteResult(MetadataIndex(""), 0, {"rank": ticket.rank, **done}))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called by DCP on the coordinator when every rank has written: the commit.

        Raises:
            UsageError: the ranks would save different steps as one.
            StorageError: the store refused, or a later run has taken a lease on the directory.
        """
        ticket = self._ticket
        assert ticket is not None
        parts = {
            str(part["rank"]): {"part": part["part"], "crc64": part["crc64"], "host": part["host"]}
            for part in (ranks_results[-1].storage_data for ranks_results in results)
        }
        moments = (moment_read(each[-1].storage_data["moment"]) for each in results)
        refuse_different(
            {rank: moment or Moment() for rank, moment in zip(ticket.ranks, moments, strict=True)},
            ranks_text,
        )
        fencing_token = self._tokens[self.checkpoint_id]
        published = publish_manifest(
            self.access.holding(self.access.share, ticket.spread),
            directory=self.checkpoint_id,
            attempt=ticket.attempt,
            fencing_token=fencing_token,
            ranks=list(ticket.ranks),
            parts=parts,
            record=None,
        )
        if self._sweep:
            try:
                sweep(
                    self.access,
                    directory=self.checkpoint_id,
                    keep=[published["manifest"]],
                    fencing_token=fencing_token,
                )
            except CheckpointError as error:  # the save is committed anyway
                log.warning(
                    "the files that %s supersedes are not deleted: %s", published["manifest"], error
                )

    # -- inside ------------------------------------------------------------------------------

    def _refuse_cached(self, plans: Iterable[SavePlan]) -> None:
        if not all(getattr(plan, "usable", True) for plan in plans):
            raise UsageError(
                "the planner has a cache of its own, whose plans name an earlier attempt's files",
                remedy="let it make a plan for each save; DCP's planners may cache",
                path=self.checkpoint_id,
            )

    def _values(
        self, plan: SavePlan, planner: SavePlanner, paths: Mapping[str, Path], ticket: _Ticket
    ) -> list[tuple[Path, Any]]:
        """This rank's own values, joined again where DCP cut them."""
        items = {
            item.index.fqn: item
            for item in (*self._own, *plan.items)
            if item.type == WriteItemType.BYTE_IO and item.index.fqn in ticket.objects
        }
        values = {_path_of(fqn, paths): _value(fqn, planner, item) for fqn, item in items.items()}
        tensors = {
            _path_of(item.index.fqn, paths)
            for item in (*self._own, *plan.items)
            if item.type != WriteItemType.BYTE_IO
        }
        return list(joined(values, tensors))

    def _moment(
        self,
        planner: SavePlanner,
        paths: Mapping[str, Path],
        values: Sequence[tuple[Path, Any]],
        rank: int,
    ) -> Moment:
        """What tells this save from the next one, for `finish`: a rank may have skipped one. Of
        this rank's own tensors, also those that another one writes, the scalars count."""
        scalars = [
            item
            for item in self._own
            if item.tensor_data is not None and item.tensor_data.size.numel() == 1
        ]
        entries, tensors = _entries(scalars, planner, paths, rank)
        selection = Selection(
            kind=None,
            entries=tuple(entries),
            tensors=tuple(boxes[0] for boxes in tensors),
            objects=tuple(ObjectLeaf(path, value) for path, value in values),
            optimizers={},
            containers={},
            parameters=frozenset(),
            stepped=frozenset(),
        )
        return moment_of(self.checkpoint_id, self._step, self._metadata, selection, self._per_rank)

    def _write(
        self,
        ticket: _Ticket,
        layout: Layout,
        tensors: Mapping[int, Sequence[torch.Tensor]],
        part: dict[str, Any],
    ) -> dict[str, Any]:
        arena = None
        if layout.arena_size:
            check_memory(layout.arena_size, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            arena = Arena(layout.arena_size)
        try:
            if arena is not None:
                with neutral():
                    stage(arena, layout, [tensors[id(entry)] for entry in layout.entries])
            spread, share = ticket.spread, Share.of_rank(ticket.rank, len(ticket.ranks))
            if spread is not None:
                under_one = spread.fullest(ticket.ranks)
                share = Share.of_rank(ticket.rank, under_one * spread.prefixes, spread.prefixes)
            done = write_part(
                self.access.holding(share, spread),
                cast(Any, arena and arena.view(0, arena.size)),
                WritePart(
                    directory=self.checkpoint_id,
                    attempt=ticket.attempt,
                    rank=ticket.rank,
                    arena=None,
                    files=tuple(ArenaFile(f.arena_offset, f.size) for f in layout.files),
                    part=part,
                ),
                threads=self._threads,
            )
            return dict(vars(done))
        finally:
            if arena is not None:
                arena.close()


def _forget_cached_plans() -> None:
    """Empty what DCP's planners cache in their class: such a plan names the files of an earlier
    save, or of another writer's."""
    for name, cache in vars(SavePlanner).items():
        if name.startswith("_cached_") and isinstance(cache, dict):
            cache.clear()


def _path_of(fqn: str, paths: Mapping[str, Path]) -> Path:
    return tuple(paths.get(fqn, (fqn,)))


def _entries(
    items: Iterable[WriteItem], planner: SavePlanner, paths: Mapping[str, Path], rank: int
) -> tuple[list[Entry], list[list[torch.Tensor]]]:
    """An entry for each tensor, with all boxes that this rank writes and their elements."""
    by_name: dict[str, list[WriteItem]] = {}
    for item in items:
        by_name.setdefault(item.index.fqn, []).append(item)
    entries, tensors = [], []
    for fqn, shards in by_name.items():
        boxes, data = [], []  # and their elements, which the planner may have changed
        for item in shards:
            planned, tensor = item.tensor_data, planner.resolve_data(item)
            assert planned is not None
            if not isinstance(tensor, torch.Tensor) or tensor.shape != planned.chunk.sizes:
                raise StateError(
                    f"{item.index.fqn}: the planner's data is not a tensor of shape "
                    f"{tuple(planned.chunk.sizes)}, as its plan says",
                    remedy="resolve_data must return what create_local_plan announced",
                )
            boxes.append(Box(tuple(planned.chunk.offsets), tuple(planned.chunk.sizes)))
            data.append(tensor.detach())
        path = _path_of(fqn, paths)
        turn = max(i for i, part in enumerate(path) if isinstance(part, str))
        first = shards[0].tensor_data
        assert first is not None
        geometry = BoxGeometry(str(path[turn]), tuple(first.size), tuple(boxes), (rank,))
        if (dtype := str(data[0].dtype).removeprefix("torch.")) not in DTYPES:
            raise StateError(f"{fqn} has dtype {dtype}", remedy="store it as another dtype")
        entries.append(
            Entry(
                path=path,
                dtype=dtype,
                geometry=geometry,
                before=path[:turn],
                after=path[turn + 1 :],
                ranks=(rank,),
            )
        )
        tensors.append(data)
    return entries, tensors


def _value(fqn: str, planner: SavePlanner, item: WriteItem) -> Any:
    """The value that DCP's planner would write, from its bytes; nothing in them is executed."""
    data: Any = planner.resolve_data(item)
    raw = data.getvalue() if isinstance(data, io.BytesIO) else data
    try:
        with torch.serialization.safe_globals(_PLAIN):
            return torch.load(io.BytesIO(raw), weights_only=True, map_location="cpu")
    except Exception as error:  # pickle, zip and torch each have their own
        with contextlib.suppress(CheckpointError):
            if type(planner) is DefaultSavePlanner:  # its bytes are those of the value itself
                value = planner.lookup_object(item.index)
                encode_object(value)
                return value
        raise StateError(
            f"the value {fqn} is not plain data: {str(error).splitlines()[0]}",
            remedy="save numbers, strings, lists, dicts, tensors, NumPy arrays and values of "
            "Python's library, and leave functions and custom objects out",
        ) from error
