"""Opens a checkpoint of ours, or of another system by a reader that is registered for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smckpt.registry import Registry

if TYPE_CHECKING:
    from smckpt.checkpoint.reading.catalogue import Catalogue
    from smckpt.storage import Storage

__all__ = ["Reader", "open_any", "register_reader"]


@dataclass(frozen=True)
class Reader:
    """A reader of checkpoints of other systems.

    Args:
        open: gives the catalogue of what other systems wrote in a directory or file, or None where
            it knows nothing there. It raises UsageError for what it knows and cannot read as one
            state, and CorruptCheckpointError for what is damaged.
    """

    open: Callable[[Storage], Catalogue | None]


_READERS = Registry("reader of checkpoints", Reader, "smckpt.readers", {})


def register_reader(name: str, reader: Reader) -> None:
    """Register a reader for the life of the process. Readers are asked in the order of their
    registration, and those of installed packages (entry points of the group `smckpt.readers`) last.

    Raises:
        UsageError: another reader has this name.
    """
    _READERS.register(name, reader)


def open_any(storage: Storage, *, choose: str | None = None, name: str | None = None) -> Catalogue:
    """The newest commit of ours in a directory; or, where there is none, the checkpoint that others
    wrote there. Arguments and errors are those of `open_catalogue`.

    Raises:
        UsageError: others wrote it, in a form that is no whole state.
    """
    # so that `import smckpt`, which registers a reader, loads none of this room
    from smckpt.checkpoint.reading.committed import open_catalogue
    from smckpt.checkpoint.records.format import parse_name
    from smckpt.errors import CheckpointNotFoundError

    failure: CheckpointNotFoundError | None = None
    single = storage.folder is not None and os.path.isfile(storage.folder)
    if not single and (choose is None or parse_name(choose) is not None):
        try:
            return open_catalogue(storage, choose=choose, name=name)
        except CheckpointNotFoundError as error:
            failure = error
    for reader in _READERS.all().values():
        found = reader.open(storage)
        if found is not None:
            return found
    raise failure or CheckpointNotFoundError(
        "nothing is here", remedy="check the path", path=storage.url
    )
