"""Find the layout of a source from its names."""

from __future__ import annotations

import re
from collections.abc import Collection

from smckpt.errors import KeysMismatchError, UsageError
from smckpt.translate.tables.dims import Dims
from smckpt.translate.tables.families import find_family
from smckpt.translate.tables.layouts import get_layout, layouts_of
from smckpt.translate.tables.pieces import dropped, tensors_of
from smckpt.translate.tables.table import TensorLayout

__all__ = ["choose_layout", "dropped_names", "looks_packed", "looks_transformed", "unmatched"]

# Parts of names that no model of transformers has.
_TRANSFORMED = re.compile(
    r"\.layernorm_qkv\.|\.layernorm_mlp\.|self_attention\.linear_(qkv|proj)\.|\._extra_state"
    r"|decoder\.layers\.\d+\.mlp\.linear_fc\d\.|\.seq_layers\."
    r"|(^|\.)layers\.\d+\.attention\.(qkv_linear\.)?w[qkvo]\."
    r"|(^|\.)layers\.\d+\.sa_norm\.scale$"
)
# Experts as transformers 5 packs them in memory; some families have other names on disk.
_PACKED = re.compile(r"\.mlp\.experts\.gate_up_proj$")


def looks_transformed(names: Collection[str]) -> bool:
    """Whether some names belong to a tensor-parallel layout other than transformers' own."""
    return any(_TRANSFORMED.search(name) for name in names)


def looks_packed(names: Collection[str], model_type: str | None) -> bool:
    """Whether experts are packed as in memory, although the family's released models have them one
    by one."""
    family = find_family(model_type) if model_type else None
    return family is not None and family.packs_experts and any(map(_PACKED.search, names))


def choose_layout(
    names: Collection[str], dims: Dims, layout: str | TensorLayout | None, ep: int, where: str
) -> TensorLayout:
    """The requested layout, or the only one that the names fit.

    Raises:
        UsageError: no layout fits, or several do; the message names them.
        KeysMismatchError: the requested layout does not fit; the message lists the names.
    """
    if layout is not None:
        chosen = get_layout(layout, dims.family)
        missing, unexpected = unmatched(names, chosen, dims, ep)
        if missing or unexpected:
            raise KeysMismatchError(
                f"the names do not fit the layout {chosen.name} of a {dims.family.name} model: "
                f"missing {_some(missing)}; unexpected {_some(unexpected)}",
                remedy="check layout=, config=, ep= and etp=, or add rows to a layout of your own",
                path=where,
            )
        return chosen
    fits: list[TensorLayout] = []
    nearest: list[tuple[int, str, list[str], list[str]]] = []
    for name, candidate in layouts_of(dims.family).items():
        try:
            missing, unexpected = unmatched(names, candidate, dims, ep)
        except KeysMismatchError:  # it has no rows for such a model
            continue
        if (
            not missing
            and not unexpected
            # of two that are the same for this model, one counts: they may differ in experts only
            and set(tensors_of(candidate, dims, ep))
            not in [set(tensors_of(other, dims, ep)) for other in fits]
        ):
            fits.append(candidate)
        nearest.append((len(missing) + len(unexpected), name, missing, unexpected))
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise UsageError(
            f"the names fit several layouts: {', '.join(sorted(f.name for f in fits))}",
            remedy="pass layout= the one that the model was trained with",
            path=where,
        )
    _, name, missing, unexpected = min(nearest)
    raise UsageError(
        f"the names fit no known layout of {dims.family.name}; the nearest is {name}, with missing "
        f"{_some(missing)}; unexpected {_some(unexpected)}",
        remedy="check config=, ep= and etp=, pass layout=, or register a layout of your own",
        path=where,
    )


def unmatched(
    names: Collection[str], layout: TensorLayout, dims: Dims, ep: int
) -> tuple[list[str], list[str]]:
    """The names that the layout needs and the source lacks, and the names of the source that the
    layout does not have.

    A head that the config ties to the embedding may be there.
    """
    wanted = {stored.name for stored in tensors_of(layout, dims, ep)}
    heads = {row.name for row in layout.rows if row.roles == ("head",)} if dims.tied else set()
    unexpected = [n for n in sorted(set(names) - wanted - heads) if not dropped(layout, n)]
    return sorted(wanted - set(names)), unexpected


def dropped_names(names: Collection[str], layout: TensorLayout, dims: Dims) -> list[str]:
    """The names of the source that the layout drops from this family, and has in others."""
    wanted = {stored.name for stored in tensors_of(layout, dims, 1)}
    known = [re.escape(row.name).replace(r"\{i\}", r"\d+") for row in layout.rows]
    return [
        name
        for name in sorted(set(names) - wanted)
        if dropped(layout, name) and any(re.fullmatch(pattern, name) for pattern in known)
    ]


def _some(names: list[str]) -> str:
    return f"{names[:8]}" + (f" and {len(names) - 8} more" if len(names) > 8 else "")
