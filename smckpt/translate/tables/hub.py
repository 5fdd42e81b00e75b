"""Tensors of released checkpoints, by their names there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Copy

_HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_SHARED = "shared.weight"  # of an encoder and a decoder with one embedding


@dataclass(frozen=True)
class HubTensor:
    """A tensor of a released checkpoint, by its name there: copies out of tensors of the state
    dict, by their names in it."""

    name: str
    shape: Shape
    parts: tuple[tuple[str, Copy], ...]


@dataclass(frozen=True)
class Tie:
    """Two names that the config says are one tensor; `left_out` is not exported."""

    kept: str
    left_out: str


def find_ties(names: Iterable[str]) -> list[Tie]:
    """Pairs of names that are one tensor in a model with `tie_word_embeddings`."""
    all_names = set(names)
    shared = sorted((n for n in all_names if _ends(n, (_SHARED,))), key=len)
    ties = []
    if shared:
        source = shared[0]
        root = source[: -len(_SHARED)]
        for part in ("encoder", "decoder"):
            other = f"{root}{part}.embed_tokens.weight"
            if other in all_names:
                ties.append(Tie(source, other))
    else:
        embeddings = sorted((n for n in all_names if _ends(n, _EMBEDDINGS)), key=len)
        if not embeddings:
            return []
        source = embeddings[0]
    heads = (n for n in sorted(all_names) if _ends(n, _HEADS))
    return ties + [Tie(source, head) for head in heads]


def _ends(name: str, endings: tuple[str, ...]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)
