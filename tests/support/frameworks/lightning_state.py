"""A checkpoint as Lightning dumps it, and how two of them are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def checkpoint() -> dict[str, Any]:
    """As Lightning dumps it, after a step."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    return {
        "epoch": 1,
        "global_step": 4,
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [scheduler.state_dict()],
        "callbacks": {
            "Best{'monitor': 'loss'}": {"best": {"a/b.ckpt": torch.tensor(0.5)}, (1,): 2}
        },
        "averaging_state": {"weights": torch.arange(400_000.0)},
        "hyper_parameters": {"where": Path("a"), "sizes": (1, 2)},
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b
