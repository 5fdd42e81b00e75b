"""Import a model as a checkpoint of tensor-, expert- and pipeline-parallel ranks: `import_hf`.

The source is anything that an export reads. One translation goes from the source's tensors to the
ranks': nothing is written between, and where both sides are layouts, no form of Hugging Face is
made. The checkpoint has one part for each rank, as if ranks had saved it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from smckpt.calls import alone, checked
from smckpt.checkpoint.commits.commit import commit_alone, refuse_not_empty
from smckpt.checkpoint.commits.part import PartWriter, SummedFile, part_body
from smckpt.checkpoint.records.format import data_name, new_attempt
from smckpt.checkpoint.records.rows import encode_rows
from smckpt.errors import UsageError, errors_at
from smckpt.formats.degrees import check_paths, refuse_given, refuse_store
from smckpt.formats.names import CONFIG
from smckpt.formats.tensors import TensorReader
from smckpt.layout.entries import Entry, Path, dotted
from smckpt.layout.geometry import PerRankGeometry
from smckpt.layout.image import Layout, compile_layout
from smckpt.storage import Storage, StoreOptions, access_to
from smckpt.storage.urls import normal_url
from smckpt.topology import ParallelState
from smckpt.translate.cast import NonFinite, refuse_nonfinite
from smckpt.translate.config import ModelConfig
from smckpt.translate.exports.options import ImportOptions
from smckpt.translate.exports.sidecars import read_settings
from smckpt.translate.facts import refuse_halves
from smckpt.translate.files import Output, OutputFile, refuse_into_source
from smckpt.translate.models.model import model_dims, source_of_ranks, source_of_release, to_ranks
from smckpt.translate.models.model_source import ModelSource, Parallel, open_model
from smckpt.translate.models.quantized import open_release
from smckpt.translate.prediction import with_prediction_layers
from smckpt.translate.ranks.pipeline import stages_of_ranks
from smckpt.translate.ranks.translated import Translated
from smckpt.translate.stream import write_chunks
from smckpt.translate.tables.layouts import get_layout
from smckpt.translate.tables.pieces import Side
from smckpt.translate.tables.table import Family
from smckpt.translate.tables.vocabulary import most_padding, padded_rows

_ONE_FILE = 1 << 62  # bytes; large enough that no rank's data is split


@dataclass(frozen=True)
class RankFile(OutputFile):
    """The data file of a rank, with the layout that the rank would use."""

    layout: Layout

    @cached_property
    def header(self) -> bytes:
        return self.layout.files[0].header


def rank_files(
    attempt: str, prefix: Path, ranks: Sequence[Sequence[Translated]]
) -> tuple[RankFile, ...]:
    """Make a file for each rank, with its own tensors under `prefix` in the state dict."""
    files = []
    for rank, targets in enumerate(ranks):
        entries = [
            Entry(
                path=(*prefix, t.name), dtype=t.dtype, before=prefix, after=(), ranks=(rank,),
                geometry=PerRankGeometry((t.name,), t.shape, (rank,)),
            )
            for t in targets
        ]  # fmt: skip
        layout = compile_layout(
            entries, rank=rank, group_ranks=range(len(ranks)), max_file_bytes=_ONE_FILE
        )
        named = tuple(replace(t, name=dotted((*prefix, t.name))) for t in targets)
        files.append(RankFile(data_name(attempt, rank, 0), named, layout))
    return tuple(files)


class CheckpointOutput(Output):
    """The directory `storage`, which becomes a checkpoint with one rank for each file."""

    def __init__(self, storage: Storage, attempt: str, files: Sequence[RankFile]) -> None:
        super().__init__(storage, files)
        self._hidden = False  # only a manifest makes the files a checkpoint
        self._attempt = attempt
        self._writers = {
            file.name: PartWriter(storage, attempt, rank) for rank, file in enumerate(files)
        }
        self._layouts = [file.layout for file in files]
        self._parts: list[dict[str, str]] = []

    def prepare(self, *, overwrite: bool) -> list[str]:
        """Refuse a directory that is not empty, but for what a try left that was killed. With
        `overwrite`, an old checkpoint there is removed after this one is committed."""
        self.storage.discard_unfinished([CONFIG])
        if not overwrite:
            refuse_not_empty(self.storage, beside=(CONFIG,))
        self.check_space()
        return []

    def put_parts(self, topology: ParallelState, metadata: Mapping[str, Any]) -> None:
        """Write the part of each rank."""
        for layout, writer in zip(self._layouts, self._writers.values(), strict=True):
            body = part_body(
                layout,
                encode_rows(layout.entries, {}),
                checkpoint_id=self.url,
                kind="SHARDED",
                step=0,
                topology=topology.to_json(),
                metadata=metadata,
            )
            self._parts.append(writer.finish(body))

    def commit(self) -> None:
        """Commit the checkpoint. If that fails, nothing may be deleted (see `commit_alone`)."""
        commit_alone(self.storage, self._attempt, self._parts)

    def abandon(self) -> None:
        for writer in self._writers.values():
            writer.abort()
        super().abandon()

    def begun(self, file: OutputFile, name: str) -> SummedFile:
        return self._writers[file.name].file(file.size)


log = logging.getLogger("smckpt")


@dataclass(frozen=True)
class ImportReport:
    """What an import wrote. files: the data of each rank, tensor-parallel ranks innermost. notes:
    remarks for the user. nonfinite: tensor → how many NaN and infinite elements it has, in all
    ranks' files together. source: the format of what was read.
    """

    directory: str
    files: tuple[str, ...]
    layout: str
    nbytes: int
    seconds: float
    notes: tuple[str, ...] = ()
    nonfinite: dict[str, int] = field(default_factory=dict)
    source: str = "smckpt"


@alone()
def import_hf(
    directory: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out_dir: str | os.PathLike[str],
    parallel: Parallel,
    *,
    config: Any = None,
    prefix: str = "model",
    source: Parallel | None = None,
    from_prefix: str | None = None,
    options: ImportOptions | None = None,
    storage: StoreOptions | Mapping[str, Any] | None = None,
) -> ImportReport:
    """Write a model as a checkpoint of the ranks of a tensor-parallel layout.

    It is the checkpoint that tp × ep × pp ranks would have saved, each with plain tensors of its
    own. It records the ranks' coordinates. `load(…, parallel_state=…)` fills a live model of these
    degrees from it, with or without FSDP. config.json is beside it. Rows of padding are zero. A
    tensor of which several ranks hold copies is in each rank's file. The bytes of weights are
    copied, never changed, except quantized ones: float8 with `weight_scale_inv` (DeepSeek) and
    mxfp4 (GPT-OSS) become the numbers that they stand for, in the config's dtype, and the config
    that is written has no `quantization_config`. Memory stays at two chunks of 16 MiB per thread.

    Args:
        directory: a Hugging Face directory (safetensors files, or else `pytorch_model.bin` or its
            index), or anything else that `export_hf` reads: a checkpoint of another layout or of
            other degrees, a directory of Megatron's, a list of the files of ranks.
        out_dir: the checkpoint's directory, on disk or in S3. It is made if it is missing.
        parallel: the ranks that are written, such as `Parallel("te_split", tp=2)`: their layout,
            which must be named, and their degrees, by default 1. With `etp`, as many ranks are
            written as are needed for all experts. They are recorded as tp times expert-parallel
            ranks. The pp stages have the same number of layers each. Those of Megatron's layouts
            (`mcore_…`) number their layers from 0; in others layers keep the model's numbers. The
            embedding is in the first stage, the last norm and the head in the last one, which has a
            copy of the embedding where the config ties the two.
        config: the model's, as in `export_hf`. By default the one in the source's directory.
        prefix: the dotted place of the model in the state dict that will be loaded; "" for all of
            it.
        source: how the ranks that wrote the source shared the model: `parallel` in `export_hf`.
        from_prefix: the model's place in the source: `prefix` in `export_hf`.
        options: everything else: whether to replace a checkpoint, padding, checks; see
            `ImportOptions`.
        storage: as for `save`, if `directory` or `out_dir` is in S3.

    Raises:
        UsageError: an argument is wrong; `out_dir` is not empty; weights are NaN or infinite.
        KeysMismatchError, TensorMismatchError: the source is not the model that the config
            describes.
        TopologyError: a degree does not divide a size of the model.
    """
    began = time.perf_counter()
    check_paths(out_dir=out_dir)
    files = directory if isinstance(directory, (list, tuple)) else ()
    if not files:
        check_paths(directory=directory)
    refuse_store(config=config)
    options = checked(ImportOptions, options)
    given, ranks = Parallel.of(source, "source"), Parallel.of(parallel)
    if ranks.layout is None:
        raise UsageError(
            "parallel= names no layout to write", remedy='pass a Parallel("te_split", tp=2)'
        )
    refuse_given(
        "in the parallel= of ranks that are written",
        vpp=ranks.vpp,
        padded_vocab_size=ranks.padded_vocab_size,
        allow_equal_ranks=ranks.allow_equal_ranks or None,
    )
    if not isinstance(prefix, str):
        raise UsageError(f"prefix={prefix!r}", remedy='pass a dotted place, or "" for none')
    degrees, pp, multiple = ranks.degrees, ranks.pp or 1, options.pad_vocab_to_multiple_of
    url = normal_url(os.fspath(out_dir))
    read = [] if files else [os.fspath(directory)]  # type: ignore[arg-type]
    access = access_to(url, *read, storage=storage)
    refuse_into_source(url, *files, directory=None if files else directory, config=config)
    with ExitStack() as cleanup:
        settings, config_notes = read_settings(config, access, directory, cleanup)
        found = open_model(access, directory, from_prefix, settings, given)
        family = model_dims(settings, os.fspath(files[0]) if files else read[0]).family
        assert settings is not None
        chosen = get_layout(ranks.layout, family)
        with errors_at(found.reader.url):
            refuse_halves(settings, chosen)
            side, reader, predicting, left_out = _side_of(found, settings, family, options.mtp)
            chunks, made = to_ranks(reader, side, chosen, degrees, multiple)
        cleanup.callback(chunks.close)
        stages = stages_of_ranks(chosen, side.dims, degrees.ep, pp)
        topology = ParallelState(
            degrees.ranks * pp, tensor_parallel_degree=degrees.tp,
            expert_parallel_degree=degrees.columns, pipeline_parallel_degree=pp,
        )  # fmt: skip
        size = side.dims.sizes["V"]
        notes = [
            *(note for note in config_notes if config is None and not found.is_hub), *found.notes,
            *left_out,
        ]  # fmt: skip
        rows = padded_rows(size, degrees.tp, multiple)
        padded = any(row.how == "vocabulary" for row in chosen.rows)
        if padded and rows - size > most_padding(rows, degrees.tp):
            notes.append(
                f"the vocabulary of {size} is padded to {rows} rows, which is not a multiple that "
                f"trainers round up to: export with padded_vocab_size={rows}"
            )
        nonfinite = NonFinite()
        ranker, attempt = topology.ranker, new_attempt()
        own = [
            stages[ranker.get_pp_rank(r)].of(made[ranker.get_tp_rank(r), ranker.get_ep_rank(r)])
            for r in range(topology.world_size)
        ]
        written = rank_files(attempt, tuple(filter(None, prefix.split("."))), own)
        output = CheckpointOutput(access.open(url), attempt, written)
        cleanup.callback(output.close)
        output.prepare(overwrite=options.overwrite)
        on_failure = cleanup.enter_context(ExitStack())
        on_failure.callback(output.abandon)
        write_chunks(chunks, output, written, options.workers, options.progress, nonfinite.look)
        counts = nonfinite.counts
        notes += refuse_nonfinite(
            counts, options.allow_nonfinite, output.url, "use a model without them"
        )
        output.put_parts(topology, {"layout": chosen.name})
        # last, because it replaces the old checkpoint's config, which must stay until `commit`
        if predicting or left_out:
            settings = with_prediction_layers(settings, predicting)
        values = settings.complete(None)
        values.pop("quantization_config", None)  # nothing that was written is quantized
        output.put(CONFIG, (json.dumps(values, indent=2) + "\n").encode())
        on_failure.pop_all()
        output.commit()
    for note in notes:
        log.warning("%s: %s", output.url, note)
    return ImportReport(
        output.url, tuple(file.name for file in written), chosen.name,
        sum(file.data_bytes for file in written), time.perf_counter() - began, tuple(notes),
        counts, found.format,
    )  # fmt: skip


def _side_of(
    found: ModelSource, settings: ModelConfig, family: Family, mtp: str
) -> tuple[Side, TensorReader, int, tuple[str, ...]]:
    """The tensors of a source as a side, their reader, how many layers that predict further tokens
    are among them, and notes."""
    if not found.cut:
        reader, predicting, left_out = open_release(found.reader, settings, family, mtp)
        dims = model_dims(settings, reader.url, predicting)
        return source_of_release(reader, dims), reader, predicting, left_out
    given = found.given
    side, predicting, notes = source_of_ranks(
        found.reader, settings, given.layout, found.degrees, given.padded_vocab_size, mtp,
        found.facts, equal_ranks=given.allow_equal_ranks,
    )  # fmt: skip
    return side, found.reader, predicting, notes
