"""The door to torchtitan: configs of its checkpoint manager build smckpt's."""

from __future__ import annotations

from smckpt.run.places import Provided, refuse_version

__all__ = ["TESTED", "put"]

TESTED = ("0.3.0",)


def put(provided: Provided, *, force: bool, shadow: bool) -> None:
    """
    Raises:
        UsageError: torchtitan is of another version.
    """
    from importlib.metadata import version

    refuse_version("torchtitan", version("torchtitan").partition("+")[0], TESTED, force)
    from torchtitan.components.checkpointer import CheckpointManager

    from smckpt.integrations.torchtitan import take_over

    kind = CheckpointManager.Config

    provided.by(
        take_over(),
        f"replaced {kind.__module__}.{kind.__qualname__}._owner: it builds smckpt's, which saves "
        "and loads all but Hugging Face's files",
    )
