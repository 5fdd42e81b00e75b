"""The format of published weights: a directory for each publish, with a manifest written last.

The first publish, and each full one, holds a model's files as they are. Any other one holds what
changed since the one before it, its base: whole files, and in one safetensors file the changed
tensors, or their changed blocks of 1 MiB one after the other. A chain is a full publish and those
after it. Whoever applies it gets the bytes of the published directory again, and knows by its
checksums that they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from msgspec import Meta

from smckpt.checkpoint.records.crc import BLOCK, crc64, hex64
from smckpt.checkpoint.records.format import FORMAT_VERSION
from smckpt.checkpoint.records.headers import Header, read_header
from smckpt.checkpoint.records.sealed import decode_body, read_body, read_file, seal_json
from smckpt.decoding import Checksum, Count
from smckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from smckpt.storage import Storage
from smckpt.storage.urls import file_url

MANIFEST = "publish.json"
FILES = ".publish-files.json"  # while a publish is written or removed: the names of its files
RECORD = ".smckpt_publish.json"  # in an applied directory: of which publish it is
NEW_RECORD = f"{RECORD}.new"  # until it is whole
_MAX_MANIFEST = 1 << 28  # bytes
_NUMBER = re.compile(r"\d{8,12}", re.ASCII)
MAX_NUMBER = 10**12 - 1
PUBLISH_IN_FULL = "publish in full: smckpt publish MODEL ROOT --delta none"


@dataclass(frozen=True)
class PublishedTensor:
    """Bytes [begin, end) of a file, and the CRC-64 of its blocks by number. In a delta only the
    changed blocks are listed."""

    begin: int
    end: int
    blocks: Mapping[int, int]


@dataclass(frozen=True)
class PublishedFile:
    """A file of the model.

    header: the CRC-64 of the bytes before its tensors, which a delta does not change.
    whole: the publish has all of it. Otherwise it has changed blocks of its tensors.
    tensors: by name. A file that is not safetensors is one tensor with the name "".
    """

    size: int
    crc64: int
    header: int
    whole: bool
    tensors: Mapping[str, PublishedTensor]


@dataclass(frozen=True)
class Publish:
    """What one manifest says. base: the identity of the publish before it; None: it is full.
    delta: name and size of the file with what changed, if any did."""

    number: int
    identity: str
    base: str | None
    unit: str
    delta: tuple[str, int] | None
    files: Mapping[str, PublishedFile]
    removed: tuple[str, ...]
    facts: Mapping[str, Any]

    @property
    def folder(self) -> str:
        return folder_of(self.number)

    def sealed(self) -> bytes:
        files = {}
        for name, file in self.files.items():
            tensors = {
                key: [t.begin, t.end, list(t.blocks), "".join(map(hex64, t.blocks.values()))]
                for key, t in file.tensors.items()
            }
            files[name] = {
                "size": file.size, "crc64": hex64(file.crc64), "header": hex64(file.header),
                "whole": file.whole, "tensors": tensors,
            }  # fmt: skip
        return seal_json(
            {
                "format": list(FORMAT_VERSION), "number": self.number, "base": self.base,
                "unit": self.unit, "delta": self.delta and list(self.delta), "files": files,
                "removed": list(self.removed), "facts": dict(self.facts),
            }
        )  # fmt: skip


# A name that stays in its directory.
Name = Annotated[str, Meta(pattern=r"^(?!\.{1,2}\Z)[^/\\\0]+\Z")]


@dataclass(frozen=True)
class _WrittenFile:
    """A `PublishedFile` in a manifest. tensors: begin, end, the numbers of its blocks, and their
    checksums in hex, one after the other."""

    size: Count
    crc64: Checksum
    header: Checksum
    whole: bool
    tensors: dict[str, tuple[Count, Count, tuple[Count, ...], str]]

    @cached_property
    def made(self) -> PublishedFile:
        tensors = {}
        for name, (begin, end, numbers, crcs) in self.tensors.items():
            if not begin <= end <= self.size or len(crcs) != 16 * len(numbers):
                raise ValueError(f"{name!r} has bytes {begin} to {end} of {self.size}")
            values = [int(crcs[16 * at : 16 * at + 16], 16) for at in range(len(numbers))]
            blocks = dict(zip(numbers, values, strict=True))
            count = -(-(end - begin) // BLOCK)
            if any(block >= count for block in blocks) or len(blocks) != len(numbers):
                raise ValueError(f"{name!r} has {count} blocks, not {numbers}")
            tensors[name] = PublishedTensor(begin, end, blocks)
        crc, header = int(self.crc64, 16), int(self.header, 16)
        return PublishedFile(self.size, crc, header, self.whole, tensors)

    def __post_init__(self) -> None:
        _ = self.made  # raises if the tensors contradict the file


@dataclass(frozen=True)
class _Written:
    """A `Publish` in its manifest."""

    base: str | None
    unit: Literal["tensor", "block"]
    delta: tuple[Name, Count] | None
    files: dict[Name, _WrittenFile]
    removed: tuple[Name, ...]
    facts: dict[str, Any]


@dataclass(frozen=True)
class _FileList:
    files: tuple[Name, ...]


def spans(begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The blocks of bytes [begin, end): number, first byte, length."""
    for number, low in enumerate(range(begin, end, BLOCK)):
        yield number, low, min(BLOCK, end - low)


def header_of(storage: Storage, name: str, size: int) -> Header:
    """The header of a safetensors file."""
    path = file_url(storage.url, name)
    return read_header(lambda low, high: storage.read(name, low, high - low), size, path)


def numbers_in(root: Storage) -> list[int]:
    """The numbers of all directories of publishes, also of unfinished ones, and of what else has
    such a name."""
    return sorted(int(name) for name in root.list_dirs() if is_folder(name))


def is_folder(name: str) -> bool:
    """Whether a publish's directory has this name. Each number has one name."""
    return _NUMBER.fullmatch(name) is not None and name == folder_of(int(name))


def folder_of(number: int) -> str:
    return f"{number:08d}"


def chain_to(root: Storage, number: int | None = None) -> list[Publish]:
    """The publishes from a full one to `number`, or to the newest.

    Raises:
        CheckpointNotFoundError: there is none, or one of the chain is gone.
        CorruptCheckpointError: a manifest is damaged, or does not follow its base.
    """
    chain: list[Publish] = []
    other: Publish | None = None  # of a process that published at the same moment
    for each in reversed(numbers_in(root)):
        if number is not None and (each > number or (each < number and not chain)):
            continue
        found = read_publish(root, each)
        if found is None:
            continue  # unfinished
        if chain and chain[0].base != found.identity:
            other = found
            continue
        chain.insert(0, found)
        other = None
        if found.base is None:
            return chain
    if other is not None:
        raise CorruptCheckpointError(
            f"publish {chain[0].number} follows {chain[0].base}, but publish {other.number} is "
            f"{other.identity}",
            remedy=PUBLISH_IN_FULL,
            path=root.url,
        )
    what = "publish" if number is None else f"publish {number}"
    raise CheckpointNotFoundError(
        f"there is no {what} with the full one that it needs",
        remedy=f"check the path; wait for the first one; or {PUBLISH_IN_FULL}",
        path=root.url,
    )


def read_publish(root: Storage, number: int) -> Publish | None:
    """One publish; None: it is unfinished, or a copy of one with another number.

    Raises:
        CorruptCheckpointError: its manifest is damaged.
    """
    storage = root.join(folder_of(number))
    try:
        body, data = read_body(storage, MANIFEST, most=_MAX_MANIFEST)
    except CheckpointNotFoundError:
        return None
    finally:
        storage.close()
    if body.get("number") != number:
        return None
    path = file_url(storage.url, MANIFEST)
    written = decode_body(_Written, body, path, PUBLISH_IN_FULL)
    files = {name: file.made for name, file in written.files.items()}
    return Publish(
        number, hex64(crc64(data)), written.base, written.unit, written.delta, files,
        written.removed, written.facts,
    )  # fmt: skip


def put_files(storage: Storage, names: Iterable[str]) -> bool:
    """Record which files a publish has, before they are written or removed. Returns whether the
    record is this caller's: there may be one."""
    body = seal_json({"format": list(FORMAT_VERSION), "files": sorted(names)})
    return storage.put_exclusive(FILES, body)


def read_files(storage: Storage) -> set[str] | None:
    """The names that `put_files` recorded; None: there is no such record.

    Raises:
        CorruptCheckpointError: it is damaged.
    """
    remedy = "remove that directory, if no publish is under way"
    try:
        return set(read_file(_FileList, storage, FILES, most=_MAX_MANIFEST, remedy=remedy).files)
    except CheckpointNotFoundError:
        return None


def state_after(chain: Sequence[Publish]) -> dict[str, PublishedFile]:
    """The files after all publishes of a chain, each with all blocks of its tensors."""
    state: dict[str, PublishedFile] = {}
    for publish in chain:
        for name in publish.removed:
            state.pop(name, None)
        for name, file in publish.files.items():
            if file.whole:
                state[name] = file
                continue
            tensors = dict(state[name].tensors) if name in state else {}
            for key, new in file.tensors.items():
                was = tensors.get(key)
                if was is None or (was.begin, was.end) != (new.begin, new.end):
                    raise CorruptCheckpointError(
                        f"publish {publish.number} changes {key!r} of {name}, which its base does "
                        "not have",
                        remedy=PUBLISH_IN_FULL,
                    )
                tensors[key] = replace(was, blocks={**was.blocks, **new.blocks})
            state[name] = replace(file, tensors=tensors)
    return state
