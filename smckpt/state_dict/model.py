"""A model's tensors by canonical name, with geometry: live, and without a collective."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import nn

from smckpt.errors import StateError
from smckpt.layout.geometry import FlatGeometry, FlatUnit, Geometry, MeshGeometry, Segment
from smckpt.layout.mesh import Mesh, Placement
from smckpt.state_dict.computed import computed_names, give_back, give_extra_state, own_state_dict
from smckpt.state_dict.names import canonical
from smckpt.state_dict.private import (
    buffer_dtypes,
    detached,
    fsdp1_units,
    is_fsdp1,
    is_fsdp2,
    reshard_fsdp2,
    uncompiled,
)
from smckpt.state_dict.tags import Tag, plain_tag, set_tag, stand_in

__all__ = ["Held", "ModelView", "view_of"]

log = logging.getLogger("smckpt")


@dataclass(frozen=True)
class Held:
    """A parameter object as an optimizer knows it: its names and the geometry of its local data."""

    fqns: tuple[str, ...]
    geometry: Geometry | None  # None: a DTensor tells by itself, a plain tensor has none


class ModelView:
    """How one model's state is taken. Subclasses know one strategy each."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.computed: set[str] = set()  # of the last `tensors`: what is no memory of the model

    def tensors(self, kind: str) -> dict[str, Any]:
        """Canonical name → live tensor (or what modules compute, such as extra state), tagged."""
        raise NotImplementedError

    def give_back(self, given: Mapping[str, Any]) -> None:
        """Hand what modules computed to them, as it is in `given`; live tensors are filled."""
        give_extra_state(self.model, given, canonical)

    def held(self) -> dict[int, Held]:
        """id of each parameter that an optimizer may hold → what it is."""
        raise NotImplementedError

    def trainable(self) -> set[str]:
        return {
            fqn
            for name, p in self.model.named_parameters(remove_duplicate=False)
            if p.requires_grad
            for fqn in [canonical(name, ddp=_is_ddp(self.model))]
        }


def view_of(model: nn.Module) -> ModelView:
    model = uncompiled(model)
    if is_fsdp1(model):
        return Fsdp1View(model)
    return PlainView(model)


def _is_ddp(model: nn.Module) -> bool:
    from torch.nn.parallel import DistributedDataParallel

    return isinstance(model, DistributedDataParallel)


class PlainView(ModelView):
    """FSDP2, DDP and plain modules: `state_dict()` is live and local as it is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._ddp = _is_ddp(model)
        self._mesh = _ddp_mesh(model) if self._ddp else None

    def tensors(self, kind: str) -> dict[str, Any]:
        raw = own_state_dict(self.model)
        self.computed = {self._name(name) for name in computed_names(self.model, raw)}
        ignored = self._ignored_by_ddp()
        parameters = (
            {n for n, _ in self.model.named_parameters(remove_duplicate=False)}
            if self._ddp
            else set()
        )
        out: dict[str, Any] = {}
        for name, value in raw.items():
            fqn = self._name(name)
            if fqn in out:
                raise StateError(
                    f"two tensors of the model have the name {fqn!r}",
                    remedy="rename the module that ends in a wrapper's name",
                )
            if isinstance(value, torch.Tensor):
                value = detached(value)
                if name in parameters and name not in ignored:
                    tag = Tag(kind, (fqn,), self._replicated(fqn, value))
                else:
                    tag = plain_tag(kind, fqn)
                set_tag(value, tag)
            out[fqn] = value
        return out

    def give_back(self, given: Mapping[str, Any]) -> None:
        give_back(self.model, given, self._name)

    def _name(self, raw: str) -> str:
        return canonical(raw, ddp=self._ddp)

    def held(self) -> dict[int, Held]:
        if is_fsdp2(self.model):
            reshard_fsdp2(self.model)
        ignored = self._ignored_by_ddp()
        out: dict[int, Held] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            fqn = canonical(name, ddp=self._ddp)
            if id(parameter) in out:
                continue  # a shared parameter has one state, under its first name
            geometry = None if name in ignored else self._replicated(fqn, parameter)
            out[id(parameter)] = Held((fqn,), geometry)
        return out

    def _replicated(self, fqn: str, value: torch.Tensor) -> MeshGeometry | None:
        if self._mesh is None:
            return None
        return MeshGeometry(fqn, tuple(value.shape), self._mesh, (Placement("replicate"),))

    def _ignored_by_ddp(self) -> set[str]:
        names = getattr(self.model, "parameters_to_ignore", None) if self._ddp else None
        return {f"module.{name}" for name in names or ()}


def _ddp_mesh(model: Any) -> Mesh:
    import torch.distributed as dist

    ranks = tuple(sorted(dist.get_process_group_ranks(model.process_group)))
    cached: Mesh | None = model.__dict__.get("_smckpt_mesh")
    if cached is None or cached.ranks != ranks:
        cached = Mesh(("replicate",), (len(ranks),), ranks)
        model.__dict__["_smckpt_mesh"] = cached
    return cached


@dataclass(frozen=True)
class _Unit:
    """An FSDP1 flat parameter: its record, where each member lies in the local shard."""

    unit: FlatUnit
    mesh: Mesh
    members: tuple[tuple[str, int, int, int], ...]  # fqn, segment, offset in the shard, numel here
    key: str
    original: bool  # use_orig_params
    aliases: tuple[tuple[str, FlatUnit, int, int, int], ...]  # of shared parameters

    # The same objects at every take: a selector then sees at once that nothing changed.
    @cached_property
    def whole(self) -> FlatGeometry:
        return FlatGeometry(self.unit, self.mesh)

    @cached_property
    def parts(self) -> tuple[FlatGeometry, ...]:
        """Of each member."""
        return tuple(FlatGeometry(self.unit, self.mesh, segment) for _, segment, *_ in self.members)

    @cached_property
    def others(self) -> tuple[FlatGeometry, ...]:
        """Of each alias."""
        return tuple(
            FlatGeometry(record, self.mesh, segment) for _, record, segment, *_ in self.aliases
        )

    @cached_property
    def cuts(self) -> list[int]:
        """Sizes that cut the local shard into gap, member, gap, member, …, rest."""
        cuts, at = [], 0
        for _, _, offset, numel in self.members:
            cuts += [offset - at, numel] if numel else [0, 0]
            at = offset + numel if numel else at
        return [*cuts, self.unit.shard_numel - at]

    @cached_property
    def _tags(self) -> dict[str, _Tags]:
        return {}

    def tags(self, kind: str) -> _Tags:
        if kind not in self._tags:
            self._tags[kind] = _Tags(
                Tag(kind, tuple(fqn for fqn, *_ in self.members), self.whole),
                tuple(map(partial(_tag, kind), self.members, self.parts)),
                tuple(map(partial(_tag, kind), self.aliases, self.others)),
            )
        return self._tags[kind]


@dataclass(frozen=True)
class _Tags:
    """Of an FSDP1 unit, under one kind: of the flat parameter, each member and each alias."""

    whole: Tag
    parts: tuple[Tag, ...]
    others: tuple[Tag, ...]


def _tag(kind: str, named: tuple[Any, ...], rule: FlatGeometry) -> Tag:
    return Tag(kind, (named[0],), rule)


class Fsdp1View(ModelView):
    """FSDP1: the flat parameters' local shards themselves; torch's hooks run collectives."""

    def tensors(self, kind: str) -> dict[str, Any]:
        out: dict[str, Any] = {}
        managed: set[str] = set()
        owners: dict[int, str] = {}
        for name, module, handle in fsdp1_units(self.model):
            unit = _unit_of(name, module, handle)
            shard = _local_shard(handle)
            if unit.original:
                originals = zip(handle.flat_param._params, unit.members, strict=True)
                owners.update((id(p), fqn) for p, (fqn, *_) in originals)
            shard = shard.detach()
            tags = unit.tags(kind)
            managed.update(fqn for fqn, *_ in unit.members)
            for (fqn, _, _, offset, numel), tag in zip(unit.aliases, tags.others, strict=True):
                managed.add(fqn)
                value = shard.narrow(0, offset, numel)
                set_tag(value, tag)
                out[fqn] = value
            if kind == "LOCAL" and not unit.original:
                set_tag(shard, tags.whole)
                out[unit.key] = shard
                continue
            values = shard.split_with_sizes(unit.cuts)[1::2]  # one call: a view each costs 5 µs
            for (fqn, *_), value, tag in zip(unit.members, values, tags.parts, strict=True):
                set_tag(value, tag)
                out[fqn] = value
        self._unmanaged(kind, managed, owners, out)
        return out

    def _unmanaged(
        self, kind: str, managed: set[str], owners: dict[int, str], out: dict[str, Any]
    ) -> None:
        """Buffers, parameters that FSDP ignores, and extra state; none needs a collective."""
        dtypes = buffer_dtypes(self.model)
        for raw, module in self.model.named_modules(remove_duplicate=False):
            prefix = canonical(raw)
            named = [
                *((n, p) for n, p in module._parameters.items() if not hasattr(p, "_fqns")),
                *(
                    (n, b)
                    for n, b in module._buffers.items()
                    if n not in module._non_persistent_buffers_set
                ),
            ]
            for name, tensor in named:
                fqn = f"{prefix}.{name}" if prefix else name
                if tensor is None or fqn in managed or fqn in out:
                    continue
                if id(tensor) in owners:
                    raise StateError(
                        f"{fqn} shares its parameter with {owners[id(tensor)]}, which stands in "
                        "another FSDP unit: FSDP1 shards it in one of them only",
                        remedy="wrap the two modules in one unit",
                    )
                value = tensor.detach()
                if dtypes.get(fqn, value.dtype) != value.dtype:
                    value = stand_in(value, dtypes[fqn])
                set_tag(value, plain_tag(kind, fqn))
                out[fqn] = value
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                fqn = f"{prefix}._extra_state" if prefix else "_extra_state"
                out[fqn] = module.get_extra_state()
                self.computed.add(fqn)
            if type(module)._save_to_state_dict is not nn.Module._save_to_state_dict:
                _say_left_out(type(module).__qualname__, prefix)

    def held(self) -> dict[int, Held]:
        out: dict[int, Held] = {}
        managed: set[str] = set()
        for name, module, handle in fsdp1_units(self.model):
            unit = _unit_of(name, module, handle)
            fqns = tuple(fqn for fqn, *_ in unit.members)
            managed.update(fqns)
            out[id(handle.flat_param)] = Held(fqns, unit.whole)
            if unit.original:
                for fqn, rule, parameter in zip(
                    fqns, unit.parts, handle.flat_param._params, strict=True
                ):
                    out[id(parameter)] = Held((fqn,), rule)
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in out and canonical(name) not in managed:
                out[id(parameter)] = Held((canonical(name),), None)
        return out

    def slices(self) -> dict[int, tuple[tuple[str, int, int, int], ...]]:
        """id of each flat parameter → its members (fqn, segment, offset in the shard, numel)."""
        return {
            id(handle.flat_param): _unit_of(name, module, handle).members
            for name, module, handle in fsdp1_units(self.model)
        }


@lru_cache(maxsize=1024)  # once for each place
def _say_left_out(kind: str, at: str) -> None:
    log.warning(
        "%s (%s) has a way of its own to save its state (_save_to_state_dict), which is not called "
        "under FSDP1, whose parameters are not there: what it adds to its parameters, buffers and "
        "extra state is not saved. Keep that in a buffer, or give it by get_extra_state",
        at or "the model",
        kind,
    )


def _local_shard(handle: Any) -> torch.Tensor:
    flat: torch.Tensor = handle.flat_param
    if not handle.uses_sharded_strategy:
        return flat.data
    # FSDP sets it before the first forward; until then the flat parameter itself is the shard
    shard: torch.Tensor = getattr(flat, "_local_shard", flat.data)
    return shard


def _unit_of(raw_name: str, module: Any, handle: Any) -> _Unit:
    """The unit's record; kept on the flat parameter, so that later takes find the same objects."""
    flat = handle.flat_param
    cached: _Unit | None = getattr(flat, "_smckpt_unit", None)
    if cached is None:
        cached = _make_unit(raw_name, module, handle)
        flat._smckpt_unit = cached
    return cached


def _make_unit(raw_name: str, module: Any, handle: Any) -> _Unit:
    flat = handle.flat_param
    prefix = canonical(raw_name)
    dotted = f"{prefix}." if prefix else ""
    fqns = [f"{dotted}{canonical(fqn)}" for fqn in flat._fqns]
    for fqn, contiguous in zip(fqns, flat._contiguities, strict=True):
        if not contiguous:
            raise StateError(
                f"{fqn} is not contiguous (channels last?): FSDP1 flattens it in memory order, "
                "which no saved shape describes",
                remedy="make it contiguous before wrapping, or use fully_shard",
            )
    segments: list[Segment] = []
    members: list[int] = []
    names = iter(zip(fqns, flat._shapes, strict=True))
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if padding:
            segments.append(Segment(None, (), int(numel)))
            continue
        fqn, shape = next(names)
        members.append(len(segments))
        segments.append(Segment(fqn, tuple(shape), int(numel)))
    shard_numel = int(_local_shard(handle).numel())
    mesh = _fsdp1_mesh(module, handle)
    unit = FlatUnit(tuple(segments), shard_numel)
    shard = mesh.coordinate(_rank())[1]
    low, high = shard * shard_numel, (shard + 1) * shard_numel
    placed = []
    for fqn, segment in zip(fqns, members, strict=True):
        start = unit.starts[segment]
        a = min(max(start, low), high)
        b = max(min(start + segments[segment].numel, high), a)
        placed.append((fqn, segment, a - low, b - a))
    return _Unit(
        unit,
        mesh,
        tuple(placed),
        f"{dotted}_flat_param",
        bool(handle._use_orig_params),
        tuple(_aliases(dotted, flat, unit, placed)),
    )


def _aliases(
    dotted: str, flat: Any, unit: FlatUnit, placed: list[tuple[str, int, int, int]]
) -> Iterator[tuple[str, FlatUnit, int, int, int]]:
    """The other names of parameters that the unit's modules share."""
    by_name = {fqn: (segment, offset, numel) for fqn, segment, offset, numel in placed}
    for info in flat._shared_param_infos:

        def full(module: str, name: str) -> str:
            return dotted + canonical(f"{module}.{name}" if module else name)

        alias = full(info.module_name, info.param_name)
        segment, offset, numel = by_name[full(info.prim_module_name, info.prim_param_name)]
        segments = list(unit.segments)
        segments[segment] = replace(segments[segment], fqn=alias)
        yield alias, FlatUnit(tuple(segments), unit.shard_numel), segment, offset, numel


def _fsdp1_mesh(module: Any, handle: Any) -> Mesh:
    """(replicate, shard): from the device mesh if there is one, else from the process groups."""
    import torch.distributed as dist

    names = ("replicate", "shard")
    ranks = tuple(dist.get_process_group_ranks(handle.process_group))
    if not handle.uses_sharded_strategy:
        return Mesh(names, (len(ranks), 1), ranks)
    inter = getattr(module, "_inter_node_pg", None)
    if inter is None:
        return Mesh(names, (1, len(ranks)), ranks)
    column = dist.get_process_group_ranks(inter)
    me = _rank()
    # The groups of a grid are each other's translates: what is known is this rank's row and column.
    grid = tuple(shard + (replica - me) for replica in column for shard in ranks)
    if len(set(grid)) != len(grid) or min(grid) < 0 or max(grid) >= dist.get_world_size():
        raise StateError(
            f"shard group {ranks} and replication group {tuple(column)} are no rows and columns "
            "of a grid",
            remedy="build hybrid sharding from a device mesh (init_device_mesh)",
            rank=me,
        )
    return Mesh(names, (len(column), len(ranks)), grid)


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()
