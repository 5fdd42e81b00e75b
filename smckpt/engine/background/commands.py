"""The commands that a trainer sends to its worker, and the answers.

A command names a function of `smckpt.checkpoint.commits.commit`, or one of the worker itself. Its
fields are the function's arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

__all__ = [
    "ArenaFile",
    "Attach",
    "Command",
    "Detach",
    "Exit",
    "LeaseTaken",
    "PartWritten",
    "Probe",
    "Probed",
    "PublishManifest",
    "PublishRecord",
    "Published",
    "RecordPublished",
    "Sweep",
    "Swept",
    "TakeLease",
    "Watched",
    "WritePart",
    "commands",
]

A = TypeVar("A")


class Command(Generic[A]):
    """function: the name in the message. answer: the type of the worker's answer, an `A`."""

    function: ClassVar[str]
    answer: ClassVar[Any] = None


@dataclass(frozen=True)
class Attach(Command[None]):
    """Map an arena of `size` bytes under the number `id`. Its descriptor comes with the message."""

    function = "attach"
    id: int
    size: int


@dataclass(frozen=True)
class Detach(Command[None]):
    """Unmap an arena."""

    function = "detach"
    id: int


@dataclass(frozen=True)
class Exit(Command[None]):
    """End the worker. There is no answer."""

    function = "exit"


@dataclass(frozen=True)
class ArenaFile:
    """Where the bytes of a file are in the arena."""

    arena_offset: int
    size: int


@dataclass(frozen=True)
class Watched:
    """Bytes [start, stop) of file number `file`, whose checksum the trainer wants. dtype: that of
    the elements whose NaN and infinite ones are counted; "" counts none."""

    file: int
    start: int
    stop: int
    dtype: str = ""


@dataclass(frozen=True)
class PartWritten:
    """part: the record's name. crc64: of the record, in hex. bytes: of the data files. checksums,
    nonfinite: of each `Watched`. retries: how many requests to the store were sent again; None if
    the store does not count."""

    part: str
    crc64: str
    bytes: int
    write_seconds: float
    checksums: tuple[int, ...] = ()
    nonfinite: tuple[int, ...] = ()
    retries: int | None = None


@dataclass(frozen=True)
class WritePart(Command[PartWritten]):
    """arena: its number; None if there are no files. part: the record without "files". watched:
    by file and place, without overlaps."""

    function = "write_part"
    answer = PartWritten
    directory: str
    attempt: str
    rank: int
    arena: int | None
    files: tuple[ArenaFile, ...]
    part: dict[str, Any]
    watched: tuple[Watched, ...] = ()


@dataclass(frozen=True)
class Probed:
    """remark: for the user."""

    seen: bool
    remark: str | None = None


@dataclass(frozen=True)
class Probe(Command[Probed]):
    function = "probe"
    answer = Probed
    directory: str
    session: str
    create: bool
    leave: bool = True


@dataclass(frozen=True)
class LeaseTaken:
    """remark: for the user."""

    fencing_token: int
    remark: str | None = None


@dataclass(frozen=True)
class TakeLease(Command[LeaseTaken]):
    function = "take_lease"
    answer = LeaseTaken
    directory: str
    session: str
    host: str
    groups: tuple[str, ...]
    prefix_sharding: dict[str, Any] | None
    ranks: tuple[int, ...]
    since: int


@dataclass(frozen=True)
class Published:
    """bytes: of all data files. tensors: rows of the merged table."""

    manifest: str
    crc64: str
    bytes: int
    step: int | None
    kind: str | None
    tensors: int


@dataclass(frozen=True)
class PublishManifest(Command[Published]):
    function = "publish_manifest"
    answer = Published
    directory: str
    attempt: str
    session: str
    number: int
    fencing_token: int
    ranks: tuple[int, ...]
    parts: dict[str, dict[str, str]]
    record: str | None
    prefix_sharding: dict[str, Any] | None


@dataclass(frozen=True)
class RecordPublished:
    """bytes: of all data files of all groups."""

    record: str
    bytes: int


@dataclass(frozen=True)
class PublishRecord(Command[RecordPublished]):
    function = "publish_record"
    answer = RecordPublished
    directory: str
    session: str
    number: int
    fencing_token: int
    groups: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Swept:
    """deleted: how many files."""

    deleted: int


@dataclass(frozen=True)
class Sweep(Command[Swept]):
    function = "sweep"
    answer = Swept
    directory: str
    keep: tuple[str, ...]
    fencing_token: int
    record_directory: str | None = None
    keep_records: tuple[str, ...] = ()


def commands() -> dict[str, type[Command[Any]]]:
    """Every command that has an answer, by its function's name."""
    kinds: tuple[type[Command[Any]], ...] = (
        Attach, Detach, WritePart, Probe, TakeLease, PublishManifest, PublishRecord, Sweep,
    )  # fmt: skip
    return {kind.function: kind for kind in kinds}
