"""The stages of an export, whether one process carries it out or several."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from smckpt.errors import UsageError
from smckpt.translate.companions import index_of
from smckpt.translate.crew import Crew, shares
from smckpt.translate.files import Output
from smckpt.translate.finite import NonFinite, refuse_nonfinite
from smckpt.translate.lora import LoraConfig
from smckpt.translate.merged import MergedSource
from smckpt.translate.meta_model import Comparison
from smckpt.translate.source import Source
from smckpt.translate.stream import write_chunks
from smckpt.translate.targets import OutputFile, Target
from smckpt.translate.translated import TranslatedSource

__all__ = ["Contents", "Planned", "Run"]

Body = dict[str, Any]


@dataclass(frozen=True)
class Contents:
    """What is read, the targets made of it, names left out, notes, the layout if translated, the
    adapter's config if it is one, the commit that is read; of a translation, how many rows of the
    vocabulary are written, and how many are stored."""

    source: Source | TranslatedSource | MergedSource
    targets: Sequence[Target]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    layout: str | None = None
    adapter: LoraConfig | None = None
    identity: str = ""
    vocabulary: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Planned:
    """What is written, and where. companions: writes what stands beside the weights."""

    found: Contents
    files: Sequence[OutputFile]
    output: Output
    companions: Callable[[], None]


@dataclass
class Run:
    """One process's part: `plan` and then `write` on each, after each a word of the first's."""

    crew: Crew
    comparison: Comparison
    overwrite: bool
    allow_nonfinite: bool
    threads: int
    progress: Callable[[int, int], None] | None
    nonfinite: NonFinite = field(default_factory=NonFinite)
    planned: Planned | None = None
    notes: list[str] = field(default_factory=list)

    def plan(self, make: Callable[[], Planned]) -> Body:
        planned = self.planned = make()
        text = hashlib.sha256(planned.found.identity.encode())
        if self.crew.count > 1:
            for file in planned.files:
                text.update(file.name.encode() + file.header)
        return {"plan": text.hexdigest()}

    def prepare(self, bodies: dict[int, Body]) -> Body:
        """The first's: all have one plan, and it is that of the model; then the directory."""
        planned = self.made
        if len({body["plan"] for body in bodies.values()}) > 1:
            raise UsageError(
                "the processes would export different things",
                remedy="give all the same arguments, and a checkpoint that no run replaces "
                "meanwhile",
                path=planned.output.url,
            )
        shapes = {target.name: tuple(target.shape) for target in planned.found.targets}
        self.comparison.tell(shapes, planned.found.source.url)
        self.comparison.check()
        if self.overwrite:  # not before it is certain that the new one is a model
            self.notes += self._compared()
        planned.output.prepare(overwrite=self.overwrite)
        # First: an object appears when it is whole, so a single file of weights loads from then on.
        planned.companions()
        return {}

    def write(self) -> Body:
        """This process's share of the files."""
        planned, crew = self.made, self.crew
        total = sum(file.data_bytes for file in planned.files)
        if self.progress is not None and crew.leads:
            tell = self.progress
            crew.tell = lambda done: tell(done, total)
        numbers = shares([file.size for file in planned.files], crew.count)[crew.member]
        mine = [planned.files[number] for number in numbers]
        write_chunks(
            planned.found.source,
            planned.output,
            mine,
            self.threads,
            self._meanwhile,
            self.nonfinite.look,
        )
        return {"nonfinite": self.nonfinite.counts}

    def publish(self, bodies: dict[int, Body]) -> Body:
        """The first's: all is there, and fit to be loaded."""
        output, files = self.made.output, self.made.files
        if self.crew.count > 1:
            output.refuse_absent()
            total = sum(file.data_bytes for file in files)
            if self.progress is not None:
                self.progress(total, total)
        if not self.overwrite:
            self.notes += self._compared()
        counts = {n: c for body in bodies.values() for n, c in body["nonfinite"].items()}
        self.notes += refuse_nonfinite(
            counts, self.allow_nonfinite, output.url, "use a checkpoint before that"
        )
        output.publish(index_of(files) if len(files) > 1 else None)
        return {"nonfinite": counts, "notes": self.notes}

    def abandon(self) -> None:
        if self.planned is not None:
            self.planned.output.abandon()

    def close(self) -> None:
        if self.planned is not None:
            self.planned.output.close()
            self.planned.found.source.close()

    @property
    def made(self) -> Planned:
        assert self.planned is not None
        return self.planned

    def _compared(self) -> list[str]:
        note = self.comparison.finish()
        return [note] if note else []

    def _meanwhile(self, done: int, _: int) -> None:
        self.comparison.check()
        self.crew.beat(done)
