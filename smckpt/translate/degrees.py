"""How the ranks of a tensor-parallel model share its layers and its experts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from smckpt.errors import UsageError
from smckpt.translate.arguments import check_counts

__all__ = ["Degrees"]


@dataclass(frozen=True)
class Degrees:
    """Ranks that differ, in Megatron's order: rank r is tensor-parallel rank r % tp of column
    r // tp. For experts it is r % etp of those that cut each one, and r // etp % ep of those that
    share them out: where etp is tp, a column is an expert-parallel rank.

    tp: tensor-parallel degree. ep: expert-parallel degree. etp: Megatron's
    `expert_tensor_parallel_size`. columns: how many times tp ranks.
    """

    tp: int
    ep: int
    etp: int
    columns: int

    @classmethod
    def of(cls, tp: int, ep: int, etp: int | None = None, columns: int | None = None) -> Degrees:
        """With as many columns as it takes for every expert to be there.

        Raises:
            UsageError: a degree is below 1; `columns` are too few, or hold some twice and not all.
        """
        etp = tp if etp is None else etp
        check_counts(tp=tp, ep=ep, etp=etp)
        least = math.lcm(tp, etp * ep)
        columns = least // tp if columns is None else columns
        if tp * columns % least:
            raise UsageError(
                f"tp={tp}, ep={ep} and etp={etp} make up {least} ranks that differ, and "
                f"{tp * columns} are recorded",
                remedy="save with a parallel_state= whose tensor- and expert-parallel degrees, "
                "multiplied, are that many",
            )
        return cls(tp, ep, etp, columns)

    @property
    def ranks(self) -> int:
        return self.tp * self.columns

    @property
    def apart(self) -> bool:
        """Whether experts are cut otherwise than layers."""
        return self.etp != self.tp

    def of_expert(self, tp: int, column: int) -> tuple[int, int]:
        """Which part of which expert-parallel rank's experts a rank has."""
        rank = tp + self.tp * column
        return rank % self.etp, rank // self.etp % self.ep

    def first_of(self, part: int, ep: int) -> tuple[int, int]:
        """The first rank that has it: (tensor-parallel rank, column)."""
        column, tp = divmod(part + self.etp * ep, self.tp)
        return tp, column

    def __str__(self) -> str:
        return f"tp={self.tp}, ep={self.ep}" + (f", etp={self.etp}" if self.apart else "")
