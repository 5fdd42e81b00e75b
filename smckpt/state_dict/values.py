"""Plain values among an optimizer's state, such as an integer step, on their way back; and room for
modules' extra state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from smckpt.layout.entries import Path, dotted
from smckpt.layout.geometry import KeptGeometry
from smckpt.state_dict.computed import is_extra_state
from smckpt.state_dict.optimizers import Binding, has_no_elements, optimizer_dicts
from smckpt.state_dict.restore import put
from smckpt.state_dict.select import Selection

__all__ = ["make_extra_state", "make_values", "named_as_target"]

Objects = dict[str, tuple[Path, Any]]


def named_as_target(
    state_dict: MutableMapping[str, Any],
    objects: Mapping[str, tuple[Path, Any]],
    records: Mapping[str, Any],
) -> Objects:
    """The saved values, those in optimizers' state under the target's names of the parameters.

    Args:
        objects: key → (path, value), as saved.
        records: how each optimizer's parameters were called when it was saved.
    """
    out = dict(objects)
    for path, _, binding in optimizer_dicts(state_dict):
        record = records.get(dotted(path)) or {}
        if binding is None or (binding.by_id and record.get("form") == "id"):
            continue  # by id both, as their tensors are
        ids = record.get("ids", [])
        owners = _owners(binding)
        for key in list(out):
            its, value = out[key]
            if not _is_slot(its, path):
                continue
            *_, owner, slot = its
            saved = ids[owner] if isinstance(owner, int) and owner < len(ids) else [owner]
            targets = [t for name in saved for t in owners.get(str(name), ())]
            if not targets:
                continue
            del out[key]
            for target, here in dict(targets).items():
                if here:
                    new = (*path, "state", target, slot)
                    out[dotted(new)] = (new, value)
    return out


def make_values(
    state_dict: MutableMapping[str, Any], objects: Mapping[str, tuple[Path, Any]]
) -> bool:
    """Give live optimizers the values that they lack, as they get tensors (`prepare_optimizers`);
    whether there are more of them in `state_dict` now."""
    made = False
    for path, tree, binding in optimizer_dicts(state_dict):
        if binding is None or binding.kind == "FULL":
            continue
        parameters = {t: p for p, t in _targets(binding)}
        changed = False
        for its, value in objects.values():
            if _is_slot(its, path) and its[-2] in parameters:
                slots = binding.optimizer.state[parameters[its[-2]]]
                if its[-1] not in slots:
                    slots[its[-1]] = value
                    changed = True
        if changed:
            tree["state"] = binding.take()["state"]
            made = True
    return made


def make_extra_state(
    state_dict: MutableMapping[str, Any],
    selection: Selection,
    rows: Mapping[str, Sequence[Any]],
    saved: int,
) -> bool:
    """Give tensors of modules' extra state the shapes and dtypes that were saved; whether any had
    others. No parameter says how large they are: Transformer Engine pickles its scales into bytes,
    none of them before the first step.

    Args:
        selection: of `state_dict`.
        rows: key → the saved arrays of this key (the catalogue's).
        saved: the saved rank whose own values this one takes.
    """
    made = False
    for entry, live in zip(selection.entries, selection.tensors, strict=True):
        if not any(map(is_extra_state, entry.path)) or not isinstance(entry.geometry, KeptGeometry):
            continue
        for row in rows.get(entry.key, ()):
            if row.geometry is not None or saved not in row.ranks:
                continue
            shape = tuple(row.local_shape(saved))
            if (row.dtype, shape) != (entry.dtype, entry.shape):
                room = torch.empty(shape, dtype=getattr(torch, row.dtype), device=live.device)
                made |= put(state_dict, entry.path, room)
    return made


def _is_slot(its: Path, path: Path) -> bool:
    return len(its) == len(path) + 3 and its[: len(path) + 1] == (*path, "state")


def _targets(binding: Binding) -> Iterator[tuple[Any, Any]]:
    """Each parameter with each key that it has in the target's state."""
    for index, parameter in enumerate(binding.parameters()):
        for target in (index,) if binding.by_id else binding.names(parameter, index):
            yield parameter, target


def _owners(binding: Binding) -> dict[str, list[tuple[Any, bool]]]:
    """Name of a parameter → its keys in the target, and whether this rank has state of it."""
    out: dict[str, list[tuple[Any, bool]]] = {}
    for index, parameter in enumerate(binding.parameters()):
        here = not (has_no_elements(parameter) and binding.flat(parameter))
        for name in binding.names(parameter, index):
            target = index if binding.by_id else name
            out.setdefault(name, []).append((target, here))
    return out
