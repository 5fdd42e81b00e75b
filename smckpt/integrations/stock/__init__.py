"""The checkpoints that frameworks themselves write, made of those that smckpt's doors saved.

A framework is not imported: the machine that converts need not have it.
"""
