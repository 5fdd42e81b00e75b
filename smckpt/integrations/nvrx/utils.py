"""`nvidia_resiliency_ext.checkpointing.utils`: what programs import from there."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = [
    "debug_msg",
    "debug_time",
    "dict_list_map_outplace",
    "diff",
    "preload_tensors",
    "wrap_for_async",
]

log = logging.getLogger("smckpt")


@contextlib.contextmanager
def debug_time(
    name: str,
    logger: logging.Logger | None = None,
    threshold: float = float("-inf"),
    level: int | None = None,
) -> Iterator[None]:
    """Log how long the block took, if that is at least `threshold` seconds.

    Args:
        level: None: a warning where there is a threshold, else for debugging.
    """
    began = time.monotonic()
    try:
        yield
    finally:
        took = time.monotonic() - began
        if took >= threshold:
            default = logging.DEBUG if threshold == float("-inf") else logging.WARNING
            (logger or log).log(default if level is None else level, "%s took %.4fs", name, took)


def debug_msg(msg: str) -> None:
    log.debug("%s", msg)


def preload_tensors(state_dict: Any, non_blocking: bool = True) -> Any:
    """A copy in host memory of the tensors in dicts and lists. It is complete when this returns."""

    def copied(value: Any) -> Any:
        return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value

    return dict_list_map_outplace(copied, state_dict)


def wrap_for_async(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself: a spawned worker needs no wrapper."""
    return fn


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """`f` of each value in nested dicts and lists, in new ones."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)


def diff(x1: Any, x2: Any, prefix: tuple[Any, ...] = ()) -> tuple[list[Any], list[Any], list[Any]]:
    """Paths that only one of two nested values has, and paths where they differ, with the types."""
    left: list[Any] = []
    right: list[Any] = []
    differ: list[Any] = []
    both: list[tuple[Any, Any, Any]] = []
    if isinstance(x1, dict) and isinstance(x2, dict):
        left = [(*prefix, key) for key in x1.keys() - x2.keys()]
        right = [(*prefix, key) for key in x2.keys() - x1.keys()]
        both = [(key, x1[key], x2[key]) for key in x1.keys() & x2.keys()]
    elif isinstance(x1, (list, tuple)) and isinstance(x2, (list, tuple)):
        left = [(*prefix, at) for at in range(len(x2), len(x1))]
        right = [(*prefix, at) for at in range(len(x1), len(x2))]
        both = [(at, one, two) for at, (one, two) in enumerate(zip(x1, x2, strict=False))]
    elif not _equal(x1, x2):
        differ = [(prefix, type(x1), type(x2))]
    for key, one, two in both:
        for found, into in zip(diff(one, two, (*prefix, key)), (left, right, differ), strict=True):
            into.extend(found)
    return left, right, differ


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.shape == two.shape and bool(torch.all(one.cpu() == two.cpu()))
    try:
        return bool(one == two)
    except (RuntimeError, ValueError):
        return False
