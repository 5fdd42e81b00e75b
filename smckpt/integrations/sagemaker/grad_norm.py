"""`clip_grad_norm_` of a model in FSDP."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from smckpt.errors import UsageError
from smckpt.integrations.sagemaker.state_handler import state

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(model: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """The model's own `clip_grad_norm_`, which FSDP has.

    Returns:
        The norm of the gradients before they were clipped.

    Raises:
        UsageError: tensor or expert parallelism: which parameters their ranks hold twice, only
            SMP's layers know.
    """
    parallel = state.parallel
    if parallel is not None and parallel.tp_size * parallel.ep_size > 1:
        raise UsageError(
            "torch.sagemaker.grad_norm.clip_grad_norm_ does not exist here for tensor or expert "
            "parallelism: it needs SMP's layers",
            remedy="clip the gradients in the script",
        )
    norm: Tensor = model.clip_grad_norm_(max_norm, norm_type)
    return norm
