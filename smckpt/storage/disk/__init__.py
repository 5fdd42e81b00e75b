"""Directories of a file system."""
