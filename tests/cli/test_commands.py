"""What all commands have in common: JSON, exit status, and a page that lists them."""

from __future__ import annotations

import inspect
import re
import shlex
import sys

import pytest
from click.testing import CliRunner

from smckpt.cli.app import app
from smckpt.cli.output import progress_bar
from tests.support.main_job import ROOT

NO_JSON = {"browse", "keeper", "run"}  # they write a page, serve, and run a script
PAGE = (ROOT / "docs" / "manager.md").read_text().partition("## Commands and their exit status")[2]
ROWS = {row[0]: row for row in re.findall(r"^\| `(\w+)`( ▸)? \| (.*?) \|", PAGE, re.MULTILINE)}


def test_the_page_lists_every_command_once() -> None:
    assert sorted(ROWS) == sorted(app.commands)


def test_the_help_lists_every_command_once_in_few_words() -> None:
    text = CliRunner().invoke(app, ["--help"]).output
    rows = re.findall(r"^  ([a-z]+) {2,}(\S.*)$", text, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(app.commands)
    assert not any(words.endswith("...") for _, words in rows)
    assert "Begin with: smckpt ls ROOT" in text


@pytest.mark.parametrize("name", sorted(app.commands))
def test_the_help_of_a_command_ends_with_a_call_that_it_takes(name: str) -> None:
    text = CliRunner().invoke(app, [name, "--help"]).output
    example = shlex.split(text.rstrip().splitlines()[-1])
    assert example[:2] == ["smckpt", name]
    app.commands[name].make_context(name, example[2:])  # raises where an option is not one


@pytest.mark.parametrize("name", sorted(app.commands))
def test_every_command_prints_for_programs(name: str) -> None:
    options = {option for each in app.commands[name].params for option in each.opts}
    assert ("--json" in options) == (name not in NO_JSON)


@pytest.mark.parametrize("name", sorted(app.commands))
def test_a_command_that_reads_data_draws_a_bar(name: str) -> None:
    callback = app.commands[name].callback
    assert callback is not None
    assert ("progress_bar(" in inspect.getsource(inspect.unwrap(callback))) == bool(ROWS[name][1])


def test_a_bar_is_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with progress_bar("reading", quiet=False) as progress:  # pytest's stderr is a file
        assert progress is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress_bar("reading", quiet=False) as progress:
        assert progress is not None
        progress(1, 2)
    with progress_bar("reading", quiet=True) as progress:
        assert progress is None
