"""A state whose tensors can be taken out and put back; one in nested dicts and lists; and what
programs import from `nvidia_resiliency_ext.checkpointing.utils`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, ValuesView
from itertools import repeat
from typing import Any

import torch

__all__ = [
    "BasicTensorAwareStateDict",
    "TensorAwareStateDict",
    "TensorPlaceholder",
    "debug_msg",
    "debug_time",
    "dict_list_map_inplace",
    "dict_list_map_outplace",
    "diff",
    "nested_values",
    "preload_tensors",
    "wrap_for_async",
]


log = logging.getLogger("smckpt")


@contextlib.contextmanager
def debug_time(
    name: str,
    logger: logging.Logger | None = None,
    threshold: float = float("-inf"),
    level: int | None = None,
) -> Iterator[None]:
    """Log how long the block took, if that is at least `threshold` seconds.

    Args:
        level: None: a warning where there is a threshold, else for debugging.
    """
    began = time.monotonic()
    try:
        yield
    finally:
        took = time.monotonic() - began
        if took >= threshold:
            default = logging.DEBUG if threshold == float("-inf") else logging.WARNING
            (logger or log).log(default if level is None else level, "%s took %.4fs", name, took)


def debug_msg(msg: str) -> None:
    log.debug("%s", msg)


def preload_tensors(state_dict: Any, non_blocking: bool = True) -> Any:
    """A copy in host memory of the tensors in dicts and lists. It is complete when this returns."""

    def copied(value: Any) -> Any:
        return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value

    return dict_list_map_outplace(copied, state_dict)


def wrap_for_async(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself: a spawned worker needs no wrapper."""
    return fn


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """`f` of each value in nested dicts and lists, in new ones."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)


def diff(x1: Any, x2: Any, prefix: tuple[Any, ...] = ()) -> tuple[list[Any], list[Any], list[Any]]:
    """Paths that only one of two nested values has, and paths where they differ, with the types."""
    left: list[Any] = []
    right: list[Any] = []
    differ: list[Any] = []
    both: list[tuple[Any, Any, Any]] = []
    if isinstance(x1, dict) and isinstance(x2, dict):
        left = [(*prefix, key) for key in x1.keys() - x2.keys()]
        right = [(*prefix, key) for key in x2.keys() - x1.keys()]
        both = [(key, x1[key], x2[key]) for key in x1.keys() & x2.keys()]
    elif isinstance(x1, (list, tuple)) and isinstance(x2, (list, tuple)):
        left = [(*prefix, at) for at in range(len(x2), len(x1))]
        right = [(*prefix, at) for at in range(len(x1), len(x2))]
        both = [(at, one, two) for at, (one, two) in enumerate(zip(x1, x2, strict=False))]
    elif not _equal(x1, x2):
        differ = [(prefix, type(x1), type(x2))]
    for key, one, two in both:
        for found, into in zip(diff(one, two, (*prefix, key)), (left, right, differ), strict=True):
            into.extend(found)
    return left, right, differ


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.shape == two.shape and bool(torch.all(one.cpu() == two.cpu()))
    try:
        return bool(one == two)
    except (RuntimeError, ValueError):
        return False


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


def nested_values(x: dict[Any, Any] | list[Any]) -> Iterator[Any]:
    """The values of nested dicts and lists."""
    for value in x.values() if isinstance(x, dict) else x:
        if isinstance(value, (dict, list)):
            yield from nested_values(value)
        else:
            yield value


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """`f` of each value in nested dicts and lists, which it replaces there."""
    if isinstance(x, dict):
        for key, value in x.items():
            x[key] = dict_list_map_inplace(f, value)
        return x
    if isinstance(x, list):
        x[:] = [dict_list_map_inplace(f, value) for value in x]
        return x
    return f(x)


class TensorPlaceholder:
    """Stands for a tensor: its shape, dtype and device."""

    def __init__(self, ten: torch.Tensor) -> None:
        self._device, self._shape, self._dtype = ten.device, ten.shape, ten.dtype

    def init_tensor(self) -> torch.Tensor:
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)


class BasicTensorAwareStateDict(TensorAwareStateDict):
    """
    Args:
        state_dict: nested dicts and lists, with tensors on any device.
    """

    def __init__(self, state_dict: Any) -> None:
        self.state_dict = state_dict
        self._devices = [tensor.device for tensor in self.tensors]
        self._is_hollow = False

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        return (v for v in nested_values(self.state_dict) if isinstance(v, torch.Tensor))

    @property
    def is_hollow(self) -> bool:
        return self._is_hollow

    def pop_tensors(self) -> list[torch.Tensor]:
        assert not self._is_hollow
        tensors = list(self.tensors)
        self._replace(torch.Tensor, TensorPlaceholder)
        self._is_hollow = True
        return tensors

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        assert self._is_hollow
        given = iter(tensor_data)
        self._replace(TensorPlaceholder, lambda _: next(given))
        self._is_hollow = False

    def init_tensors(self) -> None:
        assert self._is_hollow
        self._replace(TensorPlaceholder, TensorPlaceholder.init_tensor)
        self._is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        self._replace(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        # what NVRx itself has saved was on CUDA
        devices = iter(getattr(self, "_devices", None) or repeat("cuda"))
        self._replace(torch.Tensor, lambda t: t.to(next(devices), non_blocking=non_blocking))

    def _replace(self, kind: type[Any], by: Callable[[Any], Any]) -> None:
        def one(value: Any) -> Any:
            return by(value) if isinstance(value, kind) else value

        self.state_dict = dict_list_map_outplace(one, self.state_dict)
