"""Lightning's checkpoint dict as a state of smckpt, and back.

`state_dict` and `optimizer_states` are saved as "model", "optimizer", "optimizer_1" …, so
`smckpt export`, `diff` and `verify` find them. Everything else (loops, callbacks, schedulers,
hyper-parameters) stands under "lightning": as values if smckpt can store them without code, as
tensors if they are large, and otherwise pickled, which a load reads as far as `weights_only` says.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from smckpt.checkpoint.records.objects import decode_object, encode_object
from smckpt.errors import CorruptCheckpointError, StateError, UsageError

__all__ = ["LIGHTNING_KEYS", "checkpoint_of", "optimizer_key", "rest_of", "state_of"]

_REST, _KINDS = "lightning", "lightning_kinds"
LIGHTNING_KEYS = (_REST, _KINDS)  # of all but model and optimizers
_TYPE = re.compile(r"(?:GLOBAL|global) ([\w.]+) was not")  # in the message of torch.load
_SMALL = 1 << 20  # bytes of tensors that a value may hold; more are saved as tensors


def optimizer_key(index: int) -> str:
    """The key of an optimizer's state."""
    return f"optimizer_{index}" if index else "optimizer"


def state_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The state to save. Tensors are those of `checkpoint`; pickled values are copies.

    Raises:
        StateError: a value cannot even be pickled; names its key.
    """
    rest = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")}
    state: dict[str, Any] = {}
    if "state_dict" in checkpoint:
        state["model"] = checkpoint["state_dict"]
    optimizers = checkpoint.get("optimizer_states")
    for index, each in enumerate(optimizers or ()):
        state[optimizer_key(index)] = each
    stored = {key: _stored(key, value) for key, value in rest.items()}
    state[_REST] = {key: value for key, (_, value) in stored.items()}
    kinds = {key: kind for key, (kind, _) in stored.items()}
    number = None if optimizers is None else len(optimizers)
    state[_KINDS] = {"keys": kinds, "optimizers": number}
    return state


def checkpoint_of(state: Mapping[str, Any], weights_only: bool | None = None) -> dict[str, Any]:
    """The inverse of `state_of`.

    Args:
        weights_only: as in `torch.load`; it concerns what is pickled only. None: True.

    Raises:
        UsageError: something is pickled that needs code, and `weights_only` is not False.
    """
    checkpoint = rest_of(state, weights_only)
    if "model" in state:
        checkpoint["state_dict"] = state["model"]
    number = state[_KINDS]["optimizers"]
    if number is not None:
        checkpoint["optimizer_states"] = [state[optimizer_key(i)] for i in range(number)]
    return checkpoint


def rest_of(state: Mapping[str, Any], weights_only: bool | None = None) -> dict[str, Any]:
    """The checkpoint without model and optimizers."""
    try:
        kinds, values = state[_KINDS]["keys"], state[_REST]
        return {key: _given(key, kinds[key], values[key], weights_only) for key in kinds}
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"what is saved beside model and optimizers cannot be understood: {error!r}",
            remedy="use an older checkpoint, or load it with smckpt.load(checkpoint_id=…)",
        ) from error


def _stored(key: str, value: Any) -> tuple[str, Any]:
    tensors = list(_tensors(value))
    local = [getattr(one, "to_local", lambda one=one: one)() for one in tensors]
    large = sum(one.numel() * one.element_size() for one in local) > _SMALL
    if large or any(type(one) not in (torch.Tensor, torch.nn.Parameter) for one in tensors):
        return "tensors", value
    try:
        encoded = encode_object(value, path=key)
    except StateError:
        made = io.BytesIO()
        try:
            torch.save(value, made)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise StateError(
                f"the checkpoint's {key!r} cannot be pickled: {error}",
                remedy="put only data into it (on_save_checkpoint, save_hyperparameters(ignore=…))",
            ) from error
        return "pickled", made.getvalue()
    return ("text", json.dumps(encoded)) if tensors else ("value", value)


def _given(key: str, kind: str, value: Any, weights_only: bool | None) -> Any:
    if kind == "text":
        return decode_object(json.loads(value))
    if kind != "pickled":
        return value
    strict = weights_only is not False
    try:
        return torch.load(io.BytesIO(value), map_location="cpu", weights_only=strict)
    except pickle.UnpicklingError as error:
        named = _TYPE.search(str(error))
        raise UsageError(
            f"the checkpoint's {key!r} holds objects that only code can make"
            + (f", such as {named[1]}" if named else ""),
            remedy="if you trust the checkpoint, pass weights_only=False, or name the types with "
            "torch.serialization.add_safe_globals",
        ) from error


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for child in value.values():
            yield from _tensors(child)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for child in value:
            yield from _tensors(child)
