"""The rows of a layout's table. Each row says which roles a stored tensor holds.

A row says nothing about direction. Export and import read the same table. A family of models is one
such table, from which all its translations follow.

A *role* is a tensor by its meaning (`q`, `gate`, …), with rows in Hugging Face's order. A run says
that `count` indices of a stored axis, `step` apart, are consecutive indices of a role; here are the
formulas of all fused tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from smckpt.errors import TopologyError, UsageError


@dataclass(frozen=True, slots=True)
class AxisRun:
    """Index `at + k * step` of the stored axis is index `role_at + k` of role number `role` of the
    row, for k in [0, count)."""

    role: int
    at: int
    step: int
    role_at: int
    count: int


@dataclass(frozen=True, slots=True)
class Heads:
    """The sizes for the formulas of attention: groups, heads per group, head size, rotary part;
    key heads of linear attention."""

    groups: int
    per_group: int
    size: int
    rotary: int
    linear: int = 0


def runs_of_rank(how: str, sizes: Sequence[int], heads: Heads, t: int, rank: int) -> list[AxisRun]:
    """The runs of the axis as tensor-parallel rank `rank` of `t` stores it.

    Raises:
        TopologyError: the degree does not divide the axis.
    """
    if how == "per_rank":  # each rank joins its own parts: [Q_r; K_r; V_r], [gate_r; up_r]
        out, at = [], 0
        for role, size in enumerate(sizes):
            _divides(t, size)
            out.append(AxisRun(role, at, 1, rank * (size // t), size // t))
            at += size // t
        return out
    total = sum(sizes)
    _divides(t, total)
    whole = list(HOW[how](sizes, heads))
    return list(cut(whole, rank * total // t, (rank + 1) * total // t))


def cut(runs: Sequence[AxisRun], low: int, high: int) -> Iterator[AxisRun]:
    """The parts of the runs in [low, high) of the stored axis, counted from `low`."""
    for run in runs:
        first = max(0, -((run.at - low) // run.step))
        last = min(run.count, -((run.at - high) // run.step))
        if last > first:
            at = run.at + first * run.step - low
            yield AxisRun(run.role, at, run.step, run.role_at + first, last - first)


def _in_turn(sizes: Sequence[int], count: int) -> Iterator[AxisRun]:
    """`count` parts: the n-th has the n-th of `count` equal parts of each role."""
    at = 0
    for part in range(count):
        for role, size in enumerate(sizes):
            yield AxisRun(role, at, 1, part * (size // count), size // count)
            at += size // count


def _rotary(sizes: Sequence[int], heads: Heads) -> Iterator[AxisRun]:
    """Meta's order: the two halves of a rotated pair are neighbours."""
    half = heads.rotary // 2
    for at in range(0, sizes[0], heads.size):
        if half:
            yield AxisRun(0, at, 2, at, half)
            yield AxisRun(0, at + 1, 2, at + half, half)
        if heads.rotary < heads.size:
            rest = at + heads.rotary
            yield AxisRun(0, rest, 1, rest, heads.size - heads.rotary)


HOW: Mapping[str, Callable[[Sequence[int], Heads], Iterator[AxisRun]]] = {
    "same": lambda sizes, _: _in_turn(sizes, 1),
    # Megatron's QKV: for each group its queries, then its key, then its value
    "interleaved": lambda sizes, heads: _in_turn(sizes, heads.groups),
    # GPT-OSS's gate and up: their rows alternate
    "alternating": lambda sizes, _: (
        AxisRun(role, role, len(sizes), 0, size) for role, size in enumerate(sizes)
    ),
    "rotary": _rotary,
    "by_head": lambda sizes, heads: _in_turn(sizes, heads.groups * heads.per_group),
    "by_linear_head": lambda sizes, heads: _in_turn(sizes, heads.linear),
}


def _divides(t: int, size: int) -> None:
    if size % t:
        raise TopologyError(
            f"tensor-parallel degree {t} does not divide {size}",
            remedy="pass the degree that the model was trained with",
        )


# Shapes of the roles: X hidden, V vocabulary, P positions, F, M and S widths of the dense, the
# experts' and the shared experts' MLP, H heads, G key/value heads, Q and K rows of all query and
# all key heads, O inputs of the output projection, D a head, E experts, 1 one; for latent attention
# A and R ranks of query and key/value, B, C and U rows of its other projections; for linear
# attention Y and Z rows of all key and all value heads, N value heads, W a value head, J the
# convolution's length; T twice the hidden size; for a vision tower n channels, t pictures and w
# pixels along a side of a patch, y and z inputs and outputs of its merger, which brings its outputs
# to the language model's size.
ROLES: Mapping[str, str] = {
    "embed": "VX", "pos": "PX", "head": "VX", "final_norm": "X", "final_norm_b": "X",
    "embed_norm": "X", "embed_norm_b": "X", "head_b": "V",
    "norm1": "X", "norm1_b": "X", "norm2": "X", "norm2_b": "X", "post1": "X", "post2": "X",
    "q": "QX", "k": "KX", "v": "KX", "q_b": "Q", "k_b": "K", "v_b": "K",
    "o": "XO", "o_b": "X", "q_norm": "D", "k_norm": "D", "sinks": "H",
    "q_norm_all": "Q", "k_norm_all": "K", "q_norm_each": "HD", "k_norm_each": "GD",
    "q_down": "AX", "q_down_norm": "A", "q_up": "BA",
    "kv_down": "CX", "kv_down_norm": "R", "kv_up": "UR",
    "gate": "FX", "up": "FX", "down": "XF", "gate_b": "F", "up_b": "F", "down_b": "X",
    "fc1": "FX", "fc1_b": "F", "fc2": "XF", "fc2_b": "X",
    "router": "EX", "router_b": "E", "router_shift": "E",
    "e_gate": "MX", "e_up": "MX", "e_down": "XM", "e_gate_b": "M", "e_up_b": "M", "e_down_b": "X",
    "s_gate": "SX", "s_up": "SX", "s_down": "XS", "s_router": "1X",
    "patch_2d": "Xnww", "patch_3d": "Xntww", "patch_b": "X", "merge_norm": "y", "merge_norm_b": "y",
    "merge1": "yy", "merge1_b": "y", "merge2": "zy", "merge2_b": "z",
    "q_gate": "QX",
    "l_q": "YX", "l_k": "YX", "l_v": "ZX", "l_gate": "ZX", "l_beta": "NX", "l_alpha": "NX",
    "l_conv_q": "Y1J", "l_conv_k": "Y1J", "l_conv_v": "Z1J", "l_decay": "N", "l_step": "N",
    "l_norm": "W", "l_o": "XZ",
    "mtp_embed_norm": "X", "mtp_hidden_norm": "X", "mtp_join": "XT", "mtp_norm": "X",
}  # fmt: skip

ZERO_CENTRED = "_zero_centred"
NORMS = frozenset({
    "final_norm", "norm1", "norm2", "post1", "post2", "q_norm", "k_norm", "q_down_norm",
    "kv_down_norm", "q_norm_all", "k_norm_all", "q_norm_each", "k_norm_each", "l_norm",
    "mtp_embed_norm", "mtp_hidden_norm", "mtp_norm",
})  # fmt: skip


# the order of roles in a tensor → the smallest and largest number of roles
_HOW = {
    "same": (1, 99), "per_rank": (1, 99), "interleaved": (3, 4), "alternating": (2, 99),
    "rotary": (1, 1), "vocabulary": (1, 1), "by_head": (2, 99), "by_linear_head": (2, 99),
}  # fmt: skip


@dataclass(frozen=True)
class LayoutRow:
    """A kind of stored tensor, with one tensor for each layer and expert.

    name: with `{i}` for the layer, `{e}` for the expert (of the rank's own, under expert
        parallelism), `{m}` for a layer that predicts further tokens, counted from 0.
    roles: the roles that it holds; several if it is fused.
    how: the order of the roles: "same" (one role, or several one after the other), "per_rank" (each
        tensor-parallel rank joins its own parts), "interleaved" (queries, their gates if there are
        any, key, value of each group), "alternating" (one row of each in turn), "rotary" (rotated
        pairs side by side, as in Meta's files), "vocabulary" (as "same", with rows of padding at
        the end), "by_head" (the rows of each query head in turn), "by_linear_head" (those of each
        key head of linear attention).
    tp: the dimension of the role that tensor parallelism cuts. None: each rank has all of it.
    copies: if each rank has all of it: the copies are equal, which is checked ("equal"), or the
        role is their mean ("mean") or their sum ("sum"; an import writes it to the first rank and
        zeros to the others).
    shift: stored value minus role value; -1 for zero-centred norms.
    transposed: the role's two dimensions are swapped in the stored tensor.
    stacked: the stored tensor has the experts as one more dimension, in front.
    folded: the bytes are those of a stacked tensor, but its shape says "columns" (hidden × all
        experts' columns) or "rows" (all experts' rows × hidden): Megatron's legacy weights.
    when: conditions for the row, separated by commas: "dense" or "sparse" (layers of that kind),
        "linear" (layers with linear attention), "predicts" (layers that predict further tokens,
        which only such rows are for), "latent" (latent attention), "gated" (attention with gates of
        queries), a family's name, or a key of the config whose value must count as true. "not " in
        front reverses a condition.
    tower: the tower that it belongs to, by its name in `Family.towers`; "" for the language model.
    """

    name: str
    roles: tuple[str, ...]
    how: str = "same"
    tp: int | None = None
    copies: str = "equal"
    shift: float = 0.0
    transposed: bool = False
    stacked: bool = False
    folded: str | None = None
    when: str | None = None
    tower: str = ""

    def __post_init__(self) -> None:
        for key, value, known in (
            ("how", self.how, tuple(_HOW)),
            ("tp", self.tp, (None, 0, 1)),
            ("copies", self.copies, ("equal", "mean", "sum")),
            ("folded", self.folded, (None, "columns", "rows")),
        ):
            if value not in known:
                raise UsageError(
                    f"the row {self.name} has {key}={value!r}",
                    remedy=f"pass one of {', '.join(map(str, known))}",
                )
        unknown = [role for role in self.roles if role not in ROLES]
        least, most = _HOW[self.how]
        if unknown or not least <= len(self.roles) <= most:
            counts = {least: f"{least}", least + 1: f"{least} or {most}"}
            raise UsageError(
                f"the row {self.name} has roles={self.roles!r}, how={self.how!r}",
                remedy=f"it takes {counts.get(most, f'{least} or more')} of {', '.join(ROLES)}",
            )
        if self.copies != "equal" and self.tp is not None:
            raise UsageError(
                f"the row {self.name} is cut by tensor parallelism and has copies={self.copies!r}",
                remedy="leave out tp=, or copies=",
            )

    @property
    def of_experts(self) -> bool:
        return self.stacked or "{e}" in self.name

    @property
    def predicts(self) -> bool:
        """Whether the row is for layers that predict further tokens."""
        return self.when is not None and "predicts" in self.when.split(", ")

    @property
    def of_layers(self) -> bool:
        return "{i}" in self.name or self.predicts


@dataclass(frozen=True)
class TensorLayout:
    """A table of rows. `drop`: regular expressions of names that hold no weights.

    families: the model types that the layout is for; None: all that have its roles.
    joined: True: distributed tensors under these names are the ranks' arrays one after the other.
        False: they are whole tensors in the right order (transformers' own tensor parallelism).
    whole_groups: each rank has whole key/value groups, because its modules refuse other degrees.
    """

    name: str
    rows: tuple[LayoutRow, ...]
    drop: tuple[str, ...] = ()
    families: frozenset[str] | None = None
    joined: bool = True
    whole_groups: bool = False

    def __post_init__(self) -> None:
        for pattern in self.drop:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UsageError(
                    f"the layout {self.name} has drop={pattern!r}: {error}",
                    remedy="give regular expressions",
                ) from error

    def renamed(self, name: str, *changes: tuple[str, str]) -> TensorLayout:
        """This layout with other names: each (old, new) replaces a part of every row's name."""
        changed = []
        for row in self.rows:
            text = row.name
            for old, new in changes:
                text = text.replace(old, new)
            changed.append(replace(row, name=text))
        return replace(self, name=name, rows=tuple(changed))

    def zero_centred(self) -> TensorLayout:
        """This layout with the weights of norms stored minus one (`zero_centered_gamma`)."""
        shifted = tuple(
            replace(row, shift=-1.0) if NORMS.issuperset(row.roles) and not row.tower else row
            for row in self.rows
        )
        return replace(self, name=self.name + ZERO_CENTRED, rows=shifted)


def holds(when: str | None, true: Collection[str]) -> bool:
    """Whether all conditions of a row are true, given the words that are `true`."""
    words = when.split(", ") if when else ()
    return all((word.removeprefix("not ") in true) != word.startswith("not ") for word in words)


def rows(prefix: str, table: Iterable[LayoutRow], tower: str = "") -> tuple[LayoutRow, ...]:
    """The rows with `prefix` in front of their names, as rows of a tower if it is given."""
    return tuple(replace(row, name=prefix + row.name, tower=tower or row.tower) for row in table)


def pair(
    name: str, *roles: str, how: str = "same", tp: int | None = None, when: str | None = None
) -> tuple[LayoutRow, LayoutRow]:
    """The rows of a weight and of its bias. Where tensor parallelism cuts the columns of the weight
    (tp=1), each rank has all of the bias."""
    biases = tuple(f"{role}_b" for role in roles)
    return (
        LayoutRow(f"{name}.weight", roles, how, tp, when=when),
        LayoutRow(f"{name}.bias", biases, how, None if tp == 1 else tp, when=when),
    )


def predicting(prefix: str, table: Iterable[LayoutRow]) -> tuple[LayoutRow, ...]:
    """As `rows`, for layers that predict further tokens."""
    named = rows(prefix, table)
    return tuple(replace(r, when=f"{r.when}, predicts" if r.when else "predicts") for r in named)


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
