"""Optimizer state: by id under LOCAL, by fully qualified name otherwise; bit for bit both ways.

Nothing goes through `Optimizer.load_state_dict`, which casts state to the parameter's dtype.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from smckpt.errors import StateError
from smckpt.layout.entries import Path
from smckpt.layout.geometry import FlatGeometry
from smckpt.state_dict.initial import make_slots
from smckpt.state_dict.model import Fsdp1View, Held, ModelView
from smckpt.state_dict.private import dtensor_parts, is_dtensor
from smckpt.state_dict.tags import OptimizerStateDict, ParamGroups, Tag, renew_tag, set_tag

__all__ = [
    "Binding",
    "bind",
    "fill_groups",
    "fill_optimizer",
    "has_no_elements",
    "is_optimizer_dict",
    "optimizer_dicts",
    "prepare_optimizers",
    "take",
]


Wanted = tuple[torch.dtype, tuple[int, ...], str]  # dtype, global shape, name of a saved slot


@dataclass
class Binding:
    """An optimizer, the form in which its state was taken, and what its parameters are called."""

    optimizer: torch.optim.Optimizer
    kind: str
    held: dict[int, Held] = field(repr=False)
    slices: dict[int, tuple[tuple[str, int, int, int], ...]] = field(repr=False)

    @property
    def by_id(self) -> bool:
        return self.kind == "LOCAL"

    def parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def names(self, parameter: torch.Tensor, index: int) -> tuple[str, ...]:
        found = self.held.get(id(parameter))
        return found.fqns if found else (str(index),)

    def flat(self, parameter: torch.Tensor) -> bool:
        """Whether it is a flat parameter of FSDP1, or a view into one."""
        found = self.held.get(id(parameter))
        return found is not None and isinstance(found.geometry, FlatGeometry)

    def record(self) -> dict[str, Any]:
        """What the manifest keeps, so that ids can be read as names later."""
        return {
            "form": "id" if self.by_id else "fqn",
            "ids": [list(self.names(p, i)) for i, p in enumerate(self.parameters())],
        }

    def take(self) -> OptimizerStateDict:
        return take(self.optimizer, self.kind, self.held, self.slices)

    def adopt(self, state_dict: dict[str, Any]) -> OptimizerStateDict:
        """A stock state dict of this optimizer that remembers it from now on."""
        groups = ParamGroups(state_dict["param_groups"])
        groups.binding = self
        out = OptimizerStateDict({**state_dict, "param_groups": groups})
        out.binding = self
        return out


def bind(optimizer: torch.optim.Optimizer, kind: str, view: ModelView) -> Binding:
    slices = view.slices() if isinstance(view, Fsdp1View) else {}
    return Binding(optimizer, kind, view.held(), slices)


def take(
    optimizer: torch.optim.Optimizer,
    kind: str,
    held: dict[int, Held],
    slices: dict[int, tuple[tuple[str, int, int, int], ...]],
) -> OptimizerStateDict:
    """The live state of `optimizer`, tagged; ids under LOCAL, names otherwise."""
    binding = Binding(optimizer, kind, held, slices)
    state: dict[Any, Any] = {}
    parameters = binding.parameters()
    ids = {id(p): index for index, p in enumerate(parameters)}
    for parameter, slots in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor):
            state[parameter] = slots  # LBFGS keeps state under a name of its own
            continue
        index = ids[id(parameter)]
        what = held.get(id(parameter))
        if binding.by_id:
            state[index] = {
                slot: _tagged(value, parameter, what, (slot,)) for slot, value in slots.items()
            }
            continue
        if what is None:
            raise _unknown(index)
        members = slices.get(id(parameter))
        if members is None:
            state[what.fqns[0]] = {
                slot: _tagged(value, parameter, what, (slot,)) for slot, value in slots.items()
            }
            continue
        for fqn, segment, offset, numel in members:
            state[fqn] = {
                slot: _member(value, parameter, what, kind, slot, fqn, segment, offset, numel)
                for slot, value in slots.items()
            }
    out = OptimizerStateDict(state=state, param_groups=_groups(binding, ids))
    out.binding = binding
    return out


def _groups(binding: Binding, ids: dict[int, int]) -> ParamGroups:
    groups = ParamGroups()
    for group in binding.optimizer.param_groups:
        copied = {key: value for key, value in group.items() if key != "params"}
        members: list[Any] = []
        for parameter in group["params"]:
            index = ids[id(parameter)]
            members += [index] if binding.by_id else binding.names(parameter, index)
        groups.append({**copied, "params": members})
    groups.binding = binding
    return groups


def _unknown(index: int) -> StateError:
    return StateError(
        f"parameter {index} of the optimizer is no parameter of the model in the context",
        remedy="open sm_state_dict_type on the model that this optimizer trains",
    )


def _tagged(value: Any, parameter: torch.Tensor, held: Held | None, after: Path) -> Any:
    """The value as it is; a tensor gets a tag that says whose state it is. It is the live tensor,
    and the tag rides on whatever others take later: so it says nothing of the kind of this take,
    which the dict knows."""
    if isinstance(value, dict):
        return {k: _tagged(v, parameter, held, (*after, k)) for k, v in value.items()}
    if not isinstance(value, torch.Tensor) or held is None:
        return value
    geometry = held.geometry
    if geometry is not None and not _same_extent(value, parameter):
        geometry = None
    renew_tag(value, held.fqns, geometry, after)
    return value


def _same_extent(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    return value.dim() > 0 and not is_dtensor(value) and value.shape == parameter.shape


def _member(
    value: Any,
    parameter: torch.Tensor,
    held: Held,
    kind: str,
    slot: str,
    fqn: str,
    segment: int,
    offset: int,
    numel: int,
) -> Any:
    """The part of a flat parameter's state that belongs to one member."""
    if not isinstance(value, torch.Tensor):
        return value
    geometry = None
    if _same_extent(value, parameter) and isinstance(held.geometry, FlatGeometry):
        geometry = FlatGeometry(held.geometry.unit, held.geometry.mesh, segment)
        part = value.detach()[offset : offset + numel]
    else:
        part = value.detach()  # an object of its own: each member has its own tag
    set_tag(part, Tag(kind, (fqn,), geometry, (slot,)))
    return part


# -- in a user's dict ---------------------------------------------------------------------------


def is_optimizer_dict(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("param_groups"), list)
        and isinstance(value.get("state"), dict)
    )


def optimizer_dicts(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any, Binding | None]]:
    """Optimizers' state dicts inside a nested dict: (path, the dict, its binding if it has one)."""
    if is_optimizer_dict(tree):
        yield path, tree, _binding_of(tree)
        return
    items: Any = ()
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    for key, value in items:
        if isinstance(value, (dict, list, tuple)):  # not a generator for each number of a list
            yield from optimizer_dicts(value, (*path, key))


def _binding_of(tree: dict[str, Any]) -> Binding | None:
    for holder in (tree, tree["param_groups"]):
        binding: Binding | None = getattr(holder, "binding", None)
        if binding is not None:
            return binding
    return _found_by_identity(tree)


def _found_by_identity(tree: dict[str, Any]) -> Binding | None:
    """The live optimizer whose state tensors are those of a stock state dict.

    `Optimizer.state_dict()` hands out the live tensors, so identity tells, whoever made the dict.
    """
    wanted = {
        id(value)
        for slots in tree["state"].values()
        if isinstance(slots, dict)
        for value in slots.values()
        if isinstance(value, torch.Tensor)
    }
    if not wanted:
        # Wrappers (accelerate's) show the groups of the one inside: not another optimizer.
        alike = [o for o in _live_optimizers() if _made_its_groups(o, tree["param_groups"])]
        one = len({id(o.param_groups) for o in alike}) == 1
        return Binding(alike[0], "LOCAL", {}, {}) if one else None
    for candidate in _live_optimizers():
        for slots in candidate.state.values():
            if any(id(value) in wanted for value in slots.values()):
                keys = list(tree["state"])
                kind = "LOCAL" if keys and isinstance(keys[0], int) else "SHARDED"
                return Binding(candidate, kind, {}, {}) if kind == "LOCAL" else None
    return None


def _live_optimizers() -> Iterator[torch.optim.Optimizer]:
    for candidate in gc.get_objects():
        # `isinstance` would wake objects that are lazy about their `__class__`.
        if issubclass(type(candidate), torch.optim.Optimizer):
            yield candidate


def _made_its_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> bool:
    """Whether the groups hold the very values of the live ones, for as many parameters: what a
    state dict without state can be known by."""
    live = optimizer.param_groups
    return (
        not optimizer.state
        and len(groups) == len(live)
        and all(
            theirs.keys() == mine.keys()
            and len(theirs["params"]) == len(mine["params"])
            and all(theirs[key] is mine[key] for key in mine if key != "params")
            for theirs, mine in zip(groups, live, strict=True)
        )
    )


def prepare_optimizers(
    state_dict: MutableMapping[str, Any],
    saved: Mapping[str, Any],
    held_empty: Callable[[str], bool],
    *,
    strict: bool = True,
) -> bool:
    """Give live optimizers exactly the state tensors that the checkpoint has.

    Args:
        state_dict: the target of a load; dicts of optimizers in it are taken anew in place.
        saved: logical name → an object with `path` and `dtype` (the catalogue's).
        held_empty: whether a saved rank held an array of this name without elements.

    A parameter whose state was saved and that has none yet gets it; one that had none when the
    state was saved loses it; a state tensor of another dtype is replaced.

    Returns:
        Whether there are other tensors in `state_dict` now.

    Raises:
        StateError: there is no telling how a slot is to be made.
    """
    renewed = False
    for path, tree, binding in optimizer_dicts(state_dict):
        if binding is None:
            continue
        slots = _saved_slots(saved, path)
        if binding.kind == "FULL":
            renewed |= _align_full(binding, tree["state"], slots, strict)
            continue
        changed = False
        for index, parameter in enumerate(binding.parameters()):
            wanted: dict[str, Wanted] = {}
            for name in binding.names(parameter, index):
                wanted.update(slots.get(name, {}))
            wanted = wanted or slots.get(str(index), {})  # saved by somebody who knew no names
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
    from smckpt.state_dict.context import copy_exactly

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


def fill_groups(binding: Binding, groups: list[dict[str, Any]]) -> None:
    """Write hyperparameters into the live param_groups, matched by position."""
    live = binding.optimizer.param_groups
    if len(groups) != len(live):
        raise StateError(
            f"{len(groups)} parameter groups were saved, the optimizer has {len(live)}",
            remedy="build the optimizer with the same groups",
        )
    given: dict[int, torch.Tensor] = {}  # groups may share one tensor (a rate), or not any more
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
    """Parameter name → {slot: (dtype, shape)} of the optimizer at `path`."""
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
    """Make the live slots of `parameter` those that were saved; whether anything changed."""
    optimizer = binding.optimizer
    live = optimizer.state.get(parameter, {})
    if not wanted:
        tensors = any(isinstance(v, torch.Tensor) for v in live.values())
        if tensors and strict:
            del optimizer.state[parameter]
            return True
        return False
    if all(_has(live, slot, dtype) for slot, (dtype, _, _) in wanted.items()):
        return False  # the rule: an optimizer that has stepped, or that init_optim_state filled
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
    """As `_align`, of full state, whose tensors are no live ones, on the rank that holds it."""
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
    """Whether a parameter of which this rank has no elements has state all the same: a DTensor
    gets it with the first step, a view into a flat parameter never. Under LOCAL each rank has what
    was saved, which `init_optim_state` may have left out."""
    if binding.optimizer.state.get(parameter):
        return True
    return not binding.flat(parameter) and (not binding.by_id or any(map(held_empty, names)))


def has_no_elements(parameter: torch.Tensor) -> bool:
    """Of a parameter, on this rank."""
    return (dtensor_parts(parameter)[0] if is_dtensor(parameter) else parameter).numel() == 0
