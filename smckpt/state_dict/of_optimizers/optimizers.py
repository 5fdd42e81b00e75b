"""Gives state back to live optimizers, bit for bit, from state dicts by id or by name.

It does not call `Optimizer.load_state_dict`, which casts state to the parameter's dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from smckpt.checkpoint.reading.catalogue import are_groups
from smckpt.errors import CorruptCheckpointError, StateError, TensorMismatchError
from smckpt.layout.containers import items_of
from smckpt.layout.entries import Path, dotted
from smckpt.state_dict.of_optimizers.bindings import (
    Binding,
    bound,
    has_no_elements,
    inside,
    is_optimizer_dict,
    optimizer_dicts,
)
from smckpt.state_dict.of_optimizers.groups import (
    fill_groups,
    matched_groups,
    name_left,
    renamed_groups,
)
from smckpt.state_dict.of_optimizers.own_methods import has_own_methods, init_slots, wrappers_in
from smckpt.state_dict.of_optimizers.slots import (
    ABSENT,
    Room,
    SavedSlot,
    SavedState,
    aligned,
    described,
    room,
)
from smckpt.state_dict.tags import StatefulStateDict, put_back
from smckpt.state_dict.tensors import dtensor_parts, is_dtensor, is_value, order_of

if TYPE_CHECKING:
    from smckpt.checkpoint.reading.loading_rank import LoadingRank


def prepare_optimizers(
    state_dict: MutableMapping[str, Any],
    me: LoadingRank,
    values: Mapping[str, tuple[Path, Any]],
    *,
    strict: bool = True,
) -> tuple[bool, frozenset[Path]]:
    """Give live optimizers exactly the state that the checkpoint has: its structure, its values,
    and tensors to fill. A parameter without saved state loses its state.

    Args:
        state_dict: the target of a load. This replaces the dicts of optimizers in it.
        values: what was saved and is no tensor, with the target's names for parameters.

    Returns:
        Whether `state_dict` changed, and the paths of the states and groups that now have all
        saved values.

    Raises:
        StateError: nothing says how to make a state tensor, or in which optimizer.
    """
    renewed, settled = False, set()
    known: dict[Path, SavedState] = {}
    catalogue = me.catalogue
    for path, tree, binding in optimizer_dicts(state_dict):
        known[path] = saved = SavedState(me, values, path)
        owners = saved.owners()
        if binding is None and not isinstance(tree, StatefulStateDict):
            if strict and not tree["state"] and any(saved.tensors([owner]) for owner in owners):
                raise StateError(
                    f"{dotted(path)} holds no state, and its optimizer is not known: there is no "
                    "room for the saved state",
                    remedy="put the optimizer itself into the state, or take its state_dict() "
                    "inside sm_state_dict_type, or call init_optim_state(optimizer) first",
                )
            continue
        if not owners and not saved.has_groups:
            continue  # it was not saved, which is refused by name
        record = catalogue.optimizers.get(dotted(path))
        by_name = binding is not None and not binding.by_id
        other = _of_no_parameter(saved, record, by_name)
        if other or any(map(str.isdecimal, owners)):
            own = catalogue.optimizers_of(me.saved).get(dotted(path))  # a stage's, which has others
            other = _of_no_parameter(saved, own or record, by_name)
        if binding is None:
            _align_given(tree, saved, strict)
            renewed = True
        elif binding.kind == "FULL":
            changed, placed = _align_full(binding, tree["state"], saved, other, strict)
            renewed |= changed
            tree["param_groups"].binding = replace(binding, partly=not strict, placed=placed)
        elif _align_live(binding, saved, other, catalogue.held_empty, strict) or not tree["state"]:
            tree["state"] = binding.take()["state"]
            renewed = True
        if not strict and binding is not None and me.first:
            name_left(binding, saved, other, (*path, "state"))
        settled.add((*path, "state"))
        if saved.whole_groups is not ABSENT and not are_groups(saved.whole_groups):
            raise CorruptCheckpointError(
                f"{dotted((*path, 'param_groups'))} is no list of groups of parameters",
                remedy="use an older checkpoint",
            )
        if (groups := saved.groups()) is not None:
            if not strict and binding is not None:
                groups = matched_groups(groups, binding, record, dotted((*path, "param_groups")))
                record = None
            groups = renamed_groups(groups, tree, record, dotted(path) if strict else None)
            _align_groups(tree["param_groups"], groups, _parameters_of(tree))
            settled.add((*path, "param_groups"))
            renewed = True
    wrapped = [(path, given) for path, given, _ in wrappers_in(state_dict)]
    for path, given in (*_given_by_optimizers(state_dict), *wrapped):
        more = (known.get(path) or SavedState(me, values, path)).more()
        binding = bound(given) if is_optimizer_dict(given) else None
        of_others = (
            binding is not None and binding.asker is None and not has_own_methods(binding.optimizer)
        )
        if of_others:  # who put keys into it gets what was saved under them
            more = {key: value for key, value in more.items() if key in given}
        kept = {
            key
            for key, value in given.items()
            if isinstance(value, StatefulStateDict) or any(True for _ in optimizer_dicts(value))
        }
        kept |= {"state", "param_groups"}
        for key in [key for key in given if str(key) not in more and key not in kept]:
            if strict and more and not of_others:
                del given[key]
        make = room(None, None, {}, _parameters_of(given))
        for key in more.keys() - kept:
            given[key] = aligned(more[key], given.get(key), make, keep=not strict)
            settled.add((*path, key))
            renewed = True
    return renewed, frozenset(settled)


def _given_by_optimizers(tree: Any, path: Path = ()) -> Iterator[tuple[Path, dict[Any, Any]]]:
    """The state dicts that optimizers gave, and objects around them, and will load themselves, or
    with `hand_over`."""
    if isinstance(tree, StatefulStateDict) and (tree.of_optimizer or is_optimizer_dict(tree)):
        yield path, tree
        return
    if is_optimizer_dict(tree) and bound(tree) is not None:
        yield path, tree
    for at, child in inside(tree, path):
        yield from _given_by_optimizers(child, at)


def _parameters_of(given: Any) -> list[torch.Tensor]:
    """The parameters of the optimizers whose dicts these are."""
    found: list[torch.Tensor] = []
    for _, tree, binding in optimizer_dicts(given):
        groups = getattr(tree, "groups", ())
        found += binding.parameters() if binding else [p for g in groups for p in g["params"]]
    return found or [p for group in getattr(given, "groups", ()) for p in group["params"]]


def _of_no_parameter(
    saved: SavedState, record: Mapping[str, Any] | None, by_name: bool
) -> list[str]:
    """The saved keys of the state that name no parameter of any rank.

    Args:
        by_name: whether the target names its parameters, too.
    """
    ids = record["ids"] if record else ()
    names = {str(name) for found in ids for name in found}
    owners = saved.owners()
    if not names and not any(owner.isdecimal() for owner in owners):
        return []  # saved by names that are not recorded
    # Beside names, and beyond the parameters, a number is a key of the optimizer's own.
    numbers = 0 if by_name and record and record.get("form") == "fqn" else len(ids) or sys.maxsize
    return [
        owner
        for owner in owners
        if owner not in names
        and not (owner.isdecimal() and int(owner) < numbers)
        and saved.mine(owner)
    ]


def _align_live(
    binding: Binding,
    saved: SavedState,
    other: Sequence[str],
    held_empty: Callable[[str], bool],
    strict: bool,
) -> bool:
    """Give the live optimizer the saved slots. Returns whether any changed."""
    state, changed = binding.optimizer.state, False
    for index, (parameter, group) in enumerate(binding.members()):
        number = binding.number(index)
        keys = (*binding.names(parameter, index), *([] if str(number) in other else [number]))
        wanted = saved.slots(keys)
        if has_no_elements(parameter) and not (
            any(t.mine and (binding.by_id or t.flat) for t in saved.tensors(keys))
            or _has_state_where_empty(
                binding, parameter, [tensor.name for tensor in saved.tensors(keys)], held_empty
            )
        ):
            wanted = ABSENT
        elif has_no_elements(parameter) and isinstance(wanted, Mapping) and binding.by_id:
            wanted = {k: v for k, v in wanted.items() if getattr(v, "mine", True)}
        if wanted is ABSENT:
            live = state.get(parameter)
            if strict and (isinstance(live, torch.Tensor) or live):
                del state[parameter]
                changed = True
            continue
        if not strict:
            wanted, made = in_common(binding.optimizer, group, parameter, wanted)
            changed |= made
        changed |= put(state, parameter, wanted, room(binding, parameter, group), strict)
    live = {str(key): key for key in state if not isinstance(key, torch.Tensor)}
    for owner in other:
        key = live.pop(owner, saved.key(owner))
        changed |= put(state, key, saved.slots([owner]), room(None, None, {}), strict)
    for key in live.values() if strict else ():
        del state[key]
        changed = True
    return changed


def in_common(
    optimizer: Any, group: dict[str, Any], parameter: torch.Tensor, wanted: Any
) -> tuple[Any, bool]:
    """Of the saved slots those that the optimizer keeps as it is made now; and whether it has slots
    now that it had not. What other classes than torch's own keep is not known before they step."""
    if not type(optimizer).__module__.startswith("torch.optim") or not isinstance(wanted, Mapping):
        return wanted, False
    fresh = not optimizer.state.get(parameter)
    if fresh and not has_no_elements(parameter):
        init_slots(optimizer, group, parameter)
    live = optimizer.state.get(parameter, {})
    keeps = {*live, "momentum_buffer"} if group.get("momentum") else live.keys()
    lazy = isinstance(optimizer, torch.optim.LBFGS) or has_no_elements(parameter)
    return {k: v for k, v in wanted.items() if lazy or k in keeps}, fresh and bool(live)


def put(state: Any, key: Any, wanted: Any, make: Room, strict: bool = True) -> bool:
    """Give one owner its saved slots, in the dict that it has. Returns whether any changed."""
    live = state.get(key)
    new = aligned(wanted, live, make, keep=not strict)
    if new is live:
        return False
    if isinstance(live, dict) and isinstance(new, Mapping):
        new = dict(new)
        live.clear()
        live.update(new)
    else:
        state[key] = new
    return True


def _align_given(tree: StatefulStateDict, saved: SavedState, strict: bool) -> None:
    """The same for a dict that its object will load."""
    live = {str(key): key for key in tree["state"]}
    state = {} if strict else dict(tree["state"])
    for owner in saved.owners():
        key = live.get(owner, saved.key(owner))
        if not saved.mine(owner) and owner not in live:
            continue
        parameter, group = tree.owner_of(key)
        make = room(None, parameter, group)
        state[key] = aligned(saved.slots([owner]), tree["state"].get(key), make, keep=not strict)
    tree["state"] = state


def _align_full(
    binding: Binding, state: Any, saved: SavedState, other: Sequence[str], strict: bool
) -> tuple[bool, dict[Path, str]]:
    """The same for full state, on the rank that holds it. Its tensors are not live. Returns also
    how ranks hold them, as in a `Binding`."""
    changed, placed = False, dict[Path, str]()

    def make(tensor: Any, live: Any, at: Path) -> Any:
        if not isinstance(tensor, SavedSlot):  # the parts of one that holds others
            return live if isinstance(live, torch.Tensor) else ABSENT
        if tensor.placed:
            placed.update({(name, *at): tensor.placed})
        found = isinstance(live, torch.Tensor) and (tuple(live.shape), live.dtype, order_of(live))
        if found == (tensor.shape, tensor.dtype, tensor.order):
            return live
        return replace(tensor, local=None).zeros()

    known: set[str] = set()
    for index, (parameter, group) in enumerate(binding.members() if binding.holds else ()):
        for name in binding.names(parameter, index):
            wanted = saved.slots([name])
            known.add(name)
            if not strict and wanted is not ABSENT:
                wanted, _ = in_common(binding.optimizer, group, parameter, wanted)
            if wanted is not ABSENT:
                changed |= put(state, name, wanted, make, strict)
            elif strict and name in state:
                del state[name]
                changed = True
    for name in other if binding.holds else ():
        known.add(name)
        changed |= put(state, saved.key(name), saved.slots([name]), make, strict)
    for name in [name for name in state if str(name) not in known] if strict else ():
        del state[name]
        changed = True
    return changed, placed


def _align_groups(
    target: list[Any], groups: list[dict[str, Any]], parameters: Sequence[torch.Tensor]
) -> None:
    """Put the saved groups into a state dict, with tensors to fill."""
    make = room(None, None, {}, parameters)
    mine = [*target, *({} for _ in groups)]
    target[:] = [
        dict(aligned(group, {**live}, make)) for group, live in zip(groups, mine, strict=False)
    ]


def fill_optimizer(binding: Binding, given: Mapping[str, Any]) -> None:
    """Put a state dict of the binding's form into its live optimizer, bit for bit."""
    state, live = given["state"], binding.optimizer.state
    wanted: dict[int, Any] = {}
    owners: dict[int, tuple[Any, Mapping[str, Any]]] = {}
    others: dict[Any, Any] = {}
    for key, slots in state.items():
        owner = _owner(binding, key, slots)
        if owner is None:
            others[key] = slots
        else:
            owners[id(owner[0])] = owner
            cut = is_dtensor(owner[0]) and dtensor_parts(owner[0])[0].shape != owner[0].shape
            wanted[id(owner[0])] = described(slots, flat=binding.flat(owner[0]), cut=cut)
    for key in [key for key in live if id(key) not in wanted and key not in others]:
        del live[key]
    for number, (parameter, group) in owners.items():
        put(live, parameter, wanted[number], room(binding, parameter, group))
    for key, value in others.items():
        put(live, key, described(value), room(None, None, {}))
    here = binding.take()["state"]
    numbered = binding.numbered()
    for key, slots in state.items():
        _copy_all(slots, here[key] if key in here else numbered.get(key), str(key))
    fill_groups(binding, given["param_groups"])


def _copy_all(given: Any, live: Any, name: str) -> None:
    if isinstance(given, torch.Tensor):
        if not is_value(given):  # the live state has that very one
            copy_exactly(live, given, name)
    else:
        lives = dict(items_of(live) or ())
        for key, value in items_of(given) or ():
            _copy_all(value, lives.get(key), f"{name}.{key}")


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


def _owner(binding: Binding, key: Any, slots: Any) -> tuple[Any, Mapping[str, Any]] | None:
    """The parameter of a key, with its group; None if what was kept belongs to no parameter."""
    for index, (parameter, group) in enumerate(binding.members()):
        if key == index or key in binding.names(parameter, index):
            return parameter, group
    if not of_no_parameter(binding, key, slots):
        raise StateError(
            f"the optimizer has no parameter {key!r}",
            remedy="load the state of the optimizer that was saved",
        )
    return None


def of_no_parameter(binding: Binding, key: Any, slots: Any) -> bool:
    """Whether a key of the state that is no parameter's may stand there: the optimizer has it, or
    it does not look like a parameter's."""
    if key in binding.optimizer.state or (binding.by_id and not isinstance(key, int)):
        return True
    return not isinstance(slots, Mapping) and not isinstance(key, int)


def _has_state_where_empty(
    binding: Binding,
    parameter: torch.Tensor,
    names: Sequence[str],
    held_empty: Callable[[str], bool],
) -> bool:
    """Whether a parameter without elements on this rank has state nevertheless. A DTensor gets it
    in the first step, a view into a flat parameter seldom if others have elements. Under LOCAL each
    rank has the saved state, which `init_optim_state` may have skipped."""
    if binding.optimizer.state.get(parameter):
        return True
    return not binding.elsewhere(parameter) and (not binding.by_id or any(map(held_empty, names)))


# -- what is no tensor, by the target's names -----------------------------------------------------


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
        ids = record.get("names") or record.get("ids", [])  # numbered ones have names beside
        owners = _owners(binding)
        for key, (leaf_path, value) in _of_owners(out, path):
            owner = leaf_path[len(path) + 1]
            if isinstance(owner, int) and record.get("form") == "fqn":
                continue  # a key of the optimizer's own
            known = isinstance(owner, int) and 0 <= owner < len(ids)
            saved = ids[owner] if known else [owner]
            targets = [t for name in saved for t in owners.get(str(name), ())]
            if not targets:
                continue
            out.pop(key, None)
            for target, here in dict(targets).items():
                if here:
                    new = (*path, "state", target, *leaf_path[len(path) + 2 :])
                    out[dotted(new)] = (new, value)
    return out


def _of_owners(objects: Objects, path: Path) -> list[tuple[str, tuple[Path, Any]]]:
    """The values in an optimizer's state, each with its owner. A state without tensors was saved as
    one value, which this takes apart."""
    above = (*path, "state")
    whole = objects.get(dotted(above))
    if whole is not None and isinstance(whole[1], Mapping):
        del objects[dotted(above)]
        for owner, slots in whole[1].items():
            objects[dotted((*above, owner))] = ((*above, owner), slots)
    return [
        (key, found)
        for key, found in objects.items()
        if len(found[0]) > len(above) and found[0][: len(above)] == above
    ]


def _owners(binding: Binding) -> dict[str, list[tuple[Any, bool]]]:
    """Name of a parameter → its keys in the target, and whether this rank has state of it."""
    out: dict[str, list[tuple[Any, bool]]] = {}
    for index, parameter in enumerate(binding.parameters()):
        # of FULL state a rank has all or nothing
        here = binding.kind == "FULL" or not binding.elsewhere(parameter)
        for name in binding.names(parameter, index):
            target = index if binding.by_id else name
            out.setdefault(name, []).append((target, here))
    return out
