"""The names of `nvidia_resiliency_ext.checkpointing` (NVIDIA resiliency extension 0.7).

`smckpt run --for nvrx` provides them under NVRx's own name. The process in which a request's
function runs is in `nvrx_worker.py`.
"""

VERSION = "0.7.0"  # of NVRx, whose names these are
