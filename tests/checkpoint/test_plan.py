"""Planning and reading by logical name: any mesh to any other, bit for bit, or not at all."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.checkpoint.reading.loading_rank import LoadingRank
from smckpt.checkpoint.reading.plan import plan_logical
from smckpt.checkpoint.reading.read import execute
from smckpt.errors import (
    CorruptCheckpointError,
    KeysMismatchError,
    TensorMismatchError,
    TopologyError,
)
from smckpt.layout.geometry import PerRankGeometry
from smckpt.layout.mesh import Mesh
from smckpt.layout.strided import Box
from smckpt.storage import open_storage
from tests.support.synthetic import (
    Arrays,
    Rule,
    Step,
    boxes,
    cut,
    entries_of,
    flat,
    kept,
    load,
    members,
    on_mesh,
    save,
    state,
    whole,
)

DTYPES = ("float32", "bfloat16", "complex128", "bool", "complex32")


def mesh_of(*shape: int) -> Mesh:
    count = 1
    for size in shape:
        count *= size
    return Mesh(tuple(f"d{i}" for i in range(len(shape))), shape, tuple(range(count)))


def check(catalogue, rules: list[Rule], arrays: Arrays, ranks: range, **how) -> None:
    """Every rank of `ranks` gets exactly what it would have had."""
    for rank in ranks:
        entries = entries_of(rules, rank)
        got = load(catalogue, entries, rank, ranks, **how)
        for entry in entries:
            assert got.data[entry.key] == cut(entry, rank, arrays), (rank, entry)


# -- any mesh to any other -------------------------------------------------------------------------


@st.composite
def shapes(draw):
    count = draw(st.integers(1, 3))
    dims = st.lists(st.integers(0, 9), min_size=0, max_size=3)
    return {f"layer.{i}.w": tuple(draw(dims)) for i in range(count)}


@st.composite
def sharding(draw, dtype: str, named: dict[str, tuple[int, ...]]):
    """Rules for all tensors on a mesh of at most 6 ranks, and its ranks."""
    kind = draw(st.sampled_from(["mesh", "flat", "members", "boxes", "kept"]))
    if kind == "kept":
        return [kept(f, s, dtype) for f, s in named.items()], range(draw(st.integers(1, 2)))
    if kind in ("flat", "members"):
        mesh = mesh_of(draw(st.integers(1, 2)), draw(st.integers(1, 3)))
        gap = draw(st.integers(0, 3))
        make = members if kind == "members" else lambda *a, **k: [flat(*a, **k)]
        return make(named, mesh, dtype, gap=gap), range(len(mesh.ranks))
    if kind == "boxes":
        rules = []
        for fqn, shape in named.items():
            half = [n // 2 for n in shape[:1]]
            if not half:
                rules.append(boxes(fqn, shape, {r: [Box((), ())] for r in range(2)}, dtype))
                continue
            first = Box((0,) * len(shape), (half[0], *shape[1:]))
            second = Box((half[0], *(0,) * (len(shape) - 1)), (shape[0] - half[0], *shape[1:]))
            rules.append(boxes(fqn, shape, {0: [second], 1: [first], 2: [first]}, dtype))
        return rules, range(3)
    mesh = mesh_of(*draw(st.sampled_from([(1,), (2,), (4,), (2, 2), (3, 2), (2, 1, 2)])))
    rules = []
    for fqn, shape in named.items():
        places = []
        for _ in mesh.shape:
            choices = ["R"]
            if shape:
                dim = draw(st.integers(0, len(shape) - 1))
                choices += [f"S{dim}", f"SS{dim}/2"]
            places.append(draw(st.sampled_from(choices)))
        rules.append(on_mesh(fqn, shape, mesh, " ".join(places), dtype))
    return rules, range(len(mesh.ranks))


@st.composite
def resharding(draw):
    dtype = draw(st.sampled_from(DTYPES))
    named = draw(shapes())
    before, after = draw(sharding(dtype, named)), draw(sharding(dtype, named))
    return named, dtype, before, after, draw(st.sampled_from([None, 64]))


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(resharding())
def test_what_was_saved_on_any_mesh_loads_on_any_other_bit_for_bit(case):
    named, dtype, (saved, ranks), (live, live_ranks), run_bytes = case
    arrays = whole(named, dtype)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        if run_bytes is not None:  # small tensors go through scratch; let some go directly
            patch.setattr("smckpt.checkpoint.reading.read.RUN_BYTES", run_bytes // 8)
            patch.setattr("smckpt.checkpoint.reading.read.SCRATCH_BYTES", run_bytes)
        save(Path(name), ranks, state(saved, arrays))
        catalogue = open_catalogue(open_storage(name))
        empty = {f for f, s in named.items() if 0 in s}
        if any(f"model.{fqn}" not in catalogue.logical for fqn in empty):
            live = [rule for rule in live if rule.key not in empty]
        check(catalogue, live, arrays, live_ranks, strict=False, threads=1)


def test_large_tensors_reshard_through_direct_reads_and_scratch(tmp_path):
    named = {"a": (700, 1031), "b": (3, 200_000), "c": (5_000, 3)}
    arrays = whole(named)
    mesh = mesh_of(2, 3)
    saved = [on_mesh(f, s, mesh, "S1 S0") for f, s in named.items()]
    save(tmp_path, range(6), state(saved, arrays))
    catalogue = open_catalogue(open_storage(str(tmp_path)))
    live = mesh_of(4)
    for place in ("S0", "S1", "R"):
        check(catalogue, [on_mesh(f, s, live, place) for f, s in named.items()], arrays, range(4))
    check(catalogue, [flat(named, mesh_of(1, 2), gap=5)], arrays, range(2))


def test_replicas_that_shared_the_writing_are_read_together(tmp_path):
    named = {"a": (100,), "b": (33, 3)}
    arrays = whole(named)
    mesh = mesh_of(4)
    save(tmp_path, range(4), state([on_mesh(f, s, mesh, "R") for f, s in named.items()], arrays))
    catalogue = open_catalogue(open_storage(str(tmp_path)))
    [source] = catalogue.pieces.all("model.a")
    assert source.holders == (0, 1, 2, 3)
    assert len(catalogue.slots(source.row, source.holders)) > 1
    check(catalogue, [kept(f, s) for f, s in named.items()], arrays, range(1))


def test_files_cut_by_size_are_read_together(tmp_path, monkeypatch):
    named = {"a": (100,), "b": (33, 3)}
    arrays = whole(named)
    mesh = mesh_of(2)
    monkeypatch.setattr("smckpt.layout.image.DEFAULT_MAX_FILE_BYTES", 64)
    monkeypatch.setattr("smckpt.layout.image.compile_layout.__kwdefaults__", {"max_file_bytes": 64})
    save(tmp_path, range(2), state([on_mesh(f, s, mesh, "S0") for f, s in named.items()], arrays))
    assert len(list(tmp_path.glob("data-*.safetensors"))) > 8
    monkeypatch.undo()
    check(
        open_catalogue(open_storage(str(tmp_path))), [flat(named, mesh_of(1, 3))], arrays, range(3)
    )


def test_groups_in_nested_directories_are_read_together(tmp_path):
    named = {"a": (12, 4), "b": (9,)}
    arrays = whole(named)
    mesh = mesh_of(2, 2)
    rules = [on_mesh(f, s, mesh, "R S0") for f, s in named.items()]
    Step(tmp_path, {"any/name": (0, 2), "other": (1, 3)}, state(rules, arrays)).save()
    catalogue = open_catalogue(open_storage(str(tmp_path)))
    assert catalogue.whole and len(catalogue.manifests) == 2
    check(catalogue, [on_mesh(f, s, mesh_of(3), "S0") for f, s in named.items()], arrays, range(3))


def test_a_local_load_by_other_ranks_follows_who_held_all_of_their_shards(tmp_path):
    """Two tensors cut along different dimensions of one mesh: half of the ranks share this rank's
    shard of the one, half of the other, and one rank has both."""

    def rules(first: int) -> list[Rule]:
        mesh = Mesh(("a", "b"), (2, 2), tuple(range(first, first + 4)))
        return [on_mesh("along_b", (6, 2), mesh, "R S0"), on_mesh("along_a", (6, 4), mesh, "S0 R"),
                on_mesh("again_b", (4, 2), mesh, "R S0")]  # fmt: skip

    arrays = whole({"along_b": (6, 2), "along_a": (6, 4), "again_b": (4, 2)})
    save(tmp_path, range(4), state(rules(0), arrays))
    check(open_catalogue(open_storage(str(tmp_path))), rules(4), arrays, range(4, 8), local=True)


def test_only_the_headers_of_needed_files_are_read(tmp_path):
    arrays = whole({"a": (8, 4)})
    save(tmp_path, range(4), state([on_mesh("a", (8, 4), mesh_of(4), "S0")], arrays))
    for path in tmp_path.glob("data-*-r0000[23]-*.safetensors"):
        path.unlink()
    catalogue = open_catalogue(open_storage(str(tmp_path)))
    live = [on_mesh("a", (8, 4), mesh_of(2), "S0")]
    entries = entries_of(live, 0)
    assert load(catalogue, entries, 0, (0, 1)).data["model.a"] == cut(entries[0], 0, arrays)
    with pytest.raises(CorruptCheckpointError, match="missing") as caught:
        load(catalogue, entries_of(live, 1), 1, (0, 1))
    assert "r00002" in str(caught.value.path) or "r00003" in str(caught.value.path)


# -- values that ranks keep ------------------------------------------------------------------------


def rng_of(rank: int, key: str) -> bytes:
    return bytes([rank] * 4)


@pytest.mark.parametrize(
    ("saved", "live", "rank", "followed"),
    [
        (range(4), range(4), 3, 3),
        (range(4), range(2), 1, 1),  # fewer ranks: each its own
        (range(2), range(6), 5, 1),  # more: the i-th follows i mod n
        (range(2), (4, 6), 6, 1),  # other ranks: by their place in the group
        (range(4), (1, 3), 3, 3),  # one group of two: its own, not that of its place
    ],
)
@pytest.mark.parametrize("local", [False, True])
def test_a_kept_value_follows_the_rank_that_saved_it(tmp_path, saved, live, rank, followed, local):
    save(tmp_path, saved, state([kept("rng")], {}, rng_of))
    entries = entries_of([kept("rng")], rank)
    got = load(open_catalogue(open_storage(str(tmp_path))), entries, rank, live, local=local)
    assert got.data["model.rng"] == bytes([followed] * 4)


def test_kept_values_of_several_shapes_are_each_their_own(tmp_path):
    rule = Rule("seen", "float32", lambda rank: PerRankGeometry(("seen",), (rank + 1,), (rank,)))
    save(tmp_path, range(2), state([rule], {}, lambda rank, key: bytes([rank] * 4 * (rank + 1))))
    catalogue = open_catalogue(open_storage(str(tmp_path)))
    for rank in range(2):
        got = load(catalogue, entries_of([rule], rank), rank, range(2))
        assert got.data["model.seen"] == bytes([rank] * 4 * (rank + 1))
    with pytest.raises(TensorMismatchError, match=r"saved as float32 \[2\]"):
        load(catalogue, entries_of([kept("seen", (1,))], 1), 1, range(2))


def test_the_step_of_a_flat_parameter_stands_for_those_of_its_members(tmp_path):
    arrays = {"a": whole({"a": ()})["a"]}
    save(tmp_path, range(2), state([kept(("a", "b"), key="_flat_param")], {"a": arrays["a"]},
                                   lambda rank, key: b"step"))  # fmt: skip
    catalogue = open_catalogue(open_storage(str(tmp_path)))
    mesh = mesh_of(2)
    apart = [on_mesh("a", (), mesh, "R"), on_mesh("b", (), mesh, "R")]
    got = load(catalogue, entries_of(apart, 0), 0, range(2))
    assert got.data == {"model.a": b"step", "model.b": b"step"}
    together = entries_of([kept(("a", "b"), key="other")], 0)
    assert load(catalogue, together, 0, range(2)).data == {"model.other": b"step"}


def test_separate_steps_become_that_of_a_flat_parameter(tmp_path):
    save(tmp_path, range(1), state([kept("a"), kept("b")], {}, lambda rank, key: b"step"))
    got = load(
        open_catalogue(open_storage(str(tmp_path))),
        entries_of([kept(("a", "b"), key="_flat")], 0),
        0,
        [0],
    )
    assert got.data == {"model._flat": b"step"}
    assert len(got.plan.copies) == 1  # written once, whichever of the two is taken


# -- refused before a byte is read -----------------------------------------------------------------


def saved_pair(tmp_path: Path):
    named = {"a": (8, 4), "b": (6,)}
    rules = [on_mesh(f, s, mesh_of(2), "S0") for f, s in named.items()]
    save(tmp_path, range(2), state(rules, whole(named)))
    return open_catalogue(open_storage(str(tmp_path)))


def test_names_that_only_one_side_has_are_listed_both_ways(tmp_path):
    catalogue = saved_pair(tmp_path)
    live = entries_of([kept("a", (8, 4)), kept("c", (1,))], 0)
    with pytest.raises(KeysMismatchError) as caught:
        load(catalogue, live, 0, [0])
    assert "lacks ['model.c']" in str(caught.value) and "lacks ['model.b']" in str(caught.value)
    plan = load(catalogue, live, 0, [0], strict=False).plan
    assert (plan.missing, plan.unexpected) == (("model.c",), ("model.b",))


def test_a_flat_parameter_of_which_some_members_are_saved_is_filled_as_far(tmp_path):
    arrays = whole({"a": (8, 4), "b": (6,)})
    rules = [on_mesh("a", (8, 4), mesh_of(2), "S0")]
    save(tmp_path, range(2), state(rules, arrays))
    live = entries_of([flat({"a": (8, 4), "b": (6,)}, mesh_of(1, 1))], 0)
    got = load(open_catalogue(open_storage(str(tmp_path))), live, 0, [0], strict=False)
    assert got.data["model._flat_param"][:128] == arrays["a"].tobytes()
    assert got.data["model._flat_param"][128:] == b"\xee" * 24


@pytest.mark.parametrize(
    "rule",
    [
        kept("a", (4, 8)),
        kept("a", (8, 4), "int32"),
        on_mesh("a", (9, 4), mesh_of(2), "S0"),
        on_mesh("a", (0, 4), mesh_of(2), "S0"),
    ],
)
def test_another_global_shape_or_dtype_is_refused(tmp_path, rule):
    with pytest.raises(TensorMismatchError, match="model.a: it was saved as float32"):
        load(saved_pair(tmp_path), entries_of([rule], 0), 0, [0], strict=False)


def test_what_a_rank_holds_nothing_of_in_a_flat_parameter_is_checked_there_too(tmp_path):
    rule = flat({"a": (8, 4), "b": (5,)}, mesh_of(1, 2))
    assert {piece.name for piece in entries_of([rule], 0)[0].geometry.pieces(0)} == {"a"}
    with pytest.raises(TensorMismatchError, match=r"model.b: it was saved as float32 \[6\]"):
        load(saved_pair(tmp_path), entries_of([rule], 0), 0, range(2), strict=False)


def test_elements_that_no_shard_has_are_refused_and_the_place_above_is_named(tmp_path):
    rules = [on_mesh("a", (8, 4), mesh_of(2), "S0")]
    made = state(rules, whole({"a": (8, 4)}))
    Step(tmp_path, {"zero": [0], "one": [1]}, made).save()
    catalogue = open_catalogue(open_storage(str(tmp_path / "zero")))
    with pytest.raises(CorruptCheckpointError, match="16 of the 32 elements") as caught:
        load(catalogue, entries_of([kept("a", (8, 4))], 0), 0, [0])
    assert str(tmp_path) in caught.value.remedy and caught.value.remedy.endswith(str(tmp_path))


def test_a_rank_that_never_saved_its_shard_leaves_a_hole_that_is_refused(tmp_path):
    # A group of three of the four ranks: what rank 3 alone held is nowhere.
    rules = [on_mesh("a", (8, 4), mesh_of(4), "S0")]
    save(tmp_path, range(3), state(rules, whole({"a": (8, 4)})))
    catalogue = open_catalogue(open_storage(str(tmp_path)))
    with pytest.raises(CorruptCheckpointError, match=r"8 of the 16 .* \(the first at \[6, 0\]\)"):
        load(catalogue, entries_of([on_mesh("a", (8, 4), mesh_of(2), "S0")], 1), 1, range(2))
    half = [on_mesh("a", (8, 4), mesh_of(2), "S0")]
    assert load(catalogue, entries_of(half, 0), 0, range(2)).data


def test_a_slot_that_a_header_lacks_is_a_hole_too(tmp_path):
    arrays = whole({"a": (9, 4)})
    rules = [on_mesh("a", (9, 4), mesh_of(2), "R")]
    group = save(tmp_path, range(2), state(rules, arrays))
    catalogue = open_catalogue(open_storage(str(tmp_path)))
    [row] = catalogue.rows
    whole_slots = catalogue.slots(row, (0, 1))
    assert [(s.start, s.stop) for _, s in whole_slots] == [(0, 72), (72, 144)]
    with pytest.raises(CorruptCheckpointError, match="elements 18 to 36"):
        catalogue.slots(row, (0,))
    with pytest.raises(CorruptCheckpointError, match="elements 0 to 36"):
        catalogue.slots(row, (1,))
    assert group.ranks == range(2)


# -- one name, several meshes ----------------------------------------------------------------------


def stages(tmp_path: Path, *, join: bool = False, alike: bool = True):
    """Two meshes that save different tensors under one name (`join`: and one that spans both, and
    the tensors are `alike`)."""
    arrays = [whole({"a": (4, 4), "t": (4,)}, seed=seed) for seed in (1, 2)]
    meshes = [Mesh(("d",), (2,), ranks) for ranks in ((0, 2), (1, 3))]

    def made(rank: int):
        side = rank % 2
        rules = [on_mesh("a", (4, 4), meshes[side], "S0")]
        if join:
            rules.append(on_mesh("t", (4,), mesh_of(4), "S0"))
        return state(rules, arrays[0 if join and alike else side])(rank)

    save(tmp_path, range(4), made)
    return open_catalogue(open_storage(str(tmp_path))), meshes, arrays


def test_tensors_of_two_meshes_under_one_name_are_not_confused(tmp_path):
    catalogue, meshes, arrays = stages(tmp_path)
    with pytest.raises(TopologyError, match="copies of one tensor or different tensors"):
        load(catalogue, entries_of([kept("a", (4, 4))], 0), 0, [0])
    for side in range(2):  # the same meshes as before: no doubt which is whose
        live = [on_mesh("a", (4, 4), meshes[side], "S0")]
        for rank in meshes[side].ranks:
            for local in (True, False):
                got = load(catalogue, entries_of(live, rank), rank, range(4), local=local)
                assert got.data["model.a"] == cut(entries_of(live, rank)[0], rank, arrays[side])


def test_what_a_wider_mesh_joins_is_one_tensor(tmp_path):
    catalogue, _, arrays = stages(tmp_path, join=True)  # FSDP + TP, `a` not in the TP plan
    got = load(catalogue, entries_of([kept("a", (4, 4)), kept("t", (4,))], 0), 0, [0])
    assert got.data["model.a"] == arrays[0]["a"].tobytes()


def test_a_rank_mixes_no_tensors_of_its_mesh_and_of_another(tmp_path):
    # Experts under one name on each expert-parallel rank, and a mesh over all for the rest.
    catalogue, _, arrays = stages(tmp_path, join=True, alike=False)
    for rank in range(2):
        live = entries_of([on_mesh("a", (4, 4), Mesh(("d",), (1,), (rank,)), "S0")], rank)
        got = load(catalogue, live, rank, range(2), strict=False)
        assert got.data["model.a"] == arrays[rank]["a"].tobytes()


# Explicit boxes, as FSDP1 saves them under SHARDED, name no mesh. Whether two ranks with one box
# are replicas, or tensor-parallel ranks with a tensor each, only their values tell.
HALVES = Box((0, 0), (2, 4)), Box((2, 0), (2, 4))


def boxes_of_groups(tmp_path: Path, box_of: dict[int, Box], arrays, **part):
    """A step of the groups (0, 1) and (2, 3) of what ranks hold of `a` in boxes."""

    def made(rank: int):
        return state([boxes("a", (4, 4), {rank: [box_of[rank]]})], arrays[rank // 2])(rank)

    Step(tmp_path, {"zero": [0, 1], "one": [2, 3]}, made).save(**part)
    return open_catalogue(open_storage(str(tmp_path)))


def test_boxes_of_two_groups_that_overlap_are_not_mixed(tmp_path):
    arrays = [whole({"a": (4, 4)}, seed=seed) for seed in (1, 2)]  # a tensor each, as tp0 and tp1
    catalogue = boxes_of_groups(tmp_path, dict(enumerate(HALVES * 2)), arrays)
    for rank in range(4):
        with pytest.raises(TopologyError, match="a was saved by ranks .* separately by ranks"):
            load(catalogue, entries_of([kept("a", (4, 4))], rank), rank, range(4))
    own = open_catalogue(open_storage(str(tmp_path / "one")))
    got = load(own, entries_of([kept("a", (4, 4))], 0), 0, [0])
    assert got.data["model.a"] == arrays[1]["a"].tobytes()


def boxes_of_one_group(tmp_path: Path, arrays, *, shape=(4, 4), split=2):
    """One group of two pairs of ranks. Each pair saves `a` in halves, of an array of its own."""

    def made(rank: int):
        low = rank % 2 * split
        box = Box((low, 0), (split, shape[1]))
        # What lies before it in the file differs, as an RNG state does.
        rules = [boxes("a", shape, {rank: [box]}), kept("rng", (3,))]
        return state(rules, {**arrays[rank // 2], "rng": whole({"r": (3,)}, seed=rank)["r"]})(rank)

    save(tmp_path, range(4), made)
    return open_catalogue(open_storage(str(tmp_path)))


def test_slices_of_one_group_are_not_taken_for_replicas(tmp_path):
    arrays = [whole({"a": (4, 4)}, seed=seed) for seed in (1, 2)]
    catalogue = boxes_of_one_group(tmp_path, arrays)
    whole_array = entries_of([kept("a", (4, 4))], 0)
    with pytest.raises(TopologyError, match="a was saved by ranks .* separately by ranks"):
        load(catalogue, whole_array, 0, [0], strict=False)
    for rank in range(4):  # the ranks that saved load their own boxes again
        low = rank % 2 * 2
        own = entries_of([boxes("a", (4, 4), {rank: [Box((low, 0), (2, 4))]})], rank)
        got = load(catalogue, own, rank, range(4), strict=False)
        assert got.data["model.a"] == arrays[rank // 2]["a"][low : low + 2].tobytes()
        if rank > 1:  # on other ranks it is not known whose box is meant
            with pytest.raises(TopologyError, match="a was saved by ranks"):
                load(catalogue, own, rank, [rank], strict=False)


@pytest.mark.parametrize("rows", [4, 1 << 19])  # a part of a block, and several blocks
def test_replicas_of_one_group_are_one_tensor(tmp_path, rows):
    arrays = [whole({"a": (rows, 4)})] * 2
    catalogue = boxes_of_one_group(tmp_path, arrays, shape=(rows, 4), split=rows // 2)
    got = load(catalogue, entries_of([kept("a", (rows, 4))], 0), 0, [0], strict=False)
    assert got.data["model.a"] == arrays[0]["a"].tobytes()


def test_one_element_that_differs_in_the_last_block_is_found(tmp_path):
    rows = 1 << 19
    arrays = [whole({"a": (rows, 4)}) for _ in range(2)]
    arrays[1]["a"][-1, -1] += 1
    catalogue = boxes_of_one_group(tmp_path, arrays, shape=(rows, 4), split=rows // 2)
    with pytest.raises(TopologyError, match="a was saved by ranks"):
        load(catalogue, entries_of([kept("a", (rows, 4))], 0), 0, [0], strict=False)


def test_boxes_of_groups_that_are_replicas_are_one_tensor(tmp_path):
    arrays = [whole({"a": (4, 4)})] * 2  # as HSDP saves them, a group for each replica
    catalogue = boxes_of_groups(tmp_path, dict(enumerate(HALVES * 2)), arrays)
    for rank in range(4):
        got = load(catalogue, entries_of([kept("a", (4, 4))], rank), rank, range(4))
        assert got.data["model.a"] == arrays[0]["a"].tobytes()


def test_boxes_of_groups_that_each_have_a_shard_are_one_tensor(tmp_path):
    arrays = [whole({"a": (4, 4)})] * 2
    first, second = HALVES
    catalogue = boxes_of_groups(tmp_path, {0: first, 1: first, 2: second, 3: second}, arrays)
    got = load(catalogue, entries_of([kept("a", (4, 4))], 0), 0, [0])
    assert got.data["model.a"] == arrays[0]["a"].tobytes()


def test_the_coordinates_tell_boxes_under_one_name_apart(tmp_path):
    arrays = [whole({"a": (4, 4)}, seed=seed) for seed in (1, 2)]
    catalogue = boxes_of_groups(tmp_path, dict(enumerate(HALVES * 2)), arrays)
    for side, alike in enumerate(((0, 1), (2, 3))):
        entries = entries_of([kept("a", (4, 4))], 0)
        plan = plan_logical(LoadingRank(catalogue, 0, [0], frozenset(alike)), entries)
        data = bytearray(64)
        execute(plan.copies, [memoryview(data)])
        assert data == arrays[side]["a"].tobytes()
