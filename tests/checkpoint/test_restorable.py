"""What the metadata says of a load on other degrees is what the load then does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.checkpoint.reading.loading_rank import LoadingRank
from smckpt.checkpoint.reading.plan import Planner, plan_logical
from smckpt.checkpoint.upkeep.restorable import parse_geometry, restorable_at
from smckpt.cli.app import app
from smckpt.errors import CheckpointError, CheckpointNotFoundError, UsageError
from smckpt.layout.entries import Entry
from smckpt.layout.geometry import BoxGeometry
from smckpt.layout.mesh import Mesh
from smckpt.layout.strided import Box
from smckpt.storage import open_storage
from smckpt.topology import ParallelState
from tests.checkpoint.test_reshard import saved
from tests.support import synthetic
from tests.support.synthetic import kept, on_mesh

SLICES = {"w": (4, 6), "v": (3,)}
TP2 = ParallelState(4, tensor_parallel_degree=2, rank=0).to_json()


def own(rank: int, key: str) -> bytes:
    return bytes([rank] * {"w": 96, "v": 12, "rng": 4}[key.removeprefix("model.")])


def slices(at: Path, topology: Any = TP2) -> Path:
    """Two tensor-parallel ranks, twice, each with plain slices and a random state of its own."""
    rules = [*(kept(name, shape) for name, shape in SLICES.items()), kept("rng", dtype="int32")]
    made = synthetic.state(rules, {}, own)
    synthetic.save(at, (0, 1, 2, 3), made, step=5, topology=topology)
    return at


def two_meshes(at: Path) -> Path:
    """Two meshes that save under one name, and nothing says whether they hold copies."""
    arrays = synthetic.whole({"w": (4, 6)})
    meshes = [Mesh(("replicate", "shard"), (1, 2), ranks) for ranks in ((0, 1), (2, 3))]

    def of(rank: int) -> Any:
        mesh = meshes[rank // 2]
        return synthetic.state([on_mesh("w", (4, 6), mesh, "R S0")], arrays)(rank)

    synthetic.save(at, (0, 1, 2, 3), of, step=5)
    return at


def loads(at: Path, geometry: str) -> bool:
    """Whether every rank of the job plans every tensor, as a load does."""
    state = parse_geometry(geometry)
    catalogue = open_catalogue(open_storage(str(at)))
    ranks = range(state.world_size)
    try:
        for rank in ranks:
            live = ParallelState.from_json(state.to_json(), rank=rank)
            me = LoadingRank.of(catalogue, rank, ranks, live=live)
            for one in Planner(me).tensors():
                path, dtype, shape = one.path, one.dtype, one.shape
                rule = BoxGeometry(str(path[-1]), shape, (Box.whole(shape),), (rank,))
                entry = Entry(path, dtype, rule, path[:-1], (), (rank,))
                plan_logical(me, [entry])
    except CheckpointError:
        return False
    return True


MADE = {
    "hsdp": lambda at: saved(at, "hsdp"), "fsdp+tp": lambda at: saved(at, "fsdp+tp"),
    "flat": lambda at: saved(at, "flat"), "slices": slices,
    "unknown": lambda at: slices(at, None), "two": two_meshes,
}  # fmt: skip


def without_data(at: Path) -> None:
    """Overwrite all data, headers too: what is said must not come from there."""
    for file in at.rglob("data-*"):
        file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize("geometry", ["shard=1", "shard=3", "tp=2,shard=2", "tp=4", "world=8,tp=2"])
@pytest.mark.parametrize("how", MADE)
def test_the_answer_is_what_the_load_does(tmp_path, how, geometry):
    at = MADE[how](tmp_path / "source")
    does = loads(at, geometry)
    without_data(at)
    found = restorable_at(at, parse_geometry(geometry))
    assert found.loads == does, found
    assert bool(found.obstacles) == (not does)
    if how in ("hsdp", "fsdp+tp", "flat"):
        assert does


def test_an_obstacle_names_the_tensors_and_the_degrees(tmp_path):
    found = restorable_at(slices(tmp_path / "a"), parse_geometry("tp=4"))
    (one,) = found.obstacles
    assert (
        sorted(one.names) == ["model.v", "model.w"]
        and "tp 2, ep 1, pp 1" in one.what
        and "tp 4" in one.what
    )
    assert (found.ranks, found.world_size, found.step) == (4, 4, 5)


def test_state_of_single_ranks_is_named_with_the_rule_that_it_follows(tmp_path, capsys):
    at = saved(tmp_path / "a", "hsdp")
    found = restorable_at(at, parse_geometry("shard=3"))
    assert found.loads and found.per_rank == ("model.rng", "rank") and not found.same_ranks
    assert restorable_at(at, parse_geometry("shard=4")).same_ranks
    with pytest.raises(SystemExit) as ended:
        app(["verify", str(at), "--restorable-at", "shard=3"], standalone_mode=False)
    said = capsys.readouterr().out
    assert ended.value.code == 0 and "saved rank i mod 4: model.rng, rank" in said
    assert "loads on 3 ranks (shard=3): step 40 of 4 ranks" in said


def test_a_missing_group_and_a_missing_file_are_named(tmp_path, capsys):
    at = saved(tmp_path / "a", "hsdp")
    (one,) = restorable_at(at / "part0", parse_geometry("shard=2")).obstacles
    assert "one group of a step, with ranks 0, 2" in one.what and one.remedy.endswith(f"{at}")
    shutil.copytree(at, tmp_path / "b")
    next((tmp_path / "b" / "part1").glob("data-*")).unlink()
    with pytest.raises(SystemExit) as ended:
        app(
            ["verify", str(tmp_path / "b"), "--restorable-at", "shard=2", "--json"],
            standalone_mode=False,
        )
    told = json.loads(capsys.readouterr().out)
    assert ended.value.code == 1 and not told["loads"]
    assert (
        "part1/data-" in told["obstacles"][0]["what"] and "repair" in told["obstacles"][0]["remedy"]
    )
    shutil.rmtree(tmp_path / "b" / "part1")
    assert not restorable_at(tmp_path / "b", parse_geometry("shard=2")).loads


def test_above_steps_the_newest_is_judged(tmp_path):
    slices(tmp_path / "run" / "5")
    assert restorable_at(tmp_path / "run", parse_geometry("tp=2,shard=2")).url.endswith("run/5")
    with pytest.raises(CheckpointNotFoundError):
        restorable_at(tmp_path / "none", parse_geometry("shard=2"))


@pytest.mark.parametrize("text", ["", "tp", "tp=0", "tp=2,tp=2", "zp=2", "tp=3,world=4", "tp=x"])
def test_degrees_that_make_no_sense_are_refused(text):
    with pytest.raises(UsageError, match="geometry|degrees"):
        parse_geometry(text)


def test_degrees_make_the_world():
    state = parse_geometry("tp=2,shard=64")
    assert (state.world_size, state.tp_size, state.shard_degree) == (128, 2, 64)
    assert parse_geometry("world=8,tp=2").shard_degree == 4
    assert parse_geometry("shard=4, replicas=2").replication_degree == 2
    assert parse_geometry("tp=2").shard_degree == 1
