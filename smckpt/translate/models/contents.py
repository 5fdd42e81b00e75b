"""A checkpoint's model in Hugging Face's names. An export writes it, and `verify_hf` compares an
exported directory with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from smckpt.errors import TensorMismatchError, UsageError, errors_at, few
from smckpt.formats.names import CONFIG
from smckpt.formats.tensors import Block, TensorReader
from smckpt.storage import Access
from smckpt.translate.config import ModelConfig
from smckpt.translate.files import Target
from smckpt.translate.models.comparison import Comparison
from smckpt.translate.models.lora import LoraConfig
from smckpt.translate.models.model import (
    dropped_names,
    find_further,
    prove,
    refuse_unequal,
    target_of,
)
from smckpt.translate.models.model_source import ModelSource, Parallel, open_model
from smckpt.translate.prediction import further_layers, kept_layers, left_out_note
from smckpt.translate.ranks.pipeline import some
from smckpt.translate.ranks.translated import Translated, TranslatedSource, whole_tensors
from smckpt.translate.stream import ChunkSource, tied_names
from smckpt.translate.tables.families import find_family
from smckpt.translate.tables.hub import HubTensor
from smckpt.translate.tables.pieces import dropped, prove_copies
from smckpt.translate.tables.table import Family

__all__ = [
    "HUB",
    "MODULE",
    "ExportContents",
    "find_contents",
    "head_notes",
    "kept_of_family",
    "renamed",
    "whole_tensors",
]

Kept: TypeAlias = Mapping[str, frozenset[str]]  # dtype of a model → targets that keep their own
LOW = ("bfloat16", "float16")
HUB, MODULE = "hub", "module"  # the names of released checkpoints, or those of the state dict


@dataclass(frozen=True)
class ExportContents:
    """The tensors to export, and their source.

    left_out: names that are not written. naming: HUB or MODULE. layout: the layout that was
    translated, or None. adapter: the adapter's config, if this is an adapter. identity: of the
    commit. vocabulary: how many rows of the vocabulary are written, and how many are stored. kept:
    targets that keep their own dtype under a cast. format: of the source. predicting: how many
    layers that predict further tokens there are; None: it is not known. further: names of their
    tensors, which transformers' model does not have. step: of the training, if it is known."""

    source: ChunkSource
    targets: Sequence[Target]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    naming: str = HUB
    layout: str | None = None
    adapter: LoraConfig | None = None
    identity: str = ""
    vocabulary: tuple[int, int] = (0, 0)
    kept: Kept = field(default_factory=dict)
    source_format: str = "smckpt"
    predicting: int | None = None
    further: frozenset[str] = frozenset()
    step: int | None = None


def find_contents(
    access: Access, checkpoint: Any, prefix: str | None, settings: ModelConfig | None,
    given: Parallel, naming: str, mtp: str | None, comparison: Comparison,
) -> ExportContents:  # fmt: skip
    """The model of a checkpoint, or of the files of ranks, in its own dtypes.

    Args:
        naming: HUB or MODULE. HUB gives module names if the hub's are not known, and a note that
            says why.
        mtp: as of `kept_layers`.
        comparison: with the model of `settings`; it gives the hub's names.

    Raises:
        as `export_hf`.
    """
    source = open_model(access, checkpoint, prefix, settings, given, packed=naming == HUB)
    with errors_at(source.reader.url):
        if source.cut:
            made = _translated(source, settings, naming, mtp)
        else:
            made = _named(source.reader, settings, mtp, naming, comparison)
    return replace(
        made, source_format=source.format, identity=source.identity,
        notes=(*made.notes, *source.notes), step=source.step,
        left_out=(*made.left_out, *source.left_out),
    )  # fmt: skip


def doubtful_notes(made: ExportContents, settings: ModelConfig | None) -> tuple[str, ...]:
    """Notes on what may be read as other numbers: half precision of two kinds, and experts whose
    order on disk transformers 5 tells by their shape, and cannot."""
    halves = {target.dtype: target.name for target in made.targets if target.dtype in LOW}
    notes = []
    if len(halves) > 1:
        notes.append(
            f"{halves[LOW[0]]} is in {LOW[0]}, and {halves[LOW[1]]} in {LOW[1]}. Models have one "
            "of them: a file's header may be wrong, or the files are those of two models"
        )
    kind = None if settings is None else settings.values["model_type"]
    if kind == "qwen3_vl_moe" and made.naming == HUB:
        notes += [
            f"{target.name} is square: transformers 5 tells by its shape whether to transpose it, "
            "and reads it in the wrong order; transformers 4 and vLLM read it right"
            for target in made.targets
            if ".experts." in target.name and target.shape[-1] == target.shape[-2]
        ][:1]
    return tuple(notes)


def kept_of_family(settings: ModelConfig | None, targets: Sequence[Target]) -> Kept:
    """The targets that keep float32, from the family's table."""
    family = find_family(settings.values["model_type"]) if settings is not None else None
    if family is None:
        return {}
    patterns = {
        "bfloat16": family.fp32, "float16": (*family.fp32, *family.fp32_beside_float16),
    }  # fmt: skip
    return {
        dtype: frozenset(t.name for t in targets if any(re.search(p, t.name) for p in found))
        for dtype, found in patterns.items()
    }


def _translated(
    source: ModelSource, settings: ModelConfig | None, naming: str, mtp: str | None
) -> ExportContents:
    """Hugging Face's tensors of a layout's. Only headers are read, and tensors that must be equal.

    Raises:
        as `prove` and `refuse_unequal`.
    """
    reader, given = source.reader, source.given
    if naming == MODULE:
        raise UsageError(
            "naming='module' keeps the names of the state dict, and a tensor-parallel layout has "
            "no whole tensors under them",
            remedy="leave ExportOptions(naming=) out",
        )
    found, kept, released = find_further(reader, settings, mtp)
    whole_layers = whole_tensors(some(reader, found)) if released else []
    translated = [n for n in reader.held if n not in found or (kept and not released)]
    proof = prove(
        some(reader, translated), settings, given.layout, source.degrees, given.padded_vocab_size,
        predicting=0 if released else kept, facts=source.facts,
    )  # fmt: skip
    notes = (*proof.notes, *refuse_unequal(reader, proof.side, given.allow_equal_ranks))
    notes += () if kept else left_out_note(found)
    dtypes = {key: held.dtype for held in reader.held.values() for key in held.keyed}
    hub, tensors = proof.hub, TranslatedSource(reader)
    targets = [target_of(k, proof.side, hub, proof.blocks[k], dtypes) for k in hub.shapes]
    left_out = tied_names(tensors, targets) if proof.tied_head else ()
    targets = [target for target in targets if target.name not in left_out] + whole_layers
    further = further_layers((t.name for t in targets), _family(settings), settings)
    if names := dropped_names(reader.held, proof.layout, proof.side.dims):
        notes += (
            f"{few(names, 1)} have no place in Hugging Face's model and are left out; if they are "
            "not zero, it does not compute what was trained",
        )
    return ExportContents(
        tensors, targets, left_out, notes, layout=proof.layout.name,
        vocabulary=(proof.side.dims.sizes["V"], proof.rows),
        kept=kept_of_family(settings, targets), predicting=kept, further=frozenset(further),
    )  # fmt: skip


def _family(settings: ModelConfig | None) -> Family | None:
    return None if settings is None else find_family(settings.values["model_type"])


def _named(
    reader: TensorReader, settings: ModelConfig | None, mtp: str | None, naming: str,
    comparison: Comparison,
) -> ExportContents:  # fmt: skip
    """Whole tensors, by the names of released checkpoints if they are asked for and known. Layers
    that predict further tokens have these names, or are refused."""
    source, family = TranslatedSource(reader), _family(settings)
    found = further_layers(reader.held, family, settings)
    predicting = kept_layers(found, family, settings, mtp)
    everything = whole_tensors(reader)
    buffers = [t.name for t in everything if family is not None and dropped(family.hub, t.name)]
    everything = [target for target in everything if target.name not in buffers]
    targets = [target for target in everything if target.name not in found]
    further = [target for target in everything if target.name in found and predicting]
    comparison.further({t.name: t.shape for t in further}, predicting, reader.url)
    notes = list(head_notes([t.name for t in targets], settings))
    notes += () if predicting else left_out_note(found)
    if buffers:  # of older releases
        notes.append(f"{few(buffers, 1)} hold no weights, and are left out")
    kept = kept_of_family(settings, [*targets, *further])
    if naming == HUB:
        fit = comparison.names(targets, reader.url)
        if isinstance(fit, str):
            naming = MODULE
            if settings is not None:
                notes.append(f"the names are those of the state dict: {fit}")
        elif fit is not None:
            targets = targets if fit.hub is None else renamed(fit.hub, targets)
            kept = {  # according to transformers, by names in memory
                dtype: frozenset(
                    target.name
                    for target in (*targets, *further)
                    if any(fit.keeps(block.source.name, dtype) for block in target.blocks)
                )
                for dtype in LOW
            }
    left_out: tuple[str, ...] = ()
    if settings is not None and settings.ties_embeddings:
        left_out = tied_names(source, targets)
        targets = [target for target in targets if target.name not in left_out]
    return ExportContents(
        source, [*targets, *further], left_out, tuple(notes), naming, kept=kept,
        predicting=predicting if family is not None and family.predicts else None,
        further=frozenset(target.name for target in further),
    )  # fmt: skip


def renamed(hub: Sequence[HubTensor], targets: Sequence[Translated]) -> list[Translated]:
    """The hub's tensors, made from those of a state dict, and proven before anything is read.
    Tensors that the model does not have keep their names."""
    stored = {target.name: target for target in targets}
    shapes = {tensor.name: tensor.shape for tensor in hub}
    parts = {tensor.name: tensor.parts for tensor in hub}
    used = {name for tensor in hub for name, _ in tensor.parts}
    prove_copies({name: stored[name].shape for name in used}, shapes, parts)
    out = []
    for tensor in hub:
        dtypes = {stored[name].dtype for name, _ in tensor.parts}
        if len(dtypes) != 1:
            raise TensorMismatchError(
                f"{tensor.name} would be made from parts of different dtypes: {sorted(dtypes)}",
                remedy="save all parts in one dtype, or pass ExportOptions(naming='module')",
            )
        (dtype,) = dtypes
        keys = {name: stored[name].blocks[0].source for name, _ in tensor.parts}
        blocks = tuple(Block(keys[name], copy) for name, copy in tensor.parts)
        out.append(Translated(tensor.name, dtype, tensor.shape, dtype, blocks))
    return out + [target for target in targets if target.name not in used]


def head_notes(tensors: Sequence[str], settings: ModelConfig | None) -> tuple[str, ...]:
    """Notes on a model without a config, or without the head that it needs."""
    if settings is None:
        return (f"no config was given: put the model's {CONFIG} there before loading",)
    architectures = settings.values.get("architectures") or [""]
    heads = any("head" in name or name.startswith("embed_out") for name in tensors)
    if settings.ties_embeddings is False and architectures[0].endswith("ForCausalLM") and not heads:
        return (
            f"{architectures[0]} with untied embeddings, but no output head is in the checkpoint: "
            "from_pretrained would make a random one",
        )
    return ()
