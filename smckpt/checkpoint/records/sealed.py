"""JSON files: their bytes, those of the format's own and those that anybody may have written; and
the record in a file of the format, compared with what its name says.

A file of the format is one object {"crc64": "<16 hex digits>", "body": {…}}; the CRC is taken over
the body's bytes in the file, so a changed byte is found before anything is parsed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import stat
import threading
import zlib
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from smckpt.checkpoint.records.crc import crc64, hex64
from smckpt.checkpoint.records.format import KEYS, PACKED_VERSION, parse_name
from smckpt.decoding import decode
from smckpt.errors import CorruptCheckpointError, FormatVersionError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from smckpt.storage import Storage


Result = TypeVar("Result")
Body = TypeVar("Body", bound="DataclassInstance")

MAX_JSON_BYTES = 1 << 30  # a manifest of a million tensors takes 200 MB

_TABLES = ("layout", "optimizers")  # what grows with the tensors, and is packed if it is long
_PACKED = 1 << 16  # bytes from which on
# A table that packs better is not packed. A reader refuses it, since a small file could hold it up.
_RATIO = 50  # bytes for each packed one; real tables have 25 to 30,
_ITEMS = 3  # and values; real tables have 2

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
    without NaN or infinity. A long table is packed, since each group of a step has it."""
    packed = {key: short for key in _TABLES if (short := _packed(body.get(key))) is not None}
    if packed:
        version = max(list(PACKED_VERSION), body["format"])
        body = {**body, "format": version, "packed": list(packed), **packed}
    text = _lines(body, 0).encode()
    return _OPENING + hex64(crc64(text)).encode() + _MARKER + text + _CLOSING


def open_json(data: bytes, path: str, known: Known | None = None) -> dict[str, Any]:
    """The body of a sealed file.

    Args:
        known: what other files hold. What is the same in many files, such as the table of the
            groups of a step, is then parsed once, and is one object in all.

    Raises:
        CorruptCheckpointError: the bytes differ from what was written.
        FormatVersionError: a newer major version wrote it.
    """
    sections, packed = _sections(data, path)
    value = _value if known is None else known.value
    return {key: value(text, key in packed, path) for key, text in sections.items()}


class Known:
    """Values by their text in a file. Threads that read many files parse each value once."""

    def __init__(self) -> None:
        self._values: dict[tuple[bytes, bool], Any] = {}
        self._lock = threading.Lock()

    def value(self, text: bytes, packed: bool, path: str) -> Any:
        key = text, packed
        with self._lock:  # all threads come to the table of a step at once
            if key not in self._values:
                self._values[key] = _value(text, packed, path)
            return self._values[key]


def _value(text: bytes, packed: bool, path: str) -> Any:
    return _parsed(_unpacked(text, path) if packed else text, path)


def open_sections(data: bytes, path: str) -> dict[str, bytes]:
    """The body's values by key, each as its JSON text in the file. So a caller that reads the parts
    of many ranks need not parse values that are the same in all of them.

    Raises:
        CorruptCheckpointError, FormatVersionError: as `open_json`.
    """
    sections, packed = _sections(data, path)
    return {k: _unpacked(text, path) if k in packed else text for k, text in sections.items()}


def _sections(data: bytes, path: str) -> tuple[dict[str, bytes], list[str]]:
    """The body's values as they are in the file, and the keys of those that are packed."""
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
    if _checked_version(version, path)["format"][0] < PACKED_VERSION[0]:
        return named, []
    packed = _parsed(named.pop("packed", b"[]"), path)
    if not isinstance(packed, list) or not all(key in _TABLES and key in named for key in packed):
        raise _damaged(f"what is packed in it is {str(packed)[:200]}", path)
    return named, packed


def _packed(table: Any) -> str | None:
    """A long table as text: base64 of its JSON, as zlib compresses it."""
    if not table:
        return None
    text = json.dumps(table, separators=(",", ":"), allow_nan=False).encode()
    short = zlib.compress(text, 1) if len(text) >= _PACKED else b""
    return base64.b64encode(short).decode() if _is_bounded(text, short) else None


def _is_bounded(text: bytes, short: bytes) -> bool:
    items = sum(map(text.count, (b",", b"[", b"{")))
    return len(text) <= _RATIO * len(short) and items <= _ITEMS * len(short)


def _unpacked(text: bytes, path: str) -> bytes:
    """The JSON of a table, from the JSON of its packed text."""
    try:
        short = base64.b64decode(_parsed(text, path), validate=True)
        most = min(_RATIO * len(short), MAX_JSON_BYTES)
        unpacking = zlib.decompressobj()
        plain = unpacking.decompress(short, most + 1)
        if unpacking.eof and not unpacking.unused_data and _is_bounded(plain, short):
            return plain
        reason = f"it is cut short, or has more than {most} bytes or {_ITEMS * len(short)} values"
    except (TypeError, ValueError, zlib.error) as error:
        reason = str(error)
    raise _damaged(f"a table cannot be unpacked: {reason}", path)


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
    if version[0] > PACKED_VERSION[0]:
        raise FormatVersionError(
            f"the file has format {version[0]}.{version[1]}; this smckpt reads up to "
            f"{PACKED_VERSION[0]}.x",
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


# -- the record in a file ------------------------------------------------------------------------

FILES_AT_ONCE = 16  # that are read at once; a shared file system answers each in milliseconds
_IN_NAMES = ("fencing_token", "number", "session", "rank")

# What to do about a file that cannot be decoded.
OLDER = "use an older checkpoint"
OF_OTHERS = "smckpt did not write this: find out what writes here, and remove the file"


def read_file(
    kind: type[Body],
    storage: Storage,
    name: str,
    crc: str | None = None,
    *,
    most: int = MAX_JSON_BYTES,
    remedy: str = OLDER,
    known: Known | None = None,
) -> Body:
    """Read a file, and compare it with its own checksum, its name and, if given, the checksum in
    the file that names it.

    Args:
        kind: the dataclass of its body.
        most: bytes that the file may have.
        remedy: for the error about a body that cannot be decoded.
        known: as for `open_json`.

    Raises:
        CheckpointNotFoundError: it is not there.
        CorruptCheckpointError, FormatVersionError: it differs from what was written under this
            name.
    """
    body, _ = read_body(storage, name, crc, most=most, known=known)
    return decode_body(kind, body, storage.path_of(name), remedy)


def read_body(
    storage: Storage,
    name: str,
    crc: str | None = None,
    *,
    most: int = MAX_JSON_BYTES,
    known: Known | None = None,
) -> tuple[dict[str, Any], bytes]:
    """The body of a file, and its bytes. The arguments and errors are those of `read_file`."""
    path = storage.path_of(name)

    def read() -> tuple[dict[str, Any], bytes]:
        data = storage.read(name, most=most)
        if crc is not None and hex64(crc64(data)) != crc:
            raise CorruptCheckpointError(
                "the file differs from the one that the checkpoint names (checksum differs)",
                remedy="use an older checkpoint, and check the file system",
                path=path,
            )
        return open_json(data, path, known), data

    return sound(storage, read)


def decode_body(kind: type[Body], body: dict[str, Any], path: str, remedy: str = OLDER) -> Body:
    """The record in the body of a file. It must say what the file's name says: that finds a whole
    file that was put under another name.

    Raises:
        CorruptCheckpointError: it does not, or it cannot be decoded.
    """
    keys = {each.name: KEYS.get(each.name, each.name) for each in fields(kind)}
    try:
        made = decode(kind, {k: body[key] for k, key in keys.items() if key in body}, newer=True)
    except ValueError as error:
        raise CorruptCheckpointError(
            f"the file cannot be decoded: {error}", remedy=remedy, path=path
        ) from error
    parsed = parse_name(path.rpartition("/")[2])
    named = [key for key in _IN_NAMES if key in keys and getattr(parsed, key, -1) not in (-1, "")]
    refuse_unlike(made, parsed, named, path, "the name of the file")
    return made


def refuse_unlike(ours: Any, other: Any, keys: Iterable[str], path: str, where: str) -> None:
    """Refuse a record of another save than `other`, which stands in `where`."""
    for key in keys:
        if getattr(ours, key) != getattr(other, key):
            raise contradicts(path, key, getattr(ours, key), getattr(other, key), where)


def contradicts(path: str, key: str, ours: Any, other: Any, where: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{key} is {str(ours)[:200]!r} here, but {str(other)[:200]!r} in {where}: files of "
        "different saves were mixed",
        remedy="use an older checkpoint, and find out what changes files there",
        path=path,
    )


# -- JSON of anybody ------------------------------------------------------------------------------

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
