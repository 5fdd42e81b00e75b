"""The file image: replicas share every byte exactly once, and any safetensors reader opens it."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from smckpt.errors import StateError, UsageError
from smckpt.layout.entries import DTYPES, Entry
from smckpt.layout.flat_geometry import FlatGeometry, FlatUnit, Segment
from smckpt.layout.geometry import Geometry, MeshGeometry, PerRankGeometry
from smckpt.layout.image import ALIGNMENT, SLICES_KEY, Layout, compile_layout, digest, writers_of
from smckpt.layout.mesh import Mesh, Placement
from tests.support.limits import seconds
from tests.support.saves import image_of, pattern

WORLD = 8
DTYPE_NAMES = sorted(DTYPES)


def entry(key: str, dtype: str, geometry: Geometry, rank: int) -> Entry:
    return Entry(("m", key), dtype, geometry, ("m",), (), (rank,))


@st.composite
def states(draw: st.DrawFn) -> list[list[tuple[str, str, Geometry]]]:
    """What each of WORLD ranks holds: (key, dtype, geometry), of all kinds, empty ones too."""
    meshes = [
        Mesh(("r", "s"), (r, WORLD // r), tuple(range(WORLD))) for r in (1, 2, 4, 8)
    ]  # fmt: skip
    unit = FlatUnit((Segment("f", (5, 3), 15), Segment(None, (), 3), Segment("g", (7,), 7)), 13)
    held: list[list[tuple[str, str, Geometry]]] = [[] for _ in range(WORLD)]
    for number in range(draw(st.integers(0, 6))):
        dtype = draw(st.sampled_from(DTYPE_NAMES))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        mesh = draw(st.sampled_from(meshes))
        kind = draw(st.sampled_from(["mesh", "flat", "kept"]))
        for rank in range(WORLD):
            geometry: Geometry
            if kind == "kept":
                geometry = PerRankGeometry((), shape, (rank,))
            elif kind == "flat":
                geometry = FlatGeometry(unit, meshes[1])
            else:
                shard = Placement("shard", 0) if shape else Placement("replicate")
                geometry = MeshGeometry(f"w{number}", shape, mesh, (Placement("replicate"), shard))
            held[rank].append((f"k{number}", dtype, geometry))
    return held


def compiled(
    held: list[list[tuple[str, str, Geometry]]], groups: list[list[int]], max_file_bytes: int
) -> dict[int, Layout]:
    return {
        rank: compile_layout(
            [entry(key, dtype, geometry, rank) for key, dtype, geometry in held[rank]],
            rank=rank,
            group_ranks=group,
            max_file_bytes=max_file_bytes,
        )
        for group in groups
        for rank in group
    }


groupings = st.sampled_from(
    [
        [[*range(8)]],
        [[0, 4], [1, 5], [2, 6], [3, 7]],
        [[0, 2, 5], [1, 3, 4, 6, 7]],
        [[rank] for rank in range(8)],
    ]
)


@given(states(), groupings, st.sampled_from([1, 20, 64, 1 << 30]))
def test_the_writers_of_an_array_write_each_element_exactly_once(held, groups, max_file_bytes):
    layouts = compiled(held, groups, max_file_bytes)
    written: Counter[tuple[object, ...]] = Counter()
    expected: Counter[tuple[object, ...]] = Counter()
    for rank, layout in layouts.items():
        for slot in layout.slots:
            e = layout.entries[slot.entry]
            shared = (e.key, writers_of(e, rank, layout.group_ranks))
            for element in range(slot.start, slot.stop):
                written[(*shared, element)] += 1
        for e in layout.entries:
            shared = (e.key, writers_of(e, rank, layout.group_ranks))
            for element in range(e.numel):
                expected[(*shared, element)] = 1
    assert written == expected


@given(states(), groupings, st.sampled_from([1, 20, 1 << 30]))
def test_a_zero_size_array_is_in_one_file_of_its_writers(held, groups, max_file_bytes):
    layouts = compiled(held, groups, max_file_bytes)
    for rank, layout in layouts.items():
        for number, e in enumerate(layout.entries):
            writers = writers_of(e, rank, layout.group_ranks)
            if e.numel == 0:
                here = [slot for slot in layout.slots if slot.entry == number]
                assert len(here) == (rank == writers[0])


@given(states(), groupings)
def test_replicas_share_the_bytes_evenly(held, groups):
    layouts = compiled(held, groups, 1 << 30)
    shares: dict[tuple[int, ...], dict[int, int]] = {}
    for rank, layout in layouts.items():
        for slot in layout.slots:
            e = layout.entries[slot.entry]
            writers = writers_of(e, rank, layout.group_ranks)
            by_rank = shares.setdefault(writers, dict.fromkeys(writers, 0))
            by_rank[rank] += (slot.stop - slot.start) * e.itemsize
    for by_rank in shares.values():
        assert max(by_rank.values()) - min(by_rank.values()) <= 2 * 16  # an element at each end


@given(states(), groupings, st.sampled_from([1, 20, 64, 1 << 30]))
def test_replicas_agree_on_the_digest_of_what_they_share(held, groups, max_file_bytes):
    layouts = compiled(held, groups, max_file_bytes)
    for layout in layouts.values():
        for writers, said in layout.classes.items():
            for other in map(int, writers.split(",")):
                assert layouts[other].classes[writers] == said


@given(st.data())
def test_every_file_is_opened_by_the_safetensors_library(tmp_path_factory, data):
    held = data.draw(states())
    size = data.draw(st.sampled_from([1, 20, 64, 1 << 30]))
    rank = data.draw(st.integers(0, WORLD - 1))
    layout = compiled(held, [[*range(WORLD)]], size)[rank]
    values = {e.key: pattern(e.nbytes, i) for i, e in enumerate(layout.entries)}
    arena = bytes(image_of(layout, values))
    assert len(arena) == layout.arena_size
    for number, file in enumerate(layout.files):
        image = arena[file.arena_offset : file.arena_offset + file.size]
        assert len(file.header) % ALIGNMENT == 0 and file.arena_offset % ALIGNMENT == 0
        slices = json.loads(metadata_of(image)[SLICES_KEY])
        readable = all(
            DTYPES[layout.entries[s.entry].dtype].code
            not in ("BF16", "F8_E4M3", "F8_E5M2", "C64")  # numpy has none of these
            for s in layout.slots
            if s.file == number
        )
        if readable:
            loaded = safetensors.numpy.load(image)
            assert set(loaded) == {
                layout.entries[s.entry].key for s in layout.slots if s.file == number
            }
            for slot in layout.slots:
                if slot.file == number:
                    e = layout.entries[slot.entry]
                    low, high = slot.start * e.itemsize, slot.stop * e.itemsize
                    assert loaded[e.key].tobytes() == values[e.key][low:high]
                    assert slot.offset % e.itemsize == 0 or not e.numel
        path = Path(tmp_path_factory.mktemp("image")) / "x.safetensors"
        path.write_bytes(image)
        with safetensors.safe_open(path, "pt") as opened:  # every dtype and shape, with torch
            for slot in layout.slots:
                if slot.file == number:
                    e = layout.entries[slot.entry]
                    whole = slot.start == 0 and slot.stop == e.numel
                    assert slices.get(e.key) == (None if whole else [slot.start, slot.stop])
                    shape = list(e.shape) if whole else [slot.stop - slot.start]
                    code = DTYPES[e.dtype].code
                    found = opened.get_slice(e.key)
                    assert found.get_dtype() == (code or "U8")
                    assert found.get_shape() == (shape if code else [*shape, e.itemsize])


def metadata_of(image: bytes) -> dict[str, str]:
    length = int.from_bytes(image[:8], "little")
    header: dict[str, dict[str, str]] = json.loads(image[8 : 8 + length])
    return header["__metadata__"]


@given(states(), st.sampled_from([64, 200, 1000]))
def test_a_large_image_is_split_in_files_of_the_given_size(held, max_file_bytes):
    layout = compiled(held, [[*range(WORLD)]], max_file_bytes)[0]
    for file in layout.files:
        assert file.size - len(file.header) <= max_file_bytes
    ends = [f.arena_offset + f.size for f in layout.files]
    starts = [f.arena_offset for f in layout.files]
    assert all(a <= b for a, b in zip(ends, starts[1:], strict=False))


def test_the_order_in_which_entries_come_changes_nothing():
    one = [entry(f"k{i}", "float32", PerRankGeometry((), (i,), (0,)), 0) for i in range(5)]
    a = compile_layout(one, rank=0, group_ranks=[0])
    b = compile_layout(one[::-1], rank=0, group_ranks=[0])
    assert a == b


def vary(**changed: object) -> str:
    mesh = Mesh(("r", "s"), (2, 2), (0, 1, 2, 3))
    given_ = {
        "key": "w", "dtype": "float32", "shape": (8, 2), "fqn": "w", "mesh": mesh,
        "placements": (Placement("replicate"), Placement("shard", 0)), "group": [0, 2], "files": 99,
        **changed,
    }  # fmt: skip
    rule = MeshGeometry(given_["fqn"], given_["shape"], given_["mesh"], given_["placements"])  # type: ignore
    return compile_layout(
        [entry(given_["key"], given_["dtype"], rule, 0)],  # type: ignore[arg-type]
        rank=0,
        group_ranks=given_["group"],  # type: ignore[arg-type]
        max_file_bytes=given_["files"],  # type: ignore[arg-type]
    ).fingerprint


def test_the_fingerprint_sees_names_types_shapes_placements_and_group():
    shards = (Placement("shard", 0), Placement("replicate"))
    prints = [
        vary(),
        vary(key="v"),
        vary(dtype="int32"),
        vary(shape=(8, 4)),
        vary(fqn="v"),
        vary(mesh=Mesh(("r", "s"), (2, 2), (0, 1, 3, 2))),
        vary(placements=shards, group=[0, 1]),
        vary(group=[0, 1, 2, 3]),
        vary(files=98),
    ]
    assert len(set(prints)) == len(prints)
    assert vary() == vary()
    unit = FlatUnit((Segment("f", (4,), 4),), 2)
    mesh = Mesh(("r", "s"), (1, 2), (0, 1))
    flats = [
        FlatGeometry(unit, mesh),
        FlatGeometry(unit, mesh, 0),
        FlatGeometry(FlatUnit((Segment("g", (4,), 4),), 2), mesh),
    ]
    made = {
        compile_layout([entry("f", "int8", flat, 0)], rank=0, group_ranks=[0, 1]).fingerprint
        for flat in flats
    }
    assert len(made) == 3


def test_two_tensors_of_one_dotted_key_are_refused():
    twice = [
        Entry(("a", "b"), "int8", PerRankGeometry((), (), (0,)), (), (), (0,)),
        Entry(("a.b",), "int8", PerRankGeometry((), (), (0,)), (), (), (0,)),
    ]
    with pytest.raises(StateError, match=r"a\.b"):
        compile_layout(twice, rank=0, group_ranks=[0])


def test_a_rank_outside_its_group_is_refused():
    with pytest.raises(UsageError, match="not a member"):
        compile_layout([], rank=3, group_ranks=[0, 1])


def test_a_header_over_the_limit_of_safetensors_is_refused(monkeypatch):
    monkeypatch.setattr("smckpt.layout.image.HEADER_LIMIT", 4096)
    many = [entry(f"k{i}", "int8", PerRankGeometry((), (1,), (0,)), 0) for i in range(100)]
    with pytest.raises(StateError, match="max_file_bytes"):
        compile_layout(many, rank=0, group_ranks=[0])


def test_compiling_for_16384_ranks_costs_per_tensor_and_not_per_rank():
    import time

    mesh = Mesh(("r", "s"), (16, 1024), tuple(range(16384)))
    cut = (Placement("replicate"), Placement("shard", 0))
    entries = [
        entry(f"k{i}", "float32", MeshGeometry(f"w{i}", (4096, 64), mesh, cut), 5)
        for i in range(1000)
    ]
    began = time.perf_counter()
    layout = compile_layout(entries, rank=5, group_ranks=range(16384))
    assert time.perf_counter() - began < seconds(
        5
    )  # a text of the mesh for each tensor takes 10 s and more
    assert math.isclose(
        sum(f.size - len(f.header) for f in layout.files), 4 * 64 * 4 * 1000 / 16, rel_tol=0.01
    )


def test_a_digest_does_not_depend_on_the_order_of_keys():
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1}) != digest({"a": 1, "b": [3]})
