"""A save: select, stage, write, commit, one queue at a time."""
