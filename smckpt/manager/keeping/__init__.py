"""Which checkpoints stay, and who may delete one."""
