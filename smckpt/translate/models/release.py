"""The weights of a release, by the names of the family's table: numbers where they are quantized,
without the layers that are left out."""

from __future__ import annotations

from smckpt.translate.configs.config import ModelConfig
from smckpt.translate.configs.prediction import (
    DROP,
    PREDICTION_LAYERS,
    further_layers,
    kept_layers,
    left_out_note,
)
from smckpt.translate.models.quantized import dequantized
from smckpt.translate.ranks.pipeline import JoinedTensors, some
from smckpt.translate.sources.rank_files import TensorReader
from smckpt.translate.tables.family import Family

__all__ = ["open_release", "weights_of"]


def open_release(
    reader: TensorReader, settings: ModelConfig, family: Family, mtp: str = DROP
) -> tuple[TensorReader, int, tuple[str, ...]]:
    """A reader of the model's tensors by the names of the family's table, how many layers that
    predict further tokens it has, and notes for the user.

    Quantized weights are read in the config's dtype. With DROP, layers that predict further tokens
    are left out.

    Raises:
        as `dequantized` and `kept_layers`.
    """
    outer = next(row.name for row in family.hub.rows if "{i}" in row.name).split(".")[0]
    heads = {row.name for row in family.hub.rows if row.roles == ("head",)}
    if not any(name.startswith(f"{outer}.") for name in reader.held):  # a bare model, as of GPT-2's
        held = {n if n in heads else f"{outer}.{n}": (0, n) for n in reader.held}
        reader = JoinedTensors((reader,), held)
    return weights_of(reader, settings, family, mtp)


def weights_of(
    reader: TensorReader, settings: ModelConfig, family: Family | None, mtp: str | None = DROP
) -> tuple[TensorReader, int, tuple[str, ...]]:
    """As `open_release`. Without a family, no layer is left out."""
    found = further_layers(reader.held, family, settings)
    if isinstance(configured := settings.values.get(PREDICTION_LAYERS), int):
        found = {name: number for name, number in found.items() if number < configured}
    count = kept_layers(found, family, settings, mtp, reader.url)
    if found and not count:
        reader = some(reader, [name for name in reader.held if name not in found])
    return dequantized(reader, settings), count, () if count else left_out_note(found)
