"""What rides on the tensors and dicts that we hand out.

A `Tag` on a tensor says which parameter it is, or whose state; so re-wrapping a state dict or
popping keys from it loses nothing. A dict that came from an optimizer remembers it, so that a load
can write hyperparameters through.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from smckpt.layout.entries import Path
from smckpt.layout.geometry import Geometry

__all__ = [
    "FullStateDict",
    "ModelStateDict",
    "OptimizerStateDict",
    "ParamGroups",
    "StatefulStateDict",
    "Tag",
    "plain_tag",
    "put_back",
    "renew_tag",
    "set_parts",
    "set_tag",
    "stand_in",
    "tag_of",
]

_ATTRIBUTE = "_smckpt_tag"
_PARTS = "_smckpt_parts"  # what an array was put together from


@dataclass(frozen=True, slots=True)
class Tag:
    """kind: LOCAL, SHARDED, FULL, or None on a live tensor. geometry: None where the tensor itself
    tells (DTensor) or has none (kept). fqns: the parameters it stands for. after: what follows the
    fqn in the path; the last 1 + len(after) components of the tensor's own path are replaced by
    (fqn, *after)."""

    kind: str | None
    fqns: tuple[str, ...]
    geometry: Geometry | None = None
    after: Path = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """As nothing: it speaks of this rank and life, and `torch.load` refuses foreign classes."""
        return (OrderedDict, ())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tag:
        return self


@functools.lru_cache(maxsize=1 << 16)
def plain_tag(kind: str, fqn: str) -> Tag:
    """The tag of a parameter whose tensor tells its geometry: the same object at every take, so
    that a selector sees at once that nothing changed."""
    return Tag(kind, (fqn,))


def set_tag(tensor: torch.Tensor, tag: Tag) -> None:
    setattr(tensor, _ATTRIBUTE, tag)


def stand_in(live: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of `live` in another dtype, which goes back to it when it was filled (`put_back`)."""
    made = live.to(dtype)
    setattr(made, _PARTS, [live])
    return made


def set_parts(tensor: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Say what the tensor was put together from."""
    setattr(tensor, _PARTS, parts)


def put_back(tensors: Iterable[torch.Tensor]) -> None:
    """After arrays were filled: those that were put together for it, into their parts."""
    for tensor in tensors:
        at = 0
        for part in getattr(tensor, _PARTS, ()):
            part.copy_(tensor.reshape(-1)[at : at + part.numel()].view(part.shape))
            at += part.numel()


def renew_tag(
    tensor: torch.Tensor, fqns: tuple[str, ...], geometry: Geometry | None, after: Path
) -> None:
    """Tag a live tensor, which mostly has that very tag from an earlier take: the same object then,
    so that a selector sees at once that nothing changed."""
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
    return tag if isinstance(tag, Tag) else None  # of what was pickled little is left


class _RememberingDict(dict):  # type: ignore[type-arg]
    """Copies as a plain dict; pickles as an `OrderedDict`, which `torch.load` takes for weights,
    where it refuses every other class that is not torch's, `dict` by its name included."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (OrderedDict, (), None, None, iter(self.items()))

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        import copy

        return copy.deepcopy(dict(self), memo)


class FullStateDict(_RememberingDict):
    """A model's full state, or the slots of an optimizer's; on the ranks that hold nothing of it an
    empty one, which is no value to save.

    put_through: puts what the dict holds into the model that it was gathered from, on all ranks
        together; None where that cannot be.
    """

    holds = True  # on this rank
    put_through: Callable[[Any], object] | None = None


class ModelStateDict(_RememberingDict):
    """A model's state with values in it that are no live tensors: its modules computed them.

    give_back: hands such values to the modules, as they stand in the dict that it is called with.
    """

    give_back: Callable[[Any], object]


class StatefulStateDict(_RememberingDict):
    """What an object gave in its place, for the time of a load: stored by itself, as the object
    was, and no value of what stands around it."""

    def __init__(self, given: dict[Any, Any]) -> None:
        super().__init__(given)
        self._given = given

    def returned(self) -> dict[Any, Any]:
        """What the object gave, with what is here now."""
        self._given.clear()
        self._given.update(self)
        return self._given


class OptimizerStateDict(_RememberingDict):
    """What a bound optimizer's `state_dict()` gives. put_through: as that of a `FullStateDict`."""

    binding: Any = None
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
