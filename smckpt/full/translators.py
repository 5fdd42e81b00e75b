"""What makes the full state of a live, tensor-parallel model: the translator, a room above. It
registers here."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from smckpt.registry import Registry

__all__ = ["TRANSLATORS", "LiveTranslator", "live_translator"]


@dataclass(frozen=True)
class LiveTranslator:
    """
    Args:
        recognises: whether some names of parameters are those of a tensor-parallel layout.
        full_state: as `smckpt.full.parallel.full_state`.
    """

    recognises: Callable[[Collection[str]], bool]
    full_state: Callable[..., dict[str, Any] | None]


TRANSLATORS = Registry("translator of live models", LiveTranslator, "smckpt.live_translators", {})


def live_translator() -> LiveTranslator:
    found = TRANSLATORS.find("hugging_face")
    assert found is not None  # the package registers it
    return found
