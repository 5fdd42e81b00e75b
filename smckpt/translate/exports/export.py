"""Export a checkpoint as a Hugging Face directory: `export_hf`.

Catalogue → the model's tensors, by the names of released models (`contents`) → targets in files
→ chunks, read, cast and written (`stream`) → config and tokenizer (`sidecars`) → the index or file
name that makes it loadable (`files`). Several processes go through the same stages, and the first
of them decides after each.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from smckpt.calls import alone, changed, checked
from smckpt.errors import UsageError
from smckpt.formats.degrees import check_paths, refuse_given, refuse_store
from smckpt.formats.names import ADAPTER_WEIGHTS
from smckpt.storage import Storage, StoreOptions, access_to
from smckpt.storage.urls import is_local
from smckpt.translate.cast import CASTABLE, NonFinite, refuse_nonfinite
from smckpt.translate.config import ModelConfig, read_generation
from smckpt.translate.exports.options import ExportGroup, ExportOptions, export_group_of, shares
from smckpt.translate.exports.sidecars import (
    GgufConverter,
    index_of,
    notes_on_absent,
    read_settings,
    tokenizer_of,
    write_card,
    write_sidecars,
)
from smckpt.translate.files import Output, OutputFile, arrange, refuse_into_source
from smckpt.translate.models.adapter import Adapter, find_peft_contents
from smckpt.translate.models.comparison import Comparison, OtherNamesError
from smckpt.translate.models.contents import (
    HUB,
    ExportContents,
    doubtful_notes,
    find_contents,
)
from smckpt.translate.models.model_source import Parallel
from smckpt.translate.prediction import with_prediction_layers
from smckpt.translate.stream import write_chunks
from smckpt.translate.tables.hub import find_ties
from smckpt.translate.tables.vocabulary import check_tokenizer, note_on_ids

Body = dict[str, Any]


@dataclass(frozen=True)
class Planned:
    """The files to write and their directory. sidecars: writes the files beside the weights, given
    the model's class where the config names none and it is known. settings: the model's config."""

    found: ExportContents
    files: Sequence[OutputFile]
    output: Output
    sidecars: Callable[[str | None], None]
    settings: ModelConfig | None = None


@dataclass
class Stages:
    """One process's part in an export: `plan`, then `write`. After each, the first process
    decides."""

    group: ExportGroup
    comparison: Comparison
    options: ExportOptions
    nonfinite: NonFinite = field(default_factory=NonFinite)
    planned: Planned | None = None
    notes: list[str] = field(default_factory=list)

    def plan(self, make: Callable[[], Planned]) -> Body:
        planned = self.planned = make()
        text = hashlib.sha256(planned.found.identity.encode())
        if self.group.count > 1:
            for file in planned.files:
                text.update(file.name.encode() + file.header)
        return {"plan": text.hexdigest()}

    def prepare(self, bodies: dict[int, Body]) -> Body:
        """On the first process: check that all have the same plan and that it fits the model; then
        prepare the directory."""
        planned = self.made
        if len({body["plan"] for body in bodies.values()}) > 1:
            raise UsageError(
                "the processes have different plans",
                remedy="pass the same arguments on all processes, and a checkpoint that no run "
                "replaces "
                "meanwhile",
                path=planned.output.url,
            )
        own = [t for t in planned.found.targets if t.name not in planned.found.further]
        self.comparison.tell(own, planned.found.source.url)
        self.comparison.check()
        if self.options.overwrite:  # only when the new files are known to be a model
            self.notes += self._compared()
        kind, note = self.comparison.unnamed_class(own, planned.found.source.url)
        self.notes += [note] if note else []
        self.notes += planned.output.prepare(overwrite=self.options.overwrite)
        # First, because a single file of weights can be loaded as soon as the object appears.
        planned.sidecars(kind)
        return {"folder": planned.output.folder}

    def write(self) -> Body:
        """Write this process's share of the files."""
        planned, group = self.made, self.group
        total = sum(file.data_bytes for file in planned.files)
        tell = self.options.progress
        if tell is not None and group.leads:
            group.tell = lambda done: tell(done, total)
        numbers = shares([file.size for file in planned.files], group.count)[group.member]
        mine = [planned.files[number] for number in numbers]
        write_chunks(
            planned.found.source,
            planned.output,
            mine,
            self.options.workers,
            self._meanwhile,
            self.nonfinite.look,
        )
        checksums = {file.name: planned.output.checksum_of(file) for file in mine}
        return {"nonfinite": self.nonfinite.counts, "checksums": checksums}

    def publish(self, bodies: dict[int, Body]) -> Body:
        """On the first process: check that everything is there, and make it loadable."""
        output, files = self.made.output, self.made.files
        output.refuse_absent()
        if self.group.count > 1:
            total = sum(file.data_bytes for file in files)
            if self.options.progress is not None:
                self.options.progress(total, total)
        if not self.options.overwrite:
            self.notes += self._compared()
        counts = {n: c for body in bodies.values() for n, c in body["nonfinite"].items()}
        self.notes += refuse_nonfinite(
            counts, self.options.allow_nonfinite, output.url, "use an earlier checkpoint"
        )
        if self.options.card:
            sums = {n: c for body in bodies.values() for n, c in body["checksums"].items()}
            self.notes += write_card(output, self.made.found, self.made.settings, files, sums)
        output.publish(index_of(files) if len(files) > 1 else None)
        return {"nonfinite": counts, "notes": self.notes}

    def abandon(self) -> None:
        if self.planned is not None:
            self.planned.output.abandon()

    def close(self) -> None:
        if self.planned is not None:
            self.planned.output.close()
            self.planned.found.source.close()

    @property
    def made(self) -> Planned:
        assert self.planned is not None
        return self.planned

    def _compared(self) -> list[str]:
        note = self.comparison.finish()
        return [note] if note else []

    def _meanwhile(self, done: int, _: int) -> None:
        self.comparison.check()
        self.group.beat(done)


log = logging.getLogger("smckpt")


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote.

    directory: where. files: the weight files, in order. tensors, nbytes: how many, and their size.
    left_out: names not written because they are tied to one that is. notes: remarks for the user
    ("no config was given …"). naming: "hub", the names of released models, or "module", those of
    the state dict. layout: the tensor-parallel layout that it was translated from. nonfinite:
    tensor → how many NaN and infinite elements it has. source: the format of what was read. gguf:
    the path of the GGUF file.
    """

    directory: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float
    naming: str
    layout: str | None = None
    nonfinite: dict[str, int] = field(default_factory=dict)
    source: str = "smckpt"
    gguf: str | None = None


@alone()
def export_hf(
    checkpoint: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out_dir: str | os.PathLike[str],
    *,
    parallel: Parallel | None = None,
    config: Any = None,
    tokenizer: Any = None,
    dtype: str | None = None,
    prefix: str | None = None,
    adapter: Adapter | None = None,
    options: ExportOptions | None = None,
    storage: StoreOptions | Mapping[str, Any] | None = None,
) -> ExportReport:
    """Write the model of `checkpoint` as a directory that `from_pretrained` loads.

    Tensors get the names and shapes that released models of the family have. Tensors of a
    tensor-parallel layout are translated (docs/layouts.md), after a proof on shapes that each
    element has one place. It needs no model, no process group and, for families with a table, no
    torch. Memory stays at two chunks of 16 MiB per thread. Every byte of a checkpoint is verified
    as it is read. The directory can be loaded only once all of it is durable.

    Args:
        checkpoint: the directory of a committed checkpoint; for several groups, the directory above
            them. Or a list with the files of all ranks (safetensors, or `torch.save` of a state
            dict), tensor-parallel ranks innermost, then expert-parallel ranks, then pipeline
            stages.
        out_dir: the directory to write. It is made if it is missing.
        parallel: how the ranks shared the model, where the checkpoint does not record it.
        config: the model's config: a directory or file, a dict, `model.config`, or the model
            itself, whose generation config is then written too. It is written with the keys of both
            transformers 4 and 5, and with the dtype of the weights. By default the config.json in
            the checkpoint's own directory, where the door for transformers' Trainer writes it; a
            note says so.
        tokenizer: a directory whose tokenizer files are copied, or an object with
            `save_pretrained`. By default the files beside `config`, if that is a directory or the
            checkpoint's own.
        dtype: "float32", "bfloat16" or "float16": cast floating tensors to it, rounding to nearest
            even, except those that `from_pretrained` keeps in float32. None keeps each tensor's
            own.
        prefix: the dotted place of the model in the saved state dict ("model"; "" for all of it).
            By default the key "model", or the only part that is not an optimizer.
        adapter: for the checkpoint of a PEFT model: write the adapter, or merge it into its base.
        options: everything else: whether to replace a model, sizes of files, checks, names, a GGUF
            file, several processes; see `ExportOptions`.
        storage: as for `save`, if `checkpoint` or `out_dir` is in S3.

    Raises:
        PeerError: another process has died.
        UsageError: an argument is wrong; `out_dir` is not empty; the model's place is ambiguous;
            weights are NaN or infinite.
        KeysMismatchError: names or shapes differ from the config's model.
        TensorMismatchError: tensors that the config says are tied differ.
        CorruptCheckpointError: a block of the checkpoint differs from what was written.
        StorageError: the store refused: it is full, read-only, or gone.
    """
    began = time.perf_counter()
    options = checked(ExportOptions, options)
    with ExitStack() as cleanup:
        # first, so that the others get this process's errors
        group = export_group_of(options.process_group, options.timeout)
        cleanup.callback(group.close)
        cleanup.enter_context(group.telling())
        files = _check_paths(checkpoint, out_dir)
        read = [checkpoint] if isinstance(checkpoint, (str, os.PathLike)) else []
        access = access_to(out_dir, *read, storage=storage)
        dtype = _dtype_name(dtype)
        ranks = Parallel.of(parallel)
        if not isinstance(adapter, (Adapter, type(None))):
            raise UsageError(f"adapter={adapter!r}", remedy='pass an Adapter, as Adapter("merge")')
        alone = adapter is not None and adapter.lora == "adapter"
        base = None if adapter is None else adapter.base
        lora_config = None if adapter is None else adapter.lora_config
        converter = _converter(options, out_dir, alone)
        generation = options.generation_config
        refuse_store(config=config, tokenizer=tokenizer, generation_config=generation)
        settings, noted = read_settings(
            base if config is None and base is not None else config,
            access,
            None if alone else checkpoint,
            cleanup,
        )
        if generation is not None:
            if settings is None:
                raise UsageError(
                    "ExportOptions(generation_config=) is given, but no config",
                    remedy="pass config= too",
                )
            settings = replace(settings, own_generation=read_generation(generation))
        tokens = tokenizer_of(tokenizer, settings)
        given = {"config": config, "tokenizer": tokenizer, "lora_config": lora_config, "base": base}
        if not files:
            given["checkpoint"] = checkpoint
        refuse_into_source(out_dir, *files, **given)

        config_of_model = None if settings is None or alone else settings.complete(None)
        asked = options.naming == HUB or (options.against_model and group.leads)
        # One process, whose files replace none and have the tensors' own dtypes. Not in a store,
        # where a file that is whole can be loaded.
        guess = group.count == 1 and not options.overwrite and dtype is None and adapter is None
        comparison = Comparison(
            config_of_model if asked else None,
            strict=options.against_model,
            guess=guess and is_local(os.fspath(out_dir)),
        )
        cleanup.callback(comparison.close)

        def plan() -> Planned:
            if adapter is None:
                found = find_contents(
                    access, checkpoint, prefix, settings, ranks, options.naming, options.mtp,
                    comparison,
                )  # fmt: skip
                if ranks.padded_vocab_size is None:
                    check_tokenizer(tokens, *found.vocabulary)
            else:
                padded = ranks.padded_vocab_size
                mtp = changed(options).get("mtp")
                refuse_given("with adapter=", padded_vocab_size=padded, mtp=mtp)
                found = find_peft_contents(
                    access, checkpoint, prefix, settings, ranks, adapter, options.naming,
                    comparison,
                )  # fmt: skip
            shapes = {target.name: tuple(target.shape) for target in found.targets}
            generation = None if settings is None else settings.generation()
            notes = (*notes_on_absent(settings, tokens), *note_on_ids(tokens, generation, shapes))
            notes += doubtful_notes(found, settings)
            kept = found.kept.get(dtype or "", frozenset())
            targets = [t if t.name in kept else _cast_target(t, dtype) for t in found.targets]
            found = replace(found, targets=targets, notes=(*noted, *found.notes, *notes))
            return _planned(found, access.open(out_dir), settings, tokens, options.limit)

        def attempt() -> tuple[Planned, dict[str, Any]]:
            """Plan and write; if that fails, nothing is left. Returns what was written, and what
            the first process has decided."""
            stages = Stages(group, comparison, options)
            with ExitStack() as done:
                done.callback(stages.close)
                on_failure = done.enter_context(ExitStack())
                on_failure.callback(stages.abandon)
                planned = group.meet("plan", lambda: stages.plan(plan), stages.prepare)
                stages.made.output.enter(planned["folder"])
                decided = group.meet("written", stages.write, stages.publish)
                on_failure.pop_all()
            return stages.made, decided

        try:
            made, decided = attempt()
        except OtherNamesError:  # what was written meanwhile is gone
            made, decided = attempt()
        gguf = None
        if converter is not None and group.leads:
            gguf = converter.convert(os.fspath(out_dir))
    notes = (*made.found.notes, *decided["notes"])
    for note in notes:
        log.warning("%s: %s", made.output.url, note)
    return ExportReport(
        directory=made.output.url,
        files=tuple(file.name for file in made.files),
        tensors=len(made.found.targets),
        nbytes=sum(file.data_bytes for file in made.files),
        left_out=made.found.left_out,
        notes=notes,
        seconds=time.perf_counter() - began,
        naming=made.found.naming,
        layout=made.found.layout,
        nonfinite=decided["nonfinite"],
        source=made.found.source_format,
        gguf=gguf,
    )


def _planned(
    found: ExportContents, where: Storage, settings: ModelConfig | None, tokens: Any, limit: int
) -> Planned:
    files = arrange(found.targets, limit if found.adapter is None else 1 << 62)
    if found.adapter is not None:  # its weights are one file
        files = (replace(files[0], name=ADAPTER_WEIGHTS),)
    output = Output(where, files)
    if settings is not None and found.predicting is not None:
        settings = with_prediction_layers(settings, found.predicting)
    if settings is not None and settings.ties_embeddings:
        headed = find_ties(target.name for target in found.targets)  # an adapter trained it
        # of an encoder and a decoder, the key changes what is computed
        if headed and not settings.values.get("is_encoder_decoder"):
            settings = settings.untied()
    return Planned(
        found, files, output,
        lambda kind: write_sidecars(
            output, settings, tokens, found.adapter, found.targets, kind
        ),
        settings,
    )  # fmt: skip


def _cast_target(target: Any, dtype: str | None) -> Any:
    if dtype is None or not target.dtype.startswith(("float", "bfloat")):
        return target
    if target.dtype not in CASTABLE:
        raise UsageError(
            f"{target.name} has dtype {target.dtype}, which is not cast",
            remedy=f"export with dtype=None; casts are between {', '.join(CASTABLE)}",
        )
    return replace(target, dtype=dtype)


# -- arguments -----------------------------------------------------------------------------------


def _check_paths(checkpoint: Any, out_dir: Any) -> Sequence[str | os.PathLike[str]]:
    """The files of ranks, if `checkpoint` is a list of them."""
    check_paths(out_dir=out_dir)
    many = isinstance(checkpoint, (list, tuple))
    paths = checkpoint if many else [checkpoint]
    if not all(isinstance(path, (str, os.PathLike)) for path in paths):
        raise UsageError(
            f"checkpoint={checkpoint!r}", remedy="pass a path or URL, or a list of paths"
        )
    return checkpoint if many else ()


def _converter(options: ExportOptions, out_dir: Any, alone: bool) -> GgufConverter | None:
    kind, command = options.gguf, options.gguf_converter
    if kind is None:
        refuse_given("without gguf=", gguf_converter=command)
        return None
    if alone:
        raise UsageError(
            'gguf= with lora="adapter"', remedy='pass lora="merge", or convert the adapter with '
            "llama.cpp's convert_lora_to_gguf.py",
        )  # fmt: skip
    return GgufConverter.find(kind, command, os.fspath(out_dir))


def _dtype_name(dtype: Any) -> str | None:
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    name = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(name, name)
    if name not in ("float32", "bfloat16", "float16"):
        raise UsageError(
            f"dtype={dtype!s}", remedy="pass float32, bfloat16 or float16, or None to keep it"
        )
    return name
