"""Directories that others wrote: on a disk, in a store, or packed in an archive of tar."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import NoReturn

from smckpt.errors import CorruptCheckpointError, UsageError
from smckpt.storage.urls import file_url, join_url
from smckpt.translate.archives.source_files import ArchiveRecord, SourceFiles

__all__ = ["Folder", "is_tar", "open_tar"]

_START = 512  # bytes: a block of tar
_AT_ONCE = 1 << 20  # bytes; a name, and what else a header says, is shorter
_MEMBERS = 200_000
_GLOBAL = 64  # headers for all members; tar goes through them again for each member
_GZIP = b"\x1f\x8b"


class Folder:
    """A directory, and how to read its files.

    Args:
        packed: the files of an archive, by their paths in it. None: it is a directory at `url`.
        within: the path in the archive; "" or with a slash at its end.
    """

    def __init__(
        self, source: SourceFiles, url: str, packed: Mapping[str, ArchiveRecord] | None = None,
        within: str = "",
    ) -> None:  # fmt: skip
        self.source = source
        self.url = url
        self._packed = packed
        self._within = within

    @cached_property
    def files(self) -> Mapping[str, ArchiveRecord]:
        """The regular files directly in it, by name, sorted."""
        if self._packed is not None:
            below = self._below
            found = {name: self._packed[self._within + name] for name in below if "/" not in name}
        else:
            found = {
                info.name: ArchiveRecord(file_url(self.url, info.name), 0, info.size)
                for info in self.source.access.open(self.url).list()
            }
        return MappingProxyType(found)

    @cached_property
    def folders(self) -> Sequence[str]:
        """The names of the directories in it, sorted."""
        if self._packed is not None:
            return sorted({name.partition("/")[0] for name in self._below if "/" in name})
        return self.source.access.open(self.url).list_dirs()

    @property
    def packed(self) -> bool:
        """Whether it is in an archive."""
        return self._packed is not None

    @property
    def name(self) -> str:
        return f"{self.url}/{self._within}".rstrip("/").rpartition("/")[2]

    def at(self, name: str) -> Folder:
        """A directory in it, which need not exist."""
        if self._packed is not None:
            return Folder(self.source, self.url, self._packed, f"{self._within}{name}/")
        return Folder(self.source, join_url(self.url, name))

    def find(self, path: str) -> ArchiveRecord | None:
        """A file in it or below it; None: there is none."""
        *above, name = path.split("/")
        folder = self
        for part in above:
            folder = folder.at(part)
        return folder.files.get(name)

    def read(self, name: str, most: int) -> bytes:
        """A small file in it.

        Raises:
            CorruptCheckpointError: it is larger.
        """
        record = self.files[name]
        if record.nbytes > most:
            raise CorruptCheckpointError(
                f"{name} has {record.nbytes} bytes, more than {most}",
                remedy="fetch the file again, or use another checkpoint", path=self.url,
            )  # fmt: skip
        return self.source.read(record)

    @cached_property
    def _below(self) -> list[str]:
        """The paths of all files below it."""
        assert self._packed is not None
        start = len(self._within)
        return sorted(path[start:] for path in self._packed if path.startswith(self._within))


# -- archives --------------------------------------------------------------------------------------


def is_tar(source: SourceFiles, record: ArchiveRecord) -> bool:
    """
    Raises:
        UsageError: it is an archive that was compressed, so nothing in it can be read alone.
    """
    start = source.read(record, 0, min(_START, record.nbytes))
    if start.startswith(_GZIP):
        name = record.path.rpartition("/")[2]
        raise UsageError(
            "this file is compressed by gzip, as older NeMo writes .nemo; to find a tensor in it, "
            "all that stands before has to be unpacked",
            remedy=f"unpack it once (gzip -dc {name} > {name}.tar), and pass {name}.tar",
            path=record.path,
        )
    return start[257:262] == b"ustar"


def open_tar(source: SourceFiles, record: ArchiveRecord) -> Folder:
    """The directory that an archive holds. Only its headers are read. Links, pipes and the like are
    left out.

    Raises:
        CorruptCheckpointError: it is damaged, or a path in it leads out of it.
    """
    found: dict[str, ArchiveRecord] = {}
    try:
        with tarfile.open(fileobj=_Headers(source, record), mode="r:") as archive:
            for number, member in enumerate(archive):
                if number >= _MEMBERS or len(archive.pax_headers) > _GLOBAL:
                    what = f"{_MEMBERS} members" if number >= _MEMBERS else f"{_GLOBAL} headers"
                    _bad(record, f"it has more than {what}")
                if not member.isreg() or member.issparse():
                    continue
                parts = [part for part in member.name.split("/") if part != "."]
                if not parts or {"", ".."} & {*parts} or "\0" in member.name:
                    _bad(record, f"its member {member.name!r} is outside of it")
                path = "/".join(parts)
                if path in found:
                    _bad(record, f"it has {path} twice")
                end = member.offset_data + member.size
                if member.size < 0 or end > record.nbytes:
                    _bad(record, f"{path} ends at byte {end} of {record.nbytes}")
                found[path] = record.part(member.offset_data, member.size)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        _bad(record, str(error))
    return Folder(source, record.path, found)


class _Headers(io.RawIOBase):
    """What `tarfile` reads from: a file whose headers alone are read."""

    def __init__(self, source: SourceFiles, record: ArchiveRecord) -> None:
        self._source, self._record = source, record
        self._at = 0
        self._block = (0, b"")  # from which byte on; a store answers slowly

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _AT_ONCE:
            raise ValueError(f"a header of {size} bytes")
        start, data = self._block
        stop = min(self._at + size, self._record.nbytes)
        if not start <= self._at <= stop <= start + len(data):
            start = min(self._at, self._record.nbytes)
            end = min(start + max(size, 64 << 10), self._record.nbytes)
            data = self._source.read(self._record, start, end)
            self._block = start, data
        found = data[self._at - start : max(stop - start, 0)] if stop > self._at else b""
        self._at += len(found)
        return found

    def seek(self, at: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET
        self._at = at
        return at

    def tell(self) -> int:
        return self._at


def _bad(record: ArchiveRecord, what: str) -> NoReturn:
    raise CorruptCheckpointError(
        f"this is no whole archive of tar: {what}",
        remedy="fetch the file again, from a source that you trust", path=record.path,
    )  # fmt: skip
