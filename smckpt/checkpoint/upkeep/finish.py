"""Commit a step whose coordinator died after all parts were written, as it would have done.

The order is what keeps it safe. Every byte is read first. Then a fresh lease fences the session
that wrote the parts, should it still live; a claim on each attempt keeps everybody from deleting
the files; and only then manifests and record are created, exclusively. A finish that is killed
leaves what was there, a lease and perhaps claims and manifests that nothing commits; the next one
goes on from there.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from smckpt.checkpoint.commits.choose import Commit
from smckpt.checkpoint.commits.commit import create_manifest, gathered_manifest, publish_record
from smckpt.checkpoint.commits.leases import claim, later_run, mark_lease, release, take_lease
from smckpt.checkpoint.reading.committed import CommittedCatalogue, catalogue_of
from smckpt.checkpoint.reading.read import Progress
from smckpt.checkpoint.records.format import GroupManifest, Manifest, manifest_name, record_name
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
    CorruptCheckpointError,
    StorageError,
    UsageError,
)
from smckpt.storage import Storage
from smckpt.storage.urls import join_url, relative_url

__all__ = ["commit_unfinished", "faults_of"]


def faults_of(
    top: Storage, step: UnfinishedStep, *, named: bool, threads: int, progress: Progress | None
) -> tuple[Problem, ...]:
    """Read every byte of the step, and check all that `verify` checks; what is wrong.

    Args:
        named: the caller, and no lease, says which groups make the step.

    Raises:
        CheckpointError: the parts do not belong together, or one of them is damaged.
    """
    catalogue = _as_if_committed(top, step)
    if named:
        _refuse_others(catalogue, step, top.url)
    try:
        return verify_catalogue(catalogue, top.url, threads, progress).problems
    finally:
        catalogue.readers.close()


def _as_if_committed(top: Storage, step: UnfinishedStep) -> CommittedCatalogue:
    record = None if step.alone else record_name(1, step.number, "0" * 12)
    manifests = tuple(
        (one.storage.url, _manifest(one, 1, record and join_url(top.url, record)))
        for one in step.attempts
    )
    first = manifests[0][1]
    name = record or manifest_name(1, first.number, first.session)
    commit = Commit(name, name, 1, (1, step.number), manifests, through_record=not step.alone)
    return catalogue_of(top, commit)


def _manifest(one: UnfinishedSave, fencing_token: int, record: str | None) -> Manifest:
    """The manifest of a group's parts, all of which are read and compared with each other."""
    pointer = None if record is None else relative_url(record, one.storage.url)
    try:
        return gathered_manifest(
            one.storage, one.session, one.number, fencing_token, one.group_ranks, one.parts(),
            pointer,
        )  # fmt: skip
    except CheckpointError:
        raise
    except SENSELESS as error:  # what a rank has written is checked; these may be forged
        raise CorruptCheckpointError(
            f"the parts do not make sense: {type(error).__name__} {error}",
            remedy="no save of smckpt wrote them: find out who writes here. Take an older step",
            path=one.storage.url,
        ) from error


def _refuse_others(catalogue: CommittedCatalogue, step: UnfinishedStep, path: str) -> None:
    """Refuse groups that a user has named if their tensors are shared with ranks of others."""
    meshes = {rank for ranks in catalogue.pieces.joined for rank in ranks}
    if others := sorted(meshes - set(step.ranks)):
        raise UsageError(
            f"its tensors are shared with ranks {others[:8]}, which are in none of the groups: the "
            "step has more groups",
            remedy="pass the directory of the step, and each group's with --group",
            path=path,
        )


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
            if not claim(one.storage, one.name):
                raise StorageError(
                    f"another run gave up {one.name} for dead and deletes its files",
                    remedy="take an older step",
                    path=one.storage.url,
                )
            held.append(one)
        yield
    finally:
        for one in held:
            release(one.storage, one.name)


def _refuse_changed(top: Storage, step: UnfinishedStep, groups: list[str] | None) -> None:
    """Look again, now that nobody else can commit: has a session committed or written meanwhile?"""
    names = {one.subpath: (one.name, one.group_ranks) for one in step.attempts}
    now = unfinished_step(top, groups if groups is not None else sorted(w or "." for w in names))
    if (
        now is None
        or isinstance(now, Refusal)
        or names != {one.subpath: (one.name, one.group_ranks) for one in now.attempts}
    ):
        why = now.what if isinstance(now, Refusal) else "another save is here now"
        raise StorageError(
            f"a job writes here while this repair runs, so nothing was committed ({why})",
            remedy="end that job, or let it save; then look again",
            path=top.url,
        )
