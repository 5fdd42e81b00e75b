"""From a nested state dict to entries, in one walk, which is fast where nothing has changed."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import ParameterDict, ParameterList

from smckpt.errors import StateError
from smckpt.layout.containers import (
    FACTS,
    class_of_name,
    container_kind,
    in_sequence,
    is_made,
    items_of,
    kind_with,
    object_kind,
    of_object,
    text_of_key,
)
from smckpt.layout.entries import Entry, ObjectLeaf, Path, dotted
from smckpt.layout.geometry import BoxGeometry, Geometry, MeshGeometry, PerRankGeometry
from smckpt.layout.mesh import Mesh
from smckpt.state_dict import parts
from smckpt.state_dict.model_views import names_in_state
from smckpt.state_dict.modes import neutral
from smckpt.state_dict.of_optimizers.bindings import (
    Binding,
    bound,
    is_optimizer_dict,
    optimizer_dicts,
    placed_in,
    stock_record,
)
from smckpt.state_dict.of_optimizers.groups import names_of, names_record
from smckpt.state_dict.of_optimizers.own_methods import is_optimizer, swaps_parameters
from smckpt.state_dict.tags import (
    FullStateDict,
    ParamGroups,
    RememberingDict,
    StatefulStateDict,
    Tag,
    is_parameter,
    is_stateful,
    is_stepped,
    local_of,
    tag_of,
)
from smckpt.state_dict.tensors import (
    PLAIN,
    cuts_itself,
    dtensor_parts,
    dtype_name,
    expanded_in,
    first_overlap,
    flags_of,
    flattened,
    from_numpy,
    is_dtensor,
    is_of_own_class,
    is_sharded_tensor,
    is_transformed,
    is_value,
    mesh_of,
    of_parameters,
    order_of,
    placement_of,
    refuse_kind,
    shards_of,
    unsupported,
)

_SCALARS = frozenset((int, float, str, bool, bytes, type(None)))


@dataclass(frozen=True)
class Selection:
    """A rank's state as entries and objects. `tensors[i]` is the live local array of `entries[i]`.

    containers: path → kind, for containers above tensors that are not plain dicts. parameters: the
    keys of the entries that are known to be parameters of a model. stepped: the keys of those that
    only a step of an optimizer changes, as far as is known: parameters and optimizers' state.
    swapped_by: the class of an optimizer that changes parameters also outside a step; "" if none is
    known. gathered: whether part of it is state that collectives gathered (FULL; torch's own), on
    this rank or another. unmade: what a load could not make; see `not_made`. bare: the plain
    tensors whose attributes are not saved, with these. tied: two tensors that a load may have to
    make and that share memory.
    """

    kind: str | None
    entries: tuple[Entry, ...]
    tensors: tuple[torch.Tensor, ...]
    objects: tuple[ObjectLeaf, ...]
    optimizers: dict[str, Any]
    containers: dict[Path, str]
    parameters: frozenset[str]
    stepped: frozenset[str]
    swapped_by: str = ""
    gathered: bool = False
    unmade: tuple[tuple[str, str, str], ...] = ()
    bare: tuple[str, ...] = ()
    tied: tuple[str, str] | None = None


@dataclass
class _Walk:
    tensors: list[tuple[Path, torch.Tensor]] = field(default_factory=list)
    objects: list[ObjectLeaf] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    containers: dict[Path, str] = field(default_factory=dict)
    # objects that are not asked yet, and whether they are inside what another one gave
    stateful: list[tuple[Path, Any, bool]] = field(default_factory=list)
    inside: str = ""  # what gave the part that is walked: "object", "module", "optimizer"
    owners: list[tuple[Path, Binding | None]] = field(default_factory=list)  # of optimizers
    gathered: bool = False
    fresh: bool = False  # in what an optimizer keeps
    made: set[Path] = field(default_factory=set)  # tensors that a load may have to make
    unmade: list[tuple[str, str, str]] = field(default_factory=list)
    bare: list[str] = field(default_factory=list)
    optimizers: dict[str, Any] = field(default_factory=dict)  # as in a `Selection`
    numbered: list[Path] = field(default_factory=list)  # optimizers' states from outside a block

    def tag_at(self, path: Path, tensor: torch.Tensor) -> Tag | None:
        """Its tag. A dict from outside a block holds live tensors, which an earlier block tagged:
        numbers are the names there."""
        tag = tag_of(tensor)
        numbered = tag is not None and any(path[: len(at)] == at for at in self.numbered)
        return None if numbered else tag


class Selector:
    """Selects the states of one rank. It remembers the last one: an unchanged state costs one
    comparison a tensor and gives the same `entries` object."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._known: dict[Path, tuple[Any, Entry | None]] = {}
        self._meshes: dict[Any, Mesh] = {}
        self._rules: dict[Any, MeshGeometry] = {}
        self._last: tuple[Entry, ...] = ()
        self._parameters: frozenset[str] = frozenset()  # of `_last`
        self._stepped: frozenset[str] = frozenset()
        self._tied: tuple[str, str] | None = None

    def select(self, state_dict: Mapping[str, Any] | None) -> Selection:
        """Walk the state.

        Raises:
            StateError: the state is None, has a tensor that cannot be saved, or has a key that is
                neither text nor a whole number.
        """
        if state_dict is None:
            raise StateError(
                "there is nothing to save on this rank: the state dict is None",
                remedy="give every rank of process_group its state ({} where it has none), or "
                "leave it out of the group",
                rank=self._rank,
            )
        walk = _Walk()
        try:
            self._visit(state_dict, (), walk)
            # In the order of their keys on all ranks: an object's state_dict may run a collective.
            modules = [(at, v) for at, v, _ in walk.stateful if isinstance(v, torch.nn.Module)]
            known: dict[int, tuple[str, str]] | None = None
            while walk.stateful:
                found, walk.stateful = sorted(walk.stateful, key=lambda at: dotted(at[0])), []
                for path, value, nested in found:
                    given = value.state_dict()
                    walk.inside = "module" if isinstance(value, torch.nn.Module) else "object"
                    walk.inside = "optimizer" if is_optimizer(value) else walk.inside
                    if is_stateful(given) and of_parameters(given) is None:
                        walk.unmade.append((dotted(path), *parts.of_own_class(type(given))))
                    self._visit(given, path, walk)
                    if nested:  # no load could make it, so it says what it was
                        inner = walk.containers.get(path)
                        walk.containers[path] = object_kind(type(value), inner)
                    for at, tree, binding in optimizer_dicts(given, path):
                        if binding is None and (record := stock_record(tree)) is not None:
                            walk.optimizers[dotted(at)] = record
                    if is_optimizer(value):
                        walk.owners.append((path, Binding(value, "LOCAL", {})))
                        known = names_in_state(modules) if known is None else known
                        if names := names_of(value, known):
                            walk.optimizers[dotted(path)] = names_record(names)
        except RecursionError as error:
            raise StateError(
                "the state dict is nested without end: a dict or list in it holds itself",
                remedy="remove the reference to its own dict or list",
                rank=self._rank,
            ) from error
        self._refuse_keys(walk.objects)
        with neutral():
            return self._selected(state_dict, walk)

    def _selected(self, state_dict: Mapping[str, Any], walk: _Walk) -> Selection:
        kinds, entries, tensors, tags = walk.kinds, [], [], []
        for path, tensor in walk.tensors:
            tag = walk.tag_at(path, tensor)
            if tag is not None and tag.kind is not None:
                kinds.add(tag.kind)
            try:
                entry, local = self._entry(path, tensor, tag)
            except (RuntimeError, ValueError) as error:  # of a tensor without shape or memory
                why = f"has no shape ({error})"
                if is_transformed(tensor):
                    why = "is a value inside a transform of torch.func"
                raise unsupported(dotted(path), why, self._rank) from error
            if entry is None:
                continue
            if tag is None or tag.after:  # stock state of a model has no attributes either
                made = path in walk.made
                parts.note_attributes(tensor, path, walk.unmade, walk.bare, made)
            entries.append(entry)
            strided = not local.is_contiguous() and (tag is None or tag.after)
            given_by, array = of_object(walk.containers.get(path))
            if strided and (order := order_of(tensor)) is not None:
                walk.containers[path] = given_by + kind_with(array or "order", order)
            elif not array and entry.geometry.per_rank and (dims := expanded_in(local)):
                walk.containers[path] = given_by + kind_with("expanded", dims)
            tensors.append(local)
            tags.append(tag)
        optimizers = walk.optimizers
        for path, tree, binding in optimizer_dicts(state_dict):
            record = stock_record(tree) if binding is None else binding.record(tree["state"])
            if record is not None:
                optimizers[dotted(path)] = record
            if binding is not None and binding.held:
                kinds.add(binding.kind)
            walk.owners.append((path, binding))
        states = {(*path, "state"): placed_in(binding) for path, binding in walk.owners}
        depths = sorted({len(path) for path in states})
        for path, tensor in walk.tensors:  # a load may have to make it
            # A block's own tensors, unless an optimizer keeps them, are their model's.
            flags = flags_of(tensor) if walk.tag_at(path, tensor) is None else ""
            for depth in depths:
                if len(path) <= depth:
                    break
                if (placed := states.get(path[:depth])) is None:
                    continue
                flags = flags_of(tensor) + placed(path[depth:], tensor)
                break
            if flags:
                walk.containers[path] = f"{walk.containers.get(path, '')};{flags}"
        if len(entries) != len(self._last) or any(
            a is not b for a, b in zip(entries, self._last, strict=True)
        ):
            self._last = tuple(entries)
            pairs = list(zip(entries, tags, strict=True))
            cut = {e.path for e, tag in pairs if tag is not None and tag.geometry is not None}
            found = zip(entries, tensors, strict=True)
            self._tied = first_overlap((e.key, t) for e, t in found if e.path in walk.made - cut)
            self._parameters = frozenset(e.key for e, tag in pairs if is_parameter(e, tag))
            self._stepped = frozenset(e.key for e, tag in pairs if is_stepped(e, tag, {*states}))
        kind = "LOCAL" if "LOCAL" in kinds else min(kinds, default=None)
        owned = [e.optimizer for _, e in walk.owners if e]
        swapped_by = next((type(o).__name__ for o in owned if swaps_parameters(o)), "")
        return Selection(
            kind,
            self._last,
            tuple(tensors),
            tuple(walk.objects),
            optimizers,
            walk.containers,
            self._parameters,
            self._stepped,
            swapped_by,
            walk.gathered or "FULL" in kinds,
            tuple(walk.unmade),
            tuple(walk.bare),
            self._tied,
        )

    # -- the walk ----------------------------------------------------------------------------

    def _visit(self, value: Any, path: Path, walk: _Walk) -> bool:
        """Collect the entries below. Returns whether they must be stored apart: below is a tensor,
        a Stateful, or an optimizer's state dict, whose groups the live optimizer gets."""
        if type(value) is dict:  # the common case, without the slow check of abstract classes
            return self._children(value, value.items(), path, walk)
        if isinstance(value, torch.Tensor):
            if is_value(value):
                walk.objects.append(ObjectLeaf(path, value))
                return False
            whole = type(value) in PLAIN or cuts_itself(value)
            if whole or (held := self._parts(value, path)) is None:
                walk.tensors.append((path, value))
                if walk.inside == "object" or walk.fresh:
                    walk.made.add(path)
                if walk.inside == "object" and is_of_own_class(value):
                    walk.unmade.append((dotted(path), *parts.of_own_class(type(value))))
                return True
            inner, facts = held
            for name, part in inner.items():
                self._visit(part, (*path, name), walk)
            if walk.fresh and (why := parts.not_made(facts)) is not None:
                walk.unmade.append((dotted(path), *why))
            walk.objects.append(ObjectLeaf((*path, FACTS), facts))
            return True
        if walk.inside == "object" and (listed := of_parameters(value)) is not None:
            self._children(listed, listed.items(), path, walk)
            walk.containers[path] = object_kind(type(value))
            return True
        if walk.inside == "object" and type(value) in (ParameterList, ParameterDict):
            what = f"{type(value).__name__} with more than parameters (a value, a buffer)"
            walk.unmade.append((dotted(path), what, "put a plain list or dict into the state"))
        if is_stateful(value):  # a dict or list of objects, too, if it has both methods
            walk.stateful.append((path, value, walk.inside == "object"))
            return True
        if isinstance(value, RememberingDict) and getattr(value, "put_through", None) is not None:
            walk.gathered = True
        if isinstance(value, FullStateDict):
            walk.kinds.add("FULL")
            return not value or self._children(value, value.items(), path, walk)
        if isinstance(value, Mapping):
            found = self._children(value, value.items(), path, walk)
            return found or isinstance(value, StatefulStateDict)
        if isinstance(value, (list, tuple)):
            return self._children(value, enumerate(value), path, walk)
        if type(value).__module__ == "numpy" and type(value).__name__ == "ndarray":
            with neutral():
                shared = from_numpy(value, path, self._rank)
            if shared is not None:
                walk.tensors.append((path, shared))
                walk.containers[path] = "ndarray"
                return True
        if is_sharded_tensor(value):
            walk.tensors.append((path, value))
            return True
        if type(value) not in _SCALARS and (items := items_of(value)) is not None:
            return self._children(value, items, path, walk)
        walk.objects.append(ObjectLeaf(path, value))
        return False

    def _children(self, value: Any, items: Any, path: Path, walk: _Walk) -> bool:
        mark, found = len(walk.objects), bool(getattr(value, "holds", ()))
        had_value = mixed = False  # a value stands before a tensor
        odd: list[Any] = []  # keys that no path can hold
        of_optimizer = is_optimizer_dict(value)
        in_block = of_optimizer and getattr(bound(value), "held", None)
        if of_optimizer and not in_block and any(isinstance(key, int) for key in value["state"]):
            walk.numbered.append((*path, "state"))
        for key, child in items:
            if of_optimizer:
                walk.fresh = True
            elif type(child) is ParamGroups and getattr(child.binding, "asker", None) is not None:
                asker = child.binding.asker
                raise StateError(
                    f"{dotted(path)} has the groups of the optimizer inside {type(asker).__name__}"
                    ", but not its state beside them, so that no load could give both back",
                    remedy="put the optimizer itself into the state, outside of the block",
                    rank=self._rank,
                )
            if type(key) not in (str, int):
                odd.append(key)
                key = repr(key)
            tensors = len(walk.tensors)
            below = self._visit(child, (*path, key), walk)
            mixed |= had_value and below
            had_value |= len(walk.tensors) == tensors  # an object is asked later
            found |= below
        if of_optimizer:
            walk.fresh = False
        # An optimizer's dict is never one value, even without state (plain SGD): a load writes to
        # the live groups.
        found = found or of_optimizer
        if odd and (found or not path):
            self._refuse_odd(value, odd[0], path)
        if not found and path:
            walk.objects[mark:] = [ObjectLeaf(path, value)]
            return found
        kind = container_kind(value) if type(value) is not dict or odd else None
        form, _, name = (kind or "").partition(":")
        if form == "named":
            if (walk.fresh or walk.inside == "object") and class_of_name(name) is None:
                walk.unmade.append((dotted(path), *parts.unregistered(type(value))))
        elif walk.inside == "object" and not is_made(value):
            walk.unmade.append((dotted(path), *parts.of_own_class(type(value))))
        mixed &= walk.inside != "module" and not isinstance(value, RememberingDict)
        if mixed and path and isinstance(value, Mapping):
            kind = in_sequence([k if type(k) in (str, int) else repr(k) for k in value], kind)
        if kind is not None:
            walk.containers[path] = kind
        return found

    def _refuse_odd(self, value: Any, odd: Any, path: Path) -> None:
        """Refuse keys of a dict with tensors below that a load could not tell from their text."""
        with suppress(ValueError):
            if path and [text_of_key(key) for key in value]:
                return
        raise StateError(
            f"the key {reprlib.repr(odd)} at {dotted(path) or 'the top'} is a "
            f"{type(odd).__name__}, with tensors below or beside it",
            remedy="use text or whole numbers as keys above and beside tensors",
            rank=self._rank,
        )

    def _refuse_keys(self, objects: list[ObjectLeaf]) -> None:
        """Refuse two values of one dotted key: the checkpoint would hold one of them. The layout
        does this for tensors. And a user's value under a key of ours."""
        seen: set[str] = set()
        for leaf in objects:
            if leaf.path[-1:] == (FACTS,):
                parts.refuse_key(leaf, self._rank)
            if leaf.key in seen:
                raise StateError(
                    f"two values of the state dict have the dotted key {leaf.key!r}",
                    remedy="rename one: 'a.b' beside {'a': {'b': …}} cannot be told apart, nor 1 "
                    "from '1'",
                    rank=self._rank,
                )
            seen.add(leaf.key)

    def _parts(self, value: torch.Tensor, path: Path) -> tuple[dict[str, Any], Any] | None:
        try:
            held = parts.parts_of(value, path)
        except StateError as error:
            error.rank = self._rank
            raise
        tag = tag_of(value)
        if held and tag is not None and tag.geometry is not None and tag.geometry.flat:
            what = "is cut from a flat parameter, but holds other tensors"
            raise unsupported(dotted(path), what, self._rank)
        return held

    # -- entries -----------------------------------------------------------------------------

    def _entry(
        self, path: Path, tensor: torch.Tensor, tag: Tag | None
    ) -> tuple[Entry | None, torch.Tensor]:
        """None for a tensor of which this rank has no part by its mesh or class."""
        local, placed = local_of(tensor, path, self._rank)
        if local.dim() != 1 and tag is not None and tag.geometry is not None and tag.geometry.flat:
            local = flattened(local, path, self._rank)
        signature = (
            local.dtype, local.shape, tag, placed, type(local), local.layout, local.is_meta,
        )  # fmt: skip
        known = self._known.get(path)
        if known is not None and known[0] == signature:
            return known[1], local
        outside = is_dtensor(tensor) and dtensor_parts(tensor)[1].get_coordinate() is None
        if cuts_itself(tensor) and not is_sharded_tensor(tensor):
            outside = outside or not placed[1]  # without a box it does not say its dtype either
        entry = None if outside else self._make(path, tensor, local, tag)
        self._known[path] = (signature, entry)
        return entry, local

    def _make(
        self, path: Path, tensor: torch.Tensor, local: torch.Tensor, tag: Tag | None
    ) -> Entry:
        refuse_kind(tensor, local, path, self._rank)
        if tag is not None and len(tag.after) < len(path):
            fqns, after = tag.fqns, tag.after_in(path)
        else:
            fqns, after = (str(path[-1]),), ()
        before = path[: len(path) - 1 - len(after)]
        geometry: Geometry
        if tag is not None and tag.geometry is not None:
            geometry = tag.geometry
        else:
            geometry = self._geometry(tensor, local, fqns, path)
        dtype = dtype_name(local.dtype)
        entry = Entry(path, dtype, geometry, before, after, (self._rank,))
        if entry.shape != tuple(local.shape):  # bytes would be read back to other places, silently
            raise StateError(
                f"{entry.key!r} has the local shape {list(local.shape)}, but by its placement rank "
                f"{self._rank} holds {list(entry.shape)}",
                remedy="smckpt does not know this sharding: please report it; sizes that the mesh "
                "divides evenly are safe",
                rank=self._rank,
            )
        return entry

    def _geometry(
        self, tensor: Any, local: torch.Tensor, fqns: tuple[str, ...], path: Path
    ) -> Geometry:
        if cuts_itself(tensor):
            shape, shards = shards_of(tensor, path, self._rank)
            return BoxGeometry(fqns[0], shape, tuple(box for box, _ in shards), (self._rank,))
        if is_dtensor(tensor):
            _, mesh, placements, shape = dtensor_parts(tensor)
            # A parameter's state has the placement of the parameter.
            rule = fqns[0], shape, mesh, placements
            if rule not in self._rules:
                if mesh not in self._meshes:
                    self._meshes[mesh] = mesh_of(mesh)
                ours = tuple(placement_of(p, dotted(path)) for p in placements)
                self._rules[rule] = MeshGeometry(fqns[0], tuple(shape), self._meshes[mesh], ours)
            return self._rules[rule]
        return PerRankGeometry(fqns, tuple(local.shape), (self._rank,))
