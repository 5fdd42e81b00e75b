"""Repair: commit a step whose coordinator died after all parts were written, as it would have done,
or mend the damaged files of a committed one.

The order of a commit is what keeps it safe. Every byte is read first. Then a fresh lease fences the
session that wrote the parts, should it still live; a claim on each attempt keeps everybody from
deleting the files; and only then manifests and record are created, exclusively. A repair that is
killed leaves what was there, a lease and perhaps claims and manifests that nothing commits; the
next one goes on from there.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from smckpt.calls import alone
from smckpt.checkpoint.commits.choose import Commit
from smckpt.checkpoint.commits.commit import create_manifest, gathered_manifest, publish_record
from smckpt.checkpoint.commits.contents import Contents, contents_of, replacement
from smckpt.checkpoint.commits.discover import found_below
from smckpt.checkpoint.commits.leases import (
    claim,
    claimed,
    later_run,
    mark_lease,
    release,
    take_lease,
)
from smckpt.checkpoint.reading.committed import CommittedCatalogue, catalogue_of, open_catalogue
from smckpt.checkpoint.reading.read import Progress
from smckpt.checkpoint.records.format import GroupManifest, Manifest, manifest_name, record_name
from smckpt.checkpoint.records.headers import read_header
from smckpt.checkpoint.upkeep.mend import Damage, Donors, Mended, damages_of, mend
from smckpt.checkpoint.upkeep.unfinished import (
    Refusal,
    UnfinishedSave,
    UnfinishedStep,
    unfinished_step,
)
from smckpt.checkpoint.upkeep.verify import Problem, verify_catalogue
from smckpt.decoding import SENSELESS
from smckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StateError,
    StorageError,
    UsageError,
)
from smckpt.storage import Storage, StoreOptions, access_to
from smckpt.storage.urls import join_url, parent_url, relative_url


def faults_of(
    top: Storage, step: UnfinishedStep, *, named: bool, threads: int, progress: Progress | None
) -> tuple[Problem, ...]:
    """Read every byte of the step, and check all that `verify` checks; what is wrong.

    Args:
        named: the caller, and no lease, says which groups make the step.

    Raises:
        CheckpointError: the parts do not belong together, or one of them is damaged.
    """
    record = None if step.alone else record_name(1, step.number, "0" * 12)
    manifests = tuple(
        (one.storage.url, _manifest(one, 1, record and join_url(top.url, record)))
        for one in step.attempts
    )
    first = manifests[0][1]
    name = record or manifest_name(1, first.number, first.session)
    commit = Commit(name, name, 1, (1, step.number), manifests, through_record=not step.alone)
    catalogue = catalogue_of(top, commit)  # as if it were committed
    meshes = {rank for ranks in catalogue.pieces.joined for rank in ranks} if named else set()
    if others := sorted(meshes - set(step.ranks)):
        raise UsageError(
            f"its tensors are shared with ranks {others[:8]}, which are in none of the groups: the "
            "step has more groups",
            remedy="pass the directory of the step, and each group's with --group",
            path=top.url,
        )
    try:
        return verify_catalogue(catalogue, top.url, threads, progress).problems
    finally:
        catalogue.stores.close()


def _manifest(one: UnfinishedSave, fencing_token: int, record: str | None) -> Manifest:
    """The manifest of a group's parts, all of which are read and compared with each other."""
    pointer = None if record is None else relative_url(record, one.storage.url)
    try:
        return gathered_manifest(
            one.storage, one.attempt, fencing_token, one.group_ranks, one.parts(), pointer
        )
    except CheckpointError:
        raise
    except SENSELESS as error:  # what a rank has written is checked; these may be forged
        raise CorruptCheckpointError(
            f"the parts do not make sense: {type(error).__name__} {error}",
            remedy="no save of smckpt wrote them: find out who writes here. Take an older step",
            path=one.storage.url,
        ) from error


def commit_unfinished(
    top: Storage, step: UnfinishedStep, groups: list[str] | None
) -> tuple[str, int]:
    """Commit the step; the name of the file that commits it, and its fencing token.

    Raises:
        StorageError: somebody else writes here, or has given the step up; nothing is committed.
    """
    session = step.attempts[0].session if step.alone else step.lead or secrets.token_hex(6)
    urls = [one.storage.url for one in step.attempts]
    access = top.access.holding(top.access.share, step.attempts[0].storage.spread)
    lease = take_lease(
        access, top.url, session, socket.gethostname(),
        groups=[] if step.alone else urls,
        ranks=step.ranks,
        since=time.time_ns(),
    )  # fmt: skip
    token = int(lease["fencing_token"])
    for one in step.attempts:
        mark_lease(one.storage, token, one.session, one.group_ranks)
    with _claimed(step):
        _refuse_changed(top, step, groups)

        def publish(one: UnfinishedSave, record: str | None) -> dict[str, Any]:
            def refuse() -> None:
                for store in (top, one.storage):
                    if (error := later_run(store, token, urls)) is not None:
                        raise error

            return create_manifest(one.storage, partial(_manifest, one, token, record), refuse)

        if step.alone:
            return publish(step.attempts[0], None)["manifest"], token
        record = record_name(token, step.number, session)
        named = []
        for one in step.attempts:
            done = publish(one, join_url(top.url, record))
            named.append(
                GroupManifest(one.subpath, done["manifest"], done["crc64"], min(one.group_ranks))
            )
        publish_record(top.access, top.url, session, step.number, token, named)
        return record, token


@contextmanager
def _claimed(step: UnfinishedStep) -> Iterator[None]:
    """Keep everybody from deleting the files. A session that lives, and sees our lease, would take
    its files back; either it raised the fence before us, or it finds our claim or our manifest."""
    held: list[UnfinishedSave] = []
    try:
        for one in step.attempts:
            if not claim(one.storage, one.attempt):
                raise StorageError(
                    f"another run gave up {one.attempt} for dead and deletes its files",
                    remedy="take an older step",
                    path=one.storage.url,
                )
            held.append(one)
        yield
    finally:
        for one in held:
            release(one.storage, one.attempt)


def _refuse_changed(top: Storage, step: UnfinishedStep, groups: list[str] | None) -> None:
    """Look again, now that nobody else can commit: has a session committed or written meanwhile?"""
    names = {one.subpath: (one.attempt, one.group_ranks) for one in step.attempts}
    now = unfinished_step(top, groups if groups is not None else sorted(w or "." for w in names))
    if (
        now is None
        or isinstance(now, Refusal)
        or names != {one.subpath: (one.attempt, one.group_ranks) for one in now.attempts}
    ):
        why = now.what if isinstance(now, Refusal) else "another save is here now"
        raise StorageError(
            f"a job writes here while this repair runs, so nothing was committed ({why})",
            remedy="end that job, or let it save; then look again",
            path=top.url,
        )


_SIBLINGS = 16  # checkpoints beside this one in which equal blocks are looked for


@dataclass(frozen=True)
class Left:
    """What was not mended.

    Args:
        path: the file or directory.
        what: what is wrong.
        remedy: what to do.
        rank: that wrote the file; None for a directory.
        ranges: [start, stop) of bytes that no donor has.
        tensors: the logical names of the tensors that have bytes there.
    """

    path: str
    what: str
    remedy: str
    rank: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class RepairReport:
    """What was found and done; with `dry_run`, what would be done.

    Args:
        url: the directory.
        dry_run: nothing was changed.
        step: of the checkpoint; None if it recorded none, or if there is none.
        committed: the name of the file that commits it, if this repair made it.
        commits: whether the repair committed, or would commit, a complete set of parts.
        mended: the files that were mended.
        left: what was not.
        whole: whether the checkpoint is whole now (with `dry_run`: would be).
    """

    url: str
    dry_run: bool
    step: int | None
    committed: str | None
    commits: bool
    mended: tuple[Mended, ...]
    left: tuple[Left, ...]

    @property
    def whole(self) -> bool:
        return not self.left

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "whole": self.whole}


@alone()
def repair_checkpoint(
    url: str | os.PathLike[str],
    *,
    sources: Sequence[str | os.PathLike[str]] = (),
    groups: Sequence[str] | None = None,
    dry_run: bool = False,
    threads: int = 4,
    progress: Progress | None = None,
    storage: StoreOptions | Mapping[str, Any] | None = None,
) -> RepairReport:
    """Repair the newest checkpoint in a directory. No job may be saving there.

    If all ranks have written their parts and nobody has committed them, it reads every byte and
    commits them, under a fresh lease: a session that still lives fails at its next save, by name.
    If a checkpoint is committed, it reads every byte of that, and writes damaged files anew from
    other places that have the same bytes: copies in `sources`, other files of the checkpoint, and
    the checkpoints beside it. Every byte is compared with its checksum, and no file is changed in
    place. It deletes nothing.

    Args:
        sources: places with copies of the checkpoint's files (of `copy_checkpoint`, a node's local
            disk, S3), or other checkpoints of the run.
        groups: the directories of the step's groups, relative to `url`, where no lease names them;
            ["."]: `url` is a checkpoint by itself.
        dry_run: look only.
        threads: how many threads read.
        progress: called with (bytes done, bytes in total), from any thread, one call at a time.
        storage: as for `smckpt.load`; they apply to all places.

    Returns:
        A `RepairReport`, which lists what could not be mended. That is not raised.

    Raises:
        CheckpointNotFoundError: there is neither a checkpoint nor a complete set of parts.
        CorruptCheckpointError: the commit itself cannot be read, and its parts are not whole.
        CheckpointReplacedError: a newer save has swept the checkpoint meanwhile.
        StorageError: a store refused, or somebody writes there. A second call goes on.
    """
    access = access_to(url, *sources, storage=storage)
    top = access.open(url)
    donors = [access.open(source) for source in sources]
    subpaths = None if groups is None else list(groups)
    step = unfinished_step(top, subpaths)
    if isinstance(step, UnfinishedStep):
        return _commit(top, step, subpaths, dry_run=dry_run, threads=threads, progress=progress)
    try:
        contents = contents_of(top)
    except CheckpointNotFoundError:
        if step is None:
            raise
        left = Left(step.path, step.what, step.remedy)
        return RepairReport(top.url, dry_run, None, None, False, (), (left,))
    others = [contents, *_readable(donors, contents), *_beside(contents)]
    damages = damages_of(contents, Donors(donors, others), threads=threads, progress=progress)
    mended, lost = list[Mended](), list[Left]()
    if damages:
        if (newer := replacement(contents.storage, contents.identity, "repair")) is not None:
            raise newer
        mended = [one.mended if dry_run else mend(one) for one in damages if one.mendable]
        catalogue = open_catalogue(contents.storage)
        remedy = (
            f"if a{'nother' if donors else ''} copy has those bytes: smckpt repair "
            f"{contents.url} --from COPY ; else take another step (`smckpt doctor` names it)"
        )
        lost = [
            Left(one.path, one.what, remedy, one.rank, one.missing, _tensors(catalogue, one))
            for one in damages
            if not one.mendable
        ]
    for group in () if dry_run else contents.groups:  # of a repair that was killed
        if claimed(group.storage, group.manifest.attempt):
            release(group.storage, group.manifest.attempt)
    return RepairReport(
        contents.url, dry_run, contents.commit.first.step, None, False, tuple(mended), tuple(lost)
    )


# -- parts without a commit --------------------------------------------------------------------


def _commit(
    top: Storage,
    step: UnfinishedStep,
    groups: list[str] | None,
    *,
    dry_run: bool,
    threads: int,
    progress: Progress | None,
) -> RepairReport:
    left: tuple[Left, ...]
    try:
        faults = faults_of(top, step, named=groups is not None, threads=threads, progress=progress)
    except (CorruptCheckpointError, StateError, UsageError) as error:
        left = (Left(error.path or top.url, error.message, error.remedy),)
    else:
        remedy = "what is damaged before its commit cannot be mended: take an older step"
        left = tuple(Left(fault.path, fault.what, remedy) for fault in faults)
    if left or dry_run:
        return RepairReport(top.url, dry_run, step.step, None, not left, (), left)
    identity, _ = commit_unfinished(top, step, groups)
    return RepairReport(top.url, False, step.step, identity, True, (), ())


# -- damaged files -----------------------------------------------------------------------------


def _readable(sources: Sequence[Storage], contents: Contents) -> list[Contents]:
    """The sources that are checkpoints."""
    found = []
    for source in sources:
        try:
            found.append(contents_of(source))
        except CheckpointError:  # files only, such as a node's share
            continue
    return [one for one in found if one.identity != contents.identity]


def _beside(contents: Contents) -> list[Contents]:
    """The newest checkpoints beside this one: steps of the same run, most likely."""
    try:
        parent = contents.storage.at(parent_url(contents.url))
        found = [contents.storage.at(one.path) for one in found_below(parent, 1)]
    except CheckpointError:  # a whole bucket, or no right to look
        return []
    near = [one for one in found if one.url not in (contents.url, parent.url)]
    return _readable(near[-_SIBLINGS:], contents)


def _tensors(catalogue: CommittedCatalogue, damage: Damage) -> tuple[str, ...]:
    """The logical names of what a rank has stored in the missing bytes. If the header is among
    them: of all that the rank holds."""
    rows = {
        key: [row for row in rows if damage.rank in row.ranks]
        for key, rows in catalogue.rows_by_key.items()
    }
    keys = list(rows)
    for file in catalogue.files:
        if file.record.name != damage.name:
            continue
        try:
            header = read_header(file.read, file.record.size, file.path)
        except CheckpointError:
            break
        keys = [
            key
            for key, slot in header.slots.items()
            if any(slot.offset < high and low < slot.offset + slot.nbytes
                   for low, high in damage.missing)
        ]  # fmt: skip
    else:
        if not damage.ranges:  # a part, which holds no tensor
            return ()
    names = (row.logical_name(fqn) for key in keys for row in rows.get(key, ()) for fqn in row.fqns)
    return tuple(dict.fromkeys(sorted(names)))
