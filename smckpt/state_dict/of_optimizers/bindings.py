"""An optimizer's live state: by id under LOCAL, by fully qualified name otherwise.

The dict from `state_dict()` in a `sm_state_dict_type` block remembers its optimizer. So a load can
make missing state tensors and write hyperparameters to the live groups. A dict from outside a block
is torch's own. It holds the live dicts of the state, by which a load finds the optimizer that has
them. No optimizer is touched for that. The state may also contain the optimizer itself.
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from smckpt.errors import StateError
from smckpt.layout.containers import items_of, like, renewed
from smckpt.layout.entries import Path
from smckpt.state_dict.tags import (
    OptimizerStateDict,
    ParamGroups,
    Tag,
    renew_tag,
    set_tag,
    tag_of,
)
from smckpt.state_dict.tensors import dtensor_parts, flagged, flags_of, is_dtensor, is_value
from smckpt.state_dict.views import Held, Member, ModelView


@dataclass(frozen=True)
class Binding:
    """An optimizer, the kind of state that was taken, and its parameters.

    held: by id of the parameter; empty where the model is not known, and names are numbers.
    put_through: as in `FullStateDict`. holds: whether this rank has the state (FULL: rank 0).
    order: the number of each parameter in the checkpoint, where a load knows it by names. partly:
    the load fills what the optimizer and the checkpoint both have. asker: the optimizer around it
    that asked for this state, for its own dict. placed: of FULL state, how ranks hold tensors that
    are not held as their parameter is, by their paths: as in a `SavedSlot`.
    """

    optimizer: torch.optim.Optimizer
    kind: str
    held: dict[int, Held] = field(repr=False)
    put_through: Callable[[Any], object] | None = field(default=None, repr=False)
    holds: bool = True
    order: tuple[int, ...] = ()
    partly: bool = False
    asker: Any = field(default=None, repr=False)
    placed: Mapping[Path, str] = field(default_factory=dict, repr=False)

    @property
    def by_id(self) -> bool:
        return self.kind == "LOCAL"

    def parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def members(self) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """The parameters, each with its group."""
        return [(p, group) for group in self.optimizer.param_groups for p in group["params"]]

    def number(self, index: int) -> int:
        """The number of the parameter at a position."""
        return self.order[index] if self.order else index

    def names(self, parameter: torch.Tensor, index: int) -> tuple[str, ...]:
        found = self.held.get(id(parameter))
        return found.fqns if found else (str(self.number(index)),)

    def flat(self, parameter: torch.Tensor) -> bool:
        """Whether it is a flat array of tensors that have shapes (FSDP1)."""
        found = self.held.get(id(parameter))
        return found is not None and found.geometry is not None and found.geometry.flat

    def elsewhere(self, parameter: torch.Tensor) -> bool:
        """Whether other ranks alone have elements of it: it is a view into a flat parameter, and
        empty here. A step makes no state of it here, unless it has no elements on any rank."""
        empty = self.flat(parameter) and has_no_elements(parameter)
        return empty and any(map(math.prod, self.shapes(parameter)))

    def shapes(self, parameter: torch.Tensor) -> list[tuple[int, ...]]:
        """The global shapes of the tensors that a parameter holds."""
        found = self.held.get(id(parameter))
        if found is None:
            return [tuple(parameter.shape)]
        if found.geometry is not None:
            return [tuple(found.geometry.shape_of(fqn)) for fqn in found.geometry.fqns]
        return [tuple(member.geometry.shape_of(member.fqn)) for member in found.members]

    def record(self, given: Mapping[Any, Any]) -> dict[str, Any]:
        """The names of the ids, for the manifest.

        Args:
            given: the state that is saved.

        Raises:
            StateError: the optimizer's class or a hook gave parameters' state other keys.
        """
        known: set[Any] = set(self.optimizer.state) if given else set()
        lost = False
        for index, parameter in enumerate(self.parameters() if given else ()):
            keys = {self.number(index), *self.names(parameter, index)}
            lost |= parameter in known and keys.isdisjoint(given)
            known |= keys
        if lost and (other := [key for key in given if key not in known]):
            raise StateError(
                f"{type(self.optimizer).__name__} gives the state of its parameters under keys of "
                f"its own, such as {other[0]!r}, so that no load could tell whose it is",
                remedy="put the optimizer itself into the state, outside of the block",
            )
        return {
            "form": "id" if self.by_id else "fqn",
            "ids": [list(self.names(p, i)) for i, p in enumerate(self.parameters())],
        }

    def shapes_on_mesh(self) -> dict[Any, tuple[int, ...]]:
        """The key in the state of each parameter that a mesh divides, with its global shape; of no
        parameter under FULL, whose tensors are all whole."""
        if self.kind == "FULL" or not hasattr(self.optimizer, "param_groups"):
            return {}
        return {
            key: tuple(parameter.shape)
            for index, parameter in enumerate(self.parameters())
            if is_dtensor(parameter) and parameter.dim()
            for key in ((self.number(index),) if self.by_id else self.names(parameter, index))
        }

    def take(self) -> OptimizerStateDict:
        """The live state, tagged; ids under LOCAL, names otherwise.

        Raises:
            StateError: a parameter is not one of the model's, so it has no name.
        """
        ids = {id(p): self.number(index) for index, p in enumerate(self.parameters())}
        state: dict[Any, Any] = {}
        seen: set[int] = set()
        others: dict[Any, Any] = {}  # what belongs to no parameter
        for parameter, slots in self.optimizer.state.items():
            if not isinstance(parameter, torch.Tensor):
                others[parameter] = slots
                continue
            if id(parameter) not in ids:
                raise StateError(
                    "the optimizer has state of a tensor that is in none of its groups",
                    remedy="remove it from optimizer.state, or add the tensor to a group",
                )
            index, held = ids[id(parameter)], self.held.get(id(parameter))
            if isinstance(self.optimizer, torch.optim.LBFGS) and slots and self.flat(parameter):
                raise StateError(
                    "LBFGS keeps one state for all parameters, and under FSDP1 each rank has other "
                    "parts of them",
                    remedy="use fully_shard, or leave the optimizer out of the state",
                )
            if held is None and not self.by_id:
                raise StateError(
                    f"parameter {index} of the optimizer is not a parameter of the model in the "
                    "context",
                    remedy="open sm_state_dict_type on a module with all that this optimizer "
                    "trains, such as a ModuleList of its models",
                )
            if held is not None and held.members and not self.by_id:
                for member in held.members:
                    take = partial(_part, parameter=parameter, kind=self.kind, member=member)
                    state[member.fqn] = walked(slots, take)
                continue
            key = index if self.by_id or held is None else held.fqns[0]
            take = partial(_tagged, parameter=parameter, held=held, seen=seen)
            state[key] = walked(slots, take)
        # at last: a tensor in them may be a parameter's too, and has its tag by now
        state |= {key: _untagged(slots) for key, slots in others.items()}
        return OptimizerStateDict(state=state, param_groups=self._groups(ids))

    def numbered(self) -> dict[Any, Any]:
        """The live state as torch's own `state_dict()` gives it: by number, not copied."""
        ids = {id(p): index for index, p in enumerate(self.parameters())}
        return {ids.get(id(key), key): slots for key, slots in self.optimizer.state.items()}

    def _groups(self, ids: dict[int, int]) -> ParamGroups:
        groups = ParamGroups()
        for group in self.optimizer.param_groups:
            copied = {key: _untagged(v) for key, v in group.items() if key != "params"}
            members: list[Any] = []
            for parameter in group["params"]:
                index = ids[id(parameter)]
                members += [index] if self.by_id else self.names(parameter, index)
            groups.append({**copied, "params": members})
        groups.binding = self
        return groups


def bind(optimizer: torch.optim.Optimizer, kind: str, view: ModelView) -> Binding:
    return Binding(optimizer, kind, view.held())


def placed_in(binding: Binding | None) -> Callable[[Path, torch.Tensor], str]:
    """Tells, by its path in the state, how ranks hold a tensor, if not as its parameter: "whole" if
    each rank has the whole of it, while a mesh divides its parameter; "" if the tensor tells."""
    if binding is None:
        return lambda at, tensor: ""
    placed, on_mesh = binding.placed, binding.shapes_on_mesh()
    return lambda at, tensor: (
        placed.get(at) or "whole" * (on_mesh.get(at[0]) == tensor.shape and not is_dtensor(tensor))
    )


def walked(value: Any, take: Callable[[torch.Tensor, Path], Any], at: Path = ()) -> Any:
    """The slots of a parameter, with `take(tensor, path)` for each tensor in them that is no
    value."""
    if isinstance(value, torch.Tensor):
        return value if is_value(value) else take(value, at)
    if (pairs := items_of(value)) is None:
        return value
    items = {key: walked(child, take, (*at, key)) for key, child in pairs}
    if isinstance(value, dict) and (type(value) is dict or not at):
        return items
    if isinstance(value, dict):
        return renewed(copy.copy(value), items)  # an OrderedDict, a Counter, which would add
    return value if all(items[key] is child for key, child in pairs) else like(value, items)


def _tagged(
    value: torch.Tensor,
    at: Path,
    *,
    parameter: torch.Tensor,
    held: Held | None,
    seen: set[int],
) -> torch.Tensor:
    """The tensor itself, tagged with its parameter. It is the live tensor, and later takes find the
    same tag. So the dict, not the tag, records the kind of this take."""
    if held is None:
        return value
    geometry = held.geometry
    if geometry is not None and not _same_extent(value, parameter):
        geometry = None
    if id(value) in seen:  # one tensor in two slots needs two tags
        value = flagged(value.detach(), flags_of(value))
    seen.add(id(value))
    renew_tag(value, held.fqns, geometry, at)
    return value


def _untagged(value: Any) -> Any:
    """The same value, where a tensor in it is in a parameter's slots too, and has their tag: with
    another tensor over its memory."""
    found: list[torch.Tensor] = []
    walked(value, lambda tensor, at: found.append(tensor))
    if all(tag_of(tensor) is None for tensor in found):
        return value
    return walked(value, lambda tensor, at: flagged(tensor.detach(), flags_of(tensor)), ("",))


def _same_extent(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    return value.dim() > 0 and not is_dtensor(value) and value.shape == parameter.shape


def _part(
    value: torch.Tensor, at: Path, *, parameter: torch.Tensor, kind: str, member: Member
) -> torch.Tensor:
    """The part of a flat parameter's state that belongs to one member."""
    part, geometry = value.detach(), None  # a new object, since each member has its own tag
    if _same_extent(value, parameter):
        part, geometry = part[member.offset : member.offset + member.numel], member.geometry
    part = flagged(part, flags_of(value))
    set_tag(part, Tag(kind, (member.fqn,), geometry, at))
    return part


# -- outside a block ----------------------------------------------------------------------------


def stock(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> OptimizerStateDict:
    """A copy of a stock state dict that remembers this optimizer."""
    groups = ParamGroups(state_dict["param_groups"])
    groups.binding = Binding(optimizer, "LOCAL", {})
    return OptimizerStateDict({**state_dict, "param_groups": groups})


def live_optimizers() -> Iterator[tuple[Any, dict[str, Any]]]:
    """All optimizers of this process, each with its own attributes; a wrapper's `getattr` may give
    those of another one. Nothing registers optimizers, so that none is changed."""
    for each in gc.get_objects():
        if issubclass(type(each), torch.optim.Optimizer):
            yield each, object.__getattribute__(each, "__dict__")


def owner_of(state_dict: Mapping[str, Any]) -> torch.optim.Optimizer | None:
    """The live optimizer whose own `state_dict()` gave this dict by numbers; None if it is unknown.

    The values of the dict's state are the very dicts that the optimizer has, so a copy of the dict
    never leads to it. A dict without state leads to none: its groups' values may be another's too.
    """
    given = state_dict["state"]
    if not any(isinstance(key, int) for key in given):
        return None
    found: dict[int, torch.optim.Optimizer] = {}  # by id of the state, which wrappers share
    for each, own in live_optimizers():
        groups, state = own.get("param_groups"), own.get("state")
        if not isinstance(groups, list) or not isinstance(state, dict):
            continue
        if _has_slots(groups, state, given):
            inner = type(each).state_dict is torch.optim.Optimizer.state_dict
            if id(state) not in found or inner:
                found[id(state)] = each
    return next(iter(found.values())) if len(found) == 1 else None


def _has_slots(groups: Any, state: Mapping[Any, Any], given: Mapping[Any, Any]) -> bool:
    parameters = [p for group in groups for p in group["params"]]
    numbered = dict(enumerate(parameters))  # a number may be a key of the optimizer's own, too
    return all(
        any(state.get(own) is slots for own in (numbered.get(key, key), key))
        for key, slots in given.items()
    )


# -- in a user's dict ---------------------------------------------------------------------------


def is_optimizer_dict(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("param_groups"), list)
        and isinstance(value.get("state"), dict)
    )


def bound(tree: Mapping[str, Any]) -> Any:
    """The binding of an optimizer's state dict; None if the dict remembers no optimizer."""
    return getattr(tree["param_groups"], "binding", None)


def optimizer_dicts(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any, Binding | None]]:
    """Optimizers' state dicts inside a nested dict: (path, the dict, its binding if it has one)."""
    if is_optimizer_dict(tree):
        yield path, tree, bound(tree)
        # a wrapper's dict may hold that of the optimizer inside
        tree = {k: v for k, v in tree.items() if k not in ("state", "param_groups")}
    for at, child in inside(tree, path):
        yield from optimizer_dicts(child, at)


def inside(tree: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """The containers directly in one, each with its path. A walk calls no function for each number
    of a list."""
    pairs: Any = tree.items() if isinstance(tree, dict) else ()
    if isinstance(tree, (list, tuple)):
        pairs = enumerate(tree)
    return [((*path, k), v) for k, v in pairs if isinstance(v, (dict, list, tuple))]


def stock_record(tree: Mapping[str, Any]) -> dict[str, Any] | None:
    """As `Binding.record`, for a state dict without an optimizer, if its keys are numbers."""
    members = {p for group in tree["param_groups"] for p in group.get("params", ())}
    if not members or not all(isinstance(p, int) for p in members):
        return None
    return {"form": "id", "ids": [[str(index)] for index in range(len(members))]}


def has_no_elements(parameter: torch.Tensor) -> bool:
    """Whether a parameter has no elements on this rank."""
    return (dtensor_parts(parameter)[0] if is_dtensor(parameter) else parameter).numel() == 0
