"""What a commit replaces: older steps of the run, and files of another system in the directory.

Those may be the only checkpoint until the commit. Afterwards a reader of them would get old values.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import smckpt
from smckpt.checkpoint.commits.remove import remove_probes
from smckpt.checkpoint.commits.run_directory import RetentionPolicy, RunDirectory, Template
from smckpt.errors import CheckpointNotFoundError, CheckpointPinnedError, UsageError
from smckpt.formats.conversion.stock import FSDP, is_stock
from smckpt.manager.retention import Newest
from smckpt.storage import access_to
from smckpt.storage.disk.directory import Directory
from smckpt.storage.urls import Below, disk_path

log = logging.getLogger("smckpt")


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
        # or the folder of one adapter of PEFT among several
        if is_stock(name) or os.path.isfile(os.path.join(directory, name, "adapter_config.json"))
    }


def remove_stale(directory: str, before: Mapping[str, tuple[int, int]]) -> None:
    """Remove what was in a local directory before a save, unless it was written again.

    Raises:
        UsageError: the directory is a link by now.
    """
    if not before:
        return
    run, name = os.path.split(os.path.abspath(directory))
    with Directory.open(run, [name]) as here:
        for name, stamp in before.items():
            status = here.status(name)
            if status is not None and (status.st_ino, status.st_mtime_ns) == stamp:
                here.remove_all(name)


def below_run(directory: str | os.PathLike[str]) -> str:
    """The directory of a checkpoint, which the door has named, in the run's, which the user has: a
    save or removal there goes where no symbolic link of its name leads."""
    directory = os.fspath(directory)
    path = disk_path(directory)
    return directory if path is None else Below(directory, os.path.dirname(path))


def store_arguments(given: Mapping[str, Any], *also: str) -> dict[str, Any]:
    """Those of the `smckpt_arguments` of a door that go with each of its saves, loads and looks.

    Args:
        also: further arguments that the door honours.

    Raises:
        UsageError: another argument is given; names it.
    """
    if other := sorted(map(str, given.keys() - {"storage", *also})):
        raise UsageError(
            f"smckpt_arguments has {', '.join(other)}, which is not honoured",
            remedy=f"leave it out: it takes {' and '.join(('storage', *also))}",
        )
    return {name: value for name, value in given.items() if name not in also}


def run_directory(root: str, template: str, arguments: Mapping[str, Any]) -> RunDirectory:
    """
    Args:
        template: of the names of steps, such as "step-{step}".
        arguments: options of the root's store.
    """
    return RunDirectory(access_to(root, **arguments).open(root), Template(template))


def keep_last(run: RunDirectory, kept: int | RetentionPolicy, newest: int) -> None:
    """Remove the steps that are not kept, and what killed saves have left.

    Args:
        kept: the number of the last steps, as in `CheckpointManager(keep_last_n=)`, or a policy.
        newest: the step that was just committed, which stays.
    """
    run.keep((Newest(kept) if isinstance(kept, int) else kept,), run.template.subpath(newest))
    remove_probes(run.root, [subpath for step, subpath in run.directories() if step < newest])


def fsdp_of(accelerator: Any) -> dict[str, Any]:
    """Metadata of a save under accelerate's FSDP: what it needs to know who goes back to stock."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        return {}
    kind = getattr(plugin.state_dict_type, "name", str(plugin.state_dict_type))
    return {FSDP: {"version": plugin.fsdp_version, "state_dict_type": kind}}


def remove_or_keep(path: str, arguments: Mapping[str, Any]) -> bool:
    """Remove the checkpoint in a directory of a run, if there is one; False, with a line in the
    log, if a reader has pinned it."""
    try:
        smckpt.remove(below_run(path), **arguments)
    except CheckpointNotFoundError:  # never committed, or not smckpt's
        return True
    except CheckpointPinnedError as error:
        log.info("%s stays: %s", path, error)
        return False
    return True
