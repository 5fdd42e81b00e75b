"""Epochs: a session's claim on a directory, by which a later run fences an earlier one.

A claim is a file `epoch-<epoch>.json`, created exclusively; its number is above every epoch that
any name in the directory has. Who publishes looks for later claims first. A claim concerns its
*scope*: the directory in which it stands or, for the lead of several groups, the groups'
directories; so two jobs may keep their records in one parent.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smckpt.checkpoint.format import (
    FORMAT_VERSION,
    epoch_name,
    fence_name,
    open_json,
    parse_name,
    probe_name,
    seal_json,
)
from smckpt.checkpoint.spread import Homes, Spread
from smckpt.errors import CheckpointNotFoundError, StorageError, UsageError
from smckpt.storage import Storage, open_storage
from smckpt.storage.urls import file_url, join_url, relative_url

__all__ = [
    "Claim",
    "claim_epoch",
    "claims_at",
    "later_run",
    "mark_epoch",
    "places_at",
    "probe",
    "raise_fence",
    "sessions_at",
]

_TURNS = 1000  # claims in a row that somebody else wins before we give up
_WITH_EPOCH = ("epoch-", "manifest-", "record-")


@dataclass(frozen=True)
class Claim:
    """One epoch file. scope: URLs of the directories concerned; before: the sessions that had files
    in the directory when it was made; spread: how its session's files are spread over prefixes;
    ranks: that save under it; claimed_at: nanoseconds since 1970."""

    name: str
    epoch: int
    session: str
    scope: frozenset[str]
    before: frozenset[str]
    spread: Spread | None = None
    ranks: frozenset[int] = frozenset()
    claimed_at: int = 0


def claim_epoch(
    directory: str,
    session: str,
    host: str,
    groups: Sequence[str] = (),
    spread: Mapping[str, Any] | None = None,
    ranks: Sequence[int] = (),
    since: int = 0,
) -> dict[str, Any]:
    """Claim the next epoch of a directory for a session, exclusively.

    Args:
        directory: URL; of the group, or of the parent in which a record will stand.
        session: that publishes under this epoch.
        host: of the caller, for people who read the file.
        groups: URLs of the groups' directories, for a record's parent. The epoch is above theirs
            too, so that it means the same in all of them.
        spread: how the ranks' files are spread over prefixes, as `Spread.to_json` gives it.
        ranks: that save under this epoch; of all groups.
        since: when this job began, in nanoseconds since 1970.

    Returns:
        {"epoch": int}.

    Raises:
        UsageError: other ranks claimed one of the directories since this job began: two groups of
            it have one checkpoint_id, and would take turns in superseding each other.
        StorageError: others win every claim, or the store refused.
    """
    storage = open_storage(directory)
    inside = [open_storage(url) for url in groups]
    ways = [relative_url(group.url, storage.url) for group in inside]
    for _ in range(_TURNS):
        epoch = max(map(_latest_epoch, (storage, *inside))) + 1
        for place in (storage, *inside) if ranks else ():
            _refuse_shared(place, groups or [directory], session, frozenset(ranks), since)
        if _create_claim(storage, epoch, session, host, ways, Spread.from_json(spread), ranks):
            return {"epoch": epoch}
    raise StorageError(
        f"others claimed the last {_TURNS} epochs that this session tried",
        remedy="many jobs write to one directory: give each its own",
        path=storage.url,
    )


def _refuse_shared(
    storage: Storage, scope: Sequence[str], session: str, ranks: frozenset[int], since: int
) -> None:
    urls = {open_storage(url).url for url in scope}
    for claim in claims_at(storage):
        if (
            claim.session != session
            and claim.claimed_at > since
            and claim.ranks
            and not claim.ranks & ranks
            and claim.scope & urls
        ):
            raise UsageError(
                f"ranks {sorted(claim.ranks)[:8]} and ranks {sorted(ranks)[:8]} of one job have "
                "one checkpoint_id",
                remedy="give each group its own directory: put the TP, EP, PP and shard "
                "coordinates that tell them apart in the path",
                path=min(claim.scope & urls),
            )


def mark_epoch(
    storage: Storage,
    epoch: int,
    session: str,
    spread: Spread | None = None,
    ranks: Sequence[int] = (),
) -> None:
    """Make sure that the epoch, claimed in the parent, stands in this group's directory as ours.

    Raises:
        StorageError: it stands as another session's.
    """
    try:
        owner = _read_claim(storage, epoch_name(epoch)).session
    except CheckpointNotFoundError:
        if _create_claim(storage, epoch, session, socket.gethostname(), [], spread, ranks):
            return
        owner = _read_claim(storage, epoch_name(epoch)).session
    if owner != session:
        raise StorageError(
            f"epoch {epoch} is claimed here by session {owner}, ours is {session}: this save is "
            "not committed",
            remedy="two jobs write to one directory: give each its own; else restart this job",
            path=file_url(storage.url, epoch_name(epoch)),
        )


def probe(directory: str, token: str, create: bool, leave: bool = True) -> dict[str, Any]:
    """Find out whether saves can work here, and leave a small file for the peers; or say whether
    what a peer left is seen from here.

    Args:
        token: the session.
        create: for the one who leads; False for the peers.
        leave: False where there are no peers.

    Returns:
        {"seen": bool}, and "remark" if there is something that the user should know.

    Raises:
        StorageError, UsageError: saves cannot work here.
    """
    storage = open_storage(directory)
    name = probe_name(token)
    if parse_name(name) is None:
        raise UsageError(f"{token!r} is no session", remedy="pass 12 hex digits", path=directory)
    if create:
        remark = storage.try_out(name)
        if leave:
            storage.put_exclusive(name, seal_json({"format": list(FORMAT_VERSION)}))
        return {"seen": True, **({"remark": remark} if remark else {})}
    try:
        storage.read(name)  # not `size`: an object store's answer without a body gives no reason
    except CheckpointNotFoundError:
        return {"seen": False}
    return {"seen": True}


def later_run(
    storage: Storage, epoch: int, scope: Iterable[str], attempt: str = ""
) -> StorageError | None:
    """Why we may not publish any more, or None.

    Args:
        epoch: ours.
        scope: URLs of the directories that we publish for.
        attempt: whose files a sweep may be about to delete.
    """
    names = {info.name for info in storage.list()}
    if attempt and fence_name(attempt) in names:
        return StorageError(
            f"another run gave up attempt {attempt} for dead and deletes its files; this save is "
            "not committed",
            remedy="end the older of the two jobs that write here, and save again",
            path=storage.url,
        )
    scope = frozenset(scope)
    for name in sorted(names):
        parsed = parse_name(name)
        if parsed is not None and parsed.epoch > epoch and _scope_of(storage, name) & scope:
            return StorageError(
                f"epoch {parsed.epoch} was claimed after this session's ({epoch}): a later run "
                "writes here; this save is not committed",
                remedy="end the older of the two jobs; give each its own directory if both "
                "are meant to run",
                path=file_url(storage.url, name),
            )
    return None


def raise_fence(storage: Storage, attempt: str) -> None:
    """Tell a session that may yet live that its attempt is given up; durable on return."""
    storage.put_exclusive(fence_name(attempt), seal_json({"format": list(FORMAT_VERSION)}))


def claims_at(storage: Storage) -> list[Claim]:
    """All claims in a directory, oldest first."""
    found = []
    for info in storage.list("epoch-"):
        if parse_name(info.name) is not None:
            with contextlib.suppress(CheckpointNotFoundError):  # swept meanwhile
                found.append(_read_claim(storage, info.name))
    return sorted(found, key=lambda claim: claim.epoch)


def sessions_at(names: Iterable[str]) -> set[str]:
    """The sessions that wrote parts or data among these names."""
    found = (parse_name(name) for name in names)
    return {p.session for p in found if p is not None and p.kind in ("data", "crc", "part")}


def _latest_epoch(storage: Storage) -> int:
    """The highest epoch in any name here; 0 when there is none."""
    parsed = (parse_name(info.name) for prefix in _WITH_EPOCH for info in storage.list(prefix))
    return max((found.epoch for found in parsed if found is not None), default=0)


def places_at(storage: Storage, spreads: Iterable[Spread | None]) -> list[Storage]:
    """All stores in which files of this directory may lie: its own, and those under the prefixes
    that `spreads` say."""
    places = {storage.url: storage}
    for spread in spreads:
        for place in Homes(storage, spread).all():
            places.setdefault(place.url, place)
    return list(places.values())


def _create_claim(
    storage: Storage,
    epoch: int,
    session: str,
    host: str,
    groups: Sequence[str],
    spread: Spread | None,
    ranks: Sequence[int],
) -> bool:
    names: list[str] = []
    for place in places_at(storage, [] if groups else [spread]):
        names += [info.name for info in place.list()]
        with contextlib.suppress(StorageError):  # no right to look: then a sweep will say so
            names += place.list_unfinished()
    before = sessions_at(names) - {session}
    body = {
        "format": list(FORMAT_VERSION),
        "epoch": epoch,
        "session": session,
        "host": host,
        "claimed_at": time.time_ns(),
        "groups": list(groups),
        "before": sorted(before),
        **({"ranks": sorted(ranks)} if ranks else {}),
        **({"spread": spread.to_json()} if spread else {}),
    }
    return storage.put_exclusive(epoch_name(epoch), seal_json(body))


def _read_claim(storage: Storage, name: str) -> Claim:
    body = open_json(storage.read(name), file_url(storage.url, name))
    ways = body.get("groups", [])
    return Claim(
        name,
        body["epoch"],
        body["session"],
        frozenset(join_url(storage.url, way) for way in ways) or frozenset({storage.url}),
        frozenset(body.get("before", [])),
        Spread.from_json(body.get("spread")),
        frozenset(body.get("ranks", [])),
        int(body.get("claimed_at", 0)),
    )


def _scope_of(storage: Storage, name: str) -> frozenset[str]:
    """The directories that an epoch, manifest or record speaks of; none if it is gone meanwhile."""
    kind = name.split("-", 1)[0]
    if kind == "manifest":
        return frozenset({storage.url})
    try:
        if kind == "epoch":
            return _read_claim(storage, name).scope
        groups = open_json(storage.read(name), file_url(storage.url, name))["groups"]
    except CheckpointNotFoundError:
        return frozenset()
    return frozenset(join_url(storage.url, group["directory"]) for group in groups)
