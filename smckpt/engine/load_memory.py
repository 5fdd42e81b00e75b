"""The memory that a load reads into: the targets' own, or stand-ins; without a target new
containers of the whole saved state.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smckpt.checkpoint.reading.blocks import Span
from smckpt.checkpoint.reading.catalogue import Catalogue, LogicalTensor, nested, under_names
from smckpt.checkpoint.reading.loading_rank import LoadingRank
from smckpt.checkpoint.reading.plan import Planner
from smckpt.checkpoint.reading.read import StoredCopy, scattered
from smckpt.errors import CorruptCheckpointError, KeysMismatchError, MemoryBudgetError, StateError
from smckpt.layout.containers import dims_in, is_array, made_again
from smckpt.layout.entries import Path, dotted
from smckpt.staging.ring import OnDevice
from smckpt.state_dict.modes import neutral
from smckpt.state_dict.restore import put
from smckpt.state_dict.select import Selection
from smckpt.state_dict.tags import put_back, tag_of
from smckpt.state_dict.tensors import arranged, expanded_in, fill, flagged, reach_of, same_bits


@dataclass(frozen=True)
class LoadMemory:
    """The bytes of each tensor: its own memory, a stand-in's, or a CUDA device's.

    late: (entry, live tensor, stand-in) of what is copied at the end.
    shared: (entry, an earlier entry, stand-in) of the same memory. If both were read into that
        memory, two different saved values would look like a bad block, or the last one would win.
    """

    selection: Selection
    buffers: list[Span]
    late: list[tuple[int, torch.Tensor, torch.Tensor]]
    shared: list[tuple[int, int, torch.Tensor]]

    @neutral()
    def settle(self, state_dict: MutableMapping[str, Any]) -> None:
        """After the read, copy the stand-ins to where they belong.

        Raises:
            StateError: tensors, or elements of one, that share memory here were saved with
                different values.
        """
        devices = {tensor.device for _, tensor, _ in self.late if not tensor.is_cpu}
        for device in devices:
            torch.accelerator.synchronize(device)  # a stream of the device may still write to them
        for number, tensor, staged in self.late:
            room, values = tensor, staged
            for dim in expanded_in(tensor):  # all elements along them are one
                room, values = room.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
            fill(room, values)
            if _overlaps(tensor) and not same_bits(tensor, staged):
                raise StateError(
                    f"elements of {self.selection.entries[number].key!r} share their memory here "
                    f"(strides {tensor.stride()}), but were saved with different values; the "
                    "tensors of the target are now undefined",
                    remedy="call .contiguous() or .clone() on it before the load",
                )
        put_back(self.selection.tensors)
        for device in devices:  # kernels fill strided tensors, and no other stream waits for them
            torch.accelerator.current_stream(device).synchronize()
        for number, first, staged in self.shared:
            live, entry = self.selection.tensors[number], self.selection.entries[number]
            if same_bits(live.detach(), staged):
                continue
            # Depending on its step, a scheduler keeps its rates in one tensor or in several.
            number_alone = live.numel() == 1 and tag_of(live) is None and not live.requires_grad
            if number_alone and _put_apart(state_dict, entry.path, staged.to(live.device)):
                continue
            raise StateError(
                f"{entry.key!r} and {self.selection.entries[first].key!r} share their memory here, "
                "but were saved with different values; the tensors of the target are now undefined",
                remedy="share the target's tensors as they were shared when the state was saved, "
                "or give each its own memory (.clone())",
            )


def memory_of(
    selection: Selection, copies: Sequence[StoredCopy], kinds: Mapping[Path, str], *, partly: bool
) -> LoadMemory:
    """
    Args:
        kinds: as in `Catalogue.kinds`.
        partly: some tensors may not be read. They keep their values.

    Raises:
        StateError: elements of a tensor share memory, so they cannot hold what was saved.
    """
    buffers: list[Span] = []
    late: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    shared: list[tuple[int, int, torch.Tensor]] = []
    seen: dict[tuple[int, int, int], int] = {}
    on_device = any(tensor.is_cuda for tensor in selection.tensors)
    on_host = scattered(copies) if on_device else frozenset()
    for number, tensor in enumerate(selection.tensors):
        live, address, count = tensor, tensor.data_ptr(), tensor.numel()
        first = number
        if count:  # a row and a column of one array begin at one address, and are two tensors
            first = seen.setdefault((address, count, reach_of(tensor)), number)
        if first != number:
            live = _stand_in(tensor, partly)
            shared.append((number, first, live))
        elif live.is_cuda and count and number not in on_host and _is_plain(live):
            buffers.append(OnDevice(live))
            continue
        elif not live.is_cpu or not _is_plain(live):
            dims, entry = expanded_in(tensor), selection.entries[number]
            path, recorded = entry.path, dims_in(kinds.get(entry.path), "expanded") or ()
            if entry.geometry.per_rank and not {*dims} <= {*recorded}:  # else the values tell
                raise StateError(
                    f"{dotted(path)!r} is an expanded tensor with strides {tensor.stride()}: its "
                    "elements share memory, and no such tensor was saved",
                    remedy="call .contiguous() or .clone() on it before the load",
                )
            live = _stand_in(tensor, partly)
            late.append((number, tensor.detach(), live))
        # The memory itself, because a view by torch takes tens of microseconds per tensor. The
        # tensors and stand-ins beside it keep it alive.
        size = count * live.element_size()
        at = address if live is tensor else live.data_ptr()
        memory = (ctypes.c_char * size).from_address(at) if size else b""
        buffers.append(memoryview(memory).cast("B"))
    return LoadMemory(selection, buffers, late, shared)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements of it may share memory."""
    reach = 0  # the furthest element along the dimensions that were looked at
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step <= reach:
            return True
        reach += step * (size - 1)
    return False


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory has its elements in their order, and any mode may change it."""
    transformed = tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous()
    return not transformed and (tensor.is_cpu or not tensor.is_inference())


def _put_apart(tree: MutableMapping[str, Any], path: Path, value: torch.Tensor) -> bool:
    """Put the value into the tree, also if another place shares the list around it."""
    *above, key = path
    around: Any = tree
    for step in above:
        around = around[step]
    if not isinstance(around, list):
        return put(tree, path, value)
    assert isinstance(key, int)
    return put(tree, tuple(above), [*around[:key], value, *around[key + 1 :]])


def _stand_in(tensor: torch.Tensor, filled: bool) -> torch.Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return made.copy_(tensor.detach()) if filled else made


log = logging.getLogger("smckpt")


def whole_state(
    me: LoadingRank, only: Sequence[str] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The saved nested state, with empty tensors to fill; and these tensors alone, nested in dicts.
    (Values may hold arrays too, which are not tensors of the state.)

    Tensors are whole, on the CPU, by logical name. An optimizer's state has the names of its
    parameters if they are known. What the rank that this one follows did not save comes from
    others, as `LoadingRank` says.

    Args:
        only: the top keys to load.

    Raises:
        KeysMismatchError: one of `only` was not saved.
        CorruptCheckpointError: a tensor is larger than all files.
        MemoryBudgetError: there is no memory for a tensor.
        StateError: a value of others cannot be read without their code.
    """
    leaves: dict[Path, Any] = {}
    tensors: dict[Any, Any] = {}
    catalogue = me.catalogue
    catalogue.refuse_unread(
        lambda name: only is not None and not any(f"{name}.".startswith(f"{key}.") for key in only),
        "name the keys to load: LoadOptions(only=[…])",
    )
    kinds = me.kinds or {}
    for tensor in Planner(me).tensors():
        path = tensor.path
        if only is None or str(path[0]) in only:
            kind = kinds.get(path, "")
            room = _room(catalogue, tensor, kind)
            array = is_array(kind)
            leaves[path] = room.numpy() if array else flagged(room, kind.partition(";")[2])
            around = tensors
            for key in path[:-1]:
                around = around.setdefault(key, {})
                if not isinstance(around, dict):
                    break
            if not isinstance(around, dict) or path[-1] in around:
                raise _of_two_forms(path, me)
            around[path[-1]] = room
    own = {row.path for row in catalogue.rows if me.has(row)}
    above = {path[:depth] for path in own for depth in range(1, len(path))}
    for name, lost in catalogue.logical.items():
        path = lost.path
        inside = any(path[:depth] in own for depth in range(1, len(path)))
        asked = only is None or str(path[0]) in only
        if asked and (inside or path in above) and not me.takes(name):
            raise _of_two_forms(path, me)
    for path, saved_value in me.values(only=only).values():
        if only is None or str(path[0]) in only:
            value = made_again(saved_value)
            if value is not saved_value and (path not in leaves):
                log.warning(
                    "%s has values of classes that are not registered: they are names, tuples and "
                    "dicts now. Call smckpt.state_dict.register_value_class on them first",
                    dotted(path),
                )
            for named, renamed in under_names(catalogue.optimizers, path, value):
                leaves.setdefault(named, renamed)
    if lacking := {*(only or ())} - {str(path[0]) for path in leaves}:
        had = sorted({str(t.path[0]) for t in catalogue.logical.values()})
        raise KeysMismatchError(
            f"LoadOptions(only=) names {sorted(lacking)}, which was not saved; the saved keys are "
            f"{had[:12]}",
            remedy="name top keys of the saved state",
            **me.where,
        )
    return nested(catalogue, leaves, me.kinds), tensors


def _of_two_forms(path: Path, me: LoadingRank) -> StateError:
    return StateError(
        f"of {dotted(path)!r}, one rank has a tensor and another one tensors in it",
        remedy="load into a state on as many ranks as saved it",
        **me.where,
    )


def _room(catalogue: Catalogue, tensor: LogicalTensor, kind: str) -> torch.Tensor:
    name, shape, nbytes = dotted(tensor.path), tensor.shape, tensor.nbytes
    if (
        catalogue.ours and catalogue.whole and nbytes > catalogue.nbytes
    ):  # before memory is asked for
        raise CorruptCheckpointError(
            f"{name!r} {list(shape)} has {nbytes:,} bytes, but all data files together "
            f"have {catalogue.nbytes:,}",
            remedy="use an older checkpoint",
            path=catalogue.url,
        )
    try:
        order, expanded = dims_in(kind, "order", "ndarray"), dims_in(kind, "expanded") or ()
        dtype = getattr(torch, tensor.dtype)
        return arranged(tuple(shape), order, expanded, dtype=dtype, device="cpu")
    except RuntimeError as error:  # torch has no class of its own for it
        raise MemoryBudgetError(
            f"there is no memory for {name!r} {list(shape)}: {error}",
            remedy="name the keys that are needed with LoadOptions(only=), or load into sharded "
            "tensors",
            path=catalogue.url,
        ) from error
