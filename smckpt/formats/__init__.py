"""Checkpoints of other systems: how each is recognised, read as a catalogue, and written."""
