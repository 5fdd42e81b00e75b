"""A checkpoint as a store: global tensors by name, or plain tensors of each parallel rank."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from smckpt.checkpoint.catalogue import Catalogue, LogicalTensor, StoredSlot
from smckpt.checkpoint.plan import ReadPlan
from smckpt.checkpoint.read import Readers, execute
from smckpt.checkpoint.rows import Row
from smckpt.checkpoint.sources import Source, row_shape
from smckpt.errors import (
    CorruptCheckpointError,
    TensorMismatchError,
    TopologyError,
    UsageError,
)
from smckpt.layout.entries import DTYPES
from smckpt.layout.geometry import Box, BoxGeometry, Piece, row_major_strides
from smckpt.layout.mesh import Shape
from smckpt.topology import ParallelState
from smckpt.translate.degrees import Degrees
from smckpt.translate.pieces import Held, Key
from smckpt.translate.stores import Part

__all__ = ["CheckpointStore", "degrees_of"]

_Rows = list[tuple[Row, str]]
_COMPARED = 64 << 10  # bytes of a tensor


def degrees_of(
    catalogue: Catalogue, tp: int | None, ep: int | None, etp: int | None = None
) -> Degrees:
    """The degrees: those recorded, else those given, else 1. Where experts are cut otherwise than
    layers, which is not recorded, `ep` is what is given, and the ranks are those recorded.

    Raises:
        UsageError: what is given contradicts what was recorded.
    """
    if catalogue.topology is None:
        return Degrees.of(1 if tp is None else tp, 1 if ep is None else ep, etp)
    state = ParallelState.from_json(catalogue.topology)
    apart = etp not in (None, state.tp_size)
    if apart:
        _refuse_other_order(state, catalogue.url)
    for name, given, saved in (("tp", tp, state.tp_size), ("ep", ep, state.ep_size)):
        if name == "ep" and apart:
            continue
        if given not in (None, saved):
            raise UsageError(
                f"{name}={given}, but the checkpoint was saved with {name}={saved}",
                remedy=f"leave {name}= out",
                path=catalogue.url,
            )
    return Degrees.of(state.tp_size, ep or state.ep_size, etp, state.ep_size)


def _refuse_other_order(state: ParallelState, url: str) -> None:
    """Which experts a rank has is told by its number alone, where they are cut otherwise."""
    ranker, inner = state.ranker, state.tp_size * state.ep_size
    for rank in range(state.world_size):
        if ranker.get_tp_rank(rank) + state.tp_size * ranker.get_ep_rank(rank) != rank % inner:
            raise UsageError(
                "etp= is for tensor- and then expert-parallel ranks that are neighbours, and the "
                f"recorded order is {', '.join(state.order)}, with context-parallel degree "
                f"{state.cp_size}",
                remedy="export the files of ranks",
                path=url,
            )


class CheckpointStore:
    """The model in a catalogue. Plans are made by one thread, reads by several at once."""

    def __init__(
        self, catalogue: Catalogue, tensors: Mapping[str, LogicalTensor], degrees: Degrees
    ) -> None:
        self.url = catalogue.url
        self._catalogue = catalogue
        self._readers = Readers(verify=True)
        self._rows: dict[Key, _Rows] = {}
        self._slots: dict[tuple[int, tuple[int, ...]], list[StoredSlot]] = {}
        self._views: dict[Key, Shape] = {}
        self._state: ParallelState | None = None
        if catalogue.topology is not None:
            self._state = ParallelState.from_json(catalogue.topology)
            if self._state.pp_size > 1:
                raise TopologyError(
                    f"the checkpoint has {self._state.pp_size} pipeline stages, which number "
                    "their layers each for itself",
                    remedy="translate a checkpoint without pipeline parallelism",
                    path=catalogue.url,
                )
        self._coordinates = {(t, c) for c in range(degrees.columns) for t in range(degrees.tp)}
        self.held: Mapping[str, Held] = {
            name: self._hold(name, tensor) for name, tensor in tensors.items()
        }

    def _hold(self, name: str, tensor: LogicalTensor) -> Held:
        shards: dict[tuple[int, int], Shape] = {}
        whole: Shape | None = None
        for row, fqn in self._catalogue.pieces.by_name[tensor.name]:
            if row.dtype != tensor.dtype:
                raise TopologyError(
                    f"{name} was saved as {tensor.dtype} by some ranks and as {row.dtype} by "
                    "others", remedy="save all ranks' parts in one dtype", path=self.url,
                )  # fmt: skip
            places = self._places(row)
            shape = row_shape(row, fqn)
            if self._state is None or (row.geometry is not None and len(places) > 1):
                if places != self._coordinates:
                    raise TopologyError(
                        f"{name} is divided over some of the tensor- and expert-parallel ranks "
                        "and not over others",
                        remedy="save it on a mesh of all of them, or of one tp and ep rank each",
                        path=self.url,
                    )
                whole = shape
                self._rows.setdefault(Key(name), []).append((row, fqn))
                continue
            for place in places:
                shards[place] = shape
                self._rows.setdefault(Key(name, *place), []).append((row, fqn))
        self._refuse_many(name)
        return Held(name, tensor.dtype, {} if whole is not None else shards, whole)

    def _places(self, row: Row) -> set[tuple[int, int]]:
        """The (tp, ep) coordinates of the ranks that share a row's tensor."""
        if self._state is None:
            return self._coordinates
        ranker = self._state.ranker
        ranks = row.ranks if row.geometry is None else row.geometry.ranks
        return {(ranker.get_tp_rank(r), ranker.get_ep_rank(r)) for r in ranks}

    def _refuse_many(self, name: str) -> None:
        """Without a topology, tensors of one name on meshes apart could be anything."""
        rows = [row for row, _ in self._rows.get(Key(name), ())]
        known = self._catalogue.pieces
        apart = len(rows) > 1 and not all(known.one_tensor(rows[0], row) for row in rows)
        kept = any(row.geometry is None and len(row.ranks) > 1 for row in rows)
        if self._state is None and (apart or kept) and len(self._coordinates) > 1:
            raise TopologyError(
                f"ranks saved tensors of their own as {name}, and which are of which "
                "tensor-parallel rank is not recorded",
                remedy="save with parallel_state=, or export the files of single ranks",
                path=self.url,
            )

    def refuse_unlike_replicas(self) -> None:
        """Ranks that are one tensor- and expert-parallel rank by the recorded topology hold the
        same. Of each kind of tensor that ranks keep for themselves some elements are compared:
        a topology that is not the job's, which shapes do not tell, shows in all.

        Raises:
            TensorMismatchError: they do not.
        """
        seen: set[tuple[str, int, int]] = set()
        for key, rows in self._rows.items():
            kind = re.sub(r"\d+", "#", key.name), key.tp, key.ep
            if key.tp < 0 or kind in seen or rows[0][0].geometry is not None:
                continue
            seen.add(kind)
            row, fqn = rows[0]
            part = _beginning(key, row_shape(row, fqn), DTYPES[row.dtype].itemsize)
            box = _around(part, len(part.sizes))
            found = [
                s for s in self._catalogue.pieces.meeting(row, fqn, box) if self._is_of(s, key)
            ]
            if found and part.sizes:
                self._refuse_unlike(part, [found[0], *found[1:2], *found[2:][-1:]])

    def _refuse_unlike(self, part: Part, sources: Sequence[Source]) -> None:
        data = []
        for source in sources:
            cut = _cut(part, source.piece)
            assert cut is not None
            saved, target, sizes = cut
            itemsize = DTYPES[source.row.dtype].itemsize
            data.append(bytearray(math.prod(part.sizes) * itemsize))
            plan = ReadPlan()
            plan.add_box(self._slots_of(source), saved, 0, target, Box.whole(sizes), itemsize)
            self.read(plan, [memoryview(data[-1])])
        for source, other in zip(sources, data, strict=True):
            if other != data[0]:
                raise TensorMismatchError(
                    f"ranks {sources[0].holders[0]} and {source.holders[0]} are both (tp, ep) "
                    f"{part.source[1:]} by the recorded topology, but their {part.source.name} "
                    "differ",
                    remedy="save with the job's own parallel_state= (its order= too: Megatron "
                    "counts expert- before context-parallel ranks), or export the ranks' files",
                    path=self.url,
                )

    def view(self, key: Key, shape: Shape) -> None:
        self._views[key] = shape

    def plan(self, parts: Sequence[Part]) -> ReadPlan:
        """Raises CorruptCheckpointError: some elements are in no file."""
        plan = ReadPlan()
        for part in parts:
            done = 0
            for source, itemsize, saved, target, sizes in self._found(part):
                slots = self._slots_of(source)
                plan.add_box(slots, saved, part.buffer, target, Box.whole(sizes), itemsize)
                done += math.prod(sizes)
            if done != math.prod(part.sizes):
                raise CorruptCheckpointError(
                    f"{part.source.name}: {math.prod(part.sizes) - done} elements of a part are "
                    "held by no rank, or by several that differ in their cut",
                    remedy="use another checkpoint",
                    path=self.url,
                )
        return plan

    def read(self, plan: ReadPlan, buffers: Sequence[memoryview]) -> None:
        execute(plan, buffers, threads=1, readers=self._readers)

    def close(self) -> None:
        self._readers.close()

    def _slots_of(self, source: Source) -> list[StoredSlot]:
        key = (id(source.row), source.holders)
        if key not in self._slots:
            self._slots[key] = self._catalogue.slots(source.row, source.holders)
        return self._slots[key]

    def _found(self, part: Part) -> Iterator[tuple[Source, int, Piece, Piece, Shape]]:
        """What of a part each saved piece has: strides there, strides in the buffer."""
        rows = self._rows[part.source]
        if not isinstance(rows[0][0].geometry, BoxGeometry):
            rows = rows[:1]  # the others are copies
        for row, fqn in rows:
            own = row_shape(row, fqn)
            viewed = part.source in self._views
            box = Box.whole(own) if viewed else _around(part, len(own))
            sources = list(self._catalogue.pieces.meeting(row, fqn, box))
            if row.geometry is None:  # each rank has its own: that of the first that is meant
                sources = [s for s in sources if self._is_of(s, part.source)][:1]
            for source in sources:
                piece = self._viewed(part.source, source.piece) if viewed else source.piece
                cut = _cut(part, piece)
                if cut is not None:
                    yield source, DTYPES[row.dtype].itemsize, *cut

    def _viewed(self, key: Key, piece: Piece) -> Piece:
        """A rank's whole tensor in another shape; of a part of it there is none."""
        if piece.box != Box.whole(piece.shape) or piece.strides != row_major_strides(piece.shape):
            raise TopologyError(
                f"{key.name} is divided over ranks, but its experts lie folded in its memory",
                remedy="save it without FSDP, or export the files of ranks",
                path=self.url,
            )
        shape = self._views[key]
        whole = Box.whole(shape)
        return Piece(piece.name, shape, whole, piece.start, row_major_strides(shape))

    def _is_of(self, source: Source, key: Key) -> bool:
        if self._state is None or key.tp < 0:
            return True
        ranker, rank = self._state.ranker, source.holders[0]
        return (ranker.get_tp_rank(rank), ranker.get_ep_rank(rank)) == (key.tp, key.ep)


def _beginning(key: Key, shape: Shape, itemsize: int) -> Part:
    """Rows of a tensor, some 64 KiB."""
    rows = max(1, _COMPARED // max(1, math.prod(shape[1:]) * itemsize))
    sizes = (min(shape[0], rows), *shape[1:]) if shape else ()
    ndim = len(sizes)
    return Part(
        key, sizes, tuple(range(ndim)), (0,) * ndim, (1,) * ndim, -1, 0, 0,
        row_major_strides(sizes),
    )  # fmt: skip


def _around(part: Part, ndim: int) -> Box:
    """The least box of the stored tensor with all of a part."""
    offsets, sizes = [max(part.fixed, 0)] * ndim, [1] * ndim
    for size, dim, at, step in zip(part.sizes, part.dims, part.at, part.steps, strict=True):
        offsets[dim], sizes[dim] = at, (size - 1) * step + 1
    return Box(tuple(offsets), tuple(sizes))


def _cut(part: Part, piece: Piece) -> tuple[Piece, Piece, Shape] | None:
    """What of a part lies in a saved piece: there, in the buffer, and its sizes."""
    box = piece.box
    start, target = piece.start, part.start
    if len(part.dims) < len(box.sizes):
        inside = part.fixed - box.offsets[0]
        if not 0 <= inside < box.sizes[0]:
            return None
        start += inside * piece.strides[0]
    sizes, strides = [], []
    for i, (dim, at, step) in enumerate(zip(part.dims, part.at, part.steps, strict=True)):
        low, high = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
        first = max(0, -((at - low) // step))
        last = min(part.sizes[i], -((at - high) // step))
        if last <= first:
            return None
        sizes.append(last - first)
        strides.append(step * piece.strides[dim])
        start += (at + first * step - low) * piece.strides[dim]
        target += first * part.strides[i]
    whole = Box.whole(sizes)
    saved = Piece(piece.name, piece.shape, whole, start, tuple(strides))
    return saved, Piece(piece.name, piece.shape, whole, target, part.strides), tuple(sizes)
