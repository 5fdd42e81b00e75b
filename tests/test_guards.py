"""The list of `./dev guards` follows the code: what it takes out stands there, once."""

from __future__ import annotations

from pathlib import Path

from tests.support.tools.guard_list import GUARDS

ROOT = Path(__file__).resolve().parents[1]


def test_every_guard_is_in_the_code_and_its_tests_exist() -> None:
    wrong = []
    for guard in GUARDS:
        for path, old, _ in guard.changes:
            if (ROOT / path).read_text().count(old) != 1:
                wrong.append(f"{guard.called}: not once in {path}")
        for test in guard.tests:
            path, *names = test.partition("[")[0].split("::")
            text = (ROOT / path).read_text()
            if names and f"def {names[-1]}(" not in text:
                wrong.append(f"{guard.called}: no {test}")
    assert not wrong
