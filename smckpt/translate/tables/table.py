"""The rows of a layout's table. Each row says which roles a stored tensor holds.

A row says nothing about direction. Export and import read the same table.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from smckpt.errors import UsageError

__all__ = [
    "NORMS",
    "ROLES",
    "ZERO_CENTRED",
    "LayoutRow",
    "TensorLayout",
    "holds",
    "predicting",
    "rows",
]

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
        for field, value, known in (
            ("how", self.how, tuple(_HOW)),
            ("tp", self.tp, (None, 0, 1)),
            ("copies", self.copies, ("equal", "mean", "sum")),
            ("folded", self.folded, (None, "columns", "rows")),
        ):
            if value not in known:
                raise UsageError(
                    f"the row {self.name} has {field}={value!r}",
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


def predicting(prefix: str, table: Iterable[LayoutRow]) -> tuple[LayoutRow, ...]:
    """As `rows`, for layers that predict further tokens."""
    named = rows(prefix, table)
    return tuple(replace(r, when=f"{r.when}, predicts" if r.when else "predicts") for r in named)
