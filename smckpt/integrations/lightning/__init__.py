"""Lightning, and NeMo's S3 checkpointing, through smckpt.

`SmckptCheckpointIO` and `S3CheckpointIO` are Lightning's plugins for one process and DDP.
`SmckptFSDPStrategy` and `SmckptModelParallelStrategy` take the place of Lightning's sharded
strategies, which do not use plugins. `SmckptCheckpointConnector` finds where to resume.
"""

from __future__ import annotations

from smckpt.integrations import refuse_untested

refuse_untested("lightning")

from lightning.pytorch.core import saving  # noqa: E402
from lightning.pytorch.plugins.io import AsyncCheckpointIO  # noqa: E402

from smckpt.integrations.lightning.connector import (  # noqa: E402
    NeMoCheckpointConnector,
    NeMoModelCheckpoint,
    SmckptCheckpointConnector,
    SmckptMemory,
    SmckptTrainer,
)
from smckpt.integrations.lightning.plugin import (  # noqa: E402
    S3CheckpointIO,
    SmckptCheckpointIO,
    announced,
    load_any,
)
from smckpt.integrations.lightning.s3 import S3Utils, provide_s3  # noqa: E402
from smckpt.integrations.lightning.strategies import (  # noqa: E402
    SmckptFSDPStrategy,
    SmckptModelParallelStrategy,
)

__all__ = [
    "NeMoCheckpointConnector",
    "NeMoModelCheckpoint",
    "S3CheckpointIO",
    "S3Utils",
    "SmckptCheckpointConnector",
    "SmckptCheckpointIO",
    "SmckptFSDPStrategy",
    "SmckptMemory",
    "SmckptModelParallelStrategy",
    "SmckptTrainer",
    "load_any",
]

provide_s3()
# `load_from_checkpoint` is a method of the user's class, which asks this function alone
saving.pl_load = load_any(saving.pl_load)
# its thread may begin a save after other ranks have asked for it
AsyncCheckpointIO.save_checkpoint = announced(AsyncCheckpointIO.save_checkpoint)
