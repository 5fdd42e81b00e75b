"""What the tests on a CUDA device share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import smckpt

__all__ = ["copied", "moved", "needs_cuda", "taken", "wait_on_device"]

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine"
)


def taken(model: nn.Module, optimizer: Any, kind: Any = smckpt.LOCAL) -> dict[str, Any]:
    with smckpt.sm_state_dict_type(model, kind):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def copied(tree: Any) -> Any:
    """The same nested containers, with copies of the local tensors on the CPU."""
    if isinstance(tree, Mapping):
        return {key: copied(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [copied(value) for value in tree]
    if isinstance(tree, torch.Tensor):
        local = tree.to_local() if hasattr(tree, "to_local") else tree
        return local.detach().resolve_conj().resolve_neg().cpu().clone()
    return tree


def moved(model: nn.Module, optimizer: Any, device: str, count: int = 1, seed: int = 0) -> None:
    """`count` training steps on tokens that depend on `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = torch.randint(0, 11, (4, 5), generator=generator).to(device)
        model(ids).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def wait_on_device(stream: torch.cuda.Stream, milliseconds: float = 300) -> None:
    """Keep a stream busy, so that what is queued after this has not happened yet."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(milliseconds * 1.5e6))
