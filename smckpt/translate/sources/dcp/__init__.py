"""Checkpoints of torch.distributed.checkpoint (DCP) and of what is built on it, read without it."""
