"""Checksums of live tensors, which replicas compare with each other.

The tensors are read in the calling thread while the state does not change. A contiguous tensor of
the CPU is read in place; any other is copied piece by piece, from its device too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from smckpt.checkpoint.records.crc import crc64
from smckpt.layout.entries import Entry
from smckpt.staging.copies import Local, copies_of, copy_all

__all__ = ["checksums"]

_AT_ONCE = 64 << 20  # bytes of host memory for tensors that cannot be read in place


def checksums(
    entries: Sequence[Entry], tensors: Sequence[Local], parts: Iterable[tuple[int, int, int]]
) -> list[int]:
    """The CRC-64/NVME of each part (entry, start, stop), in elements in row-major order.

    Args:
        tensors: tensors[i] is the local array of entries[i], as for `stage`.
    """
    scratch: list[torch.Tensor] = []
    return [
        _in_place(tensors[number], start, stop)
        if _readable(tensors[number])
        else _by_copies(tensors[number], entries[number].itemsize, start, stop, scratch)
        for number, start, stop in parts
    ]


def _readable(local: Local) -> bool:
    return (
        isinstance(local, torch.Tensor)
        and local.is_cpu
        and local.is_contiguous()
        and not (local.is_conj() or local.is_neg())
    )


def _in_place(local: Local, start: int, stop: int) -> int:
    assert isinstance(local, torch.Tensor)
    if start == stop:
        return 0
    flat = local.detach().view(-1)[start:stop]
    return crc64(_bytes(flat))


def _by_copies(
    local: Local, itemsize: int, start: int, stop: int, scratch: list[torch.Tensor]
) -> int:
    step, total = _AT_ONCE // itemsize, 0
    for low in range(start, stop, step):
        high = min(low + step, stop)
        if not scratch:
            scratch.append(torch.empty(_AT_ONCE, dtype=torch.uint8, device="cpu"))
        data = scratch[0][: (high - low) * itemsize]
        copy_all(copies_of(data, local, itemsize, low, high))
        total = crc64(_bytes(data), total)
    return total


def _bytes(data: torch.Tensor) -> memoryview:
    array: Any = data.view(torch.uint8).numpy()
    return memoryview(array)
