"""Names of the format's files, and the contents of its JSON files. `docs/format.md` describes the
same in prose; `sealed.py` has the bytes of a JSON file.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from smckpt.checkpoint.records.prefixes import PrefixSharding
from smckpt.checkpoint.records.sealed import FORMAT_VERSION
from smckpt.errors import CheckpointError, UsageError
from smckpt.layout.mesh import runs_of
from smckpt.topology import ParallelState

__all__ = [
    "ATTEMPTS",
    "SENSELESS",
    "FileRecord",
    "Manifest",
    "ParsedName",
    "Part",
    "PartRecord",
    "Record",
    "checked_metadata",
    "crc_name",
    "data_name",
    "fence_name",
    "is_path",
    "lease_name",
    "manifest_name",
    "new_attempt",
    "parse_name",
    "parse_temporary",
    "part_name",
    "probe_name",
    "record_name",
]

_SESSION = r"(?P<session>[0-9a-f]{12})"
_ATTEMPT = rf"{_SESSION}-(?P<number>\d{{8,}})"
_COMMIT = rf"(?P<fencing_token>\d{{6,}})-(?P<number>\d{{8,}})-{_SESSION}"
_PATTERNS = {
    "data": re.compile(rf"data-{_ATTEMPT}-r(?P<rank>\d{{5,}})-(?P<file>\d+)\.safetensors", re.A),
    "crc": re.compile(rf"data-{_ATTEMPT}-r(?P<rank>\d{{5,}})-(?P<file>\d+)\.crc", re.A),
    "part": re.compile(rf"part-{_ATTEMPT}-r(?P<rank>\d{{5,}})\.json", re.A),
    "manifest": re.compile(rf"manifest-{_COMMIT}\.json", re.A),
    "record": re.compile(rf"record-{_COMMIT}\.json", re.A),
    "lease": re.compile(r"epoch-(?P<fencing_token>\d{6,})\.json", re.A),
    "fence": re.compile(rf"fence-{_ATTEMPT}\.json", re.A),
    "probe": re.compile(rf"probe-{_SESSION}\.json", re.A),
}
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.tmp", re.A)
_HEX64 = re.compile(r"[0-9a-f]{16}", re.A)

ATTEMPTS = "attempts.json"  # of a manager: attempts that began here and committed nothing

# What decoding code raises if a body is malformed.
SENSELESS = (
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
MAX_FILE_BYTES = 1 << 46  # 64 TiB, more than any store takes as one object
_MOST_RANKS = 1 << 24  # of a job
_LATEST = (1 << 63) - 1  # nanoseconds since 1970: the year 2262

# Fields whose key in a file is another word, which the format keeps.
_KEYS = {"fencing_token": "epoch", "prefix_sharding": "spread"}


def new_attempt() -> str:
    """The first save of a session that begins now."""
    return f"{secrets.token_hex(6)}-{0:08d}"


def data_name(attempt: str, rank: int, file: int) -> str:
    return f"data-{attempt}-r{rank:05d}-{file}.safetensors"


def crc_name(attempt: str, rank: int, file: int) -> str:
    return f"data-{attempt}-r{rank:05d}-{file}.crc"


def part_name(attempt: str, rank: int) -> str:
    return f"part-{attempt}-r{rank:05d}.json"


def manifest_name(fencing_token: int, number: int, session: str) -> str:
    return f"manifest-{fencing_token:06d}-{number:08d}-{session}.json"


def record_name(fencing_token: int, number: int, session: str) -> str:
    return f"record-{fencing_token:06d}-{number:08d}-{session}.json"


def lease_name(fencing_token: int) -> str:
    return f"epoch-{fencing_token:06d}.json"


def fence_name(attempt: str) -> str:
    return f"fence-{attempt}.json"


def probe_name(session: str) -> str:
    return f"probe-{session}.json"


@dataclass(frozen=True)
class ParsedName:
    """The fields of one of our file names. Fields that its kind lacks are -1 or ""."""

    kind: str
    session: str = ""
    number: int = -1
    fencing_token: int = -1
    rank: int = -1
    file: int = -1


def parse_name(name: str) -> ParsedName | None:
    """Parse a file name; None if the file is not ours."""
    for kind, pattern in _PATTERNS.items():
        if match := pattern.fullmatch(name):
            found = match.groupdict()
            return ParsedName(
                kind,
                found.get("session") or "",
                *(int(found.get(key) or -1) for key in ("number", "fencing_token", "rank", "file")),
            )
    return None


def parse_temporary(name: str) -> ParsedName | None:
    """Parse the name of a temporary file that an interrupted exclusive creation left."""
    match = _TEMPORARY.fullmatch(name)
    return parse_name(match["name"]) if match else None


# -- what the files hold ---------------------------------------------------------------------


@dataclass(frozen=True)
class FileRecord:
    """One data file: its `size` in bytes, the `crc64` of all its bytes, and `crc_name`, the file of
    its block checksums."""

    name: str
    size: int
    crc64: str
    crc_name: str

    def __post_init__(self) -> None:
        data, sums = _name(self.name, "data"), _name(self.crc_name, "crc")
        if replace(data, kind="crc") != sums:
            raise ValueError(f"{self.crc_name} is not the checksum file of {self.name}")
        _count(self.size, "size", MAX_FILE_BYTES)
        _crc(self.crc64)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> FileRecord:
        return cls(data["name"], data["size"], data["crc64"], data["crc_name"])


@dataclass(frozen=True)
class Part:
    """The part file: what one rank wrote. `layout` is what `rows.encode_rows` returns, or names the
    rank of the attempt whose part has that table (`part.table_of`); `objects` is
    {key: {"path": […], "value": encoded}}, `classes` are the digests that replicas compare."""

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
        _objects(self, "classes", "layout", "objects", "metadata")
        _tables(self)
        if "digest" in self.layout and self.layout.get("rank") not in self.group_ranks:
            raise ValueError(f"the table is that of rank {self.layout.get('rank')!r}")
        for key, leaf in self.objects.items():
            if not isinstance(leaf, dict) or "value" not in leaf or not is_path(leaf.get("path")):
                raise ValueError(f"{key!r} beside the tensors lacks a value, or a path of names")
        _attempt(self)

    def to_json(self) -> dict[str, Any]:
        files = [asdict(file) for file in self.files]
        return {**_plain(self), "group_ranks": runs_of(self.group_ranks), "files": files}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Part:
        known = _known(cls, data)
        known["files"] = tuple(FileRecord.from_json(f) for f in data["files"])
        known["group_ranks"] = _ranks_in(data["group_ranks"])
        return cls(**known)


@dataclass(frozen=True)
class PartRecord:
    """One rank's share, as the manifest names it. `crc64` covers all bytes of the part file."""

    rank: int
    host: str
    name: str
    crc64: str
    files: tuple[FileRecord, ...]

    def __post_init__(self) -> None:
        _count(self.rank, "rank")
        _text(self.host, "host")
        part = _name(self.name, "part")
        _crc(self.crc64)
        for number, file in enumerate(self.files):
            if parse_name(file.name) != replace(part, kind="data", file=number):
                raise ValueError(f"{file.name} is not file {number} of {self.name}")

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PartRecord:
        files = tuple(FileRecord.from_json(f) for f in data["files"])
        return cls(data["rank"], data["host"], data["name"], data["crc64"], files)


@dataclass(frozen=True)
class Manifest:
    """All parts of a group. `record` is the relative path to the record that commits it, or None if
    the manifest itself is the commit. committed_at: nanoseconds since 1970. prefix_sharding: how
    the ranks' files are spread over prefixes outside the directory; None if all files are in it.
    replaces: checksum of the metadata of DCP's checkpoint that was in the directory, or None."""

    checkpoint_id: str
    kind: str | None
    step: int | None
    attempt: str
    session: str
    number: int
    fencing_token: int
    group_ranks: tuple[int, ...]
    committed_at: int
    record: str | None
    parts: tuple[PartRecord, ...]
    layout: dict[str, Any]
    prefix_sharding: PrefixSharding | None = None
    optimizers: dict[str, Any] = field(default_factory=dict)
    topology: dict[str, Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    replaces: str | None = None
    format: tuple[int, int] = FORMAT_VERSION

    def __post_init__(self) -> None:
        _identity(self.kind, self.step, self.number)
        _replaces(self.replaces)
        _text(self.checkpoint_id, "checkpoint_id")
        _count(self.fencing_token, "fencing token")
        _count(self.committed_at, "committed_at", _LATEST)
        _ranks(self.group_ranks)
        _objects(self, "layout", "metadata")
        _tables(self)
        _attempt(self)
        for part in self.parts:
            if part.name != part_name(self.attempt, part.rank):
                raise ValueError(f"{part.name} does not belong to attempt {self.attempt}")
        if self.record is not None:
            up, _, name = _text(self.record, "record").rpartition("/")
            _name(name, "record")
            if up and set(up.split("/")) != {".."}:
                raise ValueError(f"record is {self.record!r}, which does not lead upwards")
        if tuple(part.rank for part in self.parts) != self.group_ranks:
            raise ValueError(f"{len(self.parts)} parts are not one for each rank of the group")

    def to_json(self) -> dict[str, Any]:
        body = {**_plain(self), "parts": [asdict(part) for part in self.parts]}
        prefix_sharding = body.pop("spread")
        return body if prefix_sharding is None else {**body, "spread": prefix_sharding.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Manifest:
        known = _known(cls, data)
        known["parts"] = tuple(PartRecord.from_json(p) for p in data["parts"])
        known["prefix_sharding"] = PrefixSharding.from_json(data.get("spread"))
        return cls(**known)


@dataclass(frozen=True)
class Record:
    """The commit of several groups: {"directory" (relative), "manifest", "crc64", "coordinator"}
    for each. nbytes: bytes of all data files. committed_at: nanoseconds since 1970. replaces: as of
    a manifest, for the record's directory."""

    session: str
    number: int
    fencing_token: int
    kind: str | None
    step: int | None
    committed_at: int
    nbytes: int
    groups: tuple[dict[str, Any], ...]
    replaces: str | None = None
    format: tuple[int, int] = FORMAT_VERSION

    def __post_init__(self) -> None:
        _identity(self.kind, self.step, self.number)
        _replaces(self.replaces)
        _count(self.fencing_token, "fencing token")
        _count(self.committed_at, "committed_at", _LATEST)
        _count(self.nbytes, "nbytes")
        for group in self.groups:
            _text(group["directory"], "directory")
            _name(group["manifest"], "manifest")
            _crc(group["crc64"])
            _count(group["coordinator"], "coordinator")
            if group["directory"] == ".." or group["directory"].startswith(("../", "/")):
                raise ValueError(f"directory {group['directory']!r} is not below the record's")
        if not self.groups:
            raise ValueError("the record has no groups")
        if pair := nested(group["directory"] for group in self.groups):
            raise ValueError(f"two groups are in {pair[0]!r} and {pair[1]!r}, one inside the other")

    def to_json(self) -> dict[str, Any]:
        return _plain(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        known = _known(cls, data)
        known["groups"] = tuple(data["groups"])
        return cls(**known)


def _ranks_in(values: Iterable[Any]) -> tuple[Any, ...]:
    """The ranks of a group, as a part has them: runs of ranks, or in older parts ranks."""
    ranks: list[Any] = []
    for value in values:
        if type(value) is int:
            ranks.append(value)
            continue
        first, count, stride = value
        for number in value:
            _count(number, "a number of a run", _MOST_RANKS)
        ranks += range(first, first + count * stride, stride)
        if len(ranks) > _MOST_RANKS:
            raise ValueError(f"a group of more than {_MOST_RANKS} ranks")
    return tuple(ranks)


def checked_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Copy a user's metadata, if JSON can hold it exactly.

    Raises:
        UsageError: it would read back changed: a key that is not text, a tuple, NaN, an object.
    """
    remedy = "pass dicts with text keys, lists, text, finite numbers, booleans and None"
    try:
        copy: dict[str, Any] = json.loads(json.dumps(metadata, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"metadata= cannot be stored as JSON: {error}", remedy=remedy) from error
    if copy != metadata or repr(copy) != repr(metadata):
        raise UsageError("metadata= would read back from JSON with other values", remedy=remedy)
    return copy


def nested(directories: Iterable[str]) -> tuple[str, str] | None:
    """Two of the directories that are equal, or of which the second is inside the first; None if
    there are none."""
    ordered = sorted(at.rstrip("/") + "/" if at else "" for at in directories)
    return next((pair for pair in itertools.pairwise(ordered) if pair[1].startswith(pair[0])), None)


def _plain(body: Part | Manifest | Record) -> dict[str, Any]:
    """The JSON form, with the version first. `asdict` is not used, because it copies large tables
    value by value."""
    left_out = {"format"} if getattr(body, "replaces", "") is not None else {"format", "replaces"}
    values = {_KEYS.get(k, k): v for k, v in vars(body).items() if k not in left_out}
    out = {"format": list(body.format), **values}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in out.items()}


def _known(cls: type[Part | Manifest | Record], data: dict[str, Any]) -> dict[str, Any]:
    """The fields that this version knows. A newer minor version may have more."""
    keys = {f.name: _KEYS.get(f.name, f.name) for f in fields(cls)}
    known = {name: data[key] for name, key in keys.items() if key in data}
    known["format"] = tuple(data["format"])
    if "group_ranks" in data:
        known["group_ranks"] = tuple(data["group_ranks"])
    return known


def _replaces(checksum: Any) -> None:
    if checksum is not None:
        _crc(checksum)


def _identity(kind: Any, step: Any, number: Any) -> None:
    if kind not in (None, "LOCAL", "SHARDED", "FULL"):
        raise ValueError(f"kind is {kind!r}")
    if step is not None and type(step) is not int:
        raise ValueError(f"step is {step!r}")
    _count(number, "number")


def is_path(keys: Any) -> bool:
    """Whether this is a path in a state, of names and numbers."""
    return isinstance(keys, list) and bool(keys) and all(type(k) in (str, int) for k in keys)


def _tables(body: Part | Manifest) -> None:
    """What parts and manifests have alike: versions, the degrees, the optimizers' parameters."""
    _objects(body, "optimizers", "versions")
    for name, version in body.versions.items():
        _text(version, f"the version of {name}")
    for at, facts in body.optimizers.items():
        facts = facts if isinstance(facts, dict) else {}
        for ids in (facts.get("ids"), facts.get("names", [])):
            named = isinstance(ids, list) and all(isinstance(names, list) for names in ids)
            if not named or not all(isinstance(name, str) for names in ids or () for name in names):
                raise ValueError(f"the parameters of the optimizer {at!r} are not lists of names")
        if not isinstance(facts.get("form", ""), str):
            raise ValueError(f"the form of the optimizer {at!r} is {facts['form']!r}")
    if body.topology is not None:
        _objects(body, "topology")
        try:
            world = ParallelState.from_json(body.topology, rank=0).world_size
        except CheckpointError as error:
            raise ValueError(f"the topology {str(body.topology)[:200]}: {error.message}") from error
        if body.group_ranks[-1] >= world or world > _MOST_RANKS:
            raise ValueError(f"a world of {world} ranks, but rank {body.group_ranks[-1]} saved")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is {value!r}, not text")
    return value


def _count(value: Any, what: str, most: int | None = None) -> None:
    if type(value) is not int or value < 0 or (most is not None and value > most):
        upto = "" if most is None else f" to {most}"
        raise ValueError(f"{what} is {value!r}, not a number from 0{upto}")


def _crc(value: Any) -> None:
    if not (isinstance(value, str) and _HEX64.fullmatch(value)):
        raise ValueError(f"crc64 is {value!r}, not 16 hex digits")


def _ranks(ranks: tuple[Any, ...]) -> None:
    for rank in ranks:
        _count(rank, "a rank of the group")
    if list(ranks) != sorted(set(ranks)) or not ranks:
        raise ValueError("the ranks of the group are not ascending, or there are none")


def _name(value: Any, kind: str) -> ParsedName:
    """Accept only names of smckpt's files, so a file's content can never lead a reader to a foreign
    file."""
    parsed = parse_name(_text(value, "a name"))
    if parsed is None or parsed.kind != kind:
        raise ValueError(f"{value!r} is not the name of a {kind} file")
    return parsed


def _attempt(body: Part | Manifest) -> None:
    if body.attempt != f"{body.session}-{body.number:08d}":
        raise ValueError(f"attempt {body.attempt!r} does not belong to session {body.session!r}")


def _objects(body: Any, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(body, name), dict):
            raise ValueError(f"{name} is not a JSON object")
