"""From live tensors to the bytes of a file, in memory that a worker can see."""
