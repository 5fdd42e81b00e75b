"""A `with` block in which a model and its optimizers give state of one kind."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from smckpt.errors import KeysMismatchError, UsageError
from smckpt.state_dict.of_optimizers.bindings import bind, bound
from smckpt.state_dict.of_optimizers.optimizers import copy_exactly, fill_optimizer
from smckpt.state_dict.of_optimizers.own_methods import hand_to_hooks
from smckpt.state_dict.tags import ModelStateDict, RememberingDict, set_tag, tag_of
from smckpt.state_dict.views import ModelView


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


Names = tuple[list[str], list[str]]  # missing in the given state; unexpected by the model


class Taker:
    """Takes and gives back live LOCAL and SHARDED state. A block calls it in place of `state_dict`
    and `load_state_dict`.

    Args:
        only: the model's tensors to take: a function of the name, or "trainable".
        offload_to_cpu: give copies of the model's tensors in host memory. A load fills the live
            tensors from them.
    """

    def __init__(
        self,
        view: ModelView,
        kind: SMStateDictType,
        only: Callable[[str], bool] | str | None = None,
        *,
        offload_to_cpu: bool = False,
    ) -> None:
        self.view = view
        self.kind = kind
        self.only = only
        self._offload_to_cpu = offload_to_cpu

    def chosen(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The tensors that `only` selects."""
        if self.only is None:
            return tensors
        if self.only == "trainable":
            names = self.view.trainable()
            return {fqn: t for fqn, t in tensors.items() if fqn in names}
        assert callable(self.only)
        return {fqn: t for fqn, t in tensors.items() if self.only(fqn)}

    def state_of_model(self) -> dict[str, Any]:
        tensors = self.chosen(self.view.tensors(self.kind.value))
        if self._offload_to_cpu:
            out = ModelStateDict({fqn: _on_cpu(value) for fqn, value in tensors.items()})
            out.give_back = partial(self.load_model, strict=False)
            return out
        computed = self.view.computed & tensors.keys()
        reads = self.view.reads()
        if not (computed or self.view.hooked() or reads):
            return tensors
        out = ModelStateDict(tensors)
        out.reads = reads
        out.give_back = self.view.give_back
        return out

    def load_model(
        self, state_dict: Mapping[str, Any], strict: bool
    ) -> tuple[list[str], list[str]]:
        """Copy given tensors into the live ones. A given tensor that is live stays unchanged.

        Returns:
            The names that are missing, and those that the model lacks.
        """
        given = {self.view.name(name): value for name, value in state_dict.items()}
        live = self.chosen(self.view.tensors(self.kind.value))
        reads = self.view.reads() or (lambda _: False)
        missing = sorted(live.keys() - given.keys())
        unexpected = sorted(name for name in given.keys() - live.keys() if not reads(name))
        if strict and (missing or unexpected):
            raise KeysMismatchError(
                f"the state dict lacks {missing[:12]}; the model lacks {unexpected[:12]}",
                remedy="load the state of the same model, or pass strict=False",
            )
        for fqn in live.keys() & given.keys():
            fits = getattr(live[fqn], "shape", None) == getattr(given[fqn], "shape", None)
            if fqn not in self.view.computed and (fits or not reads(fqn)):
                copy_exactly(live[fqn], given[fqn], fqn)
        self.view.give_back({fqn: given[fqn] for fqn in given if fqn in live or reads(fqn)})
        return missing, unexpected

    def trained_by(self, optimizer: torch.optim.Optimizer) -> Literal["all", "some", "none"]:
        """How many of the optimizer's parameters are the model's."""
        held = self.view.held()
        parameters = [id(p) for group in optimizer.param_groups for p in group["params"]]
        count = sum(each in held for each in parameters)
        return "all" if count == len(parameters) else "some" if count else "none"

    def state_of_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return bind(optimizer, self.kind.value, self.view).take()

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
    ) -> None:
        binding = bind(optimizer, self.kind.value, self.view)
        fill_optimizer(binding, state_dict)
        hand_to_hooks(binding, state_dict)


@contextmanager
def taking(model: nn.Module, taker: Taker) -> Iterator[None]:
    """Inside the block the model and all optimizers give and take state through `taker`."""

    def state_dict(
        *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        if destination is not None or keep_vars:
            raise UsageError(
                "destination and keep_vars are not honoured inside sm_state_dict_type",
                remedy="call state_dict() without them",
            )
        state = taker.state_of_model()
        return _prefixed(state, prefix) if prefix else state

    def load_state_dict(
        state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        if assign:
            raise UsageError(
                "assign=True is not honoured inside sm_state_dict_type",
                remedy="leave it out: live tensors are filled",
            )
        from torch.nn.modules.module import _IncompatibleKeys

        return _IncompatibleKeys(*taker.load_model(state_dict, strict))

    with ExitStack() as stack:
        stack.enter_context(instead(model, "state_dict", state_dict))
        stack.enter_context(instead(model, "load_state_dict", load_state_dict))
        stack.enter_context(_patched_optimizers(taker))
        yield


def _on_cpu(value: Any) -> Any:
    """A copy of a tensor in host memory, with its tag."""
    if not isinstance(value, torch.Tensor):
        return value
    made = value.detach().to("cpu", copy=True)
    tag = tag_of(value)
    if tag is not None:
        set_tag(made, tag)
    return made


def _prefixed(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The state with the prefix before each name, in the tags too, so that a checkpoint has it."""
    named = {f"{prefix}{fqn}": value for fqn, value in state.items()}
    for value in named.values():
        tag = tag_of(value) if isinstance(value, torch.Tensor) else None
        if tag is not None:
            set_tag(value, tag.named(lambda fqn: f"{prefix}{fqn}"))
    if not isinstance(state, RememberingDict):
        return named
    out = state.like(named)
    for hook in ("give_back", "put_through"):
        function = getattr(state, hook, None)
        if function is not None:
            setattr(out, hook, partial(_without_prefix, function, prefix))
    return out


def _without_prefix(function: Callable[[Any], object], prefix: str, given: Any) -> object:
    return function({name.removeprefix(prefix): value for name, value in given.items()})


class _Replacement:
    """The replacement of a module's method. A copy of the module, pickled or deep, has the class's
    own method again, since the copy outlives the block."""

    def __init__(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        self._module = module
        self._name = name
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def end(self, before: Any) -> None:
        """End its block. Blocks in generators and exit stacks may end in any order; then a later
        block puts this replacement back."""
        self._function = before or getattr(type(self._module), self._name).__get__(self._module)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, self._name)


@contextmanager
def instead(module: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of this module object inside the block."""
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


class _Block:
    """An open block, among those that optimizers ask. outer: the block that was opened before.

    An optimizer that trains none of the models gives its own state, as outside.
    """

    def __init__(self, taker: Taker) -> None:
        kind = torch.optim.Optimizer
        self.taker = taker
        self.ended = False  # see `_Replacement.end`
        self.own = kind.state_dict, kind.load_state_dict
        self.outer: _Block | None = getattr(kind.state_dict, "block", None)

    def open_outer(self) -> _Block | None:
        """The innermost block around this one that has not ended."""
        outer = self.outer
        while outer is not None and outer.ended:
            outer = outer.outer
        return outer

    def answering(self, optimizer: torch.optim.Optimizer) -> Taker | None:
        """The taker of the innermost block whose model has all parameters of the optimizer; else of
        the innermost whose model has some; None if no model has any."""
        block = self.open_outer() if self.ended else self
        some: Taker | None = None
        while block is not None:
            found = block.taker.trained_by(optimizer)
            if found == "all":
                return block.taker
            if found == "some":
                some = some or block.taker
            block = block.open_outer()
        return some


@contextmanager
def _patched_optimizers(taker: Taker) -> Iterator[None]:
    """Inside the block, `state_dict` and `load_state_dict` of optimizers ask the blocks' models."""
    kind = torch.optim.Optimizer
    block = _Block(taker)
    take, fill = block.own

    def state_dict(self: torch.optim.Optimizer) -> dict[str, Any]:
        found = block.answering(self)
        if found is None:
            return take(self)
        tree = _hooked(self, found.state_of_optimizer)
        if (binding := bound(tree)) is not None and (asker := _asker(self)) is not None:
            tree["param_groups"].binding = replace(binding, asker=asker)
        return tree

    def load_state_dict(self: torch.optim.Optimizer, state_dict: Any) -> None:
        found = block.answering(self)
        if found is None:
            fill(self, state_dict)
        else:
            found.load_optimizer(self, state_dict)

    state_dict.block = load_state_dict.block = block  # type: ignore[attr-defined]
    state_dict.own, load_state_dict.own = take, fill  # type: ignore[attr-defined]
    kind.state_dict = state_dict  # type: ignore[method-assign]
    kind.load_state_dict = load_state_dict  # type: ignore[method-assign]
    try:
        yield
    finally:
        block.ended = True
        _restore(kind, "state_dict", state_dict)
        _restore(kind, "load_state_dict", load_state_dict)


def _asker(optimizer: torch.optim.Optimizer) -> Any:
    """The outermost optimizer whose `state_dict` is asking this one for its own; None without."""
    found, frame = None, sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "state_dict":
            caller = frame.f_locals.get("".join(frame.f_code.co_varnames[:1]))  # "self", as a rule
            if issubclass(type(caller), torch.optim.Optimizer) and caller is not optimizer:
                found = caller
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _hooked(
    optimizer: torch.optim.Optimizer, take: Callable[[torch.optim.Optimizer], dict[str, Any]]
) -> dict[str, Any]:
    """The state with what the optimizer's own hooks do to it, as in torch."""
    own = object.__getattribute__(optimizer, "__dict__")
    for hook in own.get("_optimizer_state_dict_pre_hooks", {}).values():
        hook(optimizer)
    state = take(optimizer)
    for hook in own.get("_optimizer_state_dict_post_hooks", {}).values():
        found = hook(optimizer, state)
        state = state if found is None else found
    return state


def _restore(kind: Any, name: str, ours: Any) -> None:
    """Undo a replacement, and those under it whose blocks have ended."""
    if getattr(kind, name) is ours:
        while getattr(ours, "block", None) is not None and ours.block.ended:
            ours = ours.own
        setattr(kind, name, ours)
