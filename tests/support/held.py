"""What a live model and its optimizer hold, against what a checkpoint holds."""

from __future__ import annotations

from typing import Any

import torch


def other_than(saved: dict[str, Any], model: Any, state_of: Any = None) -> list[str]:
    """Names of tensors that are not those of the checkpoint, gathered. Collective.

    Args:
        saved: by the parameters' names: `{"model": …}`, and `{"optimizer": {"state": …}}`.
        state_of: the optimizer's `state`; None: the weights alone.
    """

    def whole(tensor: Any) -> Any:
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    wrong = []
    for wrapped, parameter in model.named_parameters():
        name = wrapped.replace("_fsdp_wrapped_module.", "")
        if not torch.equal(whole(parameter.detach()), saved["model"][name]):
            wrong.append(name)
        slots = {} if state_of is None else state_of[parameter]
        for slot, value in slots.items():
            if not torch.equal(whole(value), saved["optimizer"]["state"][name][slot]):
                wrong.append(f"{name}.{slot}")
        if state_of is not None and not slots:
            wrong.append(f"{name} has no state")
    return wrong
