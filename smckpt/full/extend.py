"""Adds `translate_on_save` to torch's own `FullStateDictConfig` and `FSDP.state_dict_type`.

Stock torch rejects the field and any subclass of the config, so this replaces the class itself, on
request only. The replacement can be undone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from smckpt.errors import UsageError
from smckpt.full.gathered import translated_or_none, wishes_of
from smckpt.state_dict.context import instead
from smckpt.state_dict.fsdp1 import Fsdp1View
from smckpt.state_dict.model_views import view_of

if TYPE_CHECKING:
    from smckpt.topology import ParallelState
    from smckpt.translate.tables.table import TensorLayout

__all__ = ["TorchExtension", "extend_torch_config", "is_extended"]

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
    from torch.distributed.fsdp import (
        FullStateDictConfig,
        FullyShardedDataParallel,
        StateDictType,
    )

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
