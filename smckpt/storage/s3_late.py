"""Bounded waits for what tells credentials: programs, functions of the user's, other hosts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from smckpt.storage.s3_faults import Unanswered

__all__ = ["in_time", "refresh_in_time"]

Result = TypeVar("Result")


def in_time(call: Callable[[], Result], seconds: float, allowed: float | None = None) -> Result:
    """What `call()` gives or raises. It is made in a thread of its own, which is left behind where
    it takes longer.

    Args:
        allowed: seconds to speak of in the error, if not `seconds`.

    Raises:
        Unanswered: it has not ended after `seconds`.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="smckpt-s3-credentials", daemon=True)
    thread.start()
    thread.join(max(seconds, 0))
    if errors:
        raise errors[0]
    if not results:
        raise Unanswered(seconds if allowed is None else allowed)
    return results[0]


def refresh_in_time(client: Any, seconds: float) -> None:
    """Let a client fetch credentials that are due before it signs with them: botocore would wait
    without end for the program that tells them."""

    def refresh(request_signer: Any, **_: Any) -> None:
        credentials = getattr(request_signer, "_credentials", None)
        due = getattr(credentials, "refresh_needed", None)  # fixed ones have none
        if callable(due) and due():
            in_time(credentials.get_frozen_credentials, seconds)  # type: ignore[union-attr]

    client.meta.events.register("before-sign.s3", refresh, unique_id="smckpt-credentials")
