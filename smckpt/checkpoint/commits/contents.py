"""The files of one committed checkpoint, group by group. A copy takes exactly these files, and a
removal deletes exactly these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from smckpt.checkpoint.commits.choose import choose_commit, read_record
from smckpt.checkpoint.records.format import FileRecord, Manifest
from smckpt.errors import UsageError
from smckpt.storage import Storage
from smckpt.storage.urls import join_url, parent_url

__all__ = ["Contents", "GroupContents", "contents_of"]


@dataclass(frozen=True)
class GroupContents:
    """One group's share. directory: relative to the checkpoint's directory, "" if it is the same.
    manifest_crc64: the checksum of the manifest's file according to the record; None without a
    record."""

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
    """A committed checkpoint in the directory `storage`, below which it reads through no link.
    record: the name of the file that commits several groups."""

    storage: Storage
    record: str | None
    groups: tuple[GroupContents, ...]

    @property
    def url(self) -> str:
        return self.storage.url

    @property
    def identity(self) -> str:
        """The name of the file that commits it."""
        return self.record or self.groups[0].manifest_name

    @property
    def step(self) -> int | None:
        return self.groups[0].manifest.step

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.size for group in self.groups for file in group.data)

    @property
    def files(self) -> int:
        """How many files, with commits and checksums."""
        each = (1 + sum(1 + 2 * len(p.files) for p in g.manifest.parts) for g in self.groups)
        return sum(each) + (self.record is not None)


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
    storage = storage.reading_from(storage.url)
    if commit.through_record:
        record = read_record(storage, commit.identity)
        groups = (
            GroupContents(told["directory"], told["manifest"], told["crc64"], manifest)
            for told, (_, manifest) in zip(record.groups, commit.manifests, strict=True)
        )
        return Contents(storage, commit.identity, tuple(groups))
    ((directory, manifest),) = commit.manifests
    if manifest.record is not None:
        above = parent_url(join_url(directory, manifest.record))
        raise UsageError(
            "this is one group of a step, which is not a checkpoint without the other groups",
            remedy=f"pass the directory of the step, {above}",
            path=storage.url,
        )
    return Contents(storage, None, (GroupContents("", commit.identity, None, manifest),))
