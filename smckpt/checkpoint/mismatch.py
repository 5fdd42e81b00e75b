"""What a plan says when checkpoint and target do not fit: names, shapes, meshes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from smckpt.checkpoint.catalogue import Catalogue
from smckpt.checkpoint.rows import Row
from smckpt.errors import (
    CorruptCheckpointError,
    KeysMismatchError,
    StateError,
    TensorMismatchError,
    TopologyError,
)
from smckpt.layout.entries import Entry
from smckpt.layout.geometry import Box, MeshGeometry, Piece
from smckpt.layout.mesh import Shape

__all__ = [
    "ambiguous",
    "differing_names",
    "other_degree",
    "other_tensor",
    "refuse_misfit",
    "refuse_names",
    "reshard",
    "uncovered",
]

SHOWN = 12  # names in a message
AS_BEFORE = "build the model and optimizer as they were when the state was saved"


def refuse_names(missing: Sequence[str], unexpected: Sequence[str], url: str, rank: int) -> None:
    """
    Raises:
        KeysMismatchError: a name is in only one of checkpoint and target.
    """
    if not missing and not unexpected:
        return
    raise KeysMismatchError(
        differing_names(missing, unexpected),
        remedy="give the target the keys that were saved (an optimizer without state: "
        "init_optim_state), or pass check_keys_matched=False to take what both have",
        path=url,
        rank=rank,
    )


def differing_names(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Which names are in only one of checkpoint and target, in words."""

    def listed(names: Sequence[str]) -> str:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return f"{list(names[:SHOWN])}{more}"

    lacks = [f"the checkpoint lacks {listed(missing)}"] if missing else []
    lacks += [f"the target lacks {listed(unexpected)}"] if unexpected else []
    return "; ".join(lacks)


def refuse_misfit(entry: Entry, rank: int) -> None:
    """
    Raises:
        StateError: the live array is not what its rule says: bytes would go to other places.
    """
    ruled = entry.geometry.local_shape(rank)
    exact = isinstance(entry.geometry, MeshGeometry)
    if ruled == entry.shape or (not exact and math.prod(ruled) == entry.numel):
        return
    raise StateError(
        f"{entry.key!r} has the local shape {list(entry.shape)}, but by its placement rank {rank} "
        f"holds {list(ruled)}",
        remedy="this sharding is not known to smckpt: please report it; sizes that the mesh "
        "divides evenly are safe",
        rank=rank,
    )


def other_tensor(
    name: str, saved: tuple[str, Shape], live: tuple[str, Shape], url: str, rank: int
) -> TensorMismatchError:
    """Each given as (dtype, shape)."""
    return TensorMismatchError(
        f"{name}: saved as {saved[0]} {list(saved[1])}, the target is {live[0]} {list(live[1])}",
        remedy=AS_BEFORE,
        path=url,
        rank=rank,
    )


def uncovered(
    name: str, piece: Piece, left: Sequence[Box], catalogue: Catalogue, rank: int
) -> CorruptCheckpointError:
    if catalogue.whole:
        remedy = "use an older checkpoint"
    else:
        remedy = f"{catalogue.url} is one group of several: load from {catalogue.above}"
    return CorruptCheckpointError(
        f"{name}: {sum(box.numel for box in left)} of the {piece.box.numel} elements that this "
        f"rank needs are not in the checkpoint (first at {list(left[0].offsets)})",
        remedy=remedy,
        path=catalogue.url,
        rank=rank,
    )


def ambiguous(name: str, one: Row, other: Row, url: str, rank: int) -> TopologyError:
    def ranks(row: Row) -> str:
        return str(list(row.geometry.ranks if row.geometry else row.ranks)[:8])

    return TopologyError(
        f"{name} was saved by ranks {ranks(one)} and, apart from them, by ranks {ranks(other)}: "
        "whether these are copies of one tensor or different tensors was not recorded",
        remedy="load each group from its own directory, on the ranks and meshes that saved it; "
        "to reshard, save DTensors or put the replicas in the mesh",
        path=url,
        rank=rank,
    )


def reshard(catalogue: Catalogue) -> str:
    """The remedy where a LOCAL load does not fit."""
    return (
        "take the target under sm_state_dict_type(model, SHARDED) and load it from "
        f"{catalogue.above}: that reshards"
    )


def other_degree(catalogue: Catalogue, rank: int, saved: int, live: int) -> TopologyError:
    return TopologyError(
        f"the checkpoint was saved with shard degree {saved}, the model is sharded by {live}: a "
        "LOCAL load needs the same degree",
        remedy=reshard(catalogue),
        path=catalogue.url,
        rank=rank,
    )
