"""Marks on the tensors and dicts that `state_dict()` returns.

A `Tag` on a tensor names the parameter that it is or whose state it is. So a user may rebuild a
state dict or drop keys from it. A dict from an optimizer remembers it, so that a load can write
hyperparameters to it.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from smckpt.layout.entries import Entry, Path
from smckpt.layout.geometry import Geometry
from smckpt.state_dict.tensors import (
    cuts_itself,
    dtensor_parts,
    fill,
    is_dtensor,
    shards_of,
    unwrapped,
)

_ATTRIBUTE = "_smckpt_tag"
_MODEL = "_smckpt_model"
_PARTS = "_smckpt_parts"  # the tensors that an array was joined from


@dataclass(frozen=True, slots=True)
class Tag:
    """kind: LOCAL, SHARDED, FULL, or None on a live tensor. geometry: None if the tensor itself has
    it (DTensor), or is per-rank. fqns: the parameters that it represents. after: the components
    after the fqn in the path; (fqn, *after) replaces the last 1 + len(after) components of the
    tensor's own path. parameter: it is a plain parameter, and not a buffer."""

    kind: str | None
    fqns: tuple[str, ...]
    geometry: Geometry | None = None
    after: Path = ()
    parameter: bool = False

    def named(self, name: Callable[[str], str]) -> Tag:
        """The same tag of parameters with other names."""
        geometry = None if self.geometry is None else self.geometry.named(name)
        return replace(self, fqns=tuple(map(name, self.fqns)), geometry=geometry)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as an empty dict: a tag is valid in this process only; `torch.load` refuses it."""
        return (OrderedDict, ())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tag:
        return self

    def after_in(self, path: Path) -> Path:
        """What follows the parameter in the path. A class's own state_dict may nest what it keeps
        for a parameter in another manner, and keys may be no text."""
        first = len(path) - len(self.after)
        if path[first:] == self.after and self._owns(path[first - 1]):
            return self.after
        for depth in range(len(path) - 1, 1, -1):
            if path[depth - 2] == "state" and self._owns(path[depth - 1]):
                return path[depth:]
        return self.after

    def _owns(self, key: Any) -> bool:
        return key in self.fqns or type(key) is int


@functools.lru_cache(maxsize=1 << 16)
def plain_tag(kind: str, fqn: str, parameter: bool) -> Tag:
    """The tag of a model's tensor that has its own geometry. It is the same object at every take,
    so a selector detects an unchanged state at once."""
    return Tag(kind, (fqn,), parameter=parameter)


def set_tag(tensor: torch.Tensor, tag: Tag) -> None:
    setattr(tensor, _ATTRIBUTE, tag)


def clear_tag(tensor: torch.Tensor) -> None:
    """Forget what an earlier take found."""
    vars(tensor).pop(_ATTRIBUTE, None)


def stand_in(live: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of `live` in another dtype. `put_back` copies it to `live` after a load filled it."""
    made = live.to(dtype)
    setattr(made, _PARTS, [live])
    return made


def set_parts(tensor: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Record the tensors that this one was joined from."""
    setattr(tensor, _PARTS, parts)


def set_model(tensor: torch.Tensor, model: nn.Module) -> None:
    """Record the model that a tensor of the meta device was taken from. A load gives memory to the
    model's own tensor."""
    setattr(tensor, _MODEL, _Owner(model))


def model_of(tensor: torch.Tensor) -> nn.Module | None:
    owner = getattr(tensor, _MODEL, None)
    return owner.model if isinstance(owner, _Owner) else None


@dataclass(frozen=True)
class _Owner:
    model: nn.Module

    def __reduce__(self) -> tuple[Any, ...]:
        """As a `Tag`: a copy of the tensor does not hold the model."""
        return (OrderedDict, ())

    def __deepcopy__(self, memo: dict[int, Any]) -> _Owner:
        return self


def put_back(tensors: Iterable[torch.Tensor]) -> None:
    """After a load: copy joined arrays into their parts."""
    for tensor in tensors:
        at = 0
        for part in getattr(tensor, _PARTS, ()):
            fill(part, tensor.reshape(-1)[at : at + part.numel()].view(part.shape))
            at += part.numel()


def is_stateful(value: Any) -> bool:
    """Whether this is DCP's Stateful: an object, not a class, with both methods of a state dict."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def renew_tag(
    tensor: torch.Tensor, fqns: tuple[str, ...], geometry: Geometry | None, after: Path
) -> None:
    """Tag a live tensor. If it has an equal tag from an earlier take, that object stays, so a
    selector detects an unchanged state at once."""
    tag = tag_of(tensor)
    if (
        tag is None
        or tag.kind is not None
        or tag.geometry is not geometry
        or tag.fqns != fqns
        or tag.after != after
    ):
        set_tag(tensor, Tag(None, fqns, geometry, after))


def tag_of(tensor: torch.Tensor) -> Tag | None:
    tag = getattr(tensor, _ATTRIBUTE, None)
    return tag if isinstance(tag, Tag) else None  # after pickling, little of it is left


class RememberingDict(dict):  # type: ignore[type-arg]
    """Copies as a plain dict and pickles as an `OrderedDict`: `torch.load` with weights_only
    refuses other classes, even `dict` by name.

    names: of an optimizer object that gave the dict for a load, the names of its parameters.
    reads: the keys whose values the object that gave the dict reads by code of its own. A load
        gives it exactly what was saved under them, in whatever structure and sizes.
    holds: of a container in a load, the keys under which it holds what objects gave. A save stored
        each of them by itself.
    """

    names: Sequence[Sequence[str]] = ()
    reads: Callable[[Any], bool] | None = None
    holds: Sequence[Any] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return (OrderedDict, (), None, None, iter(self.items()))

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        import copy

        return copy.deepcopy(dict(self), memo)

    def like(self, items: dict[Any, Any]) -> RememberingDict:
        """A dict with other items that remembers the same optimizer."""
        made = type(self)(items)
        made.__dict__.update(self.__dict__)
        return made


class RememberingList(list):  # type: ignore[type-arg]
    """A list in a load. holds: as in `RememberingDict`."""

    holds: Sequence[Any] = ()


class FullStateDict(RememberingDict):
    """A model's full state, or the state tensors of an optimizer's full state. On ranks that hold
    nothing of it, it is empty, and a save skips it.

    put_through: puts the dict's values into the model that it was gathered from, on all ranks
        together; None if that is not possible.
    """

    put_through: Callable[[Any], object] | None = None


class ModelStateDict(RememberingDict):
    """A model's state in which some values are not live (its modules computed them, or they are
    copies), or of a model with hooks that follow a load.

    give_back: gives those values of a dict to the modules, and calls the hooks, on this rank alone.
        put_through: as in `FullStateDict`.
    """

    give_back: Callable[[Any], object] | None = None
    put_through: Callable[[Any], object] | None = None


class StatefulStateDict(RememberingDict):
    """An object's state dict, in the object's place during a load. A save stored it by itself, not
    as part of the value around it.

    groups: those of the optimizer whose state it is, if it is one's. of_optimizer: an optimizer
    gave it, so a load gives it exactly the keys that were saved. form: the class of the dict that
    an object gave, if it is no module.
    """

    form: type | None = None

    of_optimizer = False
    groups: Sequence[Mapping[str, Any]] = ()

    def owner_of(self, key: Any) -> tuple[torch.Tensor | None, Mapping[str, Any]]:
        """The parameter that has this number, and its group."""
        members = [(p, group) for group in self.groups for p in group["params"]]
        return members[key] if isinstance(key, int) and key < len(members) else (None, {})


class OptimizerStateDict(RememberingDict):
    """The state dict of a bound optimizer. put_through: as in `FullStateDict`."""

    put_through: Callable[[Any], object] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        plain = {k: list(v) if isinstance(v, ParamGroups) else v for k, v in self.items()}
        return (OrderedDict, (), None, None, iter(plain.items()))


class ParamGroups(list):  # type: ignore[type-arg]
    """The "param_groups" of a bound optimizer; copies as a plain list, and pickles as one."""

    binding: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (list, (list(self),))

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        import copy

        return copy.deepcopy(list(self), memo)


def local_of(tensor: Any, path: Path, rank: int) -> tuple[torch.Tensor, Any]:
    """The local array, and the values to compare to see whether the placement is unchanged."""
    if cuts_itself(tensor):
        shape, shards = shards_of(tensor, path, rank)
        placed = shape, [box for box, _ in shards]
        if len(shards) == 1:
            return shards[0][1], placed
        parts = [part for _, part in shards]
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
        local = torch.cat([part.reshape(-1) for part in parts]) if parts else empty
        set_parts(local, parts)
        return local, placed
    if is_dtensor(tensor):
        local, mesh, placements, shape = dtensor_parts(tensor)
        return unwrapped(local), (mesh, placements, shape)
    return unwrapped(tensor.detach() if tensor.requires_grad else tensor), None


def is_parameter(entry: Entry, tag: Tag | None) -> bool:
    """Whether it is known to be a parameter: a shard or replica that is not an optimizer's state;
    or a plain tensor that is tagged so."""
    if entry.geometry.per_rank:
        return tag is not None and tag.parameter
    return tag is None or not tag.after


def is_stepped(entry: Entry, tag: Tag | None, states: Set[Path]) -> bool:
    """Whether it is an optimizer's state, or a parameter. In a block the tag of a DTensor tells a
    parameter from a buffer, which a forward may change."""
    path = entry.path
    if any(path[:depth] in states for depth in range(1, len(path))):
        return True
    if tag is not None and tag.geometry is None:
        return tag.parameter
    return is_parameter(entry, tag)
