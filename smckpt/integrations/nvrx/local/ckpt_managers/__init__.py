"""`nvidia_resiliency_ext.checkpointing.local.ckpt_managers`."""
