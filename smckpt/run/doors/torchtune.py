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
    from torchtune.training.checkpointing._checkpoint_client import CheckpointClient

    from smckpt.integrations.torchtune import take_over

    client = f"{CheckpointClient.__module__}.{CheckpointClient.__qualname__}"
    effect = "with enable_async_checkpointing, intermediate checkpoints go through smckpt"
    names = ("_get_dcp_checkpointer", "_save_checkpoint_sync", "load_distributed_checkpoint")
    provided.by(take_over(always=True), *(f"replaced {client}.{name}: {effect}" for name in names))
