"""FULL state, gathered by torch's own functions, which run collectives.

A rank that fails in between still takes part in the other collectives. Then all ranks raise its
error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from smckpt.errors import KeysMismatchError, UsageError
from smckpt.full.alike import refuse_own, sums_of
from smckpt.full.parallel import (
    FullWishes,
    check_full_load,
    full_state,
    is_transformed,
)
from smckpt.full.wire import Attempt, anywhere, from_all, gathers, in_rows, own_rank
from smckpt.layout.containers import items_of
from smckpt.layout.entries import Path
from smckpt.layout.strided import Box
from smckpt.state_dict.fsdp1 import Fsdp1View
from smckpt.state_dict.of_optimizers.bindings import Binding, bind, walked
from smckpt.state_dict.tags import (
    FullStateDict,
    OptimizerStateDict,
    ParamGroups,
    Tag,
    set_tag,
    tag_of,
)
from smckpt.state_dict.tensors import (
    dtensor_parts,
    flagged,
    flags_of,
    is_dtensor,
    is_flattening,
    is_value,
)
from smckpt.state_dict.views import ModelView


@dataclass(frozen=True)
class FullStateDictConfig:
    """torch's class of this name, with the field that SMP adds to it.

    rank0_only: rank 0 gets the state and the others an empty dict. offload_to_cpu: put it on the
    CPU. translate_on_save: give a tensor-parallel model's state in Hugging Face's names and shapes;
    False: in the model's own names. allow_equal_ranks: expert-parallel ranks may hold equal
    experts, which were all made from one (upcycled); otherwise one has loaded another's part.
    """

    offload_to_cpu: bool = False
    rank0_only: bool = False
    translate_on_save: bool = True
    allow_equal_ranks: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            if not isinstance(getattr(self, field.name), bool):
                raise UsageError(
                    f"{field.name}={getattr(self, field.name)!r}", remedy="pass True or False"
                )


def wishes_of(config: Any, translation: Mapping[str, Any]) -> FullWishes:
    """What a config asks for, of ours or torch's; None: rank 0 alone, on the device.

    Raises:
        UsageError: it is not a config of FULL state.
    """
    names = ("FullStateDictConfig", "FullOptimStateDictConfig")
    if config is not None and not any(kind.__name__ in names for kind in type(config).__mro__):
        raise UsageError(
            f"a {type(config).__name__} does not go with FULL",
            remedy="pass smckpt's FullStateDictConfig, or torch's",
        )
    return FullWishes(
        getattr(config, "rank0_only", True),
        getattr(config, "offload_to_cpu", False),
        getattr(config, "translate_on_save", True),
        equal_ranks=getattr(config, "allow_equal_ranks", False),
        **translation,
    )


def translated_or_none(
    view: ModelView, wishes: FullWishes, *, gathers: bool = True
) -> dict[str, Any] | None:
    """The full state of a tensor-parallel model; None for other models, which `full_model` gathers.

    The answer depends on arguments that only some ranks may pass. So the ranks that would gather
    together ask each other first. If one of them sees a tensor-parallel model, all meet and compare
    their arguments. If nothing is gathered (`gathers` false), this rank may be the only caller, and
    asks nobody.
    """
    transformed = anywhere(is_transformed(view, wishes), view.groups() if gathers else ())
    return full_state(view, wishes) if transformed else None


def check_together(view: ModelView, check: Callable[[], None]) -> None:
    """Check what this rank has. What one rank raises is raised on all that gather with it, since
    they would wait in a collective."""
    attempt = Attempt()
    attempt(check)
    attempt.settle(view.groups())


def check_load(view: ModelView, state_dict: Mapping[str, Any], wishes: FullWishes) -> None:
    """Refuse, for a tensor-parallel model, a full state that is not in its own names and shapes."""
    if anywhere(is_transformed(view, wishes), (None,)):  # rank 0 broadcasts to the whole job
        # the ranks may have taken the state in different ways
        check_full_load(view, state_dict, replace(wishes, translate=False))


def full_model(view: ModelView, wishes: FullWishes) -> dict[str, Any]:
    """The whole model by name; {} on ranks that get nothing."""
    out: dict[str, Any] = FullStateDict()
    attempt, groups = Attempt(out), view.groups()
    if isinstance(view, Fsdp1View):
        from torch.distributed.fsdp import (
            FullStateDictConfig,
            FullyShardedDataParallel,
            StateDictType,
        )

        # With shards already on the CPU, torch's offloading reads memory that it has freed.
        unit: Any = next(m for m in view.model.modules() if isinstance(m, FullyShardedDataParallel))
        to_cpu = wishes.offload_to_cpu and unit.compute_device.type != "cpu"
        config = FullStateDictConfig(rank0_only=wishes.rank0_only, offload_to_cpu=to_cpu)
        full = StateDictType.FULL_STATE_DICT
        with FullyShardedDataParallel.state_dict_type(view.model, full, config):
            raw: dict[str, Any] = type(view.model).state_dict(view.model)
    else:
        raw = attempt(lambda: view.tensors("SHARDED")) or {}
        attempt.settle(groups)
    parameters = view.parameters()
    for attempt.step, (name, value) in enumerate(raw.items()):
        whole = _gathered(value, wishes, attempt)
        if whole is not None or (value is None and _holds(wishes)):  # None: a module's extra state
            fqn = view.name(name)
            out[fqn] = whole
            if fqn in parameters and isinstance(whole, torch.Tensor):
                set_tag(whole, Tag(None, (fqn,), parameter=True))
    attempt.settle(groups)
    return out


def _gathered(value: Any, wishes: FullWishes, attempt: Attempt) -> Any:
    """The whole of a value; None on a rank that gets nothing or has failed."""
    if not isinstance(value, torch.Tensor):
        return value if _holds(wishes) else None
    if not gathers() and is_flattening(value):
        return value  # the live one
    if is_dtensor(value):
        attempt(lambda: _check_room(value))  # a failure frees what was gathered so far
        whole = value.full_tensor()  # type: ignore[attr-defined]
    else:
        attempt(lambda: _check_whole(value))
        whole = value.detach()
    if not _holds(wishes):
        return None
    return attempt(lambda: whole.cpu() if wishes.offload_to_cpu else whole)


def _holds(wishes: FullWishes) -> bool:
    """Whether this rank gets the whole state."""
    return not wishes.rank0_only or own_rank() == 0


def _check_whole(value: torch.Tensor) -> None:
    """Raise UsageError where a wrapper cut the tensor in a way that FULL cannot gather."""
    tag = tag_of(value)
    if tag is None or tag.geometry is None:
        return
    pieces = tag.geometry.pieces(own_rank())
    if pieces and pieces[0].box != Box.whole(pieces[0].shape):
        raise UsageError(
            f"{pieces[0].name} is cut by a wrapper whose parts FULL does not gather",
            remedy="save LOCAL or SHARDED, which any mesh can load",
        )


def _check_room(value: torch.Tensor) -> None:
    """Check for memory before torch gathers: a rank that failed inside would leave the others
    waiting."""
    local, _, _, shape = dtensor_parts(value)
    torch.empty((2, *shape), dtype=local.dtype, device=local.device)


def full_optimizer(
    view: ModelView, optimizer: torch.optim.Optimizer, wishes: FullWishes
) -> OptimizerStateDict:
    """The whole optimizer state by name, gathered tensor by tensor; its groups on every rank."""
    state: dict[str, Any] = {}
    placed: dict[Path, str] = {}
    attempt, all_groups = Attempt(state), view.groups()
    sharded: Any = attempt(lambda: bind(optimizer, "SHARDED", view).take())
    attempt.settle(all_groups)
    if isinstance(view, Fsdp1View):
        attempt(lambda: _refuse_odd(optimizer))
        attempt.settle(all_groups)
        state = _fsdp1_full_state(view, optimizer, wishes)
    else:
        on_mesh = _on_mesh(sharded["param_groups"].binding)
        sums = attempt(lambda: sums_of(sharded["state"], on_mesh))
        attempt.settle(all_groups)
        attempt(lambda: refuse_own(optimizer, sums or {}, all_groups))
        attempt.settle(all_groups)  # before torch gathers: ranks must ask for the same tensors
        for attempt.step, (fqn, slots) in enumerate(sharded["state"].items()):

            def gather(value: torch.Tensor, at: Path, fqn: str = fqn) -> Any:
                path = (fqn, *at)
                if fqn in on_mesh and value.dim() and not is_dtensor(value):
                    placed[path] = "whole"
                elif is_dtensor(value) and (how := _placed(value, on_mesh.get(fqn))):
                    placed[path] = how
                found = _gathered(value, wishes, attempt)
                return found if found is None else flagged(found, flags_of(value))

            gathered = walked(slots, gather)
            if _holds(wishes):
                state[fqn] = gathered
        attempt.settle(all_groups)
    groups: ParamGroups = sharded["param_groups"]  # on all ranks: each needs its learning rates
    if gathers():  # otherwise the tensors are live, as in SHARDED state
        groups.binding = replace(groups.binding, kind="FULL", holds=_holds(wishes), placed=placed)
    return OptimizerStateDict(state=FullStateDict(state), param_groups=groups)


def _on_mesh(binding: Binding) -> dict[str, torch.Tensor]:
    """By name, the parameters that a mesh divides."""
    return {
        name: parameter
        for index, parameter in enumerate(binding.parameters())
        if is_dtensor(parameter) and parameter.dim()
        for name in binding.names(parameter, index)
    }


def _placed(value: torch.Tensor, parameter: torch.Tensor | None) -> str:
    """As in a `SavedSlot`: how a mesh holds what an optimizer keeps for a parameter."""
    _, _, placements, shape = dtensor_parts(value)
    if parameter is not None and dtensor_parts(parameter)[2:] == (placements, shape):
        return ""
    return "@" + ",".join(str(getattr(each, "dim", -1)) for each in placements)


def _fsdp1_full_state(
    view: ModelView, optimizer: torch.optim.Optimizer, wishes: FullWishes
) -> dict[str, Any]:
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        FullyShardedDataParallel,
        StateDictType,
    )

    how = {"rank0_only": wishes.rank0_only, "offload_to_cpu": wishes.offload_to_cpu}
    kind = FullyShardedDataParallel.state_dict_type(
        view.model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(**how),
        FullOptimStateDictConfig(**how),
    )
    out: dict[str, Any] = {}
    numbers, tensors, flags = _of_all_ranks(view, optimizer)
    with kind:
        stock = stock_optimizer_state(optimizer)
        # One state tensor after the other: with use_orig_params=True torch gathers all state
        # tensors of a unit into one buffer and returns views of it, so each would have the bits of
        # the last.
        for wanted in tensors:
            state = {
                key: {slot: value for slot, value in slots.items() if slot == wanted}
                for key, slots in stock["state"].items()
            }
            try:
                gathered = FullyShardedDataParallel.optim_state_dict(
                    view.model, optimizer, {**stock, "state": state}
                )
            except (RuntimeError, AssertionError) as error:  # on all ranks: torch asked them all
                if not any(words in str(error) for words in _OF_SOME):
                    raise
                raise UsageError(
                    f"FULL does not gather an FSDP1 unit of which some parameters have no "
                    f"{wanted!r} of {type(optimizer).__name__}: {error}",
                    remedy="save LOCAL or SHARDED, or use fully_shard",
                ) from error
            for fqn, slots in gathered.get("state", {}).items():
                whole = out.setdefault(view.name(fqn), {})
                for slot, value in slots.items():
                    whole[slot] = value
                    if isinstance(value, torch.Tensor):
                        whole[slot] = flagged(value.clone(), flags.get(slot, ""))
    for fqn, slots in numbers.items() if _holds(wishes) else ():
        whole = out.setdefault(fqn, {})
        for slot, (value, device) in slots.items():
            whole[slot] = value
            if isinstance(value, torch.Tensor):
                there = value if wishes.offload_to_cpu else value.to(device)
                whole[slot] = flagged(there, flags.get(slot, ""))
    return out


# of torch's errors about state that a part of a unit's parameters has
_OF_SOME = ("not in the optimizer state", "Manually calculated _sharded_numel_padded")


def _of_all_ranks(
    view: ModelView, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, dict[str, Any]], list[str], dict[str, str]]:
    """The numbers that all ranks keep for each parameter, with their devices; the names of the
    tensors that torch gathers, in one order; and what tensors of a name are to autograd. Ranks
    without elements of a parameter do not count, if others have some.

    Raises:
        UsageError: ranks have different numbers, of a parameter or among the options of a group.
    """
    binding = bind(optimizer, "SHARDED", view)
    mine: dict[str, dict[str, Any]] = {}
    tensors: set[str] = set()
    flags: dict[str, str] = {}
    for index, parameter in enumerate(binding.parameters()):
        for slot, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and (flag := flags_of(value)):
                flags[slot] = flag
            if isinstance(value, torch.Tensor) and value.dim():
                tensors.add(slot)
            elif not binding.elsewhere(parameter):
                device = value.device.type if isinstance(value, torch.Tensor) else ""
                value = value.detach().cpu() if isinstance(value, torch.Tensor) else value
                for fqn in binding.names(parameter, index):
                    mine.setdefault(fqn, {})[slot] = value, device
    options = {
        f"param_groups.{number}": {k: (v, "") for k, v in group.items() if k != "params"}
        for number, group in enumerate(optimizer.param_groups)
    }
    everyone = from_all((mine, options, sorted(tensors), flags))
    numbers: dict[str, dict[str, Any]] = {}
    for rank, (theirs, groups, _, _) in enumerate(everyone):
        for name, slots in {**theirs, **groups}.items():
            for slot, found in slots.items():
                first = numbers.setdefault(name, {}).setdefault(slot, found)
                if repr(first) != repr(found):
                    raise UsageError(
                        f"FULL does not gather {slot!r} of {type(optimizer).__name__} under FSDP1, "
                        f"for {name}: rank {rank} has {found[0]!r}, an earlier one {first[0]!r}",
                        remedy="save LOCAL or SHARDED, or use fully_shard",
                    )
    names = sorted({slot for _, _, slots, _ in everyone for slot in slots})
    flags = {slot: flag for *_, theirs in everyone for slot, flag in theirs.items()}
    return {k: v for k, v in numbers.items() if k not in options}, names, flags


def _refuse_odd(optimizer: torch.optim.Optimizer) -> None:
    """Refuse state that torch does not gather for FSDP1.

    Raises:
        UsageError: it is not shaped like its flat parameter, or belongs to no parameter.
    """
    for parameter, slots in optimizer.state.items():
        odd = [] if isinstance(parameter, torch.Tensor) else [parameter]
        for slot, value in slots.items() if isinstance(slots, Mapping) else ():
            shapes = [()] if not isinstance(parameter, torch.Tensor) else [(), parameter.shape]
            if items_of(value) is not None or (
                isinstance(value, torch.Tensor) and (is_value(value) or value.shape not in shapes)
            ):
                odd.append(slot)
        if odd:
            raise UsageError(
                f"FULL does not gather {odd[0]!r} of {type(optimizer).__name__} under FSDP1, which "
                "is not shaped like its parameter",
                remedy="save LOCAL or SHARDED, or use fully_shard",
            )


def stock_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What torch's own `optimizer.state_dict()` gives, also inside a block."""
    numbers: dict[int, int] = {}
    groups = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            numbers.setdefault(id(parameter), len(numbers))
        ids = [numbers[id(p)] for p in group["params"]]
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": ids})
    return {
        "state": {numbers.get(id(p), p): slots for p, slots in optimizer.state.items()},
        "param_groups": groups,
    }


def load_full_model(view: ModelView, state_dict: Mapping[str, Any], strict: bool) -> Any:
    """Put a full state into the model. Rank 0 holds it and broadcasts."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    attempt = Attempt()
    if strict and own_rank() == 0:
        attempt(lambda: _refuse_missing(view, state_dict))
    attempt.settle()  # torch would raise on rank 0 alone, and the others wait for its broadcast
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=gathers(), strict=strict)
    # torch broadcasts the memory of rank 0's tensor into that of a contiguous one: the elements of
    # a transposed one, or of a `channels_last`, would come in another order, and it has no such
    # view of a conjugated one.
    given = {
        name: in_rows(value) if isinstance(value, torch.Tensor) and gathers() else value
        for name, value in state_dict.items()
    }
    with _own_methods(view.model):
        keys = attempt(lambda: set_model_state_dict(view.model, given, options=options))
    attempt.settle()
    return keys


def _refuse_missing(view: ModelView, given: Mapping[str, Any]) -> None:
    if isinstance(view, Fsdp1View):
        return  # its own hooks decide its names
    names = view.tensors("SHARDED").keys()
    if missing := sorted(names - {view.name(name) for name in given}):
        raise KeysMismatchError(
            f"the state dict lacks {missing[:12]}",
            remedy="load the state of the same model, or pass strict=False",
        )


@contextmanager
def _own_methods(model: nn.Module) -> Iterator[None]:
    """Undoes the replacement of the model's `state_dict` and `load_state_dict` for a block. torch
    calls the latter by keywords; one of the user's class need not have those names."""
    names = ("state_dict", "load_state_dict")
    kept = {n: model.__dict__.pop(n) for n in names if n in model.__dict__}
    own: Any = type(model).load_state_dict
    if own is not nn.Module.load_state_dict:

        def by_position(state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
            return own(model, state_dict, strict, **({"assign": True} if assign else {}))

        model.__dict__["load_state_dict"] = by_position
    try:
        yield
    finally:
        model.__dict__.pop("load_state_dict", None)
        model.__dict__.update(kept)
