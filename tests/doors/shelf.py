"""A store of somebody else's: files as rows of an SQLite database, shelf:///path.sqlite/directory.

It uses public names alone, and knows nothing of checkpoints.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import BinaryIO

from smckpt import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from smckpt.storage import Access, FileInfo, SpooledWriter, Storage

TABLE = "CREATE TABLE IF NOT EXISTS files (at TEXT, name TEXT, data BLOB, PRIMARY KEY (at, name))"


class ShelfStorage(Storage):
    """One directory."""

    def __init__(self, url: str, access: Access) -> None:
        super().__init__(url, access)
        self._base = self.url.partition("://")[2].partition(".sqlite/")[0] + ".sqlite"

    def create_file(self, name: str, size: int, *, replace: bool = False) -> SpooledWriter:
        def send(file: BinaryIO) -> None:
            if replace:
                self.delete(name)
            if not self.put_exclusive(name, file.read()):
                raise StorageError("the name exists", remedy="choose another", path=self.url + name)

        return SpooledWriter(self.url + name, size, send, lambda: self.delete(name))

    def put_exclusive(self, name: str, data: bytes) -> bool:
        self.refuse_name(name)
        into = "INSERT OR IGNORE INTO files VALUES (?, ?, ?)"
        return self._run(into, self.url, name, data)[0] == 1

    def read_into(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        seen: Callable[[memoryview], None] | None = None,
    ) -> None:
        data = memoryview(self._row(name, "data"))[offset:]
        for buffer in buffers:
            if len(data) < buffer.nbytes:
                raise CorruptCheckpointError("it is cut", remedy="none", path=self.url + name)
            buffer.cast("B")[:] = data[: buffer.nbytes]
            data = data[buffer.nbytes :]
            if seen is not None:
                seen(buffer)

    def size(self, name: str) -> int:
        return int(self._row(name, "length(data)"))

    def list(self, prefix: str = "") -> list[FileInfo]:
        _, rows = self._run("SELECT name, length(data) FROM files WHERE at = ?", self.url)
        return [FileInfo(*row) for row in sorted(rows) if row[0].startswith(prefix)]

    def list_dirs(self) -> Sequence[str]:
        rows = self._run("SELECT DISTINCT at FROM files WHERE at > ?", self.url)[1]
        below = (at[len(self.url) :] for (at,) in rows if at.startswith(self.url))
        return sorted({way.split("/")[0] for way in below})

    def delete(self, name: str) -> None:
        self._run("DELETE FROM files WHERE at = ? AND name = ?", self.url, name)

    def _row(self, name: str, what: str):
        rows = self._run(f"SELECT {what} FROM files WHERE at = ? AND name = ?", self.url, name)[1]
        if not rows:
            raise CheckpointNotFoundError("no such file", remedy="none", path=self.url + name)
        return rows[0][0]

    def _run(self, sql: str, *values: object) -> tuple[int, Sequence[tuple]]:
        with closing(sqlite3.connect(self._base, timeout=60)) as base, base:
            base.execute(TABLE)
            done = base.execute(sql, values)
            return done.rowcount, done.fetchall()
