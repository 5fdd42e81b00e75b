"""For tests of copies and removals: all files at a place, and a process killed at a given write, or
at a given call of the operating system."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from smckpt.storage import Storage, open_storage
from smckpt.storage.disk.posix import PosixStorage, PosixWriter

__all__ = ["contents", "files_below", "killed_at"]

_CHANGES = [
    (PosixStorage, "put"),
    (PosixStorage, "put_exclusive"),
    (PosixStorage, "delete"),
    (PosixWriter, "write_at"),
    (PosixWriter, "finish"),
]
_CALLS = [
    (os, name)
    for name in ("open", "write", "pwrite", "fsync", "link", "rename", "replace", "unlink", "mkdir")
]


def files_below(storage: Storage, way: str = "") -> Iterator[tuple[str, Storage, str]]:
    """(way, storage, name) of each file at and below a place, leases left out."""
    for info in storage.list():
        if not info.name.startswith("epoch-"):
            yield f"{way}{info.name}", storage, info.name
    for name in storage.list_dirs():
        yield from files_below(storage.join(name), f"{way}{name}/")


def contents(place: str | Path | Storage) -> dict[str, bytes]:
    """All files at and below a place, by their way from it."""
    top = place if isinstance(place, Storage) else open_storage(place)
    return {way: store.read(name) for way, store, name in files_below(top)}


def killed_at(moment: int, act: Callable[[], Any], *, calls: bool = False) -> bool:
    """Run `act` in a child that is killed before its `moment`-th change of a file system; whether
    it was.

    Args:
        calls: count each call that opens or changes files, and not only the store's verbs.
    """
    pid = os.fork()
    if pid == 0:
        try:
            _count_down(moment, _CALLS if calls else _CHANGES)
            act()
            os._exit(0)
        except BaseException:
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def _count_down(moment: int, changes: Sequence[tuple[Any, str]]) -> None:
    left = [moment]

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*arguments, **named)

        return counting

    for owner, name in changes:
        setattr(owner, name, counted(getattr(owner, name)))
