"""A file or directory that appears whole, under a name that is free, or not at all; and a
directory of torch DCP in it."""

from __future__ import annotations

import io
import os
import secrets
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from smckpt.checkpoint.reading.catalogue import LogicalTensor
from smckpt.errors import CheckpointError, StorageError, UsageError
from smckpt.layout.entries import Path, dotted
from smckpt.layout.strided import Box
from smckpt.storage.disk.directory import Directory
from smckpt.storage.disk.posix_write import publish
from smckpt.storage.faults import os_errors_at, storage_error

UNFINISHED = ".unfinished"


class NewTarget:
    """A new file or directory beside `target` that becomes it at the end of the block, unless it
    fails or something is there by then.

    Nothing is reached through a link that somebody puts there meanwhile: the directory above both,
    which the user named, stays open, and so does what is made in it.
    """

    def __init__(self, target: str, *, directory: bool) -> None:
        self.target, self._directory = target, directory
        self._name = os.path.basename(target)
        self._begun = f"{self._name}.{secrets.token_hex(6)}{UNFINISHED}"

    def __enter__(self) -> NewTarget:
        above = os.path.dirname(self.target)
        with os_errors_at(above, "make the directory"):
            self._above = Directory.open(above, make=True)
        try:
            there = self._above.status(self._name)
            taken = there is not None
            if there is not None and self._directory and stat.S_ISDIR(there.st_mode):
                with self._above.below(self._name) as directory:
                    taken = bool(directory.names())
            if taken:
                raise self._taken()
            if self._directory:
                self._made = self._above.make(self._begun)
            else:
                self._fd = self._above.create(self._begun)
        except BaseException as error:
            self._above.close()
            if isinstance(error, OSError):
                raise storage_error(error, self.target, "write") from error
            raise
        return self

    @contextmanager
    def file(self, name: str = "") -> Iterator[BinaryIO]:
        """The new file, or one in the new directory, durable at the end of the block.

        Args:
            name: in a directory; "a/b" is below another one.
        """
        *folders, last = name.split("/")
        with ExitStack() as stack:
            if self._directory:
                above = stack.enter_context(self._made.below(*folders, make=True))
                fd = above.create(last)
            else:
                fd = os.dup(self._fd)
            with open(fd, "wb") as file:
                yield file
                file.flush()
                os.fsync(fd)
            if folders:
                above.sync()

    def put(self, name: str, data: bytes) -> None:
        """Write a file in the new directory."""
        with self.file(name) as file:
            file.write(data)

    @contextmanager
    def folder(self, name: str) -> Iterator[str]:
        """The path of a directory that is made in the new one, durable at the end of the block."""
        with self._made.make(name) as made:
            yield f"{self.path()}/{name}"
            made.sync()

    def path(self) -> str:
        """A path of the new directory, for writers that take no descriptor."""
        return self._made.path_for_others()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if error is None:
                try:
                    if self._directory:
                        self._made.sync()
                        # refused unless the target is empty
                        self._above.rename(self._begun, self._name)
                    elif not publish(self._above, self._begun, self._name):
                        raise self._taken()
                    self._above.sync()
                except OSError as failed:
                    if self._above.status(self._name) is not None:
                        raise self._taken() from failed
                    raise storage_error(
                        failed, self.target, "name the finished checkpoint"
                    ) from failed
            elif isinstance(error, OSError):
                raise storage_error(error, self.target, "write") from error
        finally:
            if self._directory:
                self._made.close()
            else:
                os.close(self._fd)
            with self._above, suppress(OSError):
                self._above.remove_all(self._begun)

    def _taken(self) -> UsageError:
        return UsageError(
            "something is there already", remedy="choose another target", path=self.target
        )


_AT_ONCE = 64 << 20  # bytes of a part; larger tensors are saved in several


def write_dcp(
    directory: str,
    tensors: Mapping[Path, LogicalTensor],
    values: Mapping[Path, Any],
    read: Callable[[LogicalTensor, Box, memoryview], None],
) -> None:
    """Save a state that is flattened as DCP flattens one.

    Args:
        read: fills memory with a box of a tensor. At most one box is in memory.

    Raises:
        StorageError: DCP's writer failed; or what `read` raised.
    """
    # one thread without copies ahead: the buffer of a part is used again for the next
    writer = FileSystemWriter(directory, thread_count=1, per_thread_copy_ahead=0)
    planner = _Planner(tensors, values, read)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save({}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, (CheckpointError, OSError)):
            raise cause from error
        raise StorageError(
            f"torch.distributed.checkpoint failed: {type(cause).__name__}: {cause}",
            remedy="see its traceback", path=os.path.realpath(directory),
        ) from error  # fmt: skip


class _Planner(DefaultSavePlanner):
    """Plans a state that is not in memory. A part is read when DCP writes it."""

    def __init__(
        self,
        tensors: Mapping[Path, LogicalTensor],
        values: Mapping[Path, Any],
        read: Callable[[LogicalTensor, Box, memoryview], None],
    ) -> None:
        super().__init__()
        self._tensors = {dotted(path): tensor for path, tensor in tensors.items()}
        self._values = {dotted(path): value for path, value in values.items()}
        self._paths = {dotted(path): path for path in (*tensors, *values)}
        self._read = read
        # DCP's writer keeps the last part of every tensor until its file is whole
        self._buffer = bytearray(_AT_ONCE)

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._values]
        for name, tensor in self._tensors.items():
            for box in tensor.chunks(_AT_ONCE):
                offsets = torch.Size(box.offsets)
                data = TensorWriteData(
                    ChunkStorageMetadata(offsets, torch.Size(box.sizes)),
                    TensorProperties(dtype=getattr(torch, tensor.dtype)),
                    torch.Size(tensor.shape),
                )
                index = MetadataIndex(name, offsets)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data=self._paths)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.flatten_state_dict = True  # then it records the paths
        made: tuple[list[SavePlan], Metadata] = super().create_global_plan(all_plans)
        return made

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name = write_item.index.fqn
        if write_item.tensor_data is None:
            data = io.BytesIO()
            torch.save(self._values[name], data)
            return data
        chunk, tensor = write_item.tensor_data.chunk, self._tensors[name]
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        if not box.numel:
            return torch.empty(box.sizes, dtype=dtype)
        nbytes = box.numel * tensor.itemsize
        if nbytes > len(self._buffer):  # one element of a row that is never cut
            self._buffer = bytearray(nbytes)
        memory = memoryview(self._buffer)[:nbytes]
        self._read(tensor, box, memory)
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).reshape(box.sizes)
