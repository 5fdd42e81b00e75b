"""The `smckpt` command: finding, showing, verifying and exporting checkpoints, without torch."""

from smckpt.cli.app import main

__all__ = ["main"]
