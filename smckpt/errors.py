"""The errors that smckpt raises: a small tree under `CheckpointError`.

Every error says on which host and rank it happened, which path it concerns and what to do about
it. Errors travel between ranks as JSON (`to_json` / `error_from_json`), so that a rank which
waits for a peer raises the peer's own cause and not a timeout.
"""

from __future__ import annotations

import os
import socket
from typing import Any

__all__ = [
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointReplacedError",
    "CorruptCheckpointError",
    "FormatVersionError",
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
    "error_from_json",
]


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
        self.message = message
        self.remedy = remedy
        self.path = path
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.host = socket.gethostname() if host is None else host
        super().__init__(message)

    def __str__(self) -> str:
        where = f"[host {self.host}, rank {self.rank}"
        where += f", path {self.path}]" if self.path else "]"
        tail = f" What to do: {self.remedy}" if self.remedy else ""
        return f"{where} {self.message}{tail}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (error_from_json, (self.to_json(),))

    def to_json(self) -> dict[str, Any]:
        """A form that crosses the store and the worker's pipe."""
        return {
            "type": type(self).__name__,
            "message": self.message,
            "remedy": self.remedy,
            "path": self.path,
            "rank": self.rank,
            "host": self.host,
        }


class UsageError(CheckpointError, ValueError):
    """An argument is missing, contradicts another one, or is not honoured."""


class StateError(CheckpointError, TypeError):
    """The state holds something that cannot be saved, or that changed under us."""


class StorageError(CheckpointError, OSError):
    """The store refused: full, read-only, not a directory, lacks `link`, gone."""

    def __str__(self) -> str:  # OSError would print (errno, message)
        return CheckpointError.__str__(self)


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No committed checkpoint is there."""

    def __str__(self) -> str:
        return CheckpointError.__str__(self)


class CheckpointReplacedError(CheckpointError):
    """A newer save committed, and swept what was being read."""


class CorruptCheckpointError(CheckpointError):
    """Bytes differ from what was written; the message names file and offset."""


class FormatVersionError(CheckpointError):
    """Written by a newer major version of the format."""


class TopologyError(CheckpointError):
    """World, mesh or shard degree do not fit."""


class KeysMismatchError(CheckpointError, KeyError):
    """Names in the checkpoint and in the target differ; both lists are in the message."""

    def __str__(self) -> str:  # KeyError would print repr(message)
        return CheckpointError.__str__(self)


class TensorMismatchError(CheckpointError):
    """A shape or dtype differs between checkpoint and target."""


class MemoryBudgetError(CheckpointError, MemoryError):
    """The arenas of this host's ranks do not fit its memory."""

    def __str__(self) -> str:
        return CheckpointError.__str__(self)


class WorkerError(CheckpointError):
    """The writing process of this rank died or broke the protocol."""


class PeerError(CheckpointError, TimeoutError):
    """A peer did not answer within the limit; the message names it."""

    def __str__(self) -> str:
        return CheckpointError.__str__(self)


class SaveFailedError(CheckpointError):
    """A save was not committed; raised on every rank with the cause and its rank."""


def as_checkpoint_error(error: BaseException, rank: int | None = None) -> CheckpointError:
    """The error itself if it is ours, else one that says what it was: peers must hear of any."""
    if isinstance(error, CheckpointError):
        return error
    kind = StateError if isinstance(error, (TypeError, ValueError)) else WorkerError
    return kind(
        f"{type(error).__name__}: {error}",
        remedy="see the traceback on that rank",
        rank=rank,
    )


def error_from_json(data: dict[str, Any]) -> CheckpointError:
    """The inverse of `CheckpointError.to_json`; an unknown type becomes `CheckpointError`."""
    kind = globals().get(data.get("type", ""), CheckpointError)
    if not (isinstance(kind, type) and issubclass(kind, CheckpointError)):
        kind = CheckpointError
    return kind(
        data.get("message", ""),
        remedy=data.get("remedy", ""),
        path=data.get("path"),
        rank=data.get("rank"),
        host=data.get("host"),
    )
