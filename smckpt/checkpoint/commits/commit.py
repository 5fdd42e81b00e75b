"""What a coordinator does when all parts are written: it publishes. This runs in the worker.

Each function takes the access to stores and plain values, and gives what JSON can hold. Nothing
that exists is ever replaced: leases, manifests and records are created exclusively.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from smckpt.calls import in_threads
from smckpt.checkpoint.commits.choose import commits_at
from smckpt.checkpoint.commits.foreign import checksum_of_dcp, delete_dcp
from smckpt.checkpoint.commits.gather import gather_parts
from smckpt.checkpoint.commits.leases import (
    claimed,
    later_run,
    mark_lease,
    probe,
    raise_fence,
    release,
    take_lease,
    taken_over,
)
from smckpt.checkpoint.commits.sweep import discard_attempt, sweep
from smckpt.checkpoint.records.crc import crc64, hex64
from smckpt.checkpoint.records.format import (
    FORMAT_VERSION,
    PREFIX_SHARDING_VERSION,
    GroupManifest,
    Manifest,
    Record,
    manifest_name,
    nested,
    ours_among,
    parse_name,
    parse_temporary,
    record_name,
    save_of,
)
from smckpt.checkpoint.records.prefixes import open_spread
from smckpt.checkpoint.records.sealed import FILES_AT_ONCE, Known, read_body, read_file, seal_json
from smckpt.decoding import decode
from smckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    StateError,
    StorageError,
    UsageError,
)
from smckpt.storage import Access, Storage
from smckpt.storage.urls import file_url, join_url

# The worker looks up the functions that requests name in this module.
__all__ = [
    "probe",
    "publish_manifest",
    "publish_record",
    "sweep",
    "take_lease",
]

log = logging.getLogger("smckpt")


def publish_manifest(
    access: Access,
    directory: str,
    attempt: str,
    fencing_token: int,
    ranks: Sequence[int],
    parts: Mapping[str, Mapping[str, str]],
    record: str | None,
) -> dict[str, Any]:
    """Read all parts back, check that they belong together, and create the manifest.

    When it returns for a group whose `record` is None, the checkpoint is committed.

    Args:
        access: its `spread` is that of the ranks' files.
        directory: URL of the group's directory.
        fencing_token: of the lease of `directory`, or of the record's directory.
        ranks: the ranks of the group.
        parts: rank (as text) → {"part": name, "crc64": hex, "host": name}.
        record: the relative path from `directory` to the record that will commit it, or None.

    Returns:
        "manifest" (name), "crc64" (hex, of the file), "bytes" (of all data files).

    Raises:
        StorageError: a part is missing (the directory is not shared), a later run has a lease of
            the directory, or another writer has the name.
        CorruptCheckpointError: a part reads back with other bytes than were written.
        StateError, UsageError: the parts do not belong together.
    """
    storage = open_spread(access, directory)
    try:  # also where it was taken before: the directory may have been removed meanwhile
        mark_lease(storage, fencing_token, save_of(attempt)[0], ranks)
    except StorageError as error:
        _take_back(storage, fencing_token, attempt, error)
    # This comes before the parts are read. A run that gives up this attempt fences it before it
    # deletes, so either we see the fence here or it sees our lease and leaves the files alone.
    gather = partial(gathered_manifest, storage, attempt, fencing_token, ranks, parts, record)

    def refuse() -> None:
        """If a later run owns the directory, delete what we wrote, because nobody else would find
        it."""
        error = later_run(storage, fencing_token, [storage.url], attempt)
        if error is not None:
            _take_back(storage, fencing_token, attempt, error)

    return create_manifest(storage, gather, refuse)


def commit_alone(storage: Storage, attempt: str, parts: Sequence[Mapping[str, str]]) -> str:
    """Take a lease, commit the parts of ranks 0, 1, …, all of which this process wrote (what
    `PartWriter.finish` gave), and sweep what was there. Where it fails, nothing may be deleted: a
    store may have created the manifest and lost its answer. The next try sweeps what it left.

    Returns:
        The manifest's name.

    Raises:
        StorageError: the store refused, or a later session has a lease of the directory.
    """
    host = socket.gethostname()
    lease = take_lease(storage.access, storage.url, save_of(attempt)[0], host)
    token = int(lease["fencing_token"])
    done = publish_manifest(
        storage.access, storage.url, attempt, token, range(len(parts)),
        {str(rank): {**part, "host": host} for rank, part in enumerate(parts)}, None,
    )  # fmt: skip
    manifest = str(done["manifest"])
    try:
        sweep(storage.access, storage.url, [manifest], token)
    except CheckpointError as error:  # the commit stands
        log.warning("%s: what was there could not all be deleted: %s", storage.url, error)
    return manifest


def refuse_not_empty(storage: Storage, beside: Collection[str] = ()) -> None:
    """Refuse a directory with anything in it, but for what an attempt left that was killed or
    failed before its commit. `commit_alone` sweeps that.

    Args:
        beside: further names that such an attempt may leave.

    Raises:
        UsageError: something else is there.
    """
    names = set(storage.names(all_kinds=True))
    left = {name for name in names if (parse_name(name) or parse_temporary(name)) is not None}
    others = names - left - set(beside if left else ())
    if others or storage.list_dirs() or commits_at(storage):
        raise UsageError(
            "the directory is not empty", remedy="choose an empty directory", path=storage.url
        )


def gathered_manifest(
    storage: Storage,
    attempt: str,
    fencing_token: int,
    ranks: Sequence[int],
    parts: Mapping[str, Mapping[str, str]],
    record: str | None,
) -> Manifest:
    """Read all parts back, check that they belong together, and make their manifest of them; the
    arguments are those of `publish_manifest`. Nothing is written.

    Raises:
        As `gather_parts`.
    """
    session, number = save_of(attempt)
    made = {
        **gather_parts(storage, attempt, ranks, parts),
        "attempt": attempt,
        "session": session,
        "number": number,
        "fencing_token": fencing_token,
        "group_ranks": sorted(ranks),
        "committed_at": time.time_ns(),
        "record": record,
        "spread": storage.spread,
        "replaces": checksum_of_dcp(storage),
        "format": PREFIX_SHARDING_VERSION if storage.spread else FORMAT_VERSION,
    }
    return decode(Manifest, made)


def create_manifest(
    storage: Storage, gather: Callable[[], Manifest], refuse: Callable[[], None]
) -> dict[str, Any]:
    """Gather the manifest and create it exclusively; what `publish_manifest` returns. Where that is
    the commit, it deletes the checkpoint of DCP's that was here.

    Args:
        refuse: raises if a later run writes here; called before the parts are read, and after.
    """
    refuse()
    manifest = gather()
    refuse()
    name = manifest_name(manifest.fencing_token, manifest.number, manifest.session)
    data = _create(storage, name, manifest.to_json())
    if manifest.record is None:
        delete_dcp(storage, manifest.replaces)
    return {
        "manifest": name,
        "crc64": hex64(crc64(data)),
        "bytes": sum(file.size for part in manifest.parts for file in part.files),
    }


def _take_back(storage: Storage, fencing_token: int, attempt: str, error: StorageError) -> NoReturn:
    """Delete what we wrote, unless it is committed, or a repair has claimed it to commit it: the
    first of the two that raises the fence decides."""
    try:
        raised = raise_fence(storage, attempt)
        manifests = ours_among(storage.names("manifest-"))
        tokens = {one.fencing_token for one in manifests if one.attempt == attempt}
        if (not raised and claimed(storage, attempt)) or max(tokens, default=0) > fencing_token:
            error = taken_over(attempt, storage.url)
        elif not tokens:
            discard_attempt(storage, attempt)
        if raised:
            release(storage, attempt)
    except CheckpointError as other:
        raise error from other
    raise error


def publish_record(
    access: Access,
    directory: str,
    session: str,
    number: int,
    fencing_token: int,
    groups: Sequence[GroupManifest],
) -> str:
    """Create the record that commits the manifests of several groups.

    Args:
        directory: URL of the directory of the record.
        session, number, fencing_token: of the step; they make the record's name.
        groups: the entry of each.

    Returns:
        The record's name.

    Raises:
        UsageError: two groups share a directory, or have different kinds or steps.
        StateError: the groups' manifests belong to different saves.
        StorageError: a manifest is not here, or a later run has a lease of the directories.
    """
    storage = access.open(directory)
    urls = [join_url(storage.url, group.directory) for group in groups]
    if pair := nested(urls):
        a, b = pair
        raise UsageError(
            f"two groups have one directory, {a}" if a == b else f"{b} is within {a}",
            remedy="give each group a directory of its own, none inside another: put the TP, EP, "
            "PP and shard coordinates that distinguish them into the path",
            path=storage.url,
        )
    known = Known()

    def read(of: tuple[Storage, GroupManifest]) -> Manifest:
        here, group = of
        try:
            return read_file(Manifest, here, group.manifest, group.crc64, known=known)
        except CheckpointNotFoundError as error:
            raise StorageError(
                f"this host does not see the manifest that rank {group.coordinator} published: the "
                "hosts do not share the directory",
                remedy="mount one file system on all hosts, or use an s3:// checkpoint_id",
                path=file_url(here.url, group.manifest),
            ) from error

    name = record_name(fencing_token, number, session)
    manifests = in_threads(read, zip(map(storage.at, urls), groups, strict=True), FILES_AT_ONCE)
    _check_step(manifests, urls, join_url(storage.url, name), fencing_token)
    record = Record(
        session=session,
        number=number,
        fencing_token=fencing_token,
        kind=manifests[0].kind,
        step=manifests[0].step,
        committed_at=time.time_ns(),
        nbytes=sum(f.size for m in manifests for p in m.parts for f in p.files),
        groups=tuple(groups),
        replaces=checksum_of_dcp(storage),
    )
    error = later_run(storage, fencing_token, urls)
    if error is not None:
        raise error
    _create(storage, name, record.to_json())
    for url, manifest in zip(urls, manifests, strict=True):
        delete_dcp(storage.at(url), manifest.replaces)
    delete_dcp(storage, record.replaces)
    return name


def _check_step(
    manifests: Sequence[Manifest], urls: Sequence[str], record: str, fencing_token: int
) -> None:
    first = manifests[0]
    owner: dict[int, str] = {}
    for manifest, url in zip(manifests, urls, strict=True):
        for key in ("kind", "step"):
            ours, theirs = getattr(manifest, key), getattr(first, key)
            if ours != theirs:
                raise UsageError(
                    f"{key} is {ours!r} in {url}, but {theirs!r} in {urls[0]}",
                    remedy=f"pass the same {key} in all groups of a step",
                    path=url,
                )
        if manifest.number != first.number:
            raise StateError(
                f"save {manifest.number} of one group would be committed with save {first.number} "
                "of another group, and the two may be different steps",
                remedy="restart the job; all groups must save equally often, so give a save that "
                "only some groups make a SaveOptions(queue=) of its own",
                path=url,
            )
        ref = manifest.record
        if manifest.fencing_token != fencing_token or ref is None or join_url(url, ref) != record:
            raise StateError(
                f"the manifest there does not name the record {record}",
                remedy="this is a fault of smckpt: please report it",
                path=url,
            )
        for rank in manifest.group_ranks:
            if rank in owner:
                raise StateError(
                    f"rank {rank} is in two groups: it wrote to {owner[rank]} and to {url}",
                    remedy="put each rank into only one group of a step",
                    path=url,
                )
            owner[rank] = url


def _create(storage: Storage, name: str, body: dict[str, Any]) -> bytes:
    """Create the file, once. Returns the content under the name afterwards.

    If the name exists with the same content, our own earlier call succeeded and its answer was
    lost. That counts as success.
    """
    data = seal_json(body)
    if storage.put_exclusive(name, data):
        return data
    there, stands = read_body(storage, name)
    there = {**there, "committed_at": body["committed_at"]}
    for one in (there, body):
        one.pop("replaces", None)  # our earlier call may have deleted that
    if seal_json(there) != seal_json(body):
        raise StorageError(
            "another writer has created a file with this name and other content",
            remedy="two jobs write to one directory: give each its own",
            path=file_url(storage.url, name),
        )
    return stands
