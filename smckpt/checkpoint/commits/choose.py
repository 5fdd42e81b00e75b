"""Choose the commit that counts at a place: the newest one whose manifest, or record, exists."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from smckpt.calls import in_threads
from smckpt.checkpoint.commits.foreign import (
    checksum_of_dcp,
    foreign_format,
    natural_order,
    not_read,
)
from smckpt.checkpoint.records.format import (
    GroupManifest,
    Manifest,
    ParsedName,
    Part,
    PartRecord,
    Record,
    manifest_name,
    ours_among,
)
from smckpt.checkpoint.records.sealed import (
    FILES_AT_ONCE,
    Known,
    contradicts,
    read_file,
    refuse_unlike,
)
from smckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    UsageError,
)
from smckpt.storage import Storage
from smckpt.storage.urls import file_url, join_url, parent_url

_TURNS = 10  # how often we look again because a sweep was under way
_LEVELS = 3  # how many directories above are searched for the error message
_BELOW = 16  # and how many directories below
_OF_OTHERS = re.compile(r"iter_\d{7}|global_step\d+(_universal)?")  # Megatron-LM's, DeepSpeed's
_COMMITS = ("record-", "manifest-")


@dataclass(frozen=True)
class Commit:
    """A commit: the name of the file that makes it, when it was made, and its manifests with their
    directories. `name`: the file in this directory by which it was found. groups: what the record
    says of these manifests, if one commits them."""

    identity: str
    name: str
    committed_at: int
    order: tuple[int, int]
    manifests: tuple[tuple[str, Manifest], ...]
    through_record: bool = False  # opened in the record's directory, so all groups are here
    groups: tuple[GroupManifest, ...] = ()
    replaces: str | None = None  # what DCP had written here before, see `foreign.py`

    @property
    def first(self) -> Manifest:
        """The manifest that tells what all groups of the step have alike."""
        return self.manifests[0][1]

    @property
    def whole(self) -> bool:
        """Whether all groups of the step are here, and not one group of several."""
        return self.through_record or self.first.record is None

    @property
    def above(self) -> str:
        """The directory of the record that commits the manifests."""
        return parent_url(join_url(self.manifests[0][0], self.first.record or ""))

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(f.size for _, m in self.manifests for p in m.parts for f in p.files)


def read_part(storage: Storage, listed: PartRecord, manifest: Manifest) -> dict[str, Any]:
    """Read the part of a rank and compare it with the manifest that names it; the fields of `Part`.

    Raises:
        CheckpointNotFoundError: it is not there.
        CorruptCheckpointError, FormatVersionError: it differs from the one that the manifest names.
    """
    path = file_url(storage.url, listed.name)
    part = read_file(Part, storage, listed.name, listed.crc64)
    refuse_unlike(part, listed, ("rank", "files"), path, "the manifest")
    refuse_unlike(part, manifest, ("attempt", "group_ranks", "kind", "step"), path, "the manifest")
    return {each.name: getattr(part, each.name) for each in fields(part)}


def _refuse_mixed(record: Record, at: str, manifests: Sequence[tuple[str, Manifest]]) -> None:
    """Check that the manifests of the record at `at` are of one step, point back to it, and share
    no rank."""
    owner: dict[int, str] = {}
    for directory, manifest in manifests:
        path = file_url(
            directory, manifest_name(manifest.fencing_token, manifest.number, manifest.session)
        )
        refuse_unlike(manifest, record, ("kind", "step", "number", "fencing_token"), path, at)
        ref = manifest.record
        back = ref and file_url(join_url(directory, ref.rpartition("/")[0]), ref.rpartition("/")[2])
        if back != at:
            raise contradicts(path, "record", ref, at, "the record that names it")
        for rank in manifest.group_ranks:
            if owner.setdefault(rank, directory) != directory:
                raise contradicts(path, f"the directory of rank {rank}", directory, owner[rank], at)


def commits_at(storage: Storage) -> list[ParsedName]:
    """The files here that may be commits, newest first, a record before its own manifests. Nothing
    is read yet. If such a name belongs to something that is not a file, reading it raises, and no
    older commit is taken instead."""
    return commits_in(storage.names(*_COMMITS, all_kinds=True))


def commits_in(names: Iterable[str]) -> list[ParsedName]:
    """Those among the names of a directory, newest first."""
    found = ours_among(names, "record", "manifest")
    return sorted(found, key=lambda one: (one.order, one.kind, one.name), reverse=True)


def choose_commit(
    storage: Storage,
    choose: str | None = None,
    name: str | None = None,
    candidates: list[ParsedName] | None = None,
) -> Commit:
    """Find the newest commit here, or the one named `choose`.

    Args:
        name: the `Commit.name` under which it was found here before, or by a peer. Then nothing is
            listed, unless the file is gone.
        candidates: what `commits_at` has just found, if the caller has looked.

    Raises:
        CheckpointNotFoundError: there is none. The message says what is here instead.
        CorruptCheckpointError: the newest is damaged. An older one is never taken silently.
        FormatVersionError: a newer major version wrote the newest.
    """
    if name is not None:
        candidates = commits_in([name]) or None
    if candidates is None:
        candidates = commits_at(storage)
    for _ in range(_TURNS):
        failure: CheckpointNotFoundError | None = None
        try:
            commit = _first(storage, candidates, choose)
            if commit is not None:
                return commit
        except CheckpointNotFoundError as error:
            failure = error
        # A newer save may have swept what we were about to read.
        before, candidates = candidates, commits_at(storage)
        if candidates != before:
            continue
        if failure is None:
            raise _nothing(storage, choose, bool(candidates))
        raise CorruptCheckpointError(
            "a file of the commit is missing",
            remedy="find out what deletes files there; use an older checkpoint",
            path=failure.path,
        ) from failure
    raise StorageError(
        f"newer saves replaced the commit {_TURNS} times while it was read",
        remedy="load at a time when fewer saves are made here",
        path=storage.url,
    )


def refuse_committed(storage: Storage) -> None:
    """Check that nothing is committed here, for a save that may replace nothing.

    Raises:
        UsageError: there is a commit, or a checkpoint of DCP's. Its text begins as that of DCP's
            own writer.
        CorruptCheckpointError, FormatVersionError: there is one that cannot be read.
    """
    try:
        choose_commit(storage)
    except CheckpointNotFoundError:
        if checksum_of_dcp(storage) is None:
            return
    raise UsageError(
        "Checkpoint already exists, and overwrite=False",
        remedy="save to another directory, or leave overwrite= out to commit a newer state there",
        path=storage.url,
    )


def _first(storage: Storage, candidates: list[ParsedName], choose: str | None) -> Commit | None:
    if choose is not None:
        named = commits_in([choose])
        if not named:
            raise UsageError(f"{choose!r} is not a commit", remedy="pass Catalogue.identity")
        candidates = [one for one in candidates if one.fencing_token == named[0].fencing_token]
    for one in candidates:
        if one.kind == "record":
            commit = _by_record(storage, one) if choose in (None, one.name) else None
        else:
            commit = _by_manifest(storage, one, choose)
        if commit is not None:
            return commit
    return None


def _by_record(storage: Storage, file: ParsedName) -> Commit:
    name = file.name
    record = read_file(Record, storage, name)
    strict = storage.reading_from(storage.url)
    known = Known()

    def one(group: GroupManifest) -> tuple[str, Manifest]:
        here = strict.at(join_url(storage.url, group.directory))
        return here.url, read_file(Manifest, here, group.manifest, group.crc64, known=known)

    manifests = tuple(in_threads(one, record.groups, FILES_AT_ONCE))
    _refuse_mixed(record, file_url(storage.url, name), manifests)
    return Commit(
        name, name, record.committed_at, file.order, manifests, True, record.groups, record.replaces
    )  # fmt: skip


def _by_manifest(storage: Storage, file: ParsedName, choose: str | None) -> Commit | None:
    name, order = file.name, file.order
    manifest = read_file(Manifest, storage, name)
    if manifest.record is None:
        if choose not in (None, name):
            return None
        own = ((storage.url, manifest),)
        return Commit(name, name, manifest.committed_at, order, own, replaces=manifest.replaces)
    # A group's manifest counts when the record that it points to exists and names it.
    path = join_url(storage.url, manifest.record)
    record_name = manifest.record.rsplit("/", 1)[-1]
    if choose not in (None, record_name):
        return None
    parent = storage.at(parent_url(path))
    try:
        record = read_file(Record, parent, record_name)
    except CheckpointNotFoundError:
        return None  # the step was never committed
    for group in record.groups:
        if group.manifest == name and join_url(parent.url, group.directory) == storage.url:
            # No link leads from the step's directory to the group's.
            here = parent.reading_from(parent.url).at(storage.url)
            checked = read_file(Manifest, here, name, group.crc64)
            manifests = ((storage.url, checked),)
            _refuse_mixed(record, file_url(parent.url, record_name), manifests)
            at, seen = record.committed_at, manifest.replaces
            return Commit(
                record_name, name, at, order, manifests, groups=(group,), replaces=seen
            )  # fmt: skip
    return None


# -- the error when nothing is committed -----------------------------------------------------------


def _nothing(storage: Storage, choose: str | None, candidates: bool) -> CheckpointNotFoundError:
    remedy = "pass the directory of a finished save; `smckpt ls` lists what is below a directory"
    if choose is not None:
        what = f"the commit {choose}, which another group loads, is not here"
        remedy = "all groups of a step load from directories of the same step"
    elif candidates:
        what = "there are manifests, but the record that would commit their step is missing"
        remedy = "the save was interrupted: use an older step. If you copied a group's directory "
        remedy += "elsewhere, copy the record too, to the same relative place"
    else:
        what, of_foreign = what_is_here(storage)
        remedy = of_foreign or remedy
    return CheckpointNotFoundError(
        f"no committed checkpoint: {what}", remedy=remedy, path=storage.url
    )


def what_is_here(storage: Storage) -> tuple[str, str]:
    """What a place without a commit has instead, and the remedy if it holds another format."""
    names = list(storage.names())
    if (foreign := foreign_format(names, storage.url)) is not None:
        return foreign
    directories = sorted(storage.list_dirs(), key=natural_order)
    below = [d for d in directories[:_BELOW] if _holds_commit(storage.join(d))]
    if below:
        return f"but checkpoints are below, in {', '.join(below[:4])}", ""
    above = storage
    for _ in range(_LEVELS):
        try:
            above = storage.at(parent_url(above.url))
        except UsageError:
            break  # a whole bucket
        if _holds_commit(above):
            return f"but a checkpoint is above, in {above.url}", ""
    if steps := [name for name in directories if _OF_OTHERS.fullmatch(name)]:
        return f"but steps of Megatron-LM or DeepSpeed are below, in {', '.join(steps[-4:])}", ""
    if ours := ours_among(names):
        return f"the directory holds only {len(ours)} files of unfinished saves", ""
    for name in names:
        if (known := not_read(name)) is not None:
            return f"{name} is {known[0]}", known[1]
    if names or directories:
        count = f"{len(names)} other files and {len(directories)} directories"
        return f"the directory holds {count}", ""
    return "the directory is empty or missing", ""


def _holds_commit(storage: Storage) -> bool:
    try:
        return _first(storage, commits_at(storage), None) is not None
    except CheckpointError:
        return False
