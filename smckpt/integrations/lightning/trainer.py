"""Lightning's `Trainer` with smckpt's connector."""

from __future__ import annotations

import functools
from typing import Any

from lightning.pytorch import Trainer

from smckpt.integrations.lightning.connector import SmckptCheckpointConnector

__all__ = ["SmckptTrainer"]


class SmckptTrainer(Trainer):  # type: ignore[misc]
    """Lightning's `Trainer`, resuming through `SmckptCheckpointConnector`."""

    @functools.wraps(Trainer.__init__)  # type: ignore[misc] # Lightning reads its arguments' names
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._checkpoint_connector = SmckptCheckpointConnector(self)
