"""The door to transformers: replaces its trainer classes."""

from __future__ import annotations

import sys

from smckpt.integrations import versions
from smckpt.run.places import Provided, refuse_version

__all__ = ["TESTED", "put"]

TESTED = versions.TESTED["transformers"]


def put(provided: Provided, *, force: bool, shadow: bool) -> None:
    """
    Raises:
        UsageError: transformers is of another version.
    """
    from transformers import __version__, trainer, trainer_seq2seq, trainer_utils

    refuse_version("transformers", __version__, TESTED, force)
    from smckpt.integrations.transformers import (
        SmckptTrainer,
        SmckptTrainerMixin,
        get_last_checkpoint,
    )

    # transformers puts another module there during its import
    transformers = sys.modules["transformers"]

    seq2seq = type("SmckptSeq2SeqTrainer", (SmckptTrainerMixin, trainer_seq2seq.Seq2SeqTrainer), {})
    effect = "saves in the background, resumes from committed checkpoints"
    for owner in (transformers, trainer):
        provided.attribute(owner, "Trainer", SmckptTrainer, effect)
    for owner in (transformers, trainer_seq2seq):
        provided.attribute(owner, "Seq2SeqTrainer", seq2seq, effect)
    effect = "finds checkpoints below a URL too"
    provided.attribute(trainer_utils, "get_last_checkpoint", get_last_checkpoint, effect)
