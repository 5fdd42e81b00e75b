"""Hugging Face's accelerate: `save_state` and `load_state` through smckpt.

One line of a script changes: `SmckptAccelerator` replaces `Accelerator`. smckpt saves models and
optimizers, under FSDP, DDP and in one process. accelerate itself writes the rest (schedulers,
samplers, random numbers, the scaler, registered objects) into a folder of this process, and smckpt
packs that into the checkpoint. So one commit has all of it.

Hooks of `register_save_state_pre_hook` write into the checkpoint's directory before the save, on
all ranks, and save the models that they take from the weights. So they are done when it commits.
Hooks of loads are called before the models are loaded, and under FSDP after it, as by accelerate.
"""

from __future__ import annotations

from smckpt.integrations import refuse_untested

refuse_untested("accelerate")

from smckpt.integrations.accelerate.accelerator import (  # noqa: E402
    SmckptAccelerator,
    load_state,
    prepare_optimizer,
    save_state,
)
from smckpt.integrations.accelerate.merge import merge_fsdp_weights  # noqa: E402

__all__ = [
    "SmckptAccelerator",
    "load_state",
    "merge_fsdp_weights",
    "prepare_optimizer",
    "save_state",
]
