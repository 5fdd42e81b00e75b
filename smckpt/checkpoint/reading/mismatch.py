"""The errors of a plan when checkpoint and target do not fit: names, shapes, meshes."""

from __future__ import annotations

from collections.abc import Sequence

from smckpt.checkpoint.reading.catalogue import Catalogue
from smckpt.errors import (
    CorruptCheckpointError,
    KeysMismatchError,
    TensorMismatchError,
    TopologyError,
)
from smckpt.layout.entries import Entry
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Box, Piece

__all__ = [
    "ambiguous",
    "differing_names",
    "other_degree",
    "other_tensor",
    "refuse_names",
    "reshard",
    "uncovered",
]

SHOWN = 12  # how many names a message shows
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
        remedy="give the target the keys that were saved (for an optimizer without state "
        "call init_optim_state), or pass check_keys_matched=False to load only the "
        "names that both have",
        path=url,
        rank=rank,
    )


def differing_names(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """A text for the names that are in only one of checkpoint and target."""

    def listed(names: Sequence[str]) -> str:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return f"{list(names[:SHOWN])}{more}"

    lacks = [f"the checkpoint lacks {listed(missing)}"] if missing else []
    lacks += [f"the target lacks {listed(unexpected)}"] if unexpected else []
    return "; ".join(lacks)


def other_tensor(
    name: str, saved: tuple[str, Shape], live: tuple[str, Shape], url: str, rank: int
) -> TensorMismatchError:
    """The error for a tensor that differs. `saved` and `live` are (dtype, shape)."""
    return TensorMismatchError(
        f"{name}: it was saved as {saved[0]} {list(saved[1])}, but the target is {live[0]} "
        f"{list(live[1])}",
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
        f"{name}: the checkpoint lacks {sum(box.numel for box in left)} of the {piece.box.numel} "
        f"elements that this rank needs (the first at {list(left[0].offsets)})",
        remedy=remedy,
        path=catalogue.url,
        rank=rank,
    )


def ambiguous(name: str, one: Entry, other: Entry, url: str, rank: int) -> TopologyError:
    def ranks(row: Entry) -> str:
        return str(list(row.geometry.ranks)[:8])

    return TopologyError(
        f"{name} was saved by ranks {ranks(one)} and separately by ranks {ranks(other)}: the "
        "checkpoint does not say whether these are copies of one tensor or different tensors",
        remedy="load each group from its own directory, on the ranks and meshes that saved it; "
        "to be able to reshard, save with parallel_state=, save DTensors, or include the replicas "
        "in the mesh",
        path=url,
        rank=rank,
    )


def reshard(catalogue: Catalogue) -> str:
    """The remedy if a LOCAL load does not fit."""
    return (
        "take the target under sm_state_dict_type(model, SHARDED) and load it from "
        f"{catalogue.above}, which reshards"
    )


def other_degree(catalogue: Catalogue, rank: int, saved: int, live: int) -> TopologyError:
    return TopologyError(
        f"the checkpoint was saved with shard degree {saved}, but the model has shard degree "
        f"{live}: a LOCAL load needs the same degree",
        remedy=reshard(catalogue),
        path=catalogue.url,
        rank=rank,
    )
