"""Plain values among an optimizer's state, such as an integer step, on their way back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from smckpt.layout.entries import Path, dotted
from smckpt.state_dict.optimizers import Binding, has_no_elements, optimizer_dicts

__all__ = ["make_values", "named_as_target"]

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
