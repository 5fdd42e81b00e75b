"""Parse JSON from files that anybody may have written."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["at_once", "read_json", "strict_json"]

_MAX_BYTES = 1 << 30  # the largest tokenizers take some tens of MB


def strict_json(text: str | bytes) -> Any:
    """The value of a JSON text according to RFC 8259.

    Python's own parser also accepts NaN and Infinity, which other readers refuse. For a key that
    occurs twice it takes the last value, where others take the first. So two readers could see
    different content.

    Raises:
        ValueError: the text is not JSON, contains NaN or Infinity, or has a key twice in one
            object.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)


def read_json(path: Path, *, given: bool = False) -> Any:
    """The value of a JSON file that other programs wrote for other readers. It accepts NaN and a
    key that occurs twice, as those readers do.

    Args:
        given: whether the user named this file. Then it may be a pipe. A name that was found in a
            directory must be a regular file, because opening a pipe may never return.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a file, is not JSON, is nested too deeply, or is too long.
    """
    with open(path, "rb", opener=None if given else at_once) as file:
        found = os.fstat(file.fileno())
        regular = stat.S_ISREG(found.st_mode)
        if not given and not regular:
            raise ValueError("a pipe or device has the name of a file")
        # a read allocates the memory that it may need, so ask for no more than a regular file has
        whole = not regular or found.st_size <= _MAX_BYTES
        text = file.read(found.st_size + 1 if regular else _MAX_BYTES + 1) if whole else b""
    if not whole or len(text) > _MAX_BYTES:
        raise ValueError(f"the file has more than {_MAX_BYTES} bytes")
    try:
        return json.loads(text.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def at_once(path: str, flags: int) -> int:
    """Open a path that may be a pipe, without waiting for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        left = dict.fromkeys(table, 1)
        twice = next(key for key, _ in pairs if not left.pop(key, 0))
        raise ValueError(f"the key {twice[:80]!r} occurs twice")
    return table


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
