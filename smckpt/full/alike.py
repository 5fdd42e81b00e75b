"""What ranks must have alike of an optimizer's state, since FULL state has it once."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from smckpt.checkpoint.records.objects import encode_object
from smckpt.errors import UsageError
from smckpt.full.wire import from_all, gathers, in_rows
from smckpt.layout.containers import items_of
from smckpt.layout.entries import Path, dotted
from smckpt.state_dict.tensors import dtensor_parts, is_dtensor, is_flattening, is_value


def sums_of(state: Mapping[Any, Any], on_mesh: Mapping[str, Any]) -> dict[Path, int]:
    """What ranks are to have alike, with a checksum: the parameters that a mesh divides, and what
    an optimizer keeps for each; of a tensor of the mesh, its form."""
    sums: dict[Path, int] = {}

    def add(value: Any, at: Path) -> None:
        pairs = None if isinstance(value, torch.Tensor) else items_of(value)
        for key, child in pairs or ():
            add(child, (*at, key))
        if pairs is None:
            sums[at] = _sum_of(value)

    for fqn in on_mesh:
        add(state.get(fqn, {}), (fqn,))
        sums[fqn,] = 0
    return sums


def _sum_of(value: Any) -> int:
    """Of what FULL refuses elsewhere, and of objects, 0."""
    if isinstance(value, torch.Generator) or (isinstance(value, torch.Tensor) and is_value(value)):
        value = repr(encode_object(value))
    elif isinstance(value, torch.Tensor) and is_dtensor(value):
        value = repr((value.dtype, dtensor_parts(value)[2:]))
    elif isinstance(value, torch.Tensor):
        if value.is_meta or is_flattening(value):
            return 0
        plain = in_rows(value.detach()).cpu().reshape(-1)
        value = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else tuple(value.shape)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        value = value.tobytes()
    if not isinstance(value, (bool, int, float, complex, str, bytes, tuple, type(None))):
        return 0
    return zlib.crc32(value if isinstance(value, bytes) else repr(value).encode())


def refuse_own(
    optimizer: torch.optim.Optimizer, sums: Mapping[Path, int], groups: Sequence[Any]
) -> None:
    """Refuse state that each rank keeps for its own part of a parameter: FULL has one rank's alone.
    All ranks call it, and all of them find the same.

    Args:
        sums: as of `sums_of`. groups: as in `Attempt.settle`.
    """
    groups = groups if gathers() else ()
    digest = zlib.crc32(repr(sorted(map(repr, sums.items()))).encode())
    low = high = digest
    for group in groups:
        spans = from_all((low, high), group)
        low, high = min(span[0] for span in spans), max(span[1] for span in spans)
    if low == high:
        return
    found = {path: (value, value, 1) for path, value in sums.items()}  # lowest, highest, ranks
    for group in groups:
        everyone, found = from_all(found, group), {}
        for path, (lowest, highest, count) in (item for each in everyone for item in each.items()):
            known = found.get(path, (lowest, highest, 0))
            found[path] = min(known[0], lowest), max(known[1], highest), known[2] + count
    for path, (lowest, highest, count) in found.items():
        if lowest != highest or count != found[path[:1]][2]:
            what = "some ranks lack" if lowest == highest else "differs between ranks"
            raise UsageError(
                f"FULL does not gather {dotted(path)!r} of {type(optimizer).__name__}, which "
                f"{what} though no mesh divides it",
                remedy="save LOCAL or SHARDED",
            )
