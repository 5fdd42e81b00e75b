"""`sm_state_dict_type`: the kind of state that `state_dict()` gives inside a `with` block.

`extend_torch_config` adds `translate_on_save` to torch's own `FullStateDictConfig` and
`FSDP.state_dict_type`. Stock torch rejects the field and any subclass of the config, so this
replaces the class itself, on request only. The replacement can be undone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from smckpt.errors import UsageError
from smckpt.full.gathered import FullStateDictConfig, translated_or_none, wishes_of
from smckpt.full.takers import FullTaker, StockFullTaker, StockShardedTaker, stock_kind
from smckpt.state_dict.context import FULL, SHARDED, SMStateDictType, Taker, instead, taking
from smckpt.state_dict.fsdp1 import Fsdp1View
from smckpt.state_dict.model_views import view_of

if TYPE_CHECKING:
    from smckpt.topology import ParallelState
    from smckpt.translate.tables.table import TensorLayout


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
    kinds = {f"{ours.value}_STATE_DICT": ours for ours in SMStateDictType}  # torch's StateDictType
    chosen = kind if isinstance(kind, SMStateDictType) else kinds.get(getattr(kind, "name", ""))
    if chosen is None:
        raise UsageError(
            f"{kind!r} is not a state dict type", remedy="pass FULL, SHARDED or LOCAL of smckpt"
        )
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


_FIELD = "translate_on_save"
_GENERATED = ("__init__", "__repr__", "__eq__", "__dataclass_fields__", "__match_args__")


@dataclass(frozen=True)
class TorchExtension:
    """What `extend_torch_config` did; `undo()`, or the end of a `with` block, reverts it."""

    kept: tuple[tuple[Any, str, Any], ...]

    def undo(self) -> None:
        """Put torch's own class and method back. A second call does nothing."""
        for owner, name, value in self.kept:
            setattr(owner, name, value)
        config = self.kept[0][0]
        if _FIELD in vars(config):
            delattr(config, _FIELD)

    def __enter__(self) -> TorchExtension:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def is_extended() -> bool:
    """Whether `extend_torch_config` is in force."""
    from torch.distributed.fsdp import FullStateDictConfig

    return _FIELD in FullStateDictConfig.__dataclass_fields__


def extend_torch_config(
    *,
    parallel_state: ParallelState | Callable[[], ParallelState | None] | None = None,
    layout: str | TensorLayout | None = None,
    config: Any = None,
    padded_vocab_size: int | None = None,
) -> TorchExtension:
    """Make torch's `FullStateDictConfig` take `translate_on_save` (default True). The full state
    dict of a tensor-parallel model inside `FSDP.state_dict_type(...)` is then that of
    `sm_state_dict_type`. Other models, other kinds and `FSDP.set_state_dict_type` are unchanged.

    Args:
        parallel_state: as in `sm_state_dict_type`, for every such block; or a function that
            returns it, which each block calls.
        layout: as in `sm_state_dict_type`.
        config: as in `sm_state_dict_type`.
        padded_vocab_size: as in `sm_state_dict_type`.

    Raises:
        UsageError: torch is extended already.
    """
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

    kind: Any = FullStateDictConfig
    if is_extended():
        raise UsageError(
            "torch's FullStateDictConfig has translate_on_save already",
            remedy="undo() the first extension, or call extend_torch_config once",
        )
    stock = FullyShardedDataParallel.state_dict_type
    given = {"layout": layout, "config": config, "padded_vocab_size": padded_vocab_size}

    @contextmanager
    def state_dict_type(
        module: nn.Module, state_dict_type: Any, state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> Iterator[None]:  # fmt: skip
        with stock(module, state_dict_type, state_dict_config, optim_state_dict_config):
            chosen = state_dict_config if state_dict_config is not None else kind()
            if state_dict_type is not StateDictType.FULL_STATE_DICT:
                yield
                return
            state = parallel_state() if callable(parallel_state) else parallel_state
            with _translated(module, chosen, {**given, "parallel_state": state}):
                yield

    extended: Any = dataclasses.make_dataclass(
        kind.__name__, [(_FIELD, bool, dataclasses.field(default=True))], bases=(kind,)
    )
    kept = [(kind, name, vars(kind)[name]) for name in _GENERATED]
    descriptor = vars(FullyShardedDataParallel)["state_dict_type"]
    kept.append((FullyShardedDataParallel, "state_dict_type", descriptor))
    for name in _GENERATED:
        setattr(kind, name, vars(extended)[name])
    setattr(kind, _FIELD, True)
    FullyShardedDataParallel.state_dict_type = staticmethod(state_dict_type)  # type: ignore[method-assign]
    return TorchExtension(tuple(kept))


def _translated(
    module: nn.Module, config: Any, given: dict[str, Any]
) -> AbstractContextManager[None]:
    """Replace `state_dict` of this module object inside the block."""
    stock = module.state_dict

    def state_dict(*args: Any, **kwargs: Any) -> Any:
        if args or kwargs:  # a part of a larger model
            return stock(*args, **kwargs)
        view = view_of(module)
        gathers = isinstance(view, Fsdp1View)
        found = translated_or_none(view, wishes_of(config, given), gathers=gathers)
        return stock() if found is None else found

    return instead(module, "state_dict", state_dict)
