"""The full state of a tensor-parallel model: what the caller wants, and what cannot be given.

The state itself is made by the translator, a room above, which registers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from smckpt.errors import KeysMismatchError, TensorMismatchError, UsageError
from smckpt.full.wire import arrays_of
from smckpt.meeting.round import over_group
from smckpt.registry import TRANSLATORS
from smckpt.state_dict.views import ModelView
from smckpt.topology import ParallelState

if TYPE_CHECKING:
    from smckpt.translate.tables.table import TensorLayout


T = TypeVar("T")
Brought: TypeAlias = Callable[[], dict[int, T]]


@dataclass(frozen=True)
class FullWishes:
    """The form of a full state, and the arguments of a translation."""

    rank0_only: bool = True
    offload_to_cpu: bool = False
    translate: bool = True
    parallel_state: ParallelState | None = None
    layout: str | TensorLayout | None = None
    config: Any = None
    padded_vocab_size: int | None = None
    equal_ranks: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that must be equal on all ranks; the config is rank 0's."""
        state = None if self.parallel_state is None else self.parallel_state.to_json()
        return {
            "translate_on_save": self.translate, "parallel_state": state, "layout": self.layout,
            "padded_vocab_size": self.padded_vocab_size, "allow_equal_ranks": self.equal_ranks,
        }  # fmt: skip


def is_transformed(view: ModelView, wishes: FullWishes) -> bool:
    """Whether the model's names or the caller's arguments say that it is tensor-parallel. No
    communication."""
    state = wishes.parallel_state
    parallel = state is not None and state.tp_size * state.ep_size > 1
    asked = wishes.layout is not None or wishes.padded_vocab_size is not None
    return parallel or asked or TRANSLATORS["hugging_face"].recognises(view.parameters())


def full_state(view: ModelView, wishes: FullWishes) -> dict[str, Any] | None:
    """The whole model on rank 0 or on all ranks; {} on ranks that get nothing. None if torch's own
    gathering suffices, because nothing is translated and no rank is tensor-parallel. Every rank of
    the job takes part.

    Raises:
        UsageError, KeysMismatchError: there is no config; names fit no layout, or several; ranks
            pass different arguments.
        TopologyError: the ranks' coordinates are not known, or degrees do not fit.
        TensorMismatchError: shapes do not fit; copies, or tied tensors, differ.
    """
    return TRANSLATORS["hugging_face"].full_state(view, wishes)


def by_rank(messages: Mapping[int, T]) -> list[T]:
    return [messages[rank] for rank in sorted(messages)]


def refuse_others(arguments: Sequence[Mapping[str, Any]]) -> None:
    """Refuse arguments that differ between ranks."""
    for rank, own in enumerate(arguments):
        for name, value in own.items():
            if value != arguments[0][name]:
                raise UsageError(
                    f"{name}={_shown(value)} on rank {rank}, and {_shown(arguments[0][name])} on "
                    "rank 0",
                    remedy="pass the same on all ranks",
                    rank=rank,
                )


def _shown(value: Any) -> Any:
    name = getattr(value, "name", None)
    return repr(value) if name is None else f"the layout {name}"


def check_full_load(view: ModelView, given: Mapping[str, Any], wishes: FullWishes) -> None:
    """Check that torch can distribute a full state, which rank 0 holds, over this model.

    Raises:
        KeysMismatchError, TensorMismatchError: it has other names, or joins all tensor-parallel
            ranks where each has tensors of its own; on every rank.
        UsageError: ranks pass different arguments.
    """

    def decide(brought: Brought[dict[str, Any]]) -> None:
        refuse_others(by_rank(brought()))
        own = arrays_of(view)
        tensors = {name: v for name, v in given.items() if isinstance(v, torch.Tensor)}
        other = sorted(tensors.keys() - own.keys())
        if other:
            raise KeysMismatchError(
                f"the model has no {other[:8]}: this full state was translated, or is of another "
                "model",
                remedy="take it with translate_on_save=False; to start from Hugging Face's files "
                "use import_hf",
            )
        for name, value in tensors.items():
            shape = own[name].metadata.shape
            if tuple(value.shape) != shape:
                raise TensorMismatchError(
                    f"{name} is {list(value.shape)} in the full state, and {list(shape)} on a rank",
                    remedy="tensor-parallel ranks that hold plain tensors load LOCAL checkpoints",
                )

    over_group().round("full load", lambda: wishes.arguments, decide)


def check_full_optimizer(view: ModelView, state: ParallelState | None) -> None:
    """Raise UsageError, on every rank, where tensor-parallel ranks hold plain tensors: FSDP's own
    gathering would give one rank's part of the optimizer as the whole."""
    if state is None or state.tp_size * state.ep_size == 1:
        return
    ranker = state.ranker
    for name, array in arrays_of(view).items():
        coordinates = {(ranker.get_tp_rank(r), ranker.get_ep_rank(r)) for r in array.metadata.ranks}
        if len(array.metadata.shape) > 1 and len(coordinates) == 1:
            raise UsageError(
                f"smckpt does not gather optimizer state over tensor-parallel ranks, and each has "
                f"its own tensor {name}",
                remedy="save the optimizer LOCAL or SHARDED",
            )
