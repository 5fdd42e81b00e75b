"""The versions of other packages with which the integrations were tested.

A Lightning of another version may save and then fail to resume. So an import of an integration
refuses it, as `smckpt run` does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from smckpt.errors import UsageError

__all__ = ["ANY_VERSION", "TESTED", "refuse_untested", "refuse_version"]

ANY_VERSION = "SMCKPT_ANY_VERSION"  # the environment variable that takes every version
TESTED = {  # the beginnings of versions
    "accelerate": ("1.15",),
    "lightning": ("2.6",),
    "transformers": ("4.57", "5.23"),
}


def refuse_untested(package: str, version: str) -> None:
    """
    Raises:
        UsageError: as `refuse_version`.
    """
    refuse_version(package, version, TESTED[package], bool(os.environ.get(ANY_VERSION)))


def refuse_version(package: str, version: str, tested: Sequence[str], force: bool) -> None:
    """
    Args:
        tested: the beginnings of tested versions, such as "2.13".

    Raises:
        UsageError: the version is none of those, and `force` is not set.
    """
    if not force and not any(version == t or version.startswith(f"{t}.") for t in tested):
        raise UsageError(
            f"{package} {version} was not tested; {', '.join(tested)} was",
            remedy="install that version, or take it as it is: `smckpt run --force`, force=True, "
            f"or {ANY_VERSION}=1 in the environment for an import",
        )
