"""`sm_state_dict_type`: which state `state_dict()` gives inside a `with` block."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smckpt.errors import KeysMismatchError, TensorMismatchError, UsageError
from smckpt.state_dict.full import (
    check_config,
    check_load,
    check_optimizer,
    full_model,
    full_optimizer,
    load_full_model,
    load_full_optimizer,
    translated_or_none,
)
from smckpt.state_dict.model import ModelView, view_of
from smckpt.state_dict.names import canonical
from smckpt.state_dict.optimizers import Binding, bind, fill_optimizer
from smckpt.state_dict.private import dtensor_parts, is_dtensor
from smckpt.state_dict.tags import FullStateDict, ModelStateDict, put_back

if TYPE_CHECKING:
    from smckpt.topology import ParallelState
    from smckpt.translate.table import Layout

__all__ = [
    "FULL",
    "LOCAL",
    "SHARDED",
    "SMStateDictType",
    "remember_optimizer",
    "sm_state_dict_type",
]


class SMStateDictType(enum.Enum):
    """FULL: everything gathered on one rank. SHARDED: this rank's shards by name, loadable on any
    mesh. LOCAL: this rank's own tensors, without any communication."""

    FULL = "FULL"
    SHARDED = "SHARDED"
    LOCAL = "LOCAL"
    SM_LOCAL_STATE_DICT = "LOCAL"


FULL = SMStateDictType.FULL
SHARDED = SMStateDictType.SHARDED
LOCAL = SMStateDictType.LOCAL


def _kind_of(kind: Any) -> SMStateDictType:
    if isinstance(kind, SMStateDictType):
        return kind
    name = getattr(kind, "name", "")  # torch's StateDictType
    for ours in SMStateDictType:
        if name == f"{ours.value}_STATE_DICT":
            return ours
    raise UsageError(
        f"{kind!r} is no state dict type", remedy="pass FULL, SHARDED or LOCAL of smckpt"
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
    layout: str | Layout | None = None,
    config: Any = None,
    padded_vocab_size: int | None = None,
) -> Iterator[None]:
    """Inside the block `model.state_dict()`, `model.load_state_dict()` and those of optimizers
    give and take state of this kind.

    Args:
        model: FSDP1, FSDP2, DDP or plain.
        kind: FULL, SHARDED or LOCAL; torch's `StateDictType` is taken too.
        state_dict_config, optim_state_dict_config: for FULL, a `FullStateDictConfig` (ours or
            torch's) and torch's `FullOptimStateDictConfig`. Without one, FULL gathers to rank 0
            only, on the device. With `translate_on_save`, which is the default, a tensor-parallel
            model comes out in Hugging Face's names and shapes (docs/layouts.md).
        only: which of the model's tensors: a function of the fully qualified name, or
            "trainable" for those with `requires_grad` (LoRA adapters). Others are left alone.
        parallel_state: for FULL: which rank is which, where tensor-parallel ranks hold plain
            tensors of their own. Meshes with a dimension "tp" tell it by themselves.
        layout, config: for FULL: the model's layout, where its names fit several, and its config,
            where `model.config` is not Hugging Face's.
        padded_vocab_size: for FULL: as many rows as the layout has of the vocabulary, padding
            included, where trainers would not round vocab_size up to it, as in `export_hf`.

    Raises:
        UsageError: an argument that is not known.
    """
    chosen = _kind_of(kind)
    if isinstance(only, str) and only != "trainable":
        raise UsageError(
            f"only={only!r} is not known", remedy='pass "trainable" or a function of the name'
        )
    if chosen is not FULL and (state_dict_config or optim_state_dict_config):
        _refuse_config(state_dict_config, optim_state_dict_config)
    translation = {
        "parallel_state": parallel_state, "layout": layout, "config": config,
        "padded_vocab_size": padded_vocab_size,
    }  # fmt: skip
    if chosen is FULL:
        check_config(state_dict_config)
        check_config(optim_state_dict_config)
    else:
        _refuse_translation(translation)
    scope = _Scope(
        view_of(model), chosen, state_dict_config, optim_state_dict_config, only, translation
    )
    with ExitStack() as stack:
        stack.enter_context(_instead(model, "state_dict", scope.model_state_dict))
        stack.enter_context(_instead(model, "load_state_dict", scope.load_model))
        stack.enter_context(_patched_optimizers(scope))
        yield


def _refuse_config(*configs: Any) -> None:
    for config in configs:
        if config is not None and not type(config).__name__.startswith(("Sharded", "Local")):
            raise UsageError(
                f"{type(config).__name__} does not go with this kind",
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


class _Scope:
    """One `with` block."""

    def __init__(
        self,
        view: ModelView,
        kind: SMStateDictType,
        model_config: Any,
        optimizer_config: Any,
        only: Callable[[str], bool] | str | None,
        translation: Mapping[str, Any],
    ) -> None:
        self.view = view
        self.kind = kind
        self.model_config = model_config
        self.optimizer_config = optimizer_config
        self._only = only
        self._translation = translation

    def _kept(self, tensors: dict[str, Any]) -> dict[str, Any]:
        if self._only is None:
            return tensors
        if self._only == "trainable":
            names = self.view.trainable()
            return {fqn: t for fqn, t in tensors.items() if fqn in names}
        assert callable(self._only)
        return {fqn: t for fqn, t in tensors.items() if self._only(fqn)}

    def model_state_dict(
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """As `nn.Module.state_dict`, of this block's kind."""
        if destination is not None or prefix or keep_vars:
            raise UsageError(
                "destination, prefix and keep_vars are not honoured inside sm_state_dict_type",
                remedy="call state_dict() without them",
            )
        if self.kind is FULL:
            return self._full()
        tensors = self._kept(self.view.tensors(self.kind.value))
        if self.view.computed.isdisjoint(tensors):
            return tensors
        out = ModelStateDict(tensors)
        out.give_back = self.view.give_back
        return out

    def _full(self) -> dict[str, Any]:
        model, config = self.view.model, self.model_config
        found = translated_or_none(model, config, self._translation)
        if found is None:
            out = FullStateDict(self._kept(full_model(model, config)))
            out.put_through = self.load_model
            return out
        if self._only is not None:
            raise UsageError(
                "only= is not honoured for the full state of a tensor-parallel model",
                remedy="leave it out, and choose by the names that come out",
            )
        return FullStateDict(found)

    def load_model(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As `nn.Module.load_state_dict`; tensors that are the live ones are left as they are."""
        if assign:
            raise UsageError(
                "assign=True is not honoured inside sm_state_dict_type",
                remedy="leave it out: live tensors are filled",
            )
        if self.kind is FULL:
            check_load(self.view.model, state_dict, self._translation)
            return load_full_model(self.view.model, state_dict, strict and self._only is None)
        given = {canonical(name): value for name, value in state_dict.items()}
        live = self._kept(self.view.tensors(self.kind.value))
        missing = sorted(live.keys() - given.keys())
        unexpected = sorted(given.keys() - live.keys())
        if strict and (missing or unexpected):
            raise KeysMismatchError(
                f"the state dict lacks {missing[:12]}; the model lacks {unexpected[:12]}",
                remedy="load the state of the same model, or pass strict=False",
            )
        for fqn in live.keys() & given.keys():
            if fqn not in self.view.computed:
                copy_exactly(live[fqn], given[fqn], fqn)
        self.view.give_back({fqn: given[fqn] for fqn in live.keys() & given.keys()})
        from torch.nn.modules.module import _IncompatibleKeys

        return _IncompatibleKeys(missing, unexpected)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if self.kind is FULL:
            check_optimizer(self.view.model, self._translation)
            config = self.optimizer_config or self.model_config
            tree = full_optimizer(self.view, optimizer, config)
            tree.put_through = partial(load_full_optimizer, self.view, optimizer)
            return tree
        return bind(optimizer, self.kind.value, self.view).take()

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
    ) -> None:
        if self.kind is FULL:
            load_full_optimizer(self.view, optimizer, state_dict)
            return
        fill_optimizer(bind(optimizer, self.kind.value, self.view), state_dict)


def copy_exactly(live: Any, given: Any, name: str) -> None:
    """Copy `given` into `live`, bit for bit; nothing to do where they are the same memory.

    Raises:
        TensorMismatchError: shapes or dtypes differ.
    """
    if not isinstance(live, torch.Tensor) or not isinstance(given, torch.Tensor):
        return
    target = dtensor_parts(live)[0] if is_dtensor(live) else live
    source = dtensor_parts(given)[0] if is_dtensor(given) else given
    if target.dtype != source.dtype or target.shape != source.shape:
        raise TensorMismatchError(
            f"{name}: given {source.dtype} {list(source.shape)}, live {target.dtype} "
            f"{list(target.shape)}",
            remedy="take and load with the same kind on the same model",
        )
    if target.data_ptr() == source.data_ptr() and target.stride() == source.stride():
        return
    with torch.no_grad():
        target.detach().copy_(source)
        put_back([live])


class _Replacement:
    """A module's method, replaced. In a copy of the module, pickled or deep, it is the class's own
    again: the copy is no model of the block, and outlives it."""

    def __init__(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        self._module = module
        self._name = name
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def end(self, before: Any) -> None:
        """Of its block: blocks of generators and stacks can end in another order than they began,
        and then a later one puts this back."""
        self._function = before or getattr(type(self._module), self._name).__get__(self._module)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, self._name)


@contextmanager
def _instead(module: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """The module's method replaced, on this object only, and put back."""
    before = module.__dict__.get(name)
    module.__dict__[name] = ours = _Replacement(module, name, function)
    try:
        yield
    finally:
        ours.end(before)
        if module.__dict__.get(name) is ours:
            module.__dict__[name] = before
            if before is None:
                del module.__dict__[name]


@contextmanager
def _patched_optimizers(scope: _Scope) -> Iterator[None]:
    """`Optimizer.state_dict` and `load_state_dict` of all optimizers, for the block's time."""
    kind = torch.optim.Optimizer
    take, fill = kind.state_dict, kind.load_state_dict

    ended = False  # see `_Replacement.end`

    def state_dict(self: torch.optim.Optimizer) -> dict[str, Any]:
        return take(self) if ended else scope.optimizer_state_dict(self)

    def load_state_dict(self: torch.optim.Optimizer, state_dict: Any) -> None:
        return fill(self, state_dict) if ended else scope.load_optimizer(self, state_dict)

    kind.state_dict = state_dict  # type: ignore[method-assign]
    kind.load_state_dict = load_state_dict  # type: ignore[method-assign]
    try:
        yield
    finally:
        ended = True
        if kind.state_dict is state_dict:
            kind.state_dict = take  # type: ignore[method-assign]
        if kind.load_state_dict is load_state_dict:
            kind.load_state_dict = fill  # type: ignore[method-assign]


def remember_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """From now on a stock `optimizer.state_dict()` remembers its optimizer, in no block too."""
    if getattr(optimizer, "_smckpt_remembered", False):
        return
    optimizer._smckpt_remembered = True  # type: ignore[attr-defined]
    reference = weakref.ref(optimizer)

    def hook(_: Any, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        live = reference()
        if live is None or getattr(state_dict, "binding", None) is not None:
            return None
        return Binding(live, "LOCAL", {}, {}).adopt(state_dict)

    optimizer.register_state_dict_post_hook(hook)
