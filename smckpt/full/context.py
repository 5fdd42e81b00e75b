"""`sm_state_dict_type`: the kind of state that `state_dict()` gives inside a `with` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smckpt.errors import UsageError
from smckpt.full.gathered import (
    check_load,
    check_optimizer,
    full_model,
    full_optimizer,
    load_full_model,
    load_full_optimizer,
    translated_or_none,
    wishes_of,
)
from smckpt.full.live import FullWishes
from smckpt.state_dict.context import FULL, SMStateDictType, Taker, taking
from smckpt.state_dict.model_views import view_of
from smckpt.state_dict.tags import FullStateDict
from smckpt.state_dict.views import ModelView

if TYPE_CHECKING:
    from smckpt.topology import ParallelState
    from smckpt.translate.table import TensorLayout

__all__ = ["sm_state_dict_type"]


def _kind_of(kind: Any) -> SMStateDictType:
    if isinstance(kind, SMStateDictType):
        return kind
    name = getattr(kind, "name", "")  # torch's StateDictType
    for ours in SMStateDictType:
        if name == f"{ours.value}_STATE_DICT":
            return ours
    raise UsageError(
        f"{kind!r} is not a state dict type", remedy="pass FULL, SHARDED or LOCAL of smckpt"
    )


@contextmanager
def sm_state_dict_type(
    model: nn.Module,
    kind: Any,
    state_dict_config: Any = None,
    optim_state_dict_config: Any = None,
    *,
    only: Callable[[str], bool] | str | None = None,
    parallel_state: ParallelState | None = None,
    layout: str | TensorLayout | None = None,
    config: Any = None,
    padded_vocab_size: int | None = None,
) -> Iterator[None]:
    """Inside the block, `state_dict()` and `load_state_dict()` of the model and of optimizers give
    and take state of this kind.

    Args:
        model: FSDP1, FSDP2, DDP or plain.
        kind: FULL, SHARDED or LOCAL, or a member of torch's `StateDictType`.
        state_dict_config, optim_state_dict_config: for FULL, a `FullStateDictConfig` (smckpt's or
            torch's) and torch's `FullOptimStateDictConfig`. Without one, FULL gathers to rank 0
            only, on the device. With `translate_on_save` (the default) a tensor-parallel model
            comes out in Hugging Face's names and shapes (docs/layouts.md).
        only: the model's tensors to take: a function of the fully qualified name, or "trainable"
            for those with `requires_grad` (LoRA adapters). The others are left alone.
        parallel_state: for FULL, the ranks' coordinates where tensor-parallel ranks hold plain
            tensors of their own. A mesh with a dimension "tp" needs none.
        layout, config: for FULL, the model's layout where its names fit several, and its config
            where `model.config` is not Hugging Face's.
        padded_vocab_size: for FULL, the number of vocabulary rows that the layout has, padding
            included, where trainers would not round vocab_size up to it; as in `export_hf`.

    Raises:
        UsageError: an argument is unknown, or is not honoured here.
    """
    chosen = _kind_of(kind)
    if isinstance(only, str) and only != "trainable":
        raise UsageError(
            f"only={only!r} is not known", remedy='pass "trainable" or a function of the name'
        )
    translation = {
        "parallel_state": parallel_state, "layout": layout, "config": config,
        "padded_vocab_size": padded_vocab_size,
    }  # fmt: skip
    view = view_of(model)
    if chosen is FULL:
        configs = state_dict_config, optim_state_dict_config or state_dict_config
        taker: Taker = FullTaker(view, only, *(wishes_of(c, translation) for c in configs))
    else:
        _refuse_config(state_dict_config, optim_state_dict_config)
        _refuse_translation(translation)
        taker = Taker(view, chosen, only)
    with taking(model, taker):
        yield


def _refuse_config(*configs: Any) -> None:
    for config in configs:
        if config is not None and not type(config).__name__.startswith(("Sharded", "Local")):
            raise UsageError(
                f"{type(config).__name__} is not a config of this kind of state",
                remedy="pass it with FULL, or leave it out",
            )
        if getattr(config, "offload_to_cpu", False):
            raise UsageError(
                "offload_to_cpu is not honoured: staging copies to host memory anyway",
                remedy="leave it out",
            )


def _refuse_translation(given: Mapping[str, Any]) -> None:
    named = [f"{name}=" for name, value in given.items() if value is not None]
    if named:
        raise UsageError(
            f"{', '.join(named)} is honoured with FULL only",
            remedy="pass parallel_state= to async_save, and the others to export_hf",
        )


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
        tree = full_optimizer(self.view, optimizer, self._of_optimizers)
        tree.put_through = partial(load_full_optimizer, self.view, optimizer)
        return tree

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
    ) -> None:
        load_full_optimizer(self.view, optimizer, state_dict)
