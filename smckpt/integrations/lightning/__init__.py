"""Lightning, and NeMo's S3 checkpointing, through smckpt.

`SmckptCheckpointIO` and `S3CheckpointIO` are Lightning's plugins for one process and DDP.
`SmckptFSDPStrategy` and `SmckptModelParallelStrategy` take the place of Lightning's sharded
strategies, which do not use plugins. `SmckptCheckpointConnector` finds where to resume.
"""

from __future__ import annotations

from smckpt.integrations.lightning.connector import SmckptCheckpointConnector
from smckpt.integrations.lightning.names import provide_s3
from smckpt.integrations.lightning.nemo import NeMoCheckpointConnector, NeMoModelCheckpoint
from smckpt.integrations.lightning.plugin import (
    S3CheckpointIO,
    SmckptCheckpointIO,
    load_any,
)
from smckpt.integrations.lightning.s3 import S3Utils
from smckpt.integrations.lightning.strategies import (
    SmckptFSDPStrategy,
    SmckptModelParallelStrategy,
)
from smckpt.integrations.lightning.trainer import SmckptTrainer

__all__ = [
    "NeMoCheckpointConnector",
    "NeMoModelCheckpoint",
    "S3CheckpointIO",
    "S3Utils",
    "SmckptCheckpointConnector",
    "SmckptCheckpointIO",
    "SmckptFSDPStrategy",
    "SmckptModelParallelStrategy",
    "SmckptTrainer",
    "load_any",
]

provide_s3()
