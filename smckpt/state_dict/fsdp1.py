"""FSDP1: the local shards of flat parameters, under the names of the parameters in them.

All private names of FSDP1 that smckpt uses are in this module. A check names the one that an
installed torch lacks: see `_units`. torch's own `state_dict()` is not called, since its hooks run
collectives.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import nn

from smckpt.errors import StateError
from smckpt.layout.flat_geometry import FlatGeometry, FlatUnit, Segment
from smckpt.layout.geometry import Geometry
from smckpt.layout.mesh import Mesh, memo
from smckpt.state_dict.modes import give_extra_state
from smckpt.state_dict.tags import Tag, plain_tag, set_tag, stand_in
from smckpt.state_dict.tensors import fill, is_value, lacking
from smckpt.state_dict.views import Held, Member, ModelView

log = logging.getLogger("smckpt")

_FLAT_NAMES = (
    "_fqns",
    "_shapes",
    "_contiguities",
    "_numels_with_padding",
    "_is_padding_mask",
    "_shard_param_infos",
    "_params",
    "_shared_param_infos",
)


@dataclass(frozen=True)
class _Unit:
    """An FSDP1 flat parameter, and the place of each member in the local shard.

    key: the shard's key under LOCAL. original: use_orig_params. aliases: the members' other names.
    The geometries are the same objects at every take, so a selector detects an unchanged state at
    once.
    """

    whole: FlatGeometry
    members: tuple[Member, ...]
    aliases: tuple[Member, ...]
    key: str
    original: bool
    _tags: dict[str, tuple[Tag, list[Tag], list[Tag]]] = memo()

    @cached_property
    def held(self) -> Held:
        fqns = tuple(member.fqn for member in self.members)
        return Held(fqns, self.whole, members=self.members)

    @cached_property
    def cuts(self) -> list[int]:
        """Sizes that cut the local shard into gap, member, gap, member, …, rest."""
        cuts, at = [], 0
        for member in self.members:
            cuts += [member.offset - at, member.numel] if member.numel else [0, 0]
            at = member.offset + member.numel if member.numel else at
        return [*cuts, self.whole.unit.shard_numel - at]

    def tags(self, kind: str) -> tuple[Tag, list[Tag], list[Tag]]:
        """The tags of the flat parameter, of each member and of each alias."""
        if kind not in self._tags:
            self._tags[kind] = (
                Tag(kind, self.held.fqns, self.whole),
                [Tag(kind, (member.fqn,), member.geometry) for member in self.members],
                [Tag(kind, (alias.fqn,), alias.geometry) for alias in self.aliases],
            )
        return self._tags[kind]


class Fsdp1View(ModelView):
    """A model with FSDP1 modules."""

    components = (*ModelView.components, "_fsdp_wrapped_module")

    @classmethod
    def sees(cls, model: nn.Module) -> bool:
        from torch.distributed.fsdp import FullyShardedDataParallel

        return any(isinstance(m, FullyShardedDataParallel) for m in model.modules())

    def _units(self) -> Iterator[tuple[Any, Any, _Unit]]:
        """(FSDP module, handle, its record) of each unit that manages parameters.

        Raises:
            StateError: torch lacks a private name.
        """
        from torch.distributed.fsdp import FullyShardedDataParallel

        for name, module in self.model.named_modules():
            if not isinstance(module, FullyShardedDataParallel):
                continue
            try:
                handle: Any = module._handle
                if handle is None:
                    continue
                for needed in _FLAT_NAMES:
                    getattr(handle.flat_param, needed)
            except AttributeError as error:
                raise lacking("FSDP1", str(error)) from error
            yield module, handle, self._unit(name, module, handle)

    def geometry(self, fqn: str, tensor: torch.Tensor) -> Geometry | None:
        for _, _, unit in self._units():
            for member in (*unit.members, *unit.aliases):
                if member.fqn == fqn:
                    return member.geometry
        return None

    def tensors(self, kind: str) -> dict[str, Any]:
        out: dict[str, Any] = {}
        managed: set[str] = set()
        owners: dict[int, str] = {}
        for _, handle, unit in self._units():
            shard = _local_shard(handle).detach()
            if unit.original:
                originals = zip(handle.flat_param._params, unit.members, strict=True)
                owners.update((id(p), member.fqn) for p, member in originals)
            whole, of_members, of_aliases = unit.tags(kind)
            managed.update(unit.held.fqns)
            for alias, tag in zip(unit.aliases, of_aliases, strict=True):
                managed.add(alias.fqn)
                value = shard.narrow(0, alias.offset, alias.numel)
                set_tag(value, tag)
                out[alias.fqn] = value
            if kind == "LOCAL" and not unit.original:
                set_tag(shard, whole)
                out[unit.key] = shard
                continue
            # one call, because a view for each costs 5 µs
            values = shard.split_with_sizes(unit.cuts)[1::2]
            for fqn, value, tag in zip(unit.held.fqns, values, of_members, strict=True):
                set_tag(value, tag)
                out[fqn] = value
        self._unmanaged(kind, managed, owners, out)
        return out

    def _unmanaged(
        self, kind: str, managed: set[str], owners: dict[int, str], out: dict[str, Any]
    ) -> None:
        """Buffers, parameters that FSDP ignores, and extra state. No collective runs."""
        dtypes = self._buffer_dtypes()
        for raw, module in self.model.named_modules(remove_duplicate=False):
            prefix = self.name(raw)
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
                        f"{fqn} shares its parameter with {owners[id(tensor)]}, which is in "
                        "another FSDP unit: FSDP1 shards it in one of them only",
                        remedy="wrap the two modules in one unit",
                    )
                if is_value(tensor):
                    out[fqn] = tensor
                    self.computed.add(fqn)
                    continue
                value = tensor.detach()
                if dtypes.get(fqn, value.dtype) != value.dtype:
                    value = stand_in(value, dtypes[fqn])
                set_tag(value, plain_tag(kind, fqn, isinstance(tensor, nn.Parameter)))
                out[fqn] = value
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                fqn = f"{prefix}._extra_state" if prefix else "_extra_state"
                out[fqn] = module.get_extra_state()
                self.computed.add(fqn)
            if type(module)._save_to_state_dict is not nn.Module._save_to_state_dict:
                _say_left_out(type(module).__qualname__, prefix)

    def _buffer_dtypes(self) -> dict[str, torch.dtype]:
        """Name of each buffer that mixed precision casts in the first forward → its original dtype,
        in which torch saves it too."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        out: dict[str, torch.dtype] = {}
        for name, module in self.model.named_modules():
            if isinstance(module, FullyShardedDataParallel) and module.mixed_precision.buffer_dtype:
                prefix = f"{name}." if name else ""
                try:
                    known = module._buffer_name_to_orig_dtype
                except AttributeError as error:
                    raise lacking("FSDP1", str(error)) from error
                for buffer, dtype in known.items():
                    out[self.name(f"{prefix}{buffer}")] = dtype
        return out

    def hooked(self) -> list[str]:
        """Without FSDP1's own hooks, which end what its loads begin."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        modules = dict(self.model.named_modules())
        named = super().hooked()
        return [raw for raw in named if not isinstance(modules[raw], FullyShardedDataParallel)]

    def reads(self) -> None:
        """Nothing: torch gathers whole parameters for what modules read by code of their own."""

    def give_back(self, given: Mapping[str, Any]) -> None:
        give_extra_state(self.model, given, self.name)
        for raw, buffer in self.model.named_buffers(remove_duplicate=False):
            if is_value(buffer) and self.name(raw) in given:
                fill(buffer, given[self.name(raw)])
        for raw in self.hooked():  # torch gathers whole parameters for them, by collectives
            _say_not_called(self.name(raw))

    def held(self) -> dict[int, Held]:
        out: dict[int, Held] = {}
        managed: set[str] = set()
        for _, handle, unit in self._units():
            managed.update(unit.held.fqns)
            out[id(handle.flat_param)] = unit.held
            if unit.original:
                for member, parameter in zip(unit.members, handle.flat_param._params, strict=True):
                    out[id(parameter)] = Held((member.fqn,), member.geometry)
        for raw, parameter in self.model.named_parameters():
            name = self.name(raw)
            if id(parameter) not in out and name not in managed:
                out[id(parameter)] = Held((name,))
        return out

    def parameters(self) -> set[str]:
        return super().parameters().union(*(unit.held.fqns for *_, unit in self._units()))

    def groups(self) -> list[Any]:
        found = {id(group): group for group in super().groups()}
        for module, handle, _ in self._units():
            for group in (handle.process_group, getattr(module, "_inter_node_pg", None)):
                if group is not None:
                    found.setdefault(id(group), group)
        return list(found.values())

    def _unit(self, raw_name: str, module: Any, handle: Any) -> _Unit:
        """The unit's record, stored on the flat parameter, so that later takes find the same
        objects."""
        flat = handle.flat_param
        cached: _Unit | None = getattr(flat, "_smckpt_unit", None)
        if cached is None:
            prefix = self.name(raw_name)
            cached = flat._smckpt_unit = _made(self, f"{prefix}." if prefix else "", module, handle)
        return cached


@lru_cache(maxsize=1024)  # one warning for each place
def _say_left_out(kind: str, at: str) -> None:
    log.warning(
        "%s (%s) overrides _save_to_state_dict, which smckpt does not call under FSDP1, where the "
        "module has no parameters: values that it adds to its parameters, buffers and extra state "
        "are not saved. Keep them in a buffer, or return them from get_extra_state",
        at or "the model",
        kind,
    )


@lru_cache(maxsize=1024)
def _say_not_called(at: str) -> None:
    log.warning(
        "%s has hooks that follow a load (register_load_state_dict_post_hook), which smckpt does "
        "not call under FSDP1, where the module has no whole parameters. After the load, do what "
        "they do, inside FullyShardedDataParallel.summon_full_params(model)",
        at or "the model",
    )


def _local_shard(handle: Any) -> torch.Tensor:
    flat: torch.Tensor = handle.flat_param
    if not handle.uses_sharded_strategy:
        return flat.data
    # FSDP sets it before the first forward; until then the flat parameter itself is the shard
    shard: torch.Tensor = getattr(flat, "_local_shard", flat.data)
    return shard


def _made(view: ModelView, dotted: str, module: Any, handle: Any) -> _Unit:
    flat = handle.flat_param
    fqns = [f"{dotted}{view.name(fqn)}" for fqn in flat._fqns]
    for fqn, contiguous in zip(fqns, flat._contiguities, strict=True):
        if not contiguous:
            raise StateError(
                f"{fqn} is not contiguous (channels last?): FSDP1 flattens it in memory order, "
                "which no saved shape describes",
                remedy="make it contiguous before wrapping, or use fully_shard",
            )
    segments: list[Segment] = []
    positions: dict[str, int] = {}
    names = iter(zip(fqns, flat._shapes, strict=True))
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if padding:
            segments.append(Segment(None, (), int(numel)))
            continue
        fqn, shape = next(names)
        positions[fqn] = len(segments)
        segments.append(Segment(fqn, tuple(shape), int(numel)))
    shard_numel = int(_local_shard(handle).numel())
    mesh = _mesh(module, handle)
    unit = FlatUnit(tuple(segments), shard_numel)
    low = mesh.coordinate(_rank())[1] * shard_numel
    members: dict[str, Member] = {}
    for fqn in fqns:
        start = unit.starts[positions[fqn]]
        a = min(max(start, low), low + shard_numel)
        b = max(min(start + segments[positions[fqn]].numel, low + shard_numel), a)
        members[fqn] = Member(fqn, FlatGeometry(unit, mesh, positions[fqn]), a - low, b - a)
    aliases = []
    for info in flat._shared_param_infos:  # other names of shared parameters
        alias, first = (
            dotted + view.name(f"{at}.{name}" if at else name)
            for at, name in (
                (info.module_name, info.param_name),
                (info.prim_module_name, info.prim_param_name),
            )
        )
        renamed = list(segments)
        renamed[positions[first]] = replace(renamed[positions[first]], fqn=alias)
        rule = FlatGeometry(FlatUnit(tuple(renamed), shard_numel), mesh, positions[first])
        aliases.append(Member(alias, rule, members[first].offset, members[first].numel))
    return _Unit(
        FlatGeometry(unit, mesh),
        tuple(members.values()),
        tuple(aliases),
        f"{dotted}_flat_param",
        bool(handle._use_orig_params),
    )


def _mesh(module: Any, handle: Any) -> Mesh:
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
    # This rank knows its row and column; the other groups of the grid are shifted by a constant.
    grid = tuple(shard + (replica - me) for replica in column for shard in ranks)
    if len(set(grid)) != len(grid) or min(grid) < 0 or max(grid) >= dist.get_world_size():
        raise StateError(
            f"shard group {ranks} and replication group {tuple(column)} are not a row and a column "
            "of a grid",
            remedy="build hybrid sharding from a device mesh (init_device_mesh)",
            rank=me,
        )
    return Mesh(names, (len(column), len(ranks)), grid)


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()
