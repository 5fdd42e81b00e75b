"""From entries to a file image: what this rank writes, and where in the file each byte goes.

Replicas divide their common bytes by one rule, without a message. The entries that a set of ranks
share form, in a fixed order, one run of bytes. Replica i of n writes the i-th of n equal parts of
it, cut at element boundaries. Images are valid safetensors files whose data starts on a 4,096-byte
boundary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from smckpt.errors import StateError, UsageError
from smckpt.layout.entries import DTYPES, Entry

ALIGNMENT = 4096  # of the data in a file and of each file in the arena; O_DIRECT requires it
HEADER_LIMIT = 100_000_000  # safetensors refuses a longer header
METADATA = "__metadata__"  # of a header: what is no tensor
SLICES_KEY = "smckpt.slices"  # in a shard's metadata: {key: [start, stop]} of the split entries
DEFAULT_MAX_FILE_BYTES = 64 << 30


@dataclass(frozen=True, slots=True)
class Slot:
    """Elements [start, stop) of entry number `entry`, at byte `offset` of file number `file`."""

    entry: int
    start: int
    stop: int
    file: int
    offset: int


@dataclass(frozen=True)
class FileImage:
    """One file: `header` bytes at its start, `size` in all, at `arena_offset` of the arena."""

    header: bytes
    size: int
    arena_offset: int


@dataclass(frozen=True)
class Layout:
    """Where every byte of this rank's part of a save goes.

    fingerprint: digest of names, dtypes, shapes, geometry and group. A save whose state has
    another fingerprint compiles a new layout.
    classes: digest of the entries that each set of writers shares ("0,2" → digest). The coordinator
    compares them: where two writers of a class differ, their parts would leave a hole.
    """

    rank: int
    group_ranks: tuple[int, ...]
    entries: tuple[Entry, ...]
    slots: tuple[Slot, ...]
    files: tuple[FileImage, ...]
    arena_size: int
    fingerprint: str
    classes: dict[str, str]


def digest(data: object) -> str:
    """A short stable name for JSON-able data."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def writers_of(entry: Entry, rank: int, group_ranks: Collection[int]) -> tuple[int, ...]:
    """The ranks of the group that hold the same array and so share the writing, ascending.

    Pass `group_ranks` as a set if there are many.
    """
    return tuple(sorted(r for r in entry.geometry.replicas(rank) if r in group_ranks)) or (rank,)


def compile_layout(
    entries: Sequence[Entry],
    *,
    rank: int,
    group_ranks: Sequence[int],
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
) -> Layout:
    """Decide what `rank` writes and where.

    Args:
        entries: what this rank holds, in any order.
        rank: this global rank.
        group_ranks: the ranks that commit together.
        max_file_bytes: a larger image is split in several files.

    Raises:
        StateError: two entries have one key, or one has a key that a file cannot hold.
        UsageError: `rank` is not in `group_ranks`.
    """
    if rank not in group_ranks:
        raise UsageError(
            f"rank {rank} is not a member of the group {tuple(group_ranks)}",
            remedy="pass the process group that this rank belongs to",
            rank=rank,
        )
    ordered = tuple(sorted(entries, key=lambda e: (-e.itemsize, e.key)))
    seen: set[str] = set()
    for entry in ordered:
        if entry.key in seen:
            raise StateError(
                f"two tensors of the state dict have the dotted key {entry.key!r}",
                remedy="rename one: 'a.b' beside {'a': {'b': …}} cannot be told apart",
                rank=rank,
            )
        seen.add(entry.key)
    if METADATA in seen:
        raise StateError(
            f"a tensor of the state dict has the key {METADATA!r}, under which a safetensors file "
            "has its own metadata, so that no load could give it back",
            remedy="give it another key",
            rank=rank,
        )
    classes = _classes(ordered, rank, group_ranks)
    cuts: list[tuple[int, int, int]] = []
    for writers, members in classes.items():
        cuts += _share([(i, ordered[i]) for i in members], writers.index(rank), len(writers))
    cuts.sort()
    slots, files = _laid_out(ordered, cuts, max_file_bytes)
    last = files[-1] if files else None
    return Layout(
        rank=rank,
        group_ranks=tuple(group_ranks),
        entries=ordered,
        slots=tuple(slots),
        files=tuple(files),
        arena_size=_align(last.arena_offset + last.size) if last else 0,
        fingerprint=digest([_described(ordered), list(group_ranks), rank, max_file_bytes]),
        classes={
            ",".join(map(str, writers)): digest(
                [[ordered[i].key, ordered[i].dtype, ordered[i].shape] for i in members]
            )
            for writers, members in classes.items()
            if len(writers) > 1
        },
    )


def shares(layout: Layout) -> dict[tuple[int, ...], list[list[tuple[int, int, int]]]]:
    """Writers → the part of their common entries that each of them writes, as (entry, start, stop)
    in elements. It is the same on all of them. Entries with one writer are left out."""
    entries = layout.entries
    return {
        writers: [
            _share([(i, entries[i]) for i in members], index, len(writers))
            for index in range(len(writers))
        ]
        for writers, members in _classes(entries, layout.rank, layout.group_ranks).items()
        if len(writers) > 1
    }


def _classes(
    entries: Sequence[Entry], rank: int, group_ranks: Sequence[int]
) -> dict[tuple[int, ...], list[int]]:
    """Writers → the numbers of the entries that they share."""
    members = frozenset(group_ranks)
    classes: dict[tuple[int, ...], list[int]] = {}
    # Geometries of one mesh share one tuple of replicas. At 16,384 ranks this scans it only once.
    known: dict[int, tuple[object, list[int]]] = {}
    for index, entry in enumerate(entries):
        replicas = entry.geometry.replicas(rank)
        if id(replicas) not in known:
            shared = classes.setdefault(writers_of(entry, rank, members), [])
            known[id(replicas)] = (replicas, shared)
        known[id(replicas)][1].append(index)
    return classes


def _described(entries: Sequence[Entry]) -> list[list[object]]:
    """Entries as JSON data, for the fingerprint. Each mesh and flat unit is described once: they
    may be long, and many tensors share them."""
    known: dict[int, tuple[object, str]] = {}  # the object: an id may be reused
    found: list[list[object]] = []
    for e in entries:
        record = e.geometry.record()
        for key in record.keys() & {"mesh", "unit"}:
            shared = record[key]
            if id(shared) not in known:
                known[id(shared)] = shared, digest(repr(shared))
            record[key] = known[id(shared)][1]
        found.append([e.key, e.dtype, e.shape, repr(record), e.before, e.after])
    return found


def _share(
    members: Sequence[tuple[int, Entry]], index: int, count: int
) -> list[tuple[int, int, int]]:
    """Part `index` of `count` of the members' bytes, as (entry, start, stop) in elements.

    A zero-size entry goes to the first writer.
    """
    total = sum(entry.nbytes for _, entry in members)
    low, high = total * index // count, total * (index + 1) // count
    out, at = [], 0
    for number, entry in members:
        if entry.nbytes == 0:
            if index == 0:
                out.append((number, 0, 0))
            continue
        # The element in which a boundary falls goes to the writer after it.
        start = min(max(-(-(low - at) // entry.itemsize), 0), entry.numel)
        stop = min(max(-(-(high - at) // entry.itemsize), 0), entry.numel)
        if stop > start:
            out.append((number, start, stop))
        at += entry.nbytes
    return out


def _laid_out(
    entries: Sequence[Entry], cuts: Sequence[tuple[int, int, int]], max_file_bytes: int
) -> tuple[list[Slot], list[FileImage]]:
    batches: list[list[tuple[int, int, int]]] = []
    room = 0
    for number, start, stop in cuts:
        itemsize = entries[number].itemsize
        while True:
            need = (stop - start) * itemsize
            if not batches or (need > room and room < itemsize):
                batches.append([])
                room = max(max_file_bytes, itemsize)
            if need <= room:
                batches[-1].append((number, start, stop))
                room -= need
                break
            middle = start + room // itemsize
            batches[-1].append((number, start, middle))
            room, start = 0, middle
    slots: list[Slot] = []
    files: list[FileImage] = []
    arena_offset = 0
    for file, batch in enumerate(batches):
        header, size, offsets = _header(entries, batch)
        slots += [
            Slot(number, start, stop, file, len(header) + offset)
            for (number, start, stop), offset in zip(batch, offsets, strict=True)
        ]
        files.append(FileImage(header, size, arena_offset))
        arena_offset += _align(size)
    return slots, files


def _header(
    entries: Sequence[Entry], batch: Sequence[tuple[int, int, int]]
) -> tuple[bytes, int, list[int]]:
    """The safetensors header for the batch, the file's size, and each slot's offset in the data."""
    tensors: list[tuple[str, str, Sequence[int], int]] = []
    slices: dict[str, list[int]] = {}
    offsets, at = [], 0
    for number, start, stop in batch:
        entry = entries[number]
        dtype = DTYPES[entry.dtype]
        whole = start == 0 and stop == entry.numel
        shape = list(entry.shape) if whole else [stop - start]
        if not whole:
            slices[entry.key] = [start, stop]
        nbytes = (stop - start) * entry.itemsize
        stored_shape = shape if dtype.code else [*shape, dtype.itemsize]
        tensors.append((entry.key, dtype.code or "U8", stored_shape, nbytes))
        offsets.append(at)
        at += nbytes
    metadata = {"format": "smckpt", SLICES_KEY: json.dumps(slices, separators=(",", ":"))}
    header = safetensors_header(tensors, metadata, ALIGNMENT)
    if len(header) - 8 > HEADER_LIMIT:
        raise StateError(
            f"{len(batch)} tensors need a header of {len(header) - 8} bytes; safetensors allows "
            "100 MB",
            remedy="set a smaller max_file_bytes, so that the state is split in several files",
        )
    return header, len(header) + at, offsets


def safetensors_header(
    tensors: Iterable[tuple[str, str, Sequence[int], int]],
    metadata: Mapping[str, str],
    alignment: int = 8,
) -> bytes:
    """The header of a safetensors file whose tensors lie one behind the other, with its length.

    Args:
        tensors: name, code of the dtype, shape and bytes of each, in order.
        alignment: the data begin at a multiple of so many bytes.
    """
    table: dict[str, object] = {METADATA: metadata}
    at = 0
    for name, code, shape, nbytes in tensors:
        table[name] = {"dtype": code, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    padded = -(-(len(text) + 8) // alignment) * alignment - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
