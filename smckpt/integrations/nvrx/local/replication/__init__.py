"""`nvidia_resiliency_ext.checkpointing.local.replication`."""
