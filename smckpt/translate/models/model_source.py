"""What a source is, where in it the model is, and under which names: `open_model`.

Exports, with an adapter and without, imports and `verify_hf` ask here.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from smckpt.checkpoint.reading.catalogue import Catalogue
from smckpt.checkpoint.reading.committed import open_any
from smckpt.errors import CheckpointError, UsageError, errors_at
from smckpt.formats.boxes import ForeignCheckpoint
from smckpt.formats.degrees import Degrees, check_counts, check_flags
from smckpt.formats.names import (
    refuse_peft,
    stage_tensors,
    tensors_at,
    unwrapped,
    value_heads,
)
from smckpt.formats.readers.checkpoint_tensors import (
    CheckpointTensors,
    LogicalTensors,
    degrees_of,
    has_parts_of_ranks,
    stages_of,
)
from smckpt.formats.readers.rank_sources import HUB_DIRECTORY, RankFilesFound, open_source
from smckpt.formats.source_facts import (
    EP,
    PP,
    TP,
    SourceFacts,
    config_beside,
    facts_of_values,
)
from smckpt.formats.source_files import Folder, SourceFiles
from smckpt.formats.tensors import TensorReader
from smckpt.layout.containers import FACTS
from smckpt.storage import Access
from smckpt.storage.urls import disk_path
from smckpt.translate.config import ModelConfig
from smckpt.translate.facts import compare_configs, compare_facts
from smckpt.translate.models.model import (
    HEADED,
    choose_layout,
    looks_packed,
    model_dims,
    unmatched,
)
from smckpt.translate.models.quantized import dequantized
from smckpt.translate.ranks.copied import refuse_equal_files, refuse_equal_ranks
from smckpt.translate.ranks.pipeline import merged, open_ranks, some
from smckpt.translate.tables.families import find_family
from smckpt.translate.tables.layouts import looks_transformed
from smckpt.translate.tables.table import TensorLayout

_SCALE = re.compile(r"[_.](?:weight_)?scales?(?:_inv)?$")
_RELEASED = re.compile(r"consolidated\b")  # Meta's and Mistral's, beside their params.json
_UNKNOWN_ORDER = (
    "neither the files nor their names say which rank each is of: they were read in the order in "
    "which they were passed"
)


@dataclass(frozen=True)
class Parallel:
    """How ranks share a model: those that wrote a source, where it does not record it; or those
    that an import writes, which take a layout and degrees.

    layout: the tensor-parallel layout: a name, or a `TensorLayout`. By default it is found from the
        tensors' names; names that fit several layouts are refused.
    tp: the tensor-parallel degree. By default the one recorded in the checkpoint, otherwise 1.
    ep: the expert-parallel degree, with the same default.
    etp: the degree at which experts are cut, if it is not tp: Megatron's
        `expert_tensor_parallel_size`. Rank r then has part r % etp of the experts of
        expert-parallel rank r // etp % ep.
    pp: pipeline-parallel degree, if files of ranks are in pipeline stages. Stages are outermost. A
        checkpoint and a directory of Megatron-LM record it.
    vpp: with pipeline stages, how many chunks each has, which take turns (Megatron's virtual
        pipeline). By default as many as are apart in the state: under the keys model0, model1, …,
        or in a list.
    padded_vocab_size: how many vocabulary rows the layout has, padding included. By default there
        may be as many as the config's vocab_size, or as many as trainers round that up to, and the
        tokenizer must not use the padding.
    allow_equal_ranks: two ranks may hold the same tensors. By default they are refused, because one
        rank's file is then a copy of another's; but experts that were all made from one (upcycled)
        are equal until they are trained.

    Raises:
        UsageError: a degree is not a whole number above 0.
    """

    layout: str | TensorLayout | None = None
    tp: int | None = None
    ep: int | None = None
    etp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    padded_vocab_size: int | None = None
    allow_equal_ranks: bool = False

    @classmethod
    def of(cls, value: Parallel | None, name: str = "parallel") -> Parallel:
        """The value of an argument. None: all is recorded in the source.

        Raises:
            UsageError: it is something else.
        """
        if not isinstance(value, (cls, type(None))):
            raise UsageError(f"{name}={value!r}", remedy="pass a Parallel, such as Parallel(tp=2)")
        return cls() if value is None else value

    @property
    def given(self) -> dict[str, Any]:
        """Each field; None: not given."""
        return {**vars(self), "allow_equal_ranks": self.allow_equal_ranks or None}

    @property
    def degrees(self) -> Degrees:
        tp, ep = (1 if degree is None else degree for degree in (self.tp, self.ep))
        return Degrees.of(tp, ep, self.etp)

    def __post_init__(self) -> None:
        counts = {**vars(self)}
        del counts["layout"], counts["allow_equal_ranks"]
        check_counts(**{name: count for name, count in counts.items() if count is not None})
        check_flags(allow_equal_ranks=self.allow_equal_ranks)

    def refuse_chunks(self) -> None:
        """Raise UsageError if chunks of pipeline stages are given although there are no stages."""
        if self.vpp is not None:
            raise UsageError(
                f"vpp={self.vpp}, but the model is not in pipeline stages",
                remedy="leave vpp= out, or pass pp=",
            )  # fmt: skip

    def refuse_degrees(self) -> None:
        """Raise UsageError if degrees are given although the names are Hugging Face's own."""
        given = (self.tp, self.ep, self.etp, self.padded_vocab_size, self.pp, self.vpp)
        if any(value is not None for value in given):
            raise UsageError(
                "tp=, ep=, etp=, padded_vocab_size=, pp= or vpp= are given, but the names are "
                "Hugging Face's own",
                remedy="leave them out, or pass layout=",
            )


@dataclass(frozen=True)
class ModelSource:
    """A model where it was found.

    reader: its tensors. cut: they have the names and shapes of a layout, at `degrees`; otherwise
    each is whole, under a name of the model's. given: the caller's arguments, with the degrees that
    the source tells. facts: what it says of the model. format: of the source. identity: of the
    commit. step: of the training, if it is known. left_out: names that are not the
    model's."""

    reader: TensorReader
    degrees: Degrees
    given: Parallel
    format: str = "smckpt"
    cut: bool = False
    facts: tuple[SourceFacts, ...] = ()
    identity: str = ""
    notes: tuple[str, ...] = ()
    step: int | None = None
    left_out: tuple[str, ...] = ()

    @property
    def is_hub(self) -> bool:
        """Whether it is a directory of Hugging Face's."""
        return self.format == HUB_DIRECTORY


def open_model(
    access: Access, checkpoint: Any, prefix: str | None, settings: ModelConfig | None,
    given: Parallel, *, packed: bool = True, peft: bool = False,
) -> ModelSource:  # fmt: skip
    """Find the model in what is at `checkpoint`: a path, a URL, or the files of all ranks.

    Args:
        prefix: as of `tensors_at`.
        packed: experts that are packed as in memory count as a layout, if releases have them one by
            one.
        peft: expect a PEFT model's names.

    Raises:
        as `export_hf`.
    """
    found = open_source(checkpoint, access) or open_any(access.open(checkpoint))
    opener = _Opener(prefix, settings, given, packed and not peft)
    with errors_at(found.url):
        if isinstance(found, RankFilesFound):
            made = opener.files(found)
        elif isinstance(found, ForeignCheckpoint):
            made = opener.foreign(found)
        else:
            made = opener.ours(found)
    if peft:
        return made
    made = _compared(made, settings, _beside(access, checkpoint))
    refuse_peft(made.reader.held, made.reader.url)
    scaled = {
        name.rpartition(".")[0].removesuffix(".weight")
        for name in made.reader.held
        if "scale" in name.rpartition(".")[2] or name.endswith((".SCB", ".absmax"))
    }
    # and of experts in one tensor, such as gate_up_proj_scale_inv
    scaled |= {name[: at.start()] for name in made.reader.held if (at := _SCALE.search(name))}
    for name, tensor in made.reader.held.items():
        plain = name.removesuffix(".weight")
        if plain in scaled:
            continue
        if tensor.dtype.startswith(("bool", "complex")) and plain != name:
            raise UsageError(
                f"{name} is {tensor.dtype}, which no model computes with",
                remedy="save its weights as the model has them", path=made.reader.url,
            )  # fmt: skip
        # of another name: whole numbers may be a mask, and float8 is a weight where it has experts
        whole = tensor.dtype.startswith(("int", "uint")) and plain != name
        float8 = tensor.dtype in ("float8_e4m3fn", "float8_e5m2")
        if whole or (float8 and (plain != name or ".experts." in name)):
            raise UsageError(
                f"{name} is quantized to {tensor.dtype}, and no scales are beside it: its numbers "
                "mean nothing without them",
                remedy="export the state from before the weights were quantized, or with its "
                "scales in it",
                path=made.reader.url,
            )
    names = [] if settings is None else settings.values.get("architectures") or []
    heads = value_heads(made.reader.held, names)
    if not heads:
        return made
    own = some(made.reader, [name for name in made.reader.held if name not in heads])
    ends = "head", "embed_out", "output", "output_layer"  # what heads of language models are called
    words = (word for name in own.held for word in name.split("."))
    if settings is not None and settings.ties_embeddings is False and not any(
        word.endswith(ends) for word in words
    ):  # fmt: skip
        raise UsageError(
            f"{', '.join(heads)} are the head of a reward model, a critic or a classifier, and the "
            f"head that {', '.join(names)} of the config has is not there",
            remedy="pass the config of the class that was trained (architectures such as "
            "LlamaForSequenceClassification); as a language model it would have no head",
            path=made.reader.url,
        )
    note = (
        f"{', '.join(heads)} are a value head (as TRL's), for which Hugging Face's models have no "
        "place: they are left out"
    )
    return replace(made, reader=own, notes=(*made.notes, note), left_out=tuple(heads))


def _beside(access: Access, checkpoint: Any) -> tuple[SourceFacts, ...]:
    """What lies beside a source's files, and says what model it is."""
    alone = isinstance(checkpoint, (str, os.PathLike))
    where = os.fspath(checkpoint if alone else checkpoint[0])
    path = disk_path(where)
    if not alone or (path is not None and not os.path.isdir(path)):
        if alone and not _RELEASED.match(os.path.basename(where)):
            return ()  # one file, among any others
        where = os.path.dirname(where) or os.curdir
    return config_beside(Folder(SourceFiles(access), where))


def _compared(
    made: ModelSource, settings: ModelConfig | None, beside: Sequence[SourceFacts]
) -> ModelSource:
    """The source, once nothing that it says of its model contradicts the config. Of a layout, the
    translation compares the rest."""
    if settings is None:
        return made
    made = replace(made, facts=(*made.facts, *beside))
    differ = [note for facts in made.facts for note in compare_configs(facts, settings)]
    made = replace(made, notes=(*made.notes, *differ))
    if made.cut or not made.facts or find_family(settings.values["model_type"]) is None:
        return made
    try:
        dims = model_dims(settings, made.reader.url)
    except CheckpointError:  # the config lacks sizes, which names do not need
        return made
    notes = [
        note for facts in made.facts for note in compare_facts(facts, dims, settings, None, None)
    ]
    return replace(made, notes=(*made.notes, *notes))


@dataclass(frozen=True)
class _Opener:
    prefix: str | None
    settings: ModelConfig | None
    given: Parallel
    packed: bool

    def ours(self, catalogue: Catalogue) -> ModelSource:
        """A checkpoint of smckpt, or what a reader of a user's gives."""
        given, identity = self.given, catalogue.identity
        pp = stages_of(catalogue, given.pp)
        if pp == 1:
            given.refuse_chunks()
        choose = tensors_at if pp == 1 else stage_tensors
        tensors = unwrapped(choose(catalogue, self.prefix))
        # of a weight of a class that holds several tensors, none alone has its values
        saved = catalogue.objects(min(catalogue.object_ranks))
        facts = facts_of_values(
            {path: partial(copy.copy, value) for path, value in saved.values()}, catalogue.url
        )
        above = {
            key.removesuffix(FACTS): value
            for key, (path, value) in saved.items()
            if path[-1:] == (FACTS,)
        }
        names = {tensor.name for tensor in tensors.values()}
        for start, parts in above.items():
            if any(name.startswith(start) for name in names):
                raise UsageError(
                    f"{start[:-1]} is a {parts.get('class')}, which holds several tensors; an "
                    "export writes tensors with values of their own",
                    remedy="load it into the model, dequantise it there (its class has "
                    "dequantize()), save that and export it",
                )
        cut = self._is_layout(tensors, catalogue.url)
        if pp == 1 and not cut and not has_parts_of_ranks(catalogue, tensors):
            given.refuse_degrees()
            whole = LogicalTensors(catalogue, tensors)
            return ModelSource(
                whole, Degrees.of(1, 1), given, facts=facts, identity=identity, step=catalogue.step
            )
        degrees = degrees_of(catalogue, given.tp, given.ep, given.etp)
        stages = [
            CheckpointTensors(catalogue, tensors, degrees, stage if pp > 1 else None)
            for stage in range(pp)
        ]
        for stage in stages:
            stage.refuse_unlike_replicas()
        notes = () if given.allow_equal_ranks else refuse_equal_ranks(stages, degrees)
        reader: TensorReader = stages[0]
        if pp > 1:
            reader = merged(stages, _layers(self.settings), given.vpp, catalogue.url)
        cut = cut or pp == 1 or degrees.ranks > 1
        return ModelSource(
            reader, degrees, given, cut=cut, facts=facts, identity=identity, notes=notes,
            step=catalogue.step,
        )  # fmt: skip

    def foreign(self, found: ForeignCheckpoint) -> ModelSource:
        """A checkpoint that others wrote, with tensors of all ranks."""
        given = self.given
        if given.pp not in (None, 1):
            raise UsageError(
                f"pp={given.pp}, but such a source has the tensors of all stages by one name each",
                remedy="leave pp= out",
            )  # fmt: skip
        given.refuse_chunks()
        tensors = unwrapped(tensors_at(found, self.prefix))
        if not given.allow_equal_ranks:
            refuse_equal_files((found.saved[t.name] for t in tensors.values()), found.source)
        reader: TensorReader = found.reader(tensors)
        cut = self._is_layout(reader.held, found.url)
        if not cut:
            given.refuse_degrees()
        notes: tuple[str, ...] = ()
        if found.format == HUB_DIRECTORY:
            reader = dequantized(reader, self.settings)
            if adapter := found.facts.get("adapter"):
                notes = (
                    f"{adapter} beside the weights was left out; transformers adds such an adapter "
                    "to the model that it loads: pass adapter= to export the two together",
                )
        values = {value.path: value.read for value in found.values.values()}
        facts = (*found.model_facts, *facts_of_values(values, found.url))
        return ModelSource(reader, given.degrees, given, found.format, cut, facts, notes=notes)

    def files(self, found: RankFilesFound) -> ModelSource:
        """The files of ranks, or one file with a whole model."""
        files = replace(found, prefix=self.prefix)
        # the degrees that are given, or that the names of the files tell, or else the files
        tp, pp, ep = self.given.tp or files.tp, self.given.pp or files.pp, self.given.ep or files.ep
        inside = [files.degree(name) or 1 for name in (TP, PP, EP)]
        if (tp, pp, ep) == (None, None, None) and math.prod(inside) == len(files.files):
            tp, pp, ep = inside
        given = replace(self.given, tp=tp, pp=pp, ep=ep)
        if self.given.pp not in (None, files.pp or self.given.pp):
            raise UsageError(
                f"pp={self.given.pp}, but there are {files.pp} pipeline stages",
                remedy="leave pp= out",
            )  # fmt: skip
        degrees, pp = given.degrees, given.pp or 1
        if pp == 1 or files.alone:
            given.refuse_chunks()
        reader, notes = open_ranks(
            files,
            degrees,
            pp,
            _layers(self.settings),
            given.vpp,
            equal_ranks=given.allow_equal_ranks,
        )
        cut = degrees.ranks > 1 or self._is_layout(reader.held, files.url)
        notes += () if files.order_is_known else (_UNKNOWN_ORDER,)
        return ModelSource(
            reader, degrees, given, files.format, cut, files.facts, notes=notes, step=files.step
        )

    def _is_layout(self, names: Collection[str], where: str) -> bool:
        """Whether the names are those of a layout: the caller says so, or they are no names of the
        model's own, or they fit a layout and not the family's releases."""
        if self.given.layout is not None or looks_transformed(names):
            return True
        kind = None if self.settings is None else self.settings.values["model_type"]
        if self.settings is None or kind is None or find_family(kind) is None:
            return False
        kinds = self.settings.values.get("architectures") or []
        heads = value_heads(names, kinds)
        names = [name for name in names if name not in heads]
        if looks_packed(names, kind):  # of a class with another head, or none, transformers knows
            return self.packed and all(one.endswith(HEADED) for one in kinds)
        try:
            dims = model_dims(self.settings, where)
            if not any(unmatched(names, dims.family.hub, dims, 1)):
                return False
            choose_layout(names, dims, None, 1)
        except CheckpointError:  # no layout, or a config without sizes, which names do not need
            return False
        return True


def _layers(settings: ModelConfig | None) -> int | None:
    """How many layers the config's model has."""
    if settings is None:
        return None
    family = find_family(settings.values["model_type"])
    values = settings.values if family is None else family.config(settings.values)
    found = values.get("num_hidden_layers")
    return found if isinstance(found, int) else None
