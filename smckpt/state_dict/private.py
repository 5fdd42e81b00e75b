"""All private torch names, in one place, behind checks that say what is missing.

Tried on torch 2.11 to 2.13. A torch that lacks one of these is told by name, not by an
AttributeError in the middle of a save.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from smckpt.errors import StateError
from smckpt.layout.mesh import Placement
from smckpt.state_dict.names import canonical

__all__ = [
    "buffer_dtypes",
    "detached",
    "dtensor_parts",
    "fsdp1_units",
    "is_dtensor",
    "is_fsdp1",
    "is_fsdp2",
    "is_wrapper",
    "placement_of",
    "reshard_fsdp2",
    "unwrapped",
]

_FLAT_NAMES = (
    "_fqns",
    "_shapes",
    "_contiguities",
    "_numels_with_padding",
    "_is_padding_mask",
    "_shard_param_infos",
    "_params",
    "_shared_param_infos",
)


def _missing(strategy: str, name: str) -> StateError:
    return StateError(
        f"torch {torch.__version__} lacks {name}, which {strategy} state is read from",
        remedy="use a torch from 2.11 to 2.13, or report this version",
    )


def is_dtensor(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    return kind not in _PLAIN and issubclass(kind, _dtensor_class())


_PLAIN = (torch.Tensor, nn.Parameter)  # most tensors: asked thousands of times in a take


@functools.cache
def _dtensor_class() -> type:
    from torch.distributed.tensor import DTensor

    return DTensor


def dtensor_parts(tensor: Any) -> tuple[torch.Tensor, Any, tuple[Any, ...], torch.Size]:
    """(local tensor, device mesh, placements, global shape) without autograd or communication."""
    try:
        spec = tensor._spec
        return tensor._local_tensor, spec.mesh, spec.placements, spec.shape
    except AttributeError as error:
        raise _missing("DTensor", str(error)) from error


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.detach()`. A DTensor's goes through torch's dispatcher, sharding propagation and a
    Dynamo wrapper, tens of microseconds each: it is made here as torch makes it in the end, and
    without `__init__`, which does nothing in another such wrapper."""
    if not is_dtensor(tensor):
        return tensor.detach()
    kind: Any = _dtensor_class()
    try:
        local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
        out: torch.Tensor = kind.__new__(kind, local.detach(), tensor._spec, requires_grad=False)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):  # another torch: slower, never wrong
        return tensor.detach()
    return out


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether it has no memory of its own, but tensors inside."""
    if type(tensor) in _PLAIN or tensor.is_meta:
        return False
    inside = hasattr(type(tensor), "__tensor_flatten__")
    return inside or bool(tensor.numel() and tensor.data_ptr() == 0)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The one tensor inside that holds the same values in the same form, if there is such a one:
    what arrives from a collective, or a weight that is cast where it is used. Else as it is."""
    if type(tensor) in _PLAIN or not is_wrapper(tensor):
        return tensor
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        return tensor.wait()  # type: ignore[attr-defined, no-any-return]
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor
    names, _ = tensor.__tensor_flatten__()
    inner = [getattr(tensor, name) for name in names]
    form = (tensor.shape, tensor.dtype)
    same = [t for t in inner if (t.shape, t.dtype) == form]
    if len(same) == 1 and all(t is same[0] or t.numel() == 1 for t in inner):
        return same[0].detach()  # type: ignore[no-any-return]
    return tensor


_REPLICATE = Placement("replicate")


def placement_of(placement: Any, fqn: str) -> Placement:
    """Our word for torch's placement.

    Raises:
        StateError: a pending reduction (Partial), or a placement that is not known.
    """
    kind = type(placement).__name__
    if kind == "Replicate":
        return _REPLICATE
    if kind == "Shard":
        return _shard(placement.dim)
    if kind == "_StridedShard":
        return Placement("strided", placement.dim, placement.split_factor)
    raise StateError(
        f"{fqn} has the placement {placement}, which cannot be saved",
        remedy="redistribute it to Shard or Replicate before taking the state",
    )


@functools.cache
def _shard(dim: int) -> Placement:
    return Placement("shard", dim)


def uncompiled(model: nn.Module) -> nn.Module:
    """What `torch.compile(model)` wraps, which tells the strategy; else the model."""
    while type(model).__name__ == "OptimizedModule":
        model = model._orig_mod  # type: ignore[assignment]
    return model


def is_fsdp2(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(m, FSDPModule) for m in model.modules())


def reshard_fsdp2(model: nn.Module) -> None:
    """After a forward without backward the modules may hold unsharded parameters."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_fsdp1(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return any(isinstance(m, FullyShardedDataParallel) for m in model.modules())


def fsdp1_units(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """(raw module name, FSDP module, handle) of each unit that manages parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for name, module in model.named_modules():
        if not isinstance(module, FullyShardedDataParallel):
            continue
        try:
            handle = module._handle
            if handle is None:
                continue
            for needed in _FLAT_NAMES:
                getattr(handle.flat_param, needed)
        except AttributeError as error:
            raise _missing("FSDP1", str(error)) from error
        yield name, module, handle


def buffer_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Name of each buffer that mixed precision casts with the first forward → the dtype in which it
    was made, in which torch saves it too."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    out: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module.mixed_precision.buffer_dtype:
            prefix = f"{name}." if name else ""
            try:
                known = module._buffer_name_to_orig_dtype
            except AttributeError as error:
                raise _missing("FSDP1", str(error)) from error
            for buffer, dtype in known.items():
                out[canonical(f"{prefix}{buffer}")] = dtype
    return out
