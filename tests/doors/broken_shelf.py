"""A store of somebody else's that fails: a file beside the shelf says in which verb, and how."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smckpt.storage import Access, FileInfo, FileWriter, Storage
from tests.doors.shelf import ShelfStorage

__all__ = ["WRONG", "BrokenStorage", "OddError", "break_in", "makes_none"]


class OddError(Exception):
    """An error that only this store has."""


class PanicError(BaseException):
    """As libraries of Rust raise them, and loops of asyncio, below no Exception."""


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("is broken")


class Lazy(Sequence[Any]):
    """A listing that asks the store only where it is read."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, at: Any) -> Any:
        raise OddError("the list is broken")


class Mute:
    def __str__(self) -> str:
        raise OddError("the text is broken")


ERRORS = {each.__name__: each for each in (OddError, PanicError, MuteError)}
WRONG: dict[str, Any] = {
    "None": None, "text": "abc", "numbers": [1], "bytes": [b"a"], "negative": -1,
    "lazy": Lazy(), "mute": Mute(),
}  # fmt: skip


def break_in(base: str, verb: str, kind: str) -> None:
    """From now on this verb raises, or returns, that."""
    Path(f"{base}.broken").write_text(f"{verb} {kind}")


def makes_none(url: str, access: Access) -> Any:
    return None


class BrokenStorage(ShelfStorage):
    def __init__(self, url: str, access: Access) -> None:
        super().__init__(url, access)
        self._fail("making")

    def _fail(self, verb: str) -> Any:
        note = Path(f"{self._base}.broken")
        if note.exists():
            broken, kind = note.read_text().split()
            if broken == verb and kind in WRONG:
                self._wrong = WRONG[kind]
                return True
            if broken == verb:
                raise {**vars(builtins), **ERRORS}[kind](f"{verb} is broken")
        return False

    def create_file(self, name: str, size: int, *, replace: bool = False) -> FileWriter:
        self._fail("create_file")
        return _Writer(self, super().create_file(name, size, replace=replace))

    def put_exclusive(self, name: str, data: bytes) -> bool:
        return self._wrong if self._fail("put_exclusive") else super().put_exclusive(name, data)  # type: ignore[return-value]

    def read_into(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        seen: Callable[[memoryview], None] | None = None,
    ) -> None:
        self._fail("read_into")
        super().read_into(name, offset, buffers, seen)

    def size(self, name: str) -> int:
        return self._wrong if self._fail("size") else super().size(name)  # type: ignore[return-value]

    def list(self, prefix: str = "") -> list[FileInfo]:
        return self._wrong if self._fail("list") else super().list(prefix)  # type: ignore[return-value]

    def list_dirs(self) -> list[str]:  # type: ignore[override]
        return self._wrong if self._fail("list_dirs") else [*super().list_dirs()]  # type: ignore[return-value]

    def at(self, url: str) -> Storage:
        self._fail("at")
        return super().at(url)


class _Writer(FileWriter):
    def __init__(self, store: BrokenStorage, writer: FileWriter) -> None:
        self._store, self._writer = store, writer

    def write_at(self, offset: int, data: memoryview, crc64: int | None = None) -> None:
        self._store._fail("write_at")
        self._writer.write_at(offset, data, crc64)

    def finish(self) -> None:
        self._store._fail("finish")
        self._writer.finish()

    def abort(self) -> None:
        self._writer.abort()


class NumpyStorage(ShelfStorage):
    """It counts with NumPy's numbers."""

    def size(self, name: str) -> int:
        return np.int64(super().size(name))  # type: ignore[return-value]

    def list(self, prefix: str = "") -> list[FileInfo]:
        return [FileInfo(one.name, np.int64(one.size)) for one in super().list(prefix)]  # type: ignore[arg-type]
