"""Stages of a load: all ranks of all groups of a step leave one together, or all raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from smckpt.engine.session import Session
from smckpt.errors import (
    CheckpointError,
    CheckpointReplacedError,
    as_checkpoint_error,
    error_from_json,
)

__all__ = ["Guard", "Step"]

Decide = Callable[[dict[int, dict[str, Any]]], dict[str, Any]]


@dataclass(frozen=True)
class Step:
    """One load of all groups of a step, seen by the rank that speaks for its group."""

    session: Session
    point: str


@dataclass(frozen=True)
class Guard:
    """Turns one rank's failure in a stage into every rank's, in every group of the step."""

    session: Session
    point: str
    timeout: float
    name: Callable[[int], str]
    step: Step | None

    def stage(self, what: str, decide: Decide = lambda _: {}) -> Stage:
        """`decide`: makes one answer of what ranks, and then groups, put in their stage's body."""
        return Stage(self, what, decide)

    def tell_refusal(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Of a group that will not come to the plan: the others wait for it there."""
        return self.tell_groups("plan", lambda _: {}, answer) if "error" in answer else answer

    def tell_groups(self, what: str, decide: Decide, answer: dict[str, Any]) -> dict[str, Any]:
        """The leader's answer for its group, after hearing those of the other groups."""
        if self.step is None:
            return answer
        try:
            common = self.step.session.meet(
                f"{self.step.point}/{what}",
                {"error": answer["error"]} if "error" in answer else answer["decision"],
                decide,
                timeout=self.timeout,
                name=lambda member: f"group {member} of the step",
                spent=(f"{self.step.point}/choice",) if what == "plan" else (),
            )
        except CheckpointError as error:
            ours = None if "error" not in answer else error_from_json(answer["error"])
            return answer if ours and not _of_all(error, ours) else {"error": error.to_json()}
        return {"decision": common}


class Stage:
    """`with guard.stage("plan") as told:` all ranks leave the block together, or all raise.

    `told.body` goes to the leader, `told.decision` is what it made of all of them.
    """

    def __init__(self, guard: Guard, what: str, decide: Decide) -> None:
        self._guard = guard
        self._what = what
        self._decide = decide
        self.body: dict[str, Any] = {}
        self.decision: dict[str, Any] = {}

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # KeyboardInterrupt and the like: go at once
        guard = self._guard
        try:
            self.decision = guard.session.meet(
                f"{guard.point}/{self._what}",
                self.body if error is None else {"error": as_checkpoint_error(error).to_json()},
                self._decide,
                timeout=guard.timeout,
                name=guard.name,
                then=lambda answer: guard.tell_groups(self._what, self._decide, answer),
            )
        except CheckpointError as common:
            if error is None or _of_all(common, error):
                raise  # a peer's; ours is under way by itself


def _of_all(common: BaseException, ours: BaseException) -> bool:
    """Whether the error that was agreed on goes before a rank's own: all ranks load again, or
    none does."""
    return any(isinstance(error, CheckpointReplacedError) for error in (common, ours))
