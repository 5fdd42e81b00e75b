"""People's optimizers: how to build each over a small model, and how to step it."""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

Build = Callable[[nn.Module], Any]

_WITH_CLOSURE = (
    "LBFGS", "SAM", "FriendlySAM", "WSAM", "LookSAM", "BSAM", "AdamWScheduleFreeClosure",
    "RAdamScheduleFreeClosure", "SGDScheduleFreeClosure",
)  # fmt: skip


def net(seed: int = 0, *, wide: bool = False) -> nn.Module:
    """wide: weights that low-bit optimizers quantise, with 4,096 elements on each of two ranks."""
    torch.manual_seed(seed)
    inputs, hidden = (64, 128) if wide else (6, 8)
    first = nn.Linear(inputs, hidden)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(hidden, 64 if wide else 4, bias=False))


def step(model: nn.Module, optimizer: Any, seed: int, shape: tuple[int, ...] | None = None) -> None:
    """One step of whatever form the optimizer wants. shape: of the batch; None: as `net` wants."""
    first = next(module for module in model.modules() if isinstance(module, nn.Linear))
    shape = shape or (4, first.in_features)
    device = next(model.parameters()).device
    batch = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)
    torch.manual_seed(seed)  # some draw numbers in their step, of numpy too
    np.random.seed(seed)
    graph = type(optimizer).__name__ in ("AdaHessian", "SophiaH")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found: torch.Tensor = model(batch).square().mean()
        found.backward(create_graph=graph)
        return found

    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    if type(optimizer).__name__ == "PCGrad":
        optimizer.pc_backward([model(batch).square().mean(), model(batch).sum()])
        optimizer.step()
    elif type(optimizer).__name__ == "AliG":
        found = float(loss().detach())
        optimizer.step(lambda: found)
    elif type(optimizer).__name__ in ("LOMO", "AdaLOMO"):
        optimizer.fused_backward(model(batch).square().mean(), 0.01)
    elif type(optimizer).__name__ == "SparseAdam":
        loss()
        for parameter in model.parameters():
            parameter.grad = parameter.grad.to_sparse()  # type: ignore[union-attr]
        optimizer.step()
    elif type(optimizer).__name__ == "SafeFP16Optimizer":
        optimizer.zero_grad()
        optimizer.backward(model(batch).float().square().mean())
        optimizer.step()
    elif type(optimizer).__name__ in _WITH_CLOSURE:
        loss()
        optimizer.step(loss)
    else:
        loss()
        optimizer.step()
    optimizer.zero_grad()


def _lr(kind: Any, model: nn.Module, **more: Any) -> Any:
    return kind(model.parameters(), lr=0.01, **more)


def _around(kind: Any, model: nn.Module, **more: Any) -> Any:
    return kind(torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), **more)


def _base(kind: Any, model: nn.Module) -> Any:
    """A wrapper that makes the optimizer inside by its class."""
    model_first = (model,) if next(iter(inspect.signature(kind).parameters)) == "model" else ()
    return kind(*model_first, model.parameters(), torch.optim.AdamW, lr=0.01)


def _kinds(package: Any) -> dict[str, Any]:
    return {name: kind for name, kind in vars(package).items() if inspect.isclass(kind)}


def _of_torch() -> dict[str, Build]:
    found: dict[str, Build] = {
        name: partial(_lr, kind)
        for name, kind in _kinds(torch.optim).items()
        if issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "Muon")
    }
    found["SGD momentum"] = partial(_lr, torch.optim.SGD, momentum=0.9)
    found["AdamW amsgrad"] = partial(_lr, torch.optim.AdamW, amsgrad=True)
    found["AdamW tensor lr"] = lambda m: torch.optim.AdamW(m.parameters(), torch.tensor(0.01))
    found["Muon"] = lambda m: torch.optim.Muon([p for p in m.parameters() if p.dim() == 2], lr=0.01)
    return found


def _of_schedulefree() -> dict[str, Build]:
    import schedulefree as there

    return {
        name: partial(_around, kind, momentum=0.9) if "Wrapper" in name else partial(_lr, kind)
        for name, kind in _kinds(there).items()
    }


def _of_pytorch_optimizer() -> dict[str, Build]:
    import pytorch_optimizer as there

    found: dict[str, Build] = {
        name: partial(_built, there.load_optimizer(name))
        for name in there.get_supported_optimizers()
    }
    for name in ("Lookahead", "OrthoGrad", "TRAC", "PCGrad", "ScheduleFreeWrapper"):
        found[name] = partial(_around, getattr(there, name))
    for name in ("SAM", "FriendlySAM", "LookSAM", "WSAM"):
        found[name] = partial(_base, getattr(there, name))
    return found


def _built(kind: Any, model: nn.Module) -> Any:
    parameters = inspect.signature(kind).parameters
    numbers = {"num_data": 16, "num_iterations": 10}
    given = {name: number for name, number in numbers.items() if name in parameters}
    if next(iter(parameters)) == "model":
        return kind(model, **given)
    tensors = list(model.parameters())
    if (
        kind.__name__ in ("AdaGO", "AdaMuon", "NorMuon", "SpectralSphere")
        or "Muon" in kind.__name__
    ):
        tensors = [p for p in tensors if p.dim() == 2]
        if any("use_muon" in inspect.getsource(each) for each in kind.__mro__[:2]):
            return kind([{"params": tensors, "use_muon": True}], **given)
    return kind(tensors, **given)


def _of_torch_distributed() -> dict[str, Build]:
    """They want a process group, and one model on all ranks."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    def averaging(model: nn.Module) -> Any:
        if "Fully" in type(model).__name__ or "FSDP" in type(model).__name__:
            raise TypeError("it averages the parameters of whole models")
        averager = PeriodicModelAverager(period=2, warmup_steps=1)
        return PostLocalSGDOptimizer(
            torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), averager
        )

    return {
        "ZeroRedundancyOptimizer": lambda m: ZeroRedundancyOptimizer(
            m.parameters(), torch.optim.AdamW, lr=0.01
        ),
        "PostLocalSGDOptimizer": averaging,
        "apply_optimizer_in_backward": InBackward,
    }


class InBackward:
    """The optimizers that torch steps in the backward, one for each parameter."""

    def __init__(self, model: nn.Module) -> None:
        from torch.distributed.optim import (
            _apply_optimizer_in_backward,
            _get_in_backward_optimizers,
        )

        _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 0.01})
        self.optimizers = _get_in_backward_optimizers(model)

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {str(n): each.state_dict() for n, each in enumerate(self.optimizers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for number, each in enumerate(self.optimizers):
            each.load_state_dict(state_dict[str(number)])


def _of_torchao() -> dict[str, Build]:
    import torchao.optim as there

    return {
        name: partial(_lr, kind)
        for name, kind in _kinds(there).items()
        if issubclass(kind, torch.optim.Optimizer) and name != "CPUOffloadOptimizer"
    }


def _of_bitsandbytes() -> dict[str, Build]:
    import bitsandbytes.optim as there

    return {
        name: partial(
            _lr, kind, **({"momentum": 0.9} if name[:3] == "SGD" or "LARS" in name else {})
        )
        for name, kind in _kinds(there).items()
        if issubclass(kind, torch.optim.Optimizer)
    }


def everyone(only: str = "") -> dict[str, Build]:
    """By "package: name": the optimizers of torch and of the packages that are installed.

    Args:
        only: a name, whose package alone is asked.
    """
    found: dict[str, Build] = {}
    for package, more in (
        ("torch.optim", _of_torch),
        ("torch.distributed.optim", _of_torch_distributed),
        ("torchao", _of_torchao),
        ("bitsandbytes", _of_bitsandbytes),
        ("schedulefree", _of_schedulefree),
        ("pytorch_optimizer", _of_pytorch_optimizer),
    ):
        if only.partition(":")[0] in ("", package) and importlib.util.find_spec(package):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found |= {f"{package}: {name}": build for name, build in more().items()}
    return found
