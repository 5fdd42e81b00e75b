"""Saves and loads that another library plans: torch DCP's, with its planners, readers and writers.
A room above registers it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from smckpt.registry import Registry

__all__ = ["BACKENDS", "Backend", "dcp"]


@dataclass(frozen=True)
class Backend:
    """
    Args:
        save: begins a save; gets the runtime, the group, and what `async_save` got. It gives the
            handle.
        load: fills a state dict; gets the runtime, and what `load` got. It gives the state dict.
    """

    save: Callable[..., Any]
    load: Callable[..., Any]


BACKENDS = Registry("backend of saves and loads", Backend, "smckpt.backends", {})


def dcp() -> Backend:
    found = BACKENDS.find("dcp")
    assert found is not None  # the package registers it
    return found
