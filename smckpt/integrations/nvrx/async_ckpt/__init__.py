"""`nvidia_resiliency_ext.checkpointing.async_ckpt`. Its usage guide imports a class from here."""

from smckpt.integrations.nvrx.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

__all__ = ["TorchAsyncCheckpoint"]
