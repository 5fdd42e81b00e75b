"""`nvidia_resiliency_ext.checkpointing.local.replication.utils`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["zip_strict"]


def zip_strict(*args: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """`zip` of iterables of one length.

    Raises:
        AssertionError: their lengths differ, as in NVRx; at once, with the lengths.
    """
    lists = [list(each) for each in args]
    lengths = [len(each) for each in lists]
    if len(set(lengths)) > 1:
        raise AssertionError(f"the iterables have the lengths {lengths}")
    return zip(*lists, strict=True)
