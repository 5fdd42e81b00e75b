"""A checkpoint that others wrote: its tensors by name, whose boxes lie in files of any kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from smckpt.checkpoint.reading.catalogue import LogicalTensor
from smckpt.errors import CorruptCheckpointError, TensorMismatchError, TopologyError
from smckpt.formats.names import places_of_optimizers
from smckpt.formats.source_facts import SourceFacts
from smckpt.formats.source_files import ArchiveRecord, SourceFiles
from smckpt.formats.tensors import Block, RankTensors, TensorKey
from smckpt.formats.torch_archive import StoredTensor
from smckpt.layout.entries import DTYPES, Path, dotted
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Box, Copy, Piece, Strided, covered, row_major_strides


@dataclass(frozen=True)
class SavedBox:
    """A box of a tensor. find: reads where it lies; file: its name, for errors. inside: this box is
    at these indices of the outer dimensions of what lies there."""

    box: Box
    file: str
    find: Callable[[], StoredTensor]
    inside: tuple[int, ...] = ()

    @staticmethod
    def of(box: Box, stored: StoredTensor) -> SavedBox:
        """A box whose bytes have been found."""
        return SavedBox(box, stored.record.path, lambda: stored)


@dataclass(frozen=True)
class SavedTensor:
    """A tensor by its logical name; `path` is its place in the state dict."""

    name: str
    path: Path
    dtype: str
    shape: Shape
    boxes: tuple[SavedBox, ...] = field(repr=False)


class _Taken(NamedTuple):
    """Elements of a stored tensor, and where they go."""

    stored: StoredTensor
    copy: Copy
    buffer: int
    sample: bool


class BoxTensors:
    """A `TensorReader` of such tensors. Each box is found when it is first needed, and the CRC of
    its bytes, if there is one, compared when they are first read."""

    def __init__(
        self, url: str, tensors: Mapping[TensorKey, SavedTensor], source: SourceFiles
    ) -> None:
        """
        Args:
            tensors: those of each rank, or of all ranks.

        Raises:
            CorruptCheckpointError: elements of a tensor are in no box, or in several.
        """
        self.url = url
        self._tensors = tensors
        self._source = source
        self._pieces: dict[tuple[TensorKey, int], tuple[Piece, StoredTensor]] = {}
        held: dict[str, RankTensors] = {}
        for key, tensor in tensors.items():
            refuse_gaps(tensor, url)
            if key.tp < 0:
                held[key.name] = RankTensors(key.name, tensor.dtype, {}, tensor.shape)
                continue
            others = held[key.name].shards if key.name in held else {}
            shards = {**others, (key.tp, key.ep): tensor.shape}
            held[key.name] = RankTensors(key.name, tensor.dtype, shards)
        self.held: Mapping[str, RankTensors] = held

    def plan(self, blocks: Sequence[Block]) -> Sequence[_Taken]:
        out = []
        for block in blocks:
            tensor = self._tensors[block.source]
            left = block.copy.numel
            for number, saved in enumerate(tensor.boxes):
                dense = row_major_strides(saved.box.sizes)
                copy = self._cut(block, Piece(tensor.name, tensor.shape, saved.box, 0, dense))
                if copy is None:
                    continue
                key = block.source, number
                if key not in self._pieces:
                    self._pieces[key] = stored_piece(tensor, saved)
                piece, stored = self._pieces[key]
                if (piece.start, piece.strides) != (0, dense):
                    copy = self._cut(block, piece)
                    assert copy is not None
                left -= copy.numel
                out.append(_Taken(stored, copy, block.buffer, block.sample))
            if left:
                raise CorruptCheckpointError(
                    f"{tensor.name}: {left} elements of a part are in no file",
                    remedy="use another checkpoint",
                    path=self.url,
                )
        return out

    def read(self, plan: Sequence[_Taken], buffers: Sequence[memoryview]) -> None:
        for stored, copy, buffer, sample in plan:
            itemsize = DTYPES[stored.dtype].itemsize
            self._source.copy(stored.record, copy, itemsize, buffers[buffer], sample=sample)

    def close(self) -> None:
        self._source.close()

    def _cut(self, block: Block, piece: Piece) -> Copy | None:
        what = f"{piece.name} is in several parts, or transposed"
        return cut(block, piece, self.url, what, "save it whole and contiguous")


def cut(block: Block, piece: Piece, url: str, what: str, remedy: str) -> Copy | None:
    """The elements of a block that a saved piece has. A whole tensor can be read in any shape of
    the block. A part can be read only if it is a grid in the tensor's own shape.

    Raises:
        TopologyError: it is no such grid. what: is then wrong.
    """
    if piece == Piece.whole(piece.name, piece.shape, piece.start):
        there = block.copy.source
        at = Strided(there.sizes, there.start + piece.start, there.strides)
        return Copy(at, block.copy.target)
    try:
        return block.copy.read_from(piece)
    except ValueError as error:
        raise TopologyError(
            f"{what}, but its experts are folded into its memory",
            remedy=f"{remedy}, or export the files of ranks", path=url,
        ) from error  # fmt: skip


def whole_tensor(path: Path, stored: StoredTensor) -> SavedTensor:
    """A tensor that lies in one place."""
    box = SavedBox.of(Box.whole(stored.shape), stored)
    return SavedTensor(dotted(path), path, stored.dtype, stored.shape, (box,))


def stored_piece(tensor: SavedTensor, saved: SavedBox) -> tuple[Piece, StoredTensor]:
    """Where the elements of a box are in the record of its stored tensor.

    Raises:
        TensorMismatchError: another tensor lies there.
    """
    stored = saved.find()
    outer = len(saved.inside)
    if (stored.dtype, stored.shape[outer:]) != (tensor.dtype, saved.box.sizes) or any(
        i >= n for i, n in zip(saved.inside, stored.shape, strict=False)
    ):
        raise TensorMismatchError(
            f"the part of {tensor.name} at {saved.box.offsets} is {stored.dtype} "
            f"{stored.shape} in its file, but the checkpoint's metadata says "
            f"{tensor.dtype} {saved.box.sizes}",
            remedy="files of two checkpoints are mixed: use another one",
            path=saved.file,
        )
    start = stored.start + sum(i * n for i, n in zip(saved.inside, stored.strides, strict=False))
    piece = Piece(tensor.name, tensor.shape, saved.box, start, stored.strides[outer:])
    return piece, stored


def refuse_gaps(tensor: SavedTensor, url: str) -> None:
    """
    Raises:
        CorruptCheckpointError: elements of the tensor are in no box, or in several.
    """
    whole = Box.whole(tensor.shape)
    boxes = [saved.box for saved in tensor.boxes]
    if boxes == [whole]:
        return
    outside = [box for box in boxes if box.numel and whole.intersect(box) != box]
    found = covered(whole, [] if outside else boxes)
    if outside or not found.exact:
        what = (
            f"a part at {outside[0].offsets} of the size {outside[0].sizes} lies outside"
            if outside
            else f"{found.never} elements are in no part, {found.often} in several"
        )
        raise CorruptCheckpointError(
            f"{tensor.name} of the shape {tensor.shape}: {what}",
            remedy="fetch the whole checkpoint, with the files of all ranks, or use another one",
            path=url,
        )


@dataclass(frozen=True)
class SavedValue:
    """A value that is not a tensor: its place in the state dict, and what reads it."""

    path: Path
    read: Callable[[], Any]


@dataclass(frozen=True)
class ForeignCheckpoint:
    """format: its name. saved: the tensors; source: reads them. objects: the names of other values.
    files: name → size. facts: what else is known, by name. values: the other values, where they can
    be read. containers: the kinds of those above tensors that are no dicts, as far as they are
    known. model_facts: what it says of the model. parts: its files, where each is a state of its
    own (in a directory of Hugging Face)."""

    url: str
    format: str
    saved: Mapping[str, SavedTensor]
    source: SourceFiles = field(compare=False)
    objects: tuple[str, ...] = ()
    files: Mapping[str, int] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    of_optimizers: frozenset[str] = frozenset()
    values: Mapping[str, SavedValue] = field(default_factory=dict)
    containers: Mapping[Path, str] = field(default_factory=dict)
    model_facts: tuple[SourceFacts, ...] = ()
    parts: tuple[ArchiveRecord, ...] = ()

    @cached_property
    def logical(self) -> Mapping[str, LogicalTensor]:
        return {
            name: LogicalTensor(name, t.path, t.dtype, t.shape) for name, t in self.saved.items()
        }

    @cached_property
    def optimizers(self) -> frozenset[str]:
        """The places of optimizers."""
        return self.of_optimizers | places_of_optimizers((*self.saved, *self.objects))

    def reader(self, tensors: Mapping[str, LogicalTensor]) -> BoxTensors:
        """Of some of them, under other names.

        Raises:
            CorruptCheckpointError: elements of a tensor are in no file, or in several.
        """
        picked = {
            TensorKey(name): replace(self.saved[t.name], name=name) for name, t in tensors.items()
        }
        return BoxTensors(self.url, picked, self.source)
