"""A `step-N` as torchtitan's own checkpoint manager writes it: a directory of DCP."""

from __future__ import annotations

from smckpt.translate.archives.new_target import NewTarget
from smckpt.translate.conversion.stock.format import StockFormat
from smckpt.translate.conversion.whole_state import WholeState

__all__ = ["FORMAT"]


def _write(whole: WholeState, target: NewTarget) -> tuple[str, ...]:
    whole.add_values(whole.catalogue.object_ranks)  # the position of each rank in the data
    return whole.write_dcp(target.path(), whole.nested(held=whole.is_in_tuple))


FORMAT = StockFormat("SmckptCheckpointManager", frozenset({"train_state", "optimizer"}), _write)
