"""Calls of `os` that fail for one path, in this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def failing(call: str, code: int, below: Path | str, times: int = -1) -> Iterator[list[str]]:
    """Calls that name a path, or read a file, at or below `below` fail; yields those paths."""
    real, met = getattr(os, call), list[str]()

    def faulty(path: Any, *rest: Any, **named: Any) -> Any:
        at = _name(path) if isinstance(path, int) else os.fspath(path)
        if named.get("dir_fd") is not None:
            at = os.path.join(_name(named["dir_fd"]), at)
        if (at == str(below) or at.startswith(f"{below}/")) and len(met) != times:
            met.append(at)
            raise OSError(code, os.strerror(code), at)
        return real(path, *rest, **named)

    setattr(os, call, faulty)
    try:
        yield met
    finally:
        setattr(os, call, real)


def _name(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")
