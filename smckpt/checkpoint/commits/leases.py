"""Leases. A session takes a lease on a directory, and so fences the sessions of earlier runs.

A lease is a file that is created exclusively. The number in its name is the session's *fencing
token*. It is higher than every token in the names of the directory. A session looks for later
leases before it publishes. A lease covers its *scope*: its own directory or, for the lead of
several groups, the groups' directories. So two jobs may keep their records in one parent.

The format calls the token `epoch`: the file is `epoch-<token>.json`.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from smckpt.checkpoint.records.format import (
    FORMAT_VERSION,
    Owner,
    Rank,
    Record,
    fence_name,
    lease_name,
    ours_among,
    probe_name,
)
from smckpt.checkpoint.records.prefixes import open_spread, spread_over
from smckpt.checkpoint.records.sealed import OF_OTHERS, decode_body, read_body, read_file, seal_json
from smckpt.decoding import Count
from smckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    UsageError,
)
from smckpt.storage import Access, Storage
from smckpt.storage.budget import Spread
from smckpt.storage.urls import file_url, join_url, normal_url, relative_url

_TURNS = 1000  # leases in a row that somebody else takes before we give up
_SKEW = 60 * 10**9  # nanoseconds by which clocks of one job's hosts may differ
_WITH_TOKEN = ("epoch-", "manifest-", "record-")


@dataclass(frozen=True)
class Lease:
    """One lease. url: of its directory. groups: the directories that it covers, relative to that;
    none if it covers its own. before: the sessions that had files in the directory when it was
    made. spread: the prefixes of its session's files. ranks: the ranks that save under it.
    taken_at: nanoseconds since 1970."""

    name: str
    url: str
    fencing_token: Count
    session: str
    groups: tuple[str, ...] = ()
    before: frozenset[str] = frozenset()
    spread: Spread | None = None
    ranks: frozenset[Rank] = frozenset()
    taken_at: Count = 0

    def __post_init__(self) -> None:
        _ = self.scope  # raises if a path is none of a directory

    @cached_property
    def scope(self) -> frozenset[str]:
        """URLs of the directories that it covers."""
        return frozenset(join_url(self.url, group) for group in self.groups or [""])


def take_lease(
    access: Access,
    directory: str,
    session: str,
    host: str,
    groups: Sequence[str] = (),
    ranks: Sequence[int] = (),
    since: int = 0,
) -> dict[str, Any]:
    """Take the lease of a directory for a session, exclusively, with the next fencing token.

    Args:
        access: its `spread` is that of the ranks' files.
        directory: URL of the group's directory, or of the parent in which a record will be.
        session: the session that publishes under this lease.
        host: the caller's, for people who read the file.
        groups: URLs of the groups' directories, for a record's parent. The token is above theirs
            too, so that it means the same in all of them.
        ranks: the ranks of all groups that save under this lease.
        since: when this job began, in nanoseconds since 1970.

    Returns:
        {"fencing_token": int}, and "remark" if a file was skipped that the user should know of.

    Raises:
        UsageError: other ranks took a lease on one of the directories since this job began. Two
            groups of it have one checkpoint_id, and would supersede each other in turn.
        StorageError: others take every lease, or the store refused.
    """
    storage = access.open(directory) if groups else open_spread(access, directory)
    inside = [access.open(url) for url in groups]
    subpaths = [relative_url(group.url, storage.url) for group in inside]
    remarks: dict[str, None] = {}
    fencing_token = 0
    for _ in range(_TURNS):
        # above the last try too: a dangling link may have the name, and no listing shows it
        here = (name for store in (storage, *inside) for name in store.names(*_WITH_TOKEN))
        tokens = (one.fencing_token for one in ours_among(here))
        fencing_token = max(fencing_token, *tokens, 0) + 1
        for store in (storage, *inside) if ranks else ():
            remarks |= _refuse_shared(store, groups or [directory], session, ranks, since)
        if _create_lease(storage, fencing_token, session, host, subpaths, ranks):
            return {
                "fencing_token": fencing_token,
                **({"remark": "; ".join(remarks)} if remarks else {}),
            }
        if all(
            info.name != lease_name(fencing_token)
            for info in storage.list(lease_name(fencing_token))
        ):
            remarks[
                f"{file_url(storage.url, lease_name(fencing_token))} is not a file: "
                f"fencing token {fencing_token} is skipped; remove that link or directory"
            ] = None
    raise StorageError(
        f"others took the last {_TURNS} leases that this session tried to take",
        remedy="many jobs write to one directory: give each its own",
        path=storage.url,
    )


def _refuse_shared(
    storage: Storage, scope: Sequence[str], session: str, ranks: Sequence[int], since: int
) -> dict[str, None]:
    """Refuse a directory on which other ranks of this job hold a lease. Returns remarks about
    leases that were not counted, because no clock of this job can have stamped them."""
    urls = {normal_url(url) for url in scope}
    remarks: dict[str, None] = {}
    for lease in leases_at(storage):
        shared = lease.ranks and not lease.ranks & frozenset(ranks) and lease.scope & urls
        if lease.session == session or lease.taken_at <= since or not shared:
            continue
        path = file_url(storage.url, lease.name)
        if lease.taken_at > time.time_ns() + _SKEW:
            remarks[
                f"{path} is stamped in the future: some host's clock is, or was, wrong. The lease "
                "is taken for one of an earlier job"
            ] = None
            continue
        raise UsageError(
            f"ranks {sorted(lease.ranks)[:8]} and ranks {sorted(ranks)[:8]} of one job have "
            "one checkpoint_id",
            remedy="give each group its own directory: put the TP, EP, PP and shard "
            f"coordinates that tell them apart in the path. If an earlier job left {path}, the "
            "clocks of its hosts and of this one differ: set them, or remove that file",
            path=min(lease.scope & urls),
        )
    return remarks


def mark_lease(
    storage: Storage, fencing_token: int, session: str, ranks: Sequence[int] = ()
) -> None:
    """Put a copy of the parent's lease into this group's directory, or check that it is there.

    Raises:
        StorageError: another session has the lease with this token, or something that is not a file
            has its name.
    """
    path = file_url(storage.url, lease_name(fencing_token))
    try:
        owner = _read_lease(storage, lease_name(fencing_token)).session
    except CheckpointNotFoundError:
        if _create_lease(storage, fencing_token, session, socket.gethostname(), [], ranks):
            return
        try:
            owner = _read_lease(storage, lease_name(fencing_token)).session
        except CheckpointNotFoundError as error:
            raise StorageError(
                f"a link that leads nowhere has the name of the lease with fencing token "
                f"{fencing_token}: this save is not committed",
                remedy="remove that link, and save again",
                path=path,
            ) from error
    if owner != session:
        raise StorageError(
            f"session {owner} holds the lease with fencing token {fencing_token} here, ours is "
            f"{session}: this save is not committed",
            remedy="two jobs write to one directory: give each its own; else restart this job",
            path=path,
        )


def probe(
    access: Access, directory: str, session: str, create: bool, leave: bool = True
) -> dict[str, Any]:
    """Check whether saves can work here, and leave a small file for the peers; or check whether
    this host sees the file that a peer left.

    Args:
        session: the session in the file's name.
        create: True for the leader, False for its peers.
        leave: False if there are no peers.

    Returns:
        {"seen": bool}, and "remark" if there is something that the user should know.

    Raises:
        StorageError: saves cannot work here, or another job saves here at the same time.
        UsageError: the session has no name of one.
    """
    storage = access.open(directory)
    name = probe_name(session)
    if not ours_among([name]):
        raise UsageError(
            f"{session!r} is not a session", remedy="pass 12 hex digits", path=directory
        )
    if create:
        remark = storage.try_out(name)
        if leave:
            storage.put_exclusive(name, seal_json({"format": list(FORMAT_VERSION)}))
        return {"seen": True, **({"remark": remark} if remark else {})}
    try:
        storage.read(name)  # not `size`: an object store's answer without a body gives no reason
    except CheckpointNotFoundError:
        for lease in leases_at(storage):
            if session in lease.before:  # the file was here: that session's commit swept it away
                raise StorageError(
                    f"session {lease.session} took the lease with fencing token "
                    f"{lease.fencing_token} while this session began: another job saves here; "
                    "this save is not committed",
                    remedy="end the older of the two jobs; give each its own directory if both "
                    "are meant to run",
                    path=file_url(storage.url, lease.name),
                ) from None
        return {"seen": False}
    return {"seen": True}


def later_run(
    storage: Storage, fencing_token: int, scope: Iterable[str], attempt: str = ""
) -> StorageError | None:
    """The error if this session may not publish any more, or None.

    Args:
        fencing_token: ours.
        scope: URLs of the directories that we publish for.
        attempt: if given, also look for a fence of this attempt, whose files a sweep may delete.
    """
    names = set(storage.holder("").names())  # ranks' files elsewhere tell nothing
    if attempt and fence_name(attempt) in names:
        if claimed(storage, attempt):
            return taken_over(attempt, storage.url)
        return StorageError(
            f"another run gave up attempt {attempt} for dead and deletes its files; this save is "
            "not committed",
            remedy="end the older of the two jobs that write here, and save again",
            path=storage.url,
        )
    scope = frozenset(scope)
    for one in ours_among(sorted(names)):
        if one.fencing_token > fencing_token and _scope_of(storage, one.name) & scope:
            return StorageError(
                f"the lease with fencing token {one.fencing_token} was taken after this "
                f"session's ({fencing_token}): a later run writes here; this save is not committed",
                remedy="end the older of the two jobs; give each its own directory if both "
                "are meant to run",
                path=file_url(storage.url, one.name),
            )
    return None


def taken_over(attempt: str, url: str) -> StorageError:
    """The error of a session that lives, and whose save `smckpt repair` commits."""
    return StorageError(
        f"`smckpt repair` took this save for one of a dead job, and commits it (attempt {attempt}):"
        " this session may not save here any more",
        remedy="restart the job: it resumes from what was committed. Repair only what no job "
        "is writing",
        path=url,
    )


def raise_fence(storage: Storage, attempt: str) -> bool:
    """Tell a session, which may still be alive, that its attempt is given up. Durable on return.
    False: it was told before, or a repair has claimed the attempt (`claimed`)."""
    name, data = fence_name(attempt), seal_json({"format": list(FORMAT_VERSION)})
    return storage.put_exclusive(name, data)


def claim(storage: Storage, attempt: str) -> bool:
    """Claim an attempt for a repair, which commits it: then nobody deletes its files. False:
    somebody has given the attempt up, and deletes them."""
    body = {"format": list(FORMAT_VERSION), "by": "repair"}
    created = storage.put_exclusive(fence_name(attempt), seal_json(body))
    return created or claimed(storage, attempt)


def claimed(storage: Storage, attempt: str) -> bool:
    """Whether the fence of an attempt is a repair's claim."""
    try:
        return read_file(Owner, storage, fence_name(attempt)).by == "repair"
    except (CheckpointNotFoundError, CorruptCheckpointError):
        return False


def release(storage: Storage, attempt: str) -> None:
    """End a claim, or a fence of one's own."""
    storage.delete(fence_name(attempt))
    if storage.folder is not None:
        storage.discard_unfinished([fence_name(attempt)])  # of one who was killed


def leases_at(storage: Storage, names: Iterable[str] | None = None) -> list[Lease]:
    """All leases in a directory, oldest first.

    Args:
        names: of the files there, if the caller has listed them.
    """
    found = []
    for lease in ours_among(storage.names("epoch-") if names is None else names, "lease"):
        with contextlib.suppress(CheckpointNotFoundError):  # swept meanwhile
            found.append(_read_lease(storage, lease.name))
    return sorted(found, key=lambda lease: lease.fencing_token)


def sessions_at(names: Iterable[str]) -> set[str]:
    """The sessions that wrote parts, data or a probe among these names."""
    return {one.session for one in ours_among(names, "data", "crc", "part", "probe")}


def _create_lease(
    storage: Storage,
    fencing_token: int,
    session: str,
    host: str,
    groups: Sequence[str],
    ranks: Sequence[int],
) -> bool:
    everywhere = spread_over(storage, [storage.spread, None])
    names = [*everywhere.names()]
    with contextlib.suppress(StorageError):  # no permission to list: a sweep will log it
        names += everywhere.list_unfinished()
    before = sessions_at(names) - {session}
    body = {
        "format": list(FORMAT_VERSION),
        "epoch": fencing_token,
        "session": session,
        "host": host,
        "claimed_at": time.time_ns(),
        "groups": list(groups),
        "before": sorted(before),
        **({"ranks": sorted(ranks)} if ranks else {}),
        **({"spread": asdict(storage.spread)} if storage.spread else {}),
    }
    return storage.put_exclusive(lease_name(fencing_token), seal_json(body))


def _read_lease(storage: Storage, name: str) -> Lease:
    body, _ = read_body(storage, name)
    known = {**body, "name": name, "url": storage.url}
    return decode_body(Lease, known, file_url(storage.url, name), OF_OTHERS)


def _scope_of(storage: Storage, name: str) -> frozenset[str]:
    """The directories that a lease, manifest or record covers; none if the file was deleted
    meanwhile."""
    kind = name.split("-", 1)[0]
    if kind == "manifest":
        return frozenset({storage.url})
    try:
        if kind == "epoch":  # a lease
            return _read_lease(storage, name).scope
        record = read_file(Record, storage, name)
    except CheckpointNotFoundError:
        return frozenset()
    return scope_of(storage, record)


def scope_of(storage: Storage, record: Record) -> frozenset[str]:
    """The directories of the groups that a record here commits."""
    return frozenset(join_url(storage.url, group.directory) for group in record.groups)
