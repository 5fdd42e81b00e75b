"""The names of `nvidia_resiliency_ext.checkpointing` (NVIDIA resiliency extension 0.7).

`smckpt run --for nvrx` provides them under NVRx's own name. The process in which a request's
function runs is in `nvrx_worker.py`.
"""

from smckpt.integrations import give_paths

VERSION = "0.7.0"  # of NVRx, whose names these are

_MANAGER, _STRATEGIES = "local.ckpt_managers.local_manager", "local.replication.strategies"
give_paths(
    __name__,
    {
        "async_ckpt.cached_metadata_filesystem_reader": "async_ckpt.filesystem_async",
        "async_ckpt.state_dict_saver": "async_ckpt.state_dict_saver",
        "async_ckpt.torch_ckpt": "async_ckpt",
        "local.base_state_dict": "local.basic_state_dict",
        "local.ckpt_managers.base_manager": _MANAGER,
        "local.replication.group_utils": _STRATEGIES,
        "local.replication.utils": _STRATEGIES,
        "utils": "local.basic_state_dict",
    },
)
