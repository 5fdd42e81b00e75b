"""Names of trainers: of files, of the place of a model, and of what wrappers add to them."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TypeVar

from smckpt.errors import KeysMismatchError, UsageError, few
from smckpt.layout.entries import DTYPES, Path, dotted

if TYPE_CHECKING:
    from smckpt.checkpoint.reading.catalogue import LogicalTensor


log = logging.getLogger("smckpt")

# Names in a directory of transformers' or PEFT's. Both wrote `.bin` before safetensors; it is only
# read.
CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SINGLE_BIN = "pytorch_model.bin"
INDEX_BIN = "pytorch_model.bin.index.json"
ADAPTER_WEIGHTS, ADAPTER_WEIGHTS_BIN = "adapter_model.safetensors", "adapter_model.bin"

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
_PEFT = "base_model.model."  # PEFT's model, before all names of its base
# Not a trainer's own module: PEFT's, Megatron's beside a tower, ChatGLM's and Qwen-Omni's models.
_NO_ATTRIBUTES = ("", "base_model", "language_model", "transformer", "thinker")
T = TypeVar("T")

# The model's key in trainers' states; DeepSpeed's is "module", that of torch's tutorials the last.
_MODELS = ("model", "state_dict", "module", "model_state_dict")
# Megatron-LM's names before Megatron-core. ChatGLM has them without the first part.
_BEFORE_CORE = re.compile(
    r"(?:.*\.)?language_model\.(?:encoder|transformer)\.layers\.\d+"
    r"\.(?:self_)?attention\.query_key_value\.weight"
)
# A head beside a language model, of which Hugging Face's models have no place: TRL's, OpenRLHF's,
# trlX's and their like; `score` is that of a classifier.
_VALUE_HEAD = re.compile(
    r"(v_head|(?:value|critic|reward|rm|scalar|regression)(?:_head)?|score)"
    r"\.(?:(?:summary|dense|fc|linear|head|out|out_proj|\d+)\.)*(?:weight|bias)"
)
_HEADS = ("v_head", "value_head", "critic_head", "reward_head")  # of no other model
_MOST_OUTER = 64  # modules around a model: all names are read again for each
_CHUNK = re.compile(r"\d+\..+")
_OPTIMIZER = re.compile(r"(?:^|(.*?)\.)param_groups(?:\.|$)")


class Named(Protocol):
    """A checkpoint of ours or of others: tensors by logical name, and the places of optimizers."""

    @property
    def url(self) -> str: ...

    @property
    def logical(self) -> Mapping[str, LogicalTensor]: ...

    @property
    def optimizers(self) -> Iterable[str]: ...


def tensors_at(state: Named, prefix: str | None) -> dict[str, LogicalTensor]:
    """The tensors at the model's place, by their names there.

    Args:
        prefix: the dotted place of the model, from the top of the state or in the model that is
            found without it; "" for the whole of the state. None: a key that trainers use for a
            model, or else the only part that looks like one.

    Raises:
        UsageError: the place is ambiguous (the message names the candidates), or has names that
            are not read.
        KeysMismatchError: nothing is saved there.
    """
    tensors = _outside_optimizers(state)
    at_prefix = _find_prefix(tensors, state.url) if prefix is None else prefix
    found = _below(tensors, at_prefix)
    if (
        prefix is None and not at_prefix
    ):  # the model is at the top, and what else is there is nested
        found = {name: t for name, t in found.items() if len(t.path) == 1}
    elif prefix and (not found or len(places_of_models(found)) > 1):
        with suppress(UsageError):  # a place in the model that is found without it
            inner = ".".join(filter(None, (_find_prefix(tensors, ""), prefix)))
            found = _below(tensors, inner) or found
    if not found:
        raise KeysMismatchError(
            f"no tensor's name starts with {at_prefix + '.'!r}; the state has {_tops(tensors)}",
            remedy=prefix_remedy(tensors),
            path=state.url,
        )
    if old := next((name for name in found if _BEFORE_CORE.fullmatch(name)), None):
        raise UsageError(
            f"these are Megatron-LM's names before Megatron-core (its legacy models): {old}",
            remedy="convert it with Megatron-LM's tools/checkpoint/convert.py --model-type GPT "
            "--loader legacy --saver core, and pass what that writes",
            path=state.url,
        )
    return found


def _below(tensors: Mapping[str, T], at_prefix: str) -> dict[str, T]:
    lead = f"{at_prefix}." if at_prefix else ""
    return {name[len(lead) :]: t for name, t in tensors.items() if name.startswith(lead)}


def value_heads(names: Iterable[str], architectures: Collection[str]) -> list[str]:
    """The names of a value head (or a reward's) beside a language model. What may be a layer of
    another model counts only where the config's class is one that generates."""
    generates = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures)
    found = (_VALUE_HEAD.fullmatch(name) for name in names)
    return [match[0] for match in found if match and (generates or match[1] in _HEADS)]


def refuse_peft(names: Iterable[str], where: str) -> None:
    """Raise UsageError if the names are those of a PEFT model."""
    of_peft = [name for name in names if name.startswith(_PEFT)]
    if of_peft and any(".ia3_l" in name for name in of_peft):
        raise UsageError(
            "the state is of a PEFT model with IA3, and smckpt exports LoRA alone",
            remedy="load it with PEFT, and save it from there (save_pretrained, or "
            "merge_and_unload)",
            path=where,
        )
    if of_peft:
        raise UsageError(
            "the names are those of a PEFT model, not of a transformers model",
            remedy='pass an Adapter with lora="adapter" or lora="merge", and lora_config=',
            path=where,
        )


def stage_tensors(state: Named, prefix: str | None) -> dict[str, LogicalTensor]:
    """As `tensors_at`, of a pipeline stage. If it has several chunks, under the keys model0, …, or
    in a list, their names begin with the chunk's number."""
    tops = {str(tensor.path[0]) for tensor in _outside_optimizers(state).values()}
    keys = [key for number in range(len(tops)) if (key := f"model{number}") in tops]
    if prefix is not None or len(keys) < 2:
        return tensors_at(state, prefix)
    return {
        f"{key.removeprefix('model')}.{name}": tensor
        for key in keys
        for name, tensor in tensors_at(state, key).items()
    }


def prefix_remedy(names: Iterable[str]) -> str:
    """What to do where it is not known which of the names are the model's."""
    prefixes = [at_prefix for at_prefix in places_of_models(names) if at_prefix]
    named = " or ".join(map(repr, prefixes[:8]))
    return "pass prefix= the place of the model in the saved state dict" + (
        f": {named}" if prefixes else ""
    )


def places_of_models(names: Iterable[str]) -> list[str]:
    """The dotted places in which something looks like a language model: what is before the name of
    its embedding. "" for the top."""
    found = (_ROOT.fullmatch(name) for name in names)
    return sorted({match[1].removesuffix(".") for match in found if match})


def places_of_optimizers(names: Iterable[str]) -> frozenset[str]:
    """The dotted places of optimizers: what has `param_groups`."""
    found = map(_OPTIMIZER.match, names)
    return frozenset(match.group(1) or "" for match in found if match)


def _outside_optimizers(catalogue: Named) -> dict[str, LogicalTensor]:
    prefixes = [f"{at_prefix}." for at_prefix in catalogue.optimizers]
    return {
        name: tensor
        for name, tensor in catalogue.logical.items()
        if not any(name.startswith(at_prefix) for at_prefix in prefixes)
    }


def _find_prefix(tensors: Mapping[str, LogicalTensor], url: str) -> str:
    """The model's place: a key that trainers use; the top; the only place of a language model; the
    only key that holds what looks like a model."""
    if at_prefix := _known_path(tensors.values(), ()):
        return dotted(at_prefix)
    top = [name for name, tensor in tensors.items() if len(tensor.path) == 1]
    nested: dict[str, list[LogicalTensor]] = {}
    for tensor in tensors.values():
        if len(tensor.path) > 1:
            nested.setdefault(str(tensor.path[0]), []).append(tensor)
    models = sorted(key for key, held in nested.items() if _like_a_model(held))
    if top and (not models or "" in places_of_models(top)):
        return ""
    prefixes = {  # without the names that belong to the model itself: PEFT's, or a tower's sibling
        ".".join(itertools.takewhile(lambda part: part not in _NO_ATTRIBUTES, prefix.split(".")))
        for prefix in places_of_models(tensors)
    }
    if len(prefixes) == 1:
        return prefixes.pop()
    loose = [name for name in top if _like_a_model([tensors[name]])]
    if len(models) == 1 and not loose:
        held = nested[models[0]]
        return dotted(_known_path(held, held[0].path[:1]) or held[0].path[:1])
    raise UsageError(
        f"the model could be any of the keys {[*models, *sorted(loose)][:8]} of the saved state "
        "dict"
        if models or loose
        else f"no key of the saved state dict looks like a model: it has {_tops(tensors)}",
        remedy=prefix_remedy(tensors),
        path=url,
    )


def _known_path(tensors: Iterable[LogicalTensor], above: Path) -> Path:
    """The place below `above` that keys which trainers use for a model lead to; () without any."""
    held = [t for t in tensors if t.path[: len(above)] == above and len(t.path) > len(above) + 1]
    keys = {t.path[len(above)] for t in held}
    key = next((key for key in _MODELS if key in keys), None)
    return () if key is None else (_known_path(held, (*above, key)) or (*above, key))


def _like_a_model(held: list[LogicalTensor]) -> bool:
    """Whether tensors look like a model: floating tensors, without an optimizer's `state`, nested
    or with dotted keys (`state.<parameter>.<moment>`)."""
    for path in (tensor.path for tensor in held):
        dotted = ".".join(map(str, path)).split(".")
        if dotted[1:2] == ["state"] and (len(path) > 2 or len(dotted) > 3):
            return False
    return any("float" in DTYPES[t.dtype].name for t in held)


def unwrapped(found: Mapping[str, T], among: Collection[str] = ()) -> dict[str, T]:
    """The tensors by names without the parts that wrappers and trainers' modules add.

    Args:
        among: the names of the whole model, if these are those of a pipeline stage.

    Raises:
        UsageError: two tensors would then have one name.
    """
    if found and all(map(_CHUNK.fullmatch, found)):  # chunks of a pipeline stage
        chunks: dict[str, dict[str, T]] = {}
        for name, tensor in found.items():
            number, _, rest = name.partition(".")
            chunks.setdefault(number, {})[rest] = tensor
        among = {name.partition(".")[2] for name in among or found}
        return {
            f"{n}.{name}": t for n, c in chunks.items() for name, t in unwrapped(c, among).items()
        }
    among = among or found
    if not all(name.partition(".")[0] in _WRAPPERS for name in among):
        # one of several models is wrapped, and its wrapper is its place
        places, bare = (
            places_of_models(names) for names in (among, [".".join(_bare(name)) for name in among])
        )
        if len(bare) > 1 and "" in bare and "" not in places:
            return dict(found)
    out: dict[str, T] = {}
    # wrappers and trainers' modules may be in any order: DDP of a trainer's module, a compiled DDP
    names = {".".join(_bare(name)) for name in among if not _VALUE_HEAD.fullmatch(name)}
    outer = 0
    while (
        names
        and outer < _MOST_OUTER
        and (
            all(name.startswith(f"{_DDP}.") for name in names)
            or (all(name.startswith("model.") for name in names) and any(map(_INNER.match, names)))
            or _is_attribute(names)
        )
    ):
        names = {name.partition(".")[2] for name in names}
        outer += 1
    for name, tensor in found.items():
        clean = name if _VALUE_HEAD.fullmatch(name) else ".".join(_bare(name)[outer:])
        if clean in out:
            raise UsageError(
                f"without the names of wrappers, {name} and another tensor are both called {clean}",
                remedy="pass prefix= the place of one model",
            )
        out[clean] = tensor
    if out.keys() != found.keys():
        log.info("the export's names leave out the names of wrappers (DDP, FSDP, torch.compile)")
    return out


def _is_attribute(names: Collection[str]) -> bool:
    """Whether all names are those of one model that is an attribute of a trainer's own module."""
    above = {name.partition(_PEFT)[0] if _PEFT in name else "" for name in names}
    if above and all(above) and len(above) == 1:  # an adapter alone has no embedding
        return True
    prefixes = places_of_models(names)
    if len(prefixes) != 1 or prefixes[0].partition(".")[0] in _NO_ATTRIBUTES:
        return False
    return all(name.startswith(f"{prefixes[0]}.") for name in names)


def _bare(name: str) -> list[str]:
    return [part for part in name.split(".") if part not in _WRAPPERS]


def _tops(tensors: Mapping[str, LogicalTensor]) -> str:
    return few(sorted({str(t.path[0]) for t in tensors.values()}))
