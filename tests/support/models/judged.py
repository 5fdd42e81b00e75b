"""What a test of the translator compared with what: the table in docs/evidence/families.md.

    ./dev families           run these tests, long ones too, and write the table
    ./dev families ARGS      ARGS go to pytest; the table of what ran is printed, not written

A test says its comparison through the fixture `judged`, and what a server makes of an export
through `served`. It counts if the test passes. The servers' table is written where all servers of
`tests/support/models/servers.py` are named, and otherwise stays as it was.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from tests.support.limits import seconds
from tests.support.models import servers

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "evidence" / "families.md"
# whose tests say what they compared
ROOMS = ("tests/formats", "tests/translate", "tests/integrations")
FILE = "SMCKPT_JUDGED"  # where a run of the tests leaves what it compared, a line each
FIXTURES = ("judged", "served")
BEGIN, END = "<!-- written by ./dev families -->\n", "<!-- end of what ./dev families wrote -->"
SERVED = "<!-- the servers, by ./dev families -->\n"
SERVED_END = "<!-- end of the servers -->"

Claim = tuple[str, str, str, str, str]  # family, source, direction, judge, degrees
Cell = tuple[str, str, str, str]  # what the rows are, row, server with version, verdict


def claims(
    family: str, source: str, *, exports: Sequence[str] = (), imports: Sequence[str] = (),
    at: str = "",
) -> list[Claim]:  # fmt: skip
    """source: the layout, or the kind of checkpoint. exports, imports: the judges of each
    direction. at: the degrees: "4" (tensor parallel), "2×8" (times expert parallel)."""
    return [
        (family, source, direction, judge, at)
        for direction, judges in (("export", exports), ("import", imports))
        for judge in judges
    ]


def recorder(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    def judged(*args: object, **more: object) -> None:
        for claim in claims(*args, **more):  # type: ignore[arg-type]
            record_property("judged", json.dumps(claim))

    return judged


def server_recorder(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    def served(rows: str, row: str, server: str, verdict: object) -> None:
        record_property("served", json.dumps((rows, row, server, str(verdict))))

    return served


def leave(report: pytest.TestReport) -> None:
    """Called with the report of each test: append what it compared, if it passed."""
    place = os.environ.get(FILE)
    if place and report.when == "call" and report.passed:
        with open(place, "a") as file:
            file.writelines(
                f'["{name}", {said}]\n' for name, said in report.user_properties if name in FIXTURES
            )


def table(found: Iterable[Claim]) -> str:
    """A row for each family and source, with the judges of each direction and their degrees."""
    rows: dict[tuple[str, str], dict[str, dict[str, set[str]]]] = defaultdict(
        lambda: {"export": defaultdict(set), "import": defaultdict(set)}
    )
    for family, source, direction, judge, at in found:
        rows[family, source][direction][judge].add(at)
    lines = ["| family | source | export | import |", "|---|---|---|---|"]
    for (family, source), sides in sorted(rows.items()):
        cells = ["; ".join(map(_said, sorted(sides[way].items()))) for way in ("export", "import")]
        lines.append(f"| {family} | {source} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def servers_tables(found: Iterable[Cell]) -> str:
    """A table for families and one for rope types, with a column for each server."""
    tables: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for rows, row, server, verdict in found:
        tables[rows][row][server] = verdict
    out = []
    for rows, cells in sorted(tables.items()):
        servers = sorted({server for row in cells.values() for server in row})
        lines = [f"| {' | '.join((rows, *servers))} |", "|---" * (1 + len(servers)) + "|"]
        for row, said in sorted(cells.items()):
            lines.append(f"| {' | '.join((row, *(said.get(name, '') for name in servers)))} |")
        out.append("\n".join(lines) + "\n")
    return "\n".join(out)


def _said(item: tuple[str, set[str]]) -> str:
    judge, degrees = item
    told = sorted(degrees - {""}, key=lambda at: [int(number) for number in at.split("×")])
    return f"{judge} ({' '.join(told)})" if told else judge


def main(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "judged"
        place.touch()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "",
            "-p",
            "tests.support.models.judged",
        ]
        command += ["-n", "2", "--dist", "loadfile", *ROOMS, *arguments]
        status = subprocess.run(
            command, cwd=ROOT, env={**os.environ, FILE: str(place)}, timeout=seconds(14400)
        ).returncode
        said = [json.loads(line) for line in place.read_text().splitlines()]
    found, served = ([tuple(line) for name, line in said if name == of] for of in FIXTURES)
    if status:
        print("families: a test failed: the tables stay as they were", file=sys.stderr)
        return status
    if arguments:  # some of the tests
        print(table(found), servers_tables(served), sep="\n")
        return 0
    text = _with(PAGE.read_text(), BEGIN, table(found), END)
    if all(map(os.environ.get, servers.VARIABLES.values())):
        text = _with(text, SERVED, servers_tables(served), SERVED_END)
    else:
        print("families: not all servers are named: their table stays as it was", file=sys.stderr)
    PAGE.write_text(text)
    print(f"families: {len(found)} comparisons are in {PAGE.relative_to(ROOT)}")
    return 0


def _with(text: str, begin: str, inner: str, end: str) -> str:
    if text.count(begin) != 1 or text.count(end) != 1:
        sys.exit(f"families: {PAGE} lacks the marks {begin.strip()} and {end}")
    return re.sub(f"{begin}.*{end}", lambda _: begin + inner + end, text, flags=re.S)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """As a plugin: only the tests that say what they compared."""
    saying = [item for item in items if {*FIXTURES} & {*getattr(item, "fixturenames", ())}]
    config.hook.pytest_deselected(items=[item for item in items if item not in saying])
    items[:] = saying


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
