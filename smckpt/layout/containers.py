"""The kinds of containers in a state dict, by the names that a checkpoint records."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

__all__ = ["FACTORIES", "FACTS", "container_kind"]

# The key of what is no tensor in a tensor that holds others, beside its parts.
FACTS = "__tensor__"

FACTORIES: dict[str, Any] = {
    "": None,
    **{kind.__name__: kind for kind in (dict, list, set, tuple, int, float, str, bool)},
}


def container_kind(value: Any) -> str | None:
    """ "list", "tuple", "ordered" or "defaultdict:<default factory>"; None for a dict."""
    if isinstance(value, list):
        return "list"
    if isinstance(value, tuple):
        return "tuple"
    if isinstance(value, OrderedDict):
        return "ordered"
    if isinstance(value, defaultdict):
        made = getattr(value.default_factory, "__name__", "")
        known = made in FACTORIES and FACTORIES[made] is value.default_factory
        return f"defaultdict:{made}" if known else None
    return None
