"""The stages of an export, by one process or several."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from smckpt.errors import UsageError
from smckpt.translate.configs.config import ModelConfig
from smckpt.translate.exports.card import write_card
from smckpt.translate.exports.export_group import ExportGroup, shares
from smckpt.translate.exports.options import ExportOptions
from smckpt.translate.exports.sidecars import index_of
from smckpt.translate.models.comparison import Comparison
from smckpt.translate.models.contents import ExportContents
from smckpt.translate.writing.cast import NonFinite, refuse_nonfinite
from smckpt.translate.writing.files import Output
from smckpt.translate.writing.stream import write_chunks
from smckpt.translate.writing.targets import OutputFile

__all__ = ["Planned", "Stages"]

Body = dict[str, Any]


@dataclass(frozen=True)
class Planned:
    """The files to write and their directory. sidecars: writes the files beside the weights, given
    the model's class where the config names none and it is known. settings: the model's config."""

    found: ExportContents
    files: Sequence[OutputFile]
    output: Output
    sidecars: Callable[[str | None], None]
    settings: ModelConfig | None = None


@dataclass
class Stages:
    """One process's part in an export: `plan`, then `write`. After each, the first process
    decides."""

    group: ExportGroup
    comparison: Comparison
    options: ExportOptions
    nonfinite: NonFinite = field(default_factory=NonFinite)
    planned: Planned | None = None
    notes: list[str] = field(default_factory=list)

    def plan(self, make: Callable[[], Planned]) -> Body:
        planned = self.planned = make()
        text = hashlib.sha256(planned.found.identity.encode())
        if self.group.count > 1:
            for file in planned.files:
                text.update(file.name.encode() + file.header)
        return {"plan": text.hexdigest()}

    def prepare(self, bodies: dict[int, Body]) -> Body:
        """On the first process: check that all have the same plan and that it fits the model; then
        prepare the directory."""
        planned = self.made
        if len({body["plan"] for body in bodies.values()}) > 1:
            raise UsageError(
                "the processes have different plans",
                remedy="pass the same arguments on all processes, and a checkpoint that no run "
                "replaces "
                "meanwhile",
                path=planned.output.url,
            )
        own = [t for t in planned.found.targets if t.name not in planned.found.further]
        self.comparison.tell(own, planned.found.source.url)
        self.comparison.check()
        if self.options.overwrite:  # only when the new files are known to be a model
            self.notes += self._compared()
        kind, note = self.comparison.unnamed_class(own, planned.found.source.url)
        self.notes += [note] if note else []
        planned.output.prepare(overwrite=self.options.overwrite)
        # First, because a single file of weights can be loaded as soon as the object appears.
        planned.sidecars(kind)
        return {}

    def write(self) -> Body:
        """Write this process's share of the files."""
        planned, group = self.made, self.group
        total = sum(file.data_bytes for file in planned.files)
        tell = self.options.progress
        if tell is not None and group.leads:
            group.tell = lambda done: tell(done, total)
        numbers = shares([file.size for file in planned.files], group.count)[group.member]
        mine = [planned.files[number] for number in numbers]
        write_chunks(
            planned.found.source,
            planned.output,
            mine,
            self.options.workers,
            self._meanwhile,
            self.nonfinite.look,
        )
        checksums = {file.name: planned.output.checksum_of(file) for file in mine}
        return {"nonfinite": self.nonfinite.counts, "checksums": checksums}

    def publish(self, bodies: dict[int, Body]) -> Body:
        """On the first process: check that everything is there, and make it loadable."""
        output, files = self.made.output, self.made.files
        if self.group.count > 1:
            output.refuse_absent()
            total = sum(file.data_bytes for file in files)
            if self.options.progress is not None:
                self.options.progress(total, total)
        if not self.options.overwrite:
            self.notes += self._compared()
        counts = {n: c for body in bodies.values() for n, c in body["nonfinite"].items()}
        self.notes += refuse_nonfinite(
            counts, self.options.allow_nonfinite, output.url, "use an earlier checkpoint"
        )
        if self.options.card:
            sums = {n: c for body in bodies.values() for n, c in body["checksums"].items()}
            self.notes += write_card(output, self.made.found, self.made.settings, files, sums)
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
        self.group.beat(done)
