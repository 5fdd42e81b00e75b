"""The names of `amzn-sagemaker-checkpointing`, HyperPod's managed tiers of checkpoints."""

from __future__ import annotations

from smckpt.integrations.hyperpod.calls import async_save, load, save
from smckpt.integrations.hyperpod.tiered import (
    DefaultS3PathStrategy,
    RayS3PathStrategy,
    S3PathStrategy,
    SageMakerCheckpointConfig,
    SageMakerInMemoryTierError,
    SageMakerS3TierError,
    SageMakerTieredStorageConfigError,
    SageMakerTieredStorageError,
    SageMakerTieredStorageReader,
    SageMakerTieredStorageWriter,
)

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
    "async_save",
    "load",
    "save",
]
