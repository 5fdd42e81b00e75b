"""The condition of each step below a root: whether it can be restored, why not, and the remedy."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from smckpt.checkpoint.commits.choose import choose_commit, commits_at
from smckpt.checkpoint.commits.contents import what_is_missing
from smckpt.checkpoint.commits.discover import (
    DEPTH,
    FoundCheckpoint,
    find_checkpoints,
    found_at,
    in_order,
    once,
    walk,
)
from smckpt.checkpoint.commits.foreign import natural_order
from smckpt.checkpoint.commits.leases import leases_at
from smckpt.checkpoint.records.format import ParsedName, ours_among
from smckpt.checkpoint.upkeep.unfinished import Refusal, UnfinishedStep, unfinished_step
from smckpt.errors import CheckpointError, CheckpointNotFoundError, StorageError
from smckpt.manager.record import memory_of
from smckpt.storage import Storage
from smckpt.storage.urls import is_in_memory, relative_url


@dataclass(frozen=True)
class Condition:
    """The condition of one directory.

    Args:
        place: its path relative to the root; of a step in memory its URL.
        step: None if it is not known.
        state: "whole"; "cut" (committed, but a file is missing or short); "damaged" (the commit
            cannot be read); "unfinished" (not committed, perhaps not yet); "removing" (a deletion
            runs or was cut short); "away" (the steps in memory, which this host cannot see).
        why: what is wrong, in a sentence; "" for a whole one.
        remedy: what to do.
        nbytes: size of the data files that are there.
        checkpoint: None: nothing is committed.
        url: of the directory.
    """

    place: str
    step: int | None
    state: str
    why: str = ""
    remedy: str = ""
    nbytes: int = 0
    checkpoint: FoundCheckpoint | None = None
    url: str = ""

    def to_json(self) -> dict[str, Any]:
        facts = asdict(replace(self, checkpoint=None))
        del facts["checkpoint"], facts["url"]
        return {**facts, "committed_at": self.committed_at}

    @property
    def in_memory(self) -> bool:
        return is_in_memory(self.url)

    @property
    def committed_at(self) -> int:
        """Nanoseconds since 1970; 0 without a commit."""
        return 0 if self.checkpoint is None else self.checkpoint.committed_at


def examine(root: Storage, depth: int = DEPTH, *, known: Collection[str] = ()) -> list[Condition]:
    """All directories at and below `root` that hold files of a checkpoint, and the steps in memory
    that the newest step names; newest step first, in memory before on disk, then those without a
    step, by name. It lists directories and reads manifests, but no data.

    Args:
        known: directories that are not looked at.

    Raises:
        StorageError: the store failed to read the root.
    """
    root.list_dirs()
    conditions = [
        replace(condition, url=storage.url)
        for storage, _, unread in walk(root, depth)
        if storage.url.rstrip("/") not in known
        and (condition := _condition(root, storage, unread)) is not None
    ]
    found = once(root, conditions, lambda one: one.url)
    found += _in_memory(root, [one.checkpoint for one in found if one.checkpoint is not None])
    return sorted(
        found,
        key=lambda one: (
            one.step is not None,
            one.step or 0,
            one.in_memory,
            natural_order(one.place),
        ),
        reverse=True,
    )


def _in_memory(root: Storage, on_disk: list[FoundCheckpoint]) -> list[Condition]:
    """The steps in memory, where the newest step on disk names them."""
    url = memory_of(in_order(on_disk)[-1]) if on_disk else ""
    if not url or is_in_memory(root.url):
        return []
    try:
        return [replace(one, place=one.url.rstrip("/")) for one in examine(root.at(url))]
    except CheckpointError as error:  # anybody may have written that address
        remedy = "run this on a host of the job, as the user that trains"
        return [Condition(url, None, "away", str(error), remedy, url=url)]


def _condition(root: Storage, storage: Storage, unread: CheckpointError | None) -> Condition | None:
    """The condition of one directory. What the store cannot read of it costs the others nothing."""
    subpath = relative_url(storage.url, root.url)
    try:
        if unread is not None:
            raise unread
        names = storage.names()
        if any(name.startswith("removing-") for name in names):
            return Condition(
                subpath,
                _step_in(subpath),
                "removing",
                "a deletion is under way, or was cut short",
                "the next run that keeps checkpoints here finishes it, or "
                f"`smckpt prune {root.url} --keep-last N`, which keeps N steps",
            )
        found = found_at(storage)
        if found is not None:
            try:
                missing = what_is_missing(storage, found.identity)
            except CheckpointError as error:
                missing = what_of(error)
            state, remedy = ("cut", mend_remedy(storage)) if missing else ("whole", "")
            return Condition(subpath, found.step, state, missing, remedy, found.nbytes, found)
        if commits_at(storage):
            try:
                choose_commit(storage)
                return None  # one group of a committed step; the step's own directory reports it
            except CheckpointNotFoundError as error:
                why = error.message
            return _unfinished(root, subpath, storage, names, why)
        return _unfinished(root, subpath, storage, names, "")
    except CheckpointError as error:
        # no repair helps where the store refuses to read
        remedy = error.remedy if isinstance(error, StorageError) else mend_remedy(storage)
        return Condition(subpath, _step_in(subpath), "damaged", what_of(error), remedy)


def what_of(error: CheckpointError) -> str:
    """What happened, and where, without the error's remedy: a condition has its own."""
    return f"{error.path}: {error.message}" if error.path else error.message


def mend_remedy(storage: Storage) -> str:
    """What to do about a committed step whose files are damaged."""
    if is_in_memory(storage.url):
        return "hosts that had it are gone: a restore takes the next older step"
    return (
        f"`smckpt repair {storage.url}` mends what it finds beside it, with `--from COPY` what a "
        "copy has. Until then a restore takes the next older step"
    )


def _unfinished(
    root: Storage, subpath: str, storage: Storage, names: Sequence[str], why: str
) -> Condition | None:
    ours = ours_among(names)
    kinds = {one.kind for one in ours}
    written = not kinds.isdisjoint(("data", "part", "manifest"))
    if not written and "lease" not in kinds:
        if "probe" not in kinds:
            return None
        why = "a save has tried the directory, and has written nothing yet"
        remedy = "if no job saves here, it was killed: the next save to this directory removes it"
        return Condition(subpath, _step_in(subpath), "unfinished", why, remedy)
    try:
        found = unfinished_step(storage)
    except CheckpointError as error:
        found = Refusal(error.message, error.remedy, storage.url)
    nbytes = sum(info.size for info in storage.list("data-"))
    if isinstance(found, UnfinishedStep):
        return Condition(
            subpath,
            found.step if found.step is not None else _step_in(subpath),
            "unfinished",
            f"all {len(found.ranks)} ranks have written their parts, but nobody has committed them",
            f"if no job is writing it: `smckpt repair {storage.url}` commits it",
            nbytes,
        )
    if not written:  # the directory of a step, whose groups are told each by itself
        return None
    why = why or _waiting(root, storage, ours)
    if isinstance(found, Refusal):
        why, remedy = f"{why}: {found.what}" if found.what not in why else why, found.remedy
    else:
        remedy = "take an older step"
    remedy = f"if no job is writing it, it was cut short: {remedy}. The next save to this directory"
    return Condition(subpath, _step_in(subpath), "unfinished", why, f"{remedy} sweeps it", nbytes)


def _waiting(root: Storage, storage: Storage, ours: Sequence[ParsedName]) -> str:
    wrote = {one.rank for one in ours if one.kind == "part"}
    due: set[int] = set()
    with contextlib.suppress(CheckpointError):
        for lease in leases_at(storage)[-1:]:
            due = set(lease.ranks)
    away = sorted(due - wrote)
    why = f"{len(wrote)} ranks have written their part"
    if not away:
        return f"{why}, and no manifest is there"
    hosts = dict[int, str]()  # where the ranks ran that saved the newest step below
    with contextlib.suppress(CheckpointError):
        if found := find_checkpoints(root.url):
            commit = choose_commit(root.at(found[-1].path))
            hosts = {part.rank: part.host for _, m in commit.manifests for part in m.parts}
    there = {hosts[rank] for rank in away if rank in hosts}
    where = f" (in the newest step on {', '.join(sorted(there)[:8])})" if there else ""
    return f"{why}, ranks {away[:8]} have not{where}"


def _step_in(subpath: str) -> int | None:
    """The last number in the last part of the path that has one. Without a commit, the step is
    known from names alone."""
    for part in reversed(subpath.split("/")):
        numbers = [int(n) for n in "".join(c if c in "0123456789" else " " for c in part).split()]
        if numbers and not part.startswith(("dp_", "tp", "pp", "ep")):
            return numbers[-1]
    return None
