"""What all ranks hold, put together from their entries alone, to compare with the truth."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from smckpt.state_dict.select import Selector

__all__ = ["assembled", "differences", "flat", "same_bits", "snapshot"]


def assembled(state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Logical name → whole tensor, from the entries of all ranks; each element must be there.

    Elements that several ranks hold must agree bit for bit. Runs a collective.
    """
    selection = Selector(_rank()).select(state_dict)
    mine = [
        (entry, tensor.detach().clone().reshape(-1))
        for entry, tensor in zip(selection.entries, selection.tensors, strict=True)
    ]
    for entry, tensor in zip(selection.entries, selection.tensors, strict=True):
        assert tuple(tensor.shape) == entry.shape == entry.geometry.local_shape(_rank()), entry
    everyone: list[Any] = [mine]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    whole: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    for rank, held in enumerate(everyone):
        for entry, array in held:
            for piece in entry.geometry.pieces(rank):
                name = entry.logical_name(piece.name)
                if name not in whole:
                    whole[name] = torch.zeros(piece.shape, dtype=array.dtype)
                    seen[name] = torch.zeros(piece.shape, dtype=torch.bool)
                box = tuple(
                    slice(o, o + n) for o, n in zip(piece.box.offsets, piece.box.sizes, strict=True)
                )
                part = torch.as_strided(array, piece.box.sizes, piece.strides, piece.start)
                known = seen[name][box]
                there = whole[name][box]
                assert same_bits(there[known], part[known]), f"replicas of {name} differ"
                whole[name][box] = part
                seen[name][box] = True
    for name, mask in seen.items():
        assert mask.all(), f"{name} is not whole"
    return whole


def flat(state_dict: Mapping[Any, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a nested dict by dotted path, gathered where they are DTensors."""
    out: dict[str, torch.Tensor] = {}
    for key, value in state_dict.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            out.update(flat(value, name))
        elif isinstance(value, torch.Tensor):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            out[name] = whole.detach().clone()
    return out


def differences(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> list[str]:
    """What keeps two sets of tensors from being the same, bit for bit; [] when they are."""
    out = [f"only in ours: {n}" for n in sorted(ours.keys() - theirs.keys())]
    out += [f"only in theirs: {n}" for n in sorted(theirs.keys() - ours.keys())]
    out += [
        f"differs: {n}{_how(ours[n], theirs[n])}"
        for n in ours
        if n in theirs and not same_bits(ours[n], theirs[n])
    ]
    return out


def _how(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f" ({a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)})"
    return f" (in {int((a != b).sum())} of {a.numel()} values)"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit: −0.0 is not 0.0, and a NaN equals itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(
        a.detach().contiguous().reshape(-1).view(torch.uint8),
        b.detach().contiguous().reshape(-1).view(torch.uint8),
    )


def snapshot(model: torch.nn.Module, optimizer: Any = None) -> dict[str, Any]:
    """This rank's own memory, copied: parameters, gradients, buffers, state and groups.

    `differences` compares its tensors; the groups without their parameters are under "groups".
    """
    out: dict[str, Any] = {}
    for number, parameter in enumerate(model.parameters()):
        out[f"parameter {number}"] = _local(parameter)
        if parameter.grad is not None:
            out[f"gradient {number}"] = _local(parameter.grad)
    for name, buffer in model.named_buffers():
        out[f"buffer {name}"] = _local(buffer)
    if optimizer is None:
        return out
    numbers = {p: i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    order = {p: i for i, p in enumerate(numbers)}
    for parameter, slots in optimizer.state.items():
        for slot, value in slots.items():
            value = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
            out[f"state {order[parameter]} {slot}"] = _local(value)
    for index, group in enumerate(optimizer.param_groups):
        rest = copy.deepcopy({k: v for k, v in group.items() if k != "params"})
        blob = repr(sorted(rest.items())).encode()
        out[f"group {index}"] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    return out


def _local(tensor: Any) -> torch.Tensor:
    inner = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
    out: torch.Tensor = inner.detach().clone()
    return out


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
