"""Export a checkpoint as a Hugging Face directory: `export_hf`.

Catalogue → the model's tensors (`names`) → targets in files (`targets`) → chunks, read, cast and
written (`stream`) → config and tokenizer (`config`) → what makes it loadable (`files`).
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from smckpt.checkpoint.catalogue import LogicalTensor, open_catalogue
from smckpt.errors import TensorMismatchError, UsageError
from smckpt.layout.entries import DTYPES
from smckpt.storage.s3_config import S3Config, s3_options, using_s3
from smckpt.storage.urls import is_local, is_s3_url
from smckpt.translate.cast import CASTABLE
from smckpt.translate.checkpoint_store import CheckpointStore, degrees_of
from smckpt.translate.config import (
    CONFIG,
    GENERATION_CONFIG,
    ModelConfig,
    read_config,
    tokenizer_files,
)
from smckpt.translate.detect import looks_transformed
from smckpt.translate.files import Output
from smckpt.translate.finite import NonFinite
from smckpt.translate.lora import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    LoraConfig,
    read_lora_config,
    sort,
)
from smckpt.translate.merged import MergedSource, merged_targets, open_base
from smckpt.translate.meta_model import hold_against
from smckpt.translate.model import to_hub
from smckpt.translate.names import find_ties, model_tensors
from smckpt.translate.source import Source
from smckpt.translate.stores import Store, open_files
from smckpt.translate.stream import CHUNK, write_chunks
from smckpt.translate.table import Layout
from smckpt.translate.targets import OutputFile, Same, Target, arrange
from smckpt.translate.translated import TranslatedSource

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

    Raises:
        UsageError: an argument; `out_dir` is not empty; the model's place is ambiguous; weights
            are NaN or infinite.
        KeysMismatchError: names or shapes are not those of the config's model.
        TensorMismatchError: tensors that the config says are tied differ.
        CorruptCheckpointError: a block of the checkpoint is not what was written.
        StorageError: the disk is full, read-only, ….
    """
    began = time.perf_counter()
    dtype = _dtype_name(dtype)
    limit = _size(max_shard_size)
    workers = min(8, os.cpu_count() or 1) if threads is None else threads
    if workers < 1:
        raise UsageError(f"threads={threads}", remedy="give a number above 0")
    settings = read_config(base if config is None and lora == "merge" else config)
    tokens = _tokenizer(tokenizer, settings)
    with using_s3(_s3_of(checkpoint, out_dir, s3_region, s3client_config)):
        if lora is None:
            _refuse_given("without lora=", lora_config=lora_config, base=base)
            found = _contents(checkpoint, settings, dtype, prefix, layout=layout, tp=tp, ep=ep)
        else:
            _refuse_given("with lora=", layout=layout, tp=tp, ep=ep)
            found = _of_peft(checkpoint, settings, dtype, prefix, lora, lora_config, base)
        files = arrange(found.targets, limit) if found.adapter is None else _one_file(found)
        output = Output(os.fspath(out_dir), files)
    model = settings if against_model and found.adapter is None else None
    notes = [*found.notes, *_compared(found, model)]
    nonfinite = NonFinite()
    with ExitStack() as cleanup:
        cleanup.callback(output.close)
        cleanup.callback(found.source.close)
        output.prepare(overwrite=overwrite)
        on_failure = cleanup.enter_context(ExitStack())
        on_failure.callback(output.abandon)
        # First: an object appears when it is whole, so a single file of weights loads from then on.
        _write_companions(output, settings, tokens, found)
        write_chunks(found.source, output, files, workers, progress, nonfinite.look)
        notes += _finite(nonfinite.counts, allow_nonfinite, output.url)
        output.publish(_index(files) if len(files) > 1 else None)
        on_failure.pop_all()
    for note in notes:
        log.warning("%s: %s", output.url, note)
    return ExportReport(
        directory=output.url,
        files=tuple(file.name for file in files),
        tensors=len(found.targets),
        nbytes=sum(file.data_bytes for file in files),
        left_out=found.left_out,
        notes=tuple(notes),
        seconds=time.perf_counter() - began,
        layout=found.layout,
        nonfinite=nonfinite.counts,
    )


# -- what is exported ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Contents:
    """What is read, the targets made of it, names left out, notes, the layout if translated, the
    adapter's config if it is one."""

    source: Source | TranslatedSource | MergedSource
    targets: Sequence[Target]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    layout: str | None = None
    adapter: LoraConfig | None = None


def _contents(
    checkpoint: Any, settings: ModelConfig | None, dtype: str | None, prefix: str | None, *,
    layout: str | Layout | None, tp: int | None, ep: int | None,
) -> _Contents:  # fmt: skip
    if not isinstance(checkpoint, (str, os.PathLike)):
        _refuse_prefix(prefix)
        store: Store = open_files(checkpoint, tp or 1, ep or 1)
        return _translated(store, settings, dtype, layout, tp or 1, ep or 1)
    catalogue = open_catalogue(os.fspath(checkpoint))
    tensors = model_tensors(catalogue, prefix)
    family = settings.values["model_type"] if settings is not None else None
    if layout is not None or looks_transformed(tensors, family):
        degrees = degrees_of(catalogue, tp, ep)
        store = CheckpointStore(catalogue, tensors, *degrees)
        return _translated(store, settings, dtype, layout, *degrees)
    if tp is not None or ep is not None:
        raise UsageError(
            "tp= and ep= are given, but the names are Hugging Face's own",
            remedy="leave them out, or pass layout=",
            path=catalogue.url,
        )
    source = Source(catalogue)
    left_out = _tied(source, tensors, settings)
    targets = [_target(name, t, dtype) for name, t in tensors.items() if name not in left_out]
    return _Contents(source, targets, left_out, _notes(tensors, settings))


def _translated(
    store: Store, settings: ModelConfig | None, dtype: str | None, layout: str | Layout | None,
    tp: int, ep: int,
) -> _Contents:  # fmt: skip
    made = to_hub(store, settings, layout, tp, ep)
    targets = [replace(t, dtype=_wanted(t.name, t.dtype, dtype)) for t in made.targets]
    return _Contents(made.source, targets, made.left_out, (), made.layout)


def _compared(found: _Contents, settings: ModelConfig | None) -> list[str]:
    """Hold names and shapes against transformers' own model; a note where that cannot be."""
    if settings is None:
        return []
    shapes = {target.name: tuple(target.shape) for target in found.targets}
    note = hold_against(settings.complete(None), shapes, found.source.url)
    return [note] if note else []


def _finite(counts: Mapping[str, int], allowed: bool, url: str) -> list[str]:
    if not counts:
        return []
    worst = ", ".join(f"{name} ({count:,})" for name, count in list(counts.items())[:8])
    more = f" and {len(counts) - 8} more" if len(counts) > 8 else ""
    text = f"{len(counts)} tensors hold NaN or infinity: {worst}{more}"
    if not allowed:
        raise UsageError(
            text, remedy="use a checkpoint before that, or pass allow_nonfinite=True", path=url
        )
    return [text]


def _of_peft(
    checkpoint: Any, settings: ModelConfig | None, dtype: str | None, prefix: str | None,
    lora: str, lora_config: Any, base: str | os.PathLike[str] | None,
) -> _Contents:  # fmt: skip
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
        return _Contents(source, own, (), (), adapter=adapter)
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
    return _Contents(MergedSource(source, directory), targets, tied, notes)


def _one_file(found: _Contents) -> tuple[OutputFile, ...]:
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


# -- what stands beside the weights --------------------------------------------------------------


def _write_companions(
    output: Output,
    settings: ModelConfig | None,
    tokenizer: Path | Any | None,
    found: _Contents,
) -> None:
    if found.adapter is not None:
        output.put(ADAPTER_CONFIG, _json(found.adapter.values))
    if settings is not None:
        output.put(CONFIG, _json(settings.complete(_main_dtype(found.targets))))
        generation = settings.generation()
        beside = settings.directory / GENERATION_CONFIG if settings.directory else None
        if beside is not None and beside.is_file():
            output.put(GENERATION_CONFIG, beside.read_bytes())
        elif generation is not None:
            output.put(GENERATION_CONFIG, _json(generation))
    if isinstance(tokenizer, Path):
        for path in tokenizer_files(tokenizer):
            output.put(path.name, path.read_bytes())
    elif tokenizer is not None and is_local(output.url):
        tokenizer.save_pretrained(output.url)
    elif tokenizer is not None:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            for path in sorted(Path(folder).iterdir()):
                output.put(path.name, path.read_bytes())


def _index(files: Sequence[OutputFile]) -> bytes:
    weight_map = {t.name: file.name for file in files for t in file.targets}
    total = sum(file.data_bytes for file in files)
    return _json(
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    )


def _main_dtype(targets: Sequence[Target]) -> str | None:
    """The floating dtype that most bytes have: what the model should be loaded in."""
    counts: dict[str, int] = {}
    for target in targets:
        if target.dtype in CASTABLE:
            nbytes = int(np.prod(target.shape)) * DTYPES[target.dtype].itemsize
            counts[target.dtype] = counts.get(target.dtype, 0) + nbytes
    return max(counts, key=lambda name: counts[name]) if counts else None


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, sort_keys=False) + "\n").encode()


# -- arguments -----------------------------------------------------------------------------------


def _tokenizer(tokenizer: Any, settings: ModelConfig | None) -> Path | Any | None:
    if tokenizer is None:
        return settings.directory if settings is not None else None
    if isinstance(tokenizer, (str, os.PathLike)):
        path = Path(os.fspath(tokenizer))
        if not tokenizer_files(path):
            raise UsageError(
                "no tokenizer files are there",
                remedy="pass a local directory with tokenizer.json or the like",
                path=str(path),
            )
        return path
    if hasattr(tokenizer, "save_pretrained"):
        return tokenizer
    raise UsageError(
        f"tokenizer= is a {type(tokenizer).__name__}",
        remedy="pass a directory, or a tokenizer that has save_pretrained",
    )


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
