"""`setup_transformer_engine_cp_groups`, which scripts import: refused."""

from __future__ import annotations

from typing import Any, NoReturn

from smckpt.errors import UsageError

__all__ = ["setup_transformer_engine_cp_groups"]


def setup_transformer_engine_cp_groups(*_: Any, **__: Any) -> NoReturn:
    """
    Raises:
        UsageError: always. smckpt does not change layers.
    """
    raise UsageError(
        "torch.sagemaker.context_parallel does not exist here: smckpt has no layers of SMP",
        remedy="give torch.sagemaker.state.cp_process_group to Transformer Engine's layers "
        "yourself (set_context_parallel_group)",
    )
