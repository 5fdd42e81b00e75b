"""How one axis of a stored tensor is made of axes of roles: the formulas of every fused tensor.

A *role* is a tensor of the hub by its meaning (`q`, `gate`, …), rows in Hugging Face's own order.
A run says that `count` indices of the stored axis, `step` apart, are so many of a role's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from smckpt.errors import TopologyError

__all__ = ["HOW", "Heads", "Run", "cut", "runs_of_rank"]


@dataclass(frozen=True, slots=True)
class Run:
    """Index `at + k * step` of the stored axis is index `role_at + k` of role number `role` of the
    row, for k in [0, count)."""

    role: int
    at: int
    step: int
    role_at: int
    count: int


@dataclass(frozen=True, slots=True)
class Heads:
    """What the formulas of attention need: groups, heads per group, head size, rotary part."""

    groups: int
    per_group: int
    size: int
    rotary: int


def runs_of_rank(how: str, sizes: Sequence[int], heads: Heads, t: int, rank: int) -> list[Run]:
    """The runs of the axis that tensor-parallel rank `rank` of `t` stores.

    Raises:
        TopologyError: the degree does not divide what it cuts.
    """
    if how == "per_rank":  # each rank joins its own parts: [Q_r; K_r; V_r], [gate_r; up_r]
        return list(_per_rank(sizes, t, rank))
    total = sum(sizes)
    _divides(t, total)
    whole = list(HOW[how](sizes, heads))
    return list(cut(whole, rank * total // t, (rank + 1) * total // t))


def cut(runs: Sequence[Run], low: int, high: int) -> Iterator[Run]:
    """What of the runs lies in [low, high) of the stored axis, which then starts at `low`."""
    for run in runs:
        first = max(0, -((run.at - low) // run.step))
        last = min(run.count, -((run.at - high) // run.step))
        if last > first:
            at = run.at + first * run.step - low
            yield Run(run.role, at, run.step, run.role_at + first, last - first)


def _per_rank(sizes: Sequence[int], t: int, rank: int) -> Iterator[Run]:
    at = 0
    for role, size in enumerate(sizes):
        _divides(t, size)
        count = size // t
        yield Run(role, at, 1, rank * count, count)
        at += count


def _same(sizes: Sequence[int], heads: Heads) -> Iterator[Run]:
    at = 0
    for role, size in enumerate(sizes):
        yield Run(role, at, 1, 0, size)
        at += size


def _interleaved(sizes: Sequence[int], heads: Heads) -> Iterator[Run]:
    """Megatron's QKV: for each group its queries, its key, its value."""
    size, queries = heads.size, heads.per_group * heads.size
    for group in range(heads.groups):
        at = group * (queries + 2 * size)
        yield Run(0, at, 1, group * queries, queries)
        yield Run(1, at + queries, 1, group * size, size)
        yield Run(2, at + queries + size, 1, group * size, size)


def _alternating(sizes: Sequence[int], heads: Heads) -> Iterator[Run]:
    """GPT-OSS's gate and up: a row of one, a row of the other."""
    for role, size in enumerate(sizes):
        yield Run(role, role, len(sizes), 0, size)


def _rotary(sizes: Sequence[int], heads: Heads) -> Iterator[Run]:
    """Meta's order, in which the two halves of a rotated pair are neighbours."""
    half = heads.rotary // 2
    for at in range(0, sizes[0], heads.size):
        yield Run(0, at, 2, at, half)
        yield Run(0, at + 1, 2, at + half, half)
        if heads.rotary < heads.size:
            rest = at + heads.rotary
            yield Run(0, rest, 1, rest, heads.size - heads.rotary)


HOW: Mapping[str, Callable[[Sequence[int], Heads], Iterator[Run]]] = {
    "same": _same,
    "interleaved": _interleaved,
    "alternating": _alternating,
    "rotary": _rotary,
}


def _divides(t: int, size: int) -> None:
    if size % t:
        raise TopologyError(
            f"tensor-parallel degree {t} does not divide {size}",
            remedy="pass the degree that the model was trained with",
        )
