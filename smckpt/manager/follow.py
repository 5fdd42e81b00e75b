"""Exports each committed step of a run, beside the run.

A process of its own looks for new steps and pins the one that it reads. So the run does not wait
for it, and deletes nothing that it reads. It writes its record into a directory last: a directory
without a record is the rest of an export that was killed, and is made anew.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from smckpt.checkpoint.commits.discover import FoundCheckpoint, find_checkpoints, refuse_absent
from smckpt.checkpoint.commits.remove import pinned
from smckpt.checkpoint.records.format import FORMAT_VERSION
from smckpt.checkpoint.records.sealed import read_body, seal_json
from smckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    StorageError,
    UsageError,
)
from smckpt.storage import Access, StoreOptions, access_to
from smckpt.storage.urls import Below, join_url, normal_url, relative_url

log = logging.getLogger("smckpt")

RECORD = "smckpt_export.json"
_MAX_RECORD = 1 << 16  # bytes
_PIN = 4 * 3600.0  # seconds that a step is kept after its export was killed


@dataclass(frozen=True)
class FollowedStep:
    """What became of one step. error: why there is no export of it, or None."""

    checkpoint: FoundCheckpoint
    directory: str
    seconds: float
    error: CheckpointError | None = None


def follow(
    root: str | os.PathLike[str],
    out: str | os.PathLike[str],
    export: Callable[[FoundCheckpoint, str], object],
    *,
    every: int = 1,
    until: int | None = None,
    once: bool = False,
    interval: float = 10.0,
    storage: StoreOptions | Mapping[str, Any] | None = None,
) -> Iterator[FollowedStep]:
    """Export each committed step below `root`, oldest first, and go on as the run commits more.

    The step at `root/100` comes to `out/100`. If that has the record of an export of the same
    commit, it is left alone. A step whose export failed is not tried again by this call.

    Args:
        root: the root of a run, on disk or in S3.
        out: the directory above those to write, on disk or in S3.
        export: called with a pinned checkpoint and the directory to write, a `Below` of `out`. It
            replaces what is there.
        every: export the steps that this number divides.
        until: end once this step or a later one is committed, and nothing is left to export.
        once: end when nothing is left to export.
        interval: seconds between two looks for new steps.
        storage: as in `smckpt.load`.

    Yields:
        each step that was exported, or whose export failed. A step that the run deletes before it
        is pinned is left out.

    Raises:
        UsageError: an argument is wrong.
        CheckpointNotFoundError: with `once`: there is no such directory.
        StorageError: with `once`: the root cannot be read. Otherwise a warning says so.
    """
    base, there = normal_url(os.fspath(root)), normal_url(os.fspath(out))
    if base == there:
        raise UsageError(
            "the exports would lie in the checkpoints' directories",
            remedy="choose another directory for them",
            path=there,
        )
    if every < 1 or interval <= 0:
        raise UsageError(f"every={every!r}, interval={interval!r}", remedy="give positive numbers")
    access = access_to(out, root, storage=storage)
    try:
        refuse_absent(access.open(base))
    except CheckpointNotFoundError:
        if once:  # an end without an export would look as if all were exported
            raise
        log.warning("there is no directory %s yet; its steps are exported when they come", base)
    tried: set[tuple[str, str]] = set()
    while True:
        newest, present = -1, list[FoundCheckpoint]()
        try:
            present = find_checkpoints(root, storage=storage)
        except StorageError as error:
            if once:
                raise
            log.warning("no look for new steps: %s", error)
        for found in present:
            step = found.step or 0
            newest = max(newest, step)
            if step % every or (found.path, found.identity) in tried:
                continue
            tried.add((found.path, found.identity))  # a copy has the identity too
            directory = Below(join_url(there, relative_url(found.path, base)), there)
            done = _follow_one(found, directory, export, access, storage)
            if done is not None:
                yield done
        if once or (until is not None and newest >= until):
            return
        time.sleep(interval)


def _follow_one(
    found: FoundCheckpoint,
    directory: str,
    export: Callable[[FoundCheckpoint, str], object],
    access: Access,
    storage: StoreOptions | Mapping[str, Any] | None,
) -> FollowedStep | None:
    began = time.monotonic()
    target = access.open(directory)
    try:
        with suppress(CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError):
            # one that cannot be read is replaced by the export that comes
            whole = read_body(target, RECORD, most=_MAX_RECORD)[0]
            if whole.get("identity") == found.identity:
                return None
        with pinned(found, seconds=_PIN, storage=storage):
            target.delete(RECORD)  # of an older commit; from here on nothing whole is here
            export(found, directory)
        body = {
            "format": list(FORMAT_VERSION), "checkpoint": found.path, "step": found.step,
            "identity": found.identity,
        }  # fmt: skip
        target.put(RECORD, seal_json(body))
    except CheckpointNotFoundError as error:
        log.warning("%s is not exported, since the run deletes it: %s", found, error)
        return None
    except CheckpointError as error:
        return FollowedStep(found, directory, time.monotonic() - began, error)
    finally:
        target.close()
    return FollowedStep(found, directory, time.monotonic() - began)
