"""Which state a rank holds: FULL, SHARDED and LOCAL, for FSDP1, FSDP2, DDP and plain modules."""

from smckpt.state_dict.context import FULL, LOCAL, SHARDED, SMStateDictType, sm_state_dict_type
from smckpt.state_dict.extend import extend_torch_config
from smckpt.state_dict.full import FullStateDictConfig
from smckpt.state_dict.initial import init_optim_state

__all__ = [
    "FULL",
    "LOCAL",
    "SHARDED",
    "FullStateDictConfig",
    "SMStateDictType",
    "extend_torch_config",
    "init_optim_state",
    "sm_state_dict_type",
]
