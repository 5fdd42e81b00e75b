"""`sm_state_dict_type`: the kind of state that `state_dict()` gives inside a `with` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from smckpt.errors import UsageError
from smckpt.full.gathered import FullStateDictConfig, wishes_of
from smckpt.full.takers import FullTaker, StockFullTaker, StockShardedTaker, stock_kind
from smckpt.state_dict.context import FULL, SHARDED, SMStateDictType, Taker, taking
from smckpt.state_dict.fsdp1 import Fsdp1View
from smckpt.state_dict.model_views import view_of

if TYPE_CHECKING:
    from smckpt.topology import ParallelState
    from smckpt.translate.tables.table import TensorLayout

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
        kind: FULL, SHARDED or LOCAL; or a member of torch's `StateDictType`, as in
            `FSDP.state_dict_type`: then an FSDP1 model's FULL and SHARDED state is what torch
            gives (ShardedTensors or DTensors, copies that collectives made).
        state_dict_config: for FULL, a `FullStateDictConfig` (smckpt's or torch's). Without one,
            FULL gathers to rank 0 only, on the device; torch's `FULL_STATE_DICT` to all ranks, as
            in torch. With `translate_on_save` (the default) a tensor-parallel model comes out in
            Hugging Face's names and shapes (docs/layouts.md). For SHARDED and LOCAL, torch's config
            of the model; with `offload_to_cpu` the tensors are copies in host memory.
        optim_state_dict_config: for FULL, torch's `FullOptimStateDictConfig`.
        only: the model's tensors to take: a function of the fully qualified name, or "trainable"
            for those with `requires_grad` (LoRA adapters). The others are left alone.
        parallel_state: for FULL, the ranks' coordinates where tensor-parallel ranks hold plain
            tensors of their own. A mesh with a dimension "tp" needs none.
        layout: for FULL, the model's layout where its names fit several.
        config: for FULL, the model's config where `model.config` is not Hugging Face's.
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
    of_torch = not isinstance(kind, SMStateDictType)
    with ExitStack() as stack:
        stock = of_torch and isinstance(view, Fsdp1View)
        if stock:
            stack.enter_context(stock_kind(view, kind, state_dict_config, optim_state_dict_config))
        if chosen is FULL:
            if of_torch and state_dict_config is None:
                state_dict_config = FullStateDictConfig()
            configs = state_dict_config, optim_state_dict_config or state_dict_config
            wishes = [wishes_of(config, translation) for config in configs]
            taker: Taker = (StockFullTaker if stock else FullTaker)(view, only, *wishes)
        else:
            named = [f"{name}=" for name, value in translation.items() if value is not None]
            if named:
                raise UsageError(
                    f"{', '.join(named)} is honoured with FULL only",
                    remedy="save with SaveOptions(parallel_state=), and pass the others to "
                    "export_hf",
                )
            if stock and chosen is SHARDED:
                taker = StockShardedTaker(view, chosen, only)
            else:
                for one in (state_dict_config, optim_state_dict_config):
                    if one is not None and not type(one).__name__.startswith(("Sharded", "Local")):
                        raise UsageError(
                            f"{type(one).__name__} is not a config of this kind of state",
                            remedy="pass it with FULL, or leave it out",
                        )
                if getattr(optim_state_dict_config, "offload_to_cpu", False):
                    raise UsageError(
                        "offload_to_cpu of an optimizer's config is not honoured: the optimizer's "
                        "state is the live one",
                        remedy="pass offload_to_cpu=False, or leave the config out",
                    )
                offload = getattr(state_dict_config, "offload_to_cpu", False)
                taker = Taker(view, chosen, only, offload_to_cpu=offload)
        stack.enter_context(taking(model, taker))
        yield
