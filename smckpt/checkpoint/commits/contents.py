"""The files of one committed checkpoint, group by group. A copy takes exactly these files, and a
removal deletes exactly these.

`what_is_missing` checks by size that all of them are there, with one listing per directory.
`noticing_replacement` tells a damaged checkpoint from one that a newer save swept while it was
read.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest

from smckpt.checkpoint.commits.choose import Commit, choose_commit
from smckpt.checkpoint.records.format import Manifest, order_of
from smckpt.checkpoint.records.prefixes import files_of
from smckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    UsageError,
    causes,
)
from smckpt.storage import Storage
from smckpt.storage.urls import join_url, parent_url, relative_url


@dataclass(frozen=True)
class GroupContents:
    """One group's share. directory: relative to the checkpoint's directory, "" if it is the same.
    manifest_crc64: the checksum of the manifest's file according to the record; None without a
    record. storage: of the directory and its ranks' files."""

    directory: str
    manifest_name: str
    manifest_crc64: str | None
    manifest: Manifest
    storage: Storage = field(repr=False)


@dataclass(frozen=True)
class Contents:
    """A commit and its groups, in the directory `storage`, below which it reads through no link."""

    storage: Storage
    commit: Commit
    groups: tuple[GroupContents, ...]

    @property
    def url(self) -> str:
        return self.storage.url

    @property
    def identity(self) -> str:
        """The name of the file that commits it."""
        return self.commit.identity

    @property
    def record(self) -> str | None:
        """The name of the file that commits several groups."""
        return self.identity if self.commit.through_record else None

    @property
    def files(self) -> int:
        """How many files, with commits and checksums."""
        each = (1 + sum(1 + 2 * len(p.files) for p in g.manifest.parts) for g in self.groups)
        return sum(each) + self.commit.through_record


def contents_of(storage: Storage, name: str | None = None) -> Contents:
    """List the files that the newest commit in a directory names.

    Args:
        name: of the file by which it was found before. The directory is listed if that is gone.

    Raises:
        CheckpointNotFoundError: nothing committed is here.
        CorruptCheckpointError, FormatVersionError: the newest commit cannot be read.
        UsageError: this is one group of a step, which is not a checkpoint without the other groups.
    """
    commit = choose_commit(storage, name=name)
    if not commit.whole:
        raise one_group(storage.url, commit.above)
    return opened(storage, commit)


def one_group(url: str, above: str) -> UsageError:
    """The error where a checkpoint is wanted, and not all groups of the step are there."""
    return UsageError(
        "this is one group of a step, which is not a checkpoint without the other groups",
        remedy=f"pass the directory of the step, {above}",
        path=url,
    )


def opened(storage: Storage, commit: Commit) -> Contents:
    """The contents of a commit, read through no link below its directory, nor where its groups'
    files are."""
    tops = []
    for where, manifest in commit.manifests:
        record, spread = manifest.record, manifest.spread
        tops.append(where if record is None else parent_url(join_url(where, record)))
        tops += [] if spread is None else [spread.root(where)]
    strict = storage.reading_from(*tops)
    groups = (
        GroupContents(
            relative_url(where, strict.url),
            commit.identity if named is None else named.manifest,
            None if named is None else named.crc64,
            manifest,
            files_of(strict.at(where), manifest),
        )
        for (where, manifest), named in zip_longest(commit.manifests, commit.groups)
    )
    return Contents(strict, commit, tuple(groups))


def what_is_missing(storage: Storage, identity: str | None = None) -> str:
    """The first file of the newest commit that is missing or cut short, as a text; "" if all are
    whole.

    The record and the manifests are compared with their checksums. Of the other files only the
    sizes are checked; `verify_checkpoint` checks their bytes.

    Args:
        identity: of the commit that is expected.

    Raises:
        CheckpointError: the commit cannot be read, or is not the expected one.
    """
    contents = contents_of(storage)
    if identity not in (None, contents.identity):
        raise CheckpointNotFoundError(
            f"the newest commit is {contents.identity}, not {identity}",
            remedy="try again: another save has committed here",
            path=storage.url,
        )
    for group in contents.groups:
        manifest, files = group.manifest, group.storage
        stores = {files.holder(part.name) for part in manifest.parts}
        here = {info.name: info.size for store in stores for info in store.list()}
        for part in manifest.parts:
            expected: dict[str, int | None] = {part.name: None}
            for file in part.files:
                expected |= file.sizes
            for name, size in expected.items():
                path = files.path_of(name)
                of = f"group {group.directory}, " if group.directory else ""
                of = f" ({of}rank {part.rank} on {part.host})"
                if name not in here:
                    return f"{path} is missing{of}"
                if size is not None and here[name] != size:
                    return f"{path} has {here[name]} of {size} bytes{of}"
    return ""


@contextmanager
def noticing_replacement(storage: Storage, identity: str, doing: str = "load") -> Iterator[None]:
    """If a file of the commit `identity` is missing in the block, check whether a newer save has
    committed in its directory and swept it.

    Args:
        doing: what the error tells the user to repeat.

    Raises:
        CheckpointReplacedError: a newer save swept it; replaces the error of the block.
    """
    try:
        yield
    except CheckpointError as error:
        gone = any(
            isinstance(each, CheckpointNotFoundError)
            or (isinstance(each, OSError) and each.errno == errno.ESTALE)  # deleted by another host
            for each in causes(error)
        )
        replaced = replacement(storage, identity, doing) if gone else None
        if replaced is None:
            raise
        raise replaced from error


def replacement(storage: Storage, identity: str, doing: str) -> CheckpointReplacedError | None:
    """The error to raise if a newer save than `identity` has committed there; otherwise None."""
    try:
        with closing(storage):
            newer = choose_commit(storage).identity
    except CheckpointError:
        return None
    if order_of(newer) <= order_of(identity):
        return None
    return CheckpointReplacedError(
        f"a newer save replaced the checkpoint while it was read: {newer} was committed, and the "
        f"files of {identity} were deleted",
        remedy=f"{doing} again; if saves here are faster than that, give each step a "
        "checkpoint_id of its own, or save with SaveOptions(sweep=False)",
        path=storage.url,
    )
