"""The import paths of SMP v2's `torch.sagemaker` for checkpoints and topology.

These modules translate names and arguments to smckpt's public API. `smckpt run` puts them in place
of an absent `torch.sagemaker` (docs/doors/smp.md).
"""

from __future__ import annotations

from typing import Any, NoReturn

from smckpt.errors import UsageError
from smckpt.integrations import give_paths
from smckpt.integrations.sagemaker.state_handler import init, is_initialized, state

__all__ = ["init", "is_initialized", "state", "transform"]


def transform(*_: Any, **__: Any) -> NoReturn:
    """
    Raises:
        UsageError: always. smckpt has no tensor-parallel layers.
    """
    raise UsageError(
        "torch.sagemaker.transform does not exist here: smckpt has no layers of SMP",
        remedy="build the tensor-parallel model yourself (examples/tensor_parallel.py), over "
        "torch.sagemaker.state.tp_process_group",
    )


give_paths(
    __name__,
    {
        "checkpoint.constants": "checkpoint.utils",
        "context_parallel.utils": "state_handler",
        "distributed.checkpoint.async_utils": "distributed.checkpoint.state_dict_saver",
        "distributed.checkpoint.s3_filesystem": "distributed.checkpoint.filesystem",
        "distributed.checkpoint.state_dict_loader": "distributed.checkpoint.state_dict_saver",
        "distributed.checkpoint.state_dict_utils": "distributed.checkpoint.state_dict_saver",
        "grad_norm": "state_handler",
        "moe.moe_config": "state_handler",
        "utils.process_group_utils": "checkpoint.utils",
        "utils.utils": "checkpoint.utils",
    },
)
