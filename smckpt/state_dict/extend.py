"""torch's own `FullStateDictConfig` and `FSDP.state_dict_type`, taught `translate_on_save`.

Stock torch rejects the field, and any subclass of the config: the class itself has to be extended,
which is done on request only, and can be undone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from smckpt.errors import UsageError
from smckpt.state_dict.full import translated_or_none
from smckpt.state_dict.private import is_fsdp1

if TYPE_CHECKING:
    from smckpt.topology import ParallelState
    from smckpt.translate.table import Layout

__all__ = ["TorchExtension", "extend_torch_config"]

_FIELD = "translate_on_save"
_GENERATED = ("__init__", "__repr__", "__eq__", "__dataclass_fields__", "__match_args__")


@dataclass(frozen=True)
class TorchExtension:
    """What `extend_torch_config` did; `undo()`, or the end of a `with` block, takes it back."""

    kept: tuple[tuple[Any, str, Any], ...]

    def undo(self) -> None:
        """Put torch's own class and method back; more than once is no fault."""
        for owner, name, value in self.kept:
            setattr(owner, name, value)
        config = self.kept[0][0]
        if _FIELD in vars(config):
            delattr(config, _FIELD)

    def __enter__(self) -> TorchExtension:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def extend_torch_config(
    *, parallel_state: ParallelState | None = None, layout: str | Layout | None = None,
    config: Any = None, padded_vocab_size: int | None = None,
) -> TorchExtension:  # fmt: skip
    """From now on torch's `FullStateDictConfig` takes `translate_on_save` (default True), and the
    full state dict of a tensor-parallel model inside `FSDP.state_dict_type(...)` comes out as
    inside `sm_state_dict_type`. Other models and kinds are torch's own business, as before.

    `FSDP.set_state_dict_type`, without a block, stays as it is.

    Args:
        parallel_state, layout, config, padded_vocab_size: as in `sm_state_dict_type`; for every
            such block.

    Raises:
        UsageError: torch is extended already.
    """
    from torch.distributed.fsdp import (
        FullStateDictConfig,
        FullyShardedDataParallel,
        StateDictType,
    )

    kind: Any = FullStateDictConfig
    if _FIELD in kind.__dataclass_fields__:
        raise UsageError(
            "torch's FullStateDictConfig has translate_on_save already",
            remedy="undo() the first extension, or call extend_torch_config once",
        )
    stock = FullyShardedDataParallel.state_dict_type
    given = {
        "parallel_state": parallel_state, "layout": layout, "config": config,
        "padded_vocab_size": padded_vocab_size,
    }  # fmt: skip

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
            with _translated(module, chosen, given):
                yield

    extended: Any = dataclasses.make_dataclass(
        kind.__name__, [(_FIELD, bool, dataclasses.field(default=True))], bases=(kind,)
    )
    kept = [(kind, name, vars(kind)[name]) for name in _GENERATED]
    kept.append((FullyShardedDataParallel, "state_dict_type", staticmethod(stock)))
    for name in _GENERATED:
        setattr(kind, name, vars(extended)[name])
    setattr(kind, _FIELD, True)
    FullyShardedDataParallel.state_dict_type = staticmethod(state_dict_type)  # type: ignore[method-assign]
    return TorchExtension(tuple(kept))


@contextmanager
def _translated(module: nn.Module, config: Any, given: dict[str, Any]) -> Iterator[None]:
    """`module.state_dict()`, on this object only, for the block's time."""
    before = module.__dict__.get("state_dict")
    stock = module.state_dict

    def state_dict(*args: Any, **kwargs: Any) -> Any:
        if args or kwargs:  # a part of something larger
            return stock(*args, **kwargs)
        found = translated_or_none(module, config, given, gathers=is_fsdp1(module))
        return stock() if found is None else found

    module.__dict__["state_dict"] = state_dict
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["state_dict"]
        else:
            module.__dict__["state_dict"] = before
