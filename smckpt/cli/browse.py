"""`smckpt browse`: one static page about all checkpoints below a root, with saves and loads over
time from the JSON lines of `smckpt.integrations.telemetry.JsonLines`."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any

import click

from smckpt.cli.output import bytes_text, print_line, progress_bar
from smckpt.errors import CheckpointError, CheckpointNotFoundError, UsageError, count_text

if TYPE_CHECKING:
    from smckpt.cli.browse_facts import Facts
    from smckpt.storage.disk.directory import Directory


RANKS = 64  # of one save; the page has those that took longest
EVENTS = 2000  # saves and loads; the page has the newest
_LINE = 1 << 20  # characters; no line of ours is longer
_STAGES = {
    "save": ("waited", "blocked", "staged", "written", "committed"),
    "load": ("chosen", "planned", "read", "ended"),
}


@click.command()
@click.argument("root")
@click.option("--out", default="smckpt-browse.html", show_default=True, metavar="FILE.html",
              help="The page. A page that is there is replaced.")  # fmt: skip
@click.option("--verify", is_flag=True, help="Compare every byte with its checksum.")
@click.option("--quick", is_flag=True, help="Verify names, sizes and headers; read no data.")
@click.option("--histograms", is_flag=False, flag_value="*", metavar="[PATTERN]",
              help="Read the tensors (these only: a glob, or a part of the name) of each run's "
              "newest whole step, and draw their histograms.")  # fmt: skip
@click.option("--histogram-steps", type=click.IntRange(1), metavar="N",
              help="With --histograms: of the newest N whole steps.")  # fmt: skip
@click.option("--telemetry", multiple=True, metavar="FILE",
              help="A file of the sink JsonLines: when saves began and ended. May be "
              "repeated.")  # fmt: skip
def browse(
    root: str,
    out: str,
    verify: bool,
    quick: bool,
    histograms: str | None,
    histogram_steps: int | None,
    telemetry: tuple[str, ...],
) -> None:
    """Write one HTML page about the checkpoints in and below ROOT, on disk or in S3: runs, steps,
    topology, who wrote what, tensors.

    The page needs no server and no other file. It is made from records, manifests and the sizes of
    files; --verify and --histograms also read data.
    """
    if histogram_steps is not None and histograms is None:
        raise click.UsageError("--histogram-steps goes with --histograms")
    from smckpt.checkpoint.commits.discover import refuse_absent
    from smckpt.cli.browse_facts import Facts
    from smckpt.manager.doctor import examine
    from smckpt.storage import open_storage

    level = "quick" if quick else "full" if verify else None
    top = open_storage(root)
    refuse_absent(top)
    facts = Facts(top, level, histograms, histogram_steps or 1)
    conditions = examine(top)
    if not conditions:
        raise CheckpointNotFoundError(
            "no checkpoint is here or below",
            remedy="pass the directory of a run, or one above (`smckpt ls` looks there too)",
            path=root,
        )
    for condition in conditions:
        title = f"step {condition.place or '.'}"
        with progress_bar(title, quiet=level != "full") as progress:
            facts.add_step(condition, progress)
    report = facts.to_json()
    report["telemetry"] = _telemetry(telemetry, facts) if telemetry else None
    page = page_of(report)
    write_page(out, page)
    runs = "" if len(facts.runs) == 1 else f" of {count_text(len(facts.runs), 'run')}"
    size = bytes_text(len(page))
    print_line(f"{out}: {count_text(len(facts.steps), 'step')}{runs}, {size}")
    for note in report["notes"]:
        print_line(note)


def _telemetry(files: tuple[str, ...], facts: Facts) -> dict[str, Any]:
    from smckpt.cli.browse_facts import plain
    from smckpt.storage.urls import join_url, normal_url, scheme_of

    answers = {
        (place if scheme_of(place) else join_url(facts.root.url, place)).rstrip("/"): number
        for number, place in enumerate(step["place"] for step in facts.steps)
    }

    def step_number(directory: str) -> int | None:
        """The step whose directory this is, or is above: a group's is below its step's."""
        try:
            at = normal_url(directory).rstrip("/")
        except CheckpointError:  # the file may hold anything
            return None
        while at:
            if at in answers:
                return answers[at]
            at = at.rpartition("/")[0]
        return answers.get("")

    found = read_timeline(files, step_number)
    return {**found, "events": plain(found["events"])}


def page_of(facts: dict[str, Any]) -> bytes:
    """The page: the template with the facts in it.

    Names and values of a checkpoint may contain anything. As JSON in a data block they hold no "<",
    so they cannot end it. The script puts them into the page as text. And the page's policy lets a
    browser run this script only, and load nothing.
    """
    template = resources.files("smckpt.cli").joinpath("page.html").read_text(encoding="utf-8")
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'"
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", template, re.S)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        policy += f"; {rule} 'sha256-{digest}'"
    data = json.dumps(facts, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for letter in "<>&":
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    head, between, tail = re.split(r"@POLICY@|@FACTS@", template)
    return (head + policy + between + data + tail).encode()


_PAGE_BEGINS = b"<!doctype html>"


def write_page(path: str, page: bytes) -> None:
    """Replace the file in one step, so that a browser never reads half a page. Both names are of
    one open directory, whatever gets its name meanwhile."""
    from smckpt.storage.disk.directory import Directory

    above, name = os.path.split(path)
    part = f"{name}.{os.getpid()}.tmp"
    try:
        if not name:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with Directory.open(above or ".") as directory:
            if not _is_free(directory, name):
                raise UsageError(
                    "a file that is no page is there already, which --out would replace",
                    remedy="pass --out with another name, such as run.html", path=path,
                )  # fmt: skip
            created = directory.create(part)
            try:
                with open(created, "wb") as file:
                    file.write(page)
                directory.rename(part, name)
            except BaseException:
                directory.remove(part)
                raise
    except OSError as error:
        raise UsageError(
            f"the page cannot be written: {error.strerror}",
            remedy="pass --out with a file in a directory that you can write to",
            path=path,
        ) from error


def _is_free(directory: Directory, name: str) -> bool:
    """Whether no file is there, a page, or an empty file."""
    status = directory.status(name)
    if status is None or not stat.S_ISREG(status.st_mode):
        return True
    with open(directory.open_file(name), "rb") as file:
        start = file.read(len(_PAGE_BEGINS))
    return start in (b"", _PAGE_BEGINS)


# -- saves and loads over time ---------------------------------------------------------------------


@dataclass
class _Event:
    """One save or load of several ranks. rows: of a rank each: [rank, host, begin (ms since
    1970), the stages (seconds from there), bytes]."""

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


def read_timeline(paths: Iterable[str], step_of: Callable[[str], int | None]) -> dict[str, Any]:
    """Read the files that `JsonLines` wrote, of any ranks, in any order.

    Args:
        step_of: a directory → the number of the step that the page shows for it, or None.

    Returns:
        events: oldest first. left: how many older ones are not among them. unreadable: how many
        lines are not of our sink, or are cut.

    Raises:
        UsageError: a file cannot be read, or none of its lines is of our sink.
    """
    lines: list[dict[str, Any]] = []
    unreadable = 0
    for path in paths:
        ours = 0
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                while line := file.readline(_LINE):
                    record = _record_of(line)
                    if record is not None:
                        lines.append(record)
                        ours += 1
                    elif line.strip():
                        unreadable += 1
        except OSError as error:
            raise UsageError(
                f"the telemetry cannot be read: {error.strerror}",
                remedy="check the path",
                path=path,
            ) from error
        if not ours:
            raise UsageError(
                "no line of this file is a save or a load",
                remedy="pass a file of smckpt.integrations.telemetry.JsonLines",
                path=path,
            )
    lines.sort(key=lambda record: record["time"])
    events = _joined(lines, step_of)
    return {
        "events": [one.to_json() for one in events[-EVENTS:]],
        "left": max(len(events) - EVENTS, 0),
        "unreadable": unreadable,
    }


def _record_of(line: str) -> dict[str, Any] | None:
    """A line's event, or None. Anybody may have written to the file."""
    try:
        record = json.loads(line)
        stages = _STAGES[record["kind"]]
        seconds = [float(record[key]) for key in (*stages, "time")]
        sensible = (
            all(math.isfinite(value) and 0 <= value < 1e11 for value in seconds)
            and all(
                type(record[key]) is int and 0 <= record[key] < 1 << 53
                for key in ("rank", "nbytes")
            )
            and all(isinstance(record[key], str) for key in ("host", "directory", "outcome"))
            and (record["step"] is None or type(record["step"]) is int)
        )
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return record if sensible else None


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
        # the sink writes the line when the save has ended, and all stages but "blocked" count from
        # the end of the wait for the save before it
        stages = [float(record[key]) for key in _STAGES[record["kind"]]]
        if record["kind"] == "save":
            waited, blocked, *rest = stages
            stages = [waited, blocked, *(waited + value if value else 0.0 for value in rest)]
        began = round((record["time"] - max(stages)) * 1000)
        rounded = [round(value, 4) for value in stages]
        row = [record["rank"], record["host"], began, *rounded, record["nbytes"]]
        event.rows[record["rank"]] = row
        if record["outcome"] not in ("committed", "loaded"):
            event.error = event.error or str(record.get("error") or record["outcome"])[:2000]
        alarms = record.get("alarms")
        for alarm in alarms if isinstance(alarms, list) else ():
            if str(alarm) not in event.alarms:
                event.alarms.append(str(alarm)[:500])
    return events
