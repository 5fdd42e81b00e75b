"""How one axis of a stored tensor is made from axes of roles, with the formulas of all fused
tensors.

A *role* is a tensor by its meaning (`q`, `gate`, …), with rows in Hugging Face's order. A run says
that `count` indices of the stored axis, `step` apart, are consecutive indices of a role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from smckpt.errors import TopologyError

__all__ = ["HOW", "AxisRun", "Heads", "cut", "runs_of_rank"]


@dataclass(frozen=True, slots=True)
class AxisRun:
    """Index `at + k * step` of the stored axis is index `role_at + k` of role number `role` of the
    row, for k in [0, count)."""

    role: int
    at: int
    step: int
    role_at: int
    count: int


@dataclass(frozen=True, slots=True)
class Heads:
    """The sizes for the formulas of attention: groups, heads per group, head size, rotary part;
    key heads of linear attention."""

    groups: int
    per_group: int
    size: int
    rotary: int
    linear: int = 0


def runs_of_rank(how: str, sizes: Sequence[int], heads: Heads, t: int, rank: int) -> list[AxisRun]:
    """The runs of the axis as tensor-parallel rank `rank` of `t` stores it.

    Raises:
        TopologyError: the degree does not divide the axis.
    """
    if how == "per_rank":  # each rank joins its own parts: [Q_r; K_r; V_r], [gate_r; up_r]
        out, at = [], 0
        for role, size in enumerate(sizes):
            _divides(t, size)
            out.append(AxisRun(role, at, 1, rank * (size // t), size // t))
            at += size // t
        return out
    total = sum(sizes)
    _divides(t, total)
    whole = list(HOW[how](sizes, heads))
    return list(cut(whole, rank * total // t, (rank + 1) * total // t))


def cut(runs: Sequence[AxisRun], low: int, high: int) -> Iterator[AxisRun]:
    """The parts of the runs in [low, high) of the stored axis, counted from `low`."""
    for run in runs:
        first = max(0, -((run.at - low) // run.step))
        last = min(run.count, -((run.at - high) // run.step))
        if last > first:
            at = run.at + first * run.step - low
            yield AxisRun(run.role, at, run.step, run.role_at + first, last - first)


def _in_turn(sizes: Sequence[int], count: int) -> Iterator[AxisRun]:
    """`count` parts: the n-th has the n-th of `count` equal parts of each role."""
    at = 0
    for part in range(count):
        for role, size in enumerate(sizes):
            yield AxisRun(role, at, 1, part * (size // count), size // count)
            at += size // count


def _rotary(sizes: Sequence[int], heads: Heads) -> Iterator[AxisRun]:
    """Meta's order: the two halves of a rotated pair are neighbours."""
    half = heads.rotary // 2
    for at in range(0, sizes[0], heads.size):
        if half:
            yield AxisRun(0, at, 2, at, half)
            yield AxisRun(0, at + 1, 2, at + half, half)
        if heads.rotary < heads.size:
            rest = at + heads.rotary
            yield AxisRun(0, rest, 1, rest, heads.size - heads.rotary)


HOW: Mapping[str, Callable[[Sequence[int], Heads], Iterator[AxisRun]]] = {
    "same": lambda sizes, _: _in_turn(sizes, 1),
    # Megatron's QKV: for each group its queries, then its key, then its value
    "interleaved": lambda sizes, heads: _in_turn(sizes, heads.groups),
    # GPT-OSS's gate and up: their rows alternate
    "alternating": lambda sizes, _: (
        AxisRun(role, role, len(sizes), 0, size) for role, size in enumerate(sizes)
    ),
    "rotary": _rotary,
    "by_head": lambda sizes, heads: _in_turn(sizes, heads.groups * heads.per_group),
    "by_linear_head": lambda sizes, heads: _in_turn(sizes, heads.linear),
}


def _divides(t: int, size: int) -> None:
    if size % t:
        raise TopologyError(
            f"tensor-parallel degree {t} does not divide {size}",
            remedy="pass the degree that the model was trained with",
        )
