"""Passes over whole checkpoints: verify, mend, copy, reshard, compare, repair."""
