"""Import a Hugging Face directory as a checkpoint of tensor- and expert-parallel ranks:
`import_hf`."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smckpt.calls import alone
from smckpt.errors import UsageError
from smckpt.storage import access_to
from smckpt.storage.urls import normal_url
from smckpt.topology import ParallelState
from smckpt.translate.arguments import check_counts, check_flags, check_paths, refuse_store
from smckpt.translate.checkpoint_output import CheckpointOutput, new_session, rank_files
from smckpt.translate.config import CONFIG, ModelConfig, read_config
from smckpt.translate.degrees import Degrees
from smckpt.translate.files import refuse_into_source
from smckpt.translate.finite import NonFinite, refuse_nonfinite
from smckpt.translate.layouts import get_layout
from smckpt.translate.model import from_hub, model_dims
from smckpt.translate.prediction import DROP, check_mtp, with_prediction_layers
from smckpt.translate.release import open_release
from smckpt.translate.stream import write_chunks
from smckpt.translate.table import TensorLayout
from smckpt.translate.vocabulary import most_padding, padded_rows

__all__ = ["ImportReport", "import_hf"]

log = logging.getLogger("smckpt")


@dataclass(frozen=True)
class ImportReport:
    """What an import wrote. files: the data of each rank, tensor-parallel ranks innermost. notes:
    remarks for the user. nonfinite: tensor → how many NaN and infinite elements it has, in all
    ranks' files together.
    """

    directory: str
    files: tuple[str, ...]
    layout: str
    nbytes: int
    seconds: float
    notes: tuple[str, ...] = ()
    nonfinite: dict[str, int] = field(default_factory=dict)


@alone()
def import_hf(
    directory: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    layout: str | TensorLayout,
    *,
    tp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    config: Any = None,
    pad_vocab_to_multiple_of: int = 1,
    prefix: str = "model",
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    overwrite: bool = False,
    s3_region: str | None = None,
    s3client_config: Any = None,
    allow_nonfinite: bool = False,
    mtp: str = DROP,
) -> ImportReport:
    """Write the model in `directory` as a checkpoint of the ranks of a tensor-parallel layout.

    It is the checkpoint that tp × ep ranks would have saved, each with plain tensors of its own. It
    records the ranks' coordinates. `load(…, parallel_state=…)` fills a live model of these degrees
    from it, with or without FSDP. config.json is beside it. Rows of padding are zero. A tensor of
    which several ranks hold copies is in each rank's file. The bytes of weights are copied, never
    changed, except quantized ones: float8 with `weight_scale_inv` (DeepSeek) and mxfp4 (GPT-OSS)
    become the numbers that they stand for, in the config's dtype, and the config that is written
    has no `quantization_config`. Memory stays at two chunks of 16 MiB per thread.

    Args:
        directory: has safetensors files, or else `pytorch_model.bin` or its index, and config.json
            unless `config` is given.
        out_dir: the checkpoint's directory, on disk or in S3. It is made if it is missing.
        layout: a layout's name, or a `TensorLayout`.
        tp: the tensor-parallel degree.
        ep: the expert-parallel degree.
        etp: the degree at which experts are cut, if it is not tp, as in `export_hf`. As many ranks
            are written as are needed for all experts. They are recorded as tp times expert-parallel
            ranks.
        pad_vocab_to_multiple_of: each rank's rows are padded to this multiple (Megatron's
            make_vocab_size_divisible_by). A note says if a later export will need
            `padded_vocab_size`.
        prefix: the dotted place of the model in the state dict that will be loaded; "" for all of
            it.
        threads: as in `export_hf`.
        progress: as in `export_hf`.
        overwrite: replace a checkpoint in `out_dir`. The old one stays until the new one is whole.
        s3_region: as for `save`, if `out_dir` is in S3.
        s3client_config: as for `save`, if `out_dir` is in S3.
        allow_nonfinite: also import weights with NaN or infinity; the report counts them.
        mtp: layers that predict further tokens (DeepSeek's `num_nextn_predict_layers`): "drop"
            leaves them out, and a note says so; "keep" writes them as Megatron-core's `mtp`, and
            refuses a layout that has no such layers.

    Raises:
        UsageError: an argument is wrong; `out_dir` is not empty; weights are NaN or infinite.
        KeysMismatchError, TensorMismatchError: the files are not the model that the config
            describes.
        TopologyError: a degree does not divide a size of the model.
    """
    began = time.perf_counter()
    check_paths(directory=directory, out_dir=out_dir)
    refuse_store(directory=directory, config=config)
    workers = min(8, os.cpu_count() or 1) if threads is None else threads
    check_counts(pad_vocab_to_multiple_of=pad_vocab_to_multiple_of, threads=workers)
    check_flags(overwrite=overwrite, allow_nonfinite=allow_nonfinite)
    check_mtp(mtp)
    if not isinstance(prefix, str):
        raise UsageError(f"prefix={prefix!r}", remedy='pass a dotted place, or "" for none')
    degrees = Degrees.of(tp, ep, etp)
    folder, url = Path(os.fspath(directory)), normal_url(os.fspath(out_dir))
    access = access_to(url, s3_region=s3_region, s3client_config=s3client_config)
    refuse_into_source(url, directory=folder)
    settings = read_config(folder if config is None else config)
    family = model_dims(settings, str(folder)).family
    assert settings is not None
    chosen = get_layout(layout, family)
    reader, predicting, left_out = open_release(folder, settings, family, mtp)
    dims = model_dims(settings, str(folder), predicting)
    source, made = from_hub(reader, dims, chosen, degrees, pad_vocab_to_multiple_of)
    topology = ParallelState(
        degrees.ranks, tensor_parallel_degree=tp, expert_parallel_degree=degrees.columns
    )
    notes = [*left_out, *_notes(chosen, dims.sizes["V"], degrees.tp, pad_vocab_to_multiple_of)]
    nonfinite = NonFinite()
    ranker, ranks = topology.ranker, range(degrees.ranks)
    session = new_session()
    own = [made[ranker.get_tp_rank(r), ranker.get_ep_rank(r)] for r in ranks]
    files = rank_files(session, tuple(filter(None, prefix.split("."))), own)
    with ExitStack() as cleanup:
        output = CheckpointOutput(access.open(url), session, files)
        cleanup.callback(output.close)
        cleanup.callback(source.close)
        output.prepare(overwrite=overwrite)
        on_failure = cleanup.enter_context(ExitStack())
        on_failure.callback(output.abandon)
        write_chunks(source, output, files, workers, progress, nonfinite.look)
        counts = nonfinite.counts
        notes += refuse_nonfinite(counts, allow_nonfinite, output.url, "use a model without them")
        output.put_parts(topology, {"layout": chosen.name})
        # last, because it replaces the old checkpoint's config, which must stay until `commit`
        if predicting or left_out:
            settings = with_prediction_layers(settings, predicting)
        output.put(CONFIG, (json.dumps(_config(settings), indent=2) + "\n").encode())
        on_failure.pop_all()
        output.commit(sweep_older=overwrite)
    for note in notes:
        log.warning("%s: %s", output.url, note)
    return ImportReport(
        output.url, tuple(file.name for file in files), chosen.name,
        sum(file.data_bytes for file in files), time.perf_counter() - began, tuple(notes), counts,
    )  # fmt: skip


def _config(settings: ModelConfig) -> dict[str, Any]:
    """The config of what was written: nothing is quantized."""
    values = settings.complete(None)
    values.pop("quantization_config", None)
    return values


def _notes(layout: TensorLayout, size: int, tp: int, multiple: int) -> list[str]:
    """A note if a later export would not recognise the padding by itself."""
    rows = padded_rows(size, tp, multiple)
    padded = any(row.how == "vocabulary" for row in layout.rows)
    if not padded or rows - size <= most_padding(rows, tp):
        return []
    return [
        f"the vocabulary of {size} is padded to {rows} rows, which is not a multiple that "
        f"trainers round up to: export with padded_vocab_size={rows}"
    ]
