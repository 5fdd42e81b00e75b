"""config.json and the files beside it, with the keys of both transformers 4 and 5.

Version 5 has one dict of rotary parameters, `rope_parameters`. Version 4, and the servers that read
its keys, have `rope_theta`, `rope_scaling` and keys of single families. The tables say what
differs.
"""

from __future__ import annotations

import copy
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from smckpt.checkpoint.records.sealed import read_json
from smckpt.errors import UsageError
from smckpt.formats.names import CONFIG
from smckpt.translate.beside import GENERATION_CONFIG, modules_of_map, with_imported
from smckpt.translate.config_values import refuse_impossible
from smckpt.translate.tables.families import find_family

_TIED = "tie_word_embeddings"
# Generation settings that a model's config may carry and `generate` needs.
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


# Keys that releases have and servers read, and that transformers leaves out because it computes
# nothing else: model_type → key → the value for a config.
_Value = Callable[[Mapping[str, Any]], Any]
_SERVED: Mapping[str, Mapping[str, _Value]] = MappingProxyType(
    {
        "cohere2": {"rotary_pct": lambda values: 1.0},
        "deepseek_v3": {
            "scoring_func": lambda values: "sigmoid",
            "topk_method": lambda values: "noaux_tc",
        },
        "gpt2": {"n_ctx": lambda values: values.get("n_positions")},
        "qwen3_next": {"full_attention_interval": lambda values: _interval(values)},
        "qwen3_vl_moe_text": {"norm_topk_prob": lambda values: True},
    }
)


@dataclass(frozen=True)
class ModelConfig:
    """A model's config as plain values; `directory` where it was read from one. own_generation: the
    model's own generation config, if it is known. code: where the Python files of its class lie,
    and their names."""

    values: dict[str, Any]
    directory: Path | None
    own_generation: dict[str, Any] | None = None
    code: tuple[Path, ...] = ()

    @property
    def ties_embeddings(self) -> bool | None:
        """The value of `tie_word_embeddings`; where it is not set, the family's default. None: the
        family has no table, or no default."""
        for values in (self.values, *_nested(self.values)):
            if _TIED in values:
                return bool(values[_TIED])
        family = find_family(self.values["model_type"])
        default = None if family is None else family.defaults.get(_TIED)
        return None if default is None else bool(default)

    def untied(self) -> ModelConfig:
        """That of a model whose embedding and head are written apart, as `save_pretrained` does.
        Servers leave out the head of a model whose config ties it."""
        values = copy.deepcopy(self.values)
        for own in (values, *_nested(values)):
            if own is values or _TIED in own:
                own[_TIED] = False
        return replace(self, values=values)

    def complete(self, dtype: str | None) -> dict[str, Any]:
        """The config to write: both generations' keys, and `dtype` of the weights that are written.

        Without the older keys, transformers 4 silently uses a theta of 10,000.

        Raises:
            UsageError: the two generations' keys contradict each other.
        """
        out = copy.deepcopy(self.values)
        out.pop("configuration_files", None)  # they are not beside it
        text = out.get("text_config")
        if isinstance(text, dict) and _TIED in out and text.get(_TIED) is None:
            text[_TIED] = out[_TIED]  # servers look there
        for values in (out, *_nested(out)):
            complete_rope(values)
            # Of the keys of Qwen's mixtures, transformers 4 reads one (or takes its default), and
            # transformers 5 writes the other.
            keys = ("num_experts", "num_local_experts")
            found = [values[key] for key in keys if values.get(key) is not None]
            for key in keys if found else ():
                agree(values, key, found[0])
            for key, value in _SERVED.get(str(values.get("model_type")), {}).items():
                made = value(values)
                if values.get(key) is None and made is not None:
                    values[key] = made
            if dtype is not None and (
                values is out or "dtype" in values or "torch_dtype" in values
            ):
                values["dtype"] = values["torch_dtype"] = dtype
        return out

    def generation(self) -> dict[str, Any] | None:
        """The model's own, or a generation_config.json with the config's token ids; None if it has
        none."""
        if self.own_generation is not None:
            return self.own_generation
        ids = {key: self.values[key] for key in _TOKEN_IDS if self.values.get(key) is not None}
        return {"_from_model_config": True, **ids} if ids else None


def read_config(source: Any) -> ModelConfig | None:
    """A config from a directory, a JSON file, a dict, an object with `to_dict`, or a model, which
    has a generation config too.

    Raises:
        UsageError: it is none of these, is not a JSON object, or does not name its `model_type`.
    """
    if source is None:
        return None
    directory: Path | None = None
    where: str | None = None
    generation: dict[str, Any] | None = None
    while hasattr(source, "state_dict"):  # a model, in its wrappers
        if hasattr(source, "config"):
            generation = read_generation(getattr(source, "generation_config", None))
            source = source.config
        else:
            source = getattr(source, "module", None)
    if isinstance(source, (str, os.PathLike)):
        path = Path(os.fspath(source))
        if path.is_dir():
            directory, path = path, path / CONFIG
        where = str(path)
        values = _read_json(path, given=directory is None)
    elif isinstance(source, dict):
        values = copy.deepcopy(source)
    elif hasattr(source, "to_dict"):
        values = source.to_dict()
    elif hasattr(source, "to_json_string"):
        values = json.loads(source.to_json_string())
    else:
        raise UsageError(
            f"config= is a {type(source).__name__}",
            remedy="pass a directory, a JSON file, a dict, or a transformers config",
        )
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not kind or not isinstance(kind, str):
        raise UsageError(
            "the config has no model_type, so from_pretrained could not tell the model",
            remedy="pass the model's own config (model.config)",
            path=where,
        )
    named = values.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise UsageError(
            f"the config has architectures={named!r}, which is not a list of names",
            remedy="pass the model's own config (model.config)",
            path=where,
        )
    _check_json(values, where)
    refuse_impossible(values, where)
    versions = None if directory is None else values.get("configuration_files")
    for name in versions if isinstance(versions, list) else ():
        if directory and name != CONFIG and isinstance(name, str) and (directory / name).is_file():
            raise UsageError(
                f"it leads to {name}, which transformers reads in its place from a version on "
                "(configuration_files)",
                remedy="pass config= the file that is meant", path=where,
            )  # fmt: skip
    return ModelConfig(values, directory, generation, code_of_class(source, values))


def read_generation(source: Any) -> dict[str, Any] | None:
    """A generation config from a directory, a JSON file, a dict, or transformers' object, which is
    written as its `save_pretrained` does: without the defaults.

    Raises:
        UsageError: it is none of these.
    """
    if source is None:
        return None
    where = None
    if isinstance(source, (str, os.PathLike)):
        path = Path(os.fspath(source))
        given = not path.is_dir()
        path = path if given else path / GENERATION_CONFIG
        where, source = str(path), _read_json(path, given=given)
    elif hasattr(source, "to_json_string"):
        source = json.loads(source.to_json_string())
    elif hasattr(source, "to_dict"):
        source = source.to_dict()
    if not isinstance(source, dict) or "model_type" in source:
        raise UsageError(
            f"generation_config= is {'a model' if isinstance(source, dict) else 'no generation'} "
            "config",
            remedy="pass model.generation_config, a generation_config.json, or a dict",
            path=where,
        )
    _check_json(source, where)
    return dict(source)


def code_of_class(source: Any, values: Mapping[str, Any]) -> tuple[Path, ...]:
    """The Python files that an object's `auto_map` names, which lie beside the file of its class,
    as transformers has fetched them; () for another object."""
    module = sys.modules.get(type(source).__module__)
    file = getattr(module, "__file__", None)
    if (
        not values.get("auto_map")
        or not file
        or type(source).__module__.startswith("transformers.")
    ):
        return ()
    return tuple(with_imported(Path(file).parent, modules_of_map(values)))


def _read_json(path: Path, given: bool) -> Any:
    try:
        return read_json(path, given=given)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read the config: {error}",
            remedy="pass a directory that has a config.json, or that file",
            path=str(path),
        ) from error


def _check_json(values: dict[str, Any], where: str | None) -> None:
    try:
        json.dumps(values)
    except TypeError as error:
        raise UsageError(
            f"the config has a value that JSON cannot hold: {error}",
            remedy="pass config.to_dict(), or a dict of plain values",
            path=where,
        ) from error


def _nested(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The configs inside a config: `text_config`, `vision_config`, `decoder`, …"""
    return [v for v in values.values() if isinstance(v, dict) and "model_type" in v]


def _interval(values: Mapping[str, Any]) -> int | None:
    """The distance between layers of full attention; None if they do not alternate so."""
    layers = values.get("layer_types") or []
    if not isinstance(layers, list) or "full_attention" not in layers:
        return None
    every = layers.index("full_attention") + 1
    full = [n % every == every - 1 for n in range(len(layers))]
    return every if full == [layer == "full_attention" for layer in layers] else None


_PLAIN = "default"  # the type without scaling, and the others, with the keys that each needs
_TYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        _PLAIN: (),
        **dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",)),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "longrope": ("short_factor", "long_factor"),
        "proportional": (),
    }
)
# what version 4 calls some of them too, in `type`
_OLDER_TYPES: Mapping[str, str] = MappingProxyType({"mrope": _PLAIN, "su": "longrope"})
# The keys that version 4 wants in `rope_scaling`, and no others, by type and family.
_ONLY: Mapping[tuple[str, str], tuple[str, ...]] = MappingProxyType(
    {("longrope", "phi3"): ("type", "short_factor", "long_factor")}
)
_LONGEST = "max_position_embeddings"
_SECTIONS = "mrope_section"  # of three axes; version 4 calls such a type mrope
# Families of whose layers each type has parameters of its own in version 5: version 4's key of the
# base of sliding layers, and its default, or None: the base of the others.
_BY_LAYER: Mapping[str, tuple[str | None, float | None]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("gemma3", "gemma3_text", "gemma3n", "gemma3n_text"), ("rope_local_base_freq", 1e4)
        ),
        "olmo3": (None, None),
    }
)
_LOCAL = "rope_local_base_freq"
# Families with other names for the base and the rotary part of a head.
_NAMED: Mapping[str, tuple[str, str]] = MappingProxyType(
    dict.fromkeys(("gpt_neox", "gpt_neox_japanese"), ("rotary_emb_base", "rotary_pct"))
)
_ORIGINAL = "original_max_position_embeddings"


def complete_rope(values: dict[str, Any]) -> None:
    """Set both versions' keys.

    Raises:
        UsageError: they contradict each other, or are of no known type, or lack what it needs.
    """
    new = values.get("rope_parameters")
    _refuse_unknown(values, values.get("rope_scaling"), new)
    if isinstance(new, dict) and new:
        if any(isinstance(v, dict) for v in new.values()):
            # as in Gemma 3: one set of parameters for each type of attention layer
            full, sliding = new.get("full_attention"), new.get("sliding_attention")
            if isinstance(full, dict):
                _older_keys(values, full)
            if isinstance(sliding, dict) and "rope_theta" in sliding:
                agree(values, _LOCAL, sliding["rope_theta"])
        else:
            _older_keys(values, new)
        return
    if "rope_theta" not in values and "rotary_emb_base" not in values:
        return
    kind = _kind(values)
    new = _newer(kind, values.get("rope_scaling") or {})
    new["rope_theta"] = values.get("rope_theta", values.get("rotary_emb_base"))
    part = values.get("partial_rotary_factor", values.get("rotary_pct"))
    if part is not None:
        new["partial_rotary_factor"] = part
    if _LOCAL in values or kind in _BY_LAYER:
        key, default = _BY_LAYER.get(kind, (_LOCAL, None))
        new = {"full_attention": new}  # layers of the other type are never scaled
        theta = values.get(_LOCAL, values["rope_theta"] if key is None else default)
        if theta is not None:
            new["sliding_attention"] = {"rope_type": _PLAIN, "rope_theta": theta}
    values["rope_parameters"] = new
    # servers that read the older keys look for one name or the other
    if isinstance(values.get("rope_scaling"), dict) and _LOCAL not in values:
        flat = new.get("full_attention", new)
        values["rope_scaling"] = _scaling(kind, flat)


def _refuse_unknown(values: Mapping[str, Any], *found: Any) -> None:
    kind, sets = _kind(values), [rope for rope in found if rope is not None]
    known = find_family(kind) is not None and not values.get("auto_map")
    sets += [v for rope in sets if isinstance(rope, dict) for v in rope.values() if type(v) is dict]
    for rope in sets:
        newer = _newer(kind, rope) if isinstance(rope, dict) else {"rope_type": rope}
        needs = _TYPES.get(str(named := newer["rope_type"]), ("a known type",))
        lost = [key for key in needs if key not in newer]
        if not isinstance(rope, dict) or (known and lost):
            raise UsageError(
                f"the config has rotary parameters of the type {named!r}, without "
                f"{', '.join(lost) or 'a name'}",
                remedy="pass the model's own config (model.config)",
            )
        types = {_newer(kind, {"type": rope[k]})["rope_type"] for k in _TYPED if rope.get(k)}
        if len(types - {_PLAIN}) > 1:  # servers read one, transformers the other
            raise UsageError(
                f"the config has rotary parameters of two types, {' and '.join(sorted(types))}",
                remedy="give type and rope_type one value, or leave one of them out",
            )


_TYPED = ("type", "rope_type")


def _kind(values: Mapping[str, Any]) -> str:
    return str(values.get("model_type", ""))


def _newer(kind: str, scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Version 4's `rope_scaling` with the type under version 5's key and name alone."""
    named = str(scaling.get("rope_type", scaling.get("type", _PLAIN)))
    newer = _OLDER_TYPES.get(named, named)
    if kind == "phi3" and named == "yarn":  # as the first releases call it
        newer = "longrope"
    return {**{key: v for key, v in scaling.items() if key != "type"}, "rope_type": newer}


def _older_keys(values: dict[str, Any], new: Mapping[str, Any]) -> None:
    base, part = _NAMED.get(_kind(values), (None, None))
    for key, name in (("rope_theta", base), ("partial_rotary_factor", part)):
        if key in new:
            agree(values, key, new[key])
            if name is not None:
                agree(values, name, new[key])
    scaling = _scaling(_kind(values), new)
    there = values.get("rope_scaling")
    if isinstance(there, dict) and there:
        older, newer = _newer(_kind(values), there), _newer(_kind(values), new)
        for key in sorted(older.keys() & newer.keys()):
            agree({f"{key} in rope_scaling": older[key]}, f"{key} in rope_scaling", newer[key])
    if not isinstance(there, dict) or "type" not in there:
        values["rope_scaling"] = scaling
    if scaling is not None and new.get("rope_type") == "longrope" and _ORIGINAL in new:
        values.setdefault(_ORIGINAL, new[_ORIGINAL])
    if ("longrope", _kind(values)) in _ONLY and new.get("rope_type") == "longrope":
        _refuse_other_attention(values, new)


def _refuse_other_attention(values: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse what version 4 has no key for. Beside its keys, version 5 leaves it out too."""
    original: Any = new.get(_ORIGINAL, values.get(_ORIGINAL))
    most: Any = values.get(_LONGEST)
    each = (original, most, new.get("factor") or 1, new.get("attention_factor") or 1)
    if not all(type(n) in (int, float) and 0 < n < 1e15 for n in each) or original <= 1:
        return  # there is nothing to compute with

    def attention(factor: float) -> float:
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))

    meant = new.get("attention_factor") or attention(new.get("factor") or most / original)
    if not math.isclose(meant, attention(most / original), rel_tol=1e-3):
        key = "attention_factor" if new.get("attention_factor") else "factor"
        raise UsageError(
            f"the config says {key}={new[key]} in rope_parameters, which scales attention by "
            f"{meant:g}. transformers 4 and servers have no key for it in {_kind(values)}: they "
            f"scale by {attention(most / original):g}, from {_LONGEST}={most} and "
            f"{_ORIGINAL}={original}",
            remedy="give these two the values that the model was trained with, and leave it out",
        )


def _scaling(kind: str, new: Mapping[str, Any]) -> dict[str, Any] | None:
    """Version 4's `rope_scaling`, with the type under both of its keys."""
    found = {k: v for k, v in new.items() if k not in ("rope_theta", "partial_rotary_factor")}
    newer = str(found.get("rope_type", _PLAIN))
    if newer == _PLAIN and not found.keys() - {"rope_type"}:
        return None
    named = "mrope" if _SECTIONS in found and newer == _PLAIN else newer
    made = {**found, "rope_type": newer, "type": named}
    only = _ONLY.get((newer, kind))
    return made if only is None else {key: made[key] for key in only if key in made}


def agree(values: dict[str, Any], key: str, value: Any) -> None:
    """Set `key`, or refuse if it has another value: the model would compute something else under
    the other version of transformers."""
    if values.get(key, value) not in (value, None):
        raise UsageError(
            f"the config says {key}={values[key]}, but {value} under the name of the other "
            "transformers version",
            remedy="give both the same value, or leave one of them out",
        )
    values[key] = value
