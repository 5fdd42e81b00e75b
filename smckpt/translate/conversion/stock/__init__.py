"""The checkpoints that frameworks themselves write, made of those that smckpt's doors saved.

A framework is not imported: the machine that converts need not have it.
"""

from __future__ import annotations

from smckpt.errors import StateError
from smckpt.translate.conversion.stock import accelerate, lightning, torchtitan, trainer
from smckpt.translate.conversion.whole_state import WholeState

__all__ = ["STOCK", "refuse_without"]

STOCK = {
    "trainer": trainer.FORMAT,
    "accelerate": accelerate.FORMAT,
    "lightning": lightning.FORMAT,
    "torchtitan": torchtitan.FORMAT,
}


def refuse_without(whole: WholeState, framework: str) -> None:
    """
    Raises:
        StateError: another door saved the checkpoint, or none; the state is not in it.
    """
    stock, ours = STOCK[framework], whole.catalogue.ours
    absent = sorted(stock.needs - whole.keys if ours else stock.needs)
    if not absent:
        return
    remedy = f"pass a checkpoint that {stock.saver} saved"
    for name, other in STOCK.items():
        if ours and other.needs <= whole.keys:
            remedy += f", or --to {name}: {other.saver} saved this one"
            break
    raise StateError(
        f"{framework} cannot resume from this checkpoint: it has no {', '.join(absent)}, which "
        f"{stock.saver} saves",
        remedy=f"{remedy}; to carry the weights alone, use `smckpt export`",
        path=whole.catalogue.url,
    )
