"""The sizes of a model, from its config. Shapes and formulas use them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smckpt.errors import UsageError
from smckpt.layout.mesh import Shape
from smckpt.translate.families import family_of
from smckpt.translate.family import Family
from smckpt.translate.runs import Heads
from smckpt.translate.table import ROLES, holds

__all__ = ["Dims", "read_dims"]


@dataclass(frozen=True)
class Dims:
    """Sizes of a model, by the letters of `ROLES`, and the roles that it has.

    true: the words that are true in a row's `when`, except "dense" and "sparse". once: roles
        outside the layers. dense, sparse: all roles of a layer of that kind.
    """

    family: Family
    layers: int
    sizes: Mapping[str, int]
    heads: Heads
    tied: bool
    true: frozenset[str]
    once: frozenset[str]
    dense: frozenset[str]
    sparse: frozenset[str]
    sparse_layers: frozenset[int]

    def shape(self, role: str) -> Shape:
        return tuple(self.sizes[letter] for letter in ROLES[role])

    @property
    def experts(self) -> int:
        return self.sizes["E"]

    def roles(self, layer: int) -> frozenset[str]:
        """The roles of a layer; -1: those outside the layers."""
        if layer < 0:
            return self.once
        return self.sparse if layer in self.sparse_layers else self.dense

    def words(self, layer: int) -> frozenset[str]:
        """The words of `when` that are true for a layer."""
        return self.true | {"sparse" if layer in self.sparse_layers else "dense"}


def read_dims(config: Mapping[str, Any], where: str | None = None) -> Dims:
    """The sizes of the model that `config` describes.

    Raises:
        UsageError: no table has such models, a size is missing, or sizes contradict each other.
    """
    family = family_of(str(config["model_type"]), where)
    said: Mapping[str, Any] = family.config(config)
    hidden, layers = _size(said, "hidden_size"), _size(said, "num_hidden_layers")
    _size(said, "num_attention_heads")
    if family.derive is not None:
        said = {**said, **family.derive(said)}
    heads = _heads(said, family, hidden)
    true = frozenset(key for key, value in said.items() if value) | (
        {"latent"} if family.latent else set()
    )
    once, dense, sparse = (_roles(family, true, kind) for kind in (None, "dense", "sparse"))
    tied = bool(said.get("tie_word_embeddings"))
    return Dims(
        family, layers, _sizes(said, family, hidden, heads), heads, tied, true,
        once - {"head"} if tied else once, dense, sparse, _sparse_layers(said, family, layers),
    )  # fmt: skip


def _roles(family: Family, true: frozenset[str], kind: str | None) -> frozenset[str]:
    """The roles of a kind of layer (None: outside the layers), from the family's own table."""
    own = (row for row in family.rows if ("{i}" in row.name) == (kind is not None))
    words = true | ({kind} if kind else set())
    return frozenset(role for row in own if holds(row.when, words) for role in row.roles)


def _sparse_layers(config: Mapping[str, Any], family: Family, layers: int) -> frozenset[int]:
    if not _experts(config) or not any(row.of_experts for row in family.rows):
        return frozenset()
    first, step = (_number(config, k) for k in ("first_k_dense_replace", "decoder_sparse_step"))
    only_dense = set(config.get("mlp_only_layers") or ())
    return frozenset(
        i for i in range(first, layers) if i not in only_dense and (i + 1) % (step or 1) == 0
    )


def _sizes(
    config: Mapping[str, Any], family: Family, hidden: int, heads: Heads
) -> dict[str, int]:  # fmt: skip
    width = _size(config, "intermediate_size")
    expert_width = _number(config, "moe_intermediate_size") or width
    q, k = heads.groups * heads.per_group * heads.size, heads.groups * heads.size
    return {
        "X": hidden, "V": _size(config, "vocab_size"),
        "P": _number(config, "max_position_embeddings"), "F": width, "M": expert_width,
        "Q": q, "K": k, "O": q, "D": heads.size, "E": _experts(config),
        "S": _number(config, "shared_expert_intermediate_size")
        or _number(config, "n_shared_experts") * expert_width,
        "1": 1, "H": heads.groups * heads.per_group, "G": heads.groups,
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
    return Heads(groups, count // groups, head, _rotary(config, head))


def _latent(config: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of latent attention, whose queries, keys and values go through a narrow layer."""
    heads, rotary = _size(config, "num_attention_heads"), _size(config, "qk_rope_head_dim")
    plain, value = _size(config, "qk_nope_head_dim"), _size(config, "v_head_dim")
    rank = _size(config, "kv_lora_rank")
    return {
        "A": _number(config, "q_lora_rank"), "B": heads * (plain + rotary), "R": rank,
        "C": rank + rotary, "U": heads * (plain + value), "O": heads * value,
    }  # fmt: skip


def _rotary(config: Mapping[str, Any], head: int) -> int:
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
    return rotary


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
