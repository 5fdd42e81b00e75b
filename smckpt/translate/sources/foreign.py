"""A checkpoint that others wrote: its tensors by name, whichever format it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from smckpt.checkpoint.reading.catalogue import LogicalTensor
from smckpt.layout.entries import Path
from smckpt.translate.archives.source_files import ArchiveRecord, SourceFiles
from smckpt.translate.sources.boxes import BoxTensors, SavedTensor
from smckpt.translate.sources.source_facts import SourceFacts
from smckpt.translate.tables.names import places_of_optimizers
from smckpt.translate.tables.pieces import TensorKey

__all__ = ["ForeignCheckpoint", "SavedValue"]


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
