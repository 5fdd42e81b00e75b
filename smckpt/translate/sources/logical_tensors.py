"""A checkpoint's tensors by name, whole, from whatever mesh they were saved on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from smckpt.checkpoint.reading.catalogue import Catalogue, LogicalTensor
from smckpt.checkpoint.reading.plan import plan_logical
from smckpt.checkpoint.reading.read import Readers, ReadPlan, StoredCopy, execute
from smckpt.errors import CorruptCheckpointError
from smckpt.layout.entries import Entry
from smckpt.layout.geometry import BoxGeometry
from smckpt.layout.strided import Box, Piece
from smckpt.translate.tables.compile import Block
from smckpt.translate.tables.pieces import RankTensors

__all__ = ["LogicalTensors"]


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
        self._readers = Readers(catalogue.readers.access)
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
        found = plan_logical(self._catalogue, entries, rank=0, group_ranks=(0,), strict=False)
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
        execute(plan, buffers, self._readers, threads=1)

    def close(self) -> None:
        self._readers.close()
