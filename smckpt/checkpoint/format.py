"""Names and JSON files of format 1. `docs/format.md` is the same in prose.

A JSON file is one object {"crc64": "<16 hex digits>", "body": {…}}; the CRC is that of the body's
bytes as they stand in the file, so a changed byte is noticed before it is believed.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from smckpt.checkpoint.crc import crc64, hex64
from smckpt.errors import CorruptCheckpointError, FormatVersionError

__all__ = [
    "FORMAT_VERSION",
    "FileRecord",
    "Manifest",
    "PartRecord",
    "Record",
    "crc_name",
    "data_name",
    "epoch_name",
    "manifest_name",
    "open_json",
    "parse_name",
    "part_name",
    "probe_name",
    "record_name",
    "seal_json",
]

FORMAT_VERSION = (1, 0)  # (major, minor): a reader refuses a newer major, reads any minor

_ATTEMPT = r"(?P<session>[0-9a-f]{12})-(?P<number>\d{8})"
_PATTERNS = {
    "data": re.compile(rf"data-{_ATTEMPT}-r(?P<rank>\d{{5,}})-(?P<file>\d+)\.safetensors"),
    "crc": re.compile(rf"data-{_ATTEMPT}-r(?P<rank>\d{{5,}})-(?P<file>\d+)\.crc"),
    "part": re.compile(rf"part-{_ATTEMPT}-r(?P<rank>\d{{5,}})\.json"),
    "manifest": re.compile(
        r"manifest-(?P<epoch>\d{6})-(?P<number>\d{8})-(?P<session>[0-9a-f]{12})\.json"
    ),
    "record": re.compile(
        r"record-(?P<epoch>\d{6})-(?P<number>\d{8})-(?P<session>[0-9a-f]{12})\.json"
    ),
    "epoch": re.compile(r"epoch-(?P<epoch>\d{6})\.json"),
    "probe": re.compile(r"probe-(?P<session>[0-9a-f]{12})\.json"),
}


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


def seal_json(body: dict[str, Any]) -> bytes:
    """The bytes of a JSON file with its own checksum."""
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=True).encode()
    return b'{"crc64":"' + hex64(crc64(text)).encode() + b'","body":' + text + b"}\n"


def open_json(data: bytes, path: str) -> dict[str, Any]:
    """The body of a sealed file.

    Raises:
        CorruptCheckpointError: the bytes are not what was written.
        FormatVersionError: a newer major version wrote it.
    """
    marker = b'","body":'
    if data[:10] != b'{"crc64":"' or data[26:35] != marker or data[-2:] != b"}\n":
        raise CorruptCheckpointError(
            "the file is cut short or is not one of ours",
            remedy="use an older checkpoint, and check the file system",
            path=path,
        )
    body = data[35:-2]
    if data[10:26].decode("ascii", "replace") != hex64(crc64(body)):
        raise CorruptCheckpointError(
            f"bytes 35 to {len(data) - 2} are not those that were written (checksum differs)",
            remedy="use an older checkpoint, and check the file system",
            path=path,
        )
    parsed: dict[str, Any] = json.loads(body)
    version = tuple(parsed.get("format", (0, 0)))
    if version[0] > FORMAT_VERSION[0]:
        raise FormatVersionError(
            f"written in format {version[0]}.{version[1]}; this smckpt reads up to "
            f"{FORMAT_VERSION[0]}.x",
            remedy="install a newer smckpt",
            path=path,
        )
    return parsed


@dataclass(frozen=True)
class FileRecord:
    """One data file: `crc64` of all its bytes; block checksums in `crc_name`."""

    name: str
    size: int
    crc64: str
    crc_name: str

    def __post_init__(self) -> None:
        if self.size < 0 or len(self.crc64) != 16:
            raise ValueError(f"bad file record for {self.name}")


@dataclass(frozen=True)
class PartRecord:
    """One rank's share, as the manifest names it."""

    rank: int
    host: str
    name: str
    crc64: str
    files: tuple[FileRecord, ...]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PartRecord:
        return cls(
            data["rank"],
            data["host"],
            data["name"],
            data["crc64"],
            tuple(FileRecord(**f) for f in data["files"]),
        )


@dataclass(frozen=True)
class Manifest:
    """All parts of a group. `record` is the relative way to the record that commits it, or None
    when the manifest is the commit itself."""

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
    optimizers: dict[str, Any] = field(default_factory=dict)
    topology: dict[str, Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    format: tuple[int, int] = FORMAT_VERSION

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Manifest:
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        known["parts"] = tuple(PartRecord.from_json(p) for p in data["parts"])
        known["group_ranks"] = tuple(data["group_ranks"])
        known["format"] = tuple(data["format"])
        return cls(**known)


@dataclass(frozen=True)
class Record:
    """The commit of several groups: {"directory" (relative), "manifest", "crc64", "coordinator"}
    for each."""

    session: str
    number: int
    epoch: int
    kind: str | None
    step: int | None
    committed_at: int
    nbytes: int
    groups: tuple[dict[str, Any], ...]
    format: tuple[int, int] = FORMAT_VERSION

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        known["groups"] = tuple(data["groups"])
        known["format"] = tuple(data["format"])
        return cls(**known)
