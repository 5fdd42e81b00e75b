"""The directories of DCP in which accelerate and the Trainer keep what FSDP shards."""

from __future__ import annotations

from smckpt.translate.archives.new_target import NewTarget
from smckpt.translate.conversion.whole_state import WholeState

__all__ = ["is_sharded", "write_sharded"]


def is_sharded(whole: WholeState, key: str) -> bool:
    """Whether ranks hold shards of what is under a first name."""
    for row in whole.catalogue.rows:
        rule = row.geometry
        if row.path[0] != key or rule.per_rank:
            continue
        degree = rule.shard_degree()  # 0: unknown, of explicit boxes
        if degree > 1 or (degree == 0 and rule.local_shape(row.ranks[0]) != rule.whole_shape):
            return True
    return False


def write_sharded(whole: WholeState, key: str, target: NewTarget, number: int) -> tuple[str, ...]:
    """Write one model or optimizer, the parameters under their names. accelerate reads it where the
    plugin's `state_dict_type` is SHARDED_STATE_DICT.

    Args:
        number: of the model or optimizer among those that accelerate prepared.
    """
    kind = key.partition("_")[0]
    folder = f"pytorch_model_fsdp_{number}" if kind == "model" else f"{kind}_{number}"
    with target.folder(folder) as path:
        return whole.write_dcp(path, {kind: whole.nested(key)})
