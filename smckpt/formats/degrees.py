"""How the ranks of a tensor-parallel model share its layers and its experts.

Arguments of a wrong type are refused by name, before anything is done.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from smckpt.errors import UsageError
from smckpt.storage.urls import path_on_disk


@dataclass(frozen=True)
class Degrees:
    """The ranks with different tensors, in Megatron's order. Rank r is tensor-parallel rank r % tp
    of column r // tp. For experts it is part r % etp of each expert, and expert-parallel rank r //
    etp % ep. If etp equals tp, a column is an expert-parallel rank.

    tp: tensor-parallel degree. ep: expert-parallel degree. etp: Megatron's
    `expert_tensor_parallel_size`. columns: how many times tp ranks.
    """

    tp: int
    ep: int
    etp: int
    columns: int

    @classmethod
    def of(cls, tp: int, ep: int, etp: int | None = None, columns: int | None = None) -> Degrees:
        """Make degrees with as many columns as are needed for all experts.

        Raises:
            UsageError: a degree is below 1, or `columns` is not a multiple of what is needed.
        """
        etp = tp if etp is None else etp
        check_counts(tp=tp, ep=ep, etp=etp)
        least = math.lcm(tp, etp * ep)
        columns = least // tp if columns is None else columns
        if tp * columns % least:
            raise UsageError(
                f"tp={tp}, ep={ep} and etp={etp} need {least} ranks, but {tp * columns} are "
                "recorded",
                remedy="save with SaveOptions(parallel_state=) whose tensor- and expert-parallel "
                "degrees have that product",
            )
        return cls(tp, ep, etp, columns)

    @property
    def ranks(self) -> int:
        return self.tp * self.columns

    @property
    def apart(self) -> bool:
        """Whether experts are cut differently from layers."""
        return self.etp != self.tp

    def of_expert(self, tp: int, column: int) -> tuple[int, int]:
        """The part and the expert-parallel rank whose experts a rank has."""
        rank = tp + self.tp * column
        return rank % self.etp, rank // self.etp % self.ep

    def first_of(self, part: int, ep: int) -> tuple[int, int]:
        """The first rank that has this part: (tensor-parallel rank, column)."""
        column, tp = divmod(part + self.etp * ep, self.tp)
        return tp, column

    def __str__(self) -> str:
        return f"tp={self.tp}, ep={self.ep}" + (f", etp={self.etp}" if self.apart else "")


def check_counts(**given: Any) -> None:
    """Raise UsageError if one of them is not a whole number above 0."""
    for name, value in given.items():
        if not isinstance(value, int) or value is True or value < 1:
            raise UsageError(f"{name}={value!r}", remedy="pass a whole number above 0")


def check_flags(**given: Any) -> None:
    """Raise UsageError if one of them is neither True nor False. The text "no" would count as
    True."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise UsageError(f"{name}={value!r}", remedy="pass True or False")


def check_paths(**given: Any) -> None:
    """Raise UsageError if one of them is not a path."""
    for name, value in given.items():
        if not isinstance(value, (str, os.PathLike)):
            raise UsageError(f"{name}={value!r}", remedy="pass a path or URL")


def refuse_given(when: str, **given: Any) -> None:
    """Raise UsageError if some of the arguments are given, since they have no effect then."""
    names = [f"{name}=" for name, value in given.items() if value is not None]
    if names:
        raise UsageError(f"{', '.join(names)} has no effect {when}", remedy="leave it out")


def refuse_store(**given: Any) -> None:
    """Raise UsageError for a URL of a store where a directory on a disk is read."""
    for name, value in given.items():
        if isinstance(value, str) and value:
            why = f"{name}= is in a store, but is read from a disk only"
            path_on_disk(value, why, "copy the directory to a disk, and pass its path there")
