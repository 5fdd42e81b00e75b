"""Read a checkpoint's tensors: by name, whole, from whatever mesh they were saved on; or global
tensors and plain tensors of each parallel rank."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from smckpt.checkpoint.reading.catalogue import Catalogue, LogicalTensor, SavedPiece, Stored
from smckpt.checkpoint.reading.loading_rank import LoadingRank
from smckpt.checkpoint.reading.plan import plan_logical
from smckpt.checkpoint.reading.read import ReadPlan, StoredCopy, execute
from smckpt.errors import CorruptCheckpointError, TensorMismatchError, TopologyError, UsageError
from smckpt.formats.boxes import cut
from smckpt.formats.degrees import Degrees
from smckpt.formats.tensors import Block, RankTensors, TensorKey
from smckpt.layout.entries import DTYPES, Entry
from smckpt.layout.geometry import BoxGeometry
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Box, Copy, Piece, Strided
from smckpt.topology import ParallelState

_Rows = list[tuple[Entry, str]]
_COMPARED = 64 << 10  # bytes of a tensor


def degrees_of(
    catalogue: Catalogue, tp: int | None, ep: int | None, etp: int | None = None
) -> Degrees:
    """The degrees: the recorded ones, otherwise the given ones, otherwise 1. A checkpoint does not
    record that experts are cut differently from layers; then `ep` is the given degree, and the
    number of ranks is the recorded one.

    Raises:
        UsageError: a given degree contradicts the recorded one.
    """
    if catalogue.topology is None:
        return Degrees.of(1 if tp is None else tp, 1 if ep is None else ep, etp)
    state = ParallelState.from_json(catalogue.topology)
    apart = etp not in (None, state.tp_size)
    if apart:
        # if experts are cut differently, only a rank's number says which experts it has
        ranker, inner = state.ranker, state.tp_size * state.ep_size
        for rank in range(state.world_size):
            if ranker.get_tp_rank(rank) + state.tp_size * ranker.get_ep_rank(rank) != rank % inner:
                raise UsageError(
                    "etp= needs tensor-parallel and then expert-parallel ranks as neighbours, but "
                    f"the recorded order is {', '.join(state.order)}, with context-parallel degree "
                    f"{state.cp_size}",
                    remedy="export the files of ranks",
                )
    for name, given, saved in (("tp", tp, state.tp_size), ("ep", ep, state.ep_size)):
        if name == "ep" and apart:
            continue
        if given not in (None, saved):
            raise UsageError(
                f"{name}={given}, but the checkpoint was saved with {name}={saved}",
                remedy=f"leave {name}= out",
            )
    return Degrees.of(state.tp_size, ep or state.ep_size, etp, state.ep_size)


def stages_of(catalogue: Catalogue, pp: int | None) -> int:
    """How many pipeline stages the ranks were in, as recorded.

    Raises:
        UsageError: `pp` is given and is another number, or none is recorded.
    """
    if catalogue.topology is None:
        if pp not in (None, 1):
            raise UsageError(
                f"pp={pp}, but the checkpoint does not record which stage each rank belongs to",
                remedy="save with SaveOptions(parallel_state=), or export the files of ranks",
            )
        return 1
    saved = ParallelState.from_json(catalogue.topology).pp_size
    if pp not in (None, saved):
        raise UsageError(
            f"pp={pp}, but the checkpoint was saved with pp={saved}", remedy="leave pp= out",
        )  # fmt: skip
    return saved


def has_parts_of_ranks(catalogue: Catalogue, tensors: Mapping[str, LogicalTensor]) -> bool:
    """Whether tensor- or expert-parallel ranks, as recorded, saved plain tensors of their own that
    differ. By name alone, those of one rank would pass for the model's."""
    if catalogue.topology is None:
        return False
    by_name = catalogue.pieces.by_name
    own = {
        name: tensor
        for name, tensor in tensors.items()
        if all(row.geometry.per_rank for row, _ in by_name[tensor.name])
    }
    if not own or (degrees := degrees_of(catalogue, None, None)).ranks == 1:
        return False
    reader = CheckpointTensors(catalogue, own, degrees)
    try:
        return any(map(reader.differs, own))
    finally:
        reader.close()


class CheckpointTensors:
    """The model in a catalogue. Plans are made by one thread, reads by several at once."""

    def __init__(
        self,
        catalogue: Catalogue,
        tensors: Mapping[str, LogicalTensor],
        degrees: Degrees,
        stage: int | None = None,
    ) -> None:
        """stage: of a checkpoint in pipeline stages, the one whose tensors this is a reader of."""
        self.url = catalogue.url
        self._catalogue = catalogue
        self._rows: dict[TensorKey, _Rows] = {}
        self._slots: dict[tuple[int, tuple[int, ...]], list[Stored]] = {}
        self._state: ParallelState | None = None
        if catalogue.topology is not None:
            self._state = ParallelState.from_json(catalogue.topology)
        self._stage = stage
        self._coordinates = {(t, c) for c in range(degrees.columns) for t in range(degrees.tp)}
        self.held: Mapping[str, RankTensors] = {
            name: held
            for name, tensor in tensors.items()
            if (held := self._hold(name, catalogue.pieces.by_name[tensor.name])) is not None
        }

    def _hold(self, name: str, rows: _Rows) -> RankTensors | None:
        """rows: of all stages; None: the stage's ranks saved none of them."""
        if self._state is not None and self._stage is not None:
            every, rows = rows, []
            for row, fqn in every:
                stages = {self._state.ranker.get_pp_rank(r) for r in row.geometry.ranks}
                if len(stages) > 1 and not row.geometry.per_rank:
                    raise TopologyError(
                        f"{name} is distributed over the pipeline stages {sorted(stages)}",
                        remedy="save the model on meshes of one stage each",
                    )  # fmt: skip
                if self._stage in stages:
                    rows.append((row, fqn))
        if not rows:
            return None
        shards: dict[tuple[int, int], Shape] = {}
        whole: Shape | None = None
        dtype = rows[0][0].dtype
        for row, fqn in rows:
            if row.dtype != dtype:
                raise TopologyError(
                    f"some ranks saved {name} as {dtype}, others as {row.dtype}",
                    remedy="save all ranks' parts in one dtype",
                )  # fmt: skip
            sharing = self._coordinates  # of the ranks that share the row's tensor
            if self._state is not None:
                ranker = self._state.ranker
                ranks = [r for r in row.geometry.ranks if self._is_here(r)]
                sharing = {(ranker.get_tp_rank(r), ranker.get_ep_rank(r)) for r in ranks}
            shape = row.geometry.shape_of(fqn)
            if self._state is None or (not row.geometry.per_rank and len(sharing) > 1):
                if sharing != self._coordinates:
                    raise TopologyError(
                        f"{name} is sharded over some of the tensor- and expert-parallel ranks, "
                        "but not over others",
                        remedy="save it on a mesh of all of them, or of one tp and ep rank each",
                    )
                whole = shape
                self._rows.setdefault(TensorKey(name), []).append((row, fqn))
                continue
            for coordinates in sharing:
                shards[coordinates] = shape
                self._rows.setdefault(TensorKey(name, *coordinates), []).append((row, fqn))
        # tensors of one name on separate meshes, and no topology says what they are
        found = [row for row, _ in self._rows.get(TensorKey(name), ())]
        known = self._catalogue.pieces
        apart = len(found) > 1 and not all(known.one_tensor(found[0], row) for row in found)
        kept = any(row.geometry.per_rank and len(row.ranks) > 1 for row in found)
        if self._state is None and (apart or kept) and len(self._coordinates) > 1:
            raise TopologyError(
                f"ranks saved tensors of their own as {name}, but the checkpoint does not record "
                "which tensor-parallel rank each belongs to",
                remedy="save with SaveOptions(parallel_state=), or export the files of single "
                "ranks",
            )
        return RankTensors(name, dtype, {} if whole is not None else shards, whole)

    def _is_here(self, rank: int) -> bool:
        """Whether a rank is of the stage."""
        if self._state is None or self._stage is None:
            return True
        return self._state.ranker.get_pp_rank(rank) == self._stage

    def refuse_unlike_replicas(self) -> None:
        """Check that ranks with the same tensor- and expert-parallel coordinates in the recorded
        topology hold the same values. It compares some elements of each kind of per-rank tensor. So
        it finds a recorded topology that was not the job's, which shapes alone do not show.

        Raises:
            TensorMismatchError: they hold different values.
        """
        seen: set[tuple[str, int, int]] = set()
        for key, rows in self._rows.items():
            kind = re.sub(r"\d+", "#", key.name), key.tp, key.ep
            if key.tp < 0 or kind in seen or not rows[0][0].geometry.per_rank:
                continue
            seen.add(kind)
            row, fqn = rows[0]
            block = _beginning(key, row.geometry.shape_of(fqn), DTYPES[row.dtype].itemsize)
            found = [s for s in self._meeting(row, fqn, block.copy) if self._is_of(s, key)]
            if found and block.copy.numel:
                sources = [found[0], *found[1:2], *found[2:][-1:]]
                data = []
                for source in sources:
                    copy = block.copy.read_from(source.piece)
                    assert copy is not None
                    itemsize = DTYPES[source.row.dtype].itemsize
                    data.append(bytearray(block.copy.numel * itemsize))
                    plan = ReadPlan()
                    plan.copies.append(StoredCopy(self._slots_of(source), copy, 0, itemsize))
                    self.read(plan, [memoryview(data[-1])])
                for source, other in zip(sources, data, strict=True):
                    if other != data[0]:
                        raise TensorMismatchError(
                            f"ranks {sources[0].holders[0]} and {source.holders[0]} are both "
                            f"(tp, ep) {block.source[1:]} in the recorded topology, but their "
                            f"{block.source.name} differ",
                            remedy="save with the job's true SaveOptions(parallel_state=) (and its "
                            "order=: Megatron counts expert-parallel before context-parallel "
                            "ranks), or export the ranks' files",
                        )

    def differs(self, name: str) -> bool:
        """Whether ranks of other coordinates hold another tensor under a name, as far as its
        beginning shows. A part of a matrix begins otherwise than the other parts."""
        held = self.held[name]
        if len(set(held.shards.values())) > 1:
            return True
        found = set()
        for coordinates, shape in held.shards.items():
            size = DTYPES[held.dtype].itemsize
            block = _beginning(TensorKey(name, *coordinates), shape, size)
            data = bytearray(block.copy.numel * size)
            self.read(self.plan([block]), [memoryview(data)])
            found.add(bytes(data))
        return len(found) > 1

    def plan(self, blocks: Sequence[Block]) -> ReadPlan:
        """Raise CorruptCheckpointError if some elements are in no file."""
        plan = ReadPlan()
        for block in blocks:
            left = block.copy.numel
            rows = self._rows[block.source]
            if not rows[0][0].geometry.explicit:
                rows = rows[:1]  # the others are copies
            for row, fqn in rows:
                sources = self._meeting(row, fqn, block.copy)
                # a per-rank tensor: take the first rank with these coordinates
                if row.geometry.per_rank:
                    sources = [s for s in sources if self._is_of(s, block.source)][:1]
                for source in sources:
                    what = f"{block.source.name} is sharded over ranks"
                    copy = cut(block, source.piece, self.url, what, "save it without FSDP")
                    if copy is not None:
                        slots, itemsize = self._slots_of(source), DTYPES[row.dtype].itemsize
                        plan.copies.append(StoredCopy(slots, copy, block.buffer, itemsize))
                        left -= copy.numel
            if left:
                raise CorruptCheckpointError(
                    f"{block.source.name}: {left} elements of a part are missing, or several "
                    "ranks with different cuts hold them",
                    remedy="use another checkpoint",
                    path=self.url,
                )
        return plan

    def read(self, plan: ReadPlan, buffers: Sequence[memoryview]) -> None:
        execute(plan.copies, buffers, threads=1)

    def close(self) -> None:
        self._catalogue.stores.close()

    def _slots_of(self, source: SavedPiece) -> list[Stored]:
        key = (id(source.row), source.holders)
        if key not in self._slots:
            self._slots[key] = self._catalogue.slots(source.row, source.holders)
        return self._slots[key]

    def _meeting(self, row: Entry, fqn: str, copy: Copy) -> list[SavedPiece]:
        """The saved pieces that may have elements of the copy."""
        shape = row.geometry.shape_of(fqn)
        try:
            steps = copy.source.steps(shape)
        except ValueError:  # the tensor is held in another shape
            box = Box.whole(shape)
        else:
            offsets = tuple(at for at, *_ in steps)
            box = Box(offsets, tuple((count - 1) * step + 1 for _, step, count, _ in steps))
        return list(self._catalogue.pieces.meeting(row, fqn, box))

    def _is_of(self, source: SavedPiece, key: TensorKey) -> bool:
        if self._state is None or key.tp < 0:
            return True
        ranker, rank = self._state.ranker, source.holders[0]
        at = ranker.get_tp_rank(rank), ranker.get_ep_rank(rank)
        return at == (key.tp, key.ep) and self._is_here(rank)


def _beginning(key: TensorKey, shape: Shape, itemsize: int) -> Block:
    """The first rows of a tensor, about 64 KiB."""
    rows = max(1, _COMPARED // max(1, math.prod(shape[1:]) * itemsize))
    part = Strided.whole((min(shape[0], rows), *shape[1:]) if shape else (0,))
    return Block(key, Copy(part, part))


class LogicalTensors:
    """Tensors of a catalogue; its files stay open until `close`.

    Plans are made by one thread, reads by several at once.
    """

    def __init__(self, catalogue: Catalogue, tensors: Mapping[str, LogicalTensor]) -> None:
        self.url = catalogue.url
        self.held: Mapping[str, RankTensors] = {
            name: RankTensors(name, t.dtype, {}, tuple(t.shape)) for name, t in tensors.items()
        }
        self._catalogue = catalogue
        self._tensors = tensors
        self._stored: dict[str, list[tuple[StoredCopy, Piece]]] = {}

    def plan(self, blocks: Sequence[Block]) -> ReadPlan:
        """
        Raises:
            TensorMismatchError, TopologyError, CorruptCheckpointError: some elements are not in the
                checkpoint, or several tensors have one name and nothing says which one is meant.
        """
        # Where the parts of tensors are in the files.
        wanted = sorted({block.source.name for block in blocks} - self._stored.keys())
        entries = []
        for name in wanted:
            tensor = self._tensors[name]
            shape = tuple(tensor.shape)
            geometry = BoxGeometry(tensor.name, shape, (Box.whole(shape),), (0,))
            entries.append(Entry((name,), tensor.dtype, geometry, (), (), (0,)))
        found = plan_logical(LoadingRank(self._catalogue, 0, (0,)), entries)
        self._stored |= {name: [] for name in wanted}
        for stored in found.copies:
            name = wanted[stored.target]
            shape = tuple(self._tensors[name].shape)
            steps = stored.copy.target.steps(shape)
            box = Box(tuple(s.at for s in steps), tuple(s.number for s in steps))
            at = stored.copy.source
            self._stored[name].append((stored, Piece(name, shape, box, at.start, at.strides)))
        plan = ReadPlan()
        for block in blocks:
            left = block.copy.numel
            for stored, piece in self._stored[block.source.name]:
                copy = block.copy.read_from(piece)
                if copy is not None:
                    left -= copy.numel
                    plan.copies.append(stored._replace(copy=copy, target=block.buffer))
            if left:
                raise CorruptCheckpointError(
                    f"{block.source.name}: {left} elements of a part are held by no rank",
                    remedy="use another checkpoint",
                    path=self.url,
                )
        return plan

    def read(self, plan: ReadPlan, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, every block of the files verified.

        Raises:
            CorruptCheckpointError: a block differs; the message names file and offset.
        """
        execute(plan.copies, buffers, threads=1)

    def close(self) -> None:
        self._catalogue.stores.close()
