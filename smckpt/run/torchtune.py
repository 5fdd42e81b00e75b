"""The door to torchtune: replaces three methods of its `CheckpointClient`."""

from __future__ import annotations

from smckpt.run.places import Provided, refuse_version

__all__ = ["TESTED", "put"]

TESTED = ("0.6.1",)


def put(provided: Provided, *, force: bool, shadow: bool) -> None:
    """
    Raises:
        UsageError: torchtune is of another version.
    """
    from importlib.metadata import version

    refuse_version("torchtune", version("torchtune").partition("+")[0], TESTED, force)
    from smckpt.integrations.torchtune import take_over

    provided.by(
        take_over(always=True),
        "replaced torchtune's CheckpointClient._get_dcp_checkpointer, _save_checkpoint_sync and "
        "load_distributed_checkpoint: with enable_async_checkpointing, intermediate checkpoints go "
        "through smckpt",
    )
