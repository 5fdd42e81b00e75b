"""Read a JSON file of a checkpoint: its bytes, then its record, then what its name says of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from smckpt.checkpoint.records.crc import crc64, hex64
from smckpt.checkpoint.records.format import KEYS, parse_name
from smckpt.checkpoint.records.sealed import MAX_JSON_BYTES, Known, open_json, sound
from smckpt.decoding import decode
from smckpt.errors import CorruptCheckpointError
from smckpt.storage import Storage

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Body = TypeVar("Body", bound="DataclassInstance")

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
