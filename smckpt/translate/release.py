"""The weights of a released checkpoint: a Hugging Face directory as it is downloaded."""

from __future__ import annotations

from pathlib import Path

from smckpt.translate.boxes import BoxTensors
from smckpt.translate.config import ModelConfig
from smckpt.translate.family import Family
from smckpt.translate.prediction import (
    DROP,
    PREDICTION_LAYERS,
    further_layers,
    kept_layers,
    left_out_note,
)
from smckpt.translate.quantized import dequantized
from smckpt.translate.rank_files import TensorReader, open_directory
from smckpt.translate.table import TensorLayout

__all__ = ["open_release", "weights_of"]


def open_release(
    directory: Path, settings: ModelConfig, family: Family, mtp: str = DROP
) -> tuple[TensorReader, int, tuple[str, ...]]:
    """A reader of the model's tensors by the names of the family's table, how many layers that
    predict further tokens it has, and notes for the user.

    Quantized weights are read in the config's dtype. With DROP, layers that predict further tokens
    are left out.

    Raises:
        as `open_directory`, `dequantized` and `kept_layers`.
    """
    files = _with_outer_name(open_directory(directory), family.hub)
    return weights_of(files, settings, family, mtp)


def weights_of(
    files: BoxTensors, settings: ModelConfig, family: Family | None, mtp: str | None = DROP
) -> tuple[TensorReader, int, tuple[str, ...]]:
    """As `open_release`, of files that are open. Without a family, no layer is left out."""
    found = further_layers(files.held, family, settings)
    if isinstance(said := settings.values.get(PREDICTION_LAYERS), int):
        found = {name: number for name, number in found.items() if number < said}
    count = kept_layers(found, family, settings, mtp, files.url)
    if found and not count:
        files = files.renamed({name: name for name in files.held if name not in found})
    return dequantized(files, settings), count, () if count else left_out_note(found)


def _with_outer_name(files: BoxTensors, hub: TensorLayout) -> BoxTensors:
    """Add the outer module's name. Releases of the bare model, such as GPT-2's, lack it."""
    outer = next(row.name for row in hub.rows if "{i}" in row.name).split(".")[0]
    heads = {row.name for row in hub.rows if row.roles == ("head",)}
    if any(name.startswith(f"{outer}.") for name in files.held):
        return files
    return files.renamed({n: n if n in heads else f"{outer}.{n}" for n in files.held})
