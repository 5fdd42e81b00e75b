"""Megatron-core's distributed checkpoints (`torch_dist`): DCP, with layers and experts stacked."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from smckpt.checkpoint.records.sealed import strict_json
from smckpt.errors import CorruptCheckpointError, UsageError
from smckpt.formats.boxes import SavedBox, SavedTensor
from smckpt.formats.pickled import Inert
from smckpt.formats.source_facts import SourceFacts, facts_of_state
from smckpt.formats.source_files import Folder
from smckpt.formats.torch_archive import open_archive
from smckpt.layout.strided import Box

COMMON, _BACKEND = "common.pt", "metadata.json"
_SMALL = 1 << 20  # bytes
# Layers of one kind are one tensor whose first dimension counts them; so are experts, behind them.
_LAYERS = re.compile(r"((?:.*\.)?layers\.)((?!\d+\.).*)")
_EXPERTS = re.compile(r"(.*\.experts\.)experts\.(linear_fc[12]\.(?:weight|bias))")
# Parts of a fused tensor of the gated delta net, each saved as a tensor of its own.
_PARTS = ("query", "key", "value", "z", "beta", "alpha")
_PART = re.compile(rf"(.*\.self_attention\.(?:in_proj|conv1d)\.weight)\.({'|'.join(_PARTS)})")
_FUSED = re.compile(r"(.*)\.mlp\.linear_fc1\.layer_norm_(weight|bias)")
_FIRST = re.compile(r"(.*\.self_attention)\.linear_qkv\.layer_norm_(weight|bias)")
_BEFORE = MappingProxyType(
    {
        "pre_mlp_layernorm": "mlp.linear_fc1",
        "self_attention.q_layernorm": "self_attention.linear_q_up_proj",
        "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj",
    }
)  # a norm → the matrix into which Transformer Engine fuses it, where there is one
_NORM = re.compile(rf"(.*)\.({'|'.join(map(re.escape, _BEFORE))})\.(weight|bias)")
_OUTER = ("module.", "model.")
_OPTIMIZER = re.compile(r"((?:chained_\d+\.)?optimizer)\.")


def backend_of(folder: Folder) -> str | None:
    """How Megatron-core wrote a directory; None: it did not.

    Raises:
        UsageError: in a format that smckpt does not read.
    """
    if not {_BACKEND, COMMON} <= folder.files.keys():
        return None
    try:
        contents = strict_json(folder.read(_BACKEND, _SMALL).decode())
        backend = str(contents["sharded_backend"])
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptCheckpointError(
            "the file says no sharded_backend", remedy="fetch it again",
            path=folder.files[_BACKEND].path,
        ) from error  # fmt: skip
    if backend != "torch_dist":
        raise UsageError(
            f"this is a distributed checkpoint of Megatron-core in its format {backend}",
            remedy="load it in Megatron and save it with --ckpt-format torch_dist",
        )
    return backend


def facts_of(folder: Folder) -> dict[str, Any]:
    """What the common values tell of the run."""
    common = open_archive(folder.source, folder.files[COMMON]).root
    if not isinstance(common, Mapping):
        return {}
    facts = {"iteration": common.get("iteration")}
    arguments = common.get("args")
    if isinstance(arguments, Inert):
        for name in ("tensor", "pipeline", "expert"):
            facts[name] = arguments.field(f"{name}_model_parallel_size")
    return {name: value for name, value in facts.items() if isinstance(value, int)}


def model_facts_of(folder: Folder) -> tuple[SourceFacts, ...]:
    """What the common values say of the model."""
    record = folder.files[COMMON]
    return facts_of_state(open_archive(folder.source, record).root, record.path)


def optimizers_of(saved: Mapping[str, SavedTensor]) -> frozenset[str]:
    return frozenset(match.group(1) for name in saved if (match := _OPTIMIZER.match(name)))


def unstacked(saved: Mapping[str, SavedTensor]) -> dict[str, SavedTensor]:
    """The model's tensors as its own state dict has them, one for each layer and expert. Those of
    optimizers stay."""
    single: dict[str, SavedTensor] = {}
    model = [name for name in saved if not _OPTIMIZER.match(name)]
    for outer in _OUTER:  # NeMo's module around the model is in all names
        if model and all(name.startswith(outer) for name in model):
            cut = {name: name.removeprefix(outer) for name in model}
            optimizers = {name: tensor for name, tensor in saved.items() if name not in cut}
            own = {new: replace(saved[old], name=new, path=(new,)) for old, new in cut.items()}
            saved = own | optimizers
            break
    for name, tensor in saved.items():
        for layer in [tensor] if _OPTIMIZER.match(name) else _each(tensor, _LAYERS, "{0}{1}.{2}"):
            for one in _each(layer, _EXPERTS, "{0}{2}{1}"):
                if one.name in single:
                    raise CorruptCheckpointError(
                        f"{one.name} is in it twice, once in {name}",
                        remedy="use another checkpoint",
                    )
                single[one.name] = one
    out: dict[str, SavedTensor] = {}
    parts: dict[str, dict[str, SavedTensor]] = {}  # of fused tensors, one after the other
    for name, tensor in single.items():
        if (match := _PART.fullmatch(name)) and tensor.shape:
            parts.setdefault(match.group(1), {})[match.group(2)] = tensor
        else:
            out[name] = tensor
    for name, found in parts.items():
        boxes: list[SavedBox] = []
        at = 0
        for part in (found[word] for word in _PARTS if word in found):
            for saved_box in part.boxes:
                first, *rest = saved_box.box.offsets
                box = Box((at + first, *rest), saved_box.box.sizes)
                boxes.append(replace(saved_box, box=box))
            at += part.shape[0]
        one = next(iter(found.values()))
        out[name] = replace(
            one, name=name, path=(name,), shape=(at, *one.shape[1:]), boxes=tuple(boxes)
        )
    return {_named(name, out): tensor for name, tensor in out.items()}


def _named(name: str, all_names: Collection[str]) -> str:
    """By the names of Transformer Engine's spec. Megatron's local spec has modules of their own for
    some norms, and calls the norms before experts and before a gated delta net after matrices that
    are not there."""
    if match := _FUSED.fullmatch(name):
        layer, kind = match.groups()
        if f"{layer}.mlp.linear_fc1.weight" not in all_names:
            return f"{layer}.pre_mlp_layernorm.{kind}"
    elif match := _FIRST.fullmatch(name):
        layer, kind = match.groups()
        if f"{layer}.in_proj.weight" in all_names:
            return f"{layer}.in_proj.layer_norm_{kind}"
    elif match := _NORM.fullmatch(name):
        layer, norm, kind = match.groups()
        if f"{layer}.{_BEFORE[norm]}.weight" in all_names:
            return f"{layer}.{_BEFORE[norm]}.layer_norm_{kind}"
    return name


def _each(tensor: SavedTensor, pattern: re.Pattern[str], named: str) -> Iterator[SavedTensor]:
    """The tensors along its first dimension, where the name says that they are stacked; `named` of
    what is before and behind the number."""
    match = pattern.fullmatch(tensor.name)
    if match is None or not tensor.shape:
        yield tensor
        return
    boxes: list[list[SavedBox]] = [[] for _ in range(tensor.shape[0])]
    for saved in tensor.boxes:
        first, *offsets = saved.box.offsets
        count, *sizes = saved.box.sizes
        box = Box(tuple(offsets), tuple(sizes))
        if first + count > len(boxes):
            raise CorruptCheckpointError(
                f"{tensor.name} of the shape {tensor.shape} has a part at {saved.box.offsets}",
                remedy="use another checkpoint",
            )
        for index in range(count):
            boxes[first + index].append(replace(saved, box=box, inside=(*saved.inside, index)))
    for index, found in enumerate(boxes):
        before, after = match.groups()
        name = named.format(before, index, after)
        yield SavedTensor(name, (name,), tensor.dtype, tensor.shape[1:], tuple(found))
