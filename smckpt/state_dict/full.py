"""FULL state: gathered, by torch's own means, which run collectives.

A rank that fails in between goes on taking part in them, and then all raise what it raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from smckpt.errors import KeysMismatchError, UsageError
from smckpt.state_dict.gather import Attempt, anywhere
from smckpt.state_dict.initial import make_slots
from smckpt.state_dict.model import ModelView, view_of
from smckpt.state_dict.names import canonical
from smckpt.state_dict.optimizers import Binding, bind, fill_groups
from smckpt.state_dict.private import dtensor_parts, fsdp1_units, is_dtensor, is_fsdp1
from smckpt.state_dict.tags import FullStateDict, OptimizerStateDict, ParamGroups

__all__ = [
    "FullStateDictConfig",
    "check_config",
    "check_load",
    "check_optimizer",
    "full_model",
    "full_optimizer",
    "gathers",
    "load_full_model",
    "load_full_optimizer",
    "translated_or_none",
]


@dataclass(frozen=True)
class FullStateDictConfig:
    """How FULL state comes out; torch's class of this name, and the field that SMP adds to it.

    rank0_only: rank 0 gets it and the others an empty dict. offload_to_cpu: on the CPU.
    translate_on_save: that of a tensor-parallel model in Hugging Face's names and shapes; False:
    in the model's own names.
    """

    offload_to_cpu: bool = False
    rank0_only: bool = False
    translate_on_save: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            if not isinstance(getattr(self, field.name), bool):
                raise UsageError(
                    f"{field.name}={getattr(self, field.name)!r}", remedy="pass True or False"
                )


def check_config(config: Any) -> None:
    """Raises UsageError: no config of FULL state, of ours or torch's."""
    names = ("FullStateDictConfig", "FullOptimStateDictConfig")
    if config is not None and not any(kind.__name__ in names for kind in type(config).__mro__):
        raise UsageError(
            f"a {type(config).__name__} does not go with FULL",
            remedy="pass smckpt's FullStateDictConfig, or torch's",
        )


def _wishes(config: Any) -> tuple[bool, bool]:
    """(rank 0 only, to the CPU)."""
    return getattr(config, "rank0_only", True), getattr(config, "offload_to_cpu", False)


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def translated_or_none(
    model: nn.Module, config: Any, translation: Mapping[str, Any], *, gathers: bool = True
) -> dict[str, Any] | None:
    """The full state of a tensor-parallel model; None for others, which `full_model` gathers.

    What a rank passes can make the difference, so those that would gather together ask each other
    first: where one sees a tensor-parallel model all meet, and what they pass is compared. With
    `gathers` false they would not, and a rank may be alone here.

    Here and below this room calls on `translate`, which is built on it.
    """
    from smckpt.translate.live import FullWishes, full_state, is_transformed

    translate = getattr(config, "translate_on_save", True)
    wishes = FullWishes(*_wishes(config), translate, **translation)
    transformed = anywhere(is_transformed(model, wishes), _groups_of(model) if gathers else ())
    return full_state(model, wishes) if transformed else None


def check_optimizer(model: nn.Module, translation: Mapping[str, Any]) -> None:
    """Refuse the full optimizer state where it would be that of one tensor-parallel rank."""
    from smckpt.translate.live import check_full_optimizer

    attempt = Attempt()
    attempt(lambda: check_full_optimizer(model, translation["parallel_state"]))
    attempt.settle(_groups_of(model))


def check_load(
    model: nn.Module, state_dict: Mapping[str, Any], translation: Mapping[str, Any]
) -> None:
    """Refuse, for a tensor-parallel model, a full state that is not in its own names and shapes."""
    from smckpt.translate.live import FullWishes, check_full_load, is_transformed

    wishes = FullWishes(True, False, False, **translation)
    if anywhere(is_transformed(model, wishes), (None,)):  # rank 0 broadcasts to the whole job
        check_full_load(model, state_dict, wishes)


def full_model(model: nn.Module, config: Any) -> dict[str, Any]:
    """The whole model by canonical name; {} on the ranks that shall hold nothing."""
    rank0_only, to_cpu = _wishes(config)
    out: dict[str, Any] = FullStateDict()
    attempt, groups = Attempt(out), _groups_of(model)
    if is_fsdp1(model):
        raw = _fsdp1_full(model, rank0_only, to_cpu)
    else:
        raw = attempt(lambda: type(model).state_dict(model)) or {}
        attempt.settle(groups)
    ddp = type(model).__name__ == "DistributedDataParallel"
    for attempt.step, (name, value) in enumerate(raw.items()):
        whole = _gathered(value, rank0_only, to_cpu, attempt)
        if whole is not None:
            out[canonical(name, ddp=ddp)] = whole
    attempt.settle(groups)
    return out


def _groups_of(model: nn.Module) -> list[Any]:
    """This rank's process groups of all that the model's shards are spread over: what gathers it
    runs over these anyway."""
    found: dict[int, Any] = {}
    for _, module, handle in fsdp1_units(model):
        for group in (handle.process_group, getattr(module, "_inter_node_pg", None)):
            if group is not None:
                found.setdefault(id(group), group)
    for parameter in model.parameters():
        if is_dtensor(parameter):
            for group in dtensor_parts(parameter)[1].get_all_groups():
                found.setdefault(id(group), group)
    return list(found.values())


def _gathered(value: Any, rank0_only: bool, to_cpu: bool, attempt: Attempt) -> Any:
    """The whole of a value; None where it is not to be held, or this rank has failed."""
    if not isinstance(value, torch.Tensor):
        return None if rank0_only and _rank() else value
    if is_dtensor(value):
        attempt(lambda: _check_room(value))  # which frees, where there is none
        whole = value.full_tensor()  # type: ignore[attr-defined]
    else:
        whole = value.detach()
    if rank0_only and _rank():
        return None
    return attempt(lambda: whole.cpu() if to_cpu else whole)


def _check_room(value: torch.Tensor) -> None:
    """Whether there is memory for torch's gathering, which would leave the others waiting in it."""
    local, _, _, shape = dtensor_parts(value)
    torch.empty((2, *shape), dtype=local.dtype, device=local.device)


def _fsdp1_full(model: Any, rank0_only: bool, to_cpu: bool) -> dict[str, Any]:
    from torch.distributed.fsdp import (
        FullStateDictConfig,
        FullyShardedDataParallel,
        StateDictType,
    )

    # Where the shards are on the CPU already, torch's offloading reads memory that it has freed.
    unit: Any = next(m for m in model.modules() if isinstance(m, FullyShardedDataParallel))
    to_cpu = to_cpu and unit.compute_device.type != "cpu"
    config = FullStateDictConfig(rank0_only=rank0_only, offload_to_cpu=to_cpu)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        raw: dict[str, Any] = type(model).state_dict(model)
    return raw


def full_optimizer(
    view: ModelView, optimizer: torch.optim.Optimizer, config: Any
) -> OptimizerStateDict:
    """The whole optimizer state by name, gathered tensor by tensor; its groups on every rank."""
    rank0_only, to_cpu = _wishes(config)
    state: dict[str, Any] = {}
    attempt, all_groups = Attempt(state), _groups_of(view.model)
    sharded: Any = attempt(lambda: bind(optimizer, "SHARDED", view).take())
    attempt.settle(all_groups)
    if is_fsdp1(view.model):
        state = _fsdp1_full_state(view.model, optimizer, rank0_only, to_cpu)
    else:
        for attempt.step, (fqn, slots) in enumerate(sharded["state"].items()):
            whole = {k: _gathered(v, rank0_only, to_cpu, attempt) for k, v in slots.items()}
            if not (rank0_only and _rank()):
                state[fqn] = whole
        attempt.settle(all_groups)
    groups: ParamGroups = sharded["param_groups"]  # on all ranks: each is to get its rates back
    whole_state = FullStateDict(state)
    whole_state.holds = not (rank0_only and _rank())
    if gathers():  # else it is live, as SHARDED state is
        groups.binding = replace(groups.binding, kind="FULL")
    return OptimizerStateDict(state=whole_state, param_groups=groups)


def _fsdp1_full_state(
    model: Any, optimizer: torch.optim.Optimizer, rank0_only: bool, to_cpu: bool
) -> dict[str, Any]:
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        FullyShardedDataParallel,
        StateDictType,
    )

    kind = FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=rank0_only, offload_to_cpu=to_cpu),
        FullOptimStateDictConfig(rank0_only=rank0_only, offload_to_cpu=to_cpu),
    )
    out: dict[str, Any] = {}
    with kind, _stock_optimizers():
        stock = optimizer.state_dict()
        # Slot by slot: with use_orig_params=True torch gathers all slots of a unit into one
        # buffer and hands out views of it, so that each would have the bits of the last.
        for wanted in _slots_of_all_ranks(stock["state"]):
            state = {
                key: {slot: value for slot, value in slots.items() if slot == wanted}
                for key, slots in stock["state"].items()
            }
            gathered = FullyShardedDataParallel.optim_state_dict(
                model, optimizer, {**stock, "state": state}
            )
            for fqn, slots in gathered.get("state", {}).items():
                its = out.setdefault(canonical(fqn), {})
                for slot, value in slots.items():
                    its[slot] = value.clone() if isinstance(value, torch.Tensor) else value
    return out


def _slots_of_all_ranks(state: Mapping[Any, Mapping[str, Any]]) -> list[str]:
    """In one order on all ranks; a rank without elements of a parameter has no slots of it."""
    import torch.distributed as dist

    mine = sorted({slot for slots in state.values() for slot in slots})
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return sorted({slot for slots in everyone for slot in slots})


class _stock_optimizers:
    """torch's gathering calls `optimizer.state_dict()` itself and wants the stock answer."""

    def __enter__(self) -> None:
        kind = torch.optim.Optimizer
        self._patched = kind.state_dict
        kind.state_dict = _stock_state_dict  # type: ignore[method-assign,assignment]

    def __exit__(self, *_: object) -> None:
        torch.optim.Optimizer.state_dict = self._patched  # type: ignore[method-assign]


def _stock_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    numbers: dict[int, int] = {}
    groups = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            numbers.setdefault(id(parameter), len(numbers))
        ids = [numbers[id(p)] for p in group["params"]]
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": ids})
    return {
        "state": {numbers[id(p)]: slots for p, slots in optimizer.state.items()},
        "param_groups": groups,
    }


def load_full_model(model: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> Any:
    """Put a full state, held by rank 0, into the model; rank 0 broadcasts."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    attempt = Attempt()
    if strict and _rank() == 0:
        attempt(lambda: _refuse_missing(model, state_dict))
    attempt.settle()  # torch raises on rank 0 alone, and the others wait for its broadcast
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=gathers(), strict=strict)
    with _own_methods(model):
        keys = attempt(lambda: set_model_state_dict(model, dict(state_dict), options=options))
    attempt.settle()
    return keys


def _refuse_missing(model: nn.Module, given: Mapping[str, Any]) -> None:
    if is_fsdp1(model):
        return  # its names depend on hooks of its own
    names = view_of(model).tensors("SHARDED").keys()
    if missing := sorted(names - {canonical(name) for name in given}):
        raise KeysMismatchError(
            f"the state dict lacks {missing[:12]}",
            remedy="load the state of the same model, or pass strict=False",
        )


class _own_methods:
    """Without the block's replacements of `state_dict` and `load_state_dict` on the model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __enter__(self) -> None:
        names = ("state_dict", "load_state_dict")
        self._kept = {n: self._model.__dict__.pop(n) for n in names if n in self._model.__dict__}

    def __exit__(self, *_: object) -> None:
        self._model.__dict__.update(self._kept)


def gathers() -> bool:
    """Whether FULL state is gathered; without a process group its tensors are the live ones."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def load_full_optimizer(
    view: ModelView, optimizer: torch.optim.Optimizer, given: Mapping[str, Any]
) -> None:
    """Put a full optimizer state, held by rank 0, into the live one; rank 0 broadcasts."""
    import torch.distributed as dist

    whole: dict[str, Any] = dict(given)
    boxed: list[Any] = [_outline(whole)]
    if gathers():
        dist.broadcast_object_list(boxed, src=0)
    outline = boxed[0]
    attempt = Attempt()
    binding: Any = attempt(lambda: bind(optimizer, "SHARDED", view))
    owners: Any = attempt(lambda: _rooms(binding, outline["state"]))
    live: Any = attempt(lambda: binding.take()["state"])
    attempt.settle()
    for fqn, slots in outline["state"].items():
        for slot, described in slots.items():
            value = _from_rank0(whole, fqn, slot, described)
            if not isinstance(value, torch.Tensor):
                optimizer.state[owners[fqn]][slot] = value
            elif fqn in live:  # else this rank holds nothing of the parameter
                _fill(live[fqn][slot], value, fqn)
    fill_groups(binding, outline["param_groups"])


def _rooms(binding: Binding, described: Mapping[str, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Make the live slots those that are described, empty; the parameter of each name.

    Raises:
        KeysMismatchError: the optimizer has no parameter of some name.
        StateError: there is no telling how a slot is to be made.
    """
    owners: dict[str, torch.Tensor] = {}
    state = binding.optimizer.state
    for index, parameter in enumerate(binding.parameters()):
        names = binding.names(parameter, index)
        owners.update(dict.fromkeys(names, parameter))
        slots = {slot: how for name in names for slot, how in described.get(name, {}).items()}
        if not slots:
            state.pop(parameter, None)
            continue
        wanted = {slot: (how[1], how[0]) for slot, how in slots.items() if how[0] != "value"}
        make_slots(binding.optimizer, parameter, wanted, flat=binding.flat(parameter))
        for slot, (dtype, _) in wanted.items():
            state[parameter][slot] = state[parameter][slot].to(dtype)  # as it was saved
    if unknown := sorted(map(str, described.keys() - owners.keys())):
        raise KeysMismatchError(
            f"the optimizer has no parameter {unknown[:12]}, whose state is to be loaded",
            remedy="load the state of an optimizer over the same parameters",
        )
    return owners


def _fill(target: torch.Tensor, value: torch.Tensor, fqn: str) -> None:
    """This rank's part of a whole tensor into the live one."""
    from smckpt.state_dict.select import geometry_of

    local, geometry = geometry_of(target, fqn, _rank())
    for piece in geometry.pieces(_rank()):
        box = tuple(
            slice(o, o + n) for o, n in zip(piece.box.offsets, piece.box.sizes, strict=True)
        )
        torch.as_strided(
            local, piece.box.sizes, piece.strides, local.storage_offset() + piece.start
        ).copy_(value[box])


def _outline(given: Mapping[str, Any]) -> dict[str, Any]:
    """What all ranks must know before the tensors come."""
    state = {
        fqn: {
            slot: (tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else ("value", v)
            for slot, v in slots.items()
        }
        for fqn, slots in given.get("state", {}).items()
    }
    return {"state": state, "param_groups": [dict(g) for g in given.get("param_groups", [])]}


def _from_rank0(whole: Mapping[str, Any], fqn: str, slot: str, described: Any) -> Any:
    import torch.distributed as dist

    if described[0] == "value":
        return described[1]
    shape, dtype = described
    held = _rank() == 0
    tensor = whole["state"][fqn][slot].contiguous() if held else torch.empty(shape, dtype=dtype)
    if gathers():
        if dist.get_backend() == "nccl":
            tensor = tensor.cuda()
        dist.broadcast(tensor, src=0)
    return tensor
