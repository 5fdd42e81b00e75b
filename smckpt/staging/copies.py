"""Copies local arrays into their slots of an arena.

A rank's saves have one layout, so the arena's slots become tensors once, and a save costs one
`copy_` a slot. A *stager* carries out the copies. The default, `copy_all`, waits for them.

Nothing says which stream wrote a tensor last. So before it copies from a device, `copy_all` waits
for all streams of it. After the copies it waits again: then the caller may change the state. Copies
that go on after that are in `overlap.py`.

Replicas compare checksums of live tensors. The tensors are read in the calling thread while the
state does not change. A contiguous tensor of the CPU is read in place; any other is copied piece by
piece, from its device too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from smckpt.checkpoint.records.crc import crc64
from smckpt.errors import MemoryBudgetError, StateError
from smckpt.layout.entries import Entry
from smckpt.layout.image import Layout, Slot
from smckpt.layout.strided import Box, Piece, boxes_of_range, meet

if TYPE_CHECKING:
    from collections.abc import Set
    from concurrent.futures import Future

    from smckpt.staging.arena import Arena
    from smckpt.staging.overlap import Flight, Overlap


Copies = Sequence[tuple["torch.Tensor", "torch.Tensor"]]  # (target in the arena, source)
# a local array, or the parts that it is made of
Local: TypeAlias = "torch.Tensor | Sequence[torch.Tensor]"

_TEMPORARY = 64 << 20  # device memory for the elements of a strided source, in bytes


class Stager(Protocol):
    """Carries out copies: each from a source on any device to a target of its shape in the arena.

    It returns None when all copies have ended. Or it returns a future that ends when they do; its
    exception fails the save on all ranks. Until then nobody may change or free the sources. The
    stager is responsible for that.
    """

    def __call__(self, copies: Copies) -> Future[None] | None: ...


def stage(
    arena: Arena,
    layout: Layout,
    tensors: Sequence[Local],
    stager: Stager | None = None,
    *,
    pin: bool = False,
    overlap: Overlap | None = None,
    stepped: Set[str] = frozenset(),
    timeout: float = 1800.0,
) -> Future[None] | Flight | None:
    """Write every header and every slot of `layout`.

    Args:
        arena: of at least `layout.arena_size` bytes.
        tensors: tensors[i] is the local array of layout.entries[i], on any device, with any
            strides; or a list of tensors that are in it one after the other. They are only read.
        stager: carries out the copies; `copy_all` by default.
        pin: register the arena with CUDA if a tensor is there. It takes as long as several copies,
            so it is for an arena that serves several saves.
        overlap: copies what it takes of the entries in `stepped` (keys) after the return; all else
            is copied before.
        timeout: see `Overlap.begin`.

    Returns:
        None when the bytes are there. Else the stager's future, which ends when they are, or the
        copies that are under way.

    Raises:
        StateError: a tensor does not fit its entry, or has no data (meta device).
    """
    plan = arena.plan
    if not isinstance(plan, StagePlan) or plan.layout.fingerprint != layout.fingerprint:
        plan = arena.plan = StagePlan(arena, layout)
    copies = plan.copies(tensors)
    if pin and (cuda := next((source.device for _, _, source in copies if source.is_cuda), None)):
        arena.pin(cuda)
    later = []
    if overlap is not None and arena.pinned is False:
        overlap.block("CUDA refused to pin the memory that the state is copied to")
    elif overlap is not None:
        later = [copy for copy in copies if copy[0] in stepped and overlap.takes(copy[2])]
        if not later and copies and overlap.refusal is None:
            overlap.block(
                "no contiguous tensor of it on a CUDA device is known as a parameter or state of "
                "an optimizer; take the state in sm_state_dict_type"
            )
    late = set(map(id, later))
    ended = (stager or copy_all)([copy[1:] for copy in copies if id(copy) not in late])
    if not later:
        return ended
    assert overlap is not None
    flight = overlap.begin(later, timeout)
    if flight is None:
        copy_all([copy[1:] for copy in later])
    return flight


def copy_all(copies: Copies) -> None:
    """Copy and wait. On the CPU this uses torch's intra-op threads and is as fast as `memcpy` on as
    many. From an accelerator it copies after all work that is queued on the device."""
    devices = {source.device for _, source in copies if not source.is_cpu}
    for device in devices:
        torch.accelerator.synchronize(device)
    try:
        with torch.no_grad():
            for target, source in copies:
                if source.is_cpu:
                    target.copy_(source)
                else:
                    _copy_from_device(target, source)
    except torch.OutOfMemoryError as error:
        raise MemoryBudgetError(
            f"the device has no memory to make a strided tensor contiguous: {error}",
            remedy=f"free {_TEMPORARY >> 20} MiB of it, or keep the tensor contiguous",
        ) from error
    finally:  # also after a failure: copies under way still write to the arena
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()


def _copy_from_device(target: torch.Tensor, source: torch.Tensor) -> None:
    """Queue a copy on the current stream. A source that is not contiguous is made contiguous on the
    device, piece by piece. torch's own copy of a view that conjugates or negates would do neither.
    """
    resolved = not (source.is_conj() or source.is_neg())
    if source.is_contiguous() and resolved:
        target.copy_(source, non_blocking=True)
        return
    flat, size = target.view(-1), _TEMPORARY // source.itemsize
    for start in range(0, source.numel(), size):
        stop = min(start + size, source.numel())
        for part, into in _parts(source, start, stop, flat[start:stop]):
            into.copy_(part.resolve_conj().resolve_neg().contiguous(), non_blocking=True)


class StagePlan:
    """The slots of one layout in one arena, as flat tensors of integers."""

    def __init__(self, arena: Arena, layout: Layout) -> None:
        if arena.size < layout.arena_size:
            raise StateError(
                f"the state needs {layout.arena_size:,} bytes, the arena has {arena.size:,}",
                remedy="make a larger arena",
            )
        self.layout = layout
        memory = torch.frombuffer(arena.view(0, arena.size), dtype=torch.uint8)
        self._headers = [arena.view(f.arena_offset, len(f.header)) for f in layout.files]
        self._dtypes = [getattr(torch, entry.dtype) for entry in layout.entries]
        self._slots: list[tuple[str, Slot, torch.Tensor]] = []
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
            self._slots.append((entry.key, slot, target))

    def copies(self, tensors: Sequence[Local]) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Write the headers; returns the tensors' copies: (key of the entry, target, source)."""
        for entry, dtype, local in zip(self.layout.entries, self._dtypes, tensors, strict=True):
            if (
                isinstance(local, torch.Tensor)
                and local.shape == entry.shape
                and local.dtype == dtype
                and not local.is_meta
            ):  # nearly all: training waits here
                continue
            parts = _parts_of(local)
            shape = parts[0].shape if len(parts) == 1 else (sum(p.numel() for p in parts),)
            dtypes = dict.fromkeys(part.dtype for part in parts)
            if shape != entry.shape or [t.itemsize for t in dtypes] != [entry.itemsize]:
                raise StateError(
                    f"{entry.key} is {', '.join(map(str, dtypes))} {tuple(shape)}; its entry says "
                    f"{entry.dtype} {entry.shape}",
                    remedy="take the state dict anew for each save",
                )
            if entry.numel and any(part.is_meta for part in parts):
                raise StateError(
                    f"{entry.key} is on the meta device and has no data",
                    remedy="materialise the module before saving it",
                )
        for image, header in zip(self.layout.files, self._headers, strict=True):
            header[:] = image.header
        found: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for key, slot, target in self._slots:
            local = tensors[slot.entry]
            if (
                isinstance(local, torch.Tensor)
                and local.shape == target.shape
                and local.dtype == target.dtype
            ):
                found.append((key, target, local.detach()))
            else:
                found += [(key, *pair) for pair in _copies_of(target, local, slot)]
        return found


def _parts_of(local: Local) -> Sequence[torch.Tensor]:
    return (local,) if isinstance(local, torch.Tensor) else local


def copies_of(data: torch.Tensor, local: Local, itemsize: int, start: int, stop: int) -> Copies:
    """Copies of elements [start, stop) of a local array to `data`, flat bytes in host memory."""
    return list(_copies_of(data.view(_bits(itemsize)), local, Slot(0, start, stop, 0, 0)))


def _copies_of(
    target: torch.Tensor, local: Local, slot: Slot
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The elements that go into a slot: of a local array, or of the parts that it is made of."""
    parts = _parts_of(local)
    if len(parts) == 1:
        yield from _copies(target, parts[0].detach(), slot.start)
        return
    flat, at = target.view(-1), 0
    size, whole = slot.stop - slot.start, sum(part.numel() for part in parts)
    wanted = Piece("", (whole,), Box((slot.start,), (size,)), 0, (1,))
    for part in parts:
        copy = meet(Piece("", (whole,), Box((at,), (part.numel(),)), 0, (1,)), wanted)
        if copy is not None:
            into = flat.narrow(0, copy.target.start, copy.numel)
            yield from _copies(into, part.detach(), copy.source.start)
        at += part.numel()


def _bits(itemsize: int) -> torch.dtype:
    """The integer dtype of that size. Parts are copied as integers, so any dtype stays exact."""
    return {
        1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128,
    }[itemsize]  # fmt: skip


def _copies(
    target: torch.Tensor, source: torch.Tensor, start: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Copies of all of `source` to a `target` of its shape; or, for a flat `target` of bits, of as
    many elements as it holds, from element `start` in row-major order."""
    if target.dtype == source.dtype and target.shape == source.shape:
        yield target, source
        return
    if source.is_conj() or source.is_neg():
        # The bits in memory are not the values (conj, neg): torch resolves them in the copy.
        target = target.view(source.dtype)
    else:
        source = source.view(target.dtype)
    for part, piece in _parts(source, start, start + target.numel(), target):
        yield piece, part


def _parts(
    source: torch.Tensor, start: int, stop: int, target: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of equal shapes that cover the range, for any strides, without a temporary."""
    if source.is_contiguous():
        yield source.view(-1).narrow(0, start, stop - start), target
        return
    at = 0
    for box in boxes_of_range(source.shape, start, stop):
        part = source
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        yield part, target[at : at + box.numel].view(box.sizes)
        at += box.numel


_AT_ONCE = 64 << 20  # bytes of host memory for tensors that cannot be read in place


def checksums(
    entries: Sequence[Entry], tensors: Sequence[Local], parts: Iterable[tuple[int, int, int]]
) -> list[int]:
    """The CRC-64/NVME of each part (entry, start, stop), in elements in row-major order.

    Args:
        tensors: tensors[i] is the local array of entries[i], as for `stage`.
    """
    scratch: torch.Tensor | None = None
    found = []
    for number, start, stop in parts:
        local, total = tensors[number], 0
        if (
            isinstance(local, torch.Tensor)
            and local.is_cpu
            and local.is_contiguous()
            and not (local.is_conj() or local.is_neg())
        ):  # read in place
            flat = local.detach().view(-1)[start:stop]
            found.append(crc64(_bytes(flat)) if stop > start else 0)
            continue
        itemsize = entries[number].itemsize
        step = _AT_ONCE // itemsize
        for low in range(start, stop, step):
            high = min(low + step, stop)
            if scratch is None:
                scratch = torch.empty(_AT_ONCE, dtype=torch.uint8, device="cpu")
            data = scratch[: (high - low) * itemsize]
            copy_all(copies_of(data, local, itemsize, low, high))
            total = crc64(_bytes(data), total)
        found.append(total)
    return found


def _bytes(data: torch.Tensor) -> memoryview:
    array: Any = data.view(torch.uint8).numpy()
    return memoryview(array)
