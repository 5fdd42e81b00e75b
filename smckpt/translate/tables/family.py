"""A family of models: one table from which all translations follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from smckpt.translate.tables.table import LayoutRow, TensorLayout, predicting, rows

__all__ = ["HF_TP", "Family", "packed_experts"]

# The dimension of a role that transformers' own tensor parallelism cuts.
HF_TP: Mapping[str, int] = {
    **dict.fromkeys(("embed", "head", "head_b", "q", "k", "v", "gate", "up", "fc1"), 0),
    **dict.fromkeys(("q_b", "k_b", "v_b", "gate_b", "up_b", "fc1_b", "s_gate", "s_up"), 0),
    **dict.fromkeys(("o", "down", "fc2", "s_down"), 1),
}
_TIED = "tie_word_embeddings"


def packed_experts(block: str = "mlp", router: str = "gate") -> tuple[LayoutRow, ...]:
    """A layer's router and experts as transformers 5 has them in memory."""
    gate_up = ("e_gate", "e_up")
    return (
        LayoutRow(f"{block}.{router}.weight", ("router",)),
        LayoutRow(f"{block}.experts.gate_up_proj", gate_up, "per_rank", 0, stacked=True),
        LayoutRow(f"{block}.experts.down_proj", ("e_down",), tp=1, stacked=True),
    )


@dataclass(frozen=True)
class Family:
    """Models that share a `model_type`.

    name: the config's `model_type`.
    rows: the tensors of the released checkpoints, which transformers 4 and 5 both load. A model has
        the roles of the rows whose `when` is true for its config, so the table is also the list of
        its parts.
    drop: regular expressions of names that hold no weights.
    keys: where this family's config uses another key than Llama's: Llama's key → its own.
    defaults: values for keys that the config leaves out.
    derive: computes further values from the config (with Llama's keys). They override the config's.
    fp32: regular expressions of names that `from_pretrained` keeps in float32, in a model of
        bfloat16 or float16. fp32_beside_float16: those that it keeps so beside float16 only.
    hf_tp: role → dimension that transformers' own tensor parallelism cuts; None if it has none for
        this family.
    packed: a layer's router and experts as transformers 5 has them in memory.
    towers: what the model has beside its language model, by name: a vision tower and the like.
        Each has rows, layers and sizes of its own.
    section: the section of the config that describes the language model, or this tower.
    in_memory: the parts of released names that are otherwise in the memory of transformers 5, each
        with what stands there, in this order.
    in_bridge: the same for the names of towers in Megatron Bridge.
    """

    name: str
    rows: tuple[LayoutRow, ...]
    drop: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    derive: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    fp32: tuple[str, ...] = ()
    fp32_beside_float16: tuple[str, ...] = ()
    hf_tp: Mapping[str, int] | None = field(default_factory=lambda: HF_TP)
    packed: tuple[LayoutRow, ...] = packed_experts()
    towers: Mapping[str, Family] = field(default_factory=dict)
    section: str = ""
    in_memory: tuple[tuple[str, str], ...] = ()
    in_bridge: tuple[tuple[str, str], ...] = ()

    @cached_property
    def hub(self) -> TensorLayout:
        """The table of the released checkpoints, as a layout of one rank."""
        return TensorLayout(self.name, self.rows + self.tower_rows, self.drop)

    @property
    def tower_rows(self) -> tuple[LayoutRow, ...]:
        """The rows of all towers."""
        return tuple(row for name, own in self.towers.items() for row in rows("", own.rows, name))

    @property
    def live(self) -> TensorLayout | None:
        """The layout "hf_tp": transformers' own tensor parallelism, with its names in memory."""
        if self.hf_tp is None:
            return None
        packed = {role for row in self.packed for role in row.roles}
        out: list[LayoutRow] = []
        for row in self.rows:
            if row.roles == ("router",):
                layer = row.name[: row.name.index("}.") + 2]
                out += (predicting if row.predicts else rows)(layer, self.packed)
            elif not row.of_experts and packed.isdisjoint(row.roles):
                out.append(replace(row, tp=self.hf_tp.get(row.roles[0])))
        table = (*out, *self.tower_rows)
        return TensorLayout("hf_tp", table, self.drop, joined=False).renamed(
            "hf_tp", *self.in_memory
        )

    @property
    def words(self) -> dict[str, str]:
        """The names for `{embed}`, `{head}` and so on, in tables of layouts that keep Hugging
        Face's outer modules. `layers`: the text before a layer's number. `language`: the text
        before Megatron's names of the language model."""
        names = {row.roles[0]: row.name for row in self.rows if not row.of_layers}
        layer = next((row.name for row in self.rows if "{i}" in row.name), "{i}")
        language = "language_model." if self.towers else ""
        return {**names, "layers": layer.split(".{i}")[0], "language": language}

    @property
    def packs_experts(self) -> bool:
        """Whether experts are one tensor in memory and several on disk."""
        return self.hf_tp is not None and any("{e}" in row.name for row in self.rows)

    @property
    def predicts(self) -> bool:
        """Whether the table has rows of layers that predict further tokens."""
        return any(row.predicts for row in self.rows)

    @property
    def gated(self) -> bool:
        """Whether attention has a gate for each query."""
        return any("q_gate" in row.roles for row in self.rows)

    @property
    def zero_centred(self) -> bool:
        """Whether its norms are stored minus one, in Hugging Face's files and in training."""
        return any(row.shift and "final_norm" in row.roles for row in self.rows)

    @property
    def latent(self) -> bool:
        """Whether queries, keys and values come from narrow layers: latent attention."""
        return self.has("kv_down")

    def has(self, role: str) -> bool:
        return any(role in row.roles for row in self.rows)

    def config(self, contents: Mapping[str, Any]) -> dict[str, Any]:
        """The config with Llama's keys and the defaults. A section also has the other sections, and
        whether embeddings are tied, which the whole config says."""
        own = contents.get(self.section)
        if isinstance(own, Mapping):
            outer = {k: v for k, v in contents.items() if isinstance(v, Mapping)}
            tied = contents.get(_TIED, own.get(_TIED))
            contents = {**outer, **own, _TIED: tied}
        values = {**self.defaults, **{k: v for k, v in contents.items() if v is not None}}
        for key, own in self.keys.items():
            if values.get(key) is None and values.get(own) is not None:
                values[key] = values[own]
        return values
