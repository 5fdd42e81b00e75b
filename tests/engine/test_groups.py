"""Which groups make a step."""

from __future__ import annotations

import logging

import pytest

from smckpt.engine.groups import partition_of
from smckpt.engine.load_plan import LoadOptions
from smckpt.errors import UsageError
from smckpt.layout.entries import Entry
from smckpt.layout.geometry import MeshGeometry, PerRankGeometry
from smckpt.layout.mesh import Mesh, Placement
from smckpt.meeting.group import Group
from smckpt.topology import ParallelState


def sharded(mesh: Mesh, *placements: str) -> Entry:
    geometry = MeshGeometry("w", (8, 8), mesh, tuple(map(Placement.parse, placements)))
    return Entry(("model", "w"), "float32", geometry, ("model",), (), mesh.ranks[:1])


HSDP = Mesh(("replicate", "shard"), (2, 2), (0, 1, 2, 3))


def test_the_models_sharding_tells_which_replication_groups_make_a_step() -> None:
    partition = partition_of(Group((1, 3), 3, 4), [sharded(HSDP, "R", "S0")])
    assert partition.groups == ((0, 2), (1, 3))
    assert partition.mine == 1


def test_a_group_of_all_ranks_stands_alone() -> None:
    assert partition_of(Group((0, 1, 2, 3), 2, 4), [sharded(HSDP, "R", "S0")]).alone


def test_a_shard_group_that_holds_every_shard_stands_alone_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert partition_of(Group((0, 1), 0, 4), [sharded(HSDP, "R", "S0")]).alone
    assert not caplog.records


def test_a_group_that_the_sharding_does_not_make_stands_alone_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert partition_of(Group((0,), 0, 4), [sharded(HSDP, "R", "S0")]).alone
    assert "a checkpoint by itself" in caplog.text


def test_a_mesh_that_speaks_of_some_ranks_only_is_said_to(caplog: pytest.LogCaptureFixture) -> None:
    stage = Mesh(("shard",), (2,), (0, 1))
    with caplog.at_level(logging.WARNING):
        partition = partition_of(Group((0,), 0, 4), [sharded(stage, "S0")])
    assert partition.groups == ((0,), (1,))
    assert "2 of 4 ranks" in caplog.text


def test_tensor_and_data_parallel_meshes_cut_together() -> None:
    mesh = Mesh(("replicate", "shard", "tp"), (2, 2, 2), tuple(range(8)))
    partition = partition_of(Group((1, 5), 1, 8), [sharded(mesh, "R", "S0", "S1")])
    assert partition.groups == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_state_without_sharding_stands_alone_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = Entry(("x",), "float32", PerRankGeometry(("x",), (2,), (0,)), (), (), (0,))
    with caplog.at_level(logging.INFO, "smckpt"):
        assert partition_of(Group((0,), 0, 4), [kept]).alone
    assert "a checkpoint by itself" in caplog.text


def test_told_groups_win_over_the_geometry() -> None:
    partition = partition_of(
        Group((2, 3), 2, 4), [sharded(HSDP, "R", "S0")], LoadOptions(groups=[[2, 3], [0, 1]])
    )
    assert partition.groups == ((0, 1), (2, 3))
    assert partition.mine == 1


@pytest.mark.parametrize(
    ("groups", "words"),
    [([[0, 1], [1, 2]], "is in two"), ([[0], [1], [2]], "not among the groups")],
)
def test_groups_that_cannot_be_are_refused(groups: list[list[int]], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        partition_of(Group((0, 1), 0, 4), [], LoadOptions(groups=groups))


def test_groups_and_parallel_state_together_are_refused() -> None:
    with pytest.raises(UsageError, match="both groups= and parallel_state="):
        both = LoadOptions(groups=[[0], [1]], parallel_state=ParallelState(2))
        partition_of(Group((0,), 0, 2), [], both)
