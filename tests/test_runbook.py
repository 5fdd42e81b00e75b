"""The runbook: every error says what to do, and the site lists all of them."""

from __future__ import annotations

from tests.support.launch import ROOT
from tests.support.tools import error_list


def test_every_error_says_what_to_do() -> None:
    found = error_list.raised()
    assert len(found) > 500
    # it stands for an error that could not be read
    silent = [one for one in found if not one.remedy.strip() and one.room != "errors"]
    assert silent == []


def test_the_runbook_lists_the_errors_by_class() -> None:
    page = (ROOT / "docs" / "runbook.md").read_text()
    made = error_list.on_page_markdown(page)
    assert error_list.PLACE not in made
    assert "### PeerError" in made
    assert "| a file of the checkpoint is missing | find out what deletes files there" in made
