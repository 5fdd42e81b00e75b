"""`SageMakerTieredStorageWriter` and `SageMakerTieredStorageReader`: which step, in which tiers.

DCP would plan one file for each rank. Here they only say what `hyperpod.save` and `load` do.
"""

from __future__ import annotations

import os
import re
from typing import Any, NoReturn

from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from smckpt.errors import UsageError
from smckpt.integrations.hyperpod.config import (
    SageMakerCheckpointConfig,
    SageMakerTieredStorageError,
    Snapshot,
)

__all__ = ["SageMakerTieredStorageReader", "SageMakerTieredStorageWriter"]


class _NotPlanned:
    """The calls of DCP, all refused."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"torch's own save and load do not know the tiers of a {type(self).__name__}",
            remedy="run the script by `smckpt run --for hyperpod`, or import save, async_save and "
            "load from smckpt.integrations.hyperpod",
        )

    reset = set_up_storage_writer = set_up_storage_reader = read_metadata = _refuse
    prepare_local_plan = prepare_global_plan = write_data = read_data = finish = _refuse

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class SageMakerTieredStorageWriter(_NotPlanned, StorageWriter):
    """Names a step that is saved in memory, and also on disk or in S3 if the config says so now.

    Args:
        path: instead of `step`: the N of "step_N" in it.

    Attributes:
        in_memory_success, s3_success: of the save, once its future is done.

    Raises:
        SageMakerTieredStorageConfigError: the config is wrong; names the field.
        SageMakerTieredStorageError: neither `step` nor `path` names a step.
    """

    def __init__(
        self,
        checkpoint_config: SageMakerCheckpointConfig,
        path: str | os.PathLike[str] = "",
        step: int = -1,
        *more: Any,
        **named: Any,
    ) -> None:
        super().__init__()
        if more or named:
            raise UsageError(
                f"{[*more, *named]} are arguments that the tiers do not honour",
                remedy="leave them out",
            )
        found = re.search(r"step_(\d+)(?:/|$)", os.fspath(path))
        if step == -1 and found:
            step = int(found[1])
        if type(step) is not int or step < 0:
            raise SageMakerTieredStorageError(
                f"step is {step!r} and path is {os.fspath(path)!r}",
                remedy="pass a whole number from 0 as step=",
            )
        self.checkpoint_config = checkpoint_config
        self.step = step
        self.asked = Snapshot.of(checkpoint_config)  # a script changes it for the next step
        self.in_memory_success = self.s3_success = False

    @property
    def s3_checkpoint_dir(self) -> str | None:
        """Where the step is in S3 if it is saved there; None: the config has no path in S3."""
        strategy = self.checkpoint_config.get_s3_strategy()
        return (
            None
            if strategy is None
            else strategy.get_checkpoint_dir(self.asked.namespace, self.step)
        )


class SageMakerTieredStorageReader(_NotPlanned, StorageReader):
    """Names the step to load.

    Args:
        step: None: the newest one that is whole, over all tiers; after the load, that one.

    Raises:
        SageMakerTieredStorageConfigError: the config is wrong; names the field.
    """

    def __init__(
        self, checkpoint_config: SageMakerCheckpointConfig, step: int | None = None
    ) -> None:
        super().__init__()
        self.checkpoint_config = checkpoint_config
        self.step = step
        self.asked = Snapshot.of(checkpoint_config)
