"""What a Trainer's checkpoint holds: which tensors of the model, and the random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from smckpt.state_dict.fsdp1 import Fsdp1View

__all__ = ["adapter_only", "rng_state", "set_rng_state"]

# What wrappers put into the names of modules, and leave out of the names of a state dict.
_WRAPPERS = Fsdp1View.components
_RUNNING = ("running_mean", "running_var", "num_batches_tracked")  # training changes them


def adapter_only(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The part of a model's state that training adapters changes, as the Trainer saves it; all of
    the state, if the model has no adapters of PEFT.

    The frozen base is left out, quantized or not: a script loads it before it resumes. Adapters
    that are frozen at the moment are kept, because they may have been trained before.
    """
    bare = model
    while hasattr(bare, "module"):  # DDP
        bare = bare.module
    if not any(hasattr(one, "peft_config") for one in bare.modules()):
        return state
    kept = tuple(set(_changing(bare)))
    chosen = {
        name: value
        for name, value in state.items()
        if name in kept or name.startswith(tuple(f"{one}." for one in kept))
    }
    return chosen


def _changing(model: Any) -> Iterator[str]:
    """The names of adapters' modules, and of what else of the model training changes."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            yield _clean(name)
    for name, module in model.named_modules(remove_duplicate=False):
        for attribute in getattr(module, "adapter_layer_names", ()):
            yield _clean(f"{name}.{attribute}")
        if "prompt_encoder" in module._modules:
            yield _clean(f"{name}.prompt_encoder")
        for buffer in _RUNNING:
            if module._buffers.get(buffer) is not None:
                yield _clean(f"{name}.{buffer}")


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part and part not in _WRAPPERS)


def rng_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and len(state.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
