"""What a guard is, and how it is taken out of the code."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Guard", "of"]


@dataclass(frozen=True)
class Guard:
    """called: area and guard, in words. changes: (file, text, text without the guard). tests: at
    least one of them has to fail."""

    called: str
    changes: tuple[tuple[str, str, str], ...]
    tests: tuple[str, ...]


def of(called: str, path: str, old: str, new: str, *tests: str) -> Guard:
    """A guard that one change takes out. A test is a name in the file that the test before it
    names, or `file::name`."""
    full: list[str] = []
    for test in tests:
        full.append(test if "/" in test else f"{full[-1].partition('::')[0]}::{test}")
    return Guard(called, ((f"smckpt/{path}", old, new),), tuple(full))
