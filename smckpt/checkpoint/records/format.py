"""Names of the format's files, and the contents of its JSON files. `docs/format.md` describes the
same in prose; `sealed.py` has the bytes of a JSON file.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta

from smckpt.checkpoint.records.crc import BLOCK
from smckpt.decoding import Checksum, Count
from smckpt.errors import CheckpointError
from smckpt.storage.budget import Spread
from smckpt.topology import ParallelState

FORMAT_VERSION = (1, 2)  # (major, minor); a reader refuses a newer major version
# of manifests with prefix sharding, which older readers cannot read
PREFIX_SHARDING_VERSION = (2, 2)
# of parts, whose table the part of another rank may have; a reader of 2.x would miss it
PART_VERSION = (3, 1)
# of files in which a table is packed
PACKED_VERSION = (4, 0)

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

ATTEMPTS = "attempts.json"  # of a manager: attempts that began here and committed nothing

MAX_FILE_BYTES = 1 << 46  # 64 TiB, more than any store takes as one object
_MOST_RANKS = 1 << 24  # of a job

Size = Annotated[int, Meta(ge=0, le=MAX_FILE_BYTES)]
Rank = Annotated[int, Meta(ge=0, le=_MOST_RANKS)]
# first, count, stride; msgspec 0.22 crashes at tuple[Rank, Rank, Rank] beside a bounded number
Run = Annotated[tuple[Rank, ...], Meta(min_length=3, max_length=3)]
Step = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Kind = Literal["LOCAL", "SHARDED", "FULL"]

# Fields whose key in a file is another word, which the format keeps.
KEYS = {
    "fencing_token": "epoch",
    "taken_at": "claimed_at",
    "rank_runs": "group_ranks",
}


def new_attempt() -> str:
    """The first save of a session that begins now."""
    return attempt_of(secrets.token_hex(6), 0)


def attempt_of(session: str, number: int) -> str:
    """The name of a session's save, which all of its files have in theirs."""
    return f"{session}-{number:08d}"


def save_of(attempt: str) -> tuple[str, int]:
    """The session and the number of an attempt."""
    session, _, number = attempt.partition("-")
    return session, int(number)


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

    name: str = field(compare=False)
    kind: str
    session: str = ""
    number: int = -1
    fencing_token: int = -1
    rank: int = -1
    file: int = -1

    @property
    def attempt(self) -> str:
        return attempt_of(self.session, self.number)

    @property
    def order(self) -> tuple[int, int]:
        """Of the file of a commit: a later commit has more."""
        return self.fencing_token, self.number


def parse_name(name: str) -> ParsedName | None:
    """Parse a file name; None if the file is not ours."""
    for kind, pattern in _PATTERNS.items():
        if match := pattern.fullmatch(name):
            found = match.groupdict()
            return ParsedName(
                name,
                kind,
                found.get("session") or "",
                *(int(found.get(key) or -1) for key in ("number", "fencing_token", "rank", "file")),
            )
    return None


def ours_among(names: Iterable[str], *kinds: str) -> list[ParsedName]:
    """Our files among the names of a directory: those of these kinds, or all."""
    parsed = map(parse_name, names)
    return [one for one in parsed if one is not None and (not kinds or one.kind in kinds)]


def order_of(commit: str) -> tuple[int, int]:
    """`ParsedName.order` of the file of a commit. Checkpoints of others have none."""
    parsed = parse_name(commit)
    return (0, 0) if parsed is None else parsed.order


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
    size: Size
    crc64: Checksum
    crc_name: str

    def __post_init__(self) -> None:
        data, sums = name_of(self.name, "data"), name_of(self.crc_name, "crc")
        if replace(data, kind="crc") != sums:
            raise ValueError(f"{self.crc_name} is not the checksum file of {self.name}")

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of the file and of that of its checksums, by name."""
        return {self.name: self.size, self.crc_name: 8 * -(-self.size // BLOCK)}


class SavedObject(TypedDict):
    """A value beside the tensors: its path in the state, and the value as `encode_object` gives
    it."""

    path: Annotated[list[str | int], Meta(min_length=1)]
    value: Any


class _ParameterNames(TypedDict):
    ids: list[list[str]]


class SavedOptimizer(_ParameterNames, total=False):
    """The names of an optimizer's parameters. form: how the state refers to them."""

    form: str
    names: list[list[str]]


@dataclass(frozen=True)
class Part:
    """The part file: what one rank wrote. `layout` is what `rows.encode_rows` returns, or names the
    rank of the attempt whose part has that table (`part.table_of`); `classes` are the digests that
    replicas compare. rank_runs: the ranks of the group as runs, or in older parts as ranks.
    value_paths: as of a `PartRecord`."""

    checkpoint_id: str
    kind: Kind | None
    step: Step | None
    attempt: str
    session: str
    number: Count
    rank: Rank
    host: str
    rank_runs: tuple[Rank | Run, ...]
    fingerprint: str
    classes: dict[str, str]
    layout: dict[str, Any]
    objects: dict[str, SavedObject]
    files: tuple[FileRecord, ...]
    optimizers: dict[str, SavedOptimizer] = field(default_factory=dict)
    topology: dict[str, Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    value_paths: dict[str, str] | None = None
    format: tuple[int, int] = FORMAT_VERSION

    def __post_init__(self) -> None:
        _same_save(self)
        _files_of(self.attempt, self.rank, self.files)
        if self.rank not in self.group_ranks:
            raise ValueError(f"rank {self.rank} is not in its group {self.group_ranks[:8]}")
        if "digest" in self.layout and self.layout.get("rank") not in self.group_ranks:
            raise ValueError(f"the table is that of rank {self.layout.get('rank')!r}")

    @cached_property
    def group_ranks(self) -> tuple[int, ...]:
        runs = [(run, 1, 1) if isinstance(run, int) else run for run in self.rank_runs]
        if sum(count for _, count, _ in runs) > _MOST_RANKS:
            raise ValueError(f"a group of more than {_MOST_RANKS} ranks")
        return tuple(first + i * stride for first, count, stride in runs for i in range(count))


@dataclass(frozen=True)
class PartRecord:
    """One rank's share, as the manifest names it. `crc64` covers all bytes of the part file.
    value_paths: top key of the state → a digest of the paths below it at which the rank has values;
    under "" one of all, if there are many keys; None: an older writer recorded none."""

    rank: Rank
    host: str
    name: str
    crc64: Checksum
    files: tuple[FileRecord, ...]
    value_paths: dict[str, str] | None = None


@dataclass(frozen=True)
class Manifest:
    """All parts of a group. `record` is the relative path to the record that commits it, or None if
    the manifest itself is the commit. committed_at: nanoseconds since 1970. spread: the prefixes
    outside the directory under which the ranks' files are; None if all files are in it.
    replaces: checksum of the metadata of DCP's checkpoint that was in the directory, or None."""

    checkpoint_id: str
    kind: Kind | None
    step: Step | None
    attempt: str
    session: str
    number: Count
    fencing_token: Count
    group_ranks: tuple[Rank, ...]
    committed_at: Count
    record: str | None
    parts: tuple[PartRecord, ...]
    layout: dict[str, Any]
    spread: Spread | None = None
    optimizers: dict[str, SavedOptimizer] = field(default_factory=dict)
    topology: dict[str, Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    replaces: Checksum | None = None
    format: tuple[int, int] = FORMAT_VERSION

    def __post_init__(self) -> None:
        _same_save(self)
        for part in self.parts:
            if part.name != part_name(self.attempt, part.rank):
                raise ValueError(f"{part.name} does not belong to attempt {self.attempt}")
            _files_of(self.attempt, part.rank, part.files)
        if self.record is not None:
            up, _, name = self.record.rpartition("/")
            name_of(name, "record")
            if up and set(up.split("/")) != {".."}:
                raise ValueError(f"record is {self.record!r}, which does not lead upwards")
        if tuple(part.rank for part in self.parts) != self.group_ranks:
            raise ValueError(f"{len(self.parts)} parts are not one for each rank of the group")

    def to_json(self) -> dict[str, Any]:
        body = {**_plain(self), "parts": [asdict(part) for part in self.parts]}
        spread = body.pop("spread")
        return body if spread is None else {**body, "spread": asdict(spread)}


@dataclass(frozen=True)
class Owner:
    """Who holds something in a directory: the pin of a reader, or the fence of an attempt. by:
    "repair" if a repair commits the attempt; otherwise it was given up. until: when a pin ends, in
    nanoseconds since 1970; None: it does not."""

    by: str = ""
    until: Count | None = None


@dataclass(frozen=True)
class GroupManifest:
    """A record's entry for a group. directory: relative to the record's directory."""

    directory: str
    manifest: str
    crc64: Checksum
    coordinator: Rank

    def __post_init__(self) -> None:
        name_of(self.manifest, "manifest")
        if self.directory == ".." or self.directory.startswith(("../", "/")):
            raise ValueError(f"directory {self.directory!r} is not below the record's")


@dataclass(frozen=True)
class Record:
    """The commit of several groups. nbytes: bytes of all data files. committed_at: nanoseconds
    since 1970. replaces: as of a manifest, for the record's directory."""

    session: str
    number: Count
    fencing_token: Count
    kind: Kind | None
    step: Step | None
    committed_at: Count
    nbytes: Count
    groups: Annotated[tuple[GroupManifest, ...], Meta(min_length=1)]
    replaces: Checksum | None = None
    format: tuple[int, int] = FORMAT_VERSION

    def __post_init__(self) -> None:
        if pair := nested(group.directory for group in self.groups):
            raise ValueError(f"two groups are in {pair[0]!r} and {pair[1]!r}, one inside the other")

    def to_json(self) -> dict[str, Any]:
        return {**_plain(self), "groups": [asdict(group) for group in self.groups]}


def nested(directories: Iterable[str]) -> tuple[str, str] | None:
    """Two of the directories that are equal, or of which the second is inside the first; None if
    there are none."""
    ordered = sorted(at.rstrip("/") + "/" if at else "" for at in directories)
    return next((pair for pair in itertools.pairwise(ordered) if pair[1].startswith(pair[0])), None)


def _plain(body: Manifest | Record) -> dict[str, Any]:
    """The JSON form, with the version first. `asdict` is not used, because it copies large tables
    value by value."""
    left_out = {"format"} if body.replaces is not None else {"format", "replaces"}
    names = [each.name for each in fields(body) if each.name not in left_out]
    values = {KEYS.get(name, name): getattr(body, name) for name in names}
    out = {"format": list(body.format), **values}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in out.items()}


def name_of(name: str, *kinds: str) -> ParsedName:
    """Accept only names of smckpt's files, so a file's content can never lead a reader to a foreign
    file.

    Raises:
        ValueError: it is not the name of a file of these kinds.
    """
    parsed = parse_name(name)
    if parsed is None or parsed.kind not in kinds:
        raise ValueError(f"{name!r} is not the name of a {' or '.join(kinds)} file")
    return parsed


def _files_of(attempt: str, rank: int, files: Sequence[FileRecord]) -> None:
    for number, file in enumerate(files):
        if file.name != data_name(attempt, rank, number):
            what = f"file {number} of rank {rank} in attempt {attempt}"
            raise ValueError(f"{file.name} is not {what}")


def _same_save(body: Part | Manifest) -> None:
    """Check what parts and manifests have alike: the attempt, the ranks and the degrees."""
    if body.attempt != attempt_of(body.session, body.number):
        raise ValueError(f"attempt {body.attempt!r} does not belong to session {body.session!r}")
    ranks = body.group_ranks
    if list(ranks) != sorted(set(ranks)) or not ranks:
        raise ValueError("the ranks of the group are not ascending, or there are none")
    if body.topology is None:
        return
    try:
        world = ParallelState.from_json(body.topology, rank=0).world_size
    except CheckpointError as error:
        raise ValueError(f"the topology {str(body.topology)[:200]}: {error.message}") from error
    if ranks[-1] >= world or world > _MOST_RANKS:
        raise ValueError(f"a world of {world} ranks, but rank {ranks[-1]} saved")
