"""NeMo's names around a resumption from S3: rank 0 alone finds it, and tells the others.

`trainer._checkpoint_connector = NeMoCheckpointConnector(trainer)`; rank 0 sets `trainer.ckpt_path`,
`NeMoModelCheckpoint.setup()` broadcasts it, and the connector of each rank takes it.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from smckpt.integrations.lightning.connector import SmckptCheckpointConnector

__all__ = ["NeMoCheckpointConnector", "NeMoModelCheckpoint"]

NeMoCheckpointConnector = SmckptCheckpointConnector


class NeMoModelCheckpoint(ModelCheckpoint):  # type: ignore[misc]
    """Lightning's `ModelCheckpoint`; `setup` tells all ranks where rank 0 resumes. It has none of
    the arguments that concern `.nemo` archives."""

    last_model_path: str

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        trainer.ckpt_path = trainer.strategy.broadcast(trainer.ckpt_path)
        last: str = self.last_model_path
        self.last_model_path = trainer.strategy.broadcast(last)
