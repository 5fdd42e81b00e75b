"""How a framework's own checkpoint is written.

What it looks like is known beside the door of that framework, in a room above this one. So it is
looked up by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from smckpt.errors import StateError
from smckpt.translate.new_target import NewTarget
from smckpt.translate.whole_state import WholeState

__all__ = ["FRAMEWORKS", "StockFormat"]

FRAMEWORKS = ("trainer", "accelerate", "lightning", "torchtitan")


@dataclass(frozen=True)
class StockFormat:
    """
    Args:
        saver: what saves the checkpoints that this can be made of, for errors.
        needs: the first names that are in each of those.
        write: writes it, and gives the names whose form it changes.
        one_file: it is a file, and no directory.
    """

    saver: str
    needs: frozenset[str]
    write: Callable[[WholeState, NewTarget], tuple[str, ...]]
    one_file: bool = False

    @classmethod
    def of(cls, framework: str) -> StockFormat:
        module = importlib.import_module(f"smckpt.integrations.stock.{framework}")
        found: StockFormat = module.FORMAT
        return found

    def refuse(self, whole: WholeState, framework: str) -> None:
        """
        Raises:
            StateError: another door saved the checkpoint, or none; the state is not in it.
        """
        absent = sorted(self.needs - whole.keys) if whole.catalogue.ours else sorted(self.needs)
        if not absent:
            return
        others = [
            name for name in FRAMEWORKS
            if name != framework and StockFormat.of(name).needs <= whole.keys
        ]  # fmt: skip
        remedy = f"pass a checkpoint that {self.saver} saved"
        if others and whole.catalogue.ours:
            remedy += f", or --to {others[0]}: {StockFormat.of(others[0]).saver} saved this one"
        raise StateError(
            f"{framework} cannot resume from this checkpoint: it has no {', '.join(absent)}, which "
            f"{self.saver} saves",
            remedy=f"{remedy}; to carry the weights alone, use `smckpt export`",
            path=whole.catalogue.url,
        )
