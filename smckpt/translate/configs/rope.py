"""Rotary parameters in the keys of both transformers 4 and 5.

Version 5 has one dict, `rope_parameters`. Version 4, and the servers that read its keys, have
`rope_theta`, `rope_scaling` and keys of single families. The tables say what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from smckpt.errors import UsageError

__all__ = ["agree", "complete_rope"]


@dataclass(frozen=True)
class _Older:
    """How version 4 has a type. names: what it may be called in `type` there, the one to write
    first. plain: without scaling."""

    names: tuple[str, ...]
    plain: bool = False


# by version 5's name
_TYPES: Mapping[str, _Older] = MappingProxyType(
    {
        "default": _Older(("default", "mrope"), plain=True),
        "linear": _Older(("linear",)),
        "dynamic": _Older(("dynamic",)),
        "yarn": _Older(("yarn",)),
        "llama3": _Older(("llama3",)),
        "longrope": _Older(("longrope", "su")),
        "proportional": _Older(("proportional",)),
    }
)
# The keys that version 4 wants in `rope_scaling`, and no others, by type and family.
_ONLY: Mapping[tuple[str, str], tuple[str, ...]] = MappingProxyType(
    {("longrope", "phi3"): ("type", "short_factor", "long_factor")}
)
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
        UsageError: they contradict each other.
    """
    new = values.get("rope_parameters")
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
    scaling = values.get("rope_scaling") or {}
    named = str(scaling.get("rope_type", scaling.get("type", "default")))
    newer = next((name for name, older in _TYPES.items() if named in older.names), named)
    if kind == "phi3" and named == "yarn":  # as the first releases call it
        newer = "longrope"
    new = {**scaling, "rope_type": newer}
    new.pop("type", None)
    new["rope_theta"] = values.get("rope_theta", values.get("rotary_emb_base"))
    part = values.get("partial_rotary_factor", values.get("rotary_pct"))
    if part is not None:
        new["partial_rotary_factor"] = part
    if _LOCAL in values or kind in _BY_LAYER:
        key, default = _BY_LAYER.get(kind, (_LOCAL, None))
        new = {"full_attention": new}  # layers of the other type are never scaled
        theta = values.get(_LOCAL, values["rope_theta"] if key is None else default)
        if theta is not None:
            new["sliding_attention"] = {"rope_type": "default", "rope_theta": theta}
    values["rope_parameters"] = new
    # servers that read the older keys look for one name or the other
    if isinstance(values.get("rope_scaling"), dict) and _LOCAL not in values:
        flat = new.get("full_attention", new)
        values["rope_scaling"] = _scaling(kind, flat)


def _kind(values: Mapping[str, Any]) -> str:
    return str(values.get("model_type", ""))


def _older_keys(values: dict[str, Any], new: Mapping[str, Any]) -> None:
    base, part = _NAMED.get(_kind(values), (None, None))
    for key, name in (("rope_theta", base), ("partial_rotary_factor", part)):
        if key in new:
            agree(values, key, new[key])
            if name is not None:
                agree(values, name, new[key])
    scaling = _scaling(_kind(values), new)
    there = values.get("rope_scaling")
    if not isinstance(there, dict) or "type" not in there:
        values["rope_scaling"] = scaling
    if scaling is not None and new.get("rope_type") == "longrope" and _ORIGINAL in new:
        values.setdefault(_ORIGINAL, new[_ORIGINAL])


def _scaling(kind: str, new: Mapping[str, Any]) -> dict[str, Any] | None:
    """Version 4's `rope_scaling`, with the type under both of its keys."""
    found = {k: v for k, v in new.items() if k not in ("rope_theta", "partial_rotary_factor")}
    newer = str(found.get("rope_type", "default"))
    older = _TYPES.get(newer, _Older((newer,)))
    if older.plain and not found.keys() - {"rope_type"}:
        return None
    named = "mrope" if _SECTIONS in found and older.plain else older.names[0]
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
