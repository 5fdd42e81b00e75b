"""smckpt: checkpoints for PyTorch FSDP training, saved in the background, exact and verified.

The public names and nothing else. They are resolved on first use, so that `import smckpt`, the
`smckpt` command and the worker process do not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from smckpt._version import __version__

if TYPE_CHECKING:
    from smckpt.checkpoint.discover import find_checkpoints
    from smckpt.checkpoint.verify import verify_checkpoint
    from smckpt.engine.api import (
        SaveHandle,
        SaveOptions,
        Timings,
        async_save,
        get_global_ranks,
        latest_checkpoint,
        load,
        maybe_finalize_async_calls,
        save,
    )
    from smckpt.engine.dcp import DistributedFileSystemReader, DistributedFileSystemWriter
    from smckpt.errors import (
        CheckpointError,
        CheckpointNotFoundError,
        CheckpointReplacedError,
        CorruptCheckpointError,
        FormatVersionError,
        KeysMismatchError,
        MemoryBudgetError,
        PeerError,
        SaveFailedError,
        StateError,
        StorageError,
        TensorMismatchError,
        TopologyError,
        UsageError,
        WorkerError,
    )
    from smckpt.state_dict import (
        FULL,
        LOCAL,
        SHARDED,
        FullStateDictConfig,
        SMStateDictType,
        extend_torch_config,
        init_optim_state,
        sm_state_dict_type,
    )
    from smckpt.storage.s3_config import S3Config
    from smckpt.storage.urls import build_s3_url, is_s3_url, parse_s3_url
    from smckpt.topology import ParallelState
    from smckpt.translate import export_hf, import_hf, register_layout, verify_hf

__all__ = [
    "FULL",
    "LOCAL",
    "SHARDED",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointReplacedError",
    "CorruptCheckpointError",
    "DistributedFileSystemReader",
    "DistributedFileSystemWriter",
    "FormatVersionError",
    "FullStateDictConfig",
    "KeysMismatchError",
    "MemoryBudgetError",
    "ParallelState",
    "PeerError",
    "S3Config",
    "SMStateDictType",
    "SaveFailedError",
    "SaveHandle",
    "SaveOptions",
    "StateError",
    "StorageError",
    "TensorMismatchError",
    "Timings",
    "TopologyError",
    "UsageError",
    "WorkerError",
    "__version__",
    "async_save",
    "build_s3_url",
    "export_hf",
    "extend_torch_config",
    "find_checkpoints",
    "get_global_ranks",
    "import_hf",
    "init_optim_state",
    "is_s3_url",
    "latest_checkpoint",
    "load",
    "maybe_finalize_async_calls",
    "parse_s3_url",
    "register_layout",
    "save",
    "sm_state_dict_type",
    "verify_checkpoint",
    "verify_hf",
]

# Where each public name lives; the imports under TYPE_CHECKING say the same to type checkers.
_HOMES = {
    "smckpt.checkpoint.discover": ("find_checkpoints",),
    "smckpt.checkpoint.verify": ("verify_checkpoint",),
    "smckpt.engine.api": (
        "SaveHandle",
        "SaveOptions",
        "Timings",
        "async_save",
        "get_global_ranks",
        "latest_checkpoint",
        "load",
        "maybe_finalize_async_calls",
        "save",
    ),
    "smckpt.engine.dcp": ("DistributedFileSystemReader", "DistributedFileSystemWriter"),
    "smckpt.errors": tuple(name for name in __all__ if name.endswith("Error")),
    "smckpt.state_dict": (
        "FULL",
        "LOCAL",
        "SHARDED",
        "FullStateDictConfig",
        "SMStateDictType",
        "extend_torch_config",
        "init_optim_state",
        "sm_state_dict_type",
    ),
    "smckpt.storage.s3_config": ("S3Config",),
    "smckpt.storage.urls": ("build_s3_url", "is_s3_url", "parse_s3_url"),
    "smckpt.topology": ("ParallelState",),
    "smckpt.translate": ("export_hf", "import_hf", "register_layout", "verify_hf"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'smckpt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
