"""The door to transformers: replaces its trainer classes."""

from __future__ import annotations

import sys

from smckpt.run.places import Provided, refuse_version

__all__ = ["TESTED", "put"]

TESTED = ("4.57", "5.23")


def put(provided: Provided, *, force: bool, shadow: bool) -> None:
    """
    Raises:
        UsageError: transformers is of another version.
    """
    from transformers import __version__, trainer, trainer_seq2seq

    refuse_version("transformers", __version__, TESTED, force)
    from smckpt.integrations.transformers import SmckptTrainer, SmckptTrainerMixin

    # transformers puts another module there during its import
    transformers = sys.modules["transformers"]

    seq2seq = type("SmckptSeq2SeqTrainer", (SmckptTrainerMixin, trainer_seq2seq.Seq2SeqTrainer), {})
    told = "saves in the background, resumes from committed checkpoints"
    for owner in (transformers, trainer):
        provided.attribute(owner, "Trainer", SmckptTrainer, told)
    for owner in (transformers, trainer_seq2seq):
        provided.attribute(owner, "Seq2SeqTrainer", seq2seq, told)
