"""Histograms of saved tensors, without torch and with bounded memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from smckpt.cli.statistics import Elements, Statistics, Sums, scan_for
from smckpt.errors import CheckpointError

if TYPE_CHECKING:
    from smckpt.checkpoint.reading.committed import CommittedCatalogue

__all__ = ["BINS", "KEPT", "histograms"]

BINS = 32
KEPT = 64 << 20  # bytes of tensors that stay in memory between the two passes


def histograms(first: Statistics) -> dict[str, dict[str, Any]]:
    """Of each tensor that was counted: the statistics, the zeros, and how many of its finite
    elements are in each of `BINS` bins of equal width from min to max; or "error".

    Tensors that `first` has not kept are read a second time.
    """
    found: dict[str, dict[str, Any]] = {}
    sums: dict[str, Sums] = {}
    for name in first.names:
        try:
            one = first.of(name)
        except CheckpointError as error:
            found[name] = {"error": str(error)}
            continue
        assert one is not None
        found[name] = {**one.to_json(), "zeros": one.zeros}
        if one.count:
            sums[name] = one
    again = {name: one for name, one in sums.items() if name not in first.kept}
    bins = _Bins(first.catalogue, again)
    if again:
        scan_for(first.catalogue, bins)
    for name, one in sums.items():
        counts = sum(_counts(values, one) for values in first.kept.get(name, ()))
        if name in bins.faults:
            found[name] = {"error": str(bins.faults[name])}
        else:
            found[name]["counts"] = (bins.counts[name] if name in again else counts).tolist()
    return found


class _Bins(Elements):
    """Counts the elements in each bin."""

    def __init__(self, catalogue: CommittedCatalogue, sums: dict[str, Sums]) -> None:
        super().__init__(catalogue, sums)
        self.counts: dict[str, Any] = dict.fromkeys(sums, 0)
        self._of = sums
        self._lock = threading.Lock()

    def add(self, name: str, at: tuple[str, int], values: Any) -> None:
        counts = _counts(values, self._of[name])
        with self._lock:
            self.counts[name] = self.counts[name] + counts


def _counts(values: Any, sums: Sums) -> Any:
    import numpy as np

    values = values.astype(np.float64)
    # in parts of the width, which do not overflow for float64's whole range
    low, width = sums.least / 2, sums.most / 2 - sums.least / 2
    part = (values[np.isfinite(values)] / 2 - low) / (width or 1.0)
    return np.bincount(np.minimum((part * BINS).astype(np.int64), BINS - 1), minlength=BINS)
