"""The `smckpt` command: find, show, verify and export checkpoints, without torch."""

from smckpt.cli.app import main

__all__ = ["main"]
