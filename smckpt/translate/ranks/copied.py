"""One rank's part in the place of another's: a file that was copied, or layers of it.

Names, shapes and the proof of a translation do not show it, and the model would have one part
twice.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from smckpt.calls import Threads
from smckpt.errors import UsageError, few
from smckpt.formats.boxes import SavedBox, SavedTensor
from smckpt.formats.degrees import Degrees
from smckpt.formats.source_files import ArchiveRecord, SourceFiles
from smckpt.formats.tensors import TensorKey, TensorReader
from smckpt.layout.entries import DTYPES
from smckpt.translate.files import Chunk, Range
from smckpt.translate.ranks.translated import Translated, TranslatedSource, whole
from smckpt.translate.stream import CHUNK, equal, read_elements
from smckpt.translate.tables.layouts import looks_transformed
from smckpt.translate.tables.pieces import Side

_COMPARED = 64 << 10  # bytes of a tensor that are read before all of it
_BEGINNING = 4 << 10  # of a tensor of a layer, and of each place of a file
_SAMPLES = 8  # places of a file that are compared before all of it
_AT_ONCE = 16  # reads
_TELLING = 96  # bytes: eight constants in turn, as of a fused tensor, need fewer, compressed
_OF_EXPERTS = re.compile(r"(?<!shared_)experts")
_OWN = "fetch each rank's own file, or save each rank's own part; "
_ALLOWED = "pass allow_equal_ranks=True (--allow-equal-ranks)"
EQUAL_EXPERTS = (
    f"if the ranks' experts are equal because all were made from one (upcycled), {_ALLOWED}"
)
_MADE_SO = f"if the ranks or layers were made from one (one seed, a deeper model), {_ALLOWED}"


@dataclass(frozen=True)
class _Rank:
    """A rank of a stage. parts: what tells it from the others of its stage."""

    number: int
    stage: int
    parts: tuple[int, ...]
    tensors: Mapping[str, Translated]


def refuse_equal_ranks(
    stages: Sequence[TensorReader], degrees: Degrees, names: Sequence[str] = ()
) -> tuple[str, ...]:
    """Compare the ranks of all pipeline stages, as far as they hold tensors of the same names and
    shapes. Most differ in the first bytes of their largest tensor.

    Args:
        names: the ranks' files, tensor-parallel ranks innermost.

    Returns:
        a note on ranks that are equal because all that they have of their own is constant.

    Raises:
        UsageError: all tensors of two ranks are equal.
    """
    if any(held.whole is not None for stage in stages for held in stage.held.values()):
        return ()  # what is cut is distributed; each rank has copies of the rest
    alike: dict[object, list[_Rank]] = {}
    for number, stage in enumerate(stages):
        for coordinates in sorted({p for held in stage.held.values() for p in held.shards}):
            tensors = {
                name: whole(TensorKey(name, *coordinates), held.shards[coordinates], held.dtype)
                for name, held in stage.held.items()
                if coordinates in held.shards and 0 not in held.shards[coordinates]
            }
            at = number * degrees.ranks + coordinates[1] * degrees.tp + coordinates[0]
            parts_of = coordinates[0], *degrees.of_expert(*coordinates)
            shapes = frozenset((n, t.dtype, tuple(t.shape)) for n, t in tensors.items())
            alike.setdefault(shapes, []).append(_Rank(at, number, parts_of, tensors))
    sources = [TranslatedSource(stage) for stage in stages]
    constant: list[str] = []
    for group in alike.values():
        # parts of several ranks each whose tensors all begin alike
        largest = sorted(group[0].tensors, key=lambda n: (-math.prod(group[0].tensors[n].shape), n))
        parts = [list(group)]
        for name in largest:
            apart: list[list[_Rank]] = []
            for part in parts:
                by_bytes: dict[bytes, list[_Rank]] = {}
                for rank in part:
                    begins = _elements(sources[rank.stage], rank.tensors[name], 0, _COMPARED)
                    by_bytes.setdefault(begins, []).append(rank)
                apart += [ranks for ranks in by_bytes.values() if len(ranks) > 1]
            if not (parts := apart):
                break
        for first, *others in parts:
            for other in others:
                if first.stage == other.stage and not _has_own(first, other):
                    continue
                if (first.stage, first.parts) != (other.stage, other.parts):
                    url = stages[other.stage].url
                    constant += _refuse_equal(sources, first, other, names, url)
    if not constant:
        return ()
    return (
        "all tensors of some ranks are equal, but each holds one number: "
        f"{few(constant, between='; ')}: whether one is a copy of the other cannot be told",
    )


def _has_own(one: _Rank, two: _Rank) -> bool:
    """Whether two ranks of a stage have parts of their own. Layers without experts are the same on
    expert-parallel ranks. By transformers' own plan others may be, too: `refuse_equal_layers` knows
    which."""
    if not looks_transformed(one.tensors):
        return False
    return one.parts[0] != two.parts[0] or any(map(_OF_EXPERTS.search, one.tensors))


def _elements(source: TranslatedSource, tensor: Translated, start: int, most: int) -> bytes:
    """At most so many bytes, from an element on."""
    count = max(1, most // DTYPES[tensor.source_dtype].itemsize)
    stop = min(math.prod(tensor.shape), start + count)
    return bytes(read_elements(source, tensor, start, stop))


def _refuse_equal(
    sources: Sequence[TranslatedSource], one: _Rank, two: _Rank, names: Sequence[str], url: str
) -> list[str]:
    """Returns: the two, if they are equal, but nothing that is their own tells of a copy."""
    experts = one.stage == two.stage and one.parts[0] == two.parts[0]
    tells = False
    for name, tensor in one.tensors.items():
        itemsize = DTYPES[tensor.source_dtype].itemsize
        for start in range(0, math.prod(tensor.shape), CHUNK // itemsize):
            held = _elements(sources[one.stage], tensor, start, CHUNK)
            if held != _elements(sources[two.stage], two.tensors[name], start, CHUNK):
                return []
            own = len(tensor.shape) > 1 and (not experts or _OF_EXPERTS.search(name))
            tells = tells or bool(own and _tells(held[:_BEGINNING]))
    first, second = (names[rank.number] if names else f"rank {rank.number}" for rank in (one, two))
    if not tells:
        return [f"{first} and {second}"]
    raise UsageError(
        f"all tensors of {second} are those of {first}, so it is a copy of another rank's",
        remedy=_OWN + (EQUAL_EXPERTS if experts else _MADE_SO),
        path=url,
    )


def refuse_equal_files(tensors: Iterable[SavedTensor], source: SourceFiles) -> None:
    """Compare files, each with a part of the same tensors: of DCP's ranks, or DeepSpeed's. Their
    parts have no names in them, and each may have the right checksum.

    Raises:
        UsageError: two are equal, and hold more than constants.
    """
    boxes: dict[str, dict[str, SavedBox]] = {}
    for tensor in tensors:
        for saved in tensor.boxes if len({saved.file for saved in tensor.boxes}) > 1 else ():
            boxes.setdefault(saved.file, {}).setdefault(tensor.name, saved)

    def sample(file: ArchiveRecord) -> bytes:
        step = max(1, file.nbytes // _SAMPLES)
        length = min(_BEGINNING, step)
        starts = range(0, file.nbytes - length + 1, step)
        return b"".join(source.read(file, start, start + length) for start in starts)

    by_size: dict[int, list[ArchiveRecord]] = {}
    begin_alike: dict[tuple[int, bytes], list[ArchiveRecord]] = {}
    with Threads(_AT_ONCE, "smckpt-compare") as pool:
        for found in pool.map(source.whole, sorted(boxes)):
            by_size.setdefault(found.nbytes, []).append(found)
        files = [file for several in by_size.values() if len(several) > 1 for file in several]
        for file, parts in zip(files, pool.map(sample, files), strict=True):
            begin_alike.setdefault((file.nbytes, parts), []).append(file)
    for first, *others in begin_alike.values():
        for other in others:
            common = boxes[first.path].keys() & boxes[other.path].keys()
            if common and _are_equal(source, first, other) and any(
                _box_tells(source, boxes[first.path][name]) for name in sorted(common)
            ):  # fmt: skip
                raise UsageError(
                    f"the file is byte for byte {first.path}, but each should hold a part of its "
                    f"own of {min(common)}",
                    remedy=f"fetch each rank's own file; {EQUAL_EXPERTS}", path=other.path,
                )  # fmt: skip


def _are_equal(source: SourceFiles, one: ArchiveRecord, two: ArchiveRecord) -> bool:
    ranges = ((low, min(low + CHUNK, one.nbytes)) for low in range(0, one.nbytes, CHUNK))
    return all(source.read(one, *each) == source.read(two, *each) for each in ranges)


def _box_tells(source: SourceFiles, saved: SavedBox) -> bool:
    """Whether there are more than constants in the first bytes of what a box lies in."""
    stored = saved.find()
    size = DTYPES[stored.dtype].itemsize
    low = stored.start * size
    begins = source.read(stored.record, low, min(low + _BEGINNING, stored.record.nbytes))
    return _tells(begins)


# of the experts of one layer, the first tells whether to look at the others
_EXPERT = re.compile(r"(?<=weight)\d+$|(?<=experts\.)\d+(?=\.)")
_SHARED = frozenset({"k", "v"})  # roles whose heads a model may have several times


def refuse_equal_layers(reader: TensorReader, side: Side) -> tuple[str, ...]:
    """Compare what ranks have of their own in each layer, and in embedding and head: matrices that
    are cut, and experts. One that begins with constants, such as zeros, tells nothing.

    Returns:
        notes on matrices that two ranks hold alike, and on layers that are equal: one of a pipeline
        stage in the place of another's, unless the model was made so.

    Raises:
        UsageError: all that two ranks have of their own in a layer is equal.
    """
    source = TranslatedSource(reader)
    dtype_of = {name: held.dtype for name, held in reader.held.items()}
    layers: dict[tuple[str, int], dict[str, set[TensorKey]]] = {}
    for role, pieces in side.pieces.items():
        for key, _ in pieces if role.role not in _SHARED else ():
            if key.tp >= 0 and len(side.shapes[key]) > 1:
                names = layers.setdefault((role.tower, role.layer), {})
                names.setdefault(key.name, set()).add(key)
    sampled: dict[tuple[str, int], list[str]] = {}
    for at, names in layers.items():
        each = {_EXPERT.sub("#", name): name for name in sorted(names, reverse=True)}
        several = [name for name in each.values() if len(names[name]) > 1]
        sampled[at] = several or [*each.values()][:1]  # one tells whether two layers are equal
    keys = [key for at, some in sampled.items() for name in some for key in layers[at][name]]
    beginnings = dict(zip(keys, _beginnings(reader, keys), strict=True))
    alike: list[str] = []
    layers_of: dict[object, list[int]] = {}  # what the first rank's matrices begin with
    for (tower, layer), names in layers.items():
        tensors = {
            key: whole(key, reader.held[name].keyed[key], dtype_of[name])
            for name, keys in names.items()
            for key in keys
        }
        pairs: dict[tuple[TensorKey, TensorKey], None] = {}  # in order
        of_first: list[bytes] = []
        for name in sampled[tower, layer]:
            begin_alike: dict[bytes, TensorKey] = {}
            for key in sorted(names[name]):
                begins = beginnings[key]
                if _tells(begins):
                    of_first += [] if begin_alike else [begins]
                    first = begin_alike.setdefault(begins, key)
                    if first is not key:
                        pairs[first._replace(name=""), key._replace(name="")] = None
        if of_first and layer >= 0:
            layers_of.setdefault((tower, *of_first), []).append(layer)
        for one, two in pairs:
            both = [(one._replace(name=name), two._replace(name=name)) for name in sorted(names)]
            same, all_same = [], True
            for first, second in (pair for pair in both if tensors.keys() >= {*pair}):
                begins = _elements(source, tensors[first], 0, _BEGINNING)
                if equal(source, tensors[first], tensors[second]):
                    same += [first.name] if _tells(begins) else []
                else:
                    all_same = False
            where = f"(tp, ep) {one[1:]} and {two[1:]}"
            if same and all_same:
                part = f"layer {layer}" if layer >= 0 else "embedding and head"
                raise UsageError(
                    f"all that the ranks {where} have of their own in {part} is equal: one "
                    f"of them has the other's ({', '.join(same[:4])})",
                    remedy=_OWN + (EQUAL_EXPERTS if one.tp == two.tp else _MADE_SO),
                )
            alike += [f"{name} of {where}" for name in same]
    notes = [
        f"layers {', '.join(map(str, found))} begin with the same numbers: unless the model was "
        "made so, they are one layer, of a rank or stage in the place of another"
        for found in layers_of.values()
        if len(found) > 1
    ]
    if alike:
        notes.append(
            "ranks hold equal matrices where each should have a part of its own: "
            f"{few(alike, between='; ')}: compare the export's logits with the trainer's"
        )
    return tuple(notes)


def _beginnings(reader: TensorReader, keys: Sequence[TensorKey]) -> list[bytes]:
    """What stored tensors begin with. A store is asked for many at once."""
    source, chunks, memory = TranslatedSource(reader), [], []
    for key in keys:
        held = reader.held[key.name]
        tensor = whole(key, held.keyed[key], held.dtype, sample=True)
        itemsize = DTYPES[held.dtype].itemsize
        count = min(math.prod(tensor.shape), max(1, _BEGINNING // itemsize))
        chunks.append(Chunk(0, 0, (Range(tensor, 0, count, 0),)))
        memory.append(memoryview(bytearray(count * itemsize)))
    with Threads(_AT_ONCE, "smckpt-compare") as pool:
        reads = zip(source.plans_of(chunks), memory, strict=True)
        for done in [pool.submit(source.read, plan, [view]) for plan, view in reads]:
            done.result()
    return list(map(bytes, memory))


def _tells(begins: bytes) -> bool:
    """Whether equal bytes tell of a copy. Constants do not, such as zeros, also if several are in
    one tensor: a fused one has those of each of its parts."""
    return len(zlib.compress(begins)) > _TELLING
