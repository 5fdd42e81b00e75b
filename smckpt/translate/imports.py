"""The way back: a Hugging Face directory into the files of tensor- and expert-parallel ranks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smckpt.errors import UsageError
from smckpt.translate.config import CONFIG, read_config
from smckpt.translate.files import Output
from smckpt.translate.layouts import get_layout
from smckpt.translate.model import from_hub, model_dims
from smckpt.translate.stores import open_directory
from smckpt.translate.stream import write_chunks
from smckpt.translate.table import Layout
from smckpt.translate.targets import OutputFile

__all__ = ["RECORD", "ImportReport", "import_hf"]

RECORD = "layout.json"


@dataclass(frozen=True)
class ImportReport:
    """What an import wrote: a file for each rank, tensor-parallel ranks innermost."""

    directory: str
    files: tuple[str, ...]
    layout: str
    nbytes: int
    seconds: float


def import_hf(
    directory: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    layout: str | Layout,
    *,
    tp: int = 1,
    ep: int = 1,
    config: Any = None,
    pad_vocab_to_multiple_of: int = 1,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    overwrite: bool = False,
) -> ImportReport:
    """Write the model in `directory` as each rank of a tensor-parallel layout holds it.

    One safetensors file for each rank, `tp00-ep00.safetensors` and so on, the config, and
    `layout.json`, which comes last and says what the files are. Rows of padding are zero. What
    ranks hold in copies is in each one's file. Bytes are moved, never changed.

    Args:
        directory: with safetensors files, and config.json unless `config` is given.
        out_dir: the directory to write; made when missing.
        layout: a layout's name, or a `Layout`.
        tp, ep: the degrees.
        pad_vocab_to_multiple_of: of each rank's rows (Megatron's make_vocab_size_divisible_by).
        threads, progress, overwrite: as in `export_hf`.

    Raises:
        UsageError: an argument; `out_dir` is not empty.
        KeysMismatchError, TensorMismatchError: the files are not the model that the config says.
        TopologyError: a degree does not divide.
    """
    began = time.perf_counter()
    for name, value in (
        ("tp", tp), ("ep", ep), ("pad_vocab_to_multiple_of", pad_vocab_to_multiple_of),
        ("threads", 1 if threads is None else threads),
    ):  # fmt: skip
        if value < 1:
            raise UsageError(f"{name}={value}", remedy="give a number above 0")
    workers = min(8, os.cpu_count() or 1) if threads is None else threads
    folder = Path(os.fspath(directory))
    settings = read_config(folder if config is None else config)
    dims = model_dims(settings, str(folder))
    chosen = get_layout(layout, dims.family)
    store = open_directory(folder)
    source, ranks = from_hub(store, dims, chosen, tp, ep, pad_vocab_to_multiple_of)
    files = tuple(
        OutputFile(f"tp{t:02d}-ep{e:02d}.safetensors", tuple(ranks[t, e]))
        for e in range(ep)
        for t in range(tp)
    )
    output = Output(os.fspath(out_dir), files, alone=True)
    record = {"layout": chosen.name, "tp": tp, "ep": ep, "files": [file.name for file in files]}
    with ExitStack() as cleanup:
        cleanup.callback(output.close)
        cleanup.callback(source.close)
        output.prepare(overwrite=overwrite)
        on_failure = cleanup.enter_context(ExitStack())
        on_failure.callback(output.abandon)
        write_chunks(source, output, files, workers, progress)
        assert settings is not None
        output.put(CONFIG, _json(settings.complete(None)))
        output.publish(None)
        output.put(RECORD, _json(record))
        on_failure.pop_all()
    return ImportReport(
        output.url, tuple(file.name for file in files), chosen.name,
        sum(file.data_bytes for file in files), time.perf_counter() - began,
    )  # fmt: skip


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
