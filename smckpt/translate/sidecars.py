"""The files beside an export's weights: config, generation config, tokenizer, index."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smckpt.errors import UsageError
from smckpt.layout.entries import DTYPES
from smckpt.storage.urls import is_local
from smckpt.translate.cast import CASTABLE
from smckpt.translate.config import (
    CONFIG,
    GENERATION_CONFIG,
    ModelConfig,
    code_files,
    tokenizer_files,
)
from smckpt.translate.files import Output
from smckpt.translate.lora import ADAPTER_CONFIG, LoraConfig
from smckpt.translate.targets import OutputFile, Target, is_quantized

__all__ = ["index_of", "tokenizer_of", "write_sidecars"]


def write_sidecars(
    output: Output,
    settings: ModelConfig | None,
    tokenizer: Path | Any | None,
    adapter: LoraConfig | None,
    targets: Sequence[Target],
) -> None:
    if adapter is not None:
        output.put(ADAPTER_CONFIG, _json(adapter.values))
    if settings is not None:
        values = settings.complete(_main_dtype(targets))
        # it describes the input's weights, which were quantized
        if not any(map(is_quantized, targets)):
            values.pop("quantization_config", None)
        output.put(CONFIG, _json(values))
        for path in code_files(settings.directory) if settings.directory else ():
            output.put(path.name, path.read_bytes())
        generation = settings.generation()
        beside = settings.directory / GENERATION_CONFIG if settings.directory else None
        if beside is not None and beside.is_file():
            output.put(GENERATION_CONFIG, beside.read_bytes())
        elif generation is not None:
            output.put(GENERATION_CONFIG, _json(generation))
    if isinstance(tokenizer, Path):
        for path in (*tokenizer_files(tokenizer), *code_files(tokenizer)):
            folder = "" if path.parent == tokenizer else path.parent.name
            output.put(path.name, path.read_bytes(), folder)
    elif tokenizer is not None and is_local(output.url):
        tokenizer.save_pretrained(output.url)
    elif tokenizer is not None:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            for path in sorted(Path(folder).iterdir()):
                output.put(path.name, path.read_bytes())


def index_of(files: Sequence[OutputFile]) -> bytes:
    weight_map = {t.name: file.name for file in files for t in file.targets}
    total = sum(file.data_bytes for file in files)
    return _json(
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    )


def _main_dtype(targets: Sequence[Target]) -> str | None:
    """The floating dtype of the most bytes, in which the model should be loaded."""
    counts: dict[str, int] = {}
    for target in targets:
        if target.dtype in CASTABLE:
            nbytes = int(np.prod(target.shape)) * DTYPES[target.dtype].itemsize
            counts[target.dtype] = counts.get(target.dtype, 0) + nbytes
    return max(counts, key=lambda name: counts[name]) if counts else None


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, sort_keys=False) + "\n").encode()


def tokenizer_of(tokenizer: Any, settings: ModelConfig | None) -> Path | Any | None:
    if tokenizer is None:
        return settings.directory if settings is not None else None
    if isinstance(tokenizer, (str, os.PathLike)):
        path = Path(os.fspath(tokenizer))
        if not tokenizer_files(path):
            raise UsageError(
                "the directory has no tokenizer files",
                remedy="pass a local directory with tokenizer.json or another tokenizer file",
                path=str(path),
            )
        return path
    if hasattr(tokenizer, "save_pretrained"):
        return tokenizer
    raise UsageError(
        f"tokenizer= is a {type(tokenizer).__name__}, which cannot be saved",
        remedy="pass a directory, or a tokenizer that has save_pretrained",
    )
