"""The weights of a released checkpoint: a Hugging Face directory as it is downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from smckpt.translate.boxes import BoxTensors
from smckpt.translate.config import ModelConfig
from smckpt.translate.family import Family
from smckpt.translate.quantized import dequantized
from smckpt.translate.rank_files import TensorReader, open_directory
from smckpt.translate.table import TensorLayout

__all__ = ["PREDICTION_LAYERS", "open_release", "weights_of"]

PREDICTION_LAYERS = "num_nextn_predict_layers"  # of the config


def open_release(
    directory: Path, settings: ModelConfig, family: Family
) -> tuple[TensorReader, list[str]]:
    """A reader of the model's tensors by the names of the family's table, and notes for the user.

    Quantized weights are read in the config's dtype. Layers that predict further tokens (DeepSeek's
    multi-token prediction), which follow the model's own, are left out.

    Raises:
        as `open_directory` and `dequantized`.
    """
    return weights_of(_with_outer_name(open_directory(directory), family.hub), settings, family)


def weights_of(
    files: BoxTensors, settings: ModelConfig, family: Family | None
) -> tuple[TensorReader, list[str]]:
    """As `open_release`, of files that are open. Without a family, no layer is left out."""
    extra = [] if family is None else _prediction_layers(files, settings, family)
    notes = []
    if extra:
        notes.append(
            f"{len(extra)} tensors of layers that predict further tokens are left out "
            f"({PREDICTION_LAYERS}), such as {extra[0]}"
        )
        files = files.renamed({name: name for name in files.held if name not in set(extra)})
    return dequantized(files, settings), notes


def _with_outer_name(files: BoxTensors, hub: TensorLayout) -> BoxTensors:
    """Add the outer module's name. Releases of the bare model, such as GPT-2's, lack it."""
    outer = next(row.name for row in hub.rows if "{i}" in row.name).split(".")[0]
    heads = {row.name for row in hub.rows if row.roles == ("head",)}
    if any(name.startswith(f"{outer}.") for name in files.held):
        return files
    return files.renamed({n: n if n in heads else f"{outer}.{n}" for n in files.held})


def _prediction_layers(files: BoxTensors, settings: ModelConfig, family: Family) -> list[str]:
    """The names of the layers that the config says follow the model's own."""
    first, more = (settings.values.get(k) for k in ("num_hidden_layers", PREDICTION_LAYERS))
    if not isinstance(first, int) or not isinstance(more, int):
        return []
    layer = re.compile(rf"{re.escape(family.words['layers'])}\.(\d+)\.")
    found = ((name, layer.match(name)) for name in sorted(files.held))
    return [name for name, m in found if m and first <= int(m.group(1)) < first + more]
