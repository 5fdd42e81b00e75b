"""What a checkpoint holds, by key and rank and by logical name, whoever wrote it.

A load, a comparison and a translation ask a `Catalogue`. `committed` answers for a commit of ours;
readers of other systems' checkpoints (`readers`) for theirs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from smckpt.checkpoint.reading.blocks import Readers, SavedFile
from smckpt.checkpoint.reading.sources import SavedPiece, SavedPieces
from smckpt.checkpoint.records.headers import StoredSlot
from smckpt.checkpoint.records.objects import decode_object
from smckpt.decoding import SENSELESS
from smckpt.errors import CheckpointError, CorruptCheckpointError
from smckpt.layout.containers import made_again
from smckpt.layout.entries import Entry, Path
from smckpt.layout.mesh import Shape

__all__ = ["Catalogue", "LogicalTensor", "SavedFile", "SavedPiece", "Stored"]

Stored = tuple[SavedFile, StoredSlot]  # a part of a rank's array, and the file that has it


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor by its logical name; `shape` is the global one."""

    name: str
    path: Path
    dtype: str
    shape: Shape


class Catalogue(ABC):
    """What one checkpoint holds. Thread-safe.

    A load asks for `identity`, then for names and boxes (`kind`, `object_ranks`, `rows` and what
    follows from them) and the values (`objects`, `optimizers_of`). It calls `read_headers` for the
    ranks from which it will read, and `slots` for each array. `readers` reads the bytes of those;
    who opened the catalogue closes them.

    url: where it is.
    """

    url: str

    @property
    @abstractmethod
    def identity(self) -> str:
        """Tells it from others in the same directory. It is the same for all groups of a step."""

    @property
    def name(self) -> str | None:
        """The file by which a peer finds it without a list, if there is one."""
        return None

    @property
    @abstractmethod
    def ours(self) -> bool:
        """Whether smckpt wrote it. Only then it records a step."""

    @property
    @abstractmethod
    def step(self) -> int | None: ...

    @property
    def kind(self) -> str | None:
        """The kind of state; SHARDED where names are those of whole tensors."""
        return "SHARDED"

    @property
    def above(self) -> str:
        """The directory from which all groups of the step can be opened."""
        return self.url

    @property
    def single_group(self) -> bool:
        return True

    @property
    def whole(self) -> bool:
        """Whether all groups of the step are here, and not one group of several."""
        return True

    @property
    def topology(self) -> dict[str, Any] | None:
        """The coordinates of the ranks that saved it, if they were recorded."""
        return None

    @property
    def metadata(self) -> dict[str, Any]:
        """What the caller of the save gave."""
        return {}

    # -- tensors -------------------------------------------------------------------------------

    @property
    @abstractmethod
    def rows(self) -> tuple[Entry, ...]:
        """The saved arrays: key, dtype and geometry, and the ranks that hold them."""

    @property
    @abstractmethod
    def pieces(self) -> SavedPieces:
        """The rows by logical name, and the boxes that ranks hold according to them."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Of all data files. No tensor has more, if all groups are here."""

    @property
    @abstractmethod
    def readers(self) -> Readers:
        """The readers of its files, with the checksums and connections that they already have."""

    @abstractmethod
    def read_headers(self, ranks: Iterable[int]) -> None:
        """Read what `slots` needs of these ranks, several files at a time.

        Raises:
            CorruptCheckpointError: a file is damaged, missing, or has another size.
        """

    @abstractmethod
    def slots(self, row: Entry, holders: Sequence[int]) -> list[Stored]:
        """Where the array of `row` that `holders` share is stored, in the order of its bytes.

        Raises:
            CorruptCheckpointError: some elements are in no file.
        """

    @cached_property
    def rows_by_key(self) -> dict[str, list[Entry]]:
        found: dict[str, list[Entry]] = {}
        for row in self.rows:
            found.setdefault(row.key, []).append(row)
        return found

    @cached_property
    def logical(self) -> dict[str, LogicalTensor]:
        """All tensors by logical name."""
        out = {}
        for name, rows in self.pieces.by_name.items():
            row, fqn = rows[0]
            out[name] = LogicalTensor(
                name, row.logical_path(fqn), row.dtype, row.geometry.shape_of(fqn)
            )
        return out

    def sources(self, name: str) -> list[SavedPiece]:
        """The saved pieces of a logical tensor, one for each distinct shard coordinate.

        A row of a per-rank tensor has one for each rank.
        """
        return self.pieces.all(name)

    def held_empty(self, name: str) -> bool:
        """Whether one of the ranks that share a tensor holds none of its elements."""
        rows = [row for row, _ in self.pieces.by_name[name]]
        return any(0 in row.geometry.local_shape(rank) for row in rows for rank in row.ranks)

    def holders(self, row: Entry) -> list[tuple[int, ...]]:
        """For each distinct array of this row: the ranks that hold it."""
        return list(self.pieces.holders(row).values())

    # -- values that are not tensors -----------------------------------------------------------

    @property
    @abstractmethod
    def containers(self) -> dict[Path, str] | None:
        """Path → kind, for each container above tensors that is not a dict; None if an older writer
        recorded no kinds."""

    @property
    @abstractmethod
    def object_ranks(self) -> tuple[int, ...]:
        """The ranks that saved values, in order."""

    @abstractmethod
    def part(self, rank: int) -> dict[str, Any]:
        """What a rank saved beside its tensors, as it is written: "objects" and "optimizers".

        Raises:
            CorruptCheckpointError: it is missing, or differs from what was written.
        """

    @abstractmethod
    def part_url(self, rank: int) -> str:
        """The file of that, for errors."""

    @property
    def optimizers(self) -> dict[str, Any]:
        """Path → the names of its parameters, of each optimizer's state."""
        return {}

    def optimizers_of(self, rank: int) -> dict[str, Any]:
        """The same, as saved rank `rank` has it. Ranks may number other parameters under one path:
        pipeline stages do, and `optimizers` has those of the lowest rank."""
        if len(self.object_ranks) == 1:
            return self.optimizers
        part = self.part(rank)
        owner = part.get("layout", {}).get("rank", rank)  # whose tables it has, if not its own
        found: dict[str, Any] = (part if owner == rank else self.part(owner))["optimizers"]
        return found

    def objects(self, rank: int, *, unmade: bool = False) -> dict[str, tuple[Path, Any]]:
        """The values of saved rank `rank` that are not tensors: key → (path, value).

        Args:
            unmade: give an `Unmade` for a value of a class that is not registered, and not a name,
                tuple or dict in its place.

        Raises:
            CorruptCheckpointError: a value breaks the format.
            StateError: a value has a type that is not allowed here.
        """
        try:
            return {
                key: (tuple(leaf["path"]), value if unmade else made_again(value))
                for key, leaf in self.part(rank)["objects"].items()
                for value in [decode_object(leaf["value"])]
            }
        except CheckpointError as error:
            error.path = error.path or self.part_url(rank)
            raise
        except SENSELESS as error:
            raise CorruptCheckpointError(
                f"the values beside the tensors cannot be decoded: {type(error).__name__} {error}",
                remedy="use an older checkpoint",
                path=self.part_url(rank),
            ) from error

    def refuse_unread(self, left_out: Callable[[str], bool]) -> None:  # noqa: B027 (most have none)
        """
        Raises:
            StateError: the checkpoint has values that no reader of plain data can give; the message
                names them. Those that are left out do not count.
        """
