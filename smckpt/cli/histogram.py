"""Histograms of saved tensors, without torch and with bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from smckpt.checkpoint.numbers import numbers
from smckpt.cli.statistics import Sums, countable, stretches

if TYPE_CHECKING:
    from smckpt.checkpoint.catalogue import Catalogue

__all__ = ["BINS", "histogram"]

BINS = 32
_KEPT = 64 << 20  # bytes of a tensor that stay in memory between the two passes


def histogram(catalogue: Catalogue, name: str) -> dict[str, Any] | None:
    """The statistics of a tensor, its zeros, and how many of its finite elements are in each of
    `BINS` bins of equal width from min to max. A larger tensor than 64 MiB is read twice.

    None for a tensor that `statistics` does not count.

    Raises:
        CorruptCheckpointError: a block does not fit its checksum.
    """
    import numpy as np

    if not countable(catalogue, name):
        return None
    dtype = catalogue.logical[name].dtype
    sums, zeros = Sums(), 0
    again = _twice(lambda: stretches(catalogue, name))
    for data in again():
        values = numbers(data, dtype)
        sums.add(values)
        zeros += int(np.count_nonzero(values == 0))
    facts = {**sums.to_json(), "zeros": zeros}
    if not sums.count:
        return facts
    counts = np.zeros(BINS, np.int64)
    for data in again():
        values = numbers(data, dtype).astype(np.float64)
        # in parts of the width, which do not overflow for float64's whole range
        low, width = sums.least / 2, sums.most / 2 - sums.least / 2
        part = (values[np.isfinite(values)] / 2 - low) / (width or 1.0)
        counts += np.bincount(np.minimum((part * BINS).astype(np.int64), BINS - 1), minlength=BINS)
    return {**facts, "counts": counts.tolist()}


def _twice(read: Callable[[], Iterator[bytearray]]) -> Callable[[], Iterator[bytearray]]:
    """What `read` yields, to go through several times; of a small tensor it is read once."""
    kept: list[bytearray] = []
    whole = False

    def through() -> Iterator[bytearray]:
        nonlocal whole
        if whole:
            yield from kept
            return
        size = 0
        for data in read():
            size += len(data)
            if size <= _KEPT:
                kept.append(data)
            else:
                kept.clear()
            yield data
        whole = size <= _KEPT

    return through
