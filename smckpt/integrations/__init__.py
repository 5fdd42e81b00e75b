"""What stands in for other checkpoint systems, the versions with which it was tested, and what
several of them ask.

A Lightning of another version may save and then fail to resume. So an import of an integration
refuses it, as `smckpt run` does.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from importlib import metadata
from typing import Any

from smckpt.errors import UsageError

__all__ = ["ANY_VERSION", "TESTED", "optimizer_state", "refuse_untested"]

ANY_VERSION = "SMCKPT_ANY_VERSION"  # the environment variable that takes every version
TESTED = {  # the beginnings of versions
    "accelerate": ("1.15",),
    "lightning": ("2.6",),
    "torch": ("2.13",),  # its private names, its calls, and DCP's planners
    "torchtitan": ("0.3.0",),
    "torchtune": ("0.6.1",),
    "transformers": ("4.57", "5.23"),
}


def refuse_untested(package: str) -> None:
    """
    Raises:
        ModuleNotFoundError: the package is not installed.
        UsageError: the version that is installed was not tested, and `ANY_VERSION` is not set.
    """
    version, tested = metadata.version(package).partition("+")[0], TESTED[package]
    if not os.environ.get(ANY_VERSION) and not f"{version}.".startswith(
        tuple(f"{begin}." for begin in tested)
    ):
        raise UsageError(
            f"{package} {version} was not tested; {', '.join(tested)} was",
            remedy="install that version, or take it as it is: `smckpt run --force`, force=True, "
            f"or {ANY_VERSION}=1 in the environment for an import",
        )


def optimizer_state(optimizer: Any, models: Collection[Any]) -> Any:
    """What stands for an optimizer in a state, inside the blocks of its models: its state dict.

    One that trains tensors of several models, or of none, has no names for all of them. It stands
    there itself, and they are numbered, as in torch's own dict. Under FSDP1 the block refuses it by
    name, unless it trains tensors of none: the part of a tensor needs the name that has its shape.

    Args:
        optimizer: as accelerate has prepared it.
    """
    from smckpt.state_dict.fsdp1 import Fsdp1View  # with torch, which no version needs

    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    held = [{id(p) for p in model.parameters()} for model in models]
    named = any(trained <= each for each in held)
    if named or (any(trained & each for each in held) and any(map(Fsdp1View.sees, models))):
        return optimizer.state_dict()
    return optimizer.optimizer
