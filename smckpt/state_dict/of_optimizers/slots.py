"""The structure that a checkpoint has of an optimizer's state, and live state of that structure.

A parameter's *slots* are what an optimizer keeps for it: tensors, numbers, and containers of both.
A load makes the slots first, exactly as they were saved, and then fills their tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from smckpt.errors import StateError
from smckpt.layout.containers import (
    FACTS,
    dims_in,
    is_array,
    items_of,
    like,
    made,
    named_class,
)
from smckpt.layout.entries import Path, dotted
from smckpt.layout.geometry import MeshGeometry
from smckpt.layout.mesh import Mesh
from smckpt.state_dict.of_optimizers.bindings import Binding
from smckpt.state_dict.parts import is_made_as, made_of_parts, parts_of
from smckpt.state_dict.tags import tag_of
from smckpt.state_dict.tensors import (
    arranged,
    dtensor_parts,
    expanded_in,
    flagged,
    flags_of,
    is_dtensor,
    is_value,
    mesh_of,
    order_of,
    pending_in,
    zeros_on_mesh,
)

if TYPE_CHECKING:
    from smckpt.checkpoint.reading.loading_rank import LoadingRank


@dataclass(frozen=True)
class SavedSlot:
    """A tensor that was saved. shape: the global one. local: the shape of the array that this rank
    takes, if ranks saved arrays of their own; None if a mesh or a flat parameter divides the
    tensor. placements: as the mesh's dimensions divided it: the tensor's dimension, or None. array:
    it was one of NumPy. flags: as of `flags_of`. placed: "whole" if a mesh divided its parameter,
    but not the tensor; of FULL state, "@0,-1" if a mesh held it otherwise than its parameter: along
    which dimension each of the mesh's divided it, or -1. expanded: the dimensions along which all
    elements are one. mesh: what divided it. beside: as it divided tensors of the parameter's name
    outside of the optimizer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    local: tuple[int, ...] | None = None
    placements: tuple[int | None, ...] | None = None
    name: str = ""
    mine: bool = True
    order: tuple[int, ...] | None = None
    array: bool = False
    flags: str = ""
    expanded: tuple[int, ...] = ()
    placed: str = ""
    mesh: Mesh | None = None
    beside: frozenset[tuple[int | None, ...] | None] = frozenset()

    @property
    def flat(self) -> bool:
        """Whether a flat parameter divided it (FSDP1)."""
        return self.local is None and self.placements is None

    def is_apart(self, parameter: torch.Tensor) -> bool:
        """Whether its mesh, which has the parameter as it was saved, divided it otherwise. One that
        was not saved counts as divided."""
        _, mesh, placements, _ = dtensor_parts(parameter)
        live, here = tuple(getattr(each, "dim", None) for each in placements), mesh_of(mesh)
        if self.mesh is None or (here.shape, here.ranks) != (self.mesh.shape, self.mesh.ranks):
            return False
        known = live in self.beside or (not self.beside and {*(self.placements or ())} == {None})
        return known and live != self.placements

    def zeros(self, device: torch.device | None = None) -> torch.Tensor:
        """Of the shape that this rank takes, in the order of memory that was saved."""
        shape = self.shape if self.local is None else self.local
        like: Any = {"dtype": self.dtype, "device": device or "cpu"}
        if self.order is None and not self.expanded:
            return torch.zeros(shape, **like)
        return arranged(shape, self.order, self.expanded, **like)


class _Absent:
    """Stands for a value that was not saved."""


ABSENT = _Absent()

_Leaves = dict[Path, Any]


class SavedState:
    """What a checkpoint has of the optimizer at `path`.

    Args:
        values: key → (path, value) of what is no tensor, with the target's names for parameters.
        owned: the keys of those parts that have an owner for each key inside; none if an object
            that is no optimizer is there.
    """

    def __init__(
        self,
        me: LoadingRank,
        values: Mapping[str, tuple[Path, Any]],
        path: Path,
        owned: Sequence[str] = ("state", "param_groups"),
    ) -> None:
        self._owned = owned
        self._tensors: dict[Any, _Leaves] = {}
        self._values: dict[Any, _Leaves] = {}
        self._kinds: dict[Any, dict[Path, str]] = {}
        # whether the followed rank saved the optimizer, or another one did for all
        catalogue = me.catalogue
        self._own = dotted(path) in catalogue.optimizers_of(me.saved)
        self._numbered: set[Any] = set()
        self._keys: dict[str, Any] = {}  # of the state: those that are no text, by their text
        self.whole_groups: Any = ABSENT
        kinds = me.kinds or {}
        deep = len(path) + 1
        beside: dict[str, set[Any]] = {}
        for row in catalogue.rows:
            if isinstance(row.geometry, MeshGeometry) and row.path[: deep - 1] != path:
                for name in (row.key, row.geometry.fqn):
                    beside.setdefault(name, set()).add(_placements(row.geometry))
        names = (catalogue.optimizers.get(dotted(path)) or {}).get("names", ())
        for name, tensor in catalogue.logical.items():
            full = tensor.path
            if len(full) < deep or tuple(map(str, full[: deep - 1])) != tuple(map(str, path)):
                continue
            if not me.takes(name):
                continue
            part = str(full[deep - 1])
            rows = catalogue.pieces.by_name[name]
            row, fqn = next(((r, f) for r, f in rows if me.has(r)), rows[0])
            if row.geometry.per_rank and not me.has(row):
                row, fqn = next((r, f) for r, f in rows if me.source(name) in r.ranks)
            geometry = row.geometry
            local = tuple(geometry.local_shape(row.ranks[0])) if geometry.per_rank else None
            owner = str(full[deep]) if len(full) > deep else ""
            called = names[int(owner)] if owner.isdecimal() and int(owner) < len(names) else [fqn]
            flags, placed = _flags_in(kinds.get(row.path, "").partition(";")[2])
            leaf = SavedSlot(
                getattr(torch, row.dtype),
                tuple(geometry.shape_of(fqn)),
                local,
                _placements(geometry),
                name,
                me.has(row),
                dims_in(kinds.get(row.path), "order", "ndarray"),
                is_array(kinds.get(row.path)),
                flags,
                dims_in(kinds.get(row.path), "expanded") or (),
                placed,
                getattr(geometry, "mesh", None),
                frozenset().union(*(beside.get(one, ()) for one in called)),
            )
            stored = row.path  # its containers are recorded under this one
            inside = part in owned and len(full) > deep
            key, below = _key(part, full[deep] if inside else None), deep + inside
            if part == "state" and inside and isinstance(stored[deep], int):
                self._numbered.add(key)
            if part == "state" and inside and str(stored[deep]) == key[1]:
                (self._keys[key[1]],) = made(kinds.get(stored[:deep]), {stored[deep]: None})
            rest = stored[below:]
            self._tensors.setdefault(key, {})[rest] = leaf
            self._own |= leaf.mine
            for depth in range(len(rest)):
                kind = kinds.get(stored[: below + depth])
                if kind is not None:
                    self._kinds.setdefault(key, {})[rest[:depth]] = kind
        for full, value in values.values():
            if full[: deep - 1] != path or len(full) < deep:
                continue
            part = str(full[deep - 1])
            if part not in owned:
                key, rest = _key(part), full[deep:]
                self._values.setdefault(key, {})[rest] = value
                for depth in range(len(rest)):
                    if (kind := kinds.get(full[: deep + depth])) is not None:
                        self._kinds.setdefault(key, {})[rest[:depth]] = kind
            elif len(full) == deep and part == "param_groups":
                self.whole_groups = value
            elif len(full) == deep and part == "state" and isinstance(value, Mapping):
                for owner, slots in value.items():
                    self._keys[str(owner)] = owner
                    self._values.setdefault(_key(part, owner), {})[()] = slots
            elif len(full) > deep:
                if part == "state":
                    self._keys.setdefault(str(full[deep]), full[deep])
                self._values.setdefault(_key(part, full[deep]), {})[full[deep + 1 :]] = value
            else:
                self._values.setdefault(_key(part), {})[full[deep:]] = value

        for key, leaves in self._values.items() if not owned else ():
            # where this rank saved a value, the tensors of others are none of it
            others = self._tensors.get(key, {})
            for rest in [r for r, leaf in others.items() if not leaf.mine]:
                if any(rest[: len(at)] == at for at in leaves):
                    del others[rest]

    @property
    def has_groups(self) -> bool:
        return self.whole_groups is not ABSENT or any(
            part == "param_groups" for part, _ in (*self._tensors, *self._values)
        )

    def groups(self) -> list[Any] | None:
        """The groups; None if none were saved. Those that the followed rank saved in parts, for the
        tensors in them, come before those that another rank saved whole."""
        parts = [leaves for (part, _), leaves in self._tensors.items() if part == "param_groups"]
        own = any(leaf.mine for leaves in parts for leaf in leaves.values())
        if self.whole_groups is not ABSENT and not own:
            return [dict(group) for group in self.whole_groups]
        keys = {key for key in (*self._tensors, *self._values) if key[0] == "param_groups"}
        if not keys or not all(number.isdecimal() for _, number in keys):
            return None
        found = [self._of([key]) for key in sorted(keys, key=lambda key: int(key[1]))]
        return [dict(group) for group in found if isinstance(group, Mapping)]

    def owners(self) -> list[str]:
        """The keys of the state, as text."""
        keys = dict.fromkeys((*self._tensors, *self._values))
        return [owner for part, owner in keys if part == "state"]

    def key(self, owner: str) -> Any:
        """A key of the state as it was saved, such as a tuple."""
        return self._keys.get(owner, owner)

    def more(self) -> dict[str, Any]:
        """What was saved beside the state and the groups."""
        keys = dict.fromkeys((*self._tensors, *self._values))
        return {key[0]: self._of([key]) for key in keys if key[0] not in self._owned}

    def slots(self, names: Iterable[Any]) -> Any:
        """What was saved under the first of these keys that was, and under its other names;
        `ABSENT` if nothing was."""
        return self._of([("state", str(name)) for name in dict.fromkeys(map(str, names))])

    def mine(self, owner: str) -> bool:
        """Whether the saved rank that this rank follows had something under this key, or if another
        one saved the optimizer for all."""
        key = ("state", owner)
        return (
            not self._own
            or key in self._values
            or any(t.mine for t in self._tensors.get(key, {}).values())
        )

    def tensors(self, names: Iterable[Any]) -> list[SavedSlot]:
        keys = [("state", str(name)) for name in names]
        return [leaf for key in keys for leaf in self._tensors.get(key, {}).values()]

    def _of(self, keys: Sequence[tuple[str, str]]) -> Any:
        leaves: _Leaves = {}
        kinds: dict[Path, str] = {}
        for key in keys:
            tensors = self._tensors.get(key, {})
            own = {rest: leaf for rest, leaf in tensors.items() if leaf.mine}
            shared = {rest: leaf for rest, leaf in tensors.items() if leaf.local is None}
            # What ranks have of their own, they may have in other numbers or as numbers. The number
            # of a parameter is each rank's own, so another rank's state is not of this one.
            if own or (self._own and key in self._numbered and not shared):
                tensors = shared
            for found in (own, self._values.get(key, {}), tensors):
                for rest, leaf in found.items():
                    leaves.setdefault(rest, leaf)
            kinds |= self._kinds.get(key, {})
        if not leaves:
            return ABSENT
        return _nested(leaves, kinds)


def _key(part: str, owner: Any = None) -> tuple[str, str]:
    return part, "" if owner is None else str(owner)


def _flags_in(text: str) -> tuple[str, str]:
    """What a tensor was to autograd, and how ranks held it."""
    found = re.fullmatch(r"(.*?)(whole|@-?\d+(?:,-?\d+)*)?", text)
    return (found[1], found[2] or "") if found else ("", "")


def _placements(geometry: Any) -> tuple[int | None, ...] | None:
    found = getattr(geometry, "placements", None)
    if found is None:
        return None
    return tuple(getattr(each, "dim", None) if each.kind != "replicate" else None for each in found)


def _nested(leaves: _Leaves, kinds: Mapping[Path, str], at: Path = ()) -> Any:
    if at in leaves and (isinstance(leaves[at], SavedSlot) or len(leaves) == 1):
        return leaves[at]
    depth = len(at)
    keys = dict.fromkeys(path[depth] for path in leaves if path[:depth] == at and len(path) > depth)
    if not keys:
        return leaves[at]
    items = {key: _nested(leaves, kinds, (*at, key)) for key in keys}
    if at in leaves and isinstance(leaves[at], Mapping):  # saved whole by a rank without tensors
        items = {**leaves[at], **items}
    return made(kinds.get(at), items)


# -- live state of that structure ----------------------------------------------------------------

# a tensor for one that was saved, or for the parts of one that holds others
Room = Callable[[Any, Any, Path], torch.Tensor]
_PLAIN = (int, float, str, bool, type(None))


def aligned(saved: Any, live: Any, make: Room, *, keep: bool = False, at: Path = ()) -> Any:
    """The saved structure, with the saved values, and with live tensors where they fit. It is
    `live` itself if nothing differs.

    Args:
        make: the tensor for a saved one, given the live value and its path in the slots.
        keep: keep what is live only, at the top.
    """
    if isinstance(saved, SavedSlot):
        if saved.array:
            return saved.zeros().numpy()
        tensor = make(saved, live, at)
        fits = tensor is live and saved.flags in ("", flags_of(live))
        return live if fits else flagged(tensor, saved.flags)
    if isinstance(saved, Mapping):
        if FACTS in saved:
            return make(saved, live, at)
        data = named_class(live) == "data"
        mine = live if isinstance(live, Mapping) else dict(items_of(live) or ()) if data else {}
        items = {
            key: aligned(value, mine.get(key), make, at=(*at, key)) for key, value in saved.items()
        }
        items = {key: value for key, value in items.items() if value is not ABSENT}
        if keep:
            items = {**mine, **items}
        if mine.keys() != items.keys() or not (data or isinstance(live, Mapping)):
            return like(saved, items)
        if all(items[key] is mine[key] for key in items):
            return live
        return like(live if data else saved, items)
    if (pairs := items_of(saved)) is not None:
        mine = dict(items_of(live) or ())
        fits = mine.keys() == {key for key, _ in pairs}
        items = {
            key: aligned(value, mine.get(key) if fits else None, make, at=(*at, key))
            for key, value in pairs
        }
        if not fits or not isinstance(live, type(saved)):
            return like(saved, items)
        return live if all(items[key] is mine[key] for key in items) else like(live, items)
    if type(live) is type(saved) and type(saved) in _PLAIN and live == saved:
        return live
    return saved


def described(value: Any, *, flat: bool = False, cut: bool = False) -> Any:
    """A state dict's value with a `SavedSlot` for each tensor, in the form that a checkpoint has.

    Args:
        flat: its parameter is flat, so a tensor may be the part of a flat one. cut: a mesh cuts it.
    """
    if isinstance(value, torch.Tensor):
        if is_value(value):
            return value
        if pending_in(value) and (parts := parts_of(value, ())):
            return {**{name: described(part) for name, part in parts[0].items()}, FACTS: parts[1]}
        tag = tag_of(value)
        part = flat and value.dim() > 0 and (tag is None or tag.geometry is not None)
        local = None if part or is_dtensor(value) else tuple(value.shape)
        placed = "whole" * (cut and local is not None)
        order, flags = order_of(value), flags_of(value)
        shape = tuple(value.shape)
        return SavedSlot(value.dtype, shape, local, order=order, flags=flags, placed=placed)
    if (pairs := items_of(value)) is None:
        return value
    items = {key: described(child, flat=flat, cut=cut) for key, child in pairs}
    return items if isinstance(value, Mapping) else like(value, items)


def room(
    binding: Binding | None,
    parameter: torch.Tensor | None,
    group: Mapping[str, Any],
    among: Sequence[torch.Tensor] = (),
) -> Room:
    """Makes tensors for the slots of a parameter, or, without one, for what belongs to none.

    A tensor is divided like its parameter if it has the parameter's shape. Any other has the saved
    shape. What belongs to no parameter is divided on the mesh of one `among` the optimizer's. torch
    keeps a `step` on the CPU unless the optimizer is fused or capturable, and all else on the
    parameter's device.
    """
    shapes: set[tuple[int, ...]] = set()
    if parameter is not None:
        shapes.add(tuple(parameter.shape))
        if binding is not None:
            shapes |= set(binding.shapes(parameter))
    flat = binding is not None and parameter is not None and binding.flat(parameter)

    def make(saved: Any, live: Any, at: Path) -> torch.Tensor:
        if not isinstance(saved, SavedSlot):
            if isinstance(live, torch.Tensor) and is_made_as(live, saved[FACTS]):
                return live
            on = parameter if parameter is not None else next(filter(is_dtensor, among), None)
            device = None if on is None else _device(on)

            def part(inner: Any) -> Any:
                return inner.zeros(device) if isinstance(inner, SavedSlot) else inner

            return made_of_parts(saved, part, on, dotted(at))
        like = bool(saved.shape) and (saved.shape in shapes or (flat and saved.local is None))
        like &= not (parameter is not None and is_dtensor(parameter) and saved.placed == "whole")
        mesh = parameter if parameter is not None and is_dtensor(parameter) else None
        if mesh is not None and saved.local is None and saved.placed[:1] == "@":
            # FULL state: so that the next step finds it as it was
            return zeros_on_mesh(mesh, saved.shape, saved.dtype, saved.placements)
        if isinstance(live, torch.Tensor) and not expanded_in(live) and not pending_in(live):
            shape = tuple(live.shape)
            if parameter is not None and flat and like:
                fits = shape == tuple(parameter.shape)
            else:
                fits = shape in (saved.shape, saved.local)
            if saved.order is not None and not flat and not is_dtensor(live):
                if fits and live.dtype == saved.dtype and order_of(live) == saved.order:
                    return live
                return saved.zeros(live.device)
            if fits and live.dtype == saved.dtype:
                return live
            if fits:
                return torch.zeros_like(live.detach(), dtype=saved.dtype)
        if parameter is None:
            if (
                saved.local is None
                and saved.placements is not None
                and any(dim is not None for dim in saved.placements)
            ):
                return _on_mesh_of(among, saved)
            return saved.zeros()
        if saved.order is not None and not flat and not is_dtensor(parameter):
            return saved.zeros(_device(parameter))
        if like and mesh is not None and saved.is_apart(mesh):
            return zeros_on_mesh(parameter, saved.shape, saved.dtype, saved.placements)
        if like:
            return torch.zeros_like(parameter.detach(), dtype=saved.dtype)
        on_cpu = at[-1:] == ("step",) and not (group.get("fused") or group.get("capturable"))
        device = torch.device("cpu") if on_cpu else _device(parameter)
        if saved.local is not None or (not saved.shape and saved.placements is None):
            return saved.zeros(device)
        if is_dtensor(parameter):
            return zeros_on_mesh(parameter, saved.shape, saved.dtype, saved.placements)
        if saved.placements is not None:  # whole here, where no mesh divides the parameter
            return saved.zeros(device)
        raise _no_room(saved)

    return make


def _on_mesh_of(among: Sequence[torch.Tensor], saved: SavedSlot) -> torch.Tensor:
    """A tensor on the mesh of one of these parameters, preferably of one of its shape.

    Raises:
        StateError: none has such a mesh.
    """
    for parameter in sorted(among, key=lambda p: tuple(p.shape) != saved.shape):
        if is_dtensor(parameter) and dtensor_parts(parameter)[1].ndim == len(
            saved.placements or ()
        ):
            return zeros_on_mesh(parameter, saved.shape, saved.dtype, saved.placements)
    raise _no_room(saved)


def _device(parameter: torch.Tensor) -> torch.device:
    return dtensor_parts(parameter)[0].device if is_dtensor(parameter) else parameter.device


def _no_room(saved: SavedSlot) -> StateError:
    return StateError(
        f"the target has no {saved.name!r} yet, which has the shape {list(saved.shape)} in the "
        "checkpoint, and nothing here tells how ranks divide it",
        remedy="load it with the wrapper and the kind that it was saved with, or take one step "
        "before the load, so that it is made",
    )
