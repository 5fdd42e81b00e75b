"""Flat parameters, ranges and explicit boxes: against brute force over every element."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smckpt.layout.flat_geometry import FlatGeometry, FlatUnit, Segment
from smckpt.layout.geometry import BoxGeometry, Geometry, PerRankGeometry
from smckpt.layout.mesh import Mesh
from smckpt.layout.strided import Box, boxes_of_range, row_major_strides

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)
Element = "tuple[str, int] | None"  # (fqn, index in its row-major order), or padding


@st.composite
def units(draw: st.DrawFn) -> tuple[FlatUnit, Mesh]:
    """Parameters, padding between them (as use_orig_params=True aligns) and behind them."""
    segments = []
    for number, shape in enumerate(draw(st.lists(shapes, min_size=1, max_size=4))):
        segments.append(Segment(f"p{number}", shape, math.prod(shape)))
        if padding := draw(st.integers(0, 4)):
            segments.append(Segment(None, (), padding))
    replicas, shards = draw(st.integers(1, 2)), draw(st.integers(1, 5))
    total = sum(s.numel for s in segments)
    ranks = tuple(draw(st.permutations(range(replicas * shards))))
    mesh = Mesh(("replicate", "shard"), (replicas, shards), ranks)
    return FlatUnit(tuple(segments), -(-total // shards) + draw(st.integers(0, 2))), mesh


def elements_of(unit: FlatUnit, shards: int) -> list[Element]:
    """The whole flat parameter, element by element."""
    out: list[Element] = []
    for s in unit.segments:
        out += [(s.fqn, i) if s.fqn else None for i in range(s.numel)]
    return out + [None] * (unit.shard_numel * shards - len(out))


def from_pieces(geometry: Geometry, rank: int) -> list[Element]:
    """The local array, element by element, as the pieces say."""
    local: list[Element] = [None] * math.prod(geometry.local_shape(rank))
    for piece in geometry.pieces(rank):
        strides = row_major_strides(piece.shape)
        for index in itertools.product(*map(range, piece.box.sizes)):
            there = sum(
                (o + i) * s for o, i, s in zip(piece.box.offsets, index, strides, strict=True)
            )
            here = piece.start + sum(i * s for i, s in zip(index, piece.strides, strict=True))
            assert local[here] is None, "two pieces write one element"
            local[here] = (piece.name, there)
    return local


@given(units())
def test_a_shard_of_a_flat_parameter_is_its_run_of_elements(unit_and_mesh):
    unit, mesh = unit_and_mesh
    geometry = FlatGeometry(unit, mesh)
    whole = elements_of(unit, mesh.shape[1])
    for rank in mesh.ranks:
        shard = mesh.coordinate(rank)[1]
        low = shard * unit.shard_numel
        assert geometry.local_shape(rank) == (unit.shard_numel,)
        assert from_pieces(geometry, rank) == whole[low : low + unit.shard_numel]
        assert geometry.coordinate(rank) == (shard,)
        assert geometry.replicas(rank) == tuple(
            sorted(r for r in mesh.ranks if mesh.coordinate(r)[1] == shard)
        )


@given(units())
def test_a_member_of_a_flat_parameter_is_its_part_of_that_run(unit_and_mesh):
    unit, mesh = unit_and_mesh
    whole = elements_of(unit, mesh.shape[1])
    for member, segment in enumerate(unit.segments):
        if segment.fqn is None:
            continue
        geometry = FlatGeometry(unit, mesh, member)
        assert geometry.fqns == (segment.fqn,)
        for rank in mesh.ranks:
            low = mesh.coordinate(rank)[1] * unit.shard_numel
            run = whole[low : low + unit.shard_numel]
            expected = [e for e in run if e is not None and e[0] == segment.fqn]
            assert from_pieces(geometry, rank) == expected
            assert geometry.local_shape(rank) == (len(expected),)


@given(units())
def test_all_shards_together_hold_every_element_once(unit_and_mesh):
    unit, mesh = unit_and_mesh
    geometry = FlatGeometry(unit, mesh)
    first = {geometry.coordinate(rank): rank for rank in mesh.ranks}
    held = [e for rank in first.values() for e in from_pieces(geometry, rank) if e]
    assert sorted(held) == sorted(
        (s.fqn, i) for s in unit.segments if s.fqn for i in range(s.numel)
    )
    assert geometry.fqns == tuple(s.fqn for s in unit.segments if s.fqn)


@given(shapes, st.data())
def test_a_range_is_cut_in_few_boxes_that_cover_it_in_order(shape, data):
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    boxes = list(boxes_of_range(shape, start, stop))
    numbers = np.arange(total).reshape(shape)
    seen = [
        numbers[tuple(slice(o, o + n) for o, n in zip(b.offsets, b.sizes, strict=True))].ravel()
        for b in boxes
    ]
    assert np.array_equal(np.concatenate([*seen, []]), np.arange(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    assert all(box.numel for box in boxes)


@given(st.data())
def test_boxes_intersect_as_sets_of_elements_do(data):
    ndim = data.draw(st.integers(0, 3))
    sides = st.lists(st.integers(0, 4), min_size=ndim, max_size=ndim).map(tuple)
    a, b = (Box(data.draw(sides), data.draw(sides)) for _ in range(2))

    def elements(box: Box) -> set[tuple[int, ...]]:
        return set(
            itertools.product(
                *(range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            )
        )

    common = a.intersect(b)
    assert (elements(common) if common else set()) == elements(a) & elements(b)
    assert common == b.intersect(a)


@given(st.lists(st.tuples(shapes, shapes), max_size=3))
def test_explicit_boxes_lie_one_after_the_other(pairs):
    pairs = [(o, s) for o, s in pairs if len(o) == len(s) == 2]
    geometry = BoxGeometry("w", (20, 20), tuple(Box(o, s) for o, s in pairs), (3, 5))
    local = from_pieces(geometry, 3)
    expected = [
        ("w", (o[0] + i) * 20 + o[1] + j)
        for o, s in pairs
        for i in range(s[0])
        for j in range(s[1])
    ]
    assert local == expected
    assert geometry.replicas(5) == (3, 5)


def test_a_kept_array_stands_for_each_of_its_names():
    geometry = PerRankGeometry(("a", "b"), (2, 3), (7,))
    assert {p.name: p.box for p in geometry.pieces(7)} == {
        "a": Box.whole((2, 3)),
        "b": Box.whole((2, 3)),
    }
    assert geometry.replicas(7) == (7,) == geometry.ranks


def test_a_unit_whose_shape_and_length_differ_is_refused():
    with pytest.raises(ValueError, match="p"):
        FlatUnit((Segment("p", (2, 3), 5),), 5)
    with pytest.raises(ValueError, match="replicate, shard"):
        FlatGeometry(FlatUnit((), 0), Mesh(("s",), (1,), (0,)))
