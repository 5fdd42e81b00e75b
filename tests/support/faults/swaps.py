"""A directory that somebody swaps for a symbolic link at a chosen call of the operating system."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

__all__ = ["NO_FILE", "below", "put_no_file", "swap", "swapped_at", "swapping"]

NO_FILE = ("link that leads nowhere", "link in a circle", "pipe", "folder")

_CALLS = (
    *("open", "mkdir", "rename", "replace", "link", "symlink", "unlink", "remove", "rmdir"),
    *("stat", "lstat", "listdir", "scandir", "readlink", "fsync", "pwrite"),
)
_AT_CWD, _EXCHANGE = -100, 2


def put_no_file(path: Path, what: str) -> None:
    """Make one of `NO_FILE` under a name that a file should have."""
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to("nowhere" if what == "link that leads nowhere" else path.name)


def below(directory: Path) -> dict[str, bytes | None]:
    """All that is below a directory: the bytes of files, None for the rest."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


def swap(directory: Path, victim: Path) -> None:
    """Put a link to `victim` where `directory` is, which gets another name."""
    directory.rename(directory.with_name(f"{directory.name}-aside"))
    directory.symlink_to(victim)


def swapped_at(moment: int, act: Callable[[], Any], change: Callable[[], None]) -> int:
    """Run `act`, and `change` something right before its `moment`-th call. Returns how many calls
    it made."""
    left, inside = [moment], [False]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **named: Any) -> Any:
            if not inside[0]:
                left[0] -= 1
                if left[0] == -1:
                    inside[0] = True  # the calls of `change` do not count
                    change()
                    inside[0] = False
            return call(*arguments, **named)

        return counting

    with pytest.MonkeyPatch.context() as patch:
        for name in _CALLS:
            patch.setattr(os, name, counted(getattr(os, name)))
        act()
    return moment - left[0]


def _exchange_for_ever(one: str, other: str) -> None:
    call = ctypes.CDLL(None).renameat2
    while True:
        call(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), _EXCHANGE)


@contextmanager
def swapping(one: Path, other: Path) -> Iterator[None]:
    """A process that exchanges two names as often as it can, until the end of the block."""
    process = multiprocessing.get_context("fork").Process(
        target=_exchange_for_ever, args=(str(one), str(other)), daemon=True
    )
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()
