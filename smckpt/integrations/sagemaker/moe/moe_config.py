"""`MoEConfig`, which scripts import: refused."""

from __future__ import annotations

from typing import Any

from smckpt.errors import UsageError

__all__ = ["MoEConfig"]


class MoEConfig:
    """The configuration of SMP's expert layers.

    Raises:
        UsageError: always. smckpt has no expert layers.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UsageError(
            "torch.sagemaker.moe.MoEConfig does not exist here: smckpt has no layers of SMP",
            remedy="build the expert-parallel model yourself, over "
            "torch.sagemaker.state.ep_process_group",
        )
