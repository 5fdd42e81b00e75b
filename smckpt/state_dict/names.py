"""Fully qualified names, the same whatever wraps the model."""

from __future__ import annotations

import functools
import re

__all__ = ["canonical"]

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)(?:\.|$)"
)


@functools.lru_cache(maxsize=1 << 16)
def canonical(name: str, *, ddp: bool = False) -> str:
    """`name` without the components that FSDP1, torch.compile and activation checkpointing add;
    with `ddp`, without DistributedDataParallel's leading "module." too."""
    name = _WRAPPERS.sub("", name)
    if ddp:
        name = name.removeprefix("module.")
    return name.removesuffix(".")
