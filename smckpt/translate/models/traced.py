"""Turns transformers' conversion from its names in memory to those on disk into copies of elements.

transformers holds some models in another form than released checkpoints: all experts in one tensor,
other prefixes. `save_pretrained` runs its conversion backwards over the whole model. This module
runs that conversion over tensors without values, which record where each of their elements comes
from. It follows every operation that only moves elements, in any conversion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Box, Copy, Piece, Strided, row_major_strides
from smckpt.translate.tables.hub import HubTensor

# Prefixes in released checkpoints of models with CLIP's or SigLIP's tower. Other prefixes that
# transformers removes or adds depend on the release, and `save_pretrained` of a model that was not
# loaded does not restore them either.
_TOWERS = ("vision_model", "text_model")
_KEEPS = ("aten::clone", "aten::contiguous")  # same elements, in the same row-major order


def names_on_disk(
    model: Any, shapes: Mapping[str, Shape], *, released: bool = True
) -> list[HubTensor]:
    """The tensors that `save_pretrained` makes from tensors with the names of `model.state_dict()`.

    Args:
        model: on any device; its class and config choose the conversion.
        shapes: of the tensors.
        released: with the prefixes of releases, which it does not write of a model that was never
            loaded.

    Raises:
        NotImplementedError: a conversion computes values.
    """
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    model._weight_conversions = [
        conversion
        for conversion in deepcopy(get_model_conversion_mapping(model, add_legacy=False))
        if not isinstance(conversion, loading.PrefixChange)
        or (
            released
            and conversion.prefix_to_remove in _TOWERS
            and (conversion.scope_prefix or "").split(".")[-1] != conversion.prefix_to_remove
        )
    ]
    for conversion in model._weight_conversions:
        for operation in getattr(conversion, "operations", ()):
            # Where it looks at shapes to read both orders (Qwen3-VL-MoE's experts), it would write
            # the order in memory, which no release has.
            if getattr(operation, "check_dims", False):
                operation.check_dims = False
    state = {
        name: _Traced(shape, [(name, Copy(Strided.whole(shape), Strided.whole(shape)))])
        for name, shape in shapes.items()
    }
    with torch.no_grad():
        found = loading.revert_weight_conversion(model, dict(state))
    return [
        HubTensor(name, tuple(made.shape), tuple(_on_grid(made.parts, tuple(made.shape))))
        for name, made in found.items()
    ]


_Parts = Sequence[tuple[str, Copy]]


class _Traced(torch.Tensor):
    """A tensor that records, for its elements in row-major order, where they come from."""

    parts: _Parts

    @staticmethod
    def __new__(cls, shape: Sequence[int], parts: _Parts) -> _Traced:
        made: _Traced = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=torch.float32, device=torch.device("meta")
        )
        made.parts = parts
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name in ("aten::cat", "aten::stack"):
            tensors, dim = args[0], args[1] if len(args) > 1 else 0
            new = name == "aten::stack"  # the dimension
            shapes = [list(t.shape) for t in tensors]
            dim %= len(shapes[0]) + new
            if new:
                for shape in shapes:
                    shape.insert(dim, 1)
            out = [*shapes[0]]
            out[dim] = sum(shape[dim] for shape in shapes)
            strides = row_major_strides(out)
            parts: list[tuple[str, Copy]] = []
            at = 0
            for tensor, shape in zip(tensors, shapes, strict=True):
                room = Piece("", tuple(shape), Box.whole(shape), at * strides[dim], strides)
                parts += _written(tensor.parts, tuple(shape), room)
                at += shape[dim]
            return _Traced(out, parts)
        moved = [a for a in args if isinstance(a, _Traced)]
        if len(moved) != 1 or moved[0] is not args[0] or func._schema.is_mutable:
            raise NotImplementedError(f"the conversion computes with {name}")
        blank = torch.empty(args[0].shape, device="meta")
        found = func(blank, *args[1:], **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            return _seen(args[0], blank, found, name)
        return [_seen(args[0], blank, view, name) for view in found]


def _seen(source: _Traced, blank: Any, view: Any, name: str) -> _Traced:
    """The same view of `source` that `view` is of `blank`."""
    alias = torch._C._is_alias_of(blank, view)  # type: ignore[attr-defined]
    if not alias and name not in _KEEPS:
        raise NotImplementedError(f"the conversion computes with {name}")
    if not alias or (view.numel() == blank.numel() and view.is_contiguous()):
        return _Traced(view.shape, source.parts)
    shape = tuple(source.shape)
    steps = Strided(tuple(view.shape), view.storage_offset(), view.stride()).steps(shape)
    if any(step.number > 1 and step.step != 1 for step in steps):
        raise NotImplementedError(f"the conversion takes elements by steps ({name})")
    strides = row_major_strides(tuple(view.shape))
    room = Piece(
        "", shape, Box(tuple(s.at for s in steps), tuple(s.number for s in steps)), 0,
        tuple(strides[s.dim] if s.dim >= 0 else 0 for s in steps),
    )  # fmt: skip
    return _Traced(view.shape, _written(source.parts, shape, room))


def _written(parts: _Parts, shape: Shape, room: Piece) -> list[tuple[str, Copy]]:
    """The copies from a tensor of `shape` into the array that holds a piece of it."""
    moved = ((name, copy.written_to(room)) for name, copy in _on_grid(parts, shape))
    return [(name, copy) for name, copy in moved if copy is not None]


# -- reshaping -------------------------------------------------------------------------------------


def _on_grid(parts: _Parts, shape: Shape) -> Iterable[tuple[str, Copy]]:
    """The same copies, cut until each is a grid of an array of `shape`."""
    for name, copy in parts:
        for cut in _cut(copy, shape):
            yield name, cut


def _cut(copy: Copy, shape: Shape) -> list[Copy]:
    try:
        copy.target.steps(shape)
        return [copy]
    except ValueError:
        pass
    if not copy.numel:
        return []
    along: dict[int, int] = {}
    for dim, (count, stride) in enumerate(zip(copy.target.sizes, copy.target.strides, strict=True)):
        if count == 1:
            continue
        units = row_major_strides(shape)
        axis = next(d for d, unit in enumerate(units) if stride >= unit and shape[d] > 1)
        # elements until the next index of the next outer dimension
        room = units[axis] * shape[axis]
        if room % stride:
            break
        at = copy.target.start % room // stride
        if at + count > room // stride:
            # the copy's dimension is cut where it passes the end of a dimension of the array
            inner = room // stride
            head = min((inner - at) % inner, count)
            tail = (count - head) % inner
            parts = []
            if head:
                parts.append(_range(copy, dim, 0, head))
            if count - head - tail:
                parts.append(_folded(_range(copy, dim, head, count - tail), dim, inner))
            if tail:
                parts.append(_range(copy, dim, count - tail, count))
            return [part for one in parts for part in _cut(one, shape)]
        if axis in along:  # two run along one dimension: take the shorter index by index
            other = along[axis]
            short = min(dim, other, key=lambda d: copy.target.sizes[d])
            cuts = (_range(copy, short, i, i + 1) for i in range(copy.target.sizes[short]))
            return [part for one in cuts for part in _cut(one, shape)]
        along[axis] = dim
    raise NotImplementedError(f"{copy} is not a set of grids of {shape}")


def _range(copy: Copy, dim: int, low: int, high: int) -> Copy:
    offsets, sizes = [0] * len(copy.sizes), list(copy.sizes)
    offsets[dim], sizes[dim] = low, high - low
    return copy.part(Box(tuple(offsets), tuple(sizes)))


def _folded(copy: Copy, dim: int, inner: int) -> Copy:
    """Split a dimension in two; the inner one has `inner` indices."""

    def fold(at: Strided) -> Strided:
        count, stride = at.sizes[dim], at.strides[dim]
        sizes = (*at.sizes[:dim], count // inner, inner, *at.sizes[dim + 1 :])
        strides = (*at.strides[:dim], stride * inner, stride, *at.strides[dim + 1 :])
        return Strided(sizes, at.start, strides)

    return Copy(fold(copy.source), fold(copy.target))
