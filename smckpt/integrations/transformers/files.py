"""The files beside a commit: what the Trainer itself writes into a checkpoint's directory.

The directory that the Trainer sees is always a local path. A checkpoint that is elsewhere (a URL,
or `smckpt_root`) gets copies of those files.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from smckpt.checkpoint.records.format import parse_name
from smckpt.storage import Storage
from smckpt.translate.conversion.stock.format import is_stock

__all__ = [
    "STEP",
    "empty_store",
    "is_looked_at",
    "put_file",
    "replace_file",
    "send",
]

STEP = re.compile(r"checkpoint-(\d+)")

_PIECE = 64 << 20

# on_save of transformers' own callbacks → whether it looks at the checkpoint's directory.
_LOOKS: dict[str, Callable[[Any], bool]] = {
    "WandbCallback": lambda one: getattr(one._log_model, "value", "") == "checkpoint",
    "MLflowCallback": lambda one: bool(one._log_artifacts),
    "NeptuneCallback": lambda one: bool(one._should_upload_checkpoint),
    "ClearMLCallback": lambda one: bool(one._log_model),
    "FlyteCallback": lambda one: bool(one.sync_checkpoints),
    "DVCLiveCallback": lambda one: one._log_model == "all",
    "TrackioCallback": lambda one: False,
    "SwanLabCallback": lambda one: False,
}


def is_looked_at(callback: Any) -> bool:
    """Whether `on_save` of a callback may look at the checkpoint. A callback whose `on_save` does
    not can say so with `smckpt_looks = False`."""
    if (answer := getattr(callback, "smckpt_looks", None)) is not None:
        return bool(answer)
    if "on_save" in getattr(callback, "__dict__", {}):
        return True
    owner = next((kind for kind in type(callback).__mro__ if "on_save" in vars(kind)), None)
    if owner is None or owner is TrainerCallback:
        return False
    if owner.__module__.startswith("transformers.") and owner.__name__ in _LOOKS:
        return _LOOKS[owner.__name__](callback)
    return True


def replace_file(path: str, data: bytes) -> None:
    """Write a small local file at once, in place of one that is there."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    own = f"{path}.{os.getpid()}"
    Path(own).write_bytes(data)
    os.replace(own, path)


def put_file(storage: Storage, path: str, data: bytes) -> None:
    """Write a small file at a path below a store, in place of one that is there."""
    folder, _, name = path.rpartition("/")
    if folder:
        storage = storage.join(folder)
    _write(storage, name, memoryview(data))


def send(storage: Storage, directory: str, names: Mapping[str, Any]) -> None:
    """Copy these files and folders of a local directory to the checkpoint's store."""
    top = Path(directory)
    for path in sorted(one for name in names for one in _files(top / name)):
        there = storage
        for part in path.relative_to(top).parts[:-1]:
            there = there.join(part)
        if not path.stat().st_size:
            _write(there, path.name, memoryview(b""))
            continue
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as data,
        ):
            _write(there, path.name, data)


def empty_store(storage: Storage, *, stock_only: bool = False, kept: Any = ()) -> None:
    """Remove the files in a checkpoint's directory of a store, but for smckpt's own."""
    for name in storage.list_dirs():
        if name not in kept and (not stock_only or is_stock(name)):
            empty_store(storage.join(name))
    names = [name for name in storage.names() if parse_name(name) is None and name not in kept]
    storage.delete_many([name for name in names if not stock_only or is_stock(name)])
    if not stock_only:
        storage.remove_directory()


def _files(path: Path) -> list[Path]:
    return [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]


def _write(storage: Storage, name: str, data: memoryview) -> None:
    writer = storage.create_file(name, len(data), replace=True)
    piece = writer.piece or _PIECE
    try:
        for at in range(0, len(data), piece):
            writer.write_at(at, data[at : at + piece])
        writer.finish()
    except BaseException:
        writer.abort()
        raise
