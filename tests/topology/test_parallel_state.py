"""Degrees, rank order and the groups that follow."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from smckpt import ParallelState, TopologyError, UsageError
from smckpt.topology import DEFAULT_ORDER
from tests.support.limits import seconds

KINDS = ("rep", "fsdp", "tp", "cp", "ep", "pp", "dp")


def groups(state: ParallelState, kind: str) -> list[list[int]]:
    return getattr(state.ranker, f"get_{kind}_groups")()


@st.composite
def states(draw: st.DrawFn) -> ParallelState:
    """Any possible topology of at most 512 ranks, in any rank order."""
    size = st.sampled_from([1, 2, 3, 4])
    tp, ep, pp, rep, cp, rest = (draw(size) for _ in range(6))
    world = tp * ep * pp * rep * cp * rest
    assume(world <= 512)
    return ParallelState(
        world,
        tensor_parallel_degree=tp,
        expert_parallel_degree=ep,
        context_parallel_degree=cp,
        pipeline_parallel_degree=pp,
        hybrid_shard_degree=cp * rest,
        order=tuple(draw(st.permutations(DEFAULT_ORDER))),
        rank=draw(st.integers(0, world - 1)),
    )


def test_the_groups_of_sixteen_ranks_with_tp_2_and_shard_degree_4_are_smps():
    state = ParallelState(16, tensor_parallel_degree=2, hybrid_shard_degree=4)
    assert state.ranker.get_rep_groups() == [[low, low + 8] for low in range(8)]
    assert state.ranker.get_fsdp_groups() == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
        [8, 10, 12, 14],
        [9, 11, 13, 15],
    ]
    assert state.ranker.get_tp_groups() == [[low, low + 1] for low in range(0, 16, 2)]
    assert [state.ranker.get_rep_rank(rank) for rank in range(16)] == [0] * 8 + [1] * 8


@given(states())
def test_the_groups_of_every_kind_partition_the_world(state):
    for kind in KINDS:
        found = groups(state, kind)
        assert sorted(itertools.chain(*found)) == list(range(state.world_size))
        assert len({len(group) for group in found}) == 1
        assert [group for group in found if group != sorted(group)] == []
        assert found == sorted(found)


@given(states())
def test_the_sizes_multiply_to_the_world(state):
    model = state.tp_size * state.ep_size * state.pp_size
    assert state.rep_size * state.fsdp_size * model == state.world_size
    assert state.dp_size * state.tp_size * state.cp_size * state.pp_size == state.world_size
    for kind in KINDS:
        assert len(groups(state, kind)[0]) == getattr(state, f"{kind}_size")


@given(states())
def test_a_rank_is_the_index_in_its_own_group(state):
    for kind in KINDS:
        own = getattr(state.ranker, f"get_{kind}_group")(state.rank)
        assert own in groups(state, kind)
        assert own[getattr(state, f"{kind}_rank")] == state.rank


@given(states())
def test_the_ranks_coordinates_tell_all_ranks_apart(state):
    kinds = ("rep", "fsdp", "tp", "ep", "pp")
    places = {
        tuple(getattr(state.ranker, f"get_{kind}_rank")(rank) for kind in kinds)
        for rank in range(state.world_size)
    }
    assert len(places) == state.world_size


@given(states())
def test_context_ranks_lie_in_one_shard_group_and_expert_ranks_in_none(state):
    shard_group = {rank: group[0] for group in groups(state, "fsdp") for rank in group}
    for group in groups(state, "cp"):
        assert len({shard_group[rank] for rank in group}) == 1
    for group in groups(state, "ep"):
        assert len({shard_group[rank] for rank in group}) == len(group)


@given(states())
def test_the_innermost_dimension_of_the_order_has_neighbouring_ranks(state):
    innermost = next(dim for dim in state.order if dim != "fsdp")
    if state.order[0] == innermost:
        for group in groups(state, innermost):
            assert group == list(range(group[0], group[0] + len(group)))


@given(states())
def test_the_manifests_form_is_the_same_on_every_rank_and_comes_back(state):
    data = json.loads(json.dumps(state.to_json()))
    assert ParallelState.from_json(data, rank=state.rank) == state
    assert ParallelState.from_json(data, rank=0).to_json() == data


def test_shard_degree_0_shards_over_all_that_the_other_degrees_leave():
    assert ParallelState(16).shard_degree == 16
    state = ParallelState(16, tensor_parallel_degree=4)
    assert (state.shard_degree, state.rep_size) == (4, 1)
    state = ParallelState(16, tensor_parallel_degree=2, expert_parallel_degree=4)
    assert (state.shard_degree, state.rep_size) == (2, 1)


def test_shard_degree_1_replicates_everything():
    state = ParallelState(8, tensor_parallel_degree=2, hybrid_shard_degree=1)
    assert state.ranker.get_rep_groups() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert state.ranker.get_fsdp_groups() == [[rank] for rank in range(8)]


@pytest.mark.parametrize(
    ("degrees", "arithmetic"),
    [
        (
            {"tensor_parallel_degree": 3, "hybrid_shard_degree": 4},
            "tensor_parallel_degree 3 × hybrid_shard_degree 4 = 12 does not divide world_size 16",
        ),
        ({"tensor_parallel_degree": 3}, "tensor_parallel_degree 3 does not divide world_size 16"),
        ({"hybrid_shard_degree": 32}, "hybrid_shard_degree 32 does not divide world_size 16"),
        (
            {"expert_parallel_degree": 8, "hybrid_shard_degree": 4},
            "expert_parallel_degree 8 × hybrid_shard_degree 4 = 32 does not divide",
        ),
        (
            {"context_parallel_degree": 2, "hybrid_shard_degree": 1},
            "context_parallel_degree 2 does not divide the shard degree 1",
        ),
        ({"rank": 16}, "rank 16 is not in a world of 16"),
    ],
)
def test_impossible_degrees_are_refused_with_the_arithmetic(degrees, arithmetic):
    with pytest.raises(TopologyError) as caught:
        ParallelState(16, **degrees)
    assert arithmetic in str(caught.value)
    assert "What to do" in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"world_size": 0},
        {"world_size": "8"},
        {"world_size": 8, "tensor_parallel_degree": 0},
        {"world_size": 8, "hybrid_shard_degree": -1},
        {"world_size": 8, "tensor_parallel_degree": 2.0},
        {"world_size": 8, "expert_parallel_degree": True},
        {"world_size": 8, "order": 5},
        {"world_size": 8, "order": ("tp", "fsdp")},
        {"world_size": 8, "order": "tp-cp-ep-fsdp-rep-pp"},
    ],
)
def test_what_is_no_degree_or_order_is_refused_by_name(arguments):
    with pytest.raises(UsageError) as caught:
        ParallelState(**arguments)
    assert list(arguments)[-1] in str(caught.value)


def test_a_rank_outside_the_world_has_no_group():
    with pytest.raises(TopologyError, match="rank 8 is not in a world of 8"):
        ParallelState(8).ranker.get_rep_rank(8)


def test_a_state_cannot_be_changed():
    with pytest.raises(AttributeError):
        ParallelState(8).world_size = 16


def test_the_rank_comes_from_torchrun_when_its_world_is_this_one(monkeypatch):
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert ParallelState(8, tensor_parallel_degree=2).tp_rank == 1
    with pytest.raises(UsageError, match="made without a rank"):
        _ = ParallelState(16).tp_rank
    assert ParallelState(8, rank=2).fsdp_rank == 2


def test_any_rank_order_describes_the_same_number_of_groups():
    sizes = {
        math.prod(len(groups(state, kind)) for kind in KINDS)
        for order in itertools.permutations(DEFAULT_ORDER)
        for state in [
            ParallelState(24, tensor_parallel_degree=2, hybrid_shard_degree=4, order=order)
        ]
    }
    assert len(sizes) == 1


def test_topology_needs_no_torch():
    code = (
        "import sys; from smckpt import ParallelState; s = ParallelState(16384, "
        "tensor_parallel_degree=8, hybrid_shard_degree=256); s.ranker.get_rep_groups(); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=seconds(60))
