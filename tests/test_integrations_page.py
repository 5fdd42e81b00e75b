"""Each test that docs/evidence/doors.md names exists once, and is long where the page says so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from smckpt.integrations import TESTED

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "evidence" / "doors.md"
FOLDER = "tests/integrations"
KILLS = ("Killed and resumed, door by door",)
# Of tables whose head names no file; the text beside them does.
FILES = {
    KILLS[0]: [f"{FOLDER}/*.py", "tests/cli/test_proven_doors.py"],
    "Amazon SMP": [f"{FOLDER}/test_sagemaker*.py", "tests/run/test_run.py"],
    "Lightning": [f"{FOLDER}/test_lightning*.py"],
    "NeMo's S3 checkpointing": [f"{FOLDER}/test_lightning*.py"],
}


@dataclass(frozen=True)
class Written:
    name: str
    long: bool
    parameters: str  # the source of its decorators


@dataclass(frozen=True)
class Named:
    """A fragment of a test's name in a cell of the page."""

    line: int
    text: str
    long: bool
    files: tuple[str, ...]


def written_in(file: Path) -> list[Written]:
    tree = ast.parse(file.read_text())
    marks = [ast.unparse(n.value) for n in tree.body if isinstance(n, ast.Assign)
             and ast.unparse(n.targets[0]) == "pytestmark"]  # fmt: skip
    found = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CASES":
            cases = ast.unparse(node.value).strip("()").split(", ")  # of one run of all ranks
            found += [Written(f"test_{case}", False, "") for case in cases]
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            decorators = [ast.unparse(one) for one in node.decorator_list]
            long = "pytest.mark.long" in f"{marks}" or "pytest.mark.long" in decorators
            found.append(Written(node.name, long, " ".join(decorators)))
    return found


def named() -> Iterator[Named]:
    """What the cells under "shown by" name; of the table of kills, all cells but the first."""
    section, head, files = "", None, []
    for number, line in enumerate(PAGE.read_text().splitlines(), 1):
        if line.startswith("## "):
            section = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.split("|")[1:-1]] if line[:1] == "|" else []
        if not cells:
            head = None
        elif head is None:
            head = cells
            files = [
                f if "/" in f else f"{FOLDER}/{f}" for f in re.findall(r"`(\S+\.py)`", head[-1])
            ]
        elif set(line) - set("|- "):
            kills = section in KILLS
            shows = head[-1].startswith("shown by")
            for cell in cells[1:] if kills else cells[-1:] if shows else ():
                for text, long in re.findall(r"`([^`]+)`( \(long\))?", cell):
                    place = tuple(files or FILES[section])
                    yield Named(number, text, bool(long), place)


def meant(one: Named) -> list[Written]:
    """The tests whose names have the fragment. `x[y]` is one whose parameters have y."""
    name, _, parameter = one.text.partition("[")
    words = name.strip("…")
    asked = [part for part in re.split("[…-]", parameter.strip("]")) if part]
    found = []
    for file in sorted({path for files in one.files for path in ROOT.glob(files)}):
        tests = written_in(file)
        begin = words.startswith("test_")
        exact = [test for test in tests if test.name == f"test_{words}"]
        for test in exact or [test for test in tests if words in test.name]:
            if begin and not test.name.startswith(words):
                continue
            if all(part in test.parameters for part in asked):
                found.append(test)
    return found


def test_each_named_test_is_there_once_and_long_where_it_is_said() -> None:
    wrong, all_of_them = [], list(named())
    for one in all_of_them:
        tests = meant(one)
        if len(tests) != 1:
            wrong.append(f"line {one.line}: `{one.text}` is {[test.name for test in tests]}")
        elif tests[0].long != one.long:
            wrong.append(f"line {one.line}: `{one.text}` is {'' if tests[0].long else 'not '}long")
    assert not wrong, "\n".join(wrong)
    assert len(all_of_them) > 100, "the tables are no longer read"


def test_the_page_names_the_versions_that_smckpt_run_takes() -> None:
    page = " ".join((ROOT / "docs" / "integrations.md").read_text().split())
    begin = page.index("`smckpt run` refuses versions")
    paragraph = page[begin : page.index("`--shadow`", begin)]
    for package, versions in TESTED.items():
        for version in versions:
            assert f" {version}" in paragraph, (package, version)
