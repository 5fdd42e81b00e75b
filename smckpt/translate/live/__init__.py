"""The full state of a live, tensor-parallel model."""
