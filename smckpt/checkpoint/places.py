"""Which saved ranks stand where a live one does: tensor- and expert-parallel ranks and pipeline
stages save plain tensors of their own under the same names, and only the topology tells them apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from smckpt.checkpoint.catalogue import Catalogue
from smckpt.checkpoint.rows import Row
from smckpt.errors import TopologyError
from smckpt.topology import ParallelState

__all__ = ["ANYWHERE", "Places"]


@dataclass(frozen=True)
class Places:
    """What is known of the ranks of a checkpoint, seen from one live rank.

    alike: the saved ranks at its tensor-, expert- and pipeline-parallel coordinates; None where
        nothing tells, or nothing needs to.
    unknown: why it cannot be told which of several saved ranks it follows.
    """

    alike: frozenset[int] | None = None
    unknown: str = ""

    @classmethod
    def of(cls, catalogue: Catalogue, live: Any, rank: int, world_size: int) -> Places:
        """
        Args:
            live: the `ParallelState` of the load, if one was given.
            world_size: of the job that loads.
        """
        if catalogue.topology is None:
            return cls()
        saved = ParallelState.from_json(catalogue.topology)
        place = {r: _place(saved, r) for r in catalogue.parts}
        meshes = catalogue.pieces.joined
        if any(len({place[r] for r in mesh if r in place}) > 1 for mesh in meshes):
            return cls()  # tensors are distributed over such ranks: plain ones are copies
        degrees = _degrees(saved)
        if live is not None and _degrees(live) == degrees:
            own = _place(live, rank)
            return cls(frozenset(r for r in place if place[r] == own))
        if degrees == _degrees(ParallelState(1)):
            return cls()
        said = "parallel_state= was not given"
        if live is not None:
            said = f"this job has {_text(_degrees(live))}"
        elif world_size == saved.world_size:
            return cls()  # each rank takes its own
        return cls(unknown=f"the checkpoint has {_text(degrees)}, {said}")

    def of_own(self, ranks: Iterable[int]) -> list[int]:
        """Those of some saved ranks that stand where the live one does; all, where that is open."""
        found = list(ranks)
        return [r for r in found if self.alike is None or r in self.alike] or found

    def refuse_guess(self, row: Row, rank: int, url: str) -> None:
        """
        Raises:
            TopologyError: weights of one saved rank of several would be taken on a guess.
        """
        weights = row.dtype.startswith(("float", "bfloat")) and row.shape
        if self.unknown and weights and row.geometry is None and len(row.ranks) > 1:
            raise TopologyError(
                f"{row.key}: each rank saved a tensor of its own, and whose is meant here cannot "
                f"be told: {self.unknown}",
                remedy="build the model with the degrees of the checkpoint, and pass them as "
                "parallel_state=",
                path=url,
                rank=rank,
            )


ANYWHERE = Places()  # of a checkpoint whose ranks need not be told apart


def _degrees(state: ParallelState) -> tuple[int, int, int]:
    return state.tp_size, state.ep_size, state.pp_size


def _text(degrees: tuple[int, int, int]) -> str:
    return "tp {}, ep {}, pp {}".format(*degrees)


def _place(state: ParallelState, rank: int) -> tuple[int, ...]:
    ranker = state.ranker
    return ranker.get_tp_rank(rank), ranker.get_ep_rank(rank), ranker.get_pp_rank(rank)
