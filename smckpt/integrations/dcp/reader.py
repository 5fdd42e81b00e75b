"""Lets torch.distributed.checkpoint load from smckpt's checkpoints.

Logical names are the names of DCP's flattened state dict, and every saved box is a chunk. So any
DCP planner reads any box, from any mesh or flat parameter.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from smckpt.checkpoint.commits.choose import choose_commit
from smckpt.checkpoint.commits.contents import noticing_replacement
from smckpt.checkpoint.commits.foreign import holds_dcp
from smckpt.checkpoint.reading.committed import CommittedCatalogue, open_catalogue
from smckpt.checkpoint.reading.loading_rank import LoadingRank
from smckpt.checkpoint.reading.plan import plan_logical
from smckpt.checkpoint.reading.read import execute
from smckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    KeysMismatchError,
    UsageError,
)
from smckpt.layout.containers import flattened
from smckpt.layout.entries import Entry, Path, dotted
from smckpt.layout.geometry import BoxGeometry
from smckpt.layout.strided import Box
from smckpt.meeting.group import Group, group_of
from smckpt.state_dict.modes import neutral
from smckpt.state_dict.tensors import fill
from smckpt.storage import Storage, StoreOptions, open_storage, own_access
from smckpt.storage.budget import Share
from smckpt.storage.urls import normal_url

__all__ = ["DistributedFileSystemReader"]

log = logging.getLogger("smckpt")

WHOLE_VALUES = "nested values"  # in the versions of a manifest: each is one value, by its top key
_STAGED_BYTES = 1 << 30  # at most this many bytes are in buffers of tensors read indirectly


class DistributedFileSystemReader(StorageReader):
    """Reads a committed checkpoint of smckpt for `torch.distributed.checkpoint.load`.

    It compares every block with its checksum. Values that are not tensors come from this rank's own
    part or, with another world size, from that of saved rank i mod n.

    Args:
        checkpoint_id: the directory of a checkpoint of one group, or the directory above the
            groups' directories.
        threads: number of reading threads.
        process_group: the ranks that read together, such as `dist.group.WORLD`. The lowest rank
            then finds the commit and tells the others, which list nothing, and each keeps to its
            share of an S3 bucket's budget. All ranks of the group must then load together, each
            with a reader of the group, and meet in `read_metadata`. None: each rank looks by
            itself.
        timeout: seconds that the ranks of `process_group` wait for each other.
        storage: as in `smckpt.save`; None takes the environment's.

    Raises:
        UsageError: this process is not in `process_group`, `timeout` is not positive, or options of
            S3 are given for a disk or are unknown.
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str],
        *,
        threads: int = 4,
        process_group: Any = None,
        timeout: float = 1800.0,
        storage: StoreOptions | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.checkpoint_id = normal_url(os.fspath(checkpoint_id))
        self.access = own_access(self.checkpoint_id, storage)
        self._threads = threads
        self._process_group = process_group
        self._timeout = timeout
        self._group()  # raise here, where the mistake is
        if timeout <= 0:
            raise UsageError(f"timeout={timeout} is not positive", remedy="give seconds > 0")
        self.load_id = uuid4().hex  # of this load, as DCP's own reader has it
        self._catalogue: CommittedCatalogue | None = None
        self._objects: dict[str, Any] = {}
        # the error of read_metadata, of which DCP keeps only the text
        self.failure: CheckpointError | None = None

    @property
    def path(self) -> str:
        return self.checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether there is a committed checkpoint of smckpt."""
        try:
            choose_commit(open_storage(checkpoint_id))
        except CheckpointError:
            return False
        return True

    @classmethod
    def leaves_to_dcp(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether DCP wrote what is here, and smckpt has committed nothing. It lists.

        Raises:
            UsageError: both have saved here, and nothing tells which is newer.
            CorruptCheckpointError, FormatVersionError: what smckpt has committed cannot be read.
        """
        storage = open_storage(checkpoint_id)
        if not holds_dcp(storage.names(".metadata", "__0.metadata")):
            return False
        try:
            open_catalogue(storage)
        except CheckpointNotFoundError:
            return True
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, which looks for the newest commit again."""
        if checkpoint_id:
            self.checkpoint_id = normal_url(os.fspath(checkpoint_id))
        self._catalogue = self.failure = None
        self.load_id = uuid4().hex

    def read_metadata(self) -> Metadata:
        """The saved tensors and values, in DCP's terms.

        Raises:
            CheckpointNotFoundError: nothing is committed there.
            CheckpointReplacedError: a newer save replaced it during the read.
            CorruptCheckpointError: a record does not fit its checksum.
            FormatVersionError: a newer version wrote it.
        """
        try:
            catalogue = self._opened()
            with noticing_replacement(self._storage(), catalogue.identity):
                return self._metadata(catalogue)
        except CheckpointError as error:
            self.failure = error
            raise

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Called by DCP; there is nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Called by DCP: tells the coordinator which commit this rank follows."""
        return replace(plan, storage_data=self._opened().identity)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Called by DCP on the coordinator.

        Raises:
            UsageError: ranks found different commits, because a save committed meanwhile.
        """
        seen = {plan.storage_data for plan in plans if plan.storage_data is not None}
        if len(seen) > 1:
            raise UsageError(
                f"the ranks found different commits: {sorted(seen)}",
                remedy="load when no save into this directory is under way",
                path=self.checkpoint_id,
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Called by DCP: fill the tensors of the plan.

        Raises:
            CorruptCheckpointError: a block differs from what was written; names file and offset.
            CheckpointReplacedError: a newer save swept the checkpoint.
        """
        catalogue = self._opened()
        with noticing_replacement(self._storage(), catalogue.identity):
            tensors = []
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, self._bytes_of(item))
                else:
                    tensors.append(item)
            for batch in _batches(tensors, planner):
                self._read(catalogue, batch)
                for item, target in batch:
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # -- inside ------------------------------------------------------------------------------

    def _opened(self) -> CommittedCatalogue:
        if self._catalogue is None:
            if (group := self._group()) is None:
                self._catalogue = open_catalogue(self._storage())
            else:
                from smckpt.engine.api import _RUNTIME  # this process's, as in `smckpt.load`

                self._catalogue = _RUNTIME.loader(group).open(self._storage(), self._timeout)
            self._objects = {}
        return self._catalogue

    def _group(self) -> Group | None:
        """The group as it is now: the job may have destroyed it since."""
        if self._process_group is None:
            return None
        group = group_of(self._process_group)
        if group is None:
            raise UsageError(
                "this process is not a member of the reader's process_group",
                remedy="make the reader on the ranks of the group only",
                path=self.checkpoint_id,
            )
        return group

    def _storage(self) -> Storage:
        """The directory's store, with this rank's share of the bucket's budget."""
        group = self._group()
        share = Share() if group is None else Share.of_rank(group.rank, group.world_size)
        return self.access.holding(share).open(self.checkpoint_id)

    def _metadata(self, catalogue: CommittedCatalogue) -> Metadata:
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        paths: dict[str, Path] = {}
        for name, tensor in catalogue.logical.items():
            boxes = {source.piece.box for source in catalogue.pieces.all(name)}
            entries[name] = TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, tensor.dtype)),
                torch.Size(tensor.shape),
                [
                    ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                    for box in sorted(boxes, key=lambda b: (b.offsets, b.sizes))
                ],
            )
            ((row, _), *_) = catalogue.pieces.by_name[name]
            kinds = catalogue.kinds(row.ranks[0])
            paths[name] = _as_cut_by_dcp(tensor.path, row.path, kinds)
        for path, value in self._flat_objects(catalogue):
            name = dotted(path)
            if name not in entries:
                entries[name] = BytesStorageMetadata()
                paths[name] = path
                self._objects[name] = value
        found = Metadata(
            entries,
            planner_data=paths,
            storage_data=catalogue.identity,
            storage_meta=StorageMeta(
                checkpoint_id=self.checkpoint_id,
                save_id=catalogue.manifests[0].attempt,
                load_id=self.load_id,
            ),
        )
        if (version := vars(filesystem).get("CURRENT_DCP_VERSION")) is not None:
            found.version = version  # a planner may ask; an older torch knows no version
        return found

    def _flat_objects(self, catalogue: CommittedCatalogue) -> Iterator[tuple[Path, Any]]:
        """This rank's values, cut as DCP cuts a nested state dict. After them those of the lowest
        rank, because one rank may save a value for all."""
        saved = sorted(catalogue.object_ranks)
        if not saved:
            return
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        mine = rank if rank in saved else saved[rank % len(saved)]
        for each in dict.fromkeys((mine, saved[0])):
            optimizers, kinds = catalogue.optimizers_of(each), catalogue.kinds(each)
            for stored, value in catalogue.objects(each).values():
                path = _as_cut_by_dcp(stored, stored, kinds)
                if WHOLE_VALUES in catalogue.manifests[0].versions:
                    yield path, value
                yield from flattened(path, _with_names(path, value, optimizers), torch.Tensor)

    def _bytes_of(self, item: ReadItem) -> io.BytesIO:
        name = item.storage_index.fqn
        if name not in self._objects:
            self.read_metadata()
        if name not in self._objects:
            raise KeysMismatchError(
                f"{name} is not in the checkpoint",
                remedy="load with the metadata that read_metadata returned",
                path=self.checkpoint_id,
            )
        data = io.BytesIO()
        torch.save(self._objects[name], data)
        data.seek(0)
        return data

    @neutral()
    def _read(
        self,
        catalogue: CommittedCatalogue,
        batch: list[tuple[ReadItem, torch.Tensor]],
    ) -> None:
        entries, buffers, late = [], [], []
        for number, (item, target) in enumerate(batch):
            tensor = catalogue.logical[item.storage_index.fqn]
            entries.append(_entry(number, tensor.name, tensor.dtype, tensor.shape, item))
            dtype = getattr(torch, tensor.dtype)
            memory = target
            if not _readable(target, dtype):
                if target.dtype != dtype:
                    log.debug("%s: read as %s, target %s", tensor.name, dtype, target.dtype)
                memory = torch.empty(target.shape, dtype=dtype, device="cpu")
                late.append((target, memory))
            data: Any = memory.reshape(-1).view(torch.uint8).numpy()
            buffers.append(memoryview(data))
        plan = plan_logical(LoadingRank(catalogue, 0, (0,)), entries)
        if plan.missing:
            raise CorruptCheckpointError(
                f"not in the checkpoint: {sorted(plan.missing)[:8]}",
                remedy="load with the metadata that read_metadata returned",
                path=self.checkpoint_id,
            )
        execute(plan.copies, buffers, threads=self._threads)
        for target, memory in late:
            fill(target, memory)


def _batches(
    items: list[ReadItem], planner: LoadPlanner
) -> Iterator[list[tuple[ReadItem, torch.Tensor]]]:
    """The items with their targets, in batches that bound the memory of buffers."""
    batch: list[tuple[ReadItem, torch.Tensor]] = []
    staged = 0
    for item in items:
        target = planner.resolve_tensor(item).detach()
        if tuple(target.shape) != tuple(item.lengths):
            raise UsageError(
                f"{item.dest_index.fqn}: the planner gave a tensor of shape "
                f"{tuple(target.shape)} for a box of {tuple(item.lengths)}",
                remedy="resolve_tensor must return exactly the part that is to be filled",
            )
        need = 0 if _readable(target, target.dtype) else target.numel() * 8
        if batch and staged + need > _STAGED_BYTES:
            yield batch
            batch, staged = [], 0
        batch.append((item, target))
        staged += need
    if batch:
        yield batch


def _readable(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a read can go straight into the tensor's memory."""
    return (
        target.device.type == "cpu"
        and target.dtype == dtype
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    )


def _entry(number: int, name: str, dtype: str, shape: tuple[int, ...], item: ReadItem) -> Entry:
    """The box of logical tensor `name` that a read item asks for."""
    origin = item.storage_index.offset
    if origin is None:
        raise UsageError(
            f"{name}: the planner's read item names a chunk without its offset",
            remedy="keep the storage_index of DCP's read items",
        )
    offsets = tuple(o + d for o, d in zip(origin, item.storage_offsets, strict=True))
    box = Box(offsets, tuple(item.lengths))
    return Entry(
        path=(name, number),
        dtype=dtype,
        geometry=BoxGeometry(name, tuple(shape), (box,), (0,)),
        before=(),
        after=(),
        ranks=(0,),
    )


# -- paths and values as DCP has them --------------------------------------------------------------


def _as_cut_by_dcp(path: Path, stored: Path, kinds: Mapping[Path, str] | None) -> Path:
    """A path in which places in lists alone are numbers, as DCP's are: what builds a state from
    them (`dcp_to_torch_save`) makes lists for numbers and dicts for text.

    Args:
        stored: the same path, under which the kinds of its containers are recorded.
    """
    if kinds is None or len(path) != len(stored):
        return path
    return tuple(
        int(part) if kinds.get(stored[:depth]) in ("list", "tuple") else str(part)
        for depth, part in enumerate(path)
    )


def _with_names(path: Path, value: Any, optimizers: Mapping[str, Any]) -> Any:
    """`param_groups` of an optimizer that was saved by number, with names of parameters, as
    FSDP.optim_state_dict_to_load and torch's set_optimizer_state_dict expect.
    """
    if not path or path[-1] != "param_groups" or not isinstance(value, list):
        return value
    known = optimizers.get(dotted(path[:-1]))
    if known is None or known.get("form") != "id":
        return value
    ids = known["ids"]
    if not any(names != [str(number)] for number, names in enumerate(ids)):
        return value  # nothing named its parameters
    return [
        {**group, "params": [fqn for number in group["params"] for fqn in ids[number]]}
        for group in value
    ]
