"""The bytes of the format's JSON files.

A file is one object {"crc64": "<16 hex digits>", "body": {…}}; the CRC is taken over the body's
bytes in the file, so a changed byte is found before anything is parsed.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from smckpt.checkpoint.records.crc import crc64, hex64
from smckpt.checkpoint.records.strict_json import strict_json
from smckpt.errors import CorruptCheckpointError, FormatVersionError
from smckpt.storage import Storage

__all__ = [
    "FORMAT_VERSION",
    "MAX_JSON_BYTES",
    "PART_VERSION",
    "PREFIX_SHARDING_VERSION",
    "open_json",
    "open_sections",
    "seal_json",
    "sound",
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


def open_json(data: bytes, path: str) -> dict[str, Any]:
    """The body of a sealed file.

    Raises:
        CorruptCheckpointError: the bytes differ from what was written.
        FormatVersionError: a newer major version wrote it.
    """
    return _checked_version(_parsed(_sealed(data, path), path), path)


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
