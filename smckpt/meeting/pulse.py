"""Signs of life, for rounds without a time limit.

A member reports its progress about once a second. The others give it up after `timeout` seconds
without a report, however long the whole round takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from smckpt.errors import CheckpointError, PeerError, error_from_json
from smckpt.meeting.keys import Keys

__all__ = ["PAUSES", "Pulse"]

PAUSES = (0.01, 0.2)  # seconds between two looks for a value: at first, at most
_BEAT = 1.0  # seconds between two signs of life


class Pulse:
    """
    Args:
        keys: of the meeting.
        name: what errors call a member.
        timeout: seconds without a sign of life until a member is given up.
    """

    def __init__(
        self, keys: Keys, member: int, count: int, name: Callable[[int], str], timeout: float
    ) -> None:
        self._keys = keys
        self._member = member
        self._count = count
        self._name = name
        self._timeout = timeout
        # on member 0: called with the progress of all
        self.tell: Callable[[int], None] | None = None
        self._own = 0
        self._waits = 0
        self._due = 0.0  # the time of the next sign of life
        self._signs: dict[str, int] = {}  # the others' progress, as last seen

    def beat(self, done: int) -> None:
        """Report this member's progress, at most once a second.

        Raises:
            CheckpointError: another member has failed.
        """
        self._own = done
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _BEAT
            self._keys.set(f"beat/{self._member}", done)
            self._refuse_failed()
            if self._member == 0:
                self._look(range(1, self._count))
        self._show()

    def fail(self, error: CheckpointError) -> None:
        """Make all members raise this at their next sign of life."""
        self._keys.first("failed", {"error": error.to_json()})

    def wait(self, keys: Keys, key: str, whose: Sequence[int]) -> Any:
        """Wait for a value while any of the members `whose` gives signs of life.

        Raises:
            PeerError: none of them gives a sign any more.
            CheckpointError: a member has failed with it.
        """
        last, pause = time.monotonic(), PAUSES[0]
        while True:
            found = keys.peek(key)  # c10d logs a warning on every wait that runs out
            if found is not None:
                return found
            time.sleep(pause)
            pause = min(2 * pause, PAUSES[1])
            if time.monotonic() >= self._due:
                self._refuse_failed()  # a failure outside this round
                self._waits += 1  # a sign of life for members that wait for this one
                keys.set(f"waits/{self._member}", self._waits)
                if self._look(whose):
                    last = time.monotonic()
                self._due = time.monotonic() + _BEAT
                self._show()
            if time.monotonic() - last > self._timeout:
                names = ", ".join(map(self._name, whose[:8]))
                raise PeerError(
                    f"{names} gave no sign of life for {self._timeout:.0f} s",
                    remedy="look at its log; raise timeout= if its storage is merely slow",
                )

    def _show(self) -> None:
        if self.tell is not None:
            others = sum(n for key, n in self._signs.items() if key.startswith("beat/"))
            self.tell(self._own + others)

    def _look(self, members: Sequence[int]) -> bool:
        """Whether one of these has made progress."""
        moved = False
        for key in (f"{kind}/{member}" for member in members for kind in ("beat", "waits")):
            found = self._keys.peek(key)
            if found is not None and self._signs.get(key) != found:
                self._signs[key] = found
                moved = True
        return moved

    def _refuse_failed(self) -> None:
        failed = self._keys.peek("failed")
        if failed is not None:
            raise error_from_json(failed["error"])
