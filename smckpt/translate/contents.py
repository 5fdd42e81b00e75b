"""A checkpoint's model in Hugging Face's names. An export writes it, and `verify_hf` compares an
exported directory with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from smckpt.checkpoint.catalogue import Catalogue, LogicalTensor, open_catalogue
from smckpt.errors import TensorMismatchError, UsageError
from smckpt.layout.containers import FACTS
from smckpt.storage import Access
from smckpt.translate.arguments import check_counts
from smckpt.translate.checkpoint_tensors import (
    CheckpointTensors,
    degrees_of,
    has_parts_of_ranks,
    stages_of,
)
from smckpt.translate.comparison import Comparison
from smckpt.translate.compile import Block, prove_copies
from smckpt.translate.config import CONFIG, ModelConfig
from smckpt.translate.degrees import Degrees
from smckpt.translate.detect import choose_layout, looks_packed, looks_transformed
from smckpt.translate.families import find_family
from smckpt.translate.family import Family
from smckpt.translate.foreign import ForeignCheckpoint
from smckpt.translate.logical_tensors import LogicalTensors
from smckpt.translate.lora import LoraConfig
from smckpt.translate.meta_model import Fit
from smckpt.translate.model import model_dims, to_hub
from smckpt.translate.names import HubTensor, model_tensors, refuse_peft, stage_tensors
from smckpt.translate.pipeline import merged
from smckpt.translate.prediction import DROP, further_layers, kept_layers, left_out_note
from smckpt.translate.quantized import dequantized
from smckpt.translate.rank_copies import refuse_equal_ranks
from smckpt.translate.rank_files import TensorReader
from smckpt.translate.rank_sources import (
    RankFilesFound,
    open_hub_directory,
    open_ranks,
    open_source,
)
from smckpt.translate.source_facts import EP, PP, TP, SourceFacts
from smckpt.translate.stream import ChunkSource, tied_names
from smckpt.translate.table import TensorLayout
from smckpt.translate.targets import Target
from smckpt.translate.translated import Translated, TranslatedSource, whole_tensors

__all__ = [
    "HUB",
    "MODULE",
    "ExportContents",
    "GivenLayout",
    "find_contents",
    "head_notes",
    "kept_of_family",
    "renamed",
    "whole_tensors",
]

Kept: TypeAlias = Mapping[str, frozenset[str]]  # dtype of a model → targets that keep their own
LOW = ("bfloat16", "float16")
HUB, MODULE = "hub", "module"  # the names of released checkpoints, or those of the state dict
_VALUE_HEAD = re.compile(r"v_head\.(?:summary\.)?(?:weight|bias)")
_UNKNOWN_ORDER = (
    "neither the files nor their names say which rank each is of: they were read in the order in "
    "which they were passed"
)


@dataclass(frozen=True)
class ExportContents:
    """The tensors to export, and their source.

    left_out: names that are not written. naming: HUB or MODULE. layout: the layout that was
    translated, or None. adapter: the adapter's config, if this is an adapter. identity: of the
    commit. vocabulary: how many rows of the vocabulary are written, and how many are stored. kept:
    targets that keep their own dtype under a cast. format: of the source. predicting: how many
    layers that predict further tokens there are; None: it is not known. further: names of their
    tensors, which transformers' model does not have."""

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


@dataclass(frozen=True)
class GivenLayout:
    """The arguments of `export_hf` about a tensor-parallel layout."""

    layout: str | TensorLayout | None = None
    tp: int | None = None
    ep: int | None = None
    etp: int | None = None
    padded_vocab_size: int | None = None
    pp: int | None = None
    vpp: int | None = None
    mtp: str | None = DROP  # as in `kept_layers`
    equal_ranks: bool = False  # ranks may hold the same

    @property
    def given(self) -> dict[str, Any]:
        """Those that are not the defaults, by the names of `export_hf`; None: not given."""
        own = {**vars(self), "mtp": None if self.mtp == DROP else self.mtp}
        own["allow_equal_ranks"] = own.pop("equal_ranks") or None
        return own

    @property
    def degrees(self) -> Degrees:
        tp, ep = (1 if degree is None else degree for degree in (self.tp, self.ep))
        return Degrees.of(tp, ep, self.etp)

    def __post_init__(self) -> None:
        check_counts(**{n: v for n, v in (("pp", self.pp), ("vpp", self.vpp)) if v is not None})

    def refuse_chunks(self, where: str) -> None:
        """Raise UsageError if chunks of pipeline stages are given although there are no stages."""
        if self.vpp is not None:
            raise UsageError(
                f"vpp={self.vpp}, but the model is not in pipeline stages",
                remedy="leave vpp= out, or pass pp=", path=where,
            )  # fmt: skip

    def refuse_degrees(self, where: str) -> None:
        """Raise UsageError if degrees are given although the names are Hugging Face's own."""
        given = (self.tp, self.ep, self.etp, self.padded_vocab_size, self.pp, self.vpp)
        if any(value is not None for value in given):
            raise UsageError(
                "tp=, ep=, etp=, padded_vocab_size=, pp= or vpp= are given, but the names are "
                "Hugging Face's own",
                remedy="leave them out, or pass layout=",
                path=where,
            )


def find_contents(
    access: Access, checkpoint: Any, prefix: str | None, settings: ModelConfig | None,
    said: GivenLayout, naming: str, comparison: Comparison,
) -> ExportContents:  # fmt: skip
    """The model of a checkpoint, or of the files of ranks, in its own dtypes.

    Args:
        naming: HUB or MODULE. HUB gives module names if the hub's are not known, and a note that
            says why.
        comparison: with the model of `settings`; it gives the hub's names.

    Raises:
        as `export_hf`.
    """
    family = settings.values["model_type"] if settings is not None else None
    source = open_source(checkpoint, access)
    if isinstance(source, RankFilesFound):
        source = replace(source, prefix=prefix)
        made = _of_files(source, settings, said, naming, comparison)
        notes = made.notes if source.order_is_known else (*made.notes, _UNKNOWN_ORDER)
        return replace(made, source_format=source.format, notes=notes)
    if source is not None:
        return _of_foreign(source, prefix, settings, said, naming, comparison)
    if (released := open_hub_directory(checkpoint, access)) is not None:
        said.refuse_degrees(released.url)
        reader = dequantized(released, settings)
        made = _named(reader, settings, said, naming, comparison)
        return replace(made, source_format="a Hugging Face directory")
    catalogue = open_catalogue(access.open(checkpoint))
    if (pp := stages_of(catalogue, said.pp)) > 1:
        return replace(
            _of_stages(catalogue, pp, prefix, settings, said, naming, comparison),
            identity=catalogue.identity,
        )
    said.refuse_chunks(catalogue.url)
    tensors = model_tensors(catalogue, prefix)
    _refuse_parts(catalogue, tensors)
    packed = naming == HUB and looks_packed(tensors, family)
    apart = said.layout is None and has_parts_of_ranks(catalogue, tensors)
    if said.layout is not None or packed or apart or looks_transformed(tensors):
        degrees = degrees_of(catalogue, said.tp, said.ep, said.etp)
        reader = CheckpointTensors(catalogue, tensors, degrees)
        reader.refuse_unlike_replicas()
        if not said.equal_ranks:
            refuse_equal_ranks([reader], degrees)
        made = _translated(reader, settings, said, degrees, naming)
    else:
        said.refuse_degrees(catalogue.url)
        made = _named(LogicalTensors(catalogue, tensors), settings, said, naming, comparison)
    return replace(made, identity=catalogue.identity)


def _refuse_parts(catalogue: Catalogue, tensors: Mapping[str, LogicalTensor]) -> None:
    """Refuse weights of a class that holds several tensors: none of them alone has its values."""
    saved = catalogue.objects(min(catalogue.object_ranks))
    above = {
        key.removesuffix(FACTS): value
        for key, (path, value) in saved.items()
        if path[-1:] == (FACTS,)
    }
    names = {tensor.name for tensor in tensors.values()}
    for start, facts in above.items():
        if any(name.startswith(start) for name in names):
            raise UsageError(
                f"{start[:-1]} is a {facts.get('class')}, which holds several tensors; an export "
                "writes tensors with values of their own",
                remedy="load it into the model, dequantise it there (its class has dequantize()), "
                "save that and export it",
                path=catalogue.url,
            )


def _of_stages(
    catalogue: Catalogue, pp: int, prefix: str | None, settings: ModelConfig | None,
    said: GivenLayout, naming: str, comparison: Comparison,
) -> ExportContents:  # fmt: skip
    """A checkpoint whose ranks are in pipeline stages."""
    tensors = stage_tensors(catalogue, prefix)
    degrees = degrees_of(catalogue, said.tp, said.ep, said.etp)
    stages = [CheckpointTensors(catalogue, tensors, degrees, stage) for stage in range(pp)]
    for stage in stages:
        stage.refuse_unlike_replicas()
    if not said.equal_ranks:
        refuse_equal_ranks(stages, degrees)
    reader = merged(stages, _layers(settings), said.vpp, catalogue.url)
    if said.layout is None and degrees.ranks == 1 and not looks_transformed(reader.held):
        return _named(reader, settings, said, naming, comparison)
    return _translated(reader, settings, said, degrees, naming)


def _layers(settings: ModelConfig | None) -> int | None:
    """How many layers the config's model has."""
    if settings is None:
        return None
    family = find_family(settings.values["model_type"])
    values = settings.values if family is None else family.config(settings.values)
    found = values.get("num_hidden_layers")
    return found if isinstance(found, int) else None


def _of_foreign(
    checkpoint: ForeignCheckpoint, prefix: str | None, settings: ModelConfig | None,
    said: GivenLayout, naming: str, comparison: Comparison,
) -> ExportContents:  # fmt: skip
    """A checkpoint that others wrote, with tensors of all ranks."""
    if said.pp not in (None, 1):
        raise UsageError(
            f"pp={said.pp}, but such a checkpoint has the tensors of all stages by one name each",
            remedy="leave pp= out", path=checkpoint.url,
        )  # fmt: skip
    said.refuse_chunks(checkpoint.url)
    family = settings.values["model_type"] if settings is not None else None
    reader = checkpoint.reader(model_tensors(checkpoint, prefix))
    packed = naming == HUB and looks_packed(reader.held, family)
    if said.layout is not None or packed or looks_transformed(reader.held):
        facts = checkpoint.model_facts
        made = _translated(reader, settings, said, said.degrees, naming, facts)
    else:
        said.refuse_degrees(checkpoint.url)
        made = _named(reader, settings, said, naming, comparison)
    return replace(made, source_format=checkpoint.format)


def _of_files(
    files: RankFilesFound, settings: ModelConfig | None, said: GivenLayout, naming: str,
    comparison: Comparison,
) -> ExportContents:  # fmt: skip
    """The files of ranks, or one file with a whole model by Hugging Face's names."""
    if settings is not None:
        for facts in files.facts:
            facts.compare_config(settings)
    told = _degrees_of_files(said, files)
    if said.pp not in (None, files.pp or said.pp):
        raise UsageError(
            f"pp={said.pp}, but there are {files.pp} pipeline stages", remedy="leave pp= out",
            path=files.url,
        )  # fmt: skip
    pp = told.pp or 1
    if pp == 1 or files.alone:
        said.refuse_chunks(files.url)
    reader = open_ranks(
        files, told.degrees, pp, _layers(settings), said.vpp, equal_ranks=said.equal_ranks
    )
    refuse_peft(reader.held, files.url)
    if told.degrees.ranks == 1 and told.layout is None and not looks_transformed(reader.held):
        family = settings.values["model_type"] if settings is not None else None
        if settings is None or find_family(family or "") is None or not _fits(reader, settings):
            return _named(reader, settings, said, naming, comparison)
    return _translated(reader, settings, told, told.degrees, naming, files.facts)


def _degrees_of_files(said: GivenLayout, files: RankFilesFound) -> GivenLayout:
    """The degrees that are given, or that the names of the files tell, or else the files."""
    tp, pp, ep = said.tp or files.tp, said.pp or files.pp, said.ep or files.ep
    inside = [files.degree(name) or 1 for name in (TP, PP, EP)]
    if (tp, pp, ep) == (None, None, None) and math.prod(inside) == len(files.files):
        tp, pp, ep = inside
    return replace(said, tp=tp, pp=pp, ep=ep)


def _fits(reader: TensorReader, settings: ModelConfig) -> bool:
    """Whether the names fit a tensor-parallel layout of one rank."""
    try:
        choose_layout(reader.held, model_dims(settings, reader.url), None, 1, reader.url)
    except UsageError:
        return False
    return True


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


def _kept_of_model(fit: Fit, targets: Sequence[Translated]) -> Kept:
    """The targets that keep float32, according to transformers, by names in memory."""
    return {
        dtype: frozenset(
            target.name
            for target in targets
            if any(fit.keeps(block.source.name, dtype) for block in target.blocks)
        )
        for dtype in LOW
    }


def _translated(
    reader: TensorReader,
    settings: ModelConfig | None,
    said: GivenLayout,
    degrees: Degrees,
    naming: str,
    facts: Sequence[SourceFacts] = (),
) -> ExportContents:
    if naming == MODULE:
        raise UsageError(
            "naming='module' keeps the names of the state dict, and a tensor-parallel layout has "
            "no whole tensors under them",
            remedy="leave naming= out",
            path=reader.url,
        )
    _refuse_without_scales(reader)
    made = to_hub(reader, settings, said.layout, degrees, said.padded_vocab_size, said.mtp, facts)
    further = further_layers((t.name for t in made.targets), _family(settings), settings)
    return ExportContents(
        made.source, made.targets, made.left_out,
        made.notes + _lost_notes(made.without_place),
        layout=made.layout, vocabulary=made.vocabulary,
        kept=kept_of_family(settings, made.targets), predicting=made.predicting,
        further=frozenset(further),
    )  # fmt: skip


def _family(settings: ModelConfig | None) -> Family | None:
    return None if settings is None else find_family(settings.values["model_type"])


def _lost_notes(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names:
        return ()
    more = f" and {len(names) - 1} more" if names[1:] else ""
    return (
        f"{names[0]}{more} have no place in Hugging Face's model and are left out; if they are not "
        "zero, it does not compute what was trained",
    )


def _named(
    reader: TensorReader, settings: ModelConfig | None, said: GivenLayout, naming: str,
    comparison: Comparison,
) -> ExportContents:  # fmt: skip
    """Whole tensors, by the names of released checkpoints if they are asked for and known. Layers
    that predict further tokens have these names, or are refused."""
    _refuse_without_scales(reader)
    source, family = TranslatedSource(reader), _family(settings)
    value_head = [name for name in reader.held if _VALUE_HEAD.match(name)]
    found = further_layers(reader.held, family, settings)
    predicting = kept_layers(found, family, settings, said.mtp, reader.url)
    everything = [t for t in whole_tensors(reader) if t.name not in value_head]
    targets = [target for target in everything if target.name not in found]
    further = [target for target in everything if target.name in found and predicting]
    comparison.further({t.name: t.shape for t in further}, predicting, reader.url)
    notes = list(head_notes([t.name for t in targets], settings))
    notes += () if predicting else left_out_note(found)
    if value_head:
        notes.append(
            f"{', '.join(value_head)} are a value head (TRL's), for which Hugging Face's models "
            "have no place: they are left out"
        )
    kept = kept_of_family(settings, [*targets, *further])
    if naming == HUB:
        fit = comparison.names(targets, reader.url)
        if isinstance(fit, str):
            naming = MODULE
            if settings is not None:
                notes.append(f"the names are those of the state dict: {fit}")
        elif fit is not None:
            targets = targets if fit.hub is None else renamed(fit.hub, targets)
            kept = _kept_of_model(fit, [*targets, *further])
    left_out: tuple[str, ...] = ()
    if settings is not None and settings.ties_embeddings:
        left_out = tied_names(source, targets, reader.url)
        targets = [target for target in targets if target.name not in left_out]
    return ExportContents(
        source, [*targets, *further], (*left_out, *value_head), tuple(notes), naming, kept=kept,
        predicting=predicting if family is not None and family.predicts else None,
        further=frozenset(target.name for target in further),
    )  # fmt: skip


def _refuse_without_scales(reader: TensorReader) -> None:
    """Raise UsageError if weights are quantized and their scales are elsewhere."""
    if any("scale" in name or name.endswith((".SCB", ".absmax")) for name in reader.held):
        return
    for name, held in reader.held.items():
        if name.endswith(".weight") and held.dtype in ("int8", "float8_e4m3fn", "float8_e5m2"):
            raise UsageError(
                f"{name} is quantized to {held.dtype}, and no scales are beside it: its numbers "
                "mean nothing without them",
                remedy="export the state from before the weights were quantized, or with its "
                "scales in it",
                path=reader.url,
            )


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
                remedy="save all parts in one dtype, or pass naming='module'",
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
