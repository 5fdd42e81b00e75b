"""A store that is a dict, so that a fuzzed reader touches no disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from smckpt.errors import CheckpointNotFoundError
from smckpt.storage.base import Access, FileInfo, FileWriter, Storage
from smckpt.storage.faults import too_short

__all__ = ["Memory", "tree_of"]

Tree = dict[str, dict[str, bytes]]  # directory → name → bytes


@dataclass(frozen=True)
class _InTree(Access):
    """Opens directories of a tree."""

    tree: Tree = field(default_factory=dict)

    def open(self, url: str | os.PathLike[str]) -> Storage:
        return Memory(os.fspath(url), self.tree)


class Memory(Storage):
    """The directory `url` of a tree."""

    def __init__(self, url: str, tree: Tree) -> None:
        super().__init__(url, _InTree(tree=tree))
        self._tree = tree

    def size(self, name: str) -> int:
        return len(self._file(name))

    def read_into(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        seen: Callable[[memoryview], None] | None = None,
    ) -> None:
        data = self._file(name)
        for buffer in buffers:
            part = data[offset : offset + len(buffer)]
            if len(part) < len(buffer):
                raise too_short(name, len(data), offset + len(buffer), self.url)
            buffer[:] = part
            offset += len(buffer)
            if seen is not None:
                seen(buffer)

    def list(self, prefix: str = "") -> list[FileInfo]:
        files = self._tree.get(self.url, {})
        return [FileInfo(n, len(d)) for n, d in sorted(files.items()) if n.startswith(prefix)]

    def list_dirs(self) -> Sequence[str]:
        below = [Path(url).relative_to(self.url).parts for url in self._tree if self._is_above(url)]
        return sorted({parts[0] for parts in below if parts})

    def create_file(self, name: str, size: int, *, replace: bool = False) -> FileWriter:
        raise NotImplementedError

    def put_exclusive(self, name: str, data: bytes) -> bool:
        raise NotImplementedError

    def delete(self, name: str) -> None:
        self.refuse_name(name)
        self._tree.get(self.url, {}).pop(name, None)

    def _is_above(self, url: str) -> bool:
        return Path(url).is_relative_to(self.url)

    def _file(self, name: str) -> bytes:
        self.refuse_name(name)
        try:
            return self._tree[self.url][name]
        except KeyError:
            raise CheckpointNotFoundError("no such file", path=self.url) from None


def tree_of(root: Path) -> Tree:
    """The files below `root`, which the tree calls /run."""
    tree: Tree = {}
    for path in sorted(root.rglob("*")):
        if path.is_file():
            directory = str(Path("/run") / path.parent.relative_to(root))
            tree.setdefault(directory, {})[path.name] = path.read_bytes()
    return tree
