"""Each check of ./dev test fails on a tree with the fault that it is there to find."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from tests.support.limits import seconds
from tests.support.main_job import ROOT


def _more(name: str, text: str) -> Callable[[Path], None]:
    """Plants a fault: adds text to the end of a file of the tree, which it makes if it is new."""

    def plant(tree: Path) -> None:
        with (tree / name).open("a") as file:
            file.write(text)

    return plant


def _unused_dependency(tree: Path) -> None:
    settings = tree / "setup.cfg"
    text = settings.read_text()
    assert "    numpy>=1.26\n" in text
    settings.write_text(text.replace("    numpy>=1.26\n", "    numpy>=1.26\n    attrs>=1\n"))


_UNKNOWN_ARGUMENT = '''

def planted() -> None:
    """Do nothing.

    Args:
        absent: an argument that the function does not have.
    """
'''


def _faults_of_pages(tree: Path) -> None:
    _more("docs/index.md", "\n[1](guide.md#no-such-heading) and [2](no-such-page.md)\n")(tree)
    _more("docs/api.md", "\n::: smckpt.errors.planted\n")(tree)
    _more("smckpt/errors.py", _UNKNOWN_ARGUMENT)(tree)


PAGES = ("#no-such-heading", "no-such-page.md", "'absent'", "4 warnings in strict mode")
# the check, what its output names, the fault
PLANTED = [
    ("ruff check", ("F401",), _more("smckpt/planted.py", "import os\n")),
    ("ruff format", ("planted.py",), _more("smckpt/planted.py", "x  =  1\n")),
    ("mypy", ("planted.py",), _more("smckpt/planted.py", 'x: int = "text"\n')),
    ("lint-imports", ("planted",), _more("smckpt/layout/planted.py", "import smckpt.engine.api\n")),
    ("fawltydeps", ("attrs",), _unused_dependency),
    ("mkdocs", PAGES, _faults_of_pages),  # griffe has two about the argument
]


def checks() -> dict[str, list[str]]:
    """The commands of ./dev test that come before pytest, by the names that PLANTED has."""
    with pytest.MonkeyPatch.context() as before:
        before.setattr(sys, "path", [*sys.path])
        commands = SourceFileLoader("dev", str(ROOT / "dev")).load_module().CHECKS
    named = {next(c for c, _, _ in PLANTED if shlex.join(x).startswith(c)): x for x in commands}
    assert named.keys() == {check for check, _, _ in PLANTED}, "a check without a planted fault"
    return named


def run(command: list[str], tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).parent / command[0]), *command[1:]],
        cwd=tree,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(tree),
            "NO_MKDOCS_2_WARNING": "1",
            "COLUMNS": "200",
            "MYPY_CACHE_DIR": str(ROOT / ".mypy_cache"),  # ./dev test has just filled it
        },
        timeout=seconds(240),
    )


@pytest.mark.parametrize(("check", "names", "plant"), PLANTED, ids=[c for c, _, _ in PLANTED])
def test_a_check_fails_on_its_fault(
    tmp_path: Path, check: str, names: tuple[str, ...], plant: Callable[[Path], None]
) -> None:
    tree = tmp_path / "tree"
    files = subprocess.run(
        ["git", "ls-files", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=seconds(60),
    )
    for name in filter(None, files.stdout.split("\0")):
        if name.startswith(("smckpt/", "docs/", "tests/support/")) or "/" not in name:
            if not (ROOT / name).is_file():
                continue  # deleted, and not yet committed
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    plant(tree)
    done = run(checks()[check], tree)
    printed = done.stdout + done.stderr
    assert done.returncode != 0, printed
    assert [name for name in names if name not in printed] == [], printed
