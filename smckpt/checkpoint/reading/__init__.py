"""What a checkpoint holds, the plan to read it, and the reads: each block checked."""
