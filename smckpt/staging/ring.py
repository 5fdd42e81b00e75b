"""The pinned memory through which the reads of a load reach a CUDA device.

No file is read into a device's memory. A whole image of the state on the host would cost fresh
pages for each byte, and a copy from pages that CUDA does not know runs at a seventh of the rate
(docs/benchmarks.md). So each read goes into a slot of the ring, its blocks are checked there, and a
copy to the device is queued; the slot serves the next read when that copy has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch

from smckpt.checkpoint.reading.blocks import Destination
from smckpt.staging.arena import Arena

# Bytes. At 4 MiB the time of a request is half the interpreter's. Above 16, making the slots costs
# more than larger requests save.
_SLOT = 16 << 20


class OnDevice:
    """The bytes of a contiguous tensor on a device. A slice shares its memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.bytes = tensor.detach().reshape(-1).view(torch.uint8)

    def __len__(self) -> int:
        return self.bytes.numel()

    def __getitem__(self, part: slice) -> OnDevice:
        return OnDevice(self.bytes[part])

    def __setitem__(self, part: slice, other: OnDevice) -> None:
        self.bytes[part].copy_(other.bytes)


class _PinnedSlot:
    """Pinned memory, and the copies out of it that are under way."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.arena = Arena(nbytes, shared=False)
        self.arena.pin(device)
        self.copies: list[torch.cuda.Event] = []

    @property
    def idle(self) -> bool:
        return all(copy.query() for copy in self.copies)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        while self.copies:
            self.copies.pop().synchronize()


class Ring:
    """Lends slots to the reading threads of one load. Leave it as a context: that ends the copies.

    Args:
        threads: how many threads read. There are half as many slots again, each of 16 MiB of host
            memory, if so many are needed.
    """

    request_bytes = _SLOT

    def __init__(self, threads: int) -> None:
        self._unmade = threads + threads // 2 + 1
        self._free: list[_PinnedSlot] = []
        self._lock = threading.Lock()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def lent(self, segments: Sequence[Destination]) -> Iterator[Sequence[Destination]]:
        """The segments with host memory in place of a device's. What is there at the end is copied
        to the device; after a failure nothing is."""
        devices = {s.buffer.bytes.device for s in segments if isinstance(s.buffer, OnDevice)}
        if not devices:
            yield segments
            return
        nbytes = sum(len(s.buffer) for s in segments if isinstance(s.buffer, OnDevice))
        slot = self._take(nbytes, next(iter(devices)))
        try:
            at, hosts = 0, []
            for segment in segments:
                if isinstance(segment.buffer, OnDevice):
                    size = len(segment.buffer)
                    segment = segment._replace(buffer=slot.arena.view(at, size))
                    at += size
                hosts.append(segment)
            yield hosts
            for device in devices:
                with torch.cuda.stream(self._stream(device)):
                    for host, segment in zip(hosts, segments, strict=True):
                        target = segment.buffer
                        if isinstance(target, OnDevice) and target.bytes.device == device:
                            source = torch.frombuffer(host.buffer, dtype=torch.uint8)
                            target.bytes.copy_(source, non_blocking=True)
                    slot.copies.append(torch.cuda.current_stream(device).record_event())
        except BaseException:
            self.finish()  # copies out of the slot that no event tells of
            raise
        finally:
            with self._lock:
                self._free.append(slot)

    def finish(self) -> None:
        """Wait until the device has all that was read."""
        for stream in tuple(self._streams.values()):
            stream.synchronize()

    def __enter__(self) -> Ring:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish()
        for slot in self._free:
            slot.arena.close()

    def _take(self, nbytes: int, device: torch.device) -> _PinnedSlot:
        """A slot of at least `nbytes`: one that is idle, else a new one, else the one whose copy
        was queued first. There is one, for a thread has one slot at a time."""
        with self._lock:
            slot = next((free for free in self._free if free.idle), None)
            if slot is None and self._unmade:
                self._unmade -= 1
            else:
                slot = slot or self._free[0]
                self._free.remove(slot)
        if slot is not None:
            slot.wait()
            if slot.arena.size >= nbytes:
                return slot
            slot.arena.close()
        return _PinnedSlot(max(nbytes, _SLOT), device)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        with self._lock:
            if device not in self._streams:
                torch.cuda.synchronize(device)  # a stream of it may still write to the targets
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            return self._streams[device]
