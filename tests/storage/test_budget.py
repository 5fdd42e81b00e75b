"""The request budget: what a job may send, and that its ranks together never send more."""

from __future__ import annotations

import heapq
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smckpt.errors import UsageError
from smckpt.storage.budget import (
    MAX_PARTS,
    PREFIX_LIMITS,
    Share,
    TokenBucket,
    part_size,
    rank_rate,
    save_cost,
)


class Time:
    """A clock that `wait` moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def bucket(rate: float, burst: float = 1.0) -> tuple[TokenBucket, Time]:
    clock = Time()
    return TokenBucket(rate, burst, clock=clock, wait=clock.wait), clock


@given(st.integers(1, 1 << 44), st.integers(5, 512))
def test_parts_are_as_large_as_wanted_and_never_more_than_the_store_takes(size, megabytes):
    wanted = megabytes << 20
    part = part_size(size, wanted)
    assert part >= wanted
    assert -(-size // part) <= MAX_PARTS
    assert part == wanted or size > wanted * MAX_PARTS


@given(st.integers(1, 20_000), st.integers(1, 64))
def test_all_ranks_together_stay_within_the_limit_with_headroom(writers, prefixes):
    rate = rank_rate(3500, writers, prefixes)
    assert rate * writers * 1.15 == pytest.approx(3500 * prefixes)


def test_too_small_parts_and_senseless_rates_are_refused():
    with pytest.raises(UsageError, match="the store's least is 5242880"):
        part_size(1 << 30, 1 << 20)
    with pytest.raises(UsageError, match="0 writers"):
        rank_rate(3500, 0)
    for rate, burst in ((0, 1), (float("nan"), 1), (5, 0.5)):
        with pytest.raises(UsageError, match="a bucket of"):
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
        thread.join(30)
    assert len(waits) == 200
    assert sum(w > 0 for w in waits) > 150


def throttled(ranks: int, requests: int, rate: float, limit: float) -> tuple[int, float]:
    """Refusals and seconds of a store that answers 503 above `limit` a second, as S3 documents it,
    with `requests` from each rank that holds a bucket of `rate`."""
    clocks = [Time() for _ in range(ranks)]
    buckets = [
        TokenBucket(rate, 1, phase=n / ranks, clock=c, wait=c.wait) for n, c in enumerate(clocks)
    ]
    for held in buckets:
        held.take()
    ready = [(clock.now, n) for n, clock in enumerate(clocks)]
    heapq.heapify(ready)
    left = [requests] * ranks
    tokens, at, refused = limit, 0.0, 0
    while ready:
        now, number = heapq.heappop(ready)
        tokens, at = min(limit, tokens + (now - at) * limit), max(at, now)
        clocks[number].now = max(clocks[number].now, now)
        if tokens >= 1:
            tokens -= 1
            left[number] -= 1
        else:
            refused += 1
            buckets[number].slow_down()
        if left[number]:
            buckets[number].take()
            heapq.heappush(ready, (clocks[number].now, number))
    return refused, at


def test_a_store_that_throttles_refuses_nothing_within_the_budget_and_much_beyond_it():
    ranks = 512
    cost = save_cost(ranks * (400 << 20), ranks)
    refused, seconds = throttled(ranks, cost.per_rank, cost.rate, PREFIX_LIMITS.writes)
    assert refused == 0
    assert seconds <= cost.seconds * 1.1
    refused, _ = throttled(ranks, cost.per_rank, cost.rate * 4, PREFIX_LIMITS.writes)
    assert refused > 0


def test_ranks_that_begin_in_one_instant_do_not_come_at_once():
    clocks = [Time() for _ in range(10)]
    for number, clock in enumerate(clocks):
        held = TokenBucket(2, phase=number / 10, clock=clock, wait=clock.wait)
        held.take()
        assert clock.now == pytest.approx(number / 20)
        began = clock.now = clock.now + 100  # nor after a pause
        held.take()
        assert clock.now - began == pytest.approx(number / 20)


def test_a_405b_model_on_16384_ranks_needs_several_prefixes_to_be_quick():
    nbytes = 405_000_000_000 * 14  # bf16 weights, float32 master and two moments
    one = save_cost(nbytes, 16_384, groups=128)
    eight = save_cost(nbytes, 16_384, groups=128, prefixes=8)
    assert one.per_rank == 10  # 346 MB: 6 parts, begin, end, checksums, part record
    assert one.seconds == pytest.approx(53.8, rel=0.01)
    assert eight.seconds == pytest.approx(one.seconds / 8)
