"""The request budget: what a job may send, and that its ranks together never send more."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.s3_scale import Clock, save_cost, simulate
from smckpt.errors import UsageError
from smckpt.storage.budget import (
    MAX_PARTS,
    PREFIX_WRITES,
    Share,
    TokenBucket,
    part_size,
    rank_rate,
)
from tests.support.limits import seconds as scaled

LARGE = 405_000_000_000 * 14  # bf16 weights, float32 master and two moments


def bucket(rate: float, burst: float = 1.0) -> tuple[TokenBucket, Clock]:
    clock = Clock()
    return TokenBucket(rate, burst, clock=clock, wait=clock.wait), clock


@given(st.integers(1, 1 << 44), st.integers(5, 512))
def test_parts_are_as_large_as_wanted_and_never_more_than_the_store_takes(size, megabytes):
    wanted = megabytes << 20
    part = part_size(size, wanted)
    assert part >= wanted
    assert -(-size // part) <= MAX_PARTS
    assert part == wanted or size > wanted * MAX_PARTS


@given(st.integers(1, 20_000), st.integers(1, 64))
def test_all_ranks_under_a_prefix_together_stay_within_its_limit_with_headroom(writers, prefixes):
    rate = rank_rate(3500, writers, prefixes)
    under_one = [len(range(turn, writers, prefixes)) for turn in range(min(writers, prefixes))]
    assert rate * max(under_one) * 1.15 == pytest.approx(3500)


def test_too_small_parts_and_senseless_rates_are_refused():
    with pytest.raises(UsageError, match="below the store's minimum of 5242880"):
        part_size(1 << 30, 1 << 20)
    with pytest.raises(UsageError, match="0 writers"):
        rank_rate(3500, 0)
    for rate, burst in ((0, 1), (float("nan"), 1), (5, 0.5)):
        with pytest.raises(UsageError, match="a token bucket with"):
            TokenBucket(rate, burst)


def test_a_bucket_lets_its_burst_through_and_then_its_rate():
    held, clock = bucket(10, burst=5)
    for _ in range(5):
        assert held.take() == 0
    for _ in range(100):
        held.take()
    assert clock.now == pytest.approx(10.0)
    clock.now += 100  # an idle bucket fills to its burst, not beyond
    began = clock.now
    for _ in range(15):
        held.take()
    assert clock.now - began == pytest.approx(1.0)


def test_a_503_halves_the_rate_once_a_second_and_it_comes_back_smoothly():
    held, clock = bucket(100)
    for _ in range(300):
        held.take()  # at its full rate
    told = [held.slow_down() for _ in range(8)]  # eight threads hear of one episode
    assert told == [True] + [False] * 7
    assert held.rate == pytest.approx(50, rel=0.02)
    clock.now += 1
    held.slow_down()
    assert held.rate == pytest.approx(25, rel=0.02)
    clock.now += 2  # one of them calm
    assert held.rate == pytest.approx(25 * 1.25, rel=0.02)
    clock.now += 100
    assert held.rate == 100
    for _ in range(100):
        clock.now += 1
        held.slow_down()
    assert held.rate == pytest.approx(1)  # never stuck


def test_turns_given_out_under_503_are_not_waited_for_when_the_store_has_recovered():
    clock, waits = Clock(), list[float]()
    held = TokenBucket(0.2, clock=clock, wait=waits.append)  # a rank of 16,384
    for _ in range(10):  # its neighbours on the host tell it
        held.slow_down()
        clock.now += 1
    for _ in range(8):  # its threads, whose turns are 40 s at its full rate
        held.take()
    assert 40 < waits[-1] < 40 + 25  # and at a sixty-fourth of it 43 minutes
    clock.now += waits[-1]
    held.take()
    assert waits[-1] == pytest.approx(5)  # what was waited for is what came


def test_a_503_slows_a_process_that_is_far_below_its_share():
    held, clock = bucket(3000)
    for _ in range(100):  # twenty a second
        held.take()
        clock.now += 0.05
    held.slow_down()
    assert held.rate == pytest.approx(10, rel=0.1)


def test_the_shares_of_all_ranks_and_coordinators_are_the_whole_budget():
    ranks = [Share.of_rank(rank, 512) for rank in range(512)]
    coordinators = [Share.of_coordinator(turn, 8) for turn in range(8)]
    assert sum(s.writes for s in ranks + coordinators) == pytest.approx(1)
    assert sum(s.reads for s in ranks) == pytest.approx(1 / 1.15)
    assert sum(s.reads for s in coordinators) == pytest.approx(1 / 1.15)
    assert len({s.phase for s in ranks}) == 512
    with pytest.raises(UsageError, match="fractions"):
        Share(writes=0)


def test_threads_that_share_a_bucket_share_its_rate():
    held = TokenBucket(1000, 1)
    waits: list[float] = []

    def run() -> None:
        waits.extend(held.take() for _ in range(25))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(30))
    assert len(waits) == 200
    assert sum(w > 0 for w in waits) > 150


def test_a_store_that_throttles_refuses_nothing_within_the_budget_and_much_beyond_it():
    ranks = 512
    cost = save_cost(ranks * (400 << 20), ranks)
    refused, seconds = simulate(ranks, cost.per_rank, cost.rate, 1)
    assert refused == 0
    assert seconds <= cost.seconds * 1.1
    refused, _ = simulate(ranks, cost.per_rank, cost.rate * 4, 1)
    assert refused > 0


def test_16384_ranks_under_eight_prefixes_need_an_eighth_of_the_time_and_meet_no_503():
    one, eight = (save_cost(LARGE, 16_384, groups=128, prefixes=n) for n in (1, 8))
    share = Share.of_rank(0, 16_384, prefixes=8)  # what a rank of that job is held to
    assert share.writes * PREFIX_WRITES == pytest.approx(eight.rate)
    refused, seconds = simulate(16_384, eight.per_rank, eight.rate, 8)
    assert refused == 0
    assert seconds == pytest.approx(one.seconds / 8, rel=0.01)
    refused, _ = simulate(16_384, eight.per_rank, eight.rate, 4)  # it has not split the others yet
    assert refused > 0


def test_ranks_that_begin_in_one_instant_do_not_come_at_once():
    clocks = [Clock() for _ in range(10)]
    for number, clock in enumerate(clocks):
        held = TokenBucket(2, phase=number / 10, clock=clock, wait=clock.wait)
        held.take()
        assert clock.now == pytest.approx(number / 20)
        began = clock.now = clock.now + 100  # nor after a pause
        held.take()
        assert clock.now - began == pytest.approx(number / 20)


def test_a_405b_model_on_16384_ranks_needs_several_prefixes_to_be_quick():
    one = save_cost(LARGE, 16_384, groups=128)
    eight = save_cost(LARGE, 16_384, groups=128, prefixes=8)
    assert one.per_rank == 10  # 346 MB: 6 parts, begin, end, checksums, part record
    assert one.seconds == pytest.approx(53.8, rel=0.01)
    assert eight.seconds == pytest.approx(one.seconds / 8)
