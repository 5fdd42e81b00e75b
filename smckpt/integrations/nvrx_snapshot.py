"""A request as it is at one moment: pickled, with copies of its tensors in an arena.

torch's own pickling of a tensor for another process moves its memory into shared memory, so the
worker would read what the trainer still changes. Here the worker gets a copy. All tensors arrive in
host memory; tensors that share memory still do.
"""

from __future__ import annotations

import io
import mmap
import pickle
import queue
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from smckpt.errors import UsageError
from smckpt.staging.arena import Arena
from smckpt.staging.copies import copy_all
from smckpt.state_dict.modes import neutral

_ALIGNMENT = 64  # of a storage in the arena: torch's own for the CPU


class ResultsQueue(queue.Queue[Any]):
    """A queue from a function in the worker to the trainer. What the worker puts arrives when the
    function has ended."""

    def __reduce__(self) -> Any:
        raise UsageError(
            "a results queue goes to the worker of an AsyncCallsQueue only",
            remedy="pass it in the arguments of an AsyncRequest",
        )


class Outbox(list[Any]):
    """The worker's side of a `ResultsQueue`."""

    put = put_nowait = list.append


@dataclass(frozen=True)
class SnapshotRanges:
    """Where the bytes are: the size of the pickle, which comes first; then each storage's offset
    and size."""

    pickle: int
    storages: tuple[tuple[int, int], ...]


@neutral()
def taken(
    request: Any, arena_of: Callable[[int], Arena]
) -> tuple[SnapshotRanges, tuple[ResultsQueue, ...]]:
    """Copy a request. When this returns, the trainer may change its tensors.

    Args:
        arena_of: gives an arena of at least so many bytes, which nobody reads.

    Returns:
        Where it is in the arena, and the results queues that it names.

    Raises:
        UsageError: something in the request cannot be pickled.
        MemoryBudgetError: the host does not have the memory.
    """
    data = io.BytesIO()
    pickler = _Pickler(data)
    try:
        pickler.dump(request)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        raise UsageError(
            f"the request cannot be sent to the worker: {error}",
            remedy="its functions stand at the top of a module, and its arguments can be pickled; "
            "a closure or lambda cannot",
        ) from error
    size, spans = data.tell(), []
    for storage in pickler.storages:
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        spans.append((size, storage.nbytes()))
        size += storage.nbytes()
    arena = arena_of(size)
    arena.view(0, data.tell())[:] = data.getbuffer()
    memory = torch.frombuffer(arena.view(0, arena.size), dtype=torch.uint8)
    copies = []
    for (offset, length), storage in zip(spans, pickler.storages, strict=True):
        if length:
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
            flat.set_(storage, 0, (length,))  # type: ignore[call-overload]
            copies.append((memory.narrow(0, offset, length), flat))
    if cuda := next((source.device for _, source in copies if source.is_cuda), None):
        arena.pin(cuda)
    copy_all(copies)
    return SnapshotRanges(data.tell(), tuple(spans)), tuple(pickler.queues)


def restored(memory: mmap.mmap, snapshot: SnapshotRanges) -> tuple[Any, list[Outbox]]:
    """The request and its outboxes, in the worker. Its tensors lie in `memory`."""
    unpickler = _Unpickler(io.BytesIO(memory[: snapshot.pickle]), memory, snapshot)
    return unpickler.load(), unpickler.outboxes


class _Pickler(ForkingPickler):
    """Keeps storages and results queues out of the pickle, each once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.storages: list[torch.UntypedStorage] = []
        self.queues: list[ResultsQueue] = []
        self._seen: dict[tuple[str, int], int] = {}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.storage.TypedStorage):
            return ("storage", self._index(value._untyped_storage), value.dtype)
        if isinstance(value, torch.UntypedStorage):
            return ("storage", self._index(value), None)
        if isinstance(value, ResultsQueue):
            if value not in self.queues:
                self.queues.append(value)
            return ("queue", self.queues.index(value), None)
        return None

    def reducer_override(self, value: Any) -> Any:
        """A tensor as torch.save pickles it, not as torch shares it between processes."""
        if isinstance(value, torch.Tensor):
            return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return NotImplemented

    def _index(self, storage: torch.UntypedStorage) -> int:
        key = (str(storage.device), storage._cdata)
        if key not in self._seen:
            self._seen[key] = len(self.storages)
            self.storages.append(storage)
        return self._seen[key]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: mmap.mmap, snapshot: SnapshotRanges) -> None:
        super().__init__(file)
        self.outboxes: list[Outbox] = []
        self._memory, self._ranges = memory, snapshot
        self._storages: dict[int, torch.UntypedStorage] = {}

    def persistent_load(self, persistent_id: Any) -> Any:
        kind, index, dtype = persistent_id
        if kind == "queue":
            self.outboxes += [Outbox() for _ in range(index + 1 - len(self.outboxes))]
            return self.outboxes[index]
        if index not in self._storages:
            offset, length = self._ranges.storages[index]
            self._storages[index] = (
                torch.frombuffer(self._memory, dtype=torch.uint8, count=length, offset=offset)
                if length
                else torch.empty(0)
            ).untyped_storage()
        storage = self._storages[index]
        if dtype is None:
            return storage
        wrapped: Any = torch.storage.TypedStorage
        return wrapped(wrap_storage=storage, dtype=dtype, _internal=True)
