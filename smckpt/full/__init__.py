"""`sm_state_dict_type`: FULL, SHARDED or LOCAL state. This room gathers and translates FULL."""

from smckpt.full.context import extend_torch_config, is_extended, sm_state_dict_type
from smckpt.full.gathered import FullStateDictConfig

__all__ = ["FullStateDictConfig", "extend_torch_config", "is_extended", "sm_state_dict_type"]
