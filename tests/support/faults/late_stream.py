"""A device without a device: real tensors of the CPU, and a stream whose copies land late.

It stands where the stream of a CUDA device stands (`smckpt.staging.overlap.SideStream`). Nothing is
copied until the stream is waited for. A test says when that may happen, in which order the copies
land, and what happens between two of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from smckpt.staging import digest
from smckpt.staging.overlap import Overlap
from tests.support.limits import seconds

__all__ = ["LateStream", "digests_of"]

Copy = tuple[torch.Tensor, torch.Tensor]


class LateStream:
    """Its copies land once `let` is set.

    Args:
        order: puts the copies into the order in which they land.
        between: called with the number of copies that have landed, before each one and at the end.
    """

    def __init__(
        self,
        order: Callable[[list[Copy]], None] = lambda copies: None,
        between: Callable[[int], None] = lambda landed: None,
    ) -> None:
        self.let = threading.Event()  # copies land once it is set
        self.asked = threading.Event()  # set when an optimizer's step or a load waits for them
        self.waits = 0  # for the whole device
        self._order, self._between = order, between
        self._queued: list[Copy] = []

    def overlap(self) -> Overlap:
        """For all devices, the CPU too."""
        stream = self

        class Asked(Overlap):
            def wait(self) -> None:
                stream.asked.set()
                super().wait()

            def _made_stream(self, device: torch.device) -> LateStream:
                return stream

        return Asked()

    def synchronize(self) -> None:
        self.waits += 1

    @contextmanager
    def entered(self) -> Iterator[None]:
        yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._queued.append((target, source))

    def digests(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.from_numpy(np.array(digests_of(tensors), np.uint64))

    def finish(self) -> None:
        copies, self._queued = self._queued, []
        if not copies:
            return
        assert self.let.wait(seconds(60)), "no test let the copies land"
        self._order(copies)
        for landed, (target, source) in enumerate(copies):
            self._between(landed)
            target.copy_(source)
        self._between(len(copies))


def digests_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """What the kernel computes on a device (`smckpt.staging.digest`), in numpy."""
    found = []
    for tensor in tensors:
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        for start in range(0, len(data), digest.CHUNK):
            chunk = data[start : start + digest.CHUNK]
            words = np.pad(chunk, (0, -len(chunk) % 8)).view("<u8")
            mixed = words + np.arange(1, len(words) + 1, dtype="u8") * np.uint64(_STEPS[0])
            for shift, factor in zip((30, 27), _STEPS[1:], strict=True):
                mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
            found.append(int((mixed ^ (mixed >> np.uint64(31))).sum(dtype="u8")))
    return found


_STEPS = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64's
