"""`load`."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

import smckpt
from smckpt.integrations.sagemaker.distributed.checkpoint.s3_filesystem import store_options
from smckpt.integrations.sagemaker.state_handler import state

__all__ = ["load"]


def load(
    state_dict: MutableMapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: Any = None,
    planner: Any = None,
    process_group: Any = None,
    check_keys_matched: bool = True,
    coordinator_rank: int | None = None,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """`smckpt.load`, with the groups of a step from `torch.sagemaker.state`.

    Args:
        check_keys_matched: check that the names of all ranks are those of the checkpoint, without a
            collective. Others: as in `smckpt.load`.

    Raises:
        As `smckpt.load`.
    """
    options = smckpt.LoadOptions(**state.of_step(process_group)) if planner is None else None
    smckpt.load(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_reader=storage_reader,
        planner=planner,
        process_group=process_group,
        check_keys_matched=check_keys_matched,
        coordinator_rank=coordinator_rank,
        options=options,
        storage=store_options(s3_region, s3client_config),
    )
