"""What ranks of a checkpoint hold in different versions under one name."""

from __future__ import annotations

from smckpt.checkpoint.reading.catalogue import Catalogue
from smckpt.checkpoint.upkeep.compare import tensors_apart
from smckpt.checkpoint.upkeep.difference import leaves_of, value_difference

__all__ = ["differing_names"]


def differing_names(catalogue: Catalogue) -> list[str]:
    """The names under which ranks have other tensors or values than the lowest rank: random
    generators, data positions, buffers, slices of tensor-parallel ranks. A value that only some
    ranks saved is not among them.

    Raises:
        CorruptCheckpointError: the checkpoint is damaged.
    """
    first, *others = catalogue.object_ranks
    base = leaves_of(catalogue, first)
    found: set[str] = set()
    for rank in others:
        its = leaves_of(catalogue, rank)
        for name in base.keys() & its.keys() - found:
            if value_difference(name, "", base, its) is not None:
                found.add(name)
    return sorted(found | set(tensors_apart(catalogue)))
