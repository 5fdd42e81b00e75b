"""The live state of a rank's modules (FSDP1, FSDP2, DDP, plain) and their optimizers."""

from smckpt.layout.containers import register_value_class
from smckpt.state_dict.context import FULL, LOCAL, SHARDED, SMStateDictType
from smckpt.state_dict.model_views import register_model_view
from smckpt.state_dict.of_optimizers.own_methods import init_optim_state
from smckpt.state_dict.parts import register_tensor_class
from smckpt.state_dict.views import Held, ModelView

__all__ = [
    "FULL",
    "LOCAL",
    "SHARDED",
    "Held",
    "ModelView",
    "SMStateDictType",
    "init_optim_state",
    "register_model_view",
    "register_tensor_class",
    "register_value_class",
]
