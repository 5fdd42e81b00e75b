"""`SageMakerTieredStorageWriter` and `SageMakerTieredStorageReader`: which step, in which tiers;
`SageMakerCheckpointConfig`, the strategies of paths and the errors: as
`amzn-sagemaker-checkpointing` 1.1 has them.

DCP would plan one file for each rank. Here they only say what `hyperpod.save` and `load` do.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from smckpt.errors import CheckpointError, UsageError
from smckpt.meeting.group import group_of
from smckpt.storage.urls import is_s3_url, join_url, normal_url

__all__ = [
    "DefaultS3PathStrategy",
    "RayS3PathStrategy",
    "S3PathStrategy",
    "SageMakerCheckpointConfig",
    "SageMakerInMemoryTierError",
    "SageMakerS3TierError",
    "SageMakerTieredStorageConfigError",
    "SageMakerTieredStorageError",
    "SageMakerTieredStorageReader",
    "SageMakerTieredStorageWriter",
    "Snapshot",
]


class SageMakerTieredStorageError(CheckpointError):
    """Root of what the tiers raise where they are made."""


class SageMakerInMemoryTierError(SageMakerTieredStorageError):
    """A step was to be in memory only, and is not."""


class SageMakerS3TierError(SageMakerTieredStorageError):
    """Here for scripts that catch it. What S3 does wrong is a `StorageError`, as everywhere."""


class SageMakerTieredStorageConfigError(SageMakerTieredStorageError):
    """An argument of the config is missing, contradicts another one, or is not honoured."""


class S3PathStrategy:
    """Where a namespace's steps are in S3: in `BASE/NAMESPACE/step_N`, of all ranks together."""

    def __init__(self, base_path: str, logger: logging.Logger | None = None) -> None:
        self.base_path = base_path
        self.logger = logger

    def get_checkpoint_dir(self, namespace: str, step: int) -> str:
        return join_url(self.base_path, f"{namespace}/step_{step}").rstrip("/")


class DefaultS3PathStrategy(S3PathStrategy):
    """The package has a directory for each rank here, and cannot resume with fewer or more ranks.
    smckpt has one for each step."""


class RayS3PathStrategy(S3PathStrategy):
    """The step's directory is the one that Ray Train is told of."""


@dataclass
class SageMakerCheckpointConfig:
    """Not frozen: scripts set `save_to_s3` before each save.

    Args:
        namespace: names the job: letters, digits, hyphens and underscores.
        world_size: the number of ranks of this job. Steps of a job of another size are loaded too.
        s3_tier_base_path: s3://bucket/prefix. The steps are below it, in directories NAMESPACE.
        s3_path_strategy: instead of `s3_tier_base_path`.
        save_to_s3: save the next step there as well as in memory.
        disk_tier_base_path, save_to_disk: the same for a directory that all hosts share.
        logger: is told of each step; None: the logger "smckpt".
    """

    namespace: str
    world_size: int
    disk_tier_base_path: str = ""
    s3_tier_base_path: str = ""
    s3_path_strategy: S3PathStrategy | None = None
    save_to_s3: bool = False
    save_to_disk: bool = False
    logger: logging.Logger | None = None

    def __post_init__(self) -> None:
        if self.s3_tier_base_path and self.s3_path_strategy:
            raise ValueError("s3_tier_base_path and s3_path_strategy are both given: leave one out")

    def get_s3_strategy(self) -> S3PathStrategy | None:
        if self.s3_path_strategy is not None or not self.s3_tier_base_path:
            return self.s3_path_strategy
        return DefaultS3PathStrategy(self.s3_tier_base_path, self.logger)


@dataclass(frozen=True)
class Snapshot:
    """What a config says when a writer or reader is made of it.

    root: of the steps on disk or in S3; "": the config names none. durable: save there.
    """

    namespace: str
    root: str
    durable: bool

    @classmethod
    def of(cls, config: SageMakerCheckpointConfig) -> Snapshot:
        """
        Raises:
            SageMakerTieredStorageConfigError: a field is wrong; names it.
        """
        strategy, group = config.get_s3_strategy(), group_of(None)
        base = strategy.base_path if strategy else config.disk_tier_base_path
        assert group is not None
        wrong, remedy = "", ""
        if not re.fullmatch(r"[A-Za-z0-9_-]+", config.namespace or ""):
            wrong = f"namespace is {config.namespace!r}"
            remedy = "use letters, digits, hyphens and underscores"
        elif config.world_size != group.world_size:
            wrong = f"world_size is {config.world_size}, and the job has {group.world_size} ranks"
            remedy = "pass dist.get_world_size(): steps of other sizes are found as well"
        elif config.save_to_s3 and not strategy:
            wrong, remedy = "save_to_s3 is set without a path", "set s3_tier_base_path"
        elif config.save_to_disk and not config.disk_tier_base_path:
            wrong, remedy = "save_to_disk is set without a path", "set disk_tier_base_path"
        elif strategy and config.disk_tier_base_path:
            wrong = "disk_tier_base_path is not honoured beside a path in S3"
            remedy = "leave one out: below memory there is one tier, on disk or in S3"
        elif strategy and not is_s3_url(strategy.base_path):
            wrong, remedy = f"{base!r} is not a path in S3", "such as s3://bucket/prefix"
        elif (
            strategy and type(strategy).get_checkpoint_dir is not S3PathStrategy.get_checkpoint_dir
        ):
            wrong = f"get_checkpoint_dir of {type(strategy).__name__} is not honoured"
            remedy = "leave it out: a step is in BASE/NAMESPACE/step_N"
        if wrong:
            raise SageMakerTieredStorageConfigError(
                f"{wrong}, in SageMakerCheckpointConfig", remedy=remedy
            )
        root = join_url(normal_url(base), config.namespace) if base else ""
        return cls(config.namespace, root, config.save_to_s3 or config.save_to_disk)


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
