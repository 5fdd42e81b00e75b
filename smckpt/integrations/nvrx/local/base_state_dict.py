"""A state whose tensors can be taken out and put back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, ValuesView
from typing import Any

import torch

__all__ = ["TensorAwareStateDict"]


class TensorAwareStateDict(ABC):
    """What a checkpoint manager needs of a state. Without its tensors it is *hollow*."""

    @abstractmethod
    def pop_tensors(self) -> Sequence[torch.Tensor]:
        """Take the tensors out. What is needed to make empty ones stays."""

    @property
    @abstractmethod
    def tensors(self) -> Iterable[torch.Tensor]:
        """The tensors, in the order of `pop_tensors`."""

    @property
    @abstractmethod
    def is_hollow(self) -> bool:
        """Whether the tensors are out."""

    @abstractmethod
    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors in, in the order of `pop_tensors`."""

    @abstractmethod
    def init_tensors(self) -> None:
        """Put empty tensors in."""

    @abstractmethod
    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Put copies in host memory in the place of the tensors."""

    @abstractmethod
    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Put the tensors back on their devices."""

    def values(self) -> ValuesView[Any]:
        return vars(self).values()
