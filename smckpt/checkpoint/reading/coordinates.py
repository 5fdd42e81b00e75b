"""Find the saved ranks that have a live rank's parallel coordinates. Tensor- and expert-parallel
ranks and pipeline stages save plain tensors of their own under the same names. Only the topology
tells them apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from smckpt.checkpoint.reading.catalogue import Catalogue
from smckpt.errors import TopologyError
from smckpt.layout.entries import Entry
from smckpt.topology import ParallelState

__all__ = ["ANYWHERE", "ParallelCoordinates"]


@dataclass(frozen=True)
class ParallelCoordinates:
    """What one live rank knows about the ranks of a checkpoint.

    alike: the saved ranks at its tensor-, expert- and pipeline-parallel coordinates; None if they
        are not known, or are not needed.
    unknown: if it is not known which of several saved ranks it follows, the reason.
    """

    alike: frozenset[int] | None = None
    unknown: str = ""

    @classmethod
    def of(cls, catalogue: Catalogue, live: Any, rank: int, world_size: int) -> ParallelCoordinates:
        """
        Args:
            live: the `ParallelState` of the load, if one was given.
            world_size: of the job that loads.
        """
        if catalogue.topology is None:
            return cls()
        saved = ParallelState.from_json(catalogue.topology)
        at = {r: _coordinates(saved, r) for r in catalogue.object_ranks}
        meshes = catalogue.pieces.joined
        if any(len({at[r] for r in mesh if r in at}) > 1 for mesh in meshes):
            return cls()  # tensors are distributed over these ranks, so plain tensors are copies
        degrees = _degrees(saved)
        if live is not None and _degrees(live) == degrees:
            own = _coordinates(live, rank)
            return cls(frozenset(r for r in at if at[r] == own))
        if degrees == _degrees(ParallelState(1)):
            return cls()
        said = "but parallel_state= was not given"
        if live is not None:
            said = f"but this job has {_text(_degrees(live))}"
        elif world_size == saved.world_size:
            return cls()  # each rank takes its own
        return cls(unknown=f"the checkpoint has {_text(degrees)}, {said}")

    def of_own(self, ranks: Iterable[int]) -> list[int]:
        """Those of the saved ranks that have the live rank's coordinates; all, if that is not
        known."""
        found = list(ranks)
        return [r for r in found if self.alike is None or r in self.alike] or found

    def refuse_guess(self, row: Entry, rank: int, url: str) -> None:
        """
        Raises:
            TopologyError: it is not known which saved rank's weights to take.
        """
        weights = row.dtype.startswith(("float", "bfloat")) and row.shape
        if self.unknown and weights and row.geometry.per_rank and len(row.ranks) > 1:
            raise TopologyError(
                f"{row.key}: each rank saved a tensor of its own, and it is not known whose "
                f"tensor this rank needs: {self.unknown}",
                remedy="build the model with the degrees of the checkpoint, and pass them as "
                "parallel_state=",
                path=url,
                rank=rank,
            )


ANYWHERE = ParallelCoordinates()  # if all ranks of the checkpoint hold the same


def _degrees(state: ParallelState) -> tuple[int, int, int]:
    return state.tp_size, state.ep_size, state.pp_size


def _text(degrees: tuple[int, int, int]) -> str:
    return "tp {}, ep {}, pp {}".format(*degrees)


def _coordinates(state: ParallelState, rank: int) -> tuple[int, ...]:
    ranker = state.ranker
    return ranker.get_tp_rank(rank), ranker.get_ep_rank(rank), ranker.get_pp_rank(rank)
