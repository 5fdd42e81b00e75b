"""Entries, geometry and the file image, without torch, I/O or communication."""
