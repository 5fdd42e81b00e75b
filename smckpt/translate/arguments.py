"""Arguments of another kind than they should be, refused by name before anything is done."""

from __future__ import annotations

import os
from typing import Any

from smckpt.errors import UsageError

__all__ = ["check_counts", "check_flags", "check_paths"]


def check_counts(**given: Any) -> None:
    """Raises UsageError: one of them is no whole number above 0."""
    for name, value in given.items():
        if not isinstance(value, int) or value is True or value < 1:
            raise UsageError(f"{name}={value!r}", remedy="give a whole number above 0")


def check_flags(**given: Any) -> None:
    """Raises UsageError: one of them is neither True nor False; "no" would count as True."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise UsageError(f"{name}={value!r}", remedy="pass True or False")


def check_paths(**given: Any) -> None:
    """Raises UsageError: one of them is no path."""
    for name, value in given.items():
        if not isinstance(value, (str, os.PathLike)):
            raise UsageError(f"{name}={value!r}", remedy="pass a path or URL")
