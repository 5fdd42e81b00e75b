"""Under which share of the budget a worker's requests are made."""

from __future__ import annotations

from typing import Any

from smckpt.engine.background.worker_client import Worker
from smckpt.storage.budget import Share

__all__ = ["heard_shares"]


def heard_shares() -> dict[str, Share]:
    """From now on, in a rank's process: the share of the last request, by the command's name."""
    heard: dict[str, Share] = {}
    call = Worker.call

    def listening(worker: Worker, command: Any, *, timeout: float, access: Any = None) -> Any:
        heard[command.function] = access.share
        return call(worker, command, timeout=timeout, access=access)

    Worker.call = listening  # type: ignore[method-assign]
    return heard
