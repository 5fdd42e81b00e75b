"""Export a checkpoint as a Hugging Face directory: `export_hf`.

Catalogue → the model's tensors (`names`) → targets in files (`targets`) → chunks, read, cast and
written (`stream`) → config and tokenizer (`config`) → what makes it loadable (`files`).
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from smckpt.checkpoint.catalogue import LogicalTensor, open_catalogue
from smckpt.errors import TensorMismatchError, UsageError
from smckpt.storage.s3_config import S3Config, s3_options, using_s3
from smckpt.storage.urls import is_s3_url
from smckpt.translate.arguments import check_counts, check_flags, check_paths
from smckpt.translate.cast import CASTABLE
from smckpt.translate.checkpoint_store import CheckpointStore, degrees_of
from smckpt.translate.companions import tokenizer_of, write_companions
from smckpt.translate.config import CONFIG, ModelConfig, read_config
from smckpt.translate.crew import crew_of
from smckpt.translate.degrees import Degrees
from smckpt.translate.detect import looks_transformed
from smckpt.translate.files import Output, refuse_into_source
from smckpt.translate.lora import ADAPTER_WEIGHTS, read_lora_config, sort
from smckpt.translate.merged import MergedSource, merged_targets, open_base
from smckpt.translate.meta_model import Comparison
from smckpt.translate.model import to_hub
from smckpt.translate.names import find_ties, model_tensors
from smckpt.translate.run import Contents, Planned, Run
from smckpt.translate.source import Source
from smckpt.translate.stores import Store, open_files
from smckpt.translate.stream import CHUNK
from smckpt.translate.table import Layout
from smckpt.translate.targets import OutputFile, Same, Target, arrange
from smckpt.translate.vocabulary import check_tokenizer

__all__ = ["ExportReport", "export_hf"]

log = logging.getLogger("smckpt")

_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote.

    directory: where. files: the weight files, in order. tensors, nbytes: how many, and their size.
    left_out: names not written because they are tied to one that is. notes: what a reader should
    know ("no config was given …"). layout: the tensor-parallel layout that it was translated from.
    nonfinite: how many NaN and infinite elements each tensor has that has any.
    """

    directory: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float
    layout: str | None = None
    nonfinite: dict[str, int] = field(default_factory=dict)


def export_hf(
    checkpoint: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out_dir: str | os.PathLike[str],
    *,
    layout: str | Layout | None = None,
    tp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    padded_vocab_size: int | None = None,
    config: Any = None,
    tokenizer: Any = None,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    prefix: str | None = None,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    overwrite: bool = False,
    s3_region: str | None = None,
    s3client_config: Any = None,
    allow_nonfinite: bool = False,
    against_model: bool = True,
    lora: str | None = None,
    lora_config: Any = None,
    base: str | os.PathLike[str] | None = None,
    process_group: Any = None,
    timeout: float = 600.0,
) -> ExportReport:
    """Write the model of `checkpoint` as a directory that `from_pretrained` loads.

    Models whose tensors have Hugging Face's names keep them; those of a tensor-parallel layout
    are translated (docs/layouts.md), after a proof on shapes that each element has one place.
    Needs no model, no process group and no torch; memory stays at two chunks of 16 MiB a thread.
    Every byte of a checkpoint is verified as it is read. The directory loads when all of it is
    durable, and not before.

    Args:
        checkpoint: a committed checkpoint: a group's directory that is whole by itself, or the
            directory above the groups'. Or the files of all ranks (safetensors, or `torch.save` of
            a state dict), tensor-parallel ranks innermost, then expert-parallel ones.
        out_dir: the directory to write; made when missing.
        layout: the tensor-parallel layout: a name, or a `Layout`. Found from the names when left
            out; names that fit several are refused.
        tp, ep: tensor- and expert-parallel degrees; by default those recorded in the checkpoint,
            else 1.
        etp: the degree at which experts are cut, where it is not tp: Megatron's
            `expert_tensor_parallel_size`. Rank r has then part r % etp of the experts of
            expert-parallel rank r // etp % ep.
        padded_vocab_size: as many rows as a tensor-parallel layout has of the vocabulary, padding
            included. Where left out there may be vocab_size of the config, or as many as trainers
            round that up to, and the tokenizer must use none of the padding.
        config: the model's config: a directory or file, a dict, or `model.config`. Written with
            the keys of transformers 4 and 5, and with the dtype of the weights.
        tokenizer: a directory whose tokenizer files are copied, or an object with
            `save_pretrained`. By default those beside `config`, if that is a directory.
        dtype: "float32", "bfloat16" or "float16" to cast every floating tensor to it, rounding to
            nearest even; None keeps each tensor's own.
        max_shard_size: of data in one file, in bytes or as "5GB", "512MiB".
        prefix: dotted place of the model in the saved state dict ("model"; "" for all of it).
            Found when left out: the key "model", or the only part that is no optimizer's.
        threads: how many read and write; by default one for each processor, at most 8.
        progress: called with (bytes written, bytes in all) after each chunk, one call at a time.
        overwrite: replace a model that is in `out_dir`. The old one is gone first.
        s3_region, s3client_config: where `checkpoint` or `out_dir` is in S3, as in `save`.
        allow_nonfinite: export weights that hold NaN or infinity too; the report counts them.
        against_model: compare names and shapes with the model that transformers makes of `config`
            (on the meta device), where transformers is installed, before anything is written.
        lora: for the checkpoint of a PEFT model: "adapter" writes the directory that
            `PeftModel.from_pretrained` loads, "merge" the base's with the adapter added.
        lora_config: with `lora`, the adapter's config: a directory or file, a dict, or
            `model.peft_config`.
        base: with "merge", a Hugging Face directory with the base's weights, where the checkpoint
            has the adapter's alone.
        process_group: the processes that call this together, with the same arguments, and share
            the files: a torch process group, or the `Crew` of `crew_of_environment`. None: this
            process does it by itself. `progress` is then called by the first of them.
        timeout: with `process_group`, seconds without a byte of one of them until all give up.

    Raises:
        PeerError: another process has died.
        UsageError: an argument; `out_dir` is not empty; the model's place is ambiguous; weights
            are NaN or infinite.
        KeysMismatchError: names or shapes are not those of the config's model.
        TensorMismatchError: tensors that the config says are tied differ.
        CorruptCheckpointError: a block of the checkpoint is not what was written.
        StorageError: the disk is full, read-only, ….
    """
    began = time.perf_counter()
    with ExitStack() as cleanup:
        crew = crew_of(process_group, timeout)  # first: what is wrong here the others hear of
        cleanup.callback(crew.close)
        cleanup.enter_context(crew.telling())
        files = _check_places(checkpoint, out_dir)
        cleanup.enter_context(using_s3(_s3_of(checkpoint, out_dir, s3_region, s3client_config)))
        dtype = _dtype_name(dtype)
        limit = _size(max_shard_size)
        workers = min(8, os.cpu_count() or 1) if threads is None else threads
        check_counts(threads=workers)
        check_flags(
            overwrite=overwrite, allow_nonfinite=allow_nonfinite, against_model=against_model
        )
        settings = read_config(base if config is None and lora == "merge" else config)
        tokens = tokenizer_of(tokenizer, settings)
        given = {"config": config, "tokenizer": tokenizer, "lora_config": lora_config, "base": base}
        refuse_into_source(out_dir, *files, **given)

        def plan() -> Planned:
            if lora is None:
                _refuse_given("without lora=", lora_config=lora_config, base=base)
                degrees = tp, ep, etp
                found = _contents(
                    checkpoint, settings, dtype, prefix, layout, degrees, padded_vocab_size
                )
                if padded_vocab_size is None:
                    check_tokenizer(tokens, *found.vocabulary)
            else:
                _refuse_given(
                    "with lora=", layout=layout, tp=tp, ep=ep, etp=etp,
                    padded_vocab_size=padded_vocab_size,
                )  # fmt: skip
                found = _of_peft(checkpoint, settings, dtype, prefix, lora, lora_config, base)
            files = arrange(found.targets, limit) if found.adapter is None else _one_file(found)
            output = Output(os.fspath(out_dir), files)
            return Planned(
                found, files, output,
                lambda: write_companions(output, settings, tokens, found.adapter, found.targets),
            )  # fmt: skip

        compared = settings if against_model and lora != "adapter" and crew.leads else None
        comparison = Comparison(None if compared is None else compared.complete(None))
        cleanup.callback(comparison.close)
        run = Run(crew, comparison, overwrite, allow_nonfinite, workers, progress)
        cleanup.callback(run.close)
        on_failure = cleanup.enter_context(ExitStack())
        on_failure.callback(run.abandon)
        crew.meet("plan", lambda: run.plan(plan), run.prepare)
        told = crew.meet("written", run.write, run.publish)
        on_failure.pop_all()
    return _report(run.made, told, time.perf_counter() - began)


def _report(made: Planned, told: dict[str, Any], seconds: float) -> ExportReport:
    notes = (*made.found.notes, *told["notes"])
    for note in notes:
        log.warning("%s: %s", made.output.url, note)
    return ExportReport(
        directory=made.output.url,
        files=tuple(file.name for file in made.files),
        tensors=len(made.found.targets),
        nbytes=sum(file.data_bytes for file in made.files),
        left_out=made.found.left_out,
        notes=notes,
        seconds=seconds,
        layout=made.found.layout,
        nonfinite=told["nonfinite"],
    )


# -- what is exported ----------------------------------------------------------------------------


def _contents(
    checkpoint: Any, settings: ModelConfig | None, dtype: str | None, prefix: str | None,
    layout: str | Layout | None, given: tuple[int | None, int | None, int | None],
    padded: int | None,
) -> Contents:  # fmt: skip
    if not isinstance(checkpoint, (str, os.PathLike)):
        _refuse_prefix(prefix)
        tp, ep, etp = given
        degrees = Degrees.of(1 if tp is None else tp, 1 if ep is None else ep, etp)
        store: Store = open_files(checkpoint, degrees)
        return _translated(store, settings, dtype, layout, degrees, padded)
    catalogue = open_catalogue(os.fspath(checkpoint))
    tensors = model_tensors(catalogue, prefix)
    family = settings.values["model_type"] if settings is not None else None
    if layout is not None or looks_transformed(tensors, family):
        degrees = degrees_of(catalogue, *given)
        store = CheckpointStore(catalogue, tensors, degrees)
        store.refuse_unlike_replicas()
        made = _translated(store, settings, dtype, layout, degrees, padded)
        return replace(made, identity=catalogue.identity)
    if any(value is not None for value in (*given, padded)):
        raise UsageError(
            "tp=, ep=, etp= or padded_vocab_size= are given, but the names are Hugging Face's own",
            remedy="leave them out, or pass layout=",
            path=catalogue.url,
        )
    source = Source(catalogue)
    left_out = _tied(source, tensors, settings)
    targets = [_target(name, t, dtype) for name, t in tensors.items() if name not in left_out]
    notes = _notes(tensors, settings)
    return Contents(source, targets, left_out, notes, identity=catalogue.identity)


def _translated(
    store: Store, settings: ModelConfig | None, dtype: str | None, layout: str | Layout | None,
    degrees: Degrees, padded: int | None,
) -> Contents:  # fmt: skip
    made = to_hub(store, settings, layout, degrees, padded)
    targets = [replace(t, dtype=_wanted(t.name, t.dtype, dtype)) for t in made.targets]
    return Contents(
        made.source, targets, made.left_out, (), made.layout, vocabulary=made.vocabulary
    )


def _of_peft(
    checkpoint: Any, settings: ModelConfig | None, dtype: str | None, prefix: str | None,
    lora: str, lora_config: Any, base: str | os.PathLike[str] | None,
) -> Contents:  # fmt: skip
    if lora not in ("adapter", "merge"):
        raise UsageError(f"lora={lora!r}", remedy='pass "adapter" or "merge"')
    if not isinstance(checkpoint, (str, os.PathLike)):
        raise UsageError("lora= is for checkpoints, not for files of ranks", remedy="leave it out")
    adapter = read_lora_config(lora_config)
    catalogue = open_catalogue(os.fspath(checkpoint))
    parts = sort(model_tensors(catalogue, prefix, peft=True), catalogue.url)
    adapter.check(parts.pairs, catalogue.url)
    source = Source(catalogue)
    if lora == "adapter":
        _refuse_given('with lora="adapter"', base=base, config=settings)
        adapter.refuse_biases(catalogue.url)
        own = [_target(name, tensor, dtype) for name, tensor in parts.adapter.items()]
        return Contents(source, own, (), (), adapter=adapter, identity=catalogue.identity)
    directory = open_base(base, adapter) if base is not None else None
    family = settings.values["model_type"] if settings is not None else None
    if directory is None and looks_transformed(parts.base, family):
        raise UsageError(
            "the base's names are not those that Hugging Face has on disk",
            remedy="pass base= the Hugging Face directory of the base model",
            path=catalogue.url,
        )
    made = merged_targets(parts, adapter, directory, catalogue.url)
    tied: tuple[str, ...] = ()
    if directory is None:
        tied = _tied(source, parts.base, settings)
        adapter.refuse_tied(tied, parts.pairs, catalogue.url)
    targets: list[Target] = [
        replace(t, dtype=_wanted(t.name, t.dtype, dtype)) for t in made if t.name not in tied
    ]
    notes = _notes([t.name for t in made], settings)
    merged = MergedSource(source, directory)
    return Contents(merged, targets, tied, notes, identity=catalogue.identity)


def _one_file(found: Contents) -> tuple[OutputFile, ...]:
    """An adapter's weights are one file."""
    (file,) = arrange(found.targets, 1 << 62)
    return (replace(file, name=ADAPTER_WEIGHTS),)


def _refuse_given(when: str, **given: Any) -> None:
    names = [f"{name}=" for name, value in given.items() if value is not None]
    if names:
        raise UsageError(
            f"{', '.join(names)} has no meaning {when}", remedy="leave it out", path=None
        )


def _refuse_prefix(prefix: str | None) -> None:
    if prefix is not None:
        raise UsageError(
            "prefix= is for checkpoints, not for files of ranks",
            remedy="save the model's state dict alone, or under the key model",
        )


def _target(name: str, tensor: LogicalTensor, dtype: str | None) -> Same:
    wanted = _wanted(name, tensor.dtype, dtype)
    return Same(name, wanted, tuple(tensor.shape), tensor.name, tensor.dtype)


def _wanted(name: str, own: str, dtype: str | None) -> str:
    """The dtype to write a tensor in."""
    if dtype is None or not _is_float(own):
        return own
    if own not in CASTABLE:
        raise UsageError(
            f"{name} has dtype {own}, which is not cast",
            remedy=f"export with dtype=None; casts are between {', '.join(CASTABLE)}",
        )
    return dtype


def _tied(
    source: Source, tensors: dict[str, LogicalTensor], settings: ModelConfig | None
) -> tuple[str, ...]:
    """Names to leave out because the config ties them to another; refused where they differ."""
    if settings is None or not settings.ties_embeddings:
        return ()
    left_out = []
    for tie in find_ties(tensors):
        kept, other = tensors[tie.kept], tensors[tie.left_out]
        if not source.equal(kept, other, CHUNK):
            raise TensorMismatchError(
                f"tie_word_embeddings is true, but {tie.left_out} and {tie.kept} differ",
                remedy="set tie_word_embeddings to false in the config if the model was trained "
                "with both; else the checkpoint is not of this model",
                path=source.catalogue.url,
            )
        left_out.append(tie.left_out)
    return tuple(left_out)


def _notes(tensors: Collection[str], settings: ModelConfig | None) -> tuple[str, ...]:
    if settings is None:
        return (f"no config was given: put the model's {CONFIG} there before loading",)
    notes = []
    architectures = settings.values.get("architectures") or [""]
    heads = any("head" in name or name.startswith("embed_out") for name in tensors)
    if settings.ties_embeddings is False and architectures[0].endswith("ForCausalLM") and not heads:
        notes.append(
            f"{architectures[0]} with untied embeddings, but no output head is in the checkpoint: "
            "from_pretrained would make a random one"
        )
    return tuple(notes)


# -- arguments -----------------------------------------------------------------------------------


def _check_places(checkpoint: Any, out_dir: Any) -> Sequence[str | os.PathLike[str]]:
    """The files of ranks, if it is they that are exported."""
    check_paths(out_dir=out_dir)
    many = isinstance(checkpoint, (list, tuple))
    paths = checkpoint if many else [checkpoint]
    if not all(isinstance(path, (str, os.PathLike)) for path in paths):
        raise UsageError(
            f"checkpoint={checkpoint!r}", remedy="pass a path or URL, or a list of paths"
        )
    return checkpoint if many else ()


def _s3_of(checkpoint: Any, out_dir: Any, region: str | None, config: Any) -> S3Config | None:
    """The options of the one, or both, that are in S3."""
    urls = [os.fspath(out_dir)]
    if isinstance(checkpoint, (str, os.PathLike)):
        urls.append(os.fspath(checkpoint))
    return s3_options(next(filter(is_s3_url, urls), urls[0]), region, config)


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


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def _size(size: int | str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", str(size).upper())
    unit = match.group(2) if match else "?"
    if match is None or unit not in _SIZES or float(match.group(1)) * _SIZES[unit] < 1:
        raise UsageError(
            f"max_shard_size={size!r}", remedy='pass bytes, or a text such as "5GB" or "512MiB"'
        )
    return int(float(match.group(1)) * _SIZES[unit])
