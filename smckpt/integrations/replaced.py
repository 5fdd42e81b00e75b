"""Files of another system in a directory that smckpt saves to: they go when the save is committed.

Until then they may be the only checkpoint. Afterwards a reader of those files would get old values.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from smckpt.checkpoint.commits.remove import remove_probes
from smckpt.storage import access_to
from smckpt.translate.conversion.stock.format import is_stock

__all__ = ["remove_stale", "remove_tried", "stamps", "stock_files"]


def stamps(directory: str) -> dict[str, tuple[int, int]]:
    """The files and folders in a local directory: name → what changes with each new content."""
    found = {}
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                found[entry.name] = (status.st_ino, status.st_mtime_ns)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return found


def stock_files(directory: str) -> dict[str, tuple[int, int]]:
    """Those of `stamps` that hold another system's weights and training state."""
    return {
        name: stamp
        for name, stamp in stamps(directory).items()
        if is_stock(name) or _is_adapter(os.path.join(directory, name))
    }


def remove_stale(directory: str, before: Mapping[str, tuple[int, int]]) -> None:
    """Remove what was in a local directory before a save, unless it was written again."""
    now = stamps(directory)
    for name, stamp in before.items():
        if now.get(name) == stamp:
            path = os.path.join(directory, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)


def _is_adapter(path: str) -> bool:
    """Whether it is the folder of one adapter of PEFT among several."""
    return os.path.isfile(os.path.join(path, "adapter_config.json"))


def remove_tried(
    folder: str, step_of: Callable[[str], int | None], newest: int, arguments: Mapping[str, Any]
) -> None:
    """Remove the directories of older steps in which a save was killed before it wrote anything.

    Args:
        step_of: the step of a directory, by its name; None: of none.
        newest: a step that is committed.
        arguments: options of the folder's store.
    """
    root = access_to(folder, **arguments).open(folder)
    steps = ((step_of(name), name) for name in root.list_dirs())
    remove_probes(root, [name for step, name in steps if step is not None and step < newest])
