"""Publishing: what a coordinator does when all parts are written. Runs in the worker.

Each function takes plain values and gives a JSON-able dict. Nothing that exists is ever replaced:
epochs, manifests and records are created exclusively.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from smckpt.checkpoint.crc import crc64, hex64
from smckpt.checkpoint.format import (
    FORMAT_VERSION,
    FileRecord,
    Manifest,
    PartRecord,
    Record,
    epoch_name,
    manifest_name,
    open_json,
    parse_name,
    probe_name,
    record_name,
    seal_json,
)
from smckpt.checkpoint.rows import merge_rows
from smckpt.checkpoint.sweep import sweep, sweep_records
from smckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StateError,
    StorageError,
    UsageError,
)
from smckpt.storage import Storage, open_storage
from smckpt.storage.urls import join_url

__all__ = ["claim_epoch", "probe", "publish_manifest", "publish_record", "sweep", "sweep_records", "write_json"]

_READERS = 16  # parts read at once; a shared file system answers small reads in milliseconds


def latest_epoch(storage: Storage) -> int:
    """The highest epoch in any name here; 0 when there is none."""
    epochs = [0]
    for prefix in ("epoch-", "manifest-", "record-"):
        for info in storage.list(prefix):
            if (parsed := parse_name(info.name)) is not None:
                epochs.append(parsed.epoch)
    return max(epochs)


def claim_epoch(directory: str, session: str, host: str) -> dict[str, Any]:
    """Claim the next epoch of a directory for a session, exclusively."""
    storage = open_storage(directory)
    body = {
        "format": list(FORMAT_VERSION),
        "session": session,
        "host": host,
        "claimed_at": time.time_ns(),
    }
    for _ in range(1000):  # each turn somebody else's claim succeeded
        epoch = latest_epoch(storage) + 1
        if storage.put_exclusive(epoch_name(epoch), seal_json(body)):
            return {"epoch": epoch}
    raise StorageError(
        "another writer claims every epoch that this one tries",
        remedy="two jobs write to one directory: give each its own",
        path=directory,
    )


def probe(directory: str, token: str, create: bool) -> dict[str, Any]:
    """Create a small file, or say whether it is seen; the creator's own look removes nothing."""
    storage = open_storage(directory)
    name = probe_name(token)
    if create:
        storage.put_exclusive(name, seal_json({"format": list(FORMAT_VERSION)}))
        return {"seen": True}
    try:
        storage.size(name)
    except CheckpointNotFoundError:
        return {"seen": False}
    return {"seen": True}


def write_json(storage: Storage, name: str, body: dict[str, Any]) -> str:
    """Write a sealed JSON file of an attempt-unique name; its CRC-64 in hex."""
    data = seal_json(body)
    storage.put(name, data)
    return hex64(crc64(data))


def publish_manifest(
    directory: str,
    attempt: str,
    session: str,
    number: int,
    epoch: int,
    ranks: Sequence[int],
    parts: Mapping[str, Mapping[str, str]],
    record: str | None,
) -> dict[str, Any]:
    """Read all parts back, see that they belong together, and create the manifest.

    Args:
        parts: rank (as text) → {"part": name, "crc64": hex, "host": name}.
        record: the relative way from `directory` to the record that will commit it, or None.

    Raises:
        StorageError: a part is missing (the directory is not shared), or a later epoch exists.
        StateError, UsageError: the parts do not belong together.
    """
    storage = open_storage(directory)
    if sorted(map(int, parts)) != sorted(ranks):
        raise StateError(
            f"parts of ranks {sorted(map(int, parts))}, group of ranks {sorted(ranks)}",
            remedy="all ranks of process_group must save",
            path=directory,
        )
    with ThreadPoolExecutor(min(_READERS, len(parts))) as pool:
        bodies = dict(
            zip(
                map(int, parts),
                pool.map(lambda p: _read_part(storage, p, parts), parts.values()),
                strict=True,
            )
        )
        files = [FileRecord(**f) for body in bodies.values() for f in body["files"]]
        list(pool.map(lambda f: _check_size(storage, f), files))
    _check_together(directory, attempt, bodies)
    first = bodies[min(bodies)]
    manifest = Manifest(
        checkpoint_id=directory,
        kind=first["kind"],
        step=first["step"],
        attempt=attempt,
        session=session,
        number=number,
        epoch=epoch,
        group_ranks=tuple(sorted(ranks)),
        committed_at=time.time_ns(),
        record=record,
        parts=tuple(
            PartRecord(
                rank,
                bodies[rank]["host"],
                parts[str(rank)]["part"],
                parts[str(rank)]["crc64"],
                tuple(FileRecord(**f) for f in bodies[rank]["files"]),
            )
            for rank in sorted(bodies)
        ),
        layout=merge_rows({rank: body["layout"] for rank, body in bodies.items()}),
        optimizers=first["optimizers"],
        topology=first["topology"],
        metadata=first["metadata"],
        versions=first["versions"],
    )
    data = seal_json(manifest.to_json())
    name = manifest_name(epoch, number, session)
    _fence(storage, epoch, session)
    _create(storage, name, data)
    return {
        "manifest": name,
        "crc64": hex64(crc64(data)),
        "bytes": sum(f.size for f in files),
        "step": manifest.step,
        "kind": manifest.kind,
        "tensors": len(manifest.layout["rows"]),
    }


def _read_part(
    storage: Storage, part: Mapping[str, str], parts: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    path = join_url(storage.url, part["part"])
    try:
        data = storage.read(part["part"])
    except CheckpointNotFoundError as error:
        hosts = sorted({p["host"] for p in parts.values()})
        raise StorageError(
            f"what host {part['host']} wrote is not here: the directory is not shared by the "
            f"hosts {hosts}",
            remedy="mount one file system on all hosts, or use an s3:// checkpoint_id",
            path=path,
        ) from error
    if hex64(crc64(data)) != part["crc64"]:
        raise CorruptCheckpointError(
            "the part record reads back otherwise than it was written",
            remedy="check the file system of that host",
            path=path,
        )
    return open_json(data, path)


def _check_size(storage: Storage, file: FileRecord) -> None:
    size = storage.size(file.name)
    if size != file.size:
        raise StorageError(
            f"the file has {size} bytes, {file.size} were written",
            remedy="check the file system; the save is not committed",
            path=join_url(storage.url, file.name),
        )


def _check_together(directory: str, attempt: str, bodies: Mapping[int, dict[str, Any]]) -> None:
    first_rank = min(bodies)
    first = bodies[first_rank]
    for rank, body in bodies.items():
        for key in ("checkpoint_id", "kind", "step", "group_ranks"):
            if body[key] != first[key]:
                raise UsageError(
                    f"{key} is {body[key]!r} on rank {rank}, {first[key]!r} on rank {first_rank}",
                    remedy=f"pass the same {key} on all ranks of process_group",
                    path=directory,
                    rank=rank,
                    host=body["host"],
                )
        if body["attempt"] != attempt:
            raise StateError(
                f"rank {rank} wrote attempt {body['attempt']}, not {attempt}",
                remedy="this is a fault of smckpt: please report it",
                path=directory,
                rank=rank,
            )
        for ranks, theirs in body["classes"].items():
            for other in map(int, ranks.split(",")):
                if bodies[other]["classes"].get(ranks) != theirs:
                    raise StateError(
                        f"ranks {rank} and {other} are replicas (of {ranks}) but hold tensors of "
                        "different names or shapes, so their shares do not fit together",
                        remedy="give replicas the same state; initialise optimizer state on all "
                        "ranks (init_optim_state), or save what differs as its own key",
                        path=directory,
                        rank=rank,
                        host=body["host"],
                    )


def _fence(storage: Storage, epoch: int, session: str) -> None:
    latest = latest_epoch(storage)
    if latest > epoch:
        raise StorageError(
            f"epoch {latest} was claimed after this session's ({epoch}): a later run, or another "
            "group, writes here; this save is not committed",
            remedy="end the older of the two jobs; give each replication group its own directory",
            path=storage.url,
        )


def _create(storage: Storage, name: str, data: bytes) -> None:
    if storage.put_exclusive(name, data):
        return
    if storage.read(name) != data:
        raise StorageError(
            "another writer has created a file of this name",
            remedy="two jobs write to one directory: give each its own",
            path=join_url(storage.url, name),
        )


def publish_record(
    directory: str,
    session: str,
    number: int,
    epoch: int,
    groups: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Create the record that commits the manifests of several groups.

    Args:
        groups: {"directory" (relative), "manifest", "crc64", "coordinator"} of each.

    Raises:
        UsageError: two groups share a directory, or are of different kinds or steps.
        StorageError: a manifest is not here, or a later epoch exists.
    """
    storage = open_storage(directory)
    _refuse_nested([g["directory"] for g in groups], directory)
    with ThreadPoolExecutor(min(_READERS, len(groups))) as pool:
        manifests = list(pool.map(lambda g: _read_manifest(storage, g), groups))
    first = manifests[0]
    for manifest in manifests[1:]:
        for key in ("kind", "step"):
            ours, theirs = getattr(manifest, key), getattr(first, key)
            if ours != theirs:
                raise UsageError(
                    f"{key} is {ours!r} in {manifest.checkpoint_id}, {theirs!r} in "
                    f"{first.checkpoint_id}",
                    remedy=f"pass the same {key} in all groups of a step",
                    path=directory,
                )
    record = Record(
        session=session,
        number=number,
        epoch=epoch,
        kind=first.kind,
        step=first.step,
        committed_at=time.time_ns(),
        nbytes=sum(f.size for m in manifests for p in m.parts for f in p.files),
        groups=tuple(dict(g) for g in groups),
    )
    name = record_name(epoch, number, session)
    _fence(storage, epoch, session)
    _create(storage, name, seal_json(record.to_json()))
    return {"record": name}


def _refuse_nested(directories: Sequence[str], root: str) -> None:
    ordered = sorted(d.rstrip("/") for d in directories)
    for a, b in itertools.pairwise(ordered):
        if a == b or b.startswith(a + "/"):
            raise UsageError(
                f"the directories of two groups are one, or one in the other: {a}, {b}",
                remedy="give each group a directory of its own, side by side",
                path=root,
            )


def _read_manifest(storage: Storage, group: Mapping[str, Any]) -> Manifest:
    here = open_storage(join_url(storage.url, group["directory"]))
    path = join_url(here.url, group["manifest"])
    try:
        data = here.read(group["manifest"])
    except CheckpointNotFoundError as error:
        raise StorageError(
            f"the manifest of the group that rank {group['coordinator']} coordinates is not seen "
            "from here: the directory is not shared by all hosts",
            remedy="mount one file system on all hosts, or use an s3:// checkpoint_id",
            path=path,
        ) from error
    if hex64(crc64(data)) != group["crc64"]:
        raise CorruptCheckpointError(
            "the manifest reads back otherwise than it was written",
            remedy="check the file system",
            path=path,
        )
    try:
        return Manifest.from_json(open_json(data, path))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the manifest does not make sense: {error}", remedy="please report it", path=path
        ) from error
