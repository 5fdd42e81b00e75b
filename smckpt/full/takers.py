"""What a block calls for FULL state, and for torch's own state of an FSDP1 model.

Under a member of torch's `StateDictType`, `sm_state_dict_type` stands in the place of
`FSDP.state_dict_type`. So an FSDP1 model's state is what torch gives: other models'
`load_state_dict` and torch's gather helpers take it. Collectives run for it, under SHARDED too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from smckpt.errors import StateError, UsageError
from smckpt.full.gathered import (
    FullStateDictConfig,
    check_load,
    check_optimizer,
    full_model,
    full_optimizer,
    load_full_model,
    stock_optimizer_state,
    translated_or_none,
)
from smckpt.full.live import FullWishes
from smckpt.full.optimizer_load import load_full_optimizer, put_full_optimizer
from smckpt.full.wire import gathers
from smckpt.state_dict.context import FULL, Taker
from smckpt.state_dict.parts import refuse_gathered
from smckpt.state_dict.tags import FullStateDict, ModelStateDict, Tag, plain_tag, set_tag
from smckpt.state_dict.views import ModelView

__all__ = ["FullTaker", "StockFullTaker", "StockShardedTaker", "stock_kind"]


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

    def state_of_model(self) -> dict[str, Any]:
        tensors = (*self.view.model.named_parameters(), *self.view.model.named_buffers())
        if empty := sorted(name for name, tensor in tensors if tensor.is_meta):
            raise StateError(
                f"{empty[0]} and {len(empty) - 1} other tensors of the model are on the meta "
                "device, so there is nothing to gather or to fill",
                remedy="load through SHARDED or LOCAL state, or with the model itself in the "
                "state: they give it memory; or call to_empty(device=) first",
            )
        refuse_gathered(self.view.model.named_parameters())
        found = translated_or_none(self.view, self._wishes)
        if found is None:
            out = FullStateDict(self.chosen(full_model(self.view, self._wishes)))
            out.put_through = partial(self.load_model, strict=True)
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
        keys = load_full_model(self.view, state_dict, strict and self.only is None)
        return keys.missing_keys, keys.unexpected_keys

    def state_of_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        check_optimizer(self.view, self._of_optimizers)
        for slots in optimizer.state.values() if gathers() else ():
            named = slots.items() if isinstance(slots, dict) else ()
            refuse_gathered((f"the optimizer's {k}", v) for k, v in named if torch.is_tensor(v))
        tree = full_optimizer(self.view, optimizer, self._of_optimizers)
        tree.put_through = partial(put_full_optimizer, self.view, optimizer)
        groups: Any = tree["param_groups"]
        groups.binding = replace(groups.binding, put_through=tree.put_through)
        return tree

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
    ) -> None:
        load_full_optimizer(self.view, optimizer, state_dict)


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
