"""A `.ckpt` as Lightning's own `Trainer.save_checkpoint` writes it."""

from __future__ import annotations

from smckpt.errors import UsageError
from smckpt.translate.archives.new_target import NewTarget
from smckpt.translate.conversion.stock.format import StockFormat
from smckpt.translate.conversion.stock.lightning_dict import checkpoint_of
from smckpt.translate.conversion.stock.optimizers import numbered
from smckpt.translate.conversion.stock.sharded import is_sharded
from smckpt.translate.conversion.whole_state import WholeState

__all__ = ["FORMAT"]


def _write(whole: WholeState, target: NewTarget) -> tuple[str, ...]:
    try:
        checkpoint = checkpoint_of(whole.nested())
    except UsageError as error:
        raise UsageError(
            error.message,
            remedy="if you trust the checkpoint, convert it in Python: name the types with "
            "torch.serialization.add_safe_globals, then call smckpt.convert",
            path=whole.catalogue.url,
        ) from error
    # Lightning's sharded strategies read one file too, with parameters under their names
    if "optimizer_states" in checkpoint and not is_sharded(whole, "model"):
        checkpoint["optimizer_states"] = [numbered(each) for each in checkpoint["optimizer_states"]]
    with target.file() as file:
        whole.write_torch(file, checkpoint)
    return ()


FORMAT = StockFormat(
    "SmckptCheckpointIO", frozenset({"lightning", "lightning_kinds"}), _write, one_file=True
)
