"""A small model with everything that makes state hard, and steps that move it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["Block", "Frozen", "Net", "groups_of", "step"]


class Block(nn.Module):
    """Sizes that divide by nothing, a buffer that is saved and one that is not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width + 1)
        self.norm = nn.LayerNorm(width + 1)
        self.down = nn.Linear(width + 1, width, bias=False)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return x + self.down(self.norm(self.up(x)))


class Frozen(nn.Linear):
    """A layer of its own type, so that policies can wrap it alone."""


class Net(nn.Module):
    """Two blocks, a frozen layer, and an embedding that shares its weight with the head."""

    def __init__(self, width: int = 6, *, shared: bool = True, frozen: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.frozen = Frozen(width, width)
        self.head = nn.Linear(width, 11, bias=False)
        if shared:
            self.head.weight = self.embedding.weight
        if frozen:
            self.frozen.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with hyperparameters of their own; frozen parameters stand in none."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": parameters[::2], "weight_decay": 0.1, "initial_lr": 0.5},
        {"params": parameters[1::2], "betas": (0.8, 0.95), "lr": 3e-3},
    ]


def step(model: nn.Module, optimizer: Any, count: int = 1, seed: int = 0) -> None:
    """`count` training steps on tokens that depend on `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = torch.randint(0, 11, (4, 5), generator=generator)
        model(ids).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
