"""The local data of torch's kinds of tensors, without autograd or communication.

All private names of DTensor that smckpt uses are in this module. Tested on torch 2.11 to 2.13; for
another torch the error names the one that it lacks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from smckpt.errors import StateError
from smckpt.layout.entries import DTYPES, Path, dotted
from smckpt.layout.mesh import Mesh, Placement
from smckpt.layout.strided import Box


def lacking(strategy: str, name: str) -> StateError:
    """The error if the installed torch lacks a private name."""
    return StateError(
        f"torch {torch.__version__} lacks {name}, which {strategy} state needs",
        remedy="use a torch from 2.11 to 2.13, or report this version",
    )


def is_dtensor(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    return kind not in PLAIN and issubclass(kind, _dtensor_class())


PLAIN = (torch.Tensor, nn.Parameter)  # most tensors; checked thousands of times in a take


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
        raise lacking("DTensor", str(error)) from error


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.detach()`, made directly for a DTensor: torch's own takes tens of microseconds in the
    dispatcher, sharding propagation and a Dynamo wrapper. `__init__`, which does nothing but has
    such a wrapper too, is skipped."""
    if not is_dtensor(tensor):
        return tensor.detach()
    kind: Any = _dtensor_class()
    try:
        local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
        out: torch.Tensor = kind.__new__(kind, local.detach(), tensor._spec, requires_grad=False)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):  # another torch: slower, never wrong
        return tensor.detach()
    return out


def fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, also into a tensor that was made in inference mode: it may be changed there alone."""
    with torch.inference_mode() if target.is_inference() else torch.no_grad():
        target.copy_(source)


def is_transformed(tensor: Any) -> bool:
    """Whether a transform of `torch.func` (grad, vmap) made it, for its own time alone."""
    return isinstance(tensor, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(
        tensor
    )


def is_flattening(tensor: torch.Tensor) -> bool:
    """Whether its class says which tensors it holds. (A DTensor has rules of its own.)"""
    kind = type(tensor)
    return kind not in PLAIN and hasattr(kind, "__tensor_flatten__") and not is_dtensor(tensor)


def is_value(tensor: torch.Tensor) -> bool:
    """Whether its elements are no array in memory: a sparse, nested or quantised tensor, which a
    checkpoint keeps as a value beside the tensors."""
    if type(tensor) not in PLAIN:  # a ShardedTensor has no layout
        return False
    odd = tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested
    return odd and not is_transformed(tensor)


def zeros_on_mesh(
    like: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    dims: tuple[int | None, ...] | None,
) -> torch.Tensor:
    """A DTensor of zeros on the mesh of another.

    Args:
        dims: the dimension along which each mesh dimension divides it, or None; whole on every rank
            if they are of another mesh.
    """
    from torch.distributed.tensor import Replicate, Shard, zeros

    _, mesh, _, _ = dtensor_parts(like)
    known = dims if dims is not None and len(dims) == mesh.ndim else (None,) * mesh.ndim
    placements = [Replicate() if dim is None else Shard(dim) for dim in known]
    made: torch.Tensor = zeros(shape, dtype=dtype, device_mesh=mesh, placements=placements)
    return made


def pending_in(tensor: torch.Tensor) -> list[Any] | None:
    """How a mesh holds a DTensor whose values torch has yet to compute from those of all ranks: the
    kind of each placement, and what it was made with. None for any other tensor."""
    if not is_dtensor(tensor):
        return None
    placements = dtensor_parts(tensor)[2]
    kinds = [type(each).__name__ for each in placements]
    if not any(kind in _PENDING for kind in kinds) or not _PLACED.keys() >= {*kinds}:
        return None
    pairs = zip(kinds, placements, strict=True)
    return [[kind, {name: getattr(p, name) for name in _PLACED[kind]}] for kind, p in pairs]


_MOST_PAIRS = 50_000  # of tensors that lie between each other: a third of a second
_PENDING = ("Partial", "_NormPartial")
_PLACED: dict[str, tuple[str, ...]] = {  # the arguments of torch's placements
    "Replicate": (),
    "Shard": ("dim",),
    "_StridedShard": ("dim", "split_factor"),
    "Partial": ("reduce_op",),
    "_NormPartial": ("norm_type",),
}


def pending_on_mesh(
    like: torch.Tensor, local: torch.Tensor, placed: Sequence[Any], shape: Sequence[int]
) -> torch.Tensor:
    """The inverse of `pending_in`, on the mesh of another DTensor.

    Raises:
        ValueError: no placement of torch is of such a kind.
    """
    from torch.distributed.tensor import placement_types as kinds
    from torch.distributed.tensor._ops import _math_ops

    found = {**vars(_math_ops), **vars(kinds)}
    if not _PLACED.keys() >= {kind for kind, _ in placed}:
        raise ValueError(f"unknown placements {placed!r}")
    made: torch.Tensor = _dtensor_class().from_local(  # type: ignore[attr-defined]
        local,
        dtensor_parts(like)[1],
        [found[kind](**how) for kind, how in placed],
        run_check=False,
        shape=torch.Size(shape),
        stride=arranged(tuple(shape), order_of(local), (), device="meta").stride(),
    )
    return made


def flags_of(tensor: torch.Tensor) -> str:
    """What a tensor is to autograd and to modules: "", or "grad", "parameter" or both; or "buffer"
    (`nn.Buffer`), with "unsaved" if it is not persistent."""
    found = "grad" * tensor.requires_grad + "parameter" * isinstance(tensor, nn.Parameter)
    if getattr(tensor, "_is_buffer", False):
        found += "buffer" + "unsaved" * (not getattr(tensor, "persistent", True))
    return found


def flagged(tensor: torch.Tensor, flags: str) -> torch.Tensor:
    """The same memory, as a tensor with these flags."""
    if not flags:
        return tensor
    made = tensor.detach().requires_grad_("grad" in flags)
    if "buffer" in flags:
        return nn.Buffer(made, persistent="unsaved" not in flags)
    return nn.Parameter(made, made.requires_grad) if "parameter" in flags else made


def order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions of a dense tensor in the order of its memory, if that is not the usual one.
    Matrix products give other bits for other orders."""
    if tensor.dim() < 2 or is_dtensor(tensor) or tensor.is_contiguous():
        return None
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim]))
    return order if tensor.permute(order).is_contiguous() else None


def expanded_in(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions along which all elements are one, so that no copy can fill them."""
    if is_dtensor(tensor) or tensor.layout is not torch.strided or tensor.is_contiguous():
        return ()
    steps = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    return tuple(dim for dim, (size, step) in steps if step == 0 and size > 1)


def arranged(
    shape: tuple[int, ...], order: tuple[int, ...] | None, expanded: Sequence[int], **like: Any
) -> torch.Tensor:
    """A tensor with its dimensions in an order of memory, or expanded along some of them. One in
    the usual order has no values yet."""
    if order is not None and len(order) == len(shape):
        return torch.empty_permuted(shape, order, **like).zero_()
    sizes = [1 if dim in expanded else size for dim, size in enumerate(shape)]
    return torch.zeros(sizes, **like).expand(*shape) if expanded else torch.empty(shape, **like)


def first_overlap(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, str] | None:
    """Two of these local tensors that have elements in common, if there are such. Of very many that
    lie between each other, not all pairs are compared."""
    spans = []
    for name, tensor in named:
        if tensor.numel() and not is_wrapper(tensor) and tensor.layout is torch.strided:
            start = tensor.data_ptr()
            end = start + reach_of(tensor) * tensor.element_size()
            spans.append((str(tensor.device), start, end, name, _Addresses(tensor)))
    spans.sort(key=lambda span: span[:4])
    around: list[Any] = []  # the spans that reach beyond the start of the next one
    left = _MOST_PAIRS
    for span in spans:
        around = [one for one in around if one[0] == span[0] and span[1] < one[2]]
        left -= len(around)
        for one in around if left >= 0 else ():  # two columns of one array have none in common
            try:
                common = np.shares_memory(one[-1], span[-1], max_work=10_000)  # type: ignore[arg-type]
            except np.exceptions.TooHardError:
                common = True
            if common:
                return one[3], span[3]
        around.append(span)
    return None


def reach_of(tensor: torch.Tensor) -> int:
    """The elements of its memory from its first to its last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * step for size, step in steps) + 1


class _Addresses:
    """Where a tensor's elements are, for numpy, which reads none of them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "typestr": f"|V{size}",
            "version": 3,
        }


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether it holds other tensors and has no memory of its own."""
    if type(tensor) in PLAIN or tensor.is_meta:
        return False
    kind = type(tensor)
    if hasattr(kind, "__tensor_flatten__") or kind.__name__ == "FakeTensor":
        return True
    return bool(tensor.numel() and tensor.data_ptr() == 0)


def is_of_own_class(tensor: torch.Tensor) -> bool:
    """Whether it is of a class of the user's that a load cannot make."""
    kind = type(tensor)
    known = kind in PLAIN or kind.__module__.split(".")[0] in ("torch", "torchao")
    return not known and not is_dtensor(tensor) and unwrapped(tensor) is tensor


def of_parameters(value: Any) -> dict[str, nn.Parameter] | None:
    """The parameters in a `ParameterList` or `ParameterDict` of parameters alone, by their names in
    its state dict. A load can make such a module, and no other one."""
    if type(value) not in (nn.ParameterList, nn.ParameterDict):
        return None
    found = {str(key): each for key, each in
             (enumerate(value) if type(value) is nn.ParameterList else value.items())}  # fmt: skip
    if not all(type(each) is nn.Parameter for each in found.values()):
        return None
    return found if value.state_dict().keys() == found.keys() else None  # no buffer of its own


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside with the same values in the same form, if there is one: the result of a
    collective, or a weight that is cast on use. Else the tensor itself."""
    if type(tensor) in PLAIN or not is_wrapper(tensor):
        return tensor
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        return tensor.wait()  # type: ignore[attr-defined, no-any-return]
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor
    try:
        names, context = tensor.__tensor_flatten__()
        inner = [held for name in names if (held := getattr(tensor, name)) is not None]
    except Exception:  # the class's own code: `parts_of` names it
        return tensor
    form = (tensor.shape, tensor.dtype)
    same = [held for held in inner if (held.shape, held.dtype) == form]
    if len(same) != 1 or any(held.numel() != 1 for held in inner if held is not same[0]):
        return tensor
    # Anything beside the one tensor may be a factor of its values. torchao's classes of this form
    # cast a weight on use: what is beside it is derived from it, or is an option.
    if type(tensor).__module__.split(".")[0] == "torchao" or (len(inner) == 1 and not context):
        return same[0].detach()  # type: ignore[no-any-return]
    return tensor


_REPLICATE = Placement("replicate")


def placement_of(placement: Any, fqn: str) -> Placement:
    """smckpt's `Placement` for torch's.

    Raises:
        StateError: a pending reduction (Partial), or an unknown placement.
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


def from_numpy(value: Any, path: Path, rank: int) -> torch.Tensor | None:
    """The memory of an array as a tensor; None if torch has no such dtype (text, times).

    Raises:
        StateError: it cannot be saved.
    """
    try:
        return torch.from_numpy(value)
    except (TypeError, ValueError) as error:
        if isinstance(error, TypeError) and value.dtype.kind not in "OV":
            return None
        raise StateError(
            f"the array at {dotted(path)} of dtype {value.dtype} cannot be saved: {error}",
            remedy="convert it to a plain dtype in the machine's order of bytes, and copy it",
            rank=rank,
        ) from error


def is_sharded_tensor(value: Any) -> bool:
    return type(value).__name__ == "ShardedTensor" and hasattr(value, "local_shards")


def flattened(local: torch.Tensor, path: Path, rank: int) -> torch.Tensor:
    """The same memory as one dimension, which a flat parameter's rule describes. Under NO_SHARD
    with use_orig_params=True, parameters and their state keep their shapes."""
    try:
        return local.view(-1)
    except RuntimeError as error:
        raise StateError(
            f"{dotted(path)} is not contiguous, with strides {local.stride()}",
            remedy="make the parameter contiguous before it is wrapped",
            rank=rank,
        ) from error


def cuts_itself(value: Any) -> bool:
    """Whether a tensor says which boxes of it this rank has: a ShardedTensor, or one that DCP asks
    for its items, also as the local tensor of a DTensor."""
    kind = type(value)
    if kind in PLAIN:
        return False
    if is_dtensor(value):
        kind = type(dtensor_parts(value)[0])
    return hasattr(kind, "__create_write_items__") or is_sharded_tensor(value)


def shards_of(
    value: Any, path: Path, rank: int
) -> tuple[tuple[int, ...], tuple[tuple[Box, torch.Tensor], ...]]:
    """The whole shape, and this rank's boxes with their memory, of a value that cuts itself.

    Raises:
        StateError: it does not say this of a tensor.
    """
    if is_sharded_tensor(value):
        held = [
            (s.metadata.shard_offsets, s.metadata.shard_sizes, s.tensor)
            for s in value.local_shards()
        ]
        shape = value.size()
    else:
        items = value.__create_write_items__(dotted(path), value)
        described = [item.tensor_data for item in items]
        if None in described:
            raise StateError(
                f"{dotted(path)} is a {type(value).__name__}, whose items are no boxes of a tensor",
                remedy="leave it out, or put what it holds into the state",
                rank=rank,
            )
        shape = described[0].size if described else value.shape
        held = [
            (data.chunk.offsets, data.chunk.sizes, value.__get_tensor_shard__(item.index))
            for item, data in zip(items, described, strict=True)
        ]
    return tuple(shape), tuple((Box(tuple(at), tuple(of)), t.detach()) for at, of, t in held)


def mesh_of(mesh: Any) -> Mesh:
    """smckpt's `Mesh` for torch's `DeviceMesh`."""
    names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
    return Mesh(tuple(names), tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()))


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and the same bits. A view may negate or
    conjugate its memory."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    mine, theirs = (
        (dtensor_parts(t)[0] if is_dtensor(t) else t).detach().cpu().resolve_conj().resolve_neg()
        for t in (one, other)
    )
    return mine.shape == theirs.shape and torch.equal(
        *(t.contiguous().reshape(-1).view(torch.uint8) for t in (mine, theirs))
    )


def refuse_kind(tensor: torch.Tensor, local: torch.Tensor, path: Path, rank: int) -> None:
    """
    Raises:
        StateError: it is of a kind that no checkpoint holds.
    """
    what = None
    if is_wrapper(local):
        what = f"is a {type(local).__name__}, which computes its values from other tensors"
    elif is_transformed(tensor):
        what = "is a value inside a transform of torch.func"
    elif local.layout is not torch.strided:
        what = f"is sparse ({local.layout})"
    elif local.is_quantized:
        what = "is quantised"
    elif local.device.type == "meta":
        what = "is on the meta device and has no data"
    elif dtype_name(local.dtype) not in DTYPES:
        what = f"has the dtype {local.dtype}"
    if what is not None:
        raise unsupported(dotted(path), what, rank)


def unsupported(name: str, what: str, rank: int) -> StateError:
    return StateError(
        f"{name} {what}, which can be neither saved nor loaded",
        remedy="give a dense tensor of a plain dtype with memory (a meta module: to_empty()), or "
        "leave it out",
        rank=rank,
    )
