"""Real text from this machine as byte tokens, in an order that can be resumed."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCABULARY = 256  # one token per byte: no tokenizer to download


def read_text(paths: list[Path], limit: int = 8 << 20) -> torch.Tensor:
    """The bytes of the files, one after the other. Without files: of Python's own library.

    Args:
        paths: text files, or directories whose *.py, *.txt and *.md files are taken.
        limit: the most bytes to read.

    Returns:
        uint8, shape (bytes,).
    """
    files: list[Path] = []
    for path in paths or [Path(sysconfig.get_paths()["stdlib"])]:
        inside = [found for kind in ("*.py", "*.txt", "*.md") for found in path.glob(kind)]
        files += sorted(inside) if path.is_dir() else [path]
    text = bytearray()
    for file in files:
        text += file.read_bytes()[: limit - len(text)]
    if not text:  # torch makes no tensor of an empty buffer
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(text, dtype=torch.uint8)


class Batches:
    """An endless iterator of shuffled windows of the text; each data-parallel rank gets its share.

    The order is a function of seed and epoch, so two integers are the position. Each window's start
    also has a random offset from NumPy's generator. That generator has to be resumed too, or
    batches differ.
    """

    def __init__(
        self, text: torch.Tensor, *, length: int, batch: int, rank: int, ranks: int, seed: int
    ) -> None:
        self.text, self.length, self.batch = text, length, batch
        self.rank, self.ranks, self.seed = rank, ranks, seed
        self.epoch = self.position = 0
        self.order = self._shuffled()

    def next(self) -> torch.Tensor:
        """Tokens, int64, shape (batch, length)."""
        if self.position + self.batch * self.ranks > len(self.order):
            self.epoch, self.position = self.epoch + 1, 0
            self.order = self._shuffled()
        first = self.position + self.batch * self.rank
        self.position += self.batch * self.ranks
        windows = self.order[first : first + self.batch].numpy()
        starts = windows * self.length + np.random.randint(self.length, size=self.batch)
        return torch.stack([self.text[start : start + self.length] for start in starts]).long()

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position, self.seed = state["epoch"], state["position"], state["seed"]
        self.order = self._shuffled()

    def _shuffled(self) -> torch.Tensor:
        # the random offset may reach into the next window
        windows = len(self.text) // self.length - 1
        if windows < self.batch * self.ranks:
            raise SystemExit(f"{len(self.text)} bytes of text are too few: pass more with --data")
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(windows, generator=generator)
