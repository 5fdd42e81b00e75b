"""The copy algebra, held against an oracle that counts every index."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smckpt.layout.strided import (
    Box,
    Copy,
    Coverage,
    Piece,
    Strided,
    boxes_of_range,
    coverage,
    covered,
    elements,
    execute,
    meet,
    row_major_strides,
)

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)


def indices(box: Box) -> set[tuple[int, ...]]:
    return set(
        itertools.product(*(range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)))
    )


def places(at: Strided) -> list[int]:
    """The elements of the array, in order of the grid."""
    return [
        at.start + sum(i * s for i, s in zip(index, at.strides, strict=True))
        for index in itertools.product(*map(range, at.sizes))
    ]


def moves(copy: Copy) -> list[tuple[int, int]]:
    return list(zip(places(copy.source), places(copy.target), strict=True))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...], least: int = 0) -> Box:
    offsets, sizes = [], []
    for n in shape:
        low = draw(st.integers(0, n - least))
        offsets.append(low)
        sizes.append(draw(st.integers(least, n - low)))
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[Box, Box]:
    shape = draw(shapes)
    return draw(boxes(shape)), draw(boxes(shape))


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> Strided:
    """Some indices along each dimension, in steps, the dimensions in any order."""
    strides, taken = row_major_strides(shape), []
    start = 0
    for n, stride in zip(shape, strides, strict=True):
        at, step = draw(st.integers(0, n - 1)), draw(st.integers(1, 3))
        count = draw(st.integers(1, 1 + (n - 1 - at) // step))
        start += at * stride
        taken.append((count, step * stride))
    taken = draw(st.permutations(taken))
    return Strided(tuple(t[0] for t in taken), start, tuple(t[1] for t in taken))


@st.composite
def pieces(draw: st.DrawFn, shape: tuple[int, ...]) -> Piece:
    """A box of a tensor that lies in an array with gaps, its dimensions in any order."""
    box = draw(boxes(shape, least=1))
    order = draw(st.permutations(range(len(shape))))
    strides, step = [0] * len(shape), draw(st.integers(1, 2))
    for dim in order:
        strides[dim] = step
        step *= box.sizes[dim] + draw(st.integers(0, 1))
    return Piece("x", shape, box, draw(st.integers(0, 3)), tuple(strides))


@st.composite
def two_pieces(draw: st.DrawFn) -> tuple[Piece, Piece]:
    shape = draw(shapes)
    return draw(pieces(shape)), draw(pieces(shape))


def where(piece: Piece) -> dict[tuple[int, ...], int]:
    """Index of the tensor → element of the array."""
    inner = itertools.product(*map(range, piece.box.sizes))
    places_of = [
        piece.start + sum(i * s for i, s in zip(index, piece.strides, strict=True))
        for index in inner
    ]
    return dict(zip(sorted(indices(piece.box)), places_of, strict=True))


@given(two_boxes())
def test_boxes_intersect_in_the_indices_that_both_have(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = a.intersect(b)
    assert (set() if common is None else indices(common)) == indices(a) & indices(b)


@given(two_boxes())
def test_what_one_box_leaves_of_another_is_disjoint_and_complete(pair: tuple[Box, Box]) -> None:
    a, b = pair
    left = [index for box in a.subtract(b) for index in indices(box)]
    assert len(left) == len(set(left))
    assert set(left) == indices(a) - indices(b)


@given(two_pieces())
def test_two_pieces_meet_in_the_copy_of_what_both_hold(pair: tuple[Piece, Piece]) -> None:
    a, b = pair
    copy = meet(a, b)
    at_a, at_b = where(a), where(b)
    wanted = {(at_a[index], at_b[index]) for index in at_a.keys() & at_b.keys()}
    found = [] if copy is None else moves(copy)
    assert set(found) == wanted
    assert len(found) == len(wanted)


@st.composite
def a_grid_and_a_piece(draw: st.DrawFn) -> tuple[Strided, Piece]:
    shape = draw(shapes)
    return draw(grids(shape)), draw(pieces(shape))


@given(a_grid_and_a_piece())
def test_a_copy_out_of_a_whole_tensor_becomes_one_out_of_a_piece(
    given_: tuple[Strided, Piece],
) -> None:
    grid, piece = given_
    copy = Copy(grid, Strided.whole(grid.sizes, 5))
    held = where(piece)
    flat = dict(zip(places(Strided.whole(piece.shape)), sorted(indices(Box.whole(piece.shape))),
                    strict=True))  # fmt: skip
    wanted = {(held[flat[place]], to) for place, to in moves(copy) if flat[place] in held}
    found = copy.read_from(piece)
    assert (set() if found is None else set(moves(found))) == wanted
    back = copy.reversed().written_to(piece)
    assert (None if back is None else back.reversed()) == found


@given(two_pieces())
def test_runs_are_the_copy_in_contiguous_stretches(pair: tuple[Piece, Piece]) -> None:
    copy = meet(*pair)
    if copy is None:
        return
    found = [(a + i, b + i) for a, b, count in copy.runs() for i in range(count)]
    assert found == moves(copy)


@given(two_pieces())
def test_numpy_and_torch_carry_a_copy_out_alike(pair: tuple[Piece, Piece]) -> None:
    copy = meet(*pair)
    if copy is None:
        return
    source = np.arange(copy.source.start + copy.source.extent, dtype=np.int64)
    target = np.full(copy.target.start + copy.target.extent + 2, -1)
    wanted = target.copy()
    for a, b in moves(copy):
        wanted[b] = source[a]
    storage = torch.full((len(target) + 3,), -1)
    tensor = storage[3:]  # torch counts strided starts from the storage's beginning
    execute(copy, torch.from_numpy(source), tensor)
    execute(copy, source, target)
    assert target.tolist() == wanted.tolist() == tensor.tolist()


@st.composite
def several_grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Strided]]:
    shape = draw(shapes)
    cut: list[Strided] = []
    if draw(st.booleans()):  # a partition, from which a part may be missing
        left = [Box.whole(shape)]
        for _ in range(draw(st.integers(0, 3))):
            taken = draw(boxes(shape))
            cut += [
                Strided.whole(shape).part(c)
                for box in left
                if (c := box.intersect(taken)) is not None
            ]
            left = [rest for box in left for rest in box.subtract(taken)]
        cut += [Strided.whole(shape).part(box) for box in left[draw(st.integers(0, 1)) :]]
    else:
        cut = draw(st.lists(grids(shape), max_size=4))
    return shape, cut


@given(several_grids())
def test_the_proof_counts_what_is_met_never_and_more_than_once(
    given_: tuple[tuple[int, ...], list[Strided]],
) -> None:
    shape, parts = given_
    met = Counter(place for part in parts for place in places(part))
    never = np.prod(shape, dtype=int) - len(met)
    often = sum(1 for count in met.values() if count > 1)
    assert coverage(shape, parts) == (never, often, False)


def interleaved() -> Iterator[Strided]:
    for first in range(2):
        yield Strided((3, 4), first * 4, (8, 1))  # every other row of (6, 4)


def test_a_stretch_shorter_than_a_step_is_looked_at_too() -> None:
    assert coverage((3,), [Strided((2,), 0, (2,)), Strided((1,), 1, (1,))]).exact
    holed = [Strided((3,), 0, (3,)), Strided((1,), 1, (1,)), Strided((1,), 4, (1,))]
    assert coverage((7,), holed) == Coverage(2, 0, False)


def test_parts_that_go_in_steps_are_proven_too() -> None:
    both = list(interleaved())
    assert coverage((6, 4), both).exact
    assert coverage((6, 4), both[:1]) == Coverage(12, 0, False)
    assert coverage((6, 4), [*both, both[0]]) == Coverage(0, 12, False)


@pytest.mark.parametrize(
    "part",
    [
        Strided((2, 4), 20, (4, 1)),  # rows 5 and 6 of 6
        Strided((2,), 3, (1,)),  # out of the end of a row
        Strided((2,), 0, (5,)),  # along both dimensions
        Strided((1,), 24, (1,)),
        Strided((2, 2), 0, (1, 2)),  # twice along one
    ],
)
def test_a_part_that_is_no_grid_of_the_tensor_is_no_proof(part: Strided) -> None:
    assert coverage((6, 4), [part]).outside


def test_a_tensor_without_elements_is_covered_by_nothing() -> None:
    assert coverage((0, 4), []).exact
    assert coverage((0, 4), [Strided((0, 4), 0, (4, 1))]).exact
    assert coverage((2,), []) == Coverage(2, 0, False)
    assert coverage((0, 4), [Strided((1,), 0, (1,))]).outside


def test_a_large_tensor_is_proven_without_counting_its_elements() -> None:
    shape = (1 << 40, 1 << 20)
    halves = [Strided.whole(shape).part(Box((i << 39, 0), (1 << 39, 1 << 20))) for i in (0, 1)]
    assert coverage(shape, halves).exact


def test_a_matrix_in_many_flat_shards_is_proven_in_the_time_of_its_shards() -> None:
    shape, shards = (4096, 1000), 3000  # which end in the midst of rows, each at another column
    size = -(-math.prod(shape) // shards)
    cuts = [(i * size, min((i + 1) * size, math.prod(shape))) for i in range(shards)]
    parts = [Strided.whole(shape).part(b) for cut in cuts for b in boxes_of_range(shape, *cut)]
    began = time.process_time()
    assert coverage(shape, parts).exact
    assert coverage(shape, parts[:-1]).never == parts[-1].numel
    assert time.process_time() - began < 3


@st.composite
def a_box_and_others(draw: st.DrawFn) -> tuple[Box, list[Box]]:
    shape = draw(shapes)
    return draw(boxes(shape)), draw(st.lists(boxes(shape), max_size=4))


@given(a_box_and_others())
def test_each_element_goes_to_the_first_box_that_has_it(given_: tuple[Box, list[Box]]) -> None:
    box, among = given_
    shares = box.shared(among)
    wanted = {
        index: next(n for n, other in enumerate(among) if index in indices(other))
        for index in indices(box)
        if any(index in indices(other) for other in among)
    }
    assert sorted((i, n) for n, part in shares for i in indices(part)) == sorted(wanted.items())
    missing = box.numel - len(wanted)
    assert covered(box, (part for _, part in shares)) == (missing, 0, False)
    assert sum(rest.numel for rest in box.subtract(*among)) == missing


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (np.zeros(3), np.zeros(8)),
        (np.zeros(8), np.zeros(3)),
        (np.zeros(16)[::2], np.zeros(8)),
        (np.zeros(8), np.zeros(16)[::2]),
        (torch.zeros(3), torch.zeros(8)),
        (torch.zeros(8), torch.zeros(16)[::2]),
    ],
)
def test_an_array_that_the_copy_does_not_fit_is_not_touched(source: object, target: object) -> None:
    copy = Copy(Strided.whole((4,)), Strided.whole((4,)))
    with pytest.raises(ValueError, match="array"):
        execute(copy, source, target)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_bytes_are_moved_as_elements_of_any_size(itemsize: int) -> None:
    data = bytes(range(4 * itemsize))
    out = bytearray(4 * itemsize)
    backwards = [Copy(Strided((), 3 - i, ()), Strided((), i, ())) for i in range(4)]
    for copy in backwards:
        execute(copy, elements(data, itemsize), elements(out, itemsize))
    parts = [data[i : i + itemsize] for i in range(0, len(data), itemsize)]
    assert bytes(out) == b"".join(reversed(parts))
