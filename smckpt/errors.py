"""The errors that smckpt raises: a small tree under `CheckpointError`.

Every error names its host, rank and path, and says what to do. Ranks exchange errors as JSON
(`to_json`, `error_from_json`), so a rank that waits for a peer raises the peer's own error and not
a timeout.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = [
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointPinnedError",
    "CheckpointReplacedError",
    "CorruptCheckpointError",
    "FormatVersionError",
    "JobStoreError",
    "KeysMismatchError",
    "MemoryBudgetError",
    "PeerError",
    "SaveFailedError",
    "StateError",
    "StorageError",
    "TensorMismatchError",
    "TopologyError",
    "UsageError",
    "WorkerError",
    "as_checkpoint_error",
    "causes",
    "count_text",
    "error_from_json",
    "errors_at",
    "few",
    "visible",
]


# Terminal codes such as colours, which torch puts into its messages (ECMA-48, 5.4).
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def visible(text: str, keep: str = "") -> str:
    """The text with escapes in the place of characters that act on a terminal or that nobody sees:
    controls, marks that turn the direction of text, spaces without width. Names and values of a
    checkpoint may contain any.

    Args:
        keep: characters that stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def few(values: Sequence[Any], most: int = 8, between: str = ", ") -> str:
    """The first of many values, for a message: "0, 2 and 5 more"."""
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return between.join(map(str, values[:most])) + more


def count_text(count: int, noun: str) -> str:
    """ "1 file", "2 files"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def causes(error: BaseException) -> list[BaseException]:
    """The error, its cause, the cause of that one, and so on."""
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in found:  # an error may be its own cause
        found.append(cause)
        cause = cause.__cause__
    return found


class CheckpointError(Exception):
    """Root of the tree.

    Args:
        message: what happened, in one sentence.
        remedy: what the reader should do about it.
        path: the file, directory or URL concerned.
        rank: the global rank where it happened; by default this process's.
        host: the host where it happened; by default this one.
    """

    def __init__(
        self,
        message: str,
        *,
        remedy: str = "",
        path: str | None = None,
        rank: int | None = None,
        host: str | None = None,
    ) -> None:
        self.message: str = visible(_ESCAPES.sub("", message), keep="\n\t")
        self.remedy = remedy
        self.path = path
        self.rank: int = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.host: str = socket.gethostname() if host is None else host
        # of a save that ranks refused: the moment of training that it was of (`engine.moment`)
        self.moment: dict[str, Any] | None = None
        super().__init__(self.message)

    def __str__(self) -> str:
        where = f"[host {self.host}, rank {self.rank}"
        where += f", path {visible(self.path)}]" if self.path else "]"
        if not self.remedy:
            return f"{where} {self.message}"
        end = "" if self.message.endswith((".", "!", "?", ":", ";")) else "."
        remedy = visible(self.remedy, keep="\n\t")
        return f"{where} {self.message}{end} What to do: {remedy}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (error_from_json, (self.to_json(),))

    def to_json(self) -> dict[str, Any]:
        """As JSON data, for the job's store and the worker's pipe."""
        data = {
            "type": type(self).__name__,
            "message": self.message,
            "remedy": self.remedy,
            "path": self.path,
            "rank": self.rank,
            "host": self.host,
        }
        return data if self.moment is None else {**data, "moment": self.moment}


class UsageError(CheckpointError, ValueError):
    """An argument is missing, contradicts another one, or is not honoured."""


class StateError(CheckpointError, TypeError):
    """The state holds a value that cannot be saved, or it changed during the save."""


class StorageError(CheckpointError, OSError):
    """The store refused: it is full, read-only, not a directory, without `link`, or gone.

    Args:
        of_store: whether the fault is of the whole store, or of this process's means to reach it,
            so that other files would fail likewise. False: it may be of this path alone.
    """

    def __init__(self, message: str, *, of_store: bool = False, **where: Any) -> None:
        super().__init__(message, **where)
        self.of_store = of_store

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "of_store": self.of_store}

    def __str__(self) -> str:  # OSError would print (errno, message)
        return CheckpointError.__str__(self)


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint at the path."""

    def __str__(self) -> str:
        return CheckpointError.__str__(self)


class CheckpointPinnedError(CheckpointError):
    """A reader holds the checkpoint, so it was not deleted."""


class CheckpointReplacedError(CheckpointError):
    """A newer save committed, and deleted the checkpoint during the read."""


class CorruptCheckpointError(CheckpointError):
    """Bytes differ from what was written; the message names file and offset."""


class FormatVersionError(CheckpointError):
    """The checkpoint has a newer major version of the format."""


class TopologyError(CheckpointError):
    """The world size, a mesh or a degree does not fit."""


class KeysMismatchError(CheckpointError, KeyError):
    """Names in the checkpoint and in the target differ; both lists are in the message."""

    def __str__(self) -> str:  # KeyError would print repr(message)
        return CheckpointError.__str__(self)


class TensorMismatchError(CheckpointError):
    """A shape or dtype differs between checkpoint and target."""


class MemoryBudgetError(CheckpointError, MemoryError):
    """What this host's ranks, or its keeper, want to hold does not fit its memory."""

    def __str__(self) -> str:
        return CheckpointError.__str__(self)


class WorkerError(CheckpointError):
    """The worker process of this rank died or broke the protocol."""


class PeerError(CheckpointError, TimeoutError):
    """A peer did not answer within the limit; the message names it."""

    def __str__(self) -> str:
        return CheckpointError.__str__(self)


class JobStoreError(CheckpointError, ConnectionError):
    """The job's c10d store, through which ranks meet, is gone."""

    def __str__(self) -> str:  # as an OSError it would print (errno, message)
        return CheckpointError.__str__(self)


class SaveFailedError(CheckpointError):
    """A save was not committed; raised on every rank with the cause and its rank."""


@contextmanager
def errors_at(path: str) -> Iterator[None]:
    """Name this path in errors of the block that name none."""
    try:
        yield
    except CheckpointError as error:
        error.path = error.path or path
        raise


def as_checkpoint_error(error: BaseException, rank: int | None = None) -> CheckpointError:
    """The error itself if it is smckpt's, else a `CheckpointError` that describes it, so that every
    error can go to peers. It never becomes a `StateError` or another error of the user's."""
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(
        f"{type(error).__name__}: {error}",
        remedy="see the traceback on that rank: smckpt found no wrong argument or state, so this "
        "may be a fault of smckpt",
        rank=rank,
    )


def error_from_json(data: Any) -> CheckpointError:
    """The inverse of `CheckpointError.to_json`. Other data, or an unknown type, becomes a
    `CheckpointError` that says so."""
    if not isinstance(data, dict) or not isinstance(data.get("message"), str):
        return CheckpointError(f"an error that cannot be decoded: {str(data)[:200]}")
    kind = globals().get(str(data.get("type")), CheckpointError)
    if not (isinstance(kind, type) and issubclass(kind, CheckpointError)):
        kind = CheckpointError
    more = {"of_store": data.get("of_store") is True} if issubclass(kind, StorageError) else {}
    error = kind(
        data["message"],
        **more,
        remedy=data.get("remedy", ""),
        path=data.get("path"),
        rank=data.get("rank"),
        host=data.get("host"),
    )
    error.moment = data.get("moment")
    return error
