"""Saving and loading: the only room that knows all of the others."""
