"""Which layout the names of a source are in."""

from __future__ import annotations

import re
from collections.abc import Collection

from smckpt.errors import KeysMismatchError, UsageError
from smckpt.translate.dims import Dims
from smckpt.translate.layouts import get_layout, layouts_of
from smckpt.translate.pieces import dropped, places_of
from smckpt.translate.table import Layout

__all__ = ["choose_layout", "looks_transformed", "unmatched"]

# Parts of names that no model of transformers has.
_TRANSFORMED = re.compile(
    r"\.layernorm_qkv\.|\.layernorm_mlp\.|self_attention\.linear_(qkv|proj)\.|\._extra_state"
    r"|decoder\.layers\.\d+\.mlp\.linear_fc\d\.|\.seq_layers\."
    r"|(^|\.)layers\.\d+\.attention\.(qkv_linear\.)?w[qkvo]\."
)
# Experts as transformers 5 packs them in memory: for these families not on disk.
_PACKED = re.compile(r"\.mlp\.experts\.gate_up_proj$")
_ONE_BY_ONE = ("mixtral", "qwen3_moe")


def looks_transformed(names: Collection[str], family: str | None) -> bool:
    """Whether some names are of a tensor-parallel layout, and not Hugging Face's on disk."""
    own = _PACKED if family in _ONE_BY_ONE else None
    return any(_TRANSFORMED.search(n) or (own and own.search(n)) for n in names)


def choose_layout(
    names: Collection[str], dims: Dims, layout: str | Layout | None, ep: int, where: str
) -> Layout:
    """The layout that was asked for, or the only one that the names fit.

    Raises:
        UsageError: no layout fits, or several do; names the candidates.
        KeysMismatchError: the one that was asked for does not fit; lists the names.
    """
    if layout is not None:
        chosen = get_layout(layout, dims.family)
        missing, unexpected = unmatched(names, chosen, dims, ep)
        if missing or unexpected:
            raise KeysMismatchError(
                f"the names do not fit the layout {chosen.name} of a {dims.family} model: missing "
                f"{_some(missing)}; unexpected {_some(unexpected)}",
                remedy="check layout=, config=, ep= and etp=, or add rows to a layout of your own",
                path=where,
            )
        return chosen
    fits: list[Layout] = []
    nearest: list[tuple[int, str, list[str], list[str]]] = []
    for name, candidate in layouts_of(dims.family).items():
        try:
            missing, unexpected = unmatched(names, candidate, dims, ep)
        except KeysMismatchError:  # it has no rows for such a model
            continue
        if (
            not missing
            and not unexpected
            and not any(_alike(candidate, other, dims, ep) for other in fits)
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
        f"the names fit no layout known for {dims.family}; nearest is {name}, with missing "
        f"{_some(missing)}; unexpected {_some(unexpected)}",
        remedy="check config=, ep= and etp=, pass layout=, or register a layout of your own",
        path=where,
    )


def unmatched(
    names: Collection[str], layout: Layout, dims: Dims, ep: int
) -> tuple[list[str], list[str]]:
    """Names that the layout wants and are not there, and those that are there for nothing.

    A head that the config ties to the embedding may be there.
    """
    wanted = {place.name for place in places_of(layout, dims, ep)}
    heads = {row.name for row in layout.rows if row.roles == ("head",)} if dims.tied else set()
    unexpected = [n for n in sorted(set(names) - wanted - heads) if not dropped(layout, n)]
    return sorted(wanted - set(names)), unexpected


def _alike(a: Layout, b: Layout, dims: Dims, ep: int) -> bool:
    """Whether two layouts say the same of this model: they may differ in experts only."""
    return set(places_of(a, dims, ep)) == set(places_of(b, dims, ep))


def _some(names: list[str]) -> str:
    return f"{names[:8]}" + (f" and {len(names) - 8} more" if len(names) > 8 else "")
