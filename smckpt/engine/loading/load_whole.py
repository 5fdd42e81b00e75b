"""A load without a target: the whole saved state, in new containers."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from smckpt.checkpoint.reading.catalogue import Catalogue
from smckpt.checkpoint.reading.coordinates import ParallelCoordinates
from smckpt.checkpoint.reading.nested import kind_of, nested
from smckpt.checkpoint.reading.plan import whole_tensors
from smckpt.checkpoint.records.parameter_names import under_names
from smckpt.errors import CorruptCheckpointError, KeysMismatchError, MemoryBudgetError
from smckpt.layout.containers import made_again
from smckpt.layout.entries import DTYPES, Path, dotted
from smckpt.meeting.group import Group

__all__ = ["whole_state"]

log = logging.getLogger("smckpt")


def whole_state(
    catalogue: Catalogue,
    saved: int,
    group: Group,
    coordinates: ParallelCoordinates,
    only: Sequence[str] | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The saved nested state, with empty tensors to fill; and these tensors alone, nested in dicts.
    (Values may hold arrays too, which are not tensors of the state.)

    Tensors are whole, on the CPU, by logical name. An optimizer's state has the names of its
    parameters if they are known. Values come from the rank that this one follows, or, if that did
    not save them, from the lowest rank that did.

    Args:
        saved: the rank that is followed.
        only: the top keys to load.

    Raises:
        KeysMismatchError: one of `only` was not saved.
        CorruptCheckpointError: a tensor is larger than all files.
        MemoryBudgetError: there is no memory for a tensor.
    """
    leaves: dict[Path, Any] = {}
    tensors: dict[Any, Any] = {}
    for path, dtype, shape in whole_tensors(
        catalogue, rank=group.rank, group_ranks=group.ranks, coordinates=coordinates
    ):
        if only is None or str(path[0]) in only:
            room = _room(catalogue, path, dtype, shape)
            leaves[path] = room.numpy() if kind_of(catalogue, path) == "ndarray" else room
            around = tensors
            for key in path[:-1]:
                around = around.setdefault(key, {})
            around[path[-1]] = room
    for rank in dict.fromkeys((saved, min(catalogue.object_ranks))):
        for path, saved_value in catalogue.objects(rank, unmade=True).values():
            if only is None or str(path[0]) in only:
                value = made_again(saved_value)
                if value is not saved_value and (path not in leaves):
                    log.warning(
                        "%s has values of classes that are not registered: they are names, tuples "
                        "and dicts now. Call smckpt.state_dict.register_value_class on them first",
                        dotted(path),
                    )
                for place, renamed in under_names(catalogue.optimizers, path, value):
                    leaves.setdefault(place, renamed)
    if lacking := set(only or ()) - {str(path[0]) for path in leaves}:
        had = sorted({str(t.path[0]) for t in catalogue.logical.values()})
        raise KeysMismatchError(
            f"only= names {sorted(lacking)}, which was not saved; the saved keys are {had[:12]}",
            remedy="name top keys of the saved state",
            path=catalogue.url,
            rank=group.rank,
        )
    return nested(catalogue, leaves), tensors


def _room(catalogue: Catalogue, path: Path, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if (
        catalogue.ours and catalogue.whole and nbytes > catalogue.nbytes
    ):  # before memory is asked for
        raise CorruptCheckpointError(
            f"{dotted(path)!r} {list(shape)} has {nbytes:,} bytes, but all data files together "
            f"have {catalogue.nbytes:,}",
            remedy="use an older checkpoint",
            path=catalogue.url,
        )
    try:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
    except RuntimeError as error:  # torch has no class of its own for it
        raise MemoryBudgetError(
            f"there is no memory for {dotted(path)!r} {list(shape)}: {error}",
            remedy="name the keys that are needed with only=, or load into sharded tensors",
            path=catalogue.url,
        ) from error
