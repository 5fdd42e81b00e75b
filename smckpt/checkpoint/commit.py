"""Publishing: what a coordinator does when all parts are written. Runs in the worker.

Each function takes plain values and gives a JSON-able dict. Nothing that exists is ever replaced:
epochs, manifests and records are created exclusively.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from smckpt.checkpoint.claims import claim_epoch, later_run, mark_epoch, probe
from smckpt.checkpoint.crc import crc64, hex64
from smckpt.checkpoint.format import (
    FORMAT_VERSION,
    SPREAD_VERSION,
    Manifest,
    Record,
    manifest_name,
    open_json,
    record_name,
    seal_json,
)
from smckpt.checkpoint.gather import READERS, gather_parts
from smckpt.checkpoint.spread import Homes, Spread
from smckpt.checkpoint.sweep import discard_attempt, sweep, sweep_records
from smckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StateError,
    StorageError,
    UsageError,
)
from smckpt.storage import Storage, open_storage
from smckpt.storage.pool import pool_here
from smckpt.storage.urls import file_url, join_url

# The worker looks up here what a request names.
__all__ = [
    "claim_epoch",
    "probe",
    "publish_manifest",
    "publish_record",
    "sweep",
    "sweep_records",
]


def publish_manifest(
    directory: str,
    attempt: str,
    session: str,
    number: int,
    epoch: int,
    ranks: Sequence[int],
    parts: Mapping[str, Mapping[str, str]],
    record: str | None,
    spread: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Read all parts back, see that they belong together, and create the manifest.

    When it returns for a group whose `record` is None, the checkpoint is committed.

    Args:
        directory: URL of the group's directory.
        attempt, session, number: of the save.
        epoch: claimed in `directory`, or in the directory of the record.
        ranks: of the group.
        parts: rank (as text) → {"part": name, "crc64": hex, "host": name}.
        record: the relative way from `directory` to the record that will commit it, or None.
        spread: how the ranks' files are spread over prefixes, as `Spread.to_json` gives it.

    Returns:
        "manifest" (name), "crc64" (hex, of the file), "bytes" (of all data files), "step", "kind",
        "tensors" (rows of the merged table).

    Raises:
        StorageError: a part is missing (the directory is not shared), a later run has claimed the
            directory, or another writer has the name.
        CorruptCheckpointError: a part reads back otherwise than it was written.
        StateError, UsageError: the parts do not belong together.
    """
    storage, over = open_storage(directory), Spread.from_json(spread)
    homes = Homes(storage, over)
    try:  # also where it was claimed before: the directory may have been removed meanwhile
        mark_epoch(storage, epoch, session, over, ranks)
    except StorageError as error:
        _take_back(homes, attempt, error)
    # Before the parts are looked at: a run that gives up this attempt says so before it deletes,
    # so either we see that here or it sees our claim and leaves the files alone.
    _refuse_fenced(homes, epoch, attempt)
    gathered = gather_parts(homes, attempt, ranks, parts)
    manifest = Manifest(
        checkpoint_id=gathered.head["checkpoint_id"],
        kind=gathered.head["kind"],
        step=gathered.head["step"],
        attempt=attempt,
        session=session,
        number=number,
        epoch=epoch,
        group_ranks=tuple(sorted(ranks)),
        committed_at=time.time_ns(),
        record=record,
        parts=gathered.parts,
        layout=gathered.layout,
        spread=over,
        optimizers=gathered.optimizers,
        topology=gathered.head["topology"],
        metadata=gathered.head["metadata"],
        versions=gathered.head["versions"],
        format=SPREAD_VERSION if over else FORMAT_VERSION,
    )
    _refuse_fenced(homes, epoch, attempt)
    name = manifest_name(epoch, number, session)
    data = _create(storage, name, manifest.to_json())
    return {
        "manifest": name,
        "crc64": hex64(crc64(data)),
        "bytes": sum(file.size for part in manifest.parts for file in part.files),
        "step": manifest.step,
        "kind": manifest.kind,
        "tensors": len(manifest.layout["rows"]),
    }


def _refuse_fenced(homes: Homes, epoch: int, attempt: str) -> None:
    """A later run has the directory: take back what we wrote, which nobody else would find."""
    error = later_run(homes.directory, epoch, [homes.directory.url], attempt)
    if error is not None:
        _take_back(homes, attempt, error)


def _take_back(homes: Homes, attempt: str, error: StorageError) -> NoReturn:
    try:
        discard_attempt(homes, attempt)
    except CheckpointError as other:
        raise error from other
    raise error


def publish_record(
    directory: str,
    session: str,
    number: int,
    epoch: int,
    groups: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Create the record that commits the manifests of several groups.

    Args:
        directory: URL in which the record will stand.
        session, number, epoch: of the step; they make the record's name.
        groups: {"directory" (relative), "manifest", "crc64", "coordinator"} of each.

    Returns:
        "record" (name), "bytes" (of all data files of all groups).

    Raises:
        UsageError: two groups share a directory, or are of different kinds or steps.
        StateError: the groups' manifests are not of one save.
        StorageError: a manifest is not here, or a later run has claimed the directories.
    """
    storage = open_storage(directory)
    urls = [join_url(storage.url, group["directory"]) for group in groups]
    _refuse_nested(urls, storage.url)
    name = record_name(epoch, number, session)
    with pool_here(min(READERS, len(groups))) as pool:
        manifests = list(pool.map(_read_manifest, urls, groups))
    _check_step(manifests, urls, join_url(storage.url, name), epoch)
    record = Record(
        session=session,
        number=number,
        epoch=epoch,
        kind=manifests[0].kind,
        step=manifests[0].step,
        committed_at=time.time_ns(),
        nbytes=sum(f.size for m in manifests for p in m.parts for f in p.files),
        groups=tuple(dict(group) for group in groups),
    )
    error = later_run(storage, epoch, urls)
    if error is not None:
        raise error
    _create(storage, name, record.to_json())
    return {"record": name, "bytes": record.nbytes}


def _refuse_nested(urls: Sequence[str], root: str) -> None:
    ordered = sorted(url.rstrip("/") + "/" for url in urls)
    for a, b in itertools.pairwise(ordered):
        if b.startswith(a):
            raise UsageError(
                f"two groups have one directory, {a}" if a == b else f"{b} lies within {a}",
                remedy="give each group a directory of its own, side by side: put what tells them "
                "apart (the TP, EP, PP and shard coordinates) in the path",
                path=root,
            )


def _read_manifest(url: str, group: Mapping[str, Any]) -> Manifest:
    storage = open_storage(url)
    path = join_url(url, group["manifest"])
    try:
        data = storage.read(group["manifest"])
    except CheckpointNotFoundError as error:
        raise StorageError(
            f"the manifest that rank {group['coordinator']} published is not seen from here: the "
            "directory is not shared by all hosts",
            remedy="mount one file system on all hosts, or use an s3:// checkpoint_id",
            path=path,
        ) from error
    if hex64(crc64(data)) != group["crc64"]:
        raise CorruptCheckpointError(
            "the manifest reads back otherwise than it was written",
            remedy="check the file system; the step is not committed",
            path=path,
        )
    try:
        return Manifest.from_json(open_json(data, path))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(
            f"the manifest does not make sense: {type(error).__name__} {error}",
            remedy="this is a fault of smckpt: please report it",
            path=path,
        ) from error


def _check_step(
    manifests: Sequence[Manifest], urls: Sequence[str], record: str, epoch: int
) -> None:
    first = manifests[0]
    owner: dict[int, str] = {}
    for manifest, url in zip(manifests, urls, strict=True):
        for key in ("kind", "step"):
            ours, theirs = getattr(manifest, key), getattr(first, key)
            if ours != theirs:
                raise UsageError(
                    f"{key} is {ours!r} in {url}, {theirs!r} in {urls[0]}",
                    remedy=f"pass the same {key} in all groups of a step",
                    path=url,
                )
        if manifest.number != first.number:
            raise StateError(
                f"save {manifest.number} of one group would be committed with save "
                f"{first.number} of another, which may be another step",
                remedy="all groups must save equally often: restart the job, or give saves that "
                "only some groups make a queue= of their own",
                path=url,
            )
        way = manifest.record
        if manifest.epoch != epoch or way is None or join_url(url, way) != record:
            raise StateError(
                f"the manifest there does not name the record {record}",
                remedy="this is a fault of smckpt: please report it",
                path=url,
            )
        for rank in manifest.group_ranks:
            if rank in owner:
                raise StateError(
                    f"rank {rank} wrote to {owner[rank]} and to {url}",
                    remedy="make the groups of a step disjoint",
                    path=url,
                )
            owner[rank] = url


def _create(storage: Storage, name: str, body: dict[str, Any]) -> bytes:
    """Create the file, once; what stands under the name afterwards.

    That our own earlier call succeeded, though its answer was lost, counts as success.
    """
    data = seal_json(body)
    if storage.put_exclusive(name, data):
        return data
    path = file_url(storage.url, name)
    stands = storage.read(name)
    there = {**open_json(stands, path), "committed_at": body["committed_at"]}
    if seal_json(there) != data:
        raise StorageError(
            "another writer has created a file of this name with other contents",
            remedy="two jobs write to one directory: give each its own",
            path=path,
        )
    return stands
