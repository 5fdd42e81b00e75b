"""What is known of the checkpoints that a framework itself writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from smckpt.checkpoint.records.format import parse_name
from smckpt.translate.archives.new_target import NewTarget
from smckpt.translate.conversion.whole_state import WholeState

__all__ = ["StockFormat", "is_stock"]

# Weights and training state as the Trainer, accelerate, PEFT and DeepSpeed write them.
_STOCK = re.compile(
    r"(model|pytorch_model|adapter_model)([-_.].*)?\.(safetensors|bin)(\.index\.json)?"
    r"|(optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.(pt|bin)|scaler\.pt|training_args\.bin"
    r"|rng_state(_\d+)?\.pth|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl"
    r"|pytorch_model_fsdp_\d+|optimizer_\d+|global_step\d+|latest|zero_to_fp32\.py"
)


def is_stock(name: str) -> bool:
    """Whether a file or folder of this name holds another system's weights or training state."""
    return _STOCK.fullmatch(name) is not None and parse_name(name) is None


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
