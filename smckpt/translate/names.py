"""Which tensors of a checkpoint are the model's, and what Hugging Face calls them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from smckpt.checkpoint.catalogue import Catalogue, LogicalTensor
from smckpt.errors import KeysMismatchError, UsageError
from smckpt.layout.entries import DTYPES, Path

__all__ = ["Tie", "find_ties", "model_tensors"]

log = logging.getLogger("smckpt")

# Parts of a name that wrappers add: torch.compile, FSDP1, activation checkpointing.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_DDP = "module"  # DDP's, and only in front of everything

_HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_SHARED = "shared.weight"  # of an encoder and a decoder that embed alike


@dataclass(frozen=True)
class Tie:
    """Two names that the config says are one tensor; `left_out` is not exported."""

    kept: str
    left_out: str


def model_tensors(
    catalogue: Catalogue, prefix: str | None, *, peft: bool = False
) -> dict[str, LogicalTensor]:
    """Name in the export → tensor.

    Args:
        prefix: dotted place of the model in the saved state dict; "" for the whole of it. None
            finds it: the key "model", or the only part that is no optimizer's.
        peft: a PEFT model's names are wanted.

    Raises:
        UsageError: the place cannot be told (the candidates are named), or holds an adapter.
        KeysMismatchError: nothing is saved there.
    """
    tensors = _outside_optimizers(catalogue)
    if prefix is None:
        prefix = _find_prefix(tensors, catalogue.url)
    lead = f"{prefix}." if prefix else ""
    found = {name[len(lead) :]: t for name, t in tensors.items() if name.startswith(lead)}
    if not found:
        raise KeysMismatchError(
            f"no tensor's name starts with {lead!r}; the state dict has {_tops(tensors)}",
            remedy="pass prefix= the place of the model in the saved state dict",
            path=catalogue.url,
        )
    found = _unwrapped(found)
    if not peft and any(name.startswith("base_model.model.") for name in found):
        raise UsageError(
            "the names are those of a PEFT model, not of a transformers model",
            remedy='pass lora="adapter" or lora="merge", with lora_config=',
            path=catalogue.url,
        )
    return found


def find_ties(names: Iterable[str]) -> list[Tie]:
    """Pairs that a model with `tie_word_embeddings` holds as one tensor each."""
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


def _outside_optimizers(catalogue: Catalogue) -> dict[str, LogicalTensor]:
    places = [f"{place}." for place in catalogue.optimizers]
    return {
        name: tensor
        for name, tensor in catalogue.logical.items()
        if not any(name.startswith(place) for place in places)
    }


def _find_prefix(tensors: Mapping[str, LogicalTensor], url: str) -> str:
    by_top: dict[str, list[LogicalTensor]] = {}
    for tensor in tensors.values():
        by_top.setdefault(str(tensor.path[0]), []).append(tensor)
    if any(len(t.path) > 1 for t in by_top.get("model", ())):
        return "model"
    flat = [t for t in tensors.values() if len(t.path) == 1]
    if flat and len(flat) == len(tensors):
        return ""
    candidates = [top for top, held in by_top.items() if _like_a_model(held)]
    if len(candidates) == 1:
        return candidates[0]
    raise UsageError(
        f"the model could be any of {sorted(candidates)} of the saved state dict"
        if candidates
        else f"nothing saved looks like a model: the state dict has {_tops(tensors)}",
        remedy="pass prefix= the one that is the model",
        path=url,
    )


def _like_a_model(held: list[LogicalTensor]) -> bool:
    """Floating tensors, and no optimizer's `state` (one saved by means of its own)."""
    if any(len(t.path) > 2 and t.path[1] == "state" for t in held):
        return False
    return any("float" in DTYPES[t.dtype].name for t in held)


def _unwrapped(found: dict[str, LogicalTensor]) -> dict[str, LogicalTensor]:
    out: dict[str, LogicalTensor] = {}
    ddp = all(name.startswith(f"{_DDP}.") for name in found)
    for name, tensor in found.items():
        parts = name.split(".")[1:] if ddp else name.split(".")
        clean = ".".join(p for p in parts if p not in _WRAPPERS)
        if clean in out:
            raise UsageError(
                f"{name} and another tensor are both called {clean} without wrappers' names",
                remedy="pass prefix= the place of one model",
            )
        out[clean] = tensor
    if out.keys() != found.keys():
        log.info("names of wrappers (DDP, FSDP, torch.compile) are left out of the export's names")
    return out


def _tops(tensors: Mapping[str, LogicalTensor]) -> str:
    tops = sorted({_first(t.path) for t in tensors.values()})
    return ", ".join(tops[:8]) + (f" and {len(tops) - 8} more" if len(tops) > 8 else "")


def _first(path: Path) -> str:
    return str(path[0])
