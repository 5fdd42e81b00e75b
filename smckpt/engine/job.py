"""One save: what is asked, what happened, and the handle that a user holds."""

from __future__ import annotations

import json
import operator
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from smckpt.checkpoint.spread import spread_for
from smckpt.engine.groups import Partition
from smckpt.errors import CheckpointError, SaveFailedError, UsageError
from smckpt.layout.image import DEFAULT_MAX_FILE_BYTES, Layout
from smckpt.storage.s3_config import S3Config

__all__ = ["SaveHandle", "SaveJob", "SaveOptions", "SaveRequest", "Timings"]


@dataclass(frozen=True)
class SaveOptions:
    """Knobs of a save. The defaults suit a cluster; each line says when to change it.

    timeout: seconds for each stage (agreeing, writing, gathering, publishing). Raise it for very
        slow storage; lower it to hear sooner of a dead peer.
    max_consecutive_failures: how many failed saves in a row are logged only; the next one raises.
        0 raises on each. Raise it where a full disk for an hour must not end the run.
    max_file_bytes: a rank's data is split in files of at most this size. Lower it for stores that
        limit an object's size.
    sweep: delete what a new commit in the same directory supersedes. Switch it off to keep every
        save of a `checkpoint_id` that is used again and again.
    """

    timeout: float = 1800.0
    max_consecutive_failures: int = 0
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES
    sweep: bool = True

    def __post_init__(self) -> None:
        if self.timeout <= 0:
            raise UsageError(f"timeout={self.timeout} is not positive", remedy="give seconds > 0")
        if self.max_consecutive_failures < 0:
            raise UsageError("max_consecutive_failures is negative", remedy="0 raises on each")
        if self.max_file_bytes < 1 << 20:
            raise UsageError("max_file_bytes is below 1 MiB", remedy="leave it at its default")


@dataclass(frozen=True)
class SaveRequest:
    """What a caller of `async_save` asked, checked."""

    directory: str
    coordinator: int
    step: int | None
    metadata: dict[str, Any]
    topology: dict[str, Any] | None
    groups: Any
    parallel_state: Any
    on_commit: Callable[[SaveHandle], None] | None
    allow_objects: tuple[type, ...]
    options: SaveOptions
    s3: S3Config | None = None

    def __post_init__(self) -> None:
        for name, value, right in (
            ("options", self.options, isinstance(self.options, SaveOptions)),
            ("metadata", self.metadata, isinstance(self.metadata, dict)),
            ("on_commit", self.on_commit, self.on_commit is None or callable(self.on_commit)),
            ("allow_objects", self.allow_objects, all(map(_is_type, self.allow_objects))),
        ):
            if not right:
                raise UsageError(
                    f"{name} is {value!r}",
                    remedy="see the arguments of smckpt.async_save",
                    path=self.directory,
                )
        spread_for(self.directory, self.s3)  # refused before anything is staged

    @classmethod
    def refused(cls, coordinator: int, options: Any, groups: Any) -> SaveRequest:
        """What stands for a call whose arguments cannot be, so that its peers hear of it."""
        known = options if isinstance(options, SaveOptions) else SaveOptions()
        return cls("", coordinator, None, {}, None, groups, None, None, (), known)

    def recorded(self) -> dict[str, Any]:
        """`step` and `metadata` as they will stand in JSON; of this moment, whatever the caller
        does to them later.

        Raises:
            UsageError: they cannot stand there.
        """
        try:
            step = None if self.step is None else operator.index(self.step)
        except TypeError:
            raise UsageError(
                f"step is {self.step!r}, a {type(self.step).__name__}",
                remedy="pass a whole number",
            ) from None
        try:
            metadata = json.loads(json.dumps(self.metadata, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"metadata cannot stand in JSON: {error}",
                remedy="pass text, finite numbers, lists and dicts; put other values in the state",
            ) from error
        return {"step": step, "metadata": metadata}


def _is_type(value: Any) -> bool:
    return isinstance(value, type)


@dataclass(frozen=True)
class Timings:
    """Seconds since `async_save` was called, and bytes written by this rank.

    blocked: until the call returned. staged: until the bytes were in the arena. written: until
    this rank's files were durable. committed: until the verdict was known here.
    """

    blocked: float
    staged: float
    written: float
    committed: float
    nbytes: int


class SaveHandle:
    """A save under way. `number` counts the saves of its queue from 0."""

    def __init__(self, number: int, checkpoint_id: str, step: int | None) -> None:
        self.number = number
        self.checkpoint_id = checkpoint_id
        self.step = step
        self.timings: Timings | None = None
        self.error: CheckpointError | None = None
        self._done = threading.Event()
        self._announced_by: int | None = None  # the thread that is in on_commit

    def done(self) -> bool:
        """Whether the verdict is known on this rank. Runs no communication."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> Timings:
        """Wait until the save is committed.

        Raises:
            SaveFailedError: it was not; with the cause, and the rank where it happened.
            TimeoutError: `timeout` seconds passed.
        """
        if self._announced_by == threading.get_ident():  # on_commit: it would wait for itself
            assert self.timings is not None
            return self.timings
        if not self._done.wait(timeout):
            raise TimeoutError(f"save {self.number} is not finished after {timeout} s")
        if self.error is not None:
            raise self.failure()
        assert self.timings is not None
        return self.timings

    def failure(self) -> SaveFailedError:
        cause = self.error
        assert cause is not None
        failed = SaveFailedError(
            f"save {self.number} to {self.checkpoint_id} was not committed: {cause.message}",
            remedy=cause.remedy,
            path=cause.path or self.checkpoint_id,
            rank=cause.rank,
            host=cause.host,
        )
        failed.__cause__ = cause
        return failed

    def given_up(self, waited: float) -> SaveHandle:
        """This save as one that failed, for a process that ends and waits no longer."""
        lost = SaveHandle(self.number, self.checkpoint_id, self.step)
        lost.error = SaveFailedError(
            f"it was not finished {waited:.0f} s after the end of the program",
            remedy="raise SMCKPT_EXIT_TIMEOUT, or call maybe_finalize_async_calls at the end",
        )
        return lost


@dataclass
class SaveJob:
    """A staged save on its way through the queue's thread; `error` if it failed before."""

    handle: SaveHandle
    request: SaveRequest
    partition: Partition
    layout: Layout | None = None
    part: dict[str, Any] = field(default_factory=dict)
    error: CheckpointError | None = None
    reported: bool = False  # raised to the caller already
    began: float = field(default_factory=time.perf_counter)
    staged: float = 0.0
    blocked: float = 0.0
    written: float = 0.0
    nbytes: int = 0

    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    def timings(self) -> Timings:
        return Timings(self.blocked, self.staged, self.written, self.elapsed(), self.nbytes)

    def attempt(self, session: str) -> str:
        return f"{session}-{self.handle.number:08d}"

    def spread(self) -> dict[str, Any] | None:
        """How the options of the call spread the ranks' files over prefixes."""
        spread = spread_for(self.request.directory, self.request.s3, len(self.partition.groups))
        return spread.to_json() if spread else None

    def finish(self, error: CheckpointError | None) -> None:
        self.handle.timings = self.handle.timings or self.timings()
        self.handle.error = error
        self.handle._done.set()
