"""Values of a state cut into leaves as torch DCP cuts them, and joined again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from smckpt.layout.entries import Path

__all__ = ["flattened", "joined"]


def flattened(
    path: Path, value: Any, tensor: type | tuple[type, ...]
) -> Iterator[tuple[Path, Any]]:
    """The leaves of `value` as DCP flattens it: through mappings, and lists that have mappings or
    tensors, at any depth. A tuple is a leaf.

    Args:
        tensor: the class of tensors, or of what stands for them.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flattened((*path, str(key)), inner, tensor)
    elif isinstance(value, list) and not _is_leaf(value, tensor):
        for index, inner in enumerate(value):
            yield from flattened((*path, index), inner, tensor)
    else:
        yield path, value


def _is_leaf(value: Any, tensor: type | tuple[type, ...]) -> bool:
    if isinstance(value, Mapping):
        return False
    if not isinstance(value, list):
        return True
    return not any(
        isinstance(v, tensor) or (isinstance(v, (Mapping, list)) and not _is_leaf(v, tensor))
        for v in value
    )


def joined(values: Mapping[Path, Any], tensors: Iterable[Path]) -> list[tuple[Path, Any]]:
    """The largest subtrees of the state dict without a tensor, joined from DCP's leaves."""
    root: dict[Any, Any] = {}
    leaf = object()  # marks a value: dicts may be values too
    for path, value in values.items():
        node = root
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    above = {path[:depth] for path in tensors for depth in range(len(path) + 1)} | {()}

    def built(node: dict[Any, Any]) -> Any:
        if leaf in node:
            return node[leaf]
        if all(isinstance(part, int) for part in node):
            return [built(node[index]) for index in sorted(node)]
        return {part: built(inner) for part, inner in node.items()}

    def walk(path: Path, node: dict[Any, Any]) -> Iterator[tuple[Path, Any]]:
        for part, inner in node.items():
            here = (*path, part)
            if here in above and leaf not in inner:
                yield from walk(here, inner)
            else:
                yield here, built(inner)

    return list(walk((), root))
