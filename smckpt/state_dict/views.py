"""Views of wrapped models: FSDP2, DDP and plain modules; FSDP1 has a module of its own (`fsdp1`).

A *view* tells which tensors the model holds on this rank, their fully qualified names, the part of
the whole that each of them is, and how to give state back. All tensors are live, and no collective
runs. `register_model_view` adds a wrapper (docs/extending.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from smckpt.errors import StateError
from smckpt.layout.geometry import Geometry, MeshGeometry
from smckpt.layout.mesh import Mesh, Placement
from smckpt.state_dict.modes import computed_names, give_back, own_state_dict, read_by
from smckpt.state_dict.tags import Tag, plain_tag, set_model, set_tag
from smckpt.state_dict.tensors import detached, dtensor_parts, is_dtensor, is_value


@dataclass(frozen=True)
class Member:
    """A tensor inside a flat parameter: elements [offset, offset + numel) of the local shard."""

    fqn: str
    geometry: Geometry
    offset: int
    numel: int


@dataclass(frozen=True)
class Held:
    """The geometry of a parameter object that an optimizer may hold.

    geometry: of its local data; None for a DTensor, which has its own, and for a plain tensor.
    members: the parts of a parameter that holds several.
    """

    fqns: tuple[str, ...]
    geometry: Geometry | None = None
    members: tuple[Member, ...] = ()


class ModelView:
    """The view of one model during a block. This class is the view of a plain module. A subclass
    for a wrapper overrides `sees`, and whatever else differs.

    components: the attribute names that the wrapper puts into the names of tensors.
    """

    components: ClassVar[tuple[str, ...]] = ("_orig_mod", "_checkpoint_wrapped_module")

    @classmethod
    def sees(cls, model: nn.Module) -> bool:
        """Whether this is the view for the model. Registered views are asked first, the latest
        before earlier ones."""
        return True

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.computed: set[str] = set()  # names in the last `tensors` whose values modules computed
        self._taken: dict[str, Any] = {}  # the model's own state dict of the last `tensors`

    def name(self, raw: str) -> str:
        """The fully qualified name, without any wrapper's components.

        Args:
            raw: a name from `model.state_dict()` or `named_parameters()`.
        """
        return _without(raw, self.components)

    def geometry(self, fqn: str, tensor: torch.Tensor) -> Geometry | None:
        """The geometry of the local `tensor`. None for a DTensor, which has its own, and for a
        plain tensor, which is per-rank.

        Args:
            fqn: of a parameter or a buffer.
        """
        return None

    def tensors(self, kind: str) -> dict[str, Any]:
        """Name → tagged live tensor, or a value that a module computes, such as extra state.

        Raises:
            StateError: two tensors have one name.
        """
        raw = self._taken = own_state_dict(self.model)
        self.computed = {self.name(name) for name in computed_names(self.model, raw)}
        out: dict[str, Any] = {}
        for name, value in raw.items():
            fqn = self.name(name)
            if fqn in out:
                raise StateError(
                    f"two tensors of the model have the name {fqn!r}",
                    remedy="rename the module that ends in a wrapper's name",
                )
            if isinstance(value, torch.Tensor) and not is_value(value):
                is_parameter = isinstance(value, nn.Parameter)
                value = detached(value)
                if value.is_meta:
                    set_model(value, self.model)
                rule = self.geometry(fqn, value)
                plain = plain_tag(kind, fqn, is_parameter)
                set_tag(value, plain if rule is None else Tag(kind, (fqn,), rule))
            out[fqn] = value
        return out

    def give_back(self, given: Mapping[str, Any]) -> None:
        """Give modules the values in `given` that they computed."""
        give_back(self.model, self._taken, given, self.name)

    def reads(self) -> Callable[[Any], bool] | None:
        """The names that modules read by code of their own, if there are such modules."""
        return read_by(self.model, self.name)

    def hooked(self) -> list[str]:
        """The raw names of modules that have hooks that follow a load."""
        named = self.model.named_modules()
        return [name for name, module in named if module._load_state_dict_post_hooks]

    def held(self) -> dict[int, Held]:
        """id of each parameter that an optimizer may hold → its `Held`."""
        out: dict[int, Held] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if id(parameter) not in out:  # a shared parameter has one state, under its first name
                fqn = self.name(name)
                out[id(parameter)] = Held((fqn,), self.geometry(fqn, parameter))
        return out

    def parameters(self) -> set[str]:
        """The names of all parameters."""
        named = self.model.named_parameters(remove_duplicate=False)
        return {self.name(name) for name, _ in named}

    def trainable(self) -> set[str]:
        """The names of those with `requires_grad`."""
        named = self.model.named_parameters(remove_duplicate=False)
        return {self.name(name) for name, parameter in named if parameter.requires_grad}

    def groups(self) -> list[Any]:
        """This rank's process groups over which the model is sharded."""
        found: dict[int, Any] = {}
        for parameter in self.model.parameters():
            if is_dtensor(parameter):
                for group in dtensor_parts(parameter)[1].get_all_groups():
                    found.setdefault(id(group), group)
        return list(found.values())


@functools.lru_cache(maxsize=1 << 16)
def _without(name: str, components: tuple[str, ...]) -> str:
    return ".".join(part for part in name.split(".") if part not in components)


class Fsdp2View(ModelView):
    """FSDP2: parameters are DTensors, which have their own geometry."""

    @classmethod
    def sees(cls, model: nn.Module) -> bool:
        from torch.distributed.fsdp import FSDPModule

        return any(isinstance(m, FSDPModule) for m in model.modules())

    def held(self) -> dict[int, Held]:
        """Reshard first: after a forward without backward, modules may hold whole parameters."""
        from torch.distributed.fsdp import FSDPModule

        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return super().held()


class DdpView(ModelView):
    """DistributedDataParallel: every rank holds all parameters; buffers are per-rank."""

    @classmethod
    def sees(cls, model: nn.Module) -> bool:
        from torch.nn.parallel import DistributedDataParallel

        return isinstance(model, DistributedDataParallel)

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        ignored = {f"module.{name}" for name in getattr(model, "parameters_to_ignore", ())}
        named = model.named_parameters(remove_duplicate=False)
        self._replicated = {self.name(name) for name, _ in named if name not in ignored}
        self._known = _replicas_of(model)

    def name(self, raw: str) -> str:
        return super().name(raw).removeprefix("module.")

    def geometry(self, fqn: str, tensor: torch.Tensor) -> Geometry | None:
        if fqn not in self._replicated:
            return None
        return self._known.geometry(fqn, tuple(tensor.shape))


class _Replicas:
    """A DDP model's geometries, stored on the model. They are the same objects at every take, so a
    selector detects an unchanged state at once."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.mesh = Mesh(("replicate",), (len(ranks),), ranks)
        self._made: dict[Any, MeshGeometry] = {}

    def geometry(self, fqn: str, shape: tuple[int, ...]) -> MeshGeometry:
        if (fqn, shape) not in self._made:
            self._made[fqn, shape] = MeshGeometry(fqn, shape, self.mesh, (Placement("replicate"),))
        return self._made[fqn, shape]


def _replicas_of(model: Any) -> _Replicas:
    import torch.distributed as dist

    ranks = tuple(sorted(dist.get_process_group_ranks(model.process_group)))
    known: _Replicas | None = model.__dict__.get("_smckpt_replicas")
    if known is None or known.mesh.ranks != ranks:
        known = model.__dict__["_smckpt_replicas"] = _Replicas(ranks)
    return known
