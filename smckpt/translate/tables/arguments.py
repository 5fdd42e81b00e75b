"""Refuse arguments of a wrong type by name, before anything is done."""

from __future__ import annotations

import os
from typing import Any

from smckpt.errors import UsageError
from smckpt.storage.urls import is_local

__all__ = ["check_counts", "check_flags", "check_paths", "refuse_given", "refuse_store"]


def check_counts(**given: Any) -> None:
    """Raise UsageError if one of them is not a whole number above 0."""
    for name, value in given.items():
        if not isinstance(value, int) or value is True or value < 1:
            raise UsageError(f"{name}={value!r}", remedy="pass a whole number above 0")


def check_flags(**given: Any) -> None:
    """Raise UsageError if one of them is neither True nor False. The text "no" would count as
    True."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise UsageError(f"{name}={value!r}", remedy="pass True or False")


def check_paths(**given: Any) -> None:
    """Raise UsageError if one of them is not a path."""
    for name, value in given.items():
        if not isinstance(value, (str, os.PathLike)):
            raise UsageError(f"{name}={value!r}", remedy="pass a path or URL")


def refuse_given(when: str, **given: Any) -> None:
    """Raise UsageError if some of the arguments are given, since they have no effect then."""
    names = [f"{name}=" for name, value in given.items() if value is not None]
    if names:
        raise UsageError(f"{', '.join(names)} has no effect {when}", remedy="leave it out")


def refuse_store(**given: Any) -> None:
    """Raise UsageError for a URL of a store where a directory on a disk is read."""
    for name, value in given.items():
        if isinstance(value, str) and not is_local(value):
            raise UsageError(
                f"{name}= is in a store, but is read from a disk only",
                remedy="copy the directory to a disk, and pass its path there", path=value,
            )  # fmt: skip
