"""Saves and loads over time, from the JSON lines of `smckpt.integrations.telemetry.JsonLines`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from smckpt.errors import UsageError

__all__ = ["Timeline", "read_timeline"]

RANKS = 64  # of one save; the page has those that took longest
EVENTS = 2000  # saves and loads; the page has the newest
_LINE = 1 << 20  # characters; no line of ours is longer
_STAGES = {
    "save": ("waited", "blocked", "staged", "written", "committed"),
    "load": ("chosen", "planned", "read", "ended"),
}


@dataclass
class _Event:
    """One save or load of several ranks. rows: of a rank each, see `_row`."""

    kind: str
    queue: str
    step: int | None
    directory: str
    at: int | None
    rows: dict[int, list[Any]] = field(default_factory=dict)
    error: str | None = None
    alarms: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        rows = sorted(self.rows.values(), key=lambda row: max(row[3:-1]), reverse=True)
        return {
            "kind": self.kind,
            "queue": self.queue,
            "step": self.step,
            "directory": self.directory,
            "at": self.at,
            "error": self.error,
            "alarms": self.alarms[:20],
            "begin": min(row[2] for row in rows),
            "bytes": sum(row[-1] for row in rows),
            "of": len(rows),
            "ranks": rows[:RANKS],
        }


@dataclass(frozen=True)
class Timeline:
    """events: oldest first. left: how many older ones are not among them. unreadable: lines that
    are not of our sink, or are cut."""

    events: list[dict[str, Any]]
    left: int
    unreadable: int


def read_timeline(paths: Iterable[str], step_of: Callable[[str], int | None]) -> Timeline:
    """Read the files that `JsonLines` wrote, of any ranks, in any order.

    Args:
        place: a directory → the number of the step that the page shows for it, or None.

    Raises:
        UsageError: a file cannot be read, or none of its lines is of our sink.
    """
    lines: list[dict[str, Any]] = []
    unreadable = 0
    for path in paths:
        ours = 0
        for line in _lines(path):
            record = _record_of(line)
            if record is None:
                unreadable += 1
            else:
                lines.append(record)
                ours += 1
        if not ours:
            raise UsageError(
                "no line of this file is a save or a load",
                remedy="pass a file of smckpt.integrations.telemetry.JsonLines",
                path=path,
            )
    lines.sort(key=lambda record: record["time"])
    events = _joined(lines, step_of)
    return Timeline(
        [one.to_json() for one in events[-EVENTS:]], max(len(events) - EVENTS, 0), unreadable
    )


def _lines(path: str) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            while line := file.readline(_LINE):
                if line.strip():
                    yield line
    except OSError as error:
        raise UsageError(
            f"the telemetry cannot be read: {error.strerror}", remedy="check the path", path=path
        ) from error


def _record_of(line: str) -> dict[str, Any] | None:
    """A line's event, or None. Anybody may have written to the file."""
    try:
        record = json.loads(line)
        stages = _STAGES[record["kind"]]
        seconds = [float(record[key]) for key in (*stages, "time")]
        sensible = (
            all(math.isfinite(value) and 0 <= value < 1e11 for value in seconds)
            and all(type(record[key]) is int and 0 <= record[key] < 1 << 53 for key in _COUNTS)
            and all(isinstance(record[key], str) for key in ("host", "directory", "outcome"))
            and (record["step"] is None or type(record["step"]) is int)
        )
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return record if sensible else None


_COUNTS = ("rank", "nbytes")


def _joined(lines: Iterable[dict[str, Any]], step_of: Callable[[str], int | None]) -> list[_Event]:
    """The lines of one save by all ranks together. A rank tells of a save once: a second line of
    the same rank is the next save, even if a restarted job numbers it alike."""
    events: list[_Event] = []
    current: dict[Any, _Event] = {}
    for record in lines:
        at = step_of(record["directory"])
        where = record["directory"] if at is None and record["kind"] == "load" else at
        queue = str(record.get("queue", ""))
        key = (record["kind"], queue, record.get("number"), record["step"], where)
        event = current.get(repr(key))
        if event is None or record["rank"] in event.rows:
            event = _Event(record["kind"], queue, record["step"], record["directory"], at)
            current[repr(key)] = event
            events.append(event)
        event.rows[record["rank"]] = _row(record)
        if record["outcome"] not in ("committed", "loaded"):
            event.error = event.error or str(record.get("error") or record["outcome"])[:2000]
        alarms = record.get("alarms")
        for alarm in alarms if isinstance(alarms, list) else ():
            if str(alarm) not in event.alarms:
                event.alarms.append(str(alarm)[:500])
    return events


def _row(record: dict[str, Any]) -> list[Any]:
    """[rank, host, begin (ms since 1970), the stages (seconds from there), bytes]. The sink writes
    the line when the save has ended, and all stages but "blocked" count from the end of the wait
    for the save before it."""
    stages = [float(record[key]) for key in _STAGES[record["kind"]]]
    if record["kind"] == "save":
        waited, blocked, *rest = stages
        stages = [waited, blocked, *(waited + value if value else 0.0 for value in rest)]
    begin = record["time"] - max(stages)
    rounded = [round(value, 4) for value in stages]
    return [record["rank"], record["host"], round(begin * 1000), *rounded, record["nbytes"]]
