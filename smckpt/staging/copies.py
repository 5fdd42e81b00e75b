"""Copying local arrays into their slots of an arena.

A rank's saves have one layout, so the arena's slots are made into tensors once; a save then costs
one `copy_` a slot. Copies run on torch's own intra-op threads: as fast as `memcpy` on as many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from smckpt.errors import StateError
from smckpt.layout.image import Layout, Slot

if TYPE_CHECKING:
    import torch

    from smckpt.staging.arena import Arena

__all__ = ["StagePlan", "stage"]


def stage(arena: Arena, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
    """Write every header and every slot of `layout`; the bytes are there when this returns.

    Args:
        arena: of at least `layout.arena_size` bytes.
        tensors: tensors[i] is the local array of layout.entries[i], on any device, with any
            strides. They are only read.

    Raises:
        StateError: a tensor is not what its entry says, or has no data (meta device).
    """
    plan = arena.plan
    if plan is None or plan.layout.fingerprint != layout.fingerprint:
        plan = arena.plan = StagePlan(arena, layout)
    plan.run(tensors)


class StagePlan:
    """The slots of one layout in one arena, as flat tensors of integers."""

    def __init__(self, arena: Arena, layout: Layout) -> None:
        import torch

        if arena.size < layout.arena_size:
            raise StateError(
                f"the state needs {layout.arena_size:,} bytes, the arena has {arena.size:,}",
                remedy="make a larger arena",
            )
        self.layout = layout
        memory = torch.frombuffer(arena.view(0, arena.size), dtype=torch.uint8)
        self._headers = [arena.view(f.arena_offset, len(f.header)) for f in layout.files]
        self._slots: list[tuple[Slot, torch.Tensor]] = []
        for slot in layout.slots:
            entry = layout.entries[slot.entry]
            start = layout.files[slot.file].arena_offset + slot.offset
            span = memory.narrow(0, start, (slot.stop - slot.start) * entry.itemsize)
            if not span.numel():
                continue
            if slot.stop - slot.start == entry.numel:
                target = span.view(getattr(torch, entry.dtype)).view(entry.shape)
            else:
                target = span.view(_bits(entry.itemsize))
            self._slots.append((slot, target))

    def run(self, tensors: Sequence[torch.Tensor]) -> None:
        import torch

        self._check(tensors)
        for image, header in zip(self.layout.files, self._headers, strict=True):
            header[:] = image.header
        with torch.no_grad(), _SideStreams() as streams:
            for slot, target in self._slots:
                source = tensors[slot.entry]
                if source.is_cuda:
                    with streams.on(source.device):
                        _copy(target, source, slot.start)
                else:
                    _copy(target, source, slot.start)

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        for entry, tensor in zip(self.layout.entries, tensors, strict=True):
            if tensor.shape != entry.shape or tensor.element_size() != entry.itemsize:
                raise StateError(
                    f"{entry.key} is {tensor.dtype} {tuple(tensor.shape)}; its entry says "
                    f"{entry.dtype} {entry.shape}",
                    remedy="take the state dict anew for each save",
                )
            if tensor.is_meta and entry.numel:
                raise StateError(
                    f"{entry.key} is on the meta device and has no data",
                    remedy="materialise the module before saving it",
                )


def _bits(itemsize: int) -> torch.dtype:
    """Integers of that size. Parts are copied as such: of any dtype, and exactly."""
    import torch

    return {
        1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128,
    }[itemsize]  # fmt: skip


def _copy(target: torch.Tensor, source: torch.Tensor, start: int) -> None:
    """All of `source` to a `target` of its shape; or, from element `start` in row-major order, as
    many elements as a flat `target` of bits holds."""
    wait = not source.is_cuda  # copies from CUDA are waited for together
    if target.dtype == source.dtype and target.shape == source.shape:
        target.copy_(source, non_blocking=not wait)
        return
    if source.is_conj() or source.is_neg():
        # The bits in memory are not the values: let torch resolve them in the copy.
        target = target.view(source.dtype)
    else:
        source = source.view(target.dtype)
    for part, piece in _parts(source, start, start + target.numel(), target):
        piece.copy_(part, non_blocking=not wait)


def _parts(
    source: torch.Tensor, start: int, stop: int, target: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of equal shapes that together cover the range: no temporary, whatever the strides."""
    if start == 0 and stop == source.numel():
        yield source, target.view(source.shape)
    elif source.is_contiguous():
        yield source.view(-1).narrow(0, start, stop - start), target
    else:
        # Whole rows in one piece; a row that is cut at either end, by itself.
        row = source.numel() // source.shape[0]
        first, last = -(-start // row), stop // row
        if first > last:  # the range lies inside one row
            yield from _parts(source[last], start - last * row, stop - last * row, target)
            return
        head, body = first * row - start, (last - first) * row
        if head:
            yield from _parts(source[first - 1], row - head, row, target[:head])
        if body:
            rows = source[first:last]
            yield rows, target[head : head + body].view(rows.shape)
        if stop > last * row:
            yield from _parts(source[last], 0, stop - last * row, target[head + body :])


class _SideStreams:
    """Copies of each CUDA device on a stream of its own, which starts after the work queued so far
    and is waited for at the end."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __enter__(self) -> _SideStreams:
        return self

    def on(self, device: torch.device) -> torch.cuda.StreamContext:
        import torch

        if device not in self._streams:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = stream
        return torch.cuda.stream(self._streams[device])

    def __exit__(self, *_: object) -> None:
        for stream in self._streams.values():
            stream.record_event().synchronize()
