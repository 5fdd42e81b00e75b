"""From a nested state dict to entries: one walk, cheap when nothing changed since the last."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from smckpt.errors import StateError
from smckpt.layout.entries import DTYPES, Entry, ObjectLeaf, Path, dotted
from smckpt.layout.geometry import (
    Box,
    BoxGeometry,
    FlatGeometry,
    Geometry,
    KeptGeometry,
    MeshGeometry,
)
from smckpt.layout.mesh import Mesh
from smckpt.state_dict.optimizers import is_optimizer_dict, optimizer_dicts
from smckpt.state_dict.private import (
    dtensor_parts,
    is_dtensor,
    is_wrapper,
    placement_of,
    unwrapped,
)
from smckpt.state_dict.tags import FullStateDict, StatefulStateDict, Tag, set_parts, tag_of

__all__ = ["Selection", "Selector", "geometry_of"]

log = logging.getLogger("smckpt")


@dataclass(frozen=True)
class Selection:
    """What a rank's state consists of. `tensors[i]` is the live local array of `entries[i]`.
    gathered: some of it is, or would be on another rank, a copy that was gathered (FULL)."""

    kind: str | None
    entries: tuple[Entry, ...]
    tensors: tuple[torch.Tensor, ...]
    objects: tuple[ObjectLeaf, ...]
    optimizers: dict[str, Any]
    gathered: bool = False


@dataclass
class _Walk:
    tensors: list[tuple[Path, torch.Tensor]] = field(default_factory=list)
    objects: list[ObjectLeaf] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)


class Selector:
    """Selects the states of one rank; remembers the last one, so that an unchanged state costs a
    comparison per tensor and gives the very same `entries`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._known: dict[Path, tuple[Any, Entry]] = {}
        self._meshes: dict[Any, Mesh] = {}
        self._rules: dict[Any, MeshGeometry] = {}
        self._last: tuple[Entry, ...] = ()

    def select(self, state_dict: Mapping[str, Any] | None) -> Selection:
        """Walk the state.

        Raises:
            StateError: nothing is there, or a tensor of a kind that cannot be saved, or a key that
                is neither text nor a whole number.
        """
        if not state_dict:
            raise StateError(
                "there is nothing to save or load on this rank: the state dict is "
                + ("None" if state_dict is None else "empty"),
                remedy="give every rank of process_group its state, or leave it out of the group",
                rank=self._rank,
            )
        walk = _Walk()
        try:
            self._visit(state_dict, (), walk)
        except RecursionError as error:
            raise StateError(
                "the state dict is nested without an end: something in it holds itself",
                remedy="leave the reference to its own dict or list out",
                rank=self._rank,
            ) from error
        self._refuse_twice(walk.objects)
        kinds = walk.kinds
        entries, tensors = [], []
        for path, tensor in walk.tensors:
            tag = tag_of(tensor)
            if tag is not None and tag.kind is not None:
                kinds.add(tag.kind)
            try:
                entry, local = self._entry(path, tensor, tag)
            except RuntimeError as error:  # torch's, of a tensor without shape or memory
                raise _unsupported(dotted(path), f"tells no shape ({error})", self._rank) from error
            entries.append(entry)
            tensors.append(local)
        optimizers = {}
        for path, _, binding in optimizer_dicts(state_dict):
            if binding is not None:
                optimizers[dotted(path)] = binding.record()
                kinds.add(binding.kind) if binding.held else None
        if len(entries) != len(self._last) or any(
            a is not b for a, b in zip(entries, self._last, strict=True)
        ):
            self._last = tuple(entries)
        kind = "LOCAL" if "LOCAL" in kinds else min(kinds, default=None)
        return Selection(
            kind, self._last, tuple(tensors), tuple(walk.objects), optimizers, "FULL" in kinds
        )

    # -- the walk ----------------------------------------------------------------------------

    def _visit(self, value: Any, path: Path, walk: _Walk) -> bool:
        """Collect what is below; whether it must stay apart: it has a tensor, is a Stateful, which
        is no plain value, or an optimizer's state dict, whose groups the live optimizer gets."""
        if type(value) is dict:  # what nearly all is: answered without asking abstract classes
            return self._children(value, value.items(), path, walk)
        if isinstance(value, torch.Tensor):
            walk.tensors.append((path, value))
            return True
        if isinstance(value, FullStateDict):
            walk.kinds.add("FULL")
            return not value or self._children(value, value.items(), path, walk)
        if isinstance(value, Mapping):
            found = self._children(value, value.items(), path, walk)
            return found or isinstance(value, StatefulStateDict)
        if isinstance(value, (list, tuple)):
            return self._children(value, enumerate(value), path, walk)
        if type(value).__module__ == "numpy" and type(value).__name__ == "ndarray":
            walk.tensors.append((path, self._from_numpy(value, path)))
            return True
        if is_sharded_tensor(value):
            walk.tensors.append((path, value))
            return True
        if is_stateful(value):
            self._visit(value.state_dict(), path, walk)
            return True
        walk.objects.append(ObjectLeaf(path, value))
        return False

    def _children(self, value: Any, items: Any, path: Path, walk: _Walk) -> bool:
        mark, found = len(walk.objects), False
        odd: list[Any] = []  # keys that no path can hold
        for key, child in items:
            if type(key) not in (str, int):
                odd.append(key)
                found |= self._visit(child, (*path, repr(key)), walk)
            else:
                found |= self._visit(child, (*path, key), walk)
        # An optimizer's is never one value, even while it has no state (plain SGD): a load goes
        # through to the live groups.
        found = found or is_optimizer_dict(value)
        if odd and (found or not path):
            # Only a value that is stored whole may have such keys.
            raise StateError(
                f"the key {odd[0]!r} at {dotted(path) or 'the top'} is a "
                f"{type(odd[0]).__name__}, with tensors below or beside it",
                remedy="use text or whole numbers as keys above and beside tensors",
                rank=self._rank,
            )
        if not found and path:
            del walk.objects[mark:]
            walk.objects.append(ObjectLeaf(path, value))
        return found

    def _refuse_twice(self, objects: list[ObjectLeaf]) -> None:
        """Values of one dotted key would be one value in the checkpoint. Of tensors, the layout
        finds such."""
        seen: set[str] = set()
        for leaf in objects:
            if leaf.key in seen:
                raise StateError(
                    f"two values of the state dict have the dotted key {leaf.key!r}",
                    remedy="rename one: 'a.b' beside {'a': {'b': …}} cannot be told apart, nor 1 "
                    "from '1'",
                    rank=self._rank,
                )
            seen.add(leaf.key)

    def _from_numpy(self, value: Any, path: Path) -> torch.Tensor:
        try:
            return torch.from_numpy(value)
        except (TypeError, ValueError) as error:
            raise StateError(
                f"the array at {dotted(path)} of dtype {value.dtype} cannot be saved: {error}",
                remedy="convert it to a numeric dtype and positive strides",
                rank=self._rank,
            ) from error

    # -- entries -----------------------------------------------------------------------------

    def _entry(
        self, path: Path, tensor: torch.Tensor, tag: Tag | None
    ) -> tuple[Entry, torch.Tensor]:
        local, placed = _local_of(tensor)
        if tag is not None and local.dim() != 1 and isinstance(tag.geometry, FlatGeometry):
            local = _flattened(local, path, self._rank)
        signature = (
            local.dtype, local.shape, tag, placed, type(local), local.layout, local.is_meta,
        )  # fmt: skip
        known = self._known.get(path)
        if known is not None and known[0] == signature:
            return known[1], local
        entry = self._make(path, tensor, local, tag)
        self._known[path] = (signature, entry)
        return entry, local

    def _make(
        self, path: Path, tensor: torch.Tensor, local: torch.Tensor, tag: Tag | None
    ) -> Entry:
        _check(tensor, local, path, self._rank)
        if tag is not None and len(tag.after) < len(path):
            fqns, after = tag.fqns, tag.after
        else:
            fqns, after = (str(path[-1]),), ()
        before = path[: len(path) - 1 - len(after)]
        geometry: Geometry
        if tag is not None and tag.geometry is not None:
            geometry = tag.geometry
        else:
            geometry = self._geometry(tensor, local, fqns, path)
        dtype = _dtype_name(local.dtype)
        return Entry(path, dtype, tuple(local.shape), geometry, before, after)

    def _geometry(
        self, tensor: Any, local: torch.Tensor, fqns: tuple[str, ...], path: Path
    ) -> Geometry:
        if is_sharded_tensor(tensor):
            return _box_geometry(tensor, fqns[0], self._rank)
        if is_dtensor(tensor):
            _, mesh, placements, shape = dtensor_parts(tensor)
            # A parameter's state is placed as the parameter.
            rule = fqns[0], shape, mesh, placements
            if rule not in self._rules:
                if mesh not in self._meshes:
                    self._meshes[mesh] = mesh_of(mesh)
                ours = tuple(placement_of(p, dotted(path)) for p in placements)
                self._rules[rule] = MeshGeometry(fqns[0], tuple(shape), self._meshes[mesh], ours)
            return self._rules[rule]
        return KeptGeometry(fqns, tuple(local.shape), self._rank)


def geometry_of(tensor: torch.Tensor, fqn: str, rank: int) -> tuple[torch.Tensor, Geometry]:
    """The local array of one tensor and its geometry."""
    selection = Selector(rank).select({fqn: tensor})
    return selection.tensors[0], selection.entries[0].geometry


def mesh_of(mesh: Any) -> Mesh:
    """Our `Mesh` for torch's `DeviceMesh`."""
    names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
    return Mesh(tuple(names), tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()))


def _local_of(tensor: Any) -> tuple[torch.Tensor, Any]:
    """The local array, and what besides it tells whether the placement is the same as before."""
    if is_dtensor(tensor):
        local, mesh, placements, shape = dtensor_parts(tensor)
        return unwrapped(local), (mesh, placements, shape)
    if is_sharded_tensor(tensor):
        shards = tensor.local_shards()
        boxes = tuple(
            (tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)) for s in shards
        )
        if len(shards) == 1:
            return shards[0].tensor.detach(), boxes
        parts = [s.tensor.detach() for s in shards]
        empty = torch.empty(0, dtype=tensor.dtype)
        local = torch.cat([part.reshape(-1) for part in parts]) if parts else empty
        set_parts(local, parts)
        return local, boxes
    return unwrapped(tensor.detach() if tensor.requires_grad else tensor), None


def _flattened(local: torch.Tensor, path: Path, rank: int) -> torch.Tensor:
    """The same memory as the one-dimensional array that a flat parameter's rule speaks of: under
    NO_SHARD with use_orig_params=True parameters and their state keep their shapes."""
    try:
        return local.view(-1)
    except RuntimeError as error:
        raise StateError(
            f"{dotted(path)} is not contiguous, with strides {local.stride()}",
            remedy="make the parameter contiguous before it is wrapped",
            rank=rank,
        ) from error


def _box_geometry(tensor: Any, fqn: str, rank: int) -> BoxGeometry:
    boxes = tuple(
        Box(tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes))
        for s in tensor.local_shards()
    )
    return BoxGeometry(fqn, tuple(tensor.size()), boxes, (rank,))


def is_sharded_tensor(value: Any) -> bool:
    return type(value).__name__ == "ShardedTensor" and hasattr(value, "local_shards")


def is_stateful(value: Any) -> bool:
    """DCP's Stateful: gives and takes a state dict, and is no class."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def _check(tensor: torch.Tensor, local: torch.Tensor, path: Path, rank: int) -> None:
    what = None
    if is_wrapper(local):
        what = f"is a {type(local).__name__}, which computes its values from other tensors"
    elif local.layout is not torch.strided:
        what = f"is sparse ({local.layout})"
    elif local.is_quantized:
        what = "is quantised"
    elif local.device.type == "meta":
        what = "is on the meta device and has no data"
    elif _dtype_name(local.dtype) not in DTYPES:
        what = f"has the dtype {local.dtype}"
    if what is not None:
        raise _unsupported(dotted(path), what, rank)


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unsupported(name: str, what: str, rank: int) -> StateError:
    return StateError(
        f"{name} {what}, which can be neither saved nor loaded",
        remedy="give a dense tensor of a plain dtype with memory (a meta module: to_empty()), or "
        "leave it out",
        rank=rank,
    )
