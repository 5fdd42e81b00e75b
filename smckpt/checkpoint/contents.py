"""The files that one committed checkpoint is made of, group by group: what a copy takes along and a
removal removes, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from smckpt.checkpoint.choose import choose_commit, read_record
from smckpt.checkpoint.format import FileRecord, Manifest
from smckpt.errors import CorruptCheckpointError, UsageError
from smckpt.storage import open_storage
from smckpt.storage.urls import join_url, parent_url

__all__ = ["Contents", "Group", "contents_of"]


@dataclass(frozen=True)
class Group:
    """One group's share. directory: relative to the checkpoint's, "" where it is the same.
    manifest_crc64: what the record says of the manifest's file; None without a record."""

    directory: str
    manifest_name: str
    manifest_crc64: str | None
    manifest: Manifest

    @property
    def data(self) -> Iterator[FileRecord]:
        for part in self.manifest.parts:
            yield from part.files


@dataclass(frozen=True)
class Contents:
    """A committed checkpoint at `url`; record: the name of the file that commits several groups."""

    url: str
    record: str | None
    groups: tuple[Group, ...]

    @property
    def identity(self) -> str:
        """The name of the file that commits it."""
        return self.record or self.groups[0].manifest_name

    @property
    def step(self) -> int | None:
        return self.groups[0].manifest.step

    @property
    def nbytes(self) -> int:
        """Of all data files."""
        return sum(file.size for group in self.groups for file in group.data)

    @property
    def files(self) -> int:
        """How many files, commits and checksums included."""
        each = (1 + sum(1 + 2 * len(p.files) for p in g.manifest.parts) for g in self.groups)
        return sum(each) + (self.record is not None)


def contents_of(url: str) -> Contents:
    """What the newest commit at `url` names.

    Raises:
        CheckpointNotFoundError: nothing committed is here.
        CorruptCheckpointError, FormatVersionError: the newest commit cannot be read.
        UsageError: this is one group of a step, which is no checkpoint without the others.
    """
    storage = open_storage(url)
    commit = choose_commit(storage)
    if commit.through_record:
        record = read_record(storage, commit.identity)
        groups = []
        for told, (directory, manifest) in zip(record.groups, commit.manifests, strict=True):
            # A record is made in the common parent: one that names other places is not ours.
            if directory != storage.join(told["directory"]).url:
                raise CorruptCheckpointError(
                    f"the record names {directory}, which is not below it",
                    remedy="use an older checkpoint",
                    path=join_url(storage.url, commit.identity),
                )
            groups.append(Group(told["directory"], told["manifest"], told["crc64"], manifest))
        return Contents(storage.url, commit.identity, tuple(groups))
    ((directory, manifest),) = commit.manifests
    if manifest.record is not None:
        above = parent_url(join_url(directory, manifest.record))
        raise UsageError(
            "this is one group of a step, and no checkpoint without the others",
            remedy=f"name the directory of the step, {above}",
            path=storage.url,
        )
    return Contents(storage.url, None, (Group("", commit.identity, None, manifest),))
