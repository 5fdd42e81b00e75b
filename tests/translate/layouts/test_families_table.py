"""The table of docs/evidence/families.md says what passed, and knows every family and layout."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from smckpt.translate.tables.families import _BUILT_IN as BUILT_IN
from smckpt.translate.tables.layouts import layouts_of
from tests.support.models import hub_families, judged


def report(**more: Any) -> Any:
    said = json.dumps(("llama", "mcore_te", "export", "logits", "2"))
    properties = [("judged", said), ("other", "x")]
    return SimpleNamespace(**{"when": "call", "passed": True, "user_properties": properties} | more)


@pytest.mark.parametrize(
    ("more", "lines"), [({}, 1), ({"passed": False}, 0), ({"when": "teardown"}, 0)]
)
def test_only_a_test_that_passed_says_what_it_compared(tmp_path, monkeypatch, more, lines):
    monkeypatch.setenv(judged.FILE, str(tmp_path / "said"))
    judged.leave(report(**more))
    found = (tmp_path / "said").read_text() if (tmp_path / "said").exists() else ""
    assert found.count("\n") == lines and found.count("other") == 0


def test_comparisons_of_one_family_and_source_are_one_row_with_their_degrees():
    said = [
        *judged.claims("a", "te", exports=["x", "y"], imports=["x"], at="2×8"),
        *judged.claims("a", "te", exports=["x"], at="1"),
        *judged.claims("a", "te", exports=["z"]),
    ]
    assert judged.table(said).splitlines()[2:] == ["| a | te | x (1 2×8); y (2×8); z | x (2×8) |"]


def rows() -> list[list[str]]:
    text = judged.PAGE.read_text().split(judged.BEGIN)[1].split(judged.END)[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]


def test_the_page_has_every_family_and_no_layout_that_is_gone():
    named = {(family, source) for family, source, *_ in rows()}
    assert {family for family, _ in named} >= {*BUILT_IN, *hub_families.FAMILIES}
    layouts = {layout for family in BUILT_IN.values() for layout in layouts_of(family)}
    kinds = {source for _, source in named if "_" in source and " " not in source}
    assert {kind.removesuffix("_zero_centred") for kind in kinds} - layouts == set()
    wanted = {"mcore_te", "mcore_local", "hf_tp", "te_split", "torchtitan", "meta", "smp_v1"}
    assert wanted <= {source for _, source in named}


def test_the_page_of_layouts_names_every_family():
    text = (judged.ROOT / "docs" / "layouts.md").read_text()
    assert [family for family in BUILT_IN if f"`{family}`" not in text] == []


def test_the_command_runs_all_tests_that_say_what_they_compared():
    tests = judged.ROOT / "tests"
    saying = {
        f"tests/{path.relative_to(tests).parts[0]}"
        for path in tests.rglob("test_*.py")
        if re.search(r"^def test_.*\bjudged\b|^    .*\bjudged\(", path.read_text(), re.M)
    }
    assert saying == set(judged.ROOMS)
