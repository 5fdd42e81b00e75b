"""The life of a run: when to save, what to keep, how to end, and which step to resume from."""
