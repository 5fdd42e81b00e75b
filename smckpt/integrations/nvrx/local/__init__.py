"""`nvidia_resiliency_ext.checkpointing.local`: checkpoints on the nodes' own disks, with copies."""
