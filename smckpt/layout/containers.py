"""The kinds of containers in a state dict, by the names that a checkpoint records."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

__all__ = ["FACTORIES", "FACTS", "container_kind", "order_in", "order_kind"]

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


def order_kind(order: tuple[int, ...]) -> str:
    """The kind of an array whose dimensions lie in another order in memory: "order:1,0"."""
    return "order:" + ",".join(map(str, order))


def order_in(kind: str | None) -> tuple[int, ...] | None:
    """The inverse of `order_kind`; None for any other kind."""
    name, _, dims = (kind or "").partition(":")
    numbers = dims.split(",")
    if name != "order" or not all(number.isdecimal() for number in numbers):
        return None
    found = tuple(map(int, numbers))
    return found if sorted(found) == list(range(len(found))) else None
