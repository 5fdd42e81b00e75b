"""Which commit at a place counts: the newest whose manifest, or record, exists."""

from __future__ import annotations

from dataclasses import dataclass

from smckpt.checkpoint.crc import crc64, hex64
from smckpt.checkpoint.format import Manifest, Record, open_json, parse_name
from smckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    UsageError,
)
from smckpt.storage import Storage, open_storage
from smckpt.storage.pool import pool_here
from smckpt.storage.urls import file_url, join_url, parent_url

__all__ = ["READERS", "Commit", "choose_commit", "commits_at", "read_manifest", "read_record"]

READERS = 16  # files read at once; a shared file system answers each in milliseconds
_TURNS = 10  # times that a place is looked at anew because a sweep was under way
_LEVELS = 3  # directories above that an error message looks into
_BELOW = 16  # and directories below

# A candidate: (epoch, number), "record" or "manifest", name.
Candidate = tuple[tuple[int, int], str, str]


@dataclass(frozen=True)
class Commit:
    """A commit: the name of the file that makes it, when, and the manifests it holds with their
    directories. `name`: of the file here by which it was found, the group's manifest or that."""

    identity: str
    name: str
    committed_at: int
    order: tuple[int, int]
    manifests: tuple[tuple[str, Manifest], ...]
    through_record: bool = False  # opened where the record stands: all groups are here


def read_manifest(storage: Storage, name: str, crc: str | None = None) -> Manifest:
    """A manifest, checked against its own checksum and, when given, the record's."""
    path = file_url(storage.url, name)
    data = storage.read(name)
    body = open_json(data, path)
    if crc is not None and hex64(crc64(data)) != crc:
        raise CorruptCheckpointError(
            "the manifest is not the one that the record names (checksum differs)",
            remedy="use an older checkpoint, and check the file system",
            path=path,
        )
    try:
        return Manifest.from_json(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _senseless(path, error) from error


def read_record(storage: Storage, name: str) -> Record:
    """A record, checked against its own checksum."""
    path = file_url(storage.url, name)
    body = open_json(storage.read(name), path)
    try:
        return Record.from_json(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _senseless(path, error) from error


def _senseless(path: str, error: Exception) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"the file does not make sense: {type(error).__name__} {error}",
        remedy="use an older checkpoint",
        path=path,
    )


def commits_at(storage: Storage) -> list[Candidate]:
    """Candidates here, newest first, a record before a manifest of its own. Not yet read."""
    names = [info.name for kind in ("record", "manifest") for info in storage.list(f"{kind}-")]
    return sorted((c for name in names if (c := _candidate(name)) is not None), reverse=True)


def _candidate(name: str) -> Candidate | None:
    parsed = parse_name(name)
    if parsed is None or parsed.kind not in ("record", "manifest"):
        return None
    return (parsed.epoch, parsed.number), parsed.kind, name


def choose_commit(storage: Storage, choose: str | None = None, name: str | None = None) -> Commit:
    """The newest commit here, or the one named `choose`.

    Args:
        name: the `Commit.name` of who found it here. Nothing is listed then, unless it is gone.

    Raises:
        CheckpointNotFoundError: none; says what is here instead.
        CorruptCheckpointError: the newest is damaged. What is older is not taken silently.
        FormatVersionError: a newer major version wrote the newest.
    """
    told = None if name is None else _candidate(name)
    candidates = commits_at(storage) if told is None else [told]
    for _ in range(_TURNS):
        failure: CheckpointNotFoundError | None = None
        try:
            commit = _first(storage, candidates, choose)
            if commit is not None:
                return commit
        except CheckpointNotFoundError as error:
            failure = error
        # A save that landed meanwhile may have swept what we were about to read.
        before, candidates = candidates, commits_at(storage)
        if candidates != before:
            continue
        if failure is None:
            raise _nothing(storage, choose, bool(candidates))
        raise CorruptCheckpointError(
            "a file that the commit is made of is missing",
            remedy="see who deletes files there; use an older checkpoint",
            path=failure.path,
        ) from failure
    raise StorageError(
        f"commits came and went {_TURNS} times while this one was read",
        remedy="load when fewer saves land here",
        path=storage.url,
    )


def _first(storage: Storage, candidates: list[Candidate], choose: str | None) -> Commit | None:
    if choose is not None:
        named = _candidate(choose)
        if named is None:
            raise UsageError(f"{choose!r} is no commit", remedy="pass Catalogue.identity")
        candidates = [c for c in candidates if c[0][0] == named[0][0]]
    for order, kind, name in candidates:
        if kind == "record":
            commit = _by_record(storage, name, order) if choose in (None, name) else None
        else:
            commit = _by_manifest(storage, name, order, choose)
        if commit is not None:
            return commit
    return None


def _by_record(storage: Storage, name: str, order: tuple[int, int]) -> Commit:
    record = read_record(storage, name)

    def one(group: dict[str, str]) -> tuple[str, Manifest]:
        here = open_storage(join_url(storage.url, group["directory"]))
        return here.url, read_manifest(here, group["manifest"], group["crc64"])

    with pool_here(max(1, min(READERS, len(record.groups)))) as pool:
        manifests = tuple(pool.map(one, record.groups))
    return Commit(name, name, record.committed_at, order, manifests, through_record=True)


def _by_manifest(
    storage: Storage, name: str, order: tuple[int, int], choose: str | None
) -> Commit | None:
    manifest = read_manifest(storage, name)
    if manifest.record is None:
        if choose not in (None, name):
            return None
        return Commit(name, name, manifest.committed_at, order, ((storage.url, manifest),))
    return _through_record(storage, name, manifest, order, choose)


def _through_record(
    storage: Storage, name: str, manifest: Manifest, order: tuple[int, int], choose: str | None
) -> Commit | None:
    """A group's manifest counts when the record that it points to exists and names it."""
    assert manifest.record is not None
    path = join_url(storage.url, manifest.record)
    record_name = manifest.record.rsplit("/", 1)[-1]
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
            manifests = ((storage.url, checked),)
            return Commit(record_name, name, record.committed_at, order, manifests)
    return None


# -- what to say when there is nothing ---------------------------------------------------------


def _nothing(storage: Storage, choose: str | None, candidates: bool) -> CheckpointNotFoundError:
    remedy = "give the directory of a finished save; `smckpt ls` lists what is below a directory"
    if choose is not None:
        what = f"the commit {choose}, which another group loads, is not here"
        remedy = "all groups of a step load from directories of the same step"
    elif candidates:
        what = "there are manifests, but the record that would commit their step is missing"
        remedy = "the save was cut short: use an older step; a group's directory that was copied "
        remedy += "elsewhere needs the record at its place too"
    else:
        what = _what_is_here(storage)
    return CheckpointNotFoundError(
        f"no committed checkpoint: {what}", remedy=remedy, path=storage.url
    )


def _what_is_here(storage: Storage) -> str:
    directories = storage.list_dirs()
    below = [d for d in directories[:_BELOW] if _holds_commit(storage.join(d))]
    if below:
        return f"but there are some below, in {', '.join(below[:4])}"
    above = storage
    for _ in range(_LEVELS):
        try:
            above = open_storage(parent_url(above.url))
        except UsageError:
            break  # a whole bucket
        if _holds_commit(above):
            return f"but there is one above, in {above.url}"
    names = [info.name for info in storage.list()]
    ours = [name for name in names if parse_name(name) is not None]
    if ours:
        return f"only {len(ours)} files of unfinished saves"
    if names or directories:
        return f"{len(names)} other files and {len(directories)} directories"
    return "the directory is empty or missing"


def _holds_commit(storage: Storage) -> bool:
    try:
        return _first(storage, commits_at(storage), None) is not None
    except CheckpointError:
        return False
