"""What a layout's table is made of: rows, each of which says which roles a stored tensor holds.

A row says nothing about direction. Export and import read the same table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

__all__ = ["Layout", "Row", "rows"]


@dataclass(frozen=True)
class Row:
    """One stored tensor per layer and expert, or several that are called alike.

    name: with `{i}` for the layer, `{e}` for the expert (of the rank's own, under expert
        parallelism).
    roles: what it holds; more than one where it is fused.
    how: in which order: "same" (one role, or several one after the other), "per_rank" (each
        tensor-parallel rank joins its own parts), "interleaved" (queries, key, value of each
        group), "rotary" (pairs side by side, as Meta has them), "vocabulary" (as "same", with rows
        of padding at the end).
    tp: the dimension of the role that tensor parallelism cuts. None: each rank has all of it, and
        all have the same, which is checked.
    transposed: the role's two dimensions are swapped in the stored tensor.
    stacked: the stored tensor has the experts as one more dimension, in front.
    when: "dense" or "sparse": only in layers of that kind.
    """

    name: str
    roles: tuple[str, ...]
    how: str = "same"
    tp: int | None = None
    transposed: bool = False
    stacked: bool = False
    when: str | None = None

    @property
    def of_experts(self) -> bool:
        return self.stacked or "{e}" in self.name


@dataclass(frozen=True)
class Layout:
    """A table of rows. `drop`: regular expressions of names that hold no weights.

    families: the config's model types that it is for; None for any that has its roles.
    joined: distributed tensors under these names are the ranks' arrays one after the other. False
        where they are whole tensors in the right order (transformers' own tensor parallelism).
    """

    name: str
    rows: tuple[Row, ...]
    drop: tuple[str, ...] = ()
    families: frozenset[str] | None = None
    joined: bool = True

    def renamed(self, name: str, *changes: tuple[str, str]) -> Layout:
        """This layout with other names: each (old, new) replaces a part of every row's name."""
        changed = []
        for row in self.rows:
            text = row.name
            for old, new in changes:
                text = text.replace(old, new)
            changed.append(replace(row, name=text))
        return replace(self, name=name, rows=tuple(changed))


def rows(prefix: str, table: Iterable[Row]) -> tuple[Row, ...]:
    """The rows with a common beginning of their names."""
    return tuple(replace(row, name=prefix + row.name) for row in table)
