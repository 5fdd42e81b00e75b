"""The door to accelerate: replaces methods of its `Accelerator`."""

from __future__ import annotations

from typing import Any

from smckpt.integrations import versions
from smckpt.run.places import Provided, refuse_version

__all__ = ["TESTED", "put"]

TESTED = versions.TESTED["accelerate"]


def put(provided: Provided, *, force: bool, shadow: bool) -> None:
    """
    Raises:
        UsageError: accelerate is of another version.
    """
    import accelerate
    from accelerate.commands import merge
    from accelerate.utils import fsdp_utils

    import smckpt
    from smckpt.integrations.accelerate import load_state, merge_fsdp_weights, save_state

    refuse_version("accelerate", accelerate.__version__, TESTED, force)
    kind = accelerate.Accelerator
    stock = {name: getattr(kind, name) for name in ("save_state", "load_state", "end_training")}

    def save(self: Any, *args: Any, **kwargs: Any) -> str:
        return save_state(self, stock["save_state"].__get__(self), *args, **kwargs)

    def load(self: Any, *args: Any, **kwargs: Any) -> None:
        load_state(self, stock["load_state"].__get__(self), *args, **kwargs)

    def end(self: Any) -> None:
        smckpt.maybe_finalize_async_calls()
        stock["end_training"](self)

    provided.attribute(kind, "save_state", save, "saves in the background, in one commit")
    provided.attribute(kind, "load_state", load, "loads committed checkpoints")
    provided.attribute(kind, "end_training", end, "waits for the last commit")
    for owner in (accelerate.utils, fsdp_utils, merge):
        effect = "merges committed checkpoints"
        provided.attribute(owner, "merge_fsdp_weights", merge_fsdp_weights, effect)
