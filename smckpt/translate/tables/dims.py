"""The sizes of a model, from its config. Shapes and formulas use them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from smckpt.errors import UsageError
from smckpt.layout.mesh import Shape
from smckpt.translate.tables.families import family_of
from smckpt.translate.tables.table import ROLES, Family, Heads, holds


@dataclass(frozen=True)
class Dims:
    """Sizes of a model, by the letters of `ROLES`, and the roles that it has.

    layers: its own; those that predict further tokens follow them. true: the words that are true in
        a row's `when` for all of them. once: roles outside the layers. kinds: the words that are
        true for each layer. roles_of: all roles of a layer of a kind. towers: the sizes of the
        family's towers.
    """

    family: Family
    layers: int
    sizes: Mapping[str, int]
    heads: Heads
    tied: bool
    true: frozenset[str]
    once: frozenset[str]
    kinds: tuple[frozenset[str], ...]
    roles_of: Mapping[frozenset[str], frozenset[str]]
    towers: Mapping[str, Dims] = field(default_factory=dict)

    def of(self, tower: str) -> Dims:
        return self.towers[tower] if tower else self

    def shape(self, role: str) -> Shape:
        return tuple(self.sizes[letter] for letter in ROLES[role])

    @property
    def experts(self) -> int:
        return self.sizes["E"]

    def roles(self, layer: int) -> frozenset[str]:
        """The roles of a layer; -1: those outside the layers."""
        return self.once if layer < 0 else self.roles_of[self.kinds[layer]]

    def words(self, layer: int) -> frozenset[str]:
        """The words of `when` that are true for a layer."""
        return self.true if layer < 0 else self.true | self.kinds[layer]


def read_dims(
    config: Mapping[str, Any], where: str | None = None, *, predicting: int = 0
) -> Dims:  # fmt: skip
    """The sizes of the model that `config` describes, with so many layers that predict further
    tokens.

    Raises:
        UsageError: no table has such models, a size is missing, or sizes contradict each other.
    """
    return _dims(family_of(str(config["model_type"]), where), config, predicting)


def _dims(
    family: Family, config: Mapping[str, Any], predicting: int = 0, *, tower: bool = False
) -> Dims:  # fmt: skip
    if tower and not isinstance(config.get(family.section), Mapping):
        raise UsageError(
            f"the config has no section {family.section}, which describes {family.name}",
            remedy="pass the model's own, complete config",
        )
    settings: Mapping[str, Any] = family.config(config)
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        _size(settings, key)
    if family.derive is not None:
        settings = {**settings, **family.derive(settings)}
    hidden, layers = _size(settings, "hidden_size"), _number(settings, "num_hidden_layers")
    heads = _heads(settings, family, hidden)
    true = frozenset(key for key, value in settings.items() if value) | {family.name}
    true |= {word for word in ("latent", "gated") if getattr(family, word)}
    once = _roles(family, true, None)
    tied = bool(settings.get("tie_word_embeddings"))
    kinds = _kinds(settings, family, layers, predicting)
    # layers that predict further tokens share the embedding and the head with the model
    roles_of = {kind: _roles(family, true, kind) - once for kind in set(kinds)}
    return Dims(
        family, layers, _sizes(settings, family, hidden, heads), heads, tied, true,
        once - {"head"} if tied else once, kinds, roles_of,
        {name: _dims(own, config, tower=True) for name, own in family.towers.items()},
    )  # fmt: skip


def _roles(family: Family, true: frozenset[str], kind: frozenset[str] | None) -> frozenset[str]:
    """The roles of a kind of layer (None: outside the layers), from the family's own table."""
    words = true if kind is None else true | kind
    return frozenset(
        role for row in family.rows
        if row.of_layers == (kind is not None) and row.predicts == ("predicts" in words)
        and holds(row.when, words)
        for role in row.roles
    )  # fmt: skip


def _kinds(
    config: Mapping[str, Any], family: Family, layers: int, predicting: int
) -> tuple[frozenset[str], ...]:
    """The words for each layer. Layers that predict further tokens have experts and full attention
    where the family has them."""
    experts = bool(_experts(config)) and any(row.of_experts for row in family.rows)
    first, step = (_number(config, k) for k in ("first_k_dense_replace", "decoder_sparse_step"))
    only_dense = set(config.get("mlp_only_layers") or ())
    types = config.get("layer_types") or ()
    out = []
    for i in range(layers):
        sparse = i >= first and i not in only_dense and (i + 1) % (step or 1) == 0
        linear = i < len(types) and types[i] == "linear_attention"
        out.append(frozenset(
            {"sparse" if experts and sparse else "dense", *(["linear"] if linear else [])}
        ))  # fmt: skip
    return (*out, *[frozenset({"sparse" if experts else "dense", "predicts"})] * predicting)


def _sizes(
    config: Mapping[str, Any], family: Family, hidden: int, heads: Heads
) -> dict[str, int]:  # fmt: skip
    width = _size(config, "intermediate_size")
    expert_width = _number(config, "moe_intermediate_size") or width
    q, k = heads.groups * heads.per_group * heads.size, heads.groups * heads.size
    keys, values = (_number(config, f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if keys and values % keys:
        raise UsageError(
            f"{values} value heads of linear attention are not a multiple of {keys} key heads",
            remedy="pass the config that the model was trained with",
        )
    value_width = _number(config, "linear_value_head_dim")
    return {
        "X": hidden, "V": _size(config, "vocab_size") if family.has("embed") else 0,
        "P": _number(config, "max_position_embeddings"), "F": width, "M": expert_width,
        "Q": q, "K": k, "O": q, "D": heads.size, "E": _experts(config),
        "S": _number(config, "shared_expert_intermediate_size")
        or _number(config, "n_shared_experts") * expert_width,
        "1": 1, "H": heads.groups * heads.per_group, "G": heads.groups, "T": 2 * hidden,
        # of linear attention: the gated delta net
        "Y": keys * _number(config, "linear_key_head_dim"), "Z": values * value_width, "N": values,
        "W": value_width, "J": _number(config, "linear_conv_kernel_dim"),
        # of a vision tower
        "n": _number(config, "in_channels"), "t": _number(config, "temporal_patch_size"),
        "w": _number(config, "patch_size"), "z": _number(config, "out_hidden_size"),
        "y": hidden * (_number(config, "spatial_merge_size") or 1) ** 2,
        **(_latent(config) if family.latent else {}),
    }  # fmt: skip


def _experts(config: Mapping[str, Any]) -> int:
    return _number(config, "num_local_experts", "num_experts", "n_routed_experts")


def _heads(config: Mapping[str, Any], family: Family, hidden: int) -> Heads:
    count = _size(config, "num_attention_heads")
    if family.latent:
        head = _size(config, "qk_nope_head_dim") + _size(config, "qk_rope_head_dim")
        return Heads(count, 1, head, head)
    groups = _number(config, "num_key_value_heads") or count
    if count % groups:
        raise UsageError(
            f"{count} attention heads are not a multiple of {groups} key/value heads",
            remedy="pass the config that the model was trained with",
        )
    head = _number(config, "head_dim") or hidden // count
    linear = _number(config, "linear_num_key_heads")
    rope = config.get("rope_parameters") or {}
    part = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    for key in ("partial_rotary_factor", "rotary_pct"):
        if part is None:
            part = config.get(key)
    if part is not None and (not isinstance(part, (int, float)) or not 0 <= part <= 1):
        raise _no_number("partial_rotary_factor", part)
    rotary = head if part is None else math.floor(head * part)
    if rotary % 2:
        raise UsageError(
            f"{rotary} of {head} rows of a head are rotary, but the number must be even",
            remedy="pass the config that the model was trained with",
        )
    return Heads(groups, count // groups, head, rotary, linear)


def _latent(config: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of latent attention, whose queries, keys and values go through a narrow layer."""
    heads, rotary = _size(config, "num_attention_heads"), _size(config, "qk_rope_head_dim")
    plain, value = _size(config, "qk_nope_head_dim"), _size(config, "v_head_dim")
    rank = _size(config, "kv_lora_rank")
    return {
        "A": _number(config, "q_lora_rank"), "B": heads * (plain + rotary), "R": rank,
        "C": rank + rotary, "U": heads * (plain + value), "O": heads * value,
    }  # fmt: skip


def _number(config: Mapping[str, Any], *keys: str) -> int:
    """The value of the first key that the config has; 0 if it has none."""
    for key in keys:
        value = config.get(key)
        number = isinstance(value, (int, float)) and value is not True
        if value and not (number and int(value) == value):
            raise _no_number(key, value)
        if value:
            return int(value)
    return 0


def _no_number(key: str, value: Any) -> UsageError:
    return UsageError(
        f"the config has {key}={value!r}, which is not a size",
        remedy="pass the model's own, complete config",
    )


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value is True or value < 1:
        raise _no_number(key, value)
    return value
