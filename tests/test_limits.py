"""Limits of time in the tests stand in one place, and one variable scales them all."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.limits import seconds

TESTS = Path(__file__).parent
# What waits for a process, a thread or a peer, and must not give up where the machine is busy.
WAITS = ("run", "communicate", "wait", "join", "result", "check_output", "check_call")
PROGRAMS = ("subprocess.run", "subprocess.check_output", "subprocess.check_call")
SCALED = ("child.run", "interpreters.run")  # they do it themselves


def literal_limits(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        given = [word.value for word in node.keywords if word.arg == "timeout"]
        if node.func.attr in ("wait", "join", "result") and len(node.args) == 1:
            given.append(node.args[0])
        numbers = [value.value for value in given if isinstance(value, ast.Constant)]
        numbers = [each for each in numbers if type(each) in (int, float)]
        called = ast.unparse(node.func)
        waits = node.func.attr in WAITS and called not in SCALED
        if waits and any(each >= 5 for each in numbers):  # less is a pause, not a limit
            yield f"{path.relative_to(TESTS)}:{node.lineno}: {called}"


def without_limit(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in PROGRAMS:
            continue
        if not {None, "timeout"} & {word.arg for word in node.keywords}:
            yield f"{path.relative_to(TESTS)}:{node.lineno}: {ast.unparse(node.func)}"


def test_every_program_that_a_test_waits_for_has_a_limit() -> None:
    found = [each for path in sorted(TESTS.rglob("*.py")) for each in without_limit(path)]
    assert found == [], "pass timeout=seconds(...)"


def test_no_wait_of_a_test_has_a_limit_of_its_own() -> None:
    found = [each for path in sorted(TESTS.rglob("*.py")) for each in literal_limits(path)]
    assert found == [], "wrap the number in tests.support.limits.seconds"


def test_a_variable_scales_the_limits() -> None:
    code = "from tests.support.limits import seconds; print(seconds(10))"
    for patience, limit in (("", "10.0"), ("3", "30.0"), ("0.5", "5.0")):
        own = {
            **os.environ,
            "SMCKPT_TEST_PATIENCE": patience or "1",
            "PYTHONPATH": str(TESTS.parent),
        }
        said = subprocess.run(
            [sys.executable, "-c", code], env=own, capture_output=True, text=True, check=True,
            timeout=seconds(60),
        )  # fmt: skip
        assert said.stdout.strip() == limit
