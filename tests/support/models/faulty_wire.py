"""A rank that fails while tensors of a full state move: no memory at some point."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from smckpt.full.wire import Wire
from smckpt.translate.live import full_state as live
from smckpt.translate.live import move

__all__ = ["outcome", "with_one_that_fails"]


class _Faulty(Wire):
    """Has no memory for the `at`-th tensor that it prepares; `moved` counts messages."""

    act, at, moved = "packed", 3, 0

    def _fail(self, act: str) -> None:
        if act == self.act:
            _Faulty.at -= 1
            if _Faulty.at == 0:
                raise MemoryError(f"no room to have it {act}")

    def packed(self, *given: Any) -> Any:
        self._fail("packed")
        return super().packed(*given)

    def placed(self, *given: Any) -> Any:
        self._fail("placed")
        return super().placed(*given)

    def room(self, *given: Any) -> Any:
        self._fail("room")
        return super().room(*given)

    def send(self, *given: Any) -> None:
        _Faulty.moved += 1
        super().send(*given)


@contextmanager
def _faulty(act: str) -> Iterator[None]:
    _Faulty.act, _Faulty.at, _Faulty.moved = act, 3, 0
    kept, live.Wire = live.Wire, _Faulty  # type: ignore[misc]
    try:
        yield
    finally:
        live.Wire = kept  # type: ignore[misc]


def outcome(act: Callable[[], Any]) -> tuple[str, str]:
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def with_one_that_fails(
    take: Callable[[], Any], rank: int, act: str, *, at_once: bool = False
) -> tuple[str, str, float, int]:
    """What a rank raises when `rank` fails to `act`, seconds, and the messages that it sent.

    Args:
        at_once: all ask each other after every tensor.
    """
    kept, move._SETTLE = move._SETTLE, 1 if at_once else move._SETTLE
    began = time.monotonic()
    try:
        with _faulty(act if dist.get_rank() == rank else "nothing"):
            kind, text = outcome(take)
    finally:
        move._SETTLE = kept
    return kind, text, time.monotonic() - began, _Faulty.moved
