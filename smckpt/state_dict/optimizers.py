"""Gives state back to live optimizers, bit for bit, from state dicts by id or by name.

It does not call `Optimizer.load_state_dict`, which casts state to the parameter's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from smckpt.errors import StateError, TensorMismatchError
from smckpt.layout.entries import Path, dotted
from smckpt.state_dict.bindings import Binding, has_no_elements, optimizer_dicts
from smckpt.state_dict.initial import make_slots
from smckpt.state_dict.tags import put_back
from smckpt.state_dict.tensors import dtensor_parts, is_dtensor

__all__ = [
    "copy_exactly",
    "fill_groups",
    "fill_optimizer",
    "make_values",
    "named_as_target",
    "prepare_optimizers",
]


# dtype, global shape, name of a saved state tensor
Wanted = tuple[torch.dtype, tuple[int, ...], str]


def prepare_optimizers(
    state_dict: MutableMapping[str, Any],
    saved: Mapping[str, Any],
    held_empty: Callable[[str], bool],
    *,
    strict: bool = True,
) -> bool:
    """Give live optimizers exactly the state tensors that the checkpoint has.

    A parameter without state gets the tensors that were saved. A parameter without saved state
    loses its state. A state tensor of another dtype is replaced.

    Args:
        state_dict: the target of a load. This replaces the dicts of optimizers in it.
        saved: logical name → an object with `path` and `dtype` (the catalogue's).
        held_empty: whether a saved rank held an array of this name without elements.

    Returns:
        Whether the tensors in `state_dict` changed.

    Raises:
        StateError: nothing says how to make a state tensor, or in which optimizer.
    """
    renewed = False
    for path, tree, binding in optimizer_dicts(state_dict):
        slots = _saved_slots(saved, path)
        if binding is None:
            if slots and not tree["state"] and strict:
                raise StateError(
                    f"{dotted(path)} holds no state, and its optimizer is not known: there is no "
                    "room for the saved state",
                    remedy="put the optimizer itself into the state, or take its state_dict() "
                    "inside sm_state_dict_type, or call init_optim_state(optimizer) first",
                )
            continue
        if binding.kind == "FULL":
            renewed |= _align_full(binding, tree["state"], slots, strict)
            continue
        changed = False
        for index, parameter in enumerate(binding.parameters()):
            wanted: dict[str, Wanted] = {}
            for name in binding.names(parameter, index):
                wanted.update(slots.get(name, {}))
            wanted = wanted or slots.get(str(index), {})  # saved without names
            if has_no_elements(parameter) and not _has_state_where_empty(
                binding, parameter, [name for *_, name in wanted.values()], held_empty
            ):
                wanted = {}
            changed |= _align(binding, parameter, wanted, strict)
        if changed or not tree["state"]:
            fresh = binding.take()
            tree["state"] = fresh["state"]
            renewed = True
    return renewed


def fill_optimizer(binding: Binding, given: Mapping[str, Any]) -> None:
    """Put a state dict of the binding's form into its live optimizer, bit for bit."""
    live = binding.take()
    state = given["state"]
    for key in [k for k in live["state"] if k not in state]:
        _forget(binding, key)
    for key, slots in state.items():
        owner = _owner(binding, key)
        wanted = {
            slot: (value.dtype, tuple(value.shape))
            for slot, value in slots.items()
            if isinstance(value, torch.Tensor)
        }
        if make_slots(binding.optimizer, owner, wanted, flat=binding.flat(owner)):
            live = binding.take()
        here = live["state"].get(key, {})
        for slot, value in slots.items():
            mine = here.get(slot)
            if isinstance(value, torch.Tensor) and isinstance(mine, torch.Tensor):
                whole = binding.optimizer.state[owner][slot]
                if mine.dtype != value.dtype and whole.shape == mine.shape:
                    # An fp32 momentum beside bf16 parameters stays fp32.
                    binding.optimizer.state[owner][slot] = value.detach().clone()
                    continue
                copy_exactly(mine, value, f"{key}.{slot}")
            else:
                binding.optimizer.state[owner][slot] = (
                    value.detach().clone() if isinstance(value, torch.Tensor) else value
                )
    fill_groups(binding, given["param_groups"])


def copy_exactly(live: Any, given: Any, name: str) -> None:
    """Copy `given` into `live`, bit for bit, unless they are the same memory.

    Raises:
        TensorMismatchError: shapes or dtypes differ.
    """
    if not isinstance(live, torch.Tensor) or not isinstance(given, torch.Tensor):
        return
    target = dtensor_parts(live)[0] if is_dtensor(live) else live
    source = dtensor_parts(given)[0] if is_dtensor(given) else given
    if target.dtype != source.dtype or target.shape != source.shape:
        raise TensorMismatchError(
            f"{name}: given {source.dtype} {list(source.shape)}, live {target.dtype} "
            f"{list(target.shape)}",
            remedy="take and load with the same kind on the same model",
        )
    if target.data_ptr() == source.data_ptr() and target.stride() == source.stride():
        return
    with torch.no_grad():
        target.detach().copy_(source)
        put_back([live])


def fill_groups(binding: Binding, groups: list[dict[str, Any]]) -> None:
    """Write hyperparameters into the live param_groups, matched by position."""
    live = binding.optimizer.param_groups
    if len(groups) != len(live):
        raise StateError(
            f"{len(groups)} parameter groups were saved, the optimizer has {len(live)}",
            remedy="build the optimizer with the same groups",
        )
    given: dict[int, torch.Tensor] = {}  # groups may share one tensor (a learning rate)
    for mine, theirs in zip(live, groups, strict=True):
        for key, value in theirs.items():
            if key == "params":
                continue
            if isinstance(mine.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                if not torch.equal(given.setdefault(id(mine[key]), value), value):
                    mine[key] = value
                elif mine[key] is not value:
                    mine[key].copy_(value)
            else:
                mine[key] = value


def _owner(binding: Binding, key: Any) -> torch.Tensor:
    for index, parameter in enumerate(binding.parameters()):
        if key == index or key in binding.names(parameter, index):
            return parameter
    raise StateError(
        f"the optimizer has no parameter {key!r}",
        remedy="load the state of the optimizer that was saved",
    )


def _forget(binding: Binding, key: Any) -> None:
    binding.optimizer.state.pop(_owner(binding, key), None)


def _saved_slots(saved: Mapping[str, Any], path: Path) -> dict[str, dict[str, Wanted]]:
    """Parameter name → {key of the state: (dtype, shape)} of the optimizer at `path`."""
    prefix = tuple(map(str, (*path, "state")))
    deep, first = len(prefix) + 2, prefix[0]
    out: dict[str, dict[str, Wanted]] = {}
    for name, tensor in saved.items():
        its = tensor.path
        if len(its) != deep or str(its[0]) != first:
            continue
        *above, owner, slot = map(str, its)
        if tuple(above) == prefix:
            wanted = (getattr(torch, tensor.dtype), tuple(tensor.shape), name)
            out.setdefault(owner, {})[slot] = wanted
    return out


def _align(
    binding: Binding, parameter: torch.Tensor, wanted: dict[str, Wanted], strict: bool
) -> bool:
    """Give `parameter` state tensors of the saved names and dtypes. Returns whether any changed."""
    optimizer = binding.optimizer
    live = optimizer.state.get(parameter, {})
    if not wanted:
        tensors = any(isinstance(v, torch.Tensor) for v in live.values())
        if tensors and strict:
            del optimizer.state[parameter]
            return True
        return False
    if all(_has(live, slot, dtype) for slot, (dtype, _, _) in wanted.items()):
        return False  # the common case: the optimizer has stepped, or init_optim_state filled it
    shapes = {slot: (dtype, shape) for slot, (dtype, shape, _) in wanted.items()}
    changed = make_slots(optimizer, parameter, shapes, flat=binding.flat(parameter))
    live = optimizer.state[parameter]
    for slot, (dtype, _) in shapes.items():
        value = live.get(slot)
        if isinstance(value, torch.Tensor) and value.dtype != dtype:
            live[slot] = value.to(dtype)
            changed = True
    return changed


def _align_full(
    binding: Binding, state: Any, slots: dict[str, dict[str, Wanted]], strict: bool
) -> bool:
    """As `_align`, for full state on the rank that holds it. Its tensors are not live."""
    changed = False
    for index, parameter in enumerate(binding.parameters() if state.holds else ()):
        for name in binding.names(parameter, index):
            wanted, mine = slots.get(name, {}), state.get(name, {})
            if strict and not wanted and any(isinstance(v, torch.Tensor) for v in mine.values()):
                del state[name]
                changed = True
            for slot, (dtype, shape, _) in wanted.items():
                here = mine.get(slot)
                if not isinstance(here, torch.Tensor) or here.dtype != dtype:
                    state.setdefault(name, {})[slot] = torch.zeros(shape, dtype=dtype)
                    changed = True
    return changed


def _has(slots: Mapping[str, Any], slot: str, dtype: torch.dtype) -> bool:
    value = slots.get(slot)
    return isinstance(value, torch.Tensor) and value.dtype == dtype


def _has_state_where_empty(
    binding: Binding,
    parameter: torch.Tensor,
    names: Sequence[str],
    held_empty: Callable[[str], bool],
) -> bool:
    """Whether a parameter without elements on this rank has state nevertheless. A DTensor gets it
    in the first step, a view into a flat parameter never. Under LOCAL each rank has the saved
    state, which `init_optim_state` may have skipped."""
    if binding.optimizer.state.get(parameter):
        return True
    return not binding.flat(parameter) and (not binding.by_id or any(map(held_empty, names)))


# -- plain values among the state, such as an integer step ----------------------------------------


Objects = dict[str, tuple[Path, Any]]


def named_as_target(
    state_dict: MutableMapping[str, Any],
    objects: Mapping[str, tuple[Path, Any]],
    records: Mapping[str, Any],
) -> Objects:
    """The saved values, with the target's names for parameters in optimizers' state.

    Args:
        objects: key → (path, value), as saved.
        records: the saved names of each optimizer's parameters.
    """
    out = dict(objects)
    for path, _, binding in optimizer_dicts(state_dict):
        record = records.get(dotted(path)) or {}
        if binding is None or (binding.by_id and record.get("form") == "id"):
            continue  # both are by id, like their tensors
        ids = record.get("ids", [])
        owners = _owners(binding)
        for key in list(out):
            its, value = out[key]
            if not _is_slot(its, path):
                continue
            *_, owner, slot = its
            known = isinstance(owner, int) and 0 <= owner < len(ids)
            saved = ids[owner] if known else [owner]
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
    """Give live optimizers the saved values that they lack; returns whether `state_dict` has more
    values now. `prepare_optimizers` does the same for tensors."""
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
    """(parameter, key): each key under which the target's state has the parameter."""
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
