"""torch's modes, which a caller may have entered, are left for the time of a save or a load.

A mode changes what each call of torch does on this thread: `inference_mode` makes tensors that
autograd refuses for ever, a fake mode makes tensors without memory, a default device puts them
elsewhere. smckpt's own tensors must not depend on it.

The default dtype and the deterministic algorithms belong to the whole process, other threads
included, so they stay: smckpt names the dtype and the device of each tensor that it makes.

Methods of a user's modules run in the caller's mode. Those compute extra state and values from
hooks. A load cannot fill these in place, because they are not memory of the model, so modules get
them back through their own methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils._python_dispatch import _disable_current_modes

from smckpt.errors import StateError
from smckpt.layout.containers import is_extra_state
from smckpt.state_dict.tensors import dtensor_parts, is_dtensor, is_value


@contextmanager
def concrete() -> Iterator[None]:
    """Each new tensor is an ordinary one with memory: no inference mode, no dispatch mode (fake
    tensors, tracing), no level of `torch.func`. The caller's gradients, autocast and default device
    stay. Methods of a user's objects run in this."""
    grad = torch.is_grad_enabled()
    with ExitStack() as left:
        left.enter_context(_disable_current_modes())
        left.enter_context(temporarily_clear_interpreter_stack())
        if torch.is_inference_mode_enabled():
            left.enter_context(torch.inference_mode(False))
            left.enter_context(torch.set_grad_enabled(grad))  # leaving the mode switched it on
        yield


@contextmanager
def neutral() -> Iterator[None]:
    """As `concrete`, and without gradients, autocast, default device and function modes."""
    with concrete(), torch.no_grad(), ExitStack() as left:
        for device in _AUTOCAST:
            if torch.is_autocast_enabled(device):
                left.callback(torch.set_autocast_enabled, device, True)
                torch.set_autocast_enabled(device, False)
        count = torch._C._len_torch_function_stack()
        modes = [torch._C._pop_torch_function_stack() for _ in range(count)]
        for mode in modes:  # the first was on top: a stack of callbacks puts it back last
            left.callback(torch._C._push_on_torch_function_stack, mode)
        yield


def mode_of(state: Any) -> AbstractContextManager[Any]:
    """The mode in which a module copies into its tensors: inference mode if they were made in it,
    because only there they may be changed."""
    values = state.values() if isinstance(state, Mapping) else ()
    made = any(isinstance(value, torch.Tensor) and value.is_inference() for value in values)
    return torch.inference_mode() if made else nullcontext()


_AUTOCAST = tuple(dict.fromkeys(("cpu", "cuda", torch._C._get_accelerator().type)))


def own_state_dict(model: nn.Module) -> dict[str, Any]:
    """Call the class's own `state_dict`, if possible without torch's detaching (see `detached`)."""
    method: Any = type(model).state_dict
    try:
        inspect.signature(method).bind(model, keep_vars=True)
    except TypeError:  # the class's own method, which takes other arguments
        return dict(method(model))
    return dict(method(model, keep_vars=True))


def computed_names(model: nn.Module, raw: Mapping[str, Any]) -> Iterator[str]:
    """The names in the model's own state dict whose values are not memory of the model, or not
    filled in place (`is_value`)."""
    live: set[int] = set()
    for module in model.modules():
        for tensors in (module._parameters.values(), module._buffers.values()):
            live.update(id(each) for each in tensors if each is not None and not is_value(each))
    others = [(name, value) for name, value in raw.items() if id(value) not in live]
    if not others:  # the common case
        return
    memory = {_memory_of(t) for tensors in (model.parameters(), model.buffers()) for t in tensors}
    memory.discard(None)
    for name, value in others:
        tensor = isinstance(value, torch.Tensor)
        if not tensor or is_value(value) or _memory_of(value) not in memory:
            yield name


def _memory_of(tensor: torch.Tensor) -> int | None:
    """The address at which it begins; None if torch cannot tell."""
    local = dtensor_parts(tensor)[0] if is_dtensor(tensor) else tensor
    try:
        return local.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):  # it computes its values from other tensors
        return None


def read_by(model: nn.Module, name_of: Callable[[str], str] = str) -> Callable[[Any], bool] | None:
    """Which names in the model's state modules read by code of their own, which decides alone what
    size and structure a value may have: buffers that grow, lists of tensors. None without such
    modules. Parameters are never such values.

    Args:
        name_of: the name in the state for one of the model's own.
    """
    if not (prefixes := tuple(_prefixes(model, name_of))):
        return None
    named = model.named_parameters(remove_duplicate=False)
    parameters = {name_of(name) for name, _ in named}
    return lambda key: key not in parameters and str(key).startswith(prefixes)


def _prefixes(model: nn.Module, name_of: Callable[[str], str]) -> dict[str, str]:
    """What stands before the names of such modules in the state → in the model's own names."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        methods = [type(module)._load_from_state_dict, *module._load_state_dict_pre_hooks.values()]
        if any(map(_is_own, methods)) or (module is model and loads_itself(model)):
            raw = f"{name}." if name else ""
            found[name_of(f"{raw}x").removesuffix("x")] = raw
    return found


def give_back(
    model: nn.Module,
    taken: Mapping[str, Any],
    given: Mapping[str, Any],
    name_of: Callable[[str], str],
) -> None:
    """Give modules their computed values: extra state to `set_extra_state`, other values to the
    class's own `load_state_dict`, which reverts what hooks do. Hooks that follow a load are called.

    Args:
        taken: the model's own state dict, whose tensors the load has filled. A new one would be of
            no use: hooks that precede `state_dict` may write into the model.
        given: values under the names that `name_of` makes from the model's own.
    """
    raw = dict(taken)
    names = {name for name in computed_names(model, raw) if name_of(name) in given}
    if (reads := read_by(model, name_of)) is not None:
        known, prefixes = {name_of(name): name for name in raw}, _prefixes(model, name_of)
        for name in filter(reads, given):  # what is no longer the memory that was taken, or is new
            if name not in known:
                above = max(filter(name.startswith, prefixes), key=len)
                known[name] = prefixes[above] + name.removeprefix(above)
            if not _is_same(raw.setdefault(known[name], None), given[name]):
                names.add(known[name])
    if all(map(is_extra_state, names)) and not loads_itself(model):
        give_extra_state(model, given, name_of)
        call_load_hooks(model)  # they may compute what no state dict has
        return
    raw |= {name: given[name_of(name)] for name in raw if name_of(name) in given}
    method: Any = type(model).load_state_dict
    try:
        inspect.signature(method).bind(model, raw, strict=False)
    except TypeError:
        with mode_of(raw):
            method(model, raw)
        return
    with mode_of(raw):
        keys = method(model, raw, strict=False)
    if left := names.intersection(getattr(keys, "unexpected_keys", ())):
        raise StateError(
            f"the model gives {sorted(left)[:8]} in its state dict, but its own load_state_dict "
            "does not take them back, so it would go on with other values",
            remedy="load without a target, and build the model from what was saved as its library "
            "says; the model here is now undefined",
        )


def give_extra_state(
    model: nn.Module, given: Mapping[str, Any], name_of: Callable[[str], str]
) -> None:
    """Give modules the values that their `get_extra_state` gave."""
    for raw, module in model.named_modules():
        if type(module).set_extra_state is not nn.Module.set_extra_state:
            name = name_of(f"{raw}._extra_state" if raw else "_extra_state")
            if name in given:
                module.set_extra_state(given[name])


def loads_itself(model: nn.Module) -> bool:
    """Whether its class has a `load_state_dict` of its own, which may keep more than tensors in
    step."""
    return _is_own(type(model).load_state_dict)


def _is_own(method: Any) -> bool:
    return not str(getattr(method, "__module__", "")).startswith("torch.")


def _is_same(live: Any, given: Any) -> bool:
    if not isinstance(live, torch.Tensor) or not isinstance(given, torch.Tensor):
        return live is given
    return live.shape == given.shape and _memory_of(live) == _memory_of(given)


def call_load_hooks(module: nn.Module) -> None:
    """Call the modules' hooks that follow a load, in torch's order: those of children first, and
    those of a shared module under each of its names."""
    for child in module._modules.values():
        if child is not None:
            call_load_hooks(child)
    for hook in module._load_state_dict_post_hooks.values():
        hook(module, _IncompatibleKeys([], []))
