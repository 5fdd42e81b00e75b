"""How one name of a checkpoint differs from another checkpoint's, and the comparison of values."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from smckpt.checkpoint.reading.catalogue import Catalogue, under_names
from smckpt.layout.entries import dotted
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import elements

_LONGEST = 48  # characters of a value
_ABSENT = object()


@dataclass(frozen=True)
class Difference:
    """One name that differs.

    Args:
        what: "only A", "only B", "dtype", "shape", "bits", "value", or "ranks" (a rank that only
            one checkpoint has keeps something of its own).
        holder: the ranks that have it to themselves; "" if all share it.
        detail: both sides, as text.
        count, of: how many of the compared elements differ, where they were compared.
        first: the index of the first of them.
        largest: the largest absolute difference of two finite numbers; None where there is none.
        nonfinite: how many of them are NaN or infinite on one side at least.
    """

    name: str
    what: str
    holder: str = ""
    detail: str = ""
    count: int | None = None
    of: int | None = None
    first: Shape | None = None
    largest: float | None = None
    nonfinite: int = 0

    @property
    def text(self) -> str:
        """In one line, without the name."""
        if self.count is None:
            return self.detail or self.what
        text = f"{self.count} of {self.of} elements differ"
        if self.first:
            text += f", first {list(self.first)}"
        if self.largest is not None:
            text += f", by up to {self.largest:.6g}"
        return text + (f", {self.nonfinite} not finite" if self.nonfinite else "")

    def to_json(self) -> dict[str, Any]:
        record = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**record, "first": None if self.first is None else list(self.first)}


def leaves_of(catalogue: Catalogue, rank: int) -> dict[str, Any]:
    """The values of a rank that are not tensors, by name, in their stored form. Each number or text
    has a name of its own, however the save grouped them. An optimizer's parameters have their
    names, not numbers.

    Raises:
        As `Catalogue.objects`.
    """
    catalogue.objects(rank)  # raises if a value breaks the format
    found: dict[str, Any] = {}
    for leaf in catalogue.part(rank)["objects"].values():
        path, value = tuple(leaf["path"]), leaf["value"]
        for at, inside in under_names(catalogue.optimizers, path, value):
            found.update(_flat(dotted(at), inside))
    return found


def values_apart(catalogue: Catalogue) -> Iterator[str]:
    """The names of values that a rank has otherwise than the lowest rank that has them."""
    base: dict[str, Any] = {}
    known: set[str] = set()
    for rank in catalogue.object_ranks:
        leaves = leaves_of(catalogue, rank)
        for name in base.keys() & leaves.keys() - known:
            if value_difference(name, "", base, leaves) is not None:
                known.add(name)
                yield name
        base = {**leaves, **base}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of dicts and lists. A list of plain values is one leaf."""
    if isinstance(value, dict) and value and "~" not in value:
        for key, item in value.items():
            yield from _flat(f"{name}.{key}", item)
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        for index, item in enumerate(value):
            yield from _flat(f"{name}.{index}", item)
    else:
        yield name, value


def value_difference(
    name: str, holder: str, a: Mapping[str, Any], b: Mapping[str, Any]
) -> Difference | None:
    """How a value differs; None if it is equal. a, b: `leaves_of` a rank."""
    ours, theirs = a.get(name, _ABSENT), b.get(name, _ABSENT)
    if theirs is _ABSENT:
        return Difference(name, "only A", holder, f"only A has it: {_short(ours)}")
    if ours is _ABSENT:
        return Difference(name, "only B", holder, f"only B has it: {_short(theirs)}")
    if _same(ours, theirs):
        return None
    return _lists_apart(name, holder, ours, theirs) or Difference(
        name, "value", holder, f"{_short(ours)} and {_short(theirs)}"
    )


def _same(a: Any, b: Any) -> bool:
    """Whether value and type are equal: 1, 1.0 and true are three values."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _lists_apart(name: str, holder: str, a: Any, b: Any) -> Difference | None:
    """For two lists of one length, or two arrays of one shape: how many elements differ."""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        apart = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not _same(x, y)]
        detail = f"at {apart[0]}: {_short(a[apart[0]])} and {_short(b[apart[0]])}"
        return Difference(name, "value", holder, detail, len(apart), len(a), (apart[0],))
    if _tag(a) == _tag(b) == "ndarray" and a["v"][0] == b["v"][0] and a["v"][2] == b["v"][2]:
        import numpy as np

        raw = [base64.b64decode(side["v"][1]) for side in (a, b)]
        shape = tuple(a["v"][2])
        numel = int(np.prod(shape))
        if not numel or len(raw[0]) != len(raw[1]):
            return None
        ours, theirs = (elements(data, 1).reshape(numel, -1) for data in raw)
        unequal = np.flatnonzero((ours != theirs).any(axis=1))
        first = tuple(map(int, np.unravel_index(int(unequal[0]), shape)))
        return Difference(name, "value", holder, "", len(unequal), numel, first)
    return None


def _tag(value: Any) -> Any:
    return value.get("~") if isinstance(value, dict) else None


def _short(value: Any) -> str:
    """A text for a stored value. A tagged value is shown by its content."""
    if (tag := _tag(value)) is not None:
        if tag in ("int", "float", "path", "torch.dtype", "torch.device"):
            return str(value["v"])
        if tag in ("tuple", "set", "frozenset", "torch.Size"):
            value = value["v"]
        else:
            return str(tag)
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
