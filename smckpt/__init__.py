"""smckpt: checkpoints for PyTorch FSDP training, saved in the background, exact and verified.

The public names and nothing else. They are resolved on first use, so that `import smckpt`, the
`smckpt` command and the worker process do not wait for torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from smckpt._version import __version__
from smckpt.registry import (
    BACKENDS,
    TRANSLATORS,
    Backend,
    LiveTranslator,
    Reader,
    register_reader,
)

if TYPE_CHECKING:
    from smckpt.checkpoint.commits.discover import FoundCheckpoint, find_checkpoints
    from smckpt.checkpoint.commits.remove import RemoveReport, pinned
    from smckpt.checkpoint.commits.run_directory import RetentionPolicy
    from smckpt.checkpoint.upkeep.verify import verify_checkpoint
    from smckpt.engine.api import (
        LoadEvent,
        LoadOptions,
        SaveEvent,
        SaveHandle,
        SaveOptions,
        Timings,
        add_sink,
        async_save,
        get_global_ranks,
        latest_checkpoint,
        load,
        maybe_finalize_async_calls,
        prewarm,
        remove,
        save,
    )
    from smckpt.engine.groups import ReplicationGroup, replication_group
    from smckpt.engine.saving.alarms import Alarms
    from smckpt.errors import (
        CheckpointError,
        CheckpointNotFoundError,
        CheckpointPinnedError,
        CheckpointReplacedError,
        CorruptCheckpointError,
        FormatVersionError,
        JobStoreError,
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
    from smckpt.formats.conversion.convert import convert
    from smckpt.full.context import extend_torch_config, sm_state_dict_type
    from smckpt.full.gathered import FullStateDictConfig
    from smckpt.integrations.dcp import DistributedFileSystemReader, DistributedFileSystemWriter
    from smckpt.manager.manager import CheckpointManager
    from smckpt.manager.memory import Memory
    from smckpt.manager.notice import Signals
    from smckpt.manager.retention import Best, Every
    from smckpt.state_dict import FULL, LOCAL, SHARDED, SMStateDictType, init_optim_state
    from smckpt.storage import StoreOptions, register_store
    from smckpt.storage.urls import build_s3_url, is_s3_url, parse_s3_url
    from smckpt.topology import ParallelState
    from smckpt.translate import (
        Adapter,
        ExportOptions,
        ImportOptions,
        Parallel,
        apply_published,
        export_hf,
        import_hf,
        publish,
        register_layout,
        reload_weights,
        verify_hf,
    )

__all__ = [
    "FULL",
    "LOCAL",
    "SHARDED",
    "Adapter",
    "Alarms",
    "Best",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CheckpointPinnedError",
    "CheckpointReplacedError",
    "CorruptCheckpointError",
    "DistributedFileSystemReader",
    "DistributedFileSystemWriter",
    "Every",
    "ExportOptions",
    "FormatVersionError",
    "FoundCheckpoint",
    "FullStateDictConfig",
    "ImportOptions",
    "JobStoreError",
    "KeysMismatchError",
    "LoadEvent",
    "LoadOptions",
    "Memory",
    "MemoryBudgetError",
    "Parallel",
    "ParallelState",
    "PeerError",
    "RemoveReport",
    "ReplicationGroup",
    "RetentionPolicy",
    "SMStateDictType",
    "SaveEvent",
    "SaveFailedError",
    "SaveHandle",
    "SaveOptions",
    "Signals",
    "StateError",
    "StorageError",
    "StoreOptions",
    "TensorMismatchError",
    "Timings",
    "TopologyError",
    "UsageError",
    "WorkerError",
    "__version__",
    "add_sink",
    "apply_published",
    "async_save",
    "build_s3_url",
    "convert",
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
    "pinned",
    "prewarm",
    "publish",
    "register_layout",
    "register_store",
    "reload_weights",
    "remove",
    "replication_group",
    "save",
    "sm_state_dict_type",
    "verify_checkpoint",
    "verify_hf",
]

# Where each public name lives; the imports under TYPE_CHECKING say the same to type checkers.
_HOMES = {
    "smckpt.checkpoint.commits.discover": ("FoundCheckpoint", "find_checkpoints"),
    "smckpt.checkpoint.commits.remove": ("RemoveReport", "pinned"),
    "smckpt.checkpoint.commits.run_directory": ("RetentionPolicy",),
    "smckpt.checkpoint.upkeep.verify": ("verify_checkpoint",),
    "smckpt.engine.saving.alarms": ("Alarms",),
    "smckpt.engine.api": (
        "LoadEvent",
        "LoadOptions",
        "SaveEvent",
        "SaveHandle",
        "SaveOptions",
        "Timings",
        "add_sink",
        "async_save",
        "get_global_ranks",
        "latest_checkpoint",
        "load",
        "maybe_finalize_async_calls",
        "prewarm",
        "remove",
        "save",
    ),
    "smckpt.integrations.dcp": ("DistributedFileSystemReader", "DistributedFileSystemWriter"),
    "smckpt.engine.groups": ("ReplicationGroup", "replication_group"),
    "smckpt.errors": tuple(name for name in __all__ if name.endswith("Error")),
    "smckpt.formats.conversion.convert": ("convert",),
    "smckpt.full.context": ("extend_torch_config", "sm_state_dict_type"),
    "smckpt.full.gathered": ("FullStateDictConfig",),
    "smckpt.manager.manager": ("CheckpointManager",),
    "smckpt.manager.retention": ("Best", "Every"),
    "smckpt.manager.memory": ("Memory",),
    "smckpt.manager.notice": ("Signals",),
    "smckpt.state_dict": ("FULL", "LOCAL", "SHARDED", "SMStateDictType", "init_optim_state"),
    "smckpt.storage": ("StoreOptions", "register_store"),
    "smckpt.storage.urls": ("build_s3_url", "is_s3_url", "parse_s3_url"),
    "smckpt.topology": ("ParallelState",),
    "smckpt.translate": (
        *("Adapter", "ExportOptions", "ImportOptions", "Parallel"),
        *("apply_published", "export_hf", "import_hf", "publish"),
        *("register_layout", "reload_weights", "verify_hf"),
    ),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'smckpt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _above(home: str, name: str) -> Callable[..., Any]:
    """A function of a room above, for those below to call; imported when it is called."""

    def call(*arguments: Any, **more: Any) -> Any:
        return getattr(importlib.import_module(home), name)(*arguments, **more)

    return call


register_reader(
    "others", Reader(_above("smckpt.formats.readers.foreign_catalogue", "foreign_catalogue"))
)
TRANSLATORS.register(
    "hugging_face",
    LiveTranslator(
        recognises=_above("smckpt.translate.tables.layouts", "looks_transformed"),
        full_state=_above("smckpt.translate.live.full_state", "full_state"),
    ),
)
BACKENDS.register(
    "dcp",
    Backend(
        save=_above("smckpt.integrations.dcp", "foreign_save"),
        load=_above("smckpt.integrations.dcp", "foreign_load"),
    ),
)
