"""The door to torch.distributed.checkpoint: replaces its save, its load, its reader and writer."""

from __future__ import annotations

import importlib
from contextlib import suppress

from smckpt.run.places import Provided, refuse_version

__all__ = ["TESTED", "put", "put_storage"]

TESTED = ("2.13",)  # versions of torch
# Their classes derive from DCP's reader and writer, so they are made before the names change.
_DERIVED = ("_fsspec_filesystem", "hf_storage", "quantized_hf_storage")


def put(provided: Provided, *, force: bool, shadow: bool) -> None:
    """
    Raises:
        UsageError: torch is of another version.
    """
    import torch
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    refuse_version("torch", torch.__version__.partition("+")[0], TESTED, force)
    from smckpt.integrations.dcp import calls

    for owner in (checkpoint, state_dict_saver):
        provided.attribute(owner, "save", calls.save, "saves in smckpt's format")
        effect = "saves in the background, by a process of its own"
        provided.attribute(owner, "async_save", calls.async_save, effect)
    for owner in (checkpoint, state_dict_loader):
        effect = "loads smckpt's checkpoints and DCP's"
        provided.attribute(owner, "load", calls.load, effect)
    put_storage(provided)


def put_storage(provided: Provided) -> None:
    """Replace the reader and the writer alone, so that DCP plans and smckpt stores."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import filesystem

    from smckpt.integrations.dcp import calls

    for module in _DERIVED:
        with suppress(ImportError):  # a package that it needs is absent
            importlib.import_module(f"{checkpoint.__name__}.{module}")
    owners = [checkpoint, filesystem]
    with suppress(ImportError):  # where DCP's own functions find a reader for a path
        owners.append(importlib.import_module(f"{checkpoint.__name__}._storage_utils"))
    for owner in owners:
        effect = "writes smckpt's format"
        provided.attribute(owner, "FileSystemWriter", calls.FileSystemWriter, effect)
        effect = "reads smckpt's checkpoints and DCP's"
        provided.attribute(owner, "FileSystemReader", calls.FileSystemReader, effect)
