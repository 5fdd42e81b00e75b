"""Runs scripts of other checkpoint systems unchanged, with smckpt under the names they import."""

from smckpt.run.doors import Provided, provide
from smckpt.run.script import run_script

__all__ = ["Provided", "provide", "run_script"]
