"""`smckpt browse`: one static page about all checkpoints below a root."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
from importlib import resources
from typing import TYPE_CHECKING, Any

import click

from smckpt.cli.output import bytes_text, count_text, print_line, progress_bar
from smckpt.errors import CheckpointError, CheckpointNotFoundError, UsageError

if TYPE_CHECKING:
    from smckpt.cli.browse_facts import Facts

__all__ = ["browse", "page_of"]


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
    from smckpt.cli.browse_facts import Facts, Wanted
    from smckpt.manager.doctor import examine
    from smckpt.storage import open_storage
    from smckpt.storage.urls import is_local, local_path

    if is_local(root) and not os.path.isdir(local_path(root)):
        raise CheckpointNotFoundError(
            "no such directory",
            remedy="check the path, and that the file system is mounted",
            path=root,
        )
    level = "quick" if quick else "full" if verify else None
    top = open_storage(root)
    facts = Facts(top, Wanted(level, histograms, histogram_steps or 1))
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
    _write(out, page)
    runs = "" if len(facts.runs) == 1 else f" of {count_text(len(facts.runs), 'run')}"
    size = bytes_text(len(page))
    print_line(f"{out}: {count_text(len(facts.steps), 'step')}{runs}, {size}")
    for note in report["notes"]:
        print_line(note)


def _telemetry(files: tuple[str, ...], facts: Facts) -> dict[str, Any]:
    from smckpt.cli.browse_facts import plain
    from smckpt.cli.timeline import read_timeline
    from smckpt.storage.urls import join_url, normal_url

    places = {
        join_url(facts.root.url, step["place"]).rstrip("/"): number
        for number, step in enumerate(facts.steps)
    }

    def step_number(directory: str) -> int | None:
        """The step whose directory this is, or is above: a group's is below its step's."""
        try:
            at = normal_url(directory).rstrip("/")
        except CheckpointError:  # the file may hold anything
            return None
        while at:
            if at in places:
                return places[at]
            at = at.rpartition("/")[0]
        return places.get("")

    found = read_timeline(files, step_number)
    return {
        "events": plain(found.events),
        "left": found.left,
        "unreadable": found.unreadable,
    }


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


def _write(path: str, page: bytes) -> None:
    """Replace the file in one step, so that a browser never reads half a page."""
    part = f"{path}.{os.getpid()}.tmp"
    try:
        try:
            with open(part, "xb") as file:
                file.write(page)
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            raise
    except OSError as error:
        raise UsageError(
            f"the page cannot be written: {error.strerror}",
            remedy="pass --out with a file in a directory that you can write to",
            path=path,
        ) from error
