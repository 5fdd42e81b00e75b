"""The facts of `smckpt browse`, as compact JSON: what steps have in common is there once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smckpt._version import __version__
from smckpt.checkpoint.upkeep.scan import scan
from smckpt.cli.output import bytes_text, visible
from smckpt.cli.statistics import Elements, Statistics, Sums
from smckpt.errors import CheckpointError, CorruptCheckpointError
from smckpt.manager.doctor import Condition, mend_remedy

if TYPE_CHECKING:
    from smckpt.checkpoint.reading.committed import CommittedCatalogue
    from smckpt.checkpoint.upkeep.scan import Sink
    from smckpt.storage import Storage


LIMIT = 32 << 20  # characters of the details on a page; a browser reads them in a second or two
VALUES = 200  # values beside the tensors of one step
PROBLEMS = 100  # of one verification
_EXACT = 1 << 53  # JavaScript's numbers are doubles


@dataclass
class Facts:
    """The facts of one page. `add_step` takes steps from the newest to the oldest; the details of
    those that would make the page larger than `limit` are left out, and the page says so.

    What a page shows beyond records and manifests reads data:
    verify: "full" (every byte), "quick" (no data) or None.
    histograms: the tensors that get a histogram, as for `smckpt show --tensors`; None: none.
    histogram_steps: so many of a run's newest whole steps get histograms.

    rows: the distinct tensors, [name, dtype, shape, bytes, held]. shared: other distinct values.
    """

    root: Storage
    verify: str | None = None
    histograms: str | None = None
    histogram_steps: int = 1
    limit: int = LIMIT
    steps: list[dict[str, Any]] = field(default_factory=list)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    _rows: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _shared: dict[str, int] = field(default_factory=dict)
    _used: int = 0
    _without: int = 0

    def add_step(
        self,
        condition: Condition,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Add a step: its condition and, if it is committed and can be read, its details."""
        name = condition.place.rpartition("/")[0]
        run = self.runs.setdefault(name, {"steps": [], "restorable": None, "whole": 0})
        step: dict[str, Any] = {
            **condition.to_json(),
            "committed_at": _milliseconds(condition.committed_at),
        }
        run["steps"].append(len(self.steps))
        first: list[Statistics] = []  # of the pass over the files that verifies, if there is one

        def beside(catalogue: CommittedCatalogue) -> Sequence[Sink]:
            if condition.state in ("whole", "cut") and self._counts(run):
                first.append(self._statistics(catalogue))
            return first

        if self.verify and condition.state in ("whole", "cut", "damaged"):
            step["verified"] = verdict = self._verified(condition, progress, beside)
            if condition.state == "whole" and not verdict["ok"]:
                path, what, _ = verdict["problems"][0]
                remedy = mend_remedy(self.root.at(condition.url))
                step |= {"state": "damaged", "why": f"{path}: {what}", "remedy": remedy}
        if condition.state in ("whole", "cut"):
            self._read(condition.url, step, run, first)
        if step["state"] == "whole" and "unreadable" not in step:
            run["whole"] += 1
            if run["restorable"] is None:
                run["restorable"] = len(self.steps)
        self.steps.append(step)

    def _read(
        self, url: str, step: dict[str, Any], run: dict[str, Any], counted: Sequence[Statistics]
    ) -> None:
        from smckpt.checkpoint.reading.committed import open_catalogue
        from smckpt.cli.show import describe
        from smckpt.manager.record import run_in

        try:
            catalogue = open_catalogue(self.root.at(url))
            facts = describe(catalogue, None)
            details = self._details(facts, [m.attempt for m in catalogue.manifests])
            rows = [_row(tensor) for tensor in facts["tensors"]]
        except CheckpointError as error:  # damaged, or swept meanwhile
            step["unreadable"] = str(error)
            if isinstance(error, CorruptCheckpointError):
                step |= {"state": "damaged", "why": error.message, "remedy": error.remedy}
            return
        if "history" not in run:
            run["history"] = run_in(facts["metadata"])
        if not self._add(step, details, rows):
            return
        if self._counts(run):
            if not counted or counted[0].catalogue.identity != catalogue.identity:
                counted = [self._statistics(catalogue)]
                scan(catalogue.files, [counted[0]])
            step["histograms"] = found = {}  # by the number of the tensor's row
            counts = histograms(counted[0])
            for tensor in facts["tensors"]:
                if tensor["name"] in counts and self._used <= self.limit:
                    found[str(self._rows[_row(tensor)])] = histogram = counts[tensor["name"]]
                    self._used += len(_text(histogram))

    def _counts(self, run: dict[str, Any]) -> bool:
        """Whether the next step of a run gets histograms."""
        return self.histograms is not None and run["whole"] < self.histogram_steps

    def _statistics(self, catalogue: CommittedCatalogue) -> Statistics:
        from smckpt.cli.show import picked

        names = [name for name in catalogue.logical if picked(name, self.histograms)]
        return Statistics(catalogue, names, KEPT)

    def _details(self, facts: dict[str, Any], attempts: Sequence[str]) -> dict[str, Any]:
        """What `show` tells, with the values that steps may share under "shared"."""
        group_of = {rank: number for number, ranks in enumerate(facts["groups"]) for rank in ranks}
        values = facts["objects"]["values"]
        return {
            **{key: facts[key] for key in ("kind", "identity", "metadata")},
            "attempts": list(attempts),
            "values": dict(list(values.items())[:VALUES]),
            "values_of": facts["objects"]["rank"],
            "values_left": max(len(values) - VALUES, 0),
            "shared": {
                **{key: facts[key] for key in ("topology", "versions", "format", "optimizers")},
                "groups": facts["groups"],
                "writers": [
                    [
                        writer["rank"],
                        writer["host"],
                        writer["directory"],
                        group_of[writer["rank"]],
                        [file["bytes"] for file in writer["files"]],
                    ]
                    for writer in facts["writers"]
                ],
            },
        }

    def _add(
        self, step: dict[str, Any], details: dict[str, Any], rows: Sequence[tuple[Any, ...]]
    ) -> bool:
        """Add the details to a step; False if the page would become too large."""
        shared = {key: _text(value) for key, value in details.pop("shared").items()}
        new = [row for row in rows if row not in self._rows]
        cost = len(_text(details)) + len(_text(new))
        cost += sum(len(text) for text in set(shared.values()) if text not in self._shared)
        if self._used + cost > self.limit:
            self._without += 1
            step["left_out"] = True
            return False
        self._used += cost
        for row in new:
            self._rows.setdefault(row, len(self._rows))
        table = _text(_stretches(self._rows[row] for row in rows))
        step.update(details)
        step["shared"] = {
            key: self._shared.setdefault(text, len(self._shared))
            for key, text in {**shared, "tensors": table}.items()
        }
        return True

    def _verified(
        self,
        condition: Condition,
        progress: Callable[[int, int], None] | None,
        beside: Callable[[CommittedCatalogue], Sequence[Sink]],
    ) -> dict[str, Any]:
        from smckpt.checkpoint.upkeep.verify import verify_storage

        directory, quick = self.root.at(condition.url), self.verify == "quick"
        url, bar = directory.url, None if quick else progress
        try:
            report = verify_storage(directory, url, progress=bar, quick=quick, beside=beside)
        except CheckpointError as error:
            return {"ok": False, "quick": quick, "problems": [[url, str(error), None]], "of": 1}
        problems = [[one.path, one.what, one.offset] for one in report.problems[:PROBLEMS]]
        return {
            "ok": report.ok,
            "quick": quick,
            "problems": problems,
            "of": len(report.problems),
            "files": report.files,
            "tensors": report.tensors,
            "bytes": report.nbytes,
        }

    def to_json(self) -> dict[str, Any]:
        """All facts, as values that JSON and JavaScript hold exactly, without characters that are
        invisible or change the direction of text."""
        notes = []
        if self._without:
            notes.append(
                f"The details of {self._without} older steps are left out, because the page would "
                f"hold more than {bytes_text(self.limit)}. Browse a run or a step by itself."
            )
        facts: dict[str, Any] = plain(
            {
                "root": self.root.url,
                "made_at": _milliseconds(time.time_ns()),
                "version": __version__,
                "verify": self.verify,
                "runs": [{"name": name, **run} for name, run in self.runs.items()],
                "steps": self.steps,
                "rows": list(self._rows),
                "shared": [json.loads(text) for text in self._shared],
                "notes": notes,
            }
        )
        return facts


def _row(tensor: dict[str, Any]) -> tuple[Any, ...]:
    shape = tuple(tensor["shape"])
    return tensor["name"], tensor["dtype"], shape, tensor["bytes"], tensor["held"]


def _milliseconds(nanoseconds: int) -> int:
    return nanoseconds // 10**6


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _stretches(numbers: Iterable[int]) -> list[list[int]]:
    """[first, count] of each stretch of neighbours: those of all steps are mostly one stretch."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == sum(found[-1]):
            found[-1][1] += 1
        else:
            found.append([number, 1])
    return found


def plain(value: Any) -> Any:
    """A copy that JSON and JavaScript hold exactly, with the characters of text made visible."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {visible(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if -_EXACT < value < _EXACT else str(value)
    return value if value == value and abs(value) != float("inf") else str(value)


BINS = 32
KEPT = 64 << 20  # bytes of tensors that stay in memory between the two passes


def histograms(first: Statistics) -> dict[str, dict[str, Any]]:
    """Of each tensor that was counted: the statistics, the zeros, and how many of its finite
    elements are in each of `BINS` bins of equal width from min to max; or "error".

    Tensors that `first` has not kept are read a second time.
    """
    found: dict[str, dict[str, Any]] = {}
    sums: dict[str, Sums] = {}
    for name in first.names:
        try:
            one = first.of(name)
        except CheckpointError as error:
            found[name] = {"error": str(error)}
            continue
        assert one is not None
        found[name] = {**one.to_json(), "zeros": one.zeros}
        if one.count:
            sums[name] = one
    again = {name: one for name, one in sums.items() if name not in first.kept}
    bins = _Bins(first.catalogue, again)
    if again:
        scan(first.catalogue.files, [bins])
    for name, one in sums.items():
        counts = sum(_counts(values, one) for values in first.kept.get(name, ()))
        if name in bins.faults:
            found[name] = {"error": str(bins.faults[name])}
        else:
            found[name]["counts"] = (bins.counts[name] if name in again else counts).tolist()
    return found


class _Bins(Elements):
    """Counts the elements in each bin."""

    def __init__(self, catalogue: CommittedCatalogue, sums: dict[str, Sums]) -> None:
        super().__init__(catalogue, sums)
        self.counts: dict[str, Any] = dict.fromkeys(sums, 0)
        self._of = sums
        self._lock = threading.Lock()

    def add(self, name: str, at: tuple[str, int], values: Any) -> None:
        counts = _counts(values, self._of[name])
        with self._lock:
            self.counts[name] = self.counts[name] + counts


def _counts(values: Any, sums: Sums) -> Any:
    import numpy as np

    values = values.astype(np.float64)
    # in parts of the width, which do not overflow for float64's whole range
    low, width = sums.least / 2, sums.most / 2 - sums.least / 2
    part = (values[np.isfinite(values)] / 2 - low) / (width or 1.0)
    return np.bincount(np.minimum((part * BINS).astype(np.int64), BINS - 1), minlength=BINS)
