"""A directory of torch.distributed.checkpoint, written by DCP's own writer as it streams."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

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
from smckpt.errors import CheckpointError, StorageError
from smckpt.layout.entries import Path, dotted
from smckpt.layout.strided import Box

__all__ = ["write_dcp"]

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
        for tensor in self._tensors.values():
            for box in tensor.chunks(_AT_ONCE):
                offsets = torch.Size(box.offsets)
                data = TensorWriteData(
                    ChunkStorageMetadata(offsets, torch.Size(box.sizes)),
                    TensorProperties(dtype=getattr(torch, tensor.dtype)),
                    torch.Size(tensor.shape),
                )
                index = MetadataIndex(tensor.name, offsets)
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
