"""Hugging Face's Trainer, saving and resuming through smckpt.

One line of a script changes: `class MyTrainer(SmckptTrainerMixin, Trainer)`, or `SmckptTrainer` in
place of `Trainer`. A callback cannot do it, since the Trainer has saved before it calls `on_save`.
"""

from __future__ import annotations

from smckpt.integrations import refuse_untested

refuse_untested("transformers")

from smckpt.integrations.transformers.resume import get_last_checkpoint  # noqa: E402
from smckpt.integrations.transformers.trainer import (  # noqa: E402
    SmckptTrainer,
    SmckptTrainerMixin,
)

__all__ = ["SmckptTrainer", "SmckptTrainerMixin", "get_last_checkpoint"]
