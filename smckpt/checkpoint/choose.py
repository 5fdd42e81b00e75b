"""Which commit at a place counts: the newest whose manifest, or record, exists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smckpt.checkpoint.crc import crc64, hex64
from smckpt.checkpoint.format import Manifest, Record, open_json, parse_name
from smckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from smckpt.storage import Storage, open_storage
from smckpt.storage.urls import join_url, parent_url

__all__ = ["Commit", "choose_commit", "commits_at", "read_manifest", "read_record"]


@dataclass(frozen=True)
class Commit:
    """A commit: the name of the file that makes it, when, and the manifests it holds with their
    directories."""

    identity: str
    committed_at: int
    order: tuple[int, int]
    manifests: tuple[tuple[str, Manifest], ...]
    through_record: bool = False  # opened where the record stands: all groups are here


def read_manifest(storage: Storage, name: str, crc: str | None = None) -> Manifest:
    """A manifest, checked against its own checksum and, when given, the record's."""
    path = join_url(storage.url, name)
    data = storage.read(name)
    if crc is not None and hex64(crc64(data)) != crc:
        raise CorruptCheckpointError(
            "the manifest is not the one that the record names (checksum differs)",
            remedy="use an older checkpoint, and check the file system",
            path=path,
        )
    body = open_json(data, path)
    try:
        return Manifest.from_json(body)
    except (KeyError, TypeError, ValueError) as error:
        raise _senseless(path, error) from error


def read_record(storage: Storage, name: str) -> Record:
    path = join_url(storage.url, name)
    body = open_json(storage.read(name), path)
    try:
        return Record.from_json(body)
    except (KeyError, TypeError, ValueError) as error:
        raise _senseless(path, error) from error


def _senseless(path: str, error: Exception) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"the file does not make sense: {type(error).__name__} {error}",
        remedy="use an older checkpoint",
        path=path,
    )


def commits_at(storage: Storage) -> list[tuple[tuple[int, int], str, str]]:
    """Candidates here, newest first: (order, "record" or "manifest", name). Not yet read."""
    found = []
    for info in storage.list():
        parsed = parse_name(info.name)
        if parsed is not None and parsed.kind in ("record", "manifest"):
            found.append(((parsed.epoch, parsed.number), parsed.kind, info.name))
    return sorted(found, reverse=True)


def choose_commit(storage: Storage, choose: str | None = None) -> Commit:
    """The newest commit here, or the one named `choose`.

    Raises:
        CheckpointNotFoundError: none.
    """
    newest: list[Commit] = []
    candidates = commits_at(storage)
    for kind in ("record", "manifest"):
        for order, its_kind, name in candidates:
            if its_kind != kind:
                continue
            commit = _open(storage, kind, name, order, choose)
            if commit is not None:
                newest.append(commit)
                break
    if not newest:
        raise _nothing(storage, choose, bool(candidates))
    return max(newest, key=lambda commit: commit.committed_at)


def _open(
    storage: Storage, kind: str, name: str, order: tuple[int, int], choose: str | None
) -> Commit | None:
    if kind == "record":
        if choose not in (None, name):
            return None
        record = read_record(storage, name)
        manifests = []
        for group in record.groups:
            here = open_storage(join_url(storage.url, group["directory"]))
            manifests.append((here.url, read_manifest(here, group["manifest"], group["crc64"])))
        return Commit(name, record.committed_at, order, tuple(manifests), through_record=True)
    manifest = read_manifest(storage, name)
    if manifest.record is None:
        if choose not in (None, name):
            return None
        return Commit(name, manifest.committed_at, order, ((storage.url, manifest),))
    return _through_record(storage, name, manifest, order, choose)


def _through_record(
    storage: Storage, name: str, manifest: Manifest, order: tuple[int, int], choose: str | None
) -> Commit | None:
    """A group's manifest counts when the record that it points to exists and names it."""
    assert manifest.record is not None
    path = join_url(storage.url, manifest.record)
    record_name = path.rsplit("/", 1)[1]
    if choose not in (None, record_name):
        return None
    parent = open_storage(parent_url(path))
    try:
        record = read_record(parent, record_name)
    except CheckpointNotFoundError:
        return None  # the step was never committed
    for group in record.groups:
        if group["manifest"] == name and join_url(parent.url, group["directory"]) == storage.url:
            checked = read_manifest(storage, name, group["crc64"])
            return Commit(record_name, record.committed_at, order, ((storage.url, checked),))
    return None


def _nothing(storage: Storage, choose: str | None, candidates: bool) -> CheckpointNotFoundError:
    remedy = "give the directory of a finished save; `smckpt ls` lists what is below a directory"
    if choose is not None:
        what = f"the commit {choose}, which another group loads, is not here"
        remedy = "all groups of a step load from directories of the same step"
    elif candidates:
        what = "there are manifests, but the record that would commit their step is missing"
        remedy = "the save was cut short; use an older step"
    else:
        what = _what_is_here(storage)
    return CheckpointNotFoundError(
        f"no committed checkpoint: {what}", remedy=remedy, path=storage.url
    )


def _what_is_here(storage: Storage) -> str:
    names = [info.name for info in storage.list()]
    ours = [n for n in names if parse_name(n) is not None]
    directories = storage.list_dirs()
    if ours:
        return f"only {len(ours)} files of unfinished saves"
    below = [d for d in directories if commits_at(storage.join(d))]
    if below:
        return f"but there are some below, in {below[:4]}"
    above: Any = parent_url(storage.url)
    if above != storage.url and commits_at(open_storage(above)):
        return f"but there is one above, in {above}"
    if names or directories:
        return f"{len(names)} other files and {len(directories)} directories"
    return "the directory is empty or missing"
