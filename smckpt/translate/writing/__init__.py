"""Bytes on their way into an export: target tensors, casts, and the directory."""
