"""Find which tensors of a checkpoint are the model's, and their Hugging Face names."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from smckpt.errors import KeysMismatchError, UsageError
from smckpt.layout.entries import DTYPES, Path
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Copy, Strided

if TYPE_CHECKING:
    from smckpt.checkpoint.catalogue import LogicalTensor

__all__ = [
    "HubTensor",
    "Named",
    "Tie",
    "find_ties",
    "model_tensors",
    "places_of_models",
    "prefix_remedy",
    "refuse_peft",
    "stage_tensors",
    "unwrapped",
]

log = logging.getLogger("smckpt")

# Parts of a name that wrappers add: torch.compile, FSDP1, activation checkpointing, Lightning's
# strategies.
_WRAPPERS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)
_DDP = "module"  # DDP's, only at the beginning of all names
# The prefix of all names if the model is the attribute `model` of a trainer's module, such as
# Lightning's; and Megatron's names in NeMo's.
_INNER = re.compile(
    r"model\.(model|gpt_neox|transformer\.h|lm_head|embed_out|embedding\.word_embeddings"
    r"|decoder\.layers\.\d+\.(self_attention|mlp)\.linear_\w+)\."
)
# The embedding of a language model under its own names: Hugging Face's, Megatron's, torchtitan's.
_ROOT = re.compile(
    r"(.*?)(?:model\.(?:decoder\.|language_model\.)?embed_tokens|transformer\.(?:wte|word_embeddings)"
    r"|gpt_neox\.embed_in|embedding\.word_embeddings|tok_embeddings)\.weight"
)
# Not a trainer's own module: PEFT's, Megatron's beside a tower, ChatGLM's and Qwen-Omni's models.
_NO_ATTRIBUTES = ("", "base_model", "language_model", "transformer", "thinker")
T = TypeVar("T")

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

    def to_json(self) -> list[Any]:
        parts = [
            [name, c.sizes, c.source.start, c.source.strides, c.target.start, c.target.strides]
            for name, c in self.parts
        ]
        return [self.name, self.shape, parts]

    @classmethod
    def from_json(cls, body: list[Any]) -> HubTensor:
        name, shape, parts = body
        return cls(name, tuple(shape), tuple(_part(*part) for part in parts))


def _part(
    name: str, sizes: list[int], start: int, strides: list[int], at: int, to: list[int]
) -> tuple[str, Copy]:
    grid = tuple(sizes)
    return name, Copy(Strided(grid, start, tuple(strides)), Strided(grid, at, tuple(to)))


@dataclass(frozen=True)
class Tie:
    """Two names that the config says are one tensor; `left_out` is not exported."""

    kept: str
    left_out: str


class Named(Protocol):
    """A checkpoint of ours or of others: tensors by logical name, and the places of optimizers."""

    @property
    def url(self) -> str: ...

    @property
    def logical(self) -> Mapping[str, LogicalTensor]: ...

    @property
    def optimizers(self) -> Iterable[str]: ...


def model_tensors(
    catalogue: Named, prefix: str | None, *, peft: bool = False
) -> dict[str, LogicalTensor]:
    """Map each name in the export to its tensor.

    Args:
        prefix: the dotted place of the model in the saved state dict; "" for the whole of it. None:
            the key "model", or the only part that is not an optimizer.
        peft: expect a PEFT model's names.

    Raises:
        UsageError: the place is ambiguous (the message names the candidates), or holds an adapter.
        KeysMismatchError: nothing is saved there.
    """
    tensors = _outside_optimizers(catalogue)
    if prefix is None:
        prefix = _find_prefix(tensors, catalogue.url)
        if not prefix:  # the model is at the top, and what else is there is nested
            tensors = {name: t for name, t in tensors.items() if len(t.path) == 1}
    lead = f"{prefix}." if prefix else ""
    found = {name[len(lead) :]: t for name, t in tensors.items() if name.startswith(lead)}
    if not found:
        raise KeysMismatchError(
            f"no tensor's name starts with {lead!r}; the state dict has {_tops(tensors)}",
            remedy=prefix_remedy(tensors),
            path=catalogue.url,
        )
    found = unwrapped(found)
    if not peft:
        refuse_peft(found, catalogue.url)
    return found


def refuse_peft(names: Iterable[str], where: str) -> None:
    """Raise UsageError if the names are those of a PEFT model."""
    if any(name.startswith("base_model.model.") for name in names):
        raise UsageError(
            "the names are those of a PEFT model, not of a transformers model",
            remedy='pass lora="adapter" or lora="merge", with lora_config=', path=where,
        )  # fmt: skip


def stage_tensors(catalogue: Named, prefix: str | None) -> dict[str, LogicalTensor]:
    """As `model_tensors`, of a checkpoint in pipeline stages. If a stage has several chunks, under
    the keys model0, model1, … or in a list, their names begin with the chunk's number."""
    tops = {str(tensor.path[0]) for tensor in _outside_optimizers(catalogue).values()}
    keys = [f"model{number}" for number in range(len(tops))]
    keys = [key for key in keys if key in tops]
    if prefix is not None or len(keys) < 2:
        return model_tensors(catalogue, prefix)
    return {
        f"{key.removeprefix('model')}.{name}": tensor
        for key in keys
        for name, tensor in model_tensors(catalogue, key).items()
    }


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


def prefix_remedy(names: Iterable[str]) -> str:
    """What to do where it is not known which of the names are the model's."""
    places = [place for place in places_of_models(names) if place]
    named = " or ".join(map(repr, places[:8]))
    return "pass prefix= the place of the model in the saved state dict" + (
        f": {named}" if places else ""
    )


def places_of_models(names: Iterable[str]) -> list[str]:
    """The dotted places in which something looks like a language model: what is before the name of
    its embedding. "" for the top."""
    found = (_ROOT.fullmatch(name) for name in names)
    return sorted({match[1].removesuffix(".") for match in found if match})


def _outside_optimizers(catalogue: Named) -> dict[str, LogicalTensor]:
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
    nested = {top: held for top, held in by_top.items() if len(held[0].path) > 1}
    if len(nested) < len(by_top) and not any(map(_like_a_model, nested.values())):
        return ""
    candidates = [top for top, held in by_top.items() if _like_a_model(held)]
    if len(candidates) == 1:
        (top,) = candidates
        inner = any(len(t.path) > 2 and t.path[1] == "model" for t in by_top[top])
        return f"{top}.model" if inner else top  # one object that holds a model and more
    raise UsageError(
        f"the model could be any of the keys {sorted(candidates)} of the saved state dict"
        if candidates
        else f"no key of the saved state dict looks like a model: it has {_tops(tensors)}",
        remedy=prefix_remedy(tensors),
        path=url,
    )


def _like_a_model(held: list[LogicalTensor]) -> bool:
    """Whether tensors look like a model: floating tensors, without an optimizer's `state`, nested
    or with dotted keys (`state.<parameter>.<moment>`)."""
    for path in (tensor.path for tensor in held):
        dotted = ".".join(map(str, path)).split(".")
        if dotted[1:2] == ["state"] and (len(path) > 2 or len(dotted) > 3):
            return False
    return any("float" in DTYPES[t.dtype].name for t in held)


def unwrapped(found: Mapping[str, T]) -> dict[str, T]:
    """The tensors by names without the parts that wrappers and trainers' modules add.

    Raises:
        UsageError: two tensors would then have one name.
    """
    out: dict[str, T] = {}
    outer = _outer_parts(found)
    for name, tensor in found.items():
        clean = ".".join(_bare(name)[outer:])
        if clean in out:
            raise UsageError(
                f"without the names of wrappers, {name} and another tensor are both called {clean}",
                remedy="pass prefix= the place of one model",
            )
        out[clean] = tensor
    if out.keys() != found.keys():
        log.info("the export's names leave out the names of wrappers (DDP, FSDP, torch.compile)")
    return out


def _outer_parts(found: Iterable[str]) -> int:
    """How many parts at the beginning of all names are those of wrappers and trainers' modules, in
    any order: DDP of a trainer's module, a compiled DDP."""
    names = {".".join(_bare(name)) for name in found}
    count = 0
    while names and (
        all(name.startswith(f"{_DDP}.") for name in names)
        or (all(name.startswith("model.") for name in names) and any(map(_INNER.match, names)))
        or _is_attribute(names)
    ):
        names = {name.partition(".")[2] for name in names}
        count += 1
    return count


def _is_attribute(names: Collection[str]) -> bool:
    """Whether all names are those of one model that is an attribute of a trainer's own module."""
    places = places_of_models(names)
    if len(places) != 1 or places[0].partition(".")[0] in _NO_ATTRIBUTES:
        return False
    return all(name.startswith(f"{places[0]}.") for name in names)


def _bare(name: str) -> list[str]:
    return [part for part in name.split(".") if part not in _WRAPPERS]


def _tops(tensors: Mapping[str, LogicalTensor]) -> str:
    tops = sorted({_first(t.path) for t in tensors.values()})
    return ", ".join(tops[:8]) + (f" and {len(tops) - 8} more" if len(tops) > 8 else "")


def _first(path: Path) -> str:
    return str(path[0])
