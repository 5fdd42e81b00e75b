"""`AsyncCallsQueue`: a queue of saves as an object."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import Any

import smckpt

__all__ = ["DEFAULT_ASYNC_REQUEST_QUEUE", "AsyncCallsQueue"]

_NUMBERS = itertools.count(1)


class AsyncCallsQueue:
    """The saves of one queue, in order, one in flight. The n-th queue of a rank meets the n-th of
    the other ranks, so make the same number on each, in one order.

    Args:
        name: smckpt's name for the queue; None gives it a number.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name or f"sagemaker-{next(_NUMBERS)}"
        self._hooks: list[Future[None]] = []  # of saves, where hooks follow the commit

    def maybe_finalize_async_calls(
        self, blocking: bool = True, skip_sync: bool = False, process_group: Any = None
    ) -> list[int]:
        """The numbers of the saves committed since the last call.

        Args:
            blocking: wait for the save in flight.
            skip_sync: no effect. SMP asks the other ranks unless this is set; here every rank knows
                of every failure.
            process_group: only saves of this group; None for all.

        Raises:
            SaveFailedError: a save was not committed. After the commit: the error of a hook.
        """
        done = smckpt.maybe_finalize_async_calls(blocking, process_group, queue=self.name)
        for hook in [h for h in self._hooks if blocking or h.done()]:
            self._hooks.remove(hook)
            hook.result()
        return done

    def follow(self, hooks: Future[None]) -> None:
        """Make the hooks after a commit part of the save."""
        self._hooks.append(hooks)


DEFAULT_ASYNC_REQUEST_QUEUE = AsyncCallsQueue("default")
