"""The limits of time in the tests, in one place.

They are there so that what hangs ends, not to measure: each is many times what a quiet machine
needs. SMCKPT_TEST_PATIENCE scales them all, for a machine that is slower or has more to do.
"""

from __future__ import annotations

import os

__all__ = ["seconds"]

PATIENCE = float(os.environ.get("SMCKPT_TEST_PATIENCE", "1"))


def seconds(limit: float) -> float:
    """`limit`, scaled."""
    return limit * PATIENCE
