"""Threads in which stores are opened as where the threads were asked for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

__all__ = ["pool_here"]


def pool_here(threads: int, name: str = "smckpt") -> ThreadPoolExecutor:
    """A pool whose threads have the context variables of the caller: the options of S3 in force,
    which threads do not inherit, and this process's share of its budget."""
    values = dict(copy_context().items())

    def adopt() -> None:
        for variable, value in values.items():
            variable.set(value)

    return ThreadPoolExecutor(threads, name, initializer=adopt)
