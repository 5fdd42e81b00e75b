"""What a block calls for FULL state, and for torch's own state of an FSDP1 model.

Under a member of torch's `StateDictType`, `sm_state_dict_type` stands in the place of
`FSDP.state_dict_type`. So an FSDP1 model's state is what torch gives: other models'
`load_state_dict` and torch's gather helpers take it. Collectives run for it, under SHARDED too.

To load a full optimizer state, rank 0 sends its outline first, by which all ranks make room, and
then tensor after tensor. Each rank keeps its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from smckpt.errors import KeysMismatchError, StateError, UsageError
from smckpt.full.gathered import (
    FullStateDictConfig,
    check_load,
    check_together,
    full_model,
    full_optimizer,
    load_full_model,
    stock_optimizer_state,
    translated_or_none,
)
from smckpt.full.parallel import FullWishes, check_full_optimizer
from smckpt.full.wire import Attempt, Wire, gathers, in_rows, own_rank
from smckpt.layout.containers import items_of, like
from smckpt.layout.entries import Path, dotted
from smckpt.layout.strided import Piece, execute, meet
from smckpt.state_dict.context import FULL, Taker
from smckpt.state_dict.of_optimizers.bindings import Binding, bind, walked
from smckpt.state_dict.of_optimizers.groups import fill_groups
from smckpt.state_dict.of_optimizers.optimizers import in_common, of_no_parameter, put
from smckpt.state_dict.of_optimizers.own_methods import hand_over, hand_to_hooks
from smckpt.state_dict.of_optimizers.slots import SavedSlot, room
from smckpt.state_dict.parts import refuse_gathered
from smckpt.state_dict.select import Selector
from smckpt.state_dict.tags import FullStateDict, ModelStateDict, Tag, plain_tag, set_tag
from smckpt.state_dict.tensors import flags_of, is_dtensor, is_value, order_of
from smckpt.state_dict.views import ModelView


def put_full_optimizer(
    view: ModelView, optimizer: torch.optim.Optimizer, given: Mapping[str, Any]
) -> None:
    """As `load_full_optimizer`, with what the optimizer's own methods add."""
    load_full_optimizer(view, optimizer, given)
    asker = getattr(_binding_of(given), "asker", None)
    hand_over(replace(bind(optimizer, "SHARDED", view), asker=asker), given)


def load_full_optimizer(
    view: ModelView, optimizer: torch.optim.Optimizer, given: Mapping[str, Any]
) -> None:
    """Put a full optimizer state into the live one. Rank 0 holds it and broadcasts."""
    import torch.distributed as dist

    whole: dict[str, Any] = dict(given)
    boxed: list[Any] = [_outline(whole)]
    if gathers():
        dist.broadcast_object_list(boxed, src=0)
    outline = boxed[0]
    attempt = Attempt()
    binding: Any = attempt(lambda: bind(optimizer, "SHARDED", view))
    partly = getattr(_binding_of(given), "partly", False)
    attempt(lambda: _rooms(binding, outline, partly))
    live: Any = attempt(lambda: binding.take()["state"])
    attempt.settle()
    wire = Wire()
    for fqn, slots in outline["state"].items():
        for at, coming in _leaves(slots):
            target = _leaf(live.get(fqn), at)
            if not gathers() and target is _leaf(whole["state"][fqn], at):
                continue  # it is the live one

            def value(fqn: Any = fqn, at: Path = at, coming: _Coming = coming) -> torch.Tensor:
                if own_rank() == 0:
                    return wire.placed(in_rows(_leaf(whole["state"][fqn], at)), coming.device)
                return wire.room(coming.dtype, coming.shape, coming.device)

            # a rank that fails goes on sending and receiving, or the others would wait
            sent = attempt(value)
            wire.share(sent, coming.dtype, coming.shape, coming.device)
            if target is not None and sent is not None:  # else this rank holds nothing of it
                attempt(partial(_fill, target, str(fqn), sent))
    attempt.settle()
    fill_groups(binding, outline["param_groups"])


def _fill(target: torch.Tensor, fqn: str, value: torch.Tensor) -> None:
    """Copy what this rank holds of a whole tensor into its own."""
    selection = Selector(own_rank()).select({fqn: target})
    local, geometry = selection.tensors[0], selection.entries[0].geometry
    memory = (
        local
        if local.is_contiguous()
        else torch.empty_like(local, memory_format=torch.contiguous_format)
    )
    for piece in geometry.pieces(own_rank()):
        copy = meet(Piece.whole(piece.name, piece.shape), piece)
        if copy is not None:
            execute(copy, value, memory)
    if memory is not local:
        local.copy_(memory)


def _binding_of(given: Mapping[str, Any]) -> Binding | None:
    return getattr(given.get("param_groups"), "binding", None)


def _rooms(binding: Binding, outline: Mapping[str, Any], partly: bool) -> None:
    """Give the live optimizer the slots of the outline, with empty tensors.

    partly: keep its other slots, also those that it has from the start.

    Raises:
        KeysMismatchError: the optimizer has no parameter of some name.
        StateError: nothing says how to make a state tensor.
    """
    known: set[Any] = set()
    outlined, state = outline["state"], binding.optimizer.state
    named = {name for group in outline["param_groups"] for name in group.get("params", ())}
    for index, (parameter, group) in enumerate(binding.members()):
        names = binding.names(parameter, index)
        known.update(names)
        found = [outlined[name] for name in names if name in outlined]
        if not found:
            if not partly:
                state.pop(parameter, None)
            continue
        wanted = _wanted(found[0], parameter)
        if partly:
            wanted, _ = in_common(binding.optimizer, group, parameter, wanted)
        put(state, parameter, wanted, room(binding, parameter, group), not partly)
    others = outlined.keys() - known
    if unknown := sorted(
        str(key)
        for key in others
        if (key in named or not named) and not of_no_parameter(binding, key, outlined[key])
    ):
        raise KeysMismatchError(
            f"the optimizer has no parameter {unknown[:12]}, but the state to load does",
            remedy="load the state of an optimizer over the same parameters",
        )
    spares = [k for k in state if not isinstance(k, torch.Tensor) and k not in others]
    for spare in () if partly else spares:
        del state[spare]
    for other in others:
        put(state, other, _wanted(outlined[other], None), room(None, None, {}))


def _wanted(outlined: Any, parameter: torch.Tensor | None) -> Any:
    """The outline with a `SavedSlot` for each tensor. A whole tensor that is not shaped like its
    DTensor parameter comes to all ranks."""
    if isinstance(outlined, _Coming):
        mesh = parameter is not None and is_dtensor(parameter) and outlined.shape
        shape = tuple(outlined.shape)
        on_mesh = outlined.placed[:1] == "@"
        local = None if on_mesh or (mesh and not outlined.placed) else shape
        return SavedSlot(
            getattr(torch, outlined.dtype),
            shape,
            local,
            tuple(d if d >= 0 else None for d in map(int, outlined.placed[1:].split(",")))
            if on_mesh
            else None,
            order=outlined.order,
            flags=outlined.flags,
            placed=outlined.placed,
        )
    if (pairs := items_of(outlined)) is None:
        return outlined
    items = {key: _wanted(child, parameter) for key, child in pairs}
    return items if isinstance(outlined, Mapping) else like(outlined, items)


def _leaves(value: Any, at: Path = ()) -> Iterator[tuple[Path, _Coming]]:
    if isinstance(value, _Coming):
        yield at, value
    else:
        for key, child in items_of(value) or ():
            yield from _leaves(child, (*at, key))


def _leaf(value: Any, at: Path) -> Any:
    """The value at a path; None if there is none."""
    for key in at:
        value = dict(items_of(value) or ()).get(key)
    return value


def _outline(given: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that all ranks need before rank 0 sends the tensors."""
    known: Mapping[Path, str] = getattr(_binding_of(given), "placed", {})

    def coming(fqn: Any, v: torch.Tensor, at: Path) -> _Coming:
        dtype, placed = str(v.dtype).removeprefix("torch."), known.get((fqn, *at), "")
        return _Coming(tuple(v.shape), dtype, v.device.type, order_of(v), flags_of(v), placed)

    state = {fqn: walked(v, partial(coming, fqn)) for fqn, v in given.get("state", {}).items()}
    return {"state": state, "param_groups": [dict(g) for g in given.get("param_groups", [])]}


@dataclass(frozen=True)
class _Coming:
    """A tensor that rank 0 will send. flags, placed: as in a `SavedSlot`. (smckpt's own classes are
    no containers of a state.)"""

    shape: tuple[int, ...]
    dtype: str
    device: str
    order: tuple[int, ...] | None
    flags: str
    placed: str


class FullTaker(Taker):
    """Gathers the state of all ranks, and distributes it to them again."""

    def __init__(
        self,
        view: ModelView,
        only: Callable[[str], bool] | str | None,
        wishes: FullWishes,
        of_optimizers: FullWishes,
    ) -> None:
        super().__init__(view, FULL, only)
        self._wishes = wishes
        self._of_optimizers = of_optimizers

    def _check_model(self) -> None:
        tensors = (*self.view.model.named_parameters(), *self.view.model.named_buffers())
        if empty := sorted(name for name, tensor in tensors if tensor.is_meta):
            raise StateError(
                f"{empty[0]} and {len(empty) - 1} other tensors of the model are on the meta "
                "device, so there is nothing to gather or to fill",
                remedy="load through SHARDED or LOCAL state, or with the model itself in the "
                "state: they give it memory; or call to_empty(device=) first",
            )
        refuse_gathered(self.view.model.named_parameters())
        values = [name for name, tensor in tensors if gathers() and is_value(tensor)]
        if values:  # torch's broadcast takes none
            raise StateError(
                f"{values[0]} of the model is sparse, nested or quantised: FULL cannot gather it",
                remedy="take LOCAL or SHARDED state, or put the model itself into the state",
            )

    def state_of_model(self) -> dict[str, Any]:
        check_together(self.view, self._check_model)
        found = translated_or_none(self.view, self._wishes)
        if found is None:
            out = FullStateDict(self.chosen(full_model(self.view, self._wishes)))
            out.put_through = partial(self.load_model, strict=True)
            out.reads = None if gathers() else self.view.reads()
            return out
        if self.only is not None:
            raise UsageError(
                "only= is not honoured for the full state of a tensor-parallel model",
                remedy="leave it out, and choose by the names that come out",
            )
        return FullStateDict(found)

    def load_model(
        self, state_dict: Mapping[str, Any], strict: bool
    ) -> tuple[list[str], list[str]]:
        check_load(self.view, state_dict, self._wishes)
        if not gathers():  # the tensors are whole
            return _load_stock(self.view, state_dict, strict and self.only is None)
        keys = load_full_model(self.view, state_dict, strict and self.only is None)
        return ([], []) if keys is None else (keys.missing_keys, keys.unexpected_keys)

    def state_of_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        tensors: list[tuple[str, torch.Tensor]] = []
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        for kept in (*optimizer.state.values(), *groups):
            walked(kept, lambda t, at: tensors.append((f"the optimizer's {dotted(at)}", t)))

        def check() -> None:
            check_full_optimizer(self.view, self._of_optimizers.parallel_state)
            refuse_gathered(tensors, parts=gathers())

        check_together(self.view, check)
        tree = full_optimizer(self.view, optimizer, self._of_optimizers)
        tree.put_through = partial(put_full_optimizer, self.view, optimizer)
        given: Any = tree["param_groups"]
        given.binding = replace(given.binding, put_through=tree.put_through)
        return tree

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
    ) -> None:
        load_full_optimizer(self.view, optimizer, state_dict)
        hand_to_hooks(bind(optimizer, "SHARDED", self.view), state_dict)


class StockFullTaker(FullTaker):
    """FULL state of an FSDP1 model. If all ranks have the whole of it, each loads its own, as in
    torch; only the ranks of the model's process groups take part."""

    def load_model(
        self, state_dict: Mapping[str, Any], strict: bool
    ) -> tuple[list[str], list[str]]:
        if self._wishes.rank0_only:
            return super().load_model(state_dict, strict)
        check_load(self.view, state_dict, self._wishes)
        return _load_stock(self.view, state_dict, strict and self.only is None)


class StockShardedTaker(Taker):
    """SHARDED state of an FSDP1 model: ShardedTensors, or DTensors where it has a device mesh."""

    def state_of_model(self) -> dict[str, Any]:
        model, kind = self.view.model, self.kind.value
        raw = type(model).state_dict(model)
        out = ModelStateDict(self.chosen({self.view.name(name): v for name, v in raw.items()}))
        parameters = self.view.parameters()
        for fqn, value in out.items():
            if not isinstance(value, torch.Tensor):
                continue
            # With NO_SHARD and on a single rank, torch gives whole tensors, which FSDP1 replicates.
            rule = self.view.geometry(fqn, value) if type(value) is torch.Tensor else None
            plain = plain_tag(kind, fqn, fqn in parameters)
            set_tag(value, plain if rule is None else Tag(kind, (fqn,), rule))
        out.put_through = partial(self.load_model, strict=True)
        return out

    def load_model(
        self, state_dict: Mapping[str, Any], strict: bool
    ) -> tuple[list[str], list[str]]:
        return _load_stock(self.view, state_dict, strict and self.only is None)


def _load_stock(
    view: ModelView, given: Mapping[str, Any], strict: bool
) -> tuple[list[str], list[str]]:
    """torch's own load. Values keep their names, except that torch's names have `_orig_mod` where
    a module inside is compiled."""
    hidden = {part for part in view.components if part != "_orig_mod"}
    raw_of = {  # of several wrappers round one module, the innermost
        view.name(name): ".".join(part for part in name.split(".") if part not in hidden)
        for name, _ in view.model.named_modules(remove_duplicate=False)
    }
    raw: dict[str, Any] = {}
    for fqn, value in given.items():
        at, _, last = view.name(fqn).rpartition(".")
        prefix = raw_of.get(at, at)
        raw[f"{prefix}.{last}" if prefix else last] = value
    found = type(view.model).load_state_dict(view.model, raw, strict=strict)
    if found is None:  # a method of the user's own
        return [], []
    return [view.name(n) for n in found.missing_keys], [view.name(n) for n in found.unexpected_keys]


@contextmanager
def stock_kind(view: ModelView, kind: Any, of_model: Any, of_optimizer: Any) -> Iterator[None]:
    """`FSDP.state_dict_type`. In the block `FSDP.optim_state_dict` starts from the optimizer's own
    state dict, and not from the one that the block gives."""
    from torch.distributed.fsdp import FullStateDictConfig as TorchConfig
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(of_model, FullStateDictConfig):
        of_model = TorchConfig(of_model.offload_to_cpu, of_model.rank0_only)
    own = FullyShardedDataParallel.optim_state_dict

    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        if optim_state_dict is None:
            optim_state_dict = stock_optimizer_state(optim)
        return own(model, optim, optim_state_dict, group)

    with FullyShardedDataParallel.state_dict_type(view.model, kind, of_model, of_optimizer):
        FullyShardedDataParallel.optim_state_dict = staticmethod(optim_state_dict)  # type: ignore[method-assign]
        try:
            yield
        finally:
            FullyShardedDataParallel.optim_state_dict = staticmethod(own)  # type: ignore[method-assign]
