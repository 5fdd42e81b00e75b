"""`ParallelState.from_device_mesh`, with torch's own meshes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from smckpt import ParallelState, TopologyError, UsageError


def mesh_of(ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh that only describes: no process group behind it."""
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


def test_a_mesh_of_torchs_usual_names_gives_degrees_and_groups():
    mesh = mesh_of(torch.arange(16).view(2, 4, 2), ("dp_replicate", "dp_shard", "tp"))
    state = ParallelState.from_device_mesh(mesh)
    want = ParallelState(16, tensor_parallel_degree=2, hybrid_shard_degree=4)
    assert state == want


def test_names_tell_the_role_of_any_dimension():
    mesh = mesh_of(torch.arange(8).view(4, 2), ("outer", "inner"))
    state = ParallelState.from_device_mesh(mesh, {"rep": "outer", "fsdp": "inner"})
    assert state.ranker.get_fsdp_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert state.rep_size == 4


@pytest.mark.parametrize("outermost_first", [*itertools.permutations(("tp", "rep", "fsdp"))])
def test_the_rank_order_is_read_off_the_mesh(outermost_first):
    sizes = {"tp": 2, "rep": 3, "fsdp": 4}
    names = ("rep", "fsdp", "tp")  # as the mesh lists them, whatever the numbering
    ranks = torch.arange(24).view([sizes[dim] for dim in outermost_first])
    ranks = ranks.permute([outermost_first.index(dim) for dim in names])
    mesh = mesh_of(ranks, names)
    ranker = ParallelState.from_device_mesh(mesh).ranker
    for dim, name in enumerate(names):
        lines = ranks.movedim(dim, -1).reshape(-1, sizes[name]).tolist()
        assert getattr(ranker, f"get_{name}_groups")() == sorted(lines)


def test_the_context_dimension_is_part_of_the_shard_group():
    mesh = mesh_of(torch.arange(8).view(2, 2, 2), ("dp_shard", "cp", "tp"))
    state = ParallelState.from_device_mesh(mesh)
    assert (state.shard_degree, state.cp_size, state.dp_size) == (4, 2, 2)
    assert state.ranker.get_fsdp_groups() == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_dimension_without_a_role_is_refused_by_name():
    mesh = mesh_of(torch.arange(4).view(2, 2), ("tp", "left"))
    with pytest.raises(UsageError, match="'left'"):
        ParallelState.from_device_mesh(mesh)


@pytest.mark.parametrize("names", [{"tq": "tp"}, {"tp": "absent"}])
def test_a_wrong_names_mapping_is_refused(names):
    mesh = mesh_of(torch.arange(4).view(2, 2), ("dp", "tp"))
    with pytest.raises(UsageError, match=r"tq|absent"):
        ParallelState.from_device_mesh(mesh, names)


def test_two_dimensions_with_one_role_are_refused():
    mesh = mesh_of(torch.arange(4).view(2, 2), ("dp", "fsdp"))
    with pytest.raises(UsageError, match="roles"):
        ParallelState.from_device_mesh(mesh)


@pytest.mark.parametrize(
    "ranks", [[[0, 1], [3, 2]], [[0, 3], [1, 2]], [[4, 5], [6, 7]], [[0, 1], [4, 5]]]
)
def test_a_mesh_that_numbers_its_ranks_irregularly_is_refused(ranks):
    with pytest.raises(TopologyError, match="numbers its ranks"):
        ParallelState.from_device_mesh(mesh_of(torch.tensor(ranks), ("fsdp", "tp")))


def _rank_main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    state = ParallelState.from_device_mesh(mesh)
    assert state.rank == rank
    assert (state.rep_rank, state.fsdp_rank) == mesh.get_coordinate()
    assert state.ranker.get_rep_group(rank) == dist.get_process_group_ranks(mesh.get_group(0))
    assert state.ranker.get_fsdp_group(rank) == dist.get_process_group_ranks(mesh.get_group(1))
    with pytest.raises(TopologyError, match="2 of the job's 4 ranks"):
        ParallelState.from_device_mesh(mesh["dp_shard"])
    dist.destroy_process_group()


def test_each_rank_of_a_live_mesh_finds_its_own_groups(tmp_path):
    mp.spawn(_rank_main, (str(tmp_path / "store"),), nprocs=4)
