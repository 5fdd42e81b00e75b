"""What holds a model: files of ranks, checkpoints of ours and of other systems."""
