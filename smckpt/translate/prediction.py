"""Layers that predict further tokens (multi-token prediction). They follow a model's own layers,
and share the embedding and the head with it.

transformers leaves them out of its models. An export or import leaves them out too, or keeps them
if it is asked to (`mtp="keep"`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from smckpt.errors import KeysMismatchError, UsageError
from smckpt.translate.config import ModelConfig
from smckpt.translate.tables.table import Family

PREDICTION_LAYERS = "num_nextn_predict_layers"  # of the config: how many there are
DROP, KEEP = "drop", "keep"
_MTP = re.compile(r"mtp\.(?:layers\.(\d+)\.)?")  # Megatron's names, and Qwen3-Next's
_NAMED_MTP = re.compile(r"(?:^|\.)mtp[._]")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_JOIN = "eh_proj.weight"  # which a layer of the model itself does not have


def check_mtp(mtp: str) -> None:
    if mtp not in (DROP, KEEP):
        raise UsageError(f"mtp={mtp!r}", remedy=f"pass {DROP!r} or {KEEP!r}")


def further_layers(
    names: Iterable[str], family: Family | None, settings: ModelConfig | None
) -> dict[str, int]:
    """The names of tensors of these layers → the layer's number, from 0. Names are released ones or
    a layout's."""
    if family is None or settings is None or not family.predicts:
        return {}
    first = settings.values.get("num_hidden_layers")
    layer = re.compile(rf"{re.escape(family.words['layers'])}\.(\d+)\.(.*)")
    out: dict[str, int] = {}
    numbered: dict[int, list[tuple[str, str]]] = {}
    for name in names:
        if match := _MTP.match(name):
            out[name] = int(match.group(1) or 0)
        elif isinstance(first, int) and (match := layer.match(name)):
            numbered.setdefault(int(match.group(1)) - first, []).append((name, match.group(2)))
    for number, own in numbered.items():
        # a layer too many of the model itself is a fault of the config
        if number >= 0 and any(rest == _JOIN for _, rest in own):
            out |= {name: number for name, _ in own}
    return out


def beyond_model(name: str, settings: ModelConfig | None) -> bool:
    """Whether a released name is of such a layer, also of a family without a table: of `mtp`, or of
    a number that follows the model's own, if the config has such layers."""
    if _NAMED_MTP.search(name) is not None:
        return True
    values = settings.values if settings is not None else {}
    layers, count = values.get("num_hidden_layers"), values.get(PREDICTION_LAYERS)
    number = _LAYER.search(name)
    if number is None or not isinstance(layers, int) or not isinstance(count, int):
        return False
    return layers <= int(number.group(1)) < layers + count


def kept_layers(
    found: Mapping[str, int], family: Family | None, settings: ModelConfig | None, mtp: str | None
) -> int:  # fmt: skip
    """How many of the layers that were found are kept. mtp: DROP, KEEP, or None: those that there
    are.

    Raises:
        UsageError: there are none to keep, or no table of them.
        KeysMismatchError: they are not as many as the config says.
    """
    if mtp == DROP:
        return 0
    if mtp == KEEP and (family is None or not family.predicts):
        what = "this model" if family is None else family.name
        raise UsageError(
            f"mtp={KEEP!r}, but smckpt has no table of layers of {what} that predict further "
            "tokens",
            remedy="leave mtp= out",
        )  # fmt: skip
    count = len(set(found.values()))
    if mtp == KEEP and not count:
        raise UsageError(
            f"mtp={KEEP!r}, but there are no layers that predict further tokens",
            remedy="leave mtp= out",
        )  # fmt: skip
    configured = settings.values.get(PREDICTION_LAYERS) if settings is not None else None
    if count and configured and configured != count:
        raise KeysMismatchError(
            f"there are {count} layers that predict further tokens, but the config says "
            f"{PREDICTION_LAYERS}={configured}",
            remedy="pass all files, and the model's own config, or leave mtp= out",
        )  # fmt: skip
    return count


def left_out_note(found: Mapping[str, int]) -> tuple[str, ...]:
    """What to tell the user of layers that are left out."""
    if not found:
        return ()
    return (
        f"{len(found)} tensors of layers that predict further tokens are left out "
        f"({PREDICTION_LAYERS}; mtp={KEEP!r} keeps them), such as {min(found)}",
    )


def with_prediction_layers(settings: ModelConfig, count: int) -> ModelConfig:
    """The config of a model with so many of them."""
    values: dict[str, Any] = settings.values
    if not count and not values.get(PREDICTION_LAYERS):
        return settings
    return replace(settings, values={**values, PREDICTION_LAYERS: count})
