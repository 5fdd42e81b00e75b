"""How many requests per second each rank may send to an object store, and the token bucket that
enforces it.

S3 answers 3,500 writes and 5,500 reads a second for each partitioned prefix
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html), for any number
of clients, and answers 503 above that. So a job has one budget, which its writers share evenly.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from smckpt.errors import UsageError
from smckpt.storage.urls import join_url, normal_url, parent_url, relative_url

MIN_PART = 5 << 20  # bytes; S3's own limit. It also takes at most 10,000 parts
MAX_PARTS = 10_000


# How many requests per second one prefix answers, and the factor by which a job stays below.
PREFIX_WRITES, PREFIX_READS = 3500.0, 5500.0
HEADROOM = 1.15

_EPISODE = 1.0  # seconds; several 503 within this time count as one
_GROWTH = math.log(1.25)  # the rate grows by a quarter in each second without a 503
_FEW = 16.0  # requests per second; a lower measured rate says little about the store


def rank_rate(limit: float, writers: int, prefixes: int = 1) -> float:
    """The requests per second that each of `writers` ranks may send. The ranks are dealt to
    `prefixes` prefixes in turn; those of one prefix together stay below its limit. The rule is
    NeMo's, concurrency × writers × 1.15 ≤ limit, with the rate instead of the concurrency, because
    a connection may send more than one request per second."""
    if min(writers, prefixes) < 1:
        raise UsageError(f"{writers} writers, {prefixes} prefixes", remedy="pass 1 or more of each")
    return limit / (-(-writers // prefixes) * HEADROOM)


def part_size(size: int, wanted: int) -> int:
    """The size in bytes of each part of an upload of `size` bytes: `wanted`, or more if 10,000
    parts of that size are too few."""
    if wanted < MIN_PART:
        raise UsageError(
            f"parts of {wanted} bytes are below the store's minimum of {MIN_PART}",
            remedy="chunk_size_MB=64 is a good size",
        )
    least = -(-size // MAX_PARTS)
    return wanted if least <= wanted else -(-least >> 20) << 20


@dataclass(frozen=True)
class Share:
    """A process's part of the requests that a store answers: `writes` and `reads` are fractions of
    one prefix's limits, above 1 if the process sends to several prefixes. `phase` (0 to 1) shifts
    its turns, so that many processes do not begin in one instant."""

    writes: float = 1 / HEADROOM
    reads: float = 1 / HEADROOM
    phase: float = 0.0

    def __post_init__(self) -> None:
        if not (min(self.writes, self.reads) > 0 and 0 <= self.phase <= 1):
            raise UsageError(f"{self} of a budget", remedy="give fractions above 0")

    @classmethod
    def of_rank(cls, rank: int, ranks: int, prefixes: int = 1) -> Share:
        """The share of one rank when all ranks send at once, each to one of the prefixes."""
        each = rank_rate(1.0, ranks, prefixes)
        return cls(each, each, rank % ranks / ranks)

    @classmethod
    def of_coordinator(cls, turn: int, groups: int, prefixes: int = 1) -> Share:
        """The share of a group's coordinator, which publishes, reads back and deletes for all its
        ranks. Only coordinators read during a save. They write and delete within the headroom that
        the ranks leave, because the next save may be under way. Their requests go to all prefixes
        in turn."""
        spare = (1 - 1 / HEADROOM) / groups
        return cls(spare, rank_rate(1.0, groups), turn / groups).times(prefixes)

    def times(self, prefixes: int) -> Share:
        """The same share of `prefixes` prefixes that are used in turn."""
        return Share(self.writes * prefixes, self.reads * prefixes, self.phase)


@dataclass(frozen=True)
class Spread:
    """Ranks' files under several stable prefixes. For a checkpoint in `<root>/<rest>/`, rank r's
    files are in `<root>/<prefix of r modulo n>/<rest>/`: S3 splits a bucket by the beginnings of
    busy keys, over tens of minutes. So the prefix comes before every part of the path that changes
    from save to save.

    Args:
        up: how many levels above the checkpoint's directory the prefixes are; no path has more
            than 256.
        prefixes: how many.
    """

    up: Annotated[int, Meta(ge=0, le=256)]
    prefixes: Annotated[int, Meta(ge=2, le=256)]

    def root(self, directory: str) -> str:
        """The location below which all files of a checkpoint in `directory` are."""
        root = normal_url(directory)
        for _ in range(self.up):
            root = parent_url(root)
        return root

    def directories(self, directory: str) -> list[str]:
        """Those of ranks 0, 1, … n - 1. For any n, the first n prefixes are spread evenly over all
        names: 00, 80, 40, c0, 20, …"""
        root = self.root(directory)
        rest = relative_url(directory, root)
        turns = (int(f"{turn:08b}"[::-1], 2) for turn in range(self.prefixes))
        return [join_url(join_url(root, f"{turn:02x}-smckpt"), rest) for turn in turns]

    def fullest(self, ranks: Iterable[int]) -> int:
        """The largest number of `ranks` that have their files in one directory."""
        return max(Counter(rank % self.prefixes for rank in ranks).values(), default=1)


class TokenBucket:
    """Lets `rate` requests per second through, at most `burst` at once. Thread-safe.

    phase: the part of a turn, 0 to 1, by which the first request after idle time is delayed.
        Without it, thousands of ranks that begin in one instant would make a burst of thousands.
        Rank r of n passes r / n.

    A 503 halves the rate for everyone who shares the bucket; if fewer requests were sent recently,
    it halves their rate. After a second without a 503 the rate grows by a quarter each second, so a
    store that has split its partitions is used fully again.
    """

    def __init__(
        self,
        rate: float,
        burst: float = 1.0,
        *,
        phase: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        if not (math.isfinite(rate) and rate > 0 and burst >= 1 and 0 <= phase <= 1):
            raise UsageError(
                f"a token bucket with rate {rate}, burst {burst} and phase {phase} is not possible",
                remedy="rate above 0, burst 1 or more, phase from 0 to 1",
            )
        self.most = rate
        self.taken = 0  # all turns so far
        self._full = burst - phase
        self._clock = clock
        self._wait = wait
        self._lock = threading.Lock()
        self._rate = rate
        self._tokens = self._full
        self._at = clock()
        self._slowed = -math.inf
        self._window, self._sent, self._lately = self._at, 0, 0.0

    @property
    def rate(self) -> float:
        """The present rate in requests per second."""
        with self._lock:
            self._refill()
            return self._rate

    def take(self) -> float:
        """Wait for this request's turn. Returns the seconds waited.

        A turn is given out when it is asked for, and the wait is outside the lock, so callers queue
        fairly.
        """
        with self._lock:
            self._refill()
            self._tokens -= 1
            self._sent += 1
            self.taken += 1
            wait = self._seconds_for(-self._tokens) if self._tokens < 0 else 0.0
        if wait:
            self._wait(wait)
        return wait

    def slow_down(self) -> bool:
        """The store answered 503 to us or to another process of this host. Halves the rate, at most
        once a second. Returns whether this call halved it."""
        with self._lock:
            self._refill()
            if self._at - self._slowed < _EPISODE:
                return False
            # Halving a rate that was never reached would slow nobody down.
            reached = max(self._lately, self._sent, _FEW)
            self._rate = max(min(self._rate, reached) / 2, min(self.most / 64, 1.0))
            self._tokens = min(self._tokens, 0.0)
            self._slowed = self._at
            return True

    def _refill(self) -> None:
        now = self._clock()
        # the tokens that have come, and the rate after them
        passed = max(0.0, now - self._at)
        pause, growing = self._ahead()
        steady = min(passed, pause)
        grown = min(passed - steady, growing)
        rate = self.most if grown == growing else self._rate * math.exp(grown * _GROWTH)
        tokens = self._rate * steady + (rate - self._rate) / _GROWTH
        tokens += self.most * (passed - steady - grown)
        self._rate, self._tokens = rate, min(self._full, self._tokens + tokens)
        if now - self._window >= 1.0:
            self._lately = self._sent / (now - self._window)
            self._window, self._sent = now, 0
        self._at = now

    def _ahead(self) -> tuple[float, float]:
        """Seconds until the rate begins to grow, and for how many seconds it then grows."""
        pause = max(0.0, self._slowed + _EPISODE - self._at)
        return pause, math.log(self.most / self._rate) / _GROWTH

    def _seconds_for(self, tokens: float) -> float:
        """Seconds until so many tokens have come. The growth of the rate is counted: at the
        present, lowered rate a request would still wait long after the store has recovered."""
        pause, growing = self._ahead()
        slow, grown = self._rate * pause, (self.most - self._rate) / _GROWTH
        if tokens <= slow:
            return tokens / self._rate
        if tokens <= slow + grown:
            return pause + math.log1p((tokens - slow) * _GROWTH / self._rate) / _GROWTH
        return pause + growing + (tokens - slow - grown) / self.most
