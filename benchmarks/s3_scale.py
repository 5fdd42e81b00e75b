"""Computes the load of a large job's save on S3: requests, prefixes, seconds and bytes. Nothing is
sent.

    python benchmarks/s3_scale.py [--billions 405] [--ranks 16384] [--prefixes 1 2 4 8 16]

The numbers come from `smckpt.storage.budget`, the code that holds each rank to its rate. Then the
store is simulated: a token bucket for each prefix, which answers 503 above 3,500 writes a second,
as S3 documents, and ranks with one of smckpt's token buckets each. The table shows its refusals,
also for ranks that use four times their budget.
"""

from __future__ import annotations

import argparse
import heapq
from dataclasses import dataclass

from smckpt.storage.budget import PREFIX_WRITES, TokenBucket, part_size, rank_rate

BYTES_PER_PARAMETER = 14  # bf16 weight, float32 master weight and two moments


@dataclass(frozen=True)
class SaveCost:
    """The requests of one save of a whole job.

    requests: writes of all ranks together. per_rank: writes of one rank. rate: requests per second
        of each rank.
    seconds: how long the requests take at that rate, with all ranks at once. The bytes may take
        longer.
    """

    writers: int
    prefixes: int
    nbytes: int
    requests: int
    per_rank: int
    rate: float
    seconds: float


def save_cost(
    nbytes: int,
    writers: int,
    *,
    part: int = 64 << 20,
    prefixes: int = 1,
    groups: int = 1,
) -> SaveCost:
    """Count the requests of one save of `nbytes` bytes that `writers` ranks share evenly.

    Each rank sends its data (one PUT, or the parts of an upload with its begin and end), its
    checksums and its part record; each group its manifest; the job its record and two leases.
    """
    each = -(-nbytes // writers)
    parts = -(-each // part_size(each, part))
    per_rank = (1 if parts <= 1 else parts + 2) + 2
    requests = per_rank * writers + groups + 3
    rate = rank_rate(PREFIX_WRITES, writers, prefixes)
    return SaveCost(writers, prefixes, nbytes, requests, per_rank, rate, per_rank / rate)


class Clock:
    """Simulated time of one rank."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def simulate(ranks: int, requests: int, rate: float, prefixes: int) -> tuple[int, float]:
    """(refusals, seconds) of a save in which each rank sends `requests`, rank r to prefix
    r modulo their number."""
    clocks = [Clock() for _ in range(ranks)]
    buckets = [
        TokenBucket(rate, phase=r / ranks, clock=c, wait=c.wait) for r, c in enumerate(clocks)
    ]
    for bucket in buckets:
        bucket.take()
    limit = PREFIX_WRITES
    tokens, at = [limit] * prefixes, [0.0] * prefixes
    left = [requests] * ranks
    ready = [(clock.now, r) for r, clock in enumerate(clocks)]
    heapq.heapify(ready)
    refused, end = 0, 0.0
    while ready:
        now, r = heapq.heappop(ready)
        p, end = r % prefixes, max(end, now)
        tokens[p], at[p] = min(limit, tokens[p] + (now - at[p]) * limit), now
        if tokens[p] >= 1:
            tokens[p] -= 1
            left[r] -= 1
        else:
            refused += 1
            buckets[r].slow_down()
        if left[r]:
            buckets[r].take()
            heapq.heappush(ready, (clocks[r].now, r))
    return refused, end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--billions", type=float, default=405.0, help="of parameters")
    parser.add_argument("--ranks", type=int, default=16_384)
    parser.add_argument("--groups", type=int, default=128, help="replication groups")
    parser.add_argument("--part", type=int, default=64, help="MiB")
    parser.add_argument("--prefixes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    options = parser.parse_args()
    nbytes = int(options.billions * 1e9) * BYTES_PER_PARAMETER
    print(
        f"{options.billions:g}B parameters, {nbytes / 1e12:.2f} TB on {options.ranks} ranks "
        f"({nbytes / options.ranks / 1e6:.0f} MB each), parts of {options.part} MiB\n"
    )
    head = ("prefixes", "requests", "a rank", "rate/s", "seconds", "refused", "simulated s", "4x")
    print("".join(f"{text:>12}" for text in head))
    for prefixes in options.prefixes:
        cost = save_cost(
            nbytes,
            options.ranks,
            part=options.part << 20,
            prefixes=prefixes,
            groups=options.groups,
        )
        refused, seconds = simulate(options.ranks, cost.per_rank, cost.rate, prefixes)
        greedy, _ = simulate(options.ranks, cost.per_rank, 4 * cost.rate, prefixes)
        row = (
            f"{prefixes}",
            f"{cost.requests}",
            f"{cost.per_rank}",
            f"{cost.rate:.3f}",
            f"{cost.seconds:.1f}",
            f"{refused}",
            f"{seconds:.1f}",
            f"{greedy}",
        )
        print("".join(f"{text:>12}" for text in row))


if __name__ == "__main__":
    main()
