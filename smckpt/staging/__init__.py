"""Copies live tensors into the arena: a file's bytes, in memory shared with the worker."""
