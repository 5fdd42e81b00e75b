"""Entries, geometry, file image: no torch, no I/O, no ranks that talk."""
