"""The bytes of JSON files: of the format's own, and of those that anybody may have written.

A file of the format is one object {"crc64": "<16 hex digits>", "body": {…}}; the CRC is taken over
the body's bytes in the file, so a changed byte is found before anything is parsed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from smckpt.checkpoint.records.crc import crc64, hex64
from smckpt.errors import CorruptCheckpointError, FormatVersionError

if TYPE_CHECKING:
    from smckpt.storage import Storage

__all__ = [
    "FORMAT_VERSION",
    "MAX_JSON_BYTES",
    "PART_VERSION",
    "PREFIX_SHARDING_VERSION",
    "at_once",
    "open_json",
    "open_sections",
    "read_json",
    "seal_json",
    "sound",
    "strict_json",
]

Result = TypeVar("Result")

FORMAT_VERSION = (1, 1)  # (major, minor); a reader refuses a newer major version
# of manifests with prefix sharding, which older readers cannot read
PREFIX_SHARDING_VERSION = (2, 1)
# of parts, whose table the part of another rank may have; a reader of 2.x would miss it
PART_VERSION = (3, 0)
MAX_JSON_BYTES = 1 << 30  # a manifest of a million tensors takes 200 MB

_KEY = re.compile(rb"[a-z0-9_]+")
_OPENING, _MARKER, _CLOSING = b'{"crc64":"', b'","body":', b"}\n"
_BODY = len(_OPENING) + 16 + len(_MARKER)  # where the body begins, in bytes
_LINE = 100  # a longer value is split into lines, so that `cat` shows a row per line
_NESTING = 3  # body → layout → rows: a row is never split


def sound(storage: Storage, read: Callable[[], Result]) -> Result:
    """The result of `read`, which reads a small file of this store and checks its bytes. Where they
    are damaged, they are read again, because a network may have changed them."""
    for _ in range(storage.rereads):
        with contextlib.suppress(CorruptCheckpointError):
            return read()
    return read()


def seal_json(body: dict[str, Any]) -> bytes:
    """The bytes of a JSON file with its own checksum. `body` holds JSON values with text keys,
    without NaN or infinity."""
    text = _lines(body, 0).encode()
    return _OPENING + hex64(crc64(text)).encode() + _MARKER + text + _CLOSING


def open_json(data: bytes, path: str, known: dict[bytes, Any] | None = None) -> dict[str, Any]:
    """The body of a sealed file.

    Args:
        known: the values of other files by their JSON text. What is the same in many files, such as
            the table of the groups of a step, is then parsed once, and is one object in all.

    Raises:
        CorruptCheckpointError: the bytes differ from what was written.
        FormatVersionError: a newer major version wrote it.
    """
    if known is None:
        return _checked_version(_parsed(_sealed(data, path), path), path)
    sections = open_sections(data, path)
    for text in sections.values():
        if text not in known:
            known.setdefault(text, _parsed(text, path))  # another thread may be as far
    return {key: known[text] for key, text in sections.items()}


def open_sections(data: bytes, path: str) -> dict[str, bytes]:
    """The body's values by key, each as its JSON text in the file. So a caller that reads the parts
    of many ranks need not parse values that are the same in all of them.

    Raises:
        CorruptCheckpointError, FormatVersionError: as `open_json`.
    """
    text = _sealed(data, path)
    # In a body of several lines, each line with a key of the outermost object begins with a quote.
    # Deeper lines begin with a space, and no text contains a raw line break.
    lines = text[3:-1].split(b',\n"') if text.startswith(b'{\n"') else []
    pairs = [line.split(b'":', 1) for line in lines]
    if pairs and all(len(pair) == 2 and _KEY.fullmatch(pair[0]) for pair in pairs):
        named = {key.decode(): value for key, value in pairs}
        if len(named) != len(pairs):
            raise _damaged("the file contains a key twice", path)
    else:
        whole = _checked_version(_parsed(text, path), path)
        named = {key: json.dumps(value).encode() for key, value in whole.items()}
    version = {key: _parsed(named[key], path) for key in ("format",) if key in named}
    _checked_version(version, path)
    return named


def _sealed(data: bytes, path: str) -> bytes:
    """The text of the body after its checksum was verified."""
    if not (data.startswith(_OPENING) and data.endswith(_CLOSING)) or (
        data[_BODY - len(_MARKER) : _BODY] != _MARKER
    ):
        raise _damaged("the file is cut short, or smckpt did not write it", path)
    text = data[_BODY : -len(_CLOSING)]
    stored = data[len(_OPENING) : len(_OPENING) + 16].decode("ascii", "replace")
    if stored != hex64(crc64(text)):
        raise _damaged(
            f"bytes {_BODY} to {_BODY + len(text)} differ from what was written (checksum differs)",
            path,
        )
    return text


def _parsed(text: bytes, path: str) -> Any:
    """Parse JSON whose checksum is right. It is ours, unless another writer made it."""
    try:
        return strict_json(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(f"the file is not valid JSON: {error}", path) from error


def _checked_version(body: Any, path: str) -> dict[str, Any]:
    version = body.get("format") if isinstance(body, dict) else None
    if not (isinstance(version, list) and [type(n) for n in version] == [int, int]):
        raise _damaged(f"its format version is {version!r}, not [major, minor]", path)
    if version[0] > PART_VERSION[0]:
        raise FormatVersionError(
            f"the file has format {version[0]}.{version[1]}; this smckpt reads up to "
            f"{PART_VERSION[0]}.x",
            remedy="install a newer smckpt",
            path=path,
        )
    return dict(body)


def _lines(value: Any, depth: int) -> str:
    """Compact JSON. Long lists and objects have one item per line, down to `_NESTING` levels.

    A line of the outermost object begins with its key. Deeper lines begin with spaces.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    if depth == _NESTING or len(text) <= _LINE or not isinstance(value, (dict, list)):
        return text
    indent = "\n" + " " * depth
    if isinstance(value, list):
        return f"[{indent}{f',{indent}'.join(_lines(item, depth + 1) for item in value)}]"
    items = (f"{json.dumps(key)}:{_lines(item, depth + 1)}" for key, item in value.items())
    return f"{{{indent}{f',{indent}'.join(items)}}}"


def _damaged(what: str, path: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        what, remedy="use an older checkpoint, and check the file system", path=path
    )


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
