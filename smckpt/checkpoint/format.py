"""Names and JSON files of format 1. `docs/format.md` is the same in prose.

A JSON file is one object {"crc64": "<16 hex digits>", "body": {…}}; the CRC is that of the body's
bytes as they stand in the file, so a changed byte is noticed before it is believed.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from smckpt.checkpoint.crc import crc64, hex64
from smckpt.checkpoint.spread import Spread
from smckpt.errors import CorruptCheckpointError, FormatVersionError, UsageError

__all__ = [
    "FORMAT_VERSION",
    "SPREAD_VERSION",
    "FileRecord",
    "Manifest",
    "ParsedName",
    "Part",
    "PartRecord",
    "Record",
    "checked_metadata",
    "crc_name",
    "data_name",
    "epoch_name",
    "fence_name",
    "manifest_name",
    "open_json",
    "open_sections",
    "parse_name",
    "parse_temporary",
    "part_name",
    "probe_name",
    "record_name",
    "seal_json",
]

FORMAT_VERSION = (1, 0)  # (major, minor): a reader refuses a newer major, reads any minor
SPREAD_VERSION = (2, 0)  # of manifests whose files lie elsewhere, where an older reader cannot look

_SESSION = r"(?P<session>[0-9a-f]{12})"
_ATTEMPT = rf"{_SESSION}-(?P<number>\d{{8,}})"
_COMMIT = rf"(?P<epoch>\d{{6,}})-(?P<number>\d{{8,}})-{_SESSION}"
_PATTERNS = {
    "data": re.compile(rf"data-{_ATTEMPT}-r(?P<rank>\d{{5,}})-(?P<file>\d+)\.safetensors", re.A),
    "crc": re.compile(rf"data-{_ATTEMPT}-r(?P<rank>\d{{5,}})-(?P<file>\d+)\.crc", re.A),
    "part": re.compile(rf"part-{_ATTEMPT}-r(?P<rank>\d{{5,}})\.json", re.A),
    "manifest": re.compile(rf"manifest-{_COMMIT}\.json", re.A),
    "record": re.compile(rf"record-{_COMMIT}\.json", re.A),
    "epoch": re.compile(r"epoch-(?P<epoch>\d{6,})\.json", re.A),
    "fence": re.compile(rf"fence-{_ATTEMPT}\.json", re.A),
    "probe": re.compile(rf"probe-{_SESSION}\.json", re.A),
}
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.tmp", re.A)
_KEY = re.compile(rb"[a-z0-9_]+")
_HEX64 = re.compile(r"[0-9a-f]{16}", re.A)

_OPENING, _MARKER, _CLOSING = b'{"crc64":"', b'","body":', b"}\n"
_BODY = len(_OPENING) + 16 + len(_MARKER)  # where the body begins, in bytes
_LINE = 100  # a longer value is broken, so that `cat` shows a row per line
_NESTING = 3  # body → layout → rows: a row is never broken


def data_name(attempt: str, rank: int, file: int) -> str:
    return f"data-{attempt}-r{rank:05d}-{file}.safetensors"


def crc_name(attempt: str, rank: int, file: int) -> str:
    return f"data-{attempt}-r{rank:05d}-{file}.crc"


def part_name(attempt: str, rank: int) -> str:
    return f"part-{attempt}-r{rank:05d}.json"


def manifest_name(epoch: int, number: int, session: str) -> str:
    return f"manifest-{epoch:06d}-{number:08d}-{session}.json"


def record_name(epoch: int, number: int, session: str) -> str:
    return f"record-{epoch:06d}-{number:08d}-{session}.json"


def epoch_name(epoch: int) -> str:
    return f"epoch-{epoch:06d}.json"


def fence_name(attempt: str) -> str:
    return f"fence-{attempt}.json"


def probe_name(token: str) -> str:
    return f"probe-{token}.json"


@dataclass(frozen=True)
class ParsedName:
    """What a file name of ours says; fields that its kind lacks are -1 or ""."""

    kind: str
    session: str = ""
    number: int = -1
    epoch: int = -1
    rank: int = -1
    file: int = -1


def parse_name(name: str) -> ParsedName | None:
    """What the name says, or None for a file that is not ours."""
    for kind, pattern in _PATTERNS.items():
        if match := pattern.fullmatch(name):
            found = match.groupdict()
            return ParsedName(
                kind,
                found.get("session") or "",
                *(int(found.get(key) or -1) for key in ("number", "epoch", "rank", "file")),
            )
    return None


def parse_temporary(name: str) -> ParsedName | None:
    """The same for what a store left of an exclusive creation that was cut short."""
    match = _TEMPORARY.fullmatch(name)
    return parse_name(match["name"]) if match else None


# -- the envelope ----------------------------------------------------------------------------


def seal_json(body: dict[str, Any]) -> bytes:
    """The bytes of a JSON file with its own checksum. `body` holds JSON values with text keys,
    no NaN or infinity."""
    text = _lines(body, 0).encode()
    return _OPENING + hex64(crc64(text)).encode() + _MARKER + text + _CLOSING


def open_json(data: bytes, path: str) -> dict[str, Any]:
    """The body of a sealed file.

    Raises:
        CorruptCheckpointError: the bytes are not what was written.
        FormatVersionError: a newer major version wrote it.
    """
    return _checked_version(_parsed(_sealed(data, path), path), path)


def open_sections(data: bytes, path: str) -> dict[str, bytes]:
    """The body's values by key, each as the JSON that stands in the file: who reads the parts of
    many ranks need not parse what is the same in all of them.

    Raises:
        CorruptCheckpointError, FormatVersionError: as `open_json`.
    """
    text = _sealed(data, path)
    # In a body of several lines every line with a key of the outermost object begins with a
    # quote; lines further in begin with a space, and no text holds a raw line break.
    lines = text[3:-1].split(b',\n"') if text.startswith(b'{\n"') else []
    pairs = [line.split(b'":', 1) for line in lines]
    if pairs and all(len(pair) == 2 and _KEY.fullmatch(pair[0]) for pair in pairs):
        named = {key.decode(): value for key, value in pairs}
    else:
        whole = _checked_version(_parsed(text, path), path)
        named = {key: json.dumps(value).encode() for key, value in whole.items()}
    version = {key: _parsed(named[key], path) for key in ("format",) if key in named}
    _checked_version(version, path)
    return named


def _sealed(data: bytes, path: str) -> bytes:
    """The text of the body, its checksum verified."""
    if not (data.startswith(_OPENING) and data.endswith(_CLOSING)) or (
        data[_BODY - len(_MARKER) : _BODY] != _MARKER
    ):
        raise _damaged("the file is cut short or is not one of ours", path)
    text = data[_BODY : -len(_CLOSING)]
    stored = data[len(_OPENING) : len(_OPENING) + 16].decode("ascii", "replace")
    if stored != hex64(crc64(text)):
        raise _damaged(
            f"bytes {_BODY} to {_BODY + len(text)} are not those that were written "
            "(checksum differs)",
            path,
        )
    return text


def _parsed(text: bytes, path: str) -> Any:
    """JSON whose checksum is right: one of ours, unless another writer made it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(f"the file holds no JSON: {error}", path) from error


def _checked_version(body: Any, path: str) -> dict[str, Any]:
    version = body.get("format") if isinstance(body, dict) else None
    if not (isinstance(version, list) and [type(n) for n in version] == [int, int]):
        raise _damaged(f"its format version is {version!r}, not [major, minor]", path)
    if version[0] > SPREAD_VERSION[0]:
        raise FormatVersionError(
            f"written in format {version[0]}.{version[1]}; this smckpt reads up to "
            f"{SPREAD_VERSION[0]}.x",
            remedy="install a newer smckpt",
            path=path,
        )
    return dict(body)


def checked_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """A copy of a user's metadata, if JSON holds it exactly.

    Raises:
        UsageError: it would come back otherwise: a key that is no text, a tuple, NaN, an object.
    """
    remedy = "pass dicts with text keys, lists, text, finite numbers, booleans and None"
    try:
        copy: dict[str, Any] = json.loads(json.dumps(metadata, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"metadata is not JSON: {error}", remedy=remedy) from error
    if copy != metadata or repr(copy) != repr(metadata):
        raise UsageError("metadata would not come back from JSON as it is", remedy=remedy)
    return copy


def _lines(value: Any, depth: int) -> str:
    """Compact JSON, but long lists and objects have an item per line, down to `_NESTING`.

    A line of the outermost object begins with its key; lines further in begin with spaces.
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


# -- what the files hold ---------------------------------------------------------------------


@dataclass(frozen=True)
class FileRecord:
    """One data file: `size` in bytes, `crc64` of all of them; block checksums in `crc_name`."""

    name: str
    size: int
    crc64: str
    crc_name: str

    def __post_init__(self) -> None:
        _name(self.name, "data")
        _name(self.crc_name, "crc")
        _count(self.size, "size")
        _crc(self.crc64)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> FileRecord:
        return cls(data["name"], data["size"], data["crc64"], data["crc_name"])


@dataclass(frozen=True)
class Part:
    """What one rank wrote, in its part file: `layout` as `rows.encode_rows` gives it; `objects`
    {key: {"path": […], "value": encoded}}; `classes` the digests that replicas compare."""

    checkpoint_id: str
    kind: str | None
    step: int | None
    attempt: str
    session: str
    number: int
    rank: int
    host: str
    group_ranks: tuple[int, ...]
    fingerprint: str
    classes: dict[str, str]
    layout: dict[str, Any]
    objects: dict[str, Any]
    files: tuple[FileRecord, ...]
    optimizers: dict[str, Any] = field(default_factory=dict)
    topology: dict[str, Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    format: tuple[int, int] = FORMAT_VERSION

    def __post_init__(self) -> None:
        _identity(self.kind, self.step, self.number)
        _text(self.checkpoint_id, "checkpoint_id")
        _text(self.host, "host")
        _count(self.rank, "rank")
        _ranks(self.group_ranks)
        _objects(self, "classes", "layout", "objects", "optimizers", "metadata", "versions")
        if self.attempt != f"{self.session}-{self.number:08d}":
            raise ValueError(f"attempt {self.attempt!r} of session {self.session!r}")

    def to_json(self) -> dict[str, Any]:
        return {**_plain(self), "files": [asdict(file) for file in self.files]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Part:
        known = _known(cls, data)
        known["files"] = tuple(FileRecord.from_json(f) for f in data["files"])
        return cls(**known)


@dataclass(frozen=True)
class PartRecord:
    """One rank's share, as the manifest names it; `crc64` of all bytes of the part file."""

    rank: int
    host: str
    name: str
    crc64: str
    files: tuple[FileRecord, ...]

    def __post_init__(self) -> None:
        _count(self.rank, "rank")
        _text(self.host, "host")
        _name(self.name, "part")
        _crc(self.crc64)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PartRecord:
        files = tuple(FileRecord.from_json(f) for f in data["files"])
        return cls(data["rank"], data["host"], data["name"], data["crc64"], files)


@dataclass(frozen=True)
class Manifest:
    """All parts of a group. `record` is the relative way to the record that commits it, or None
    when the manifest is the commit itself; committed_at: nanoseconds since 1970; spread: over
    prefixes outside the directory, None where all files lie in it."""

    checkpoint_id: str
    kind: str | None
    step: int | None
    attempt: str
    session: str
    number: int
    epoch: int
    group_ranks: tuple[int, ...]
    committed_at: int
    record: str | None
    parts: tuple[PartRecord, ...]
    layout: dict[str, Any]
    spread: Spread | None = None
    optimizers: dict[str, Any] = field(default_factory=dict)
    topology: dict[str, Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    format: tuple[int, int] = FORMAT_VERSION

    def __post_init__(self) -> None:
        _identity(self.kind, self.step, self.number)
        _text(self.checkpoint_id, "checkpoint_id")
        _count(self.epoch, "epoch")
        _count(self.committed_at, "committed_at")
        _ranks(self.group_ranks)
        _objects(self, "layout", "optimizers", "metadata", "versions")
        if self.topology is not None:
            _objects(self, "topology")
        if self.record is not None:
            _name(_text(self.record, "record").rsplit("/", 1)[-1], "record")
        if tuple(part.rank for part in self.parts) != self.group_ranks:
            raise ValueError(f"{len(self.parts)} parts, not one for each rank of the group")

    def to_json(self) -> dict[str, Any]:
        body = {**_plain(self), "parts": [asdict(part) for part in self.parts]}
        spread = body.pop("spread")
        return body if spread is None else {**body, "spread": spread.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Manifest:
        known = _known(cls, data)
        known["parts"] = tuple(PartRecord.from_json(p) for p in data["parts"])
        known["spread"] = Spread.from_json(data.get("spread"))
        return cls(**known)


@dataclass(frozen=True)
class Record:
    """The commit of several groups: {"directory" (relative), "manifest", "crc64", "coordinator"}
    for each. nbytes: of all data files; committed_at: nanoseconds since 1970."""

    session: str
    number: int
    epoch: int
    kind: str | None
    step: int | None
    committed_at: int
    nbytes: int
    groups: tuple[dict[str, Any], ...]
    format: tuple[int, int] = FORMAT_VERSION

    def __post_init__(self) -> None:
        _identity(self.kind, self.step, self.number)
        _count(self.epoch, "epoch")
        _count(self.committed_at, "committed_at")
        _count(self.nbytes, "nbytes")
        for group in self.groups:
            _text(group["directory"], "directory")
            _name(group["manifest"], "manifest")
            _crc(group["crc64"])
            _count(group["coordinator"], "coordinator")

    def to_json(self) -> dict[str, Any]:
        return _plain(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        known = _known(cls, data)
        known["groups"] = tuple(data["groups"])
        return cls(**known)


def _plain(body: Part | Manifest | Record) -> dict[str, Any]:
    """As JSON, the version first. Not `asdict`, which copies large tables value by value."""
    out = {"format": list(body.format), **{k: v for k, v in vars(body).items() if k != "format"}}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in out.items()}


def _known(cls: type[Part | Manifest | Record], data: dict[str, Any]) -> dict[str, Any]:
    """The fields that this version knows; a newer minor version may have more."""
    known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
    known["format"] = tuple(data["format"])
    if "group_ranks" in data:
        known["group_ranks"] = tuple(data["group_ranks"])
    return known


def _identity(kind: Any, step: Any, number: Any) -> None:
    if kind not in (None, "LOCAL", "SHARDED", "FULL"):
        raise ValueError(f"kind is {kind!r}")
    if step is not None and type(step) is not int:
        raise ValueError(f"step is {step!r}")
    _count(number, "number")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is {value!r}, not text")
    return value


def _count(value: Any, what: str) -> None:
    if type(value) is not int or value < 0:
        raise ValueError(f"{what} is {value!r}, not a number from 0")


def _crc(value: Any) -> None:
    if not (isinstance(value, str) and _HEX64.fullmatch(value)):
        raise ValueError(f"crc64 is {value!r}, not 16 hex digits")


def _ranks(ranks: tuple[Any, ...]) -> None:
    for rank in ranks:
        _count(rank, "a rank of the group")
    if list(ranks) != sorted(set(ranks)) or not ranks:
        raise ValueError("the ranks of the group are not ascending, or there are none")


def _name(value: Any, kind: str) -> None:
    """Only names of ours: what a file says can never lead a reader to another one."""
    parsed = parse_name(_text(value, "a name"))
    if parsed is None or parsed.kind != kind:
        raise ValueError(f"{value!r} is no name of a {kind} file")


def _objects(body: Any, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(body, name), dict):
            raise ValueError(f"{name} is no object")
