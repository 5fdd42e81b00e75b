"""Tables of tensors: geometry comes back exactly, and grows with tensors, not with ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smckpt.checkpoint.records.rows import RowMerger, decode_containers, decode_rows, encode_rows
from smckpt.errors import CorruptCheckpointError
from smckpt.layout.entries import Entry
from smckpt.layout.flat_geometry import FlatGeometry, FlatUnit, Segment
from smckpt.layout.geometry import BoxGeometry, Geometry, MeshGeometry, PerRankGeometry
from smckpt.layout.mesh import Mesh, Placement
from smckpt.layout.strided import Box

ROW = {"path": ["w"], "dtype": "float32", "before": [], "after": [],
       "geometry": {"kept": ["w"], "shape": [2]}}  # fmt: skip
BOXED = {"fqn": "w", "shape": [2, 2], "boxes": [[[0, 0], [1, 2]]], "holders": [[0, 8, 1]]}
HSDP = Mesh(("replicate", "shard"), (2, 4), tuple(range(8)))


def merge_rows(tables: dict[int, dict[str, object]]) -> dict[str, object]:
    merger = RowMerger()
    for rank in sorted(tables):
        token = json.dumps(tables[rank])
        if not merger.same(rank, token):
            merger.add(rank, tables[rank], token)
    return merger.merged()


def entry(key: str, geometry: Geometry, rank: int = 0, dtype: str = "float32") -> Entry:
    path = ("optimizer", "state", 0, key)
    return Entry(path, dtype, geometry, ("optimizer", "state"), (key,), (rank,))


def sharded(fqn: str, mesh: Mesh = HSDP, shape: tuple[int, ...] = (30, 7)) -> MeshGeometry:
    return MeshGeometry(fqn, shape, mesh, (Placement("replicate"), Placement("shard", 0)))


def through_json(table: dict[str, object]) -> dict[str, object]:
    return json.loads(json.dumps(table))  # type: ignore[no-any-return]


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    size = 1
    for n in shape:
        size *= n
    start, stride = draw(st.integers(0, 5)), draw(st.integers(1, 4))
    ranks = [start + i * stride for i in range(size)]
    if draw(st.booleans()):
        ranks = draw(st.permutations(ranks))
    return Mesh(tuple(f"d{i}" for i in range(len(shape))), shape, tuple(ranks))


@st.composite
def geometries(draw: st.DrawFn, rank: int) -> Geometry:
    kind = draw(st.sampled_from(["mesh", "flat", "box", "kept"]))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    if kind == "kept":
        return PerRankGeometry(tuple(draw(st.lists(st.text(), max_size=3))), shape, (rank,))
    if kind == "box":
        box = Box((0,) * len(shape), shape)
        holders = tuple(sorted({rank, *draw(st.lists(st.integers(0, 40), max_size=4))}))
        return BoxGeometry(draw(st.text()), shape, (box,) * draw(st.integers(1, 2)), holders)
    if kind == "flat":
        ranks = (rank, *range(100, 100 + draw(st.integers(0, 5))))
        mesh = Mesh(("r", "s"), (1, len(ranks)), ranks)
        unit = FlatUnit((Segment("a.b", (2, 3), 6), Segment(None, (), 2), Segment("c", (), 1)), 4)
        return FlatGeometry(unit, mesh, draw(st.none() | st.just(0)))
    mesh = draw(meshes().filter(lambda m: rank in m))
    choices = [Placement("replicate")]
    for dim in range(len(shape)):
        choices += [Placement("shard", dim), Placement("strided", dim, 2)]
    placements = tuple(draw(st.sampled_from(choices)) for _ in mesh.shape)
    return MeshGeometry(draw(st.text()), shape, mesh, placements)


@given(st.data())
def test_a_rank_s_entries_come_back_exactly(data):
    entries = [
        Entry(("m", i, f"k{i}"), "bfloat16", g, ("m",), (i, "x"), (0,))
        for i, g in enumerate(data.draw(st.lists(geometries(0), max_size=6)))
    ]
    rows = decode_rows(through_json(encode_rows(entries)), [0])
    assert rows == entries
    assert [row.key for row in rows] == [e.key for e in entries]
    assert [type(p) for row in rows for p in row.path] == [type(p) for e in entries for p in e.path]


def test_a_mesh_stands_once_for_all_tensors_that_share_it():
    table = encode_rows([entry(f"k{i}", sharded(f"f{i}")) for i in range(100)])
    assert len(table["meshes"]) == 1 and len(table["rows"]) == 100
    equal = Mesh(HSDP.dim_names, HSDP.shape, HSDP.ranks)
    both = encode_rows([entry("a", sharded("a")), entry("b", sharded("b", equal))])
    assert len(both["meshes"]) == 1


def test_tensors_of_one_name_may_differ_in_shape_placement_and_mesh():
    """Two models in one state dict: what is shared between rows of a name must be theirs both."""
    other = Mesh(("replicate", "shard"), (4, 2), tuple(range(8)))
    both = (Placement("shard", 1), Placement("shard", 0))
    rules = [
        sharded("w"),
        sharded("w", shape=(40, 9)),
        MeshGeometry("w", (30, 7), HSDP, both),
        sharded("w", other),
        sharded("v"),
        sharded("w"),
    ]
    entries = [entry(f"k{i}", rule) for i, rule in enumerate(rules)]
    rows = decode_rows(through_json(encode_rows(entries)), range(8))
    assert [row.geometry for row in rows] == rules
    assert rows[0].geometry is rows[5].geometry


def test_the_rows_of_64_ranks_of_one_mesh_stand_once():
    mesh = Mesh(("replicate", "shard"), (4, 16), tuple(range(64)))

    def table(rank: int) -> dict[str, object]:
        kept = PerRankGeometry(("step",), (), (rank,))
        entries = [entry(f"k{i}", sharded(f"f{i}", mesh), rank) for i in range(50)]
        return encode_rows([*entries, entry("step", kept, rank)])

    alone, all_ = table(0), merge_rows({rank: table(rank) for rank in range(64)})
    assert all_ == alone
    assert [row.ranks for row in decode_rows(all_, range(64))] == [tuple(range(64))] * 51


def test_a_kept_row_is_one_row_and_becomes_each_rank_s_own_again():
    tables = {r: encode_rows([entry("rng", PerRankGeometry((), (5056,), (r,)), r)]) for r in (3, 5)}
    (row,) = decode_rows(merge_rows(tables), [3, 5])
    assert row.ranks == (3, 5)
    assert row.geometry == PerRankGeometry((), (5056,), (3, 5))
    assert row.geometry.coordinate(3) != row.geometry.coordinate(5)


def test_rows_of_some_ranks_say_of_which():
    tables = {
        rank: encode_rows(
            [entry("w", sharded("w"), rank)]
            + ([entry("extra", PerRankGeometry((), (1,), (rank,)), rank)] if rank % 2 else [])
        )
        for rank in range(8)
    }
    by_key = {row.key: row for row in decode_rows(through_json(merge_rows(tables)), range(8))}
    assert by_key["optimizer.state.0.w"].ranks == tuple(range(8))
    assert by_key["optimizer.state.0.extra"].ranks == (1, 3, 5, 7)


def test_arrays_that_differ_in_shape_between_ranks_are_rows_of_their_own():
    tables = {
        r: encode_rows([entry("pos", PerRankGeometry((), (r % 2 + 1,), (r,)), r)]) for r in range(4)
    }
    rows = decode_rows(merge_rows(tables), range(4))
    assert {row.shape: row.ranks for row in rows} == {(1,): (0, 2), (2,): (1, 3)}


def test_meshes_of_different_ranks_are_renumbered_into_one_list():
    stages = [Mesh(("r", "s"), (1, 2), (0, 1)), Mesh(("r", "s"), (1, 2), (2, 3))]
    tables = {
        rank: encode_rows(
            [
                entry("kept", PerRankGeometry((), (), (rank,)), rank),
                entry(f"w{rank // 2}", sharded(f"w{rank // 2}", stages[rank // 2]), rank),
            ]
        )
        for rank in range(4)
    }
    rows = {r.key: r for r in decode_rows(merge_rows(tables), range(4))}
    for stage, mesh in enumerate(stages):
        row = rows[f"optimizer.state.0.w{stage}"]
        assert row.geometry == sharded(f"w{stage}", mesh)
        assert row.ranks == mesh.ranks


@given(st.lists(st.integers(0, 50), unique=True, min_size=1, max_size=12))
def test_ranks_of_any_mesh_survive_as_runs(ranks):
    holders = tuple(ranks)
    geometry = BoxGeometry("f", (2,), (Box((0,), (2,)),), holders)
    (row,) = decode_rows(through_json(encode_rows([entry("k", geometry)])), holders)
    assert row.geometry == geometry


@pytest.mark.parametrize("ranks", [(99,), (0, 99)])
def test_a_row_of_ranks_outside_its_mesh_is_refused(ranks):
    with pytest.raises(CorruptCheckpointError, match="outside its mesh"):
        decode_rows(through_json(encode_rows([entry("w", sharded("w"))])), ranks)


def test_a_mesh_of_16384_ranks_takes_a_line():
    mesh = Mesh(("replicate", "shard"), (16, 1024), tuple(range(16384)))
    table = encode_rows([entry("k", sharded("f", mesh))])
    assert len(json.dumps(table["meshes"])) < 100
    assert decode_rows(table, range(16384))[0].geometry == sharded("f", mesh)


def test_a_table_that_was_seen_is_not_read_again():
    table = encode_rows([entry("w", sharded("w"))])
    merger = RowMerger()
    assert not merger.same(0, "token")
    merger.add(0, table, "token")
    assert merger.same(1, "token") and merger.same(2, "token")
    assert merger.merged() == merge_rows({0: table, 1: table, 2: table})


def test_kinds_that_only_some_ranks_have_are_of_those_ranks():
    def table(**kinds: str) -> dict[str, Any]:
        return encode_rows([entry("w", sharded("w"))], {(at,): kind for at, kind in kinds.items()})

    tables = {0: table(a="list", b="tuple"), 2: table(a="list"), 3: table(a="ordered")}
    merger = RowMerger()
    for rank, each in tables.items():
        merger.add(rank, each, each["containers"][0][1])
    assert merger.same(1, "ordered")
    merged = through_json(merger.merged())
    assert decode_containers(merged, range(4)) == [
        (("a",), "list", {0, 2}), (("b",), "tuple", {0}), (("a",), "ordered", {1, 3}),
    ]  # fmt: skip
    assert merge_rows({0: tables[0], 1: tables[0]}) == tables[0]  # alike: not a word more
    with pytest.raises(CorruptCheckpointError, match="ValueError"):
        decode_containers({**merged, "container_ranks": [[0, [[0, 1 << 40, 1]]]]}, range(4))


@pytest.mark.parametrize(
    "damage",
    [
        {"rows": [{}]},
        {"meshes": []},
        {"meshes": [{"names": ["a"], "shape": [3], "ranks": [[0, 2, 1]]}]},
        {"rows": 5},
        {"meshes": [{"names": ["a"], "shape": [8.0], "ranks": [[0, 8, 1]]}]},
        {"meshes": [{"names": ["a"], "shape": [1], "ranks": [[0, 1 << 60, 1]]}]},
        {"rows": [{"path": [], "dtype": "x", "before": [], "after": [], "geometry": {}}]},
        {"rows": [{**ROW, "dtype": ["float32"]}]},
        {"rows": [{**ROW, "before": [[]]}]},
        {"rows": [{**ROW, "after": [None]}]},
        {"rows": [{**ROW, "path": [["w"]]}]},
        {"rows": [{**ROW, "geometry": {"kept": ["w"], "shape": ["2"]}}]},
        {"rows": [{**ROW, "geometry": {"kept": ["w"], "shape": [-2]}}]},
        *(
            {"rows": [{**ROW, "geometry": {**BOXED, **other}}]}
            for other in (
                {"boxes": [[[0], [1, 2]]]},
                {"boxes": [[[0, 0], [2]]]},
                {"boxes": [[[0], [2]]]},
                {"boxes": [[[0, 0, 0], [1, 2, 1]]]},
                {"boxes": [[[0, 1], [2, 2]]]},
                {"boxes": [[[0, 0], [2, 2]], [[], []]]},
                {"shape": [2]},
                {"fqn": ["w"]},
            )
        ),
    ],
)
def test_a_table_without_sense_is_refused_with_its_path(damage):
    table = {**encode_rows([entry("w", sharded("w"))]), **damage}
    with pytest.raises(CorruptCheckpointError, match="cannot be decoded") as caught:
        decode_rows(table, range(8), "/ckpt")
    assert caught.value.path == "/ckpt"


def test_boxes_of_the_tensor_s_shape_are_read():
    inside = [[[0, 0], [1, 2]], [[2, 2], [0, 0]]]  # a rank may hold nothing
    rows = [{**ROW, "geometry": {**BOXED, "boxes": inside}}]
    (row,) = decode_rows({**encode_rows([entry("w", sharded("w"))]), "rows": rows}, range(8))
    assert [box.numel for box in row.geometry.boxes] == [2, 0]


def test_a_row_cannot_belong_to_ranks_outside_the_group():
    table = encode_rows([entry("w", sharded("w"))])
    table["rows"][0]["ranks"] = [[6, 4, 1]]
    with pytest.raises(CorruptCheckpointError, match="group"):
        decode_rows(table, range(8))


def test_a_dtype_of_a_newer_smckpt_is_named():
    table = encode_rows([entry("w", sharded("w"))])
    table["rows"][0]["dtype"] = "float2"
    with pytest.raises(CorruptCheckpointError, match="dtype 'float2'.*newer smckpt"):
        decode_rows(through_json(table), range(8), "/ckpt")
