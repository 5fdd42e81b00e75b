"""torch's modes, which a caller may have entered, are left for the time of a save or a load.

A mode changes what each call of torch does on this thread: `inference_mode` makes tensors that
autograd refuses for ever, a fake mode makes tensors without memory, a default device puts them
elsewhere. smckpt's own tensors must not depend on it.

The default dtype and the deterministic algorithms belong to the whole process, other threads
included, so they stay: smckpt names the dtype and the device of each tensor that it makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["concrete", "mode_of", "neutral"]


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
