"""Deletes the files that a newer commit supersedes, and those that dead attempts left.

A sweep deletes only files with smckpt's names, and only those of attempts that are over: attempts
of sessions with earlier leases, and earlier numbers of the same session. Before it deletes
anything, it checks the commit that supersedes them. It deletes records first, then manifests, then
the files that they name, so a half-deleted checkpoint cannot be taken for a whole one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from smckpt.checkpoint.commits.leases import (
    Lease,
    claimed,
    later_run,
    leases_at,
    raise_fence,
    scope_of,
)
from smckpt.checkpoint.records.crc import crc64, hex64
from smckpt.checkpoint.records.format import (
    Manifest,
    ParsedName,
    Record,
    fence_name,
    ours_among,
    parse_name,
    parse_temporary,
    save_of,
)
from smckpt.checkpoint.records.prefixes import spread_over
from smckpt.checkpoint.records.sealed import MAX_JSON_BYTES, read_file
from smckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    UsageError,
)
from smckpt.storage import Access, Storage
from smckpt.storage.budget import Spread
from smckpt.storage.urls import file_url, join_url, parent_url, relative_url

_WRITTEN = ("part", "data", "crc")
# A file that names others is deleted before them. Leases, which tell old from new, come near the
# end.
_ORDER = ("record", "manifest", "part", "data", "crc", "probe", "lease", "fence")


def sweep(
    access: Access,
    directory: str,
    keep: Sequence[str],
    fencing_token: int,
    record_directory: str | None = None,
    keep_records: Sequence[str] = (),
) -> int:
    """Delete the files that the manifests in `keep` supersede in a group's directory.

    Args:
        directory: URL of the group's directory.
        keep: names of manifests to keep, with all that they name. Each must be committed, and its
            files must be here. If one is gone, somebody removed its checkpoint: nothing is deleted.
        fencing_token: of the caller. If a later run has a lease on the directory, nothing is
            deleted.
        record_directory, keep_records: only the lead of several groups passes them. The superseded
            records are deleted first.

    Returns:
        How many files were deleted.

    Raises:
        CorruptCheckpointError: a manifest to keep is damaged, uncommitted or lacks a file; nothing
            was deleted.
    """
    if not keep:
        raise UsageError(
            "no manifest to keep",
            remedy="name the newest manifest, which says what is old",
            path=directory,
        )
    storage = access.open(directory)
    if later_run(storage, fencing_token, [storage.url]) is not None:
        return 0
    try:
        kept = [read_file(Manifest, storage, name) for name in keep]
        leases = [lease for lease in leases_at(storage) if storage.url in lease.scope]
        old = _old_spreads(storage, keep, leases)
        files = spread_over(storage, [*(manifest.spread for manifest in kept), *old, None])
        sizes = {info.name: info.size for info in files.list()}
        begun: Sequence[str] = ()
        unseen: StorageError | None = None
        try:
            begun = files.list_unfinished()
        except StorageError as error:  # the others are deleted nevertheless
            unseen = error
        for name, manifest in zip(keep, kept, strict=True):
            _refuse_unwhole(storage, name, manifest, sizes)
    except CheckpointError:
        if {info.name for info in storage.list("manifest-")}.issuperset(keep):
            raise
        return 0  # a rotation removed the checkpoint since its commit
    deleted = 0
    if record_directory is not None:
        deleted += sweep_records(access, record_directory, keep_records, fencing_token)
    attempts = _Attempts.of(storage, kept, fencing_token, leases)
    given_up = _give_up(storage, [*sizes, *begun], attempts)

    def over(name: str) -> ParsedName | None:
        parsed = parse_name(name) or parse_temporary(name)
        if parsed is None or name in keep or parsed.kind in ("record", "fence"):
            return None
        gone = attempts.over(name, parsed) or parsed.attempt in given_up
        return parsed if gone else None

    doomed = [(parsed.kind, name) for name in sizes if (parsed := over(name)) is not None]
    written = {one.attempt for one in ours_among(sizes, *_WRITTEN)}
    for fence in ours_among({*sizes, *map(fence_name, given_up)}, "fence"):
        done = fence.attempt not in written - given_up
        doomed += [("fence", fence.name)] if done else []
    steps = [name for kind, name in doomed if kind == "manifest"]
    deleted += _delete_cut_records(storage, steps, kept)
    files.discard_unfinished([name for name in begun if over(name)])
    deleted += _delete(files, doomed)
    if unseen is not None:
        raise unseen
    return deleted


def sweep_records(access: Access, directory: str, keep: Sequence[str], fencing_token: int) -> int:
    """Delete the records that those in `keep` supersede: older records that cover one of the same
    directories. Records of other jobs in the same parent stay.

    Returns:
        How many files were deleted.

    Raises:
        CorruptCheckpointError: a record to keep is damaged; nothing was deleted.
    """
    storage = access.open(directory)
    kept = [read_file(Record, storage, name) for name in keep]
    scope = frozenset(url for record in kept for url in scope_of(storage, record))
    if not kept or later_run(storage, fencing_token, scope) is not None:
        return 0
    newest = max((record.fencing_token, record.number) for record in kept)
    doomed = []
    for one in ours_among(info.name for info in storage.list("record-")):
        if one.name in keep or one.order >= newest:
            continue
        if scope_of(storage, read_file(Record, storage, one.name)) & scope:
            doomed.append((one.kind, one.name))
    doomed += [
        ("lease", lease.name)
        for lease in leases_at(storage)
        if lease.fencing_token < fencing_token and lease.scope & scope
    ]
    return _delete(storage, doomed)


def _delete_cut_records(storage: Storage, doomed: Sequence[str], kept: Sequence[Manifest]) -> int:
    """Delete the records of steps that lose this group's files, if no lead deletes them, because
    the ranks were grouped differently then. A load would find such a step, and its files would be
    missing.

    Args:
        doomed: names of manifests.

    Returns:
        How many were deleted.
    """
    tokens = {manifest.fencing_token for manifest in kept}
    led = {parent_url(join_url(storage.url, m.record)) for m in kept if m.record is not None}
    deleted = 0
    for manifest in ours_among(doomed):
        if manifest.fencing_token in tokens:
            continue  # same groups as the kept manifests
        with contextlib.suppress(CheckpointError):  # damaged, or without its record
            ref = read_file(Manifest, storage, manifest.name).record
            at = storage.url if ref is None else join_url(storage.url, ref)
            record = at.rsplit("/", 1)[-1]
            if not ours_among([record], "record") or parent_url(at) in led:
                continue
            parent = storage.at(parent_url(at))
            named = {(u.directory, u.manifest) for u in read_file(Record, parent, record).groups}
            if (relative_url(storage.url, parent.url), manifest.name) in named:
                parent.delete(record)
                parent.sync()
                deleted += 1
    return deleted


def discard_attempt(storage: Storage, attempt: str) -> int:
    """Delete the files of an attempt that is not committed and never will be. Returns how many."""
    written = ours_among((info.name for info in storage.list()), *_WRITTEN)
    return _delete(storage, [(one.kind, one.name) for one in written if one.attempt == attempt])


@dataclass(frozen=True)
class _Attempts:
    """Which attempts in a directory are over, as the session with `fencing_token` sees it.

    kept: those of kept commits. newest: the highest kept number, by session. older:
    sessions whose last lease is earlier than ours. without_lease: sessions that had files here when
    our lease was taken, and never took one. leases: the lease files that ours supersedes.
    """

    fencing_token: int
    kept: frozenset[str]
    newest: Mapping[str, int]
    older: frozenset[str]
    without_lease: frozenset[str]
    leases: frozenset[str]

    @classmethod
    def of(
        cls, storage: Storage, kept: Sequence[Manifest], fencing_token: int, leases: Sequence[Lease]
    ) -> _Attempts:
        newest: dict[str, int] = {}
        for manifest in kept:
            if manifest.fencing_token == fencing_token:
                known = newest.get(manifest.session, -1)
                newest[manifest.session] = max(known, manifest.number)
        last = _last_tokens(storage, leases)
        before = frozenset(s for c in leases if c.fencing_token == fencing_token for s in c.before)
        older = frozenset(s for s, at in last.items() if at < fencing_token) - newest.keys()
        return cls(
            fencing_token,
            frozenset(manifest.attempt for manifest in kept),
            newest,
            older,
            before - last.keys() - newest.keys(),
            frozenset(lease.name for lease in leases if lease.fencing_token < fencing_token),
        )

    def over(self, name: str, parsed: ParsedName) -> bool:
        if parsed.kind == "lease":
            return name in self.leases
        if parsed.attempt in self.kept:
            return False
        if parsed.kind in ("manifest", "record") and parsed.fencing_token > self.fencing_token:
            return False
        if parsed.session in self.newest:
            # A session's probe has done its work once a save of that session is committed.
            return parsed.kind == "probe" or parsed.number < self.newest[parsed.session]
        if parsed.kind == "probe" and parsed.session in self.without_lease:
            return True  # it ended before it took a lease
        return parsed.session in self.older


def _last_tokens(storage: Storage, leases: Iterable[Lease]) -> dict[str, int]:
    """The latest fencing token of each session here, from its leases and manifests."""
    last: dict[str, int] = {}
    for lease in leases:
        last[lease.session] = max(last.get(lease.session, 0), lease.fencing_token)
    for one in ours_among(info.name for info in storage.list("manifest-")):
        last[one.session] = max(last.get(one.session, 0), one.fencing_token)
    return last


def _give_up(storage: Storage, names: Iterable[str], attempts: _Attempts) -> frozenset[str]:
    """Attempts of sessions that began before ours and never took a lease. They are most likely
    dead.

    One of them may still wake up and publish. So this fences each attempt, and then reads the
    leases again. A session takes its lease before it publishes, and looks for a fence before it
    checks its files. So one of the two sees the other.
    """
    written = ours_among(names, *_WRITTEN)
    found = {one.attempt for one in written if one.session in attempts.without_lease}
    for attempt in tuple(found):
        if not raise_fence(storage, attempt) and claimed(storage, attempt):
            found.remove(attempt)  # a repair is about to commit it
    sessions = set(_last_tokens(storage, leases_at(storage))) if found else set()
    awake = {attempt for attempt in found if save_of(attempt)[0] in sessions}
    for attempt in awake:
        storage.delete(fence_name(attempt))
    return frozenset(found - awake)


def _old_spreads(
    storage: Storage, keep: Sequence[str], leases: Iterable[Lease]
) -> Iterator[Spread | None]:
    """The prefixes of sessions before this one. Their leases record them. For a checkpoint that was
    copied here, its manifest does."""
    for lease in leases:
        yield lease.spread
    manifests = storage.names("manifest-") if storage.shards_prefixes else ()
    for name in set(manifests).difference(keep):
        with contextlib.suppress(CheckpointError):  # damaged: it is deleted nevertheless
            yield read_file(Manifest, storage, name).spread


def _refuse_unwhole(
    storage: Storage, name: str, manifest: Manifest, sizes: Mapping[str, int]
) -> None:
    """Check that a manifest to keep is committed and that its files are here."""
    path = file_url(storage.url, name)
    for part in manifest.parts:
        if part.name not in sizes:
            raise _not_kept(f"{part.name} is missing", path)
        for file in part.files:
            if sizes.get(file.name) != file.size:
                raise _not_kept(f"{file.name} has {sizes.get(file.name)} of {file.size}", path)
    if manifest.record is not None:
        at = join_url(storage.url, manifest.record)
        parent = storage.at(parent_url(at))
        try:
            record = read_file(Record, parent, at[len(parent.url) :].strip("/"))
        except CheckpointNotFoundError as error:
            raise _not_kept("the record that would commit it does not exist", path) from error
        named = {(join_url(parent.url, g.directory), g.crc64) for g in record.groups}
        stands = storage.read(name, most=MAX_JSON_BYTES)
        if (storage.url, hex64(crc64(stands))) not in named:
            raise _not_kept(f"the record {at} does not name it", path)


def _not_kept(what: str, path: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"older checkpoints are not deleted, since the newest is not whole: {what}",
        remedy="run `smckpt verify` on the directory",
        path=path,
    )


def _delete(storage: Storage, doomed: Iterable[tuple[str, str]]) -> int:
    """Delete (kind, name) in order of `_ORDER`, all names of a kind together. Records and manifests
    are durably gone before their files go. Returns how many."""
    by_kind: dict[str, list[str]] = {kind: [] for kind in _ORDER}
    for kind, name in doomed:
        by_kind[kind].append(name)
    for kind, names in by_kind.items():
        if names:
            storage.delete_many(names)
        if names and kind in ("record", "manifest"):
            storage.sync()
    return sum(map(len, by_kind.values()))
