"""The few verbs behind which every store stands.

Names are plain file names; a sub-directory is a `Storage` of its own, made by `join`. Nothing here
knows what a checkpoint is. Every verb raises errors of `smckpt.errors` only: a store classifies
its own failures once, at its edge (`smckpt.storage.faults` for file systems).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["BLOCK", "FileInfo", "FileWriter", "Storage"]

BLOCK = 4096  # what direct writes ask of memory and offsets, in bytes


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file: its name, without directory, and its size in bytes."""

    name: str
    size: int


class FileWriter(Protocol):
    """One new file, written piecewise by any number of threads."""

    @property
    def piece(self) -> int:
        """Bytes of a write that suits the store best; 0 leaves it to the caller."""

    def write_at(self, offset: int, data: memoryview, crc64: int | None = None) -> None:
        """Write `data`, all of it, at byte `offset`; each byte of the file exactly once.

        Args:
            crc64: of `data`, CRC-64/NVME, where the caller has it; a store that sends it along
                need not compute it again.

        Fast when `offset` and the memory are multiples of 4,096; only the file's last piece may
        then have an odd length.

        Raises:
            StorageError: the store refused (full, quota, gone).
        """

    def finish(self) -> None:
        """Make the file durable, with its name; afterwards no crash takes it away.

        Raises:
            StorageError: the store refused, or some of the bytes were never written.
        """

    def abort(self) -> None:
        """Remove what was written. Harmless when repeated; after `finish` it removes the file."""


class Storage(Protocol):
    """One directory, which need not exist yet: verbs that write make it."""

    @property
    def url(self) -> str:
        """What errors show and `open_storage` accepts: an absolute path, or `scheme://…`."""

    @property
    def write_threads(self) -> int:
        """Writes that should be under way at once; 0 leaves it to the caller."""

    @property
    def request_bytes(self) -> int:
        """How much one read should ask for, in whole MiB."""

    @property
    def rereads(self) -> int:
        """How often a read whose bytes are wrong is worth repeating: a network may have changed
        them on the way, a disk gives the same again."""

    def create_file(self, name: str, size: int, *, replace: bool = False) -> FileWriter:
        """Begin a new file of `size` bytes.

        Args:
            replace: it gets its name when it is finished, in the place of what has the name then.
                Else the name must be free, and a file system shows it, unfinished, at once.

        Raises:
            StorageError: the name exists (an object store says so when the object is complete) and
                is not to be replaced, or the store refused.
        """

    def put(self, name: str, data: bytes) -> None:
        """Create a small file, durable when this returns. A crash may leave it half written, so
        `name` must be unique to the attempt.

        Raises:
            StorageError: the name exists, or the store refused.
        """

    def put_exclusive(self, name: str, data: bytes) -> bool:
        """Create `name`, whole and durable, unless it exists: of all that try, one succeeds, and
        no reader ever sees a part of it.

        Returns:
            True: created. False: the name exists.

        Raises:
            StorageError: the store refused, or cannot create exclusively. Whether the name exists
                now is open then; never a part of it.
        """

    def try_out(self, name: str) -> str:
        """Find out whether saves can work here, with a small file that is gone afterwards. A file
        system shows that by the first file that is made in it, so there it does nothing.

        Returns:
            What the user should know although it hinders nothing; "" for nothing.

        Raises:
            StorageError, UsageError: they cannot.
        """

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """`length` bytes from `offset`, or all up to the end.

        Raises:
            CheckpointNotFoundError: no such file.
            CorruptCheckpointError: the file ends before `offset + length`.
        """

    def read_into(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        seen: Callable[[memoryview], None] | None = None,
    ) -> None:
        """Fill `buffers`, one after the other, with consecutive bytes from `offset`.

        Args:
            seen: called with each stretch of them, in order, as soon as it is filled: its bytes
                are still in the processor's cache.

        Raises:
            CheckpointNotFoundError: no such file.
            CorruptCheckpointError: the file ends before the last buffer is full.
        """

    def fetch(self, name: str, target: memoryview) -> None:
        """Fill `target` with a whole file of as many bytes, at most `request_bytes`.

        Raises:
            CheckpointNotFoundError: no such file.
            CorruptCheckpointError: it has fewer, or (where the store notices) more.
        """

    def size(self, name: str) -> int:
        """In bytes.

        Raises:
            CheckpointNotFoundError: no such file.
        """

    def list_unfinished(self) -> list[str]:
        """The names of files begun here that nobody finished and that do not bear them yet, sorted:
        uploads, and on a file system what was begun to replace, or exclusively."""

    def discard_unfinished(self, names: Collection[str]) -> None:
        """Give up what was begun under these names and not finished; files that bear them stay."""

    def stored_crc64(self, name: str) -> int | None:
        """The CRC-64/NVME that the store itself computed over all of a file and keeps; None where
        it keeps none, and only reading the file tells.

        Raises:
            CheckpointNotFoundError: no such file.
        """

    def list_dirs(self) -> list[str]:
        """The names of the sub-directories directly here, sorted."""

    def list(self, prefix: str = "") -> list[FileInfo]:
        """The files directly here whose names start with `prefix`, by name; none if the directory
        does not exist."""

    def delete(self, name: str) -> None:
        """Remove a file; a missing one is fine."""

    def remove_directory(self) -> None:
        """Remove this directory if it is empty; an object store has none."""

    def join(self, name: str) -> Storage:
        """The sub-directory `name` ("a/b" goes two levels down), which may not exist yet."""

    def close(self) -> None:
        """Let go of descriptors and connections. The object may be used again afterwards."""
