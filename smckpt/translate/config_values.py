"""Values that no config of a family with a table can have: such a model does not load, or computes
NaN, or means another family's class to the servers that go by class."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from smckpt.errors import UsageError
from smckpt.translate.tables.families import built_in_names, find_family

# of transformers 4.57 and 5
_ACTIVATIONS = frozenset({
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python",
    "gelu_python_tanh", "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear",
    "mish", "prelu", "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus",
    "swish", "tanh", "xielu",
})  # fmt: skip
_ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function")
_LAYER_TYPES = frozenset(
    f"{kind}_attention" for kind in ("full", "sliding", "chunked", "linear")
)  # fmt: skip
_ABOVE_ZERO = re.compile(r"rope_theta|rope_local_base_freq|rotary_emb_base|factor")
_NOT_BELOW = re.compile(r"\w*(_eps|_epsilon)")
# of what names and modules are made one by one: the largest models have some 200 and 500; doge's
# experts, of which it has 16,384 and more, are rows of one tensor
_COUNTS = re.compile(r"(\w+_)?layers|n_layer|depth|(\w{0,64}_)?(num|n)_(\w{0,64}_)?experts")
_MOST = 1 << 17
# what a model computes with; infinity has a meaning in other keys
_FINITE = re.compile(
    r"\w*(_eps|_epsilon|theta|base|freq|factor|multiplier|scaling|scale|scalar|capping|limit)"
)
_ENDING = re.compile(r"(For[A-Z].*|LMHeadModel|Model)$")  # of a class, behind the family


def refuse_impossible(config: Mapping[str, Any], where: str | None) -> None:
    """
    Raises:
        UsageError: a value is NaN; or, where the family has a table, one that no such model has.
    """
    known = find_family(str(config["model_type"])) is not None
    own_code = bool(config.get("auto_map"))
    for path, value in _leaves(config, ()):
        if isinstance(value, (int, float)) and value > _MOST and _COUNTS.fullmatch(path[-1]):
            raise _impossible(".".join(path), value, "more than any model has", where)
        if known or value != value:
            problem = _problem(path[-1], value, own_code)
            if problem is not None:
                raise _impossible(".".join(path), value, problem, where)
    if not known or own_code:
        return
    if config.get("hidden_act", "") is None and not config.get("hidden_activation"):
        raise _impossible("hidden_act", None, "which is no activation", where)
    layers = config.get("layer_types")
    if layers is not None and not (
        isinstance(layers, (list, tuple)) and _LAYER_TYPES.issuperset(map(str, layers))
        and len(layers) == config.get("num_hidden_layers", len(layers))
    ):  # fmt: skip
        raise _impossible("layer_types", layers, "not one known type for each layer", where)
    kinds = {_stem(name): name for name in built_in_names()}
    own = _stem(str(config["model_type"]))
    for name in config.get("architectures") or ():
        other = kinds.get(_stem(_ENDING.sub("", name)))
        if other is not None and _stem(other) != own:
            raise _impossible(
                "architectures", name,
                f"the class of {other}, but model_type={config['model_type']!r}: vLLM and "
                "llama.cpp go by the class, transformers by the type", where,
            )  # fmt: skip


def class_of_others(config: Mapping[str, Any]) -> str | None:
    """The class that a config names and that is none of its family's, if it has a table."""
    if find_family(str(config["model_type"])) is None or config.get("auto_map"):
        return None
    own = _stem(str(config["model_type"]))
    names = config.get("architectures") or ()
    return next((name for name in names if _stem(_ENDING.sub("", name)) != own), None)


def _stem(name: str) -> str:
    """What the name of a class and a model_type have in common."""
    return name.replace("_", "").lower().removesuffix("text")


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _leaves(below, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for below in value:
            yield from _leaves(below, path)
    else:
        yield path, value


def _problem(key: str, value: Any, own_code: bool) -> str | None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(value, float) and (
        math.isnan(value) or (math.isinf(value) and _FINITE.fullmatch(key))
    ):
        return "which is no number that a model can compute with"
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return "a text, which counts as true"
    if key in _ACTIVATION_KEYS and value is not None and not own_code:
        return None if value in _ACTIVATIONS else "which is no activation of transformers"
    for pattern, low in ((_ABOVE_ZERO, False), (_NOT_BELOW, True)):
        if value is not None and pattern.fullmatch(key):
            return None if number and (value > 0 or (low and value == 0)) else "not above zero"
    return None


def _impossible(key: str, value: Any, problem: str, where: str | None) -> UsageError:
    return UsageError(
        f"the config has {key}={value!r}, {problem}",
        remedy="pass the model's own config (model.config), or correct it there", path=where,
    )  # fmt: skip
