"""Translation between checkpoints and Hugging Face files: offline, streaming, and proven before
data moves.

Names are resolved on first use: a door that needs one module of the translator loads that one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smckpt.translate.exports.export import ExportReport, export_hf
    from smckpt.translate.exports.imports import ImportReport, import_hf
    from smckpt.translate.exports.options import ExportOptions, ImportOptions
    from smckpt.translate.exports.verify_hf import HFReport, verify_hf
    from smckpt.translate.models.adapter import Adapter
    from smckpt.translate.models.model_source import Parallel
    from smckpt.translate.publishing.apply import ApplyReport, apply_published
    from smckpt.translate.publishing.publish import PublishReport, publish
    from smckpt.translate.publishing.servers import ReloadReport, reload_weights
    from smckpt.translate.tables.families import register_family
    from smckpt.translate.tables.layouts import get_layout, register_layout
    from smckpt.translate.tables.table import Family, LayoutRow, TensorLayout

__all__ = [
    "Adapter",
    "ApplyReport",
    "ExportOptions",
    "ExportReport",
    "Family",
    "HFReport",
    "ImportOptions",
    "ImportReport",
    "LayoutRow",
    "Parallel",
    "PublishReport",
    "ReloadReport",
    "TensorLayout",
    "apply_published",
    "export_hf",
    "get_layout",
    "import_hf",
    "publish",
    "register_family",
    "register_layout",
    "reload_weights",
    "verify_hf",
]

_HOMES = {
    "exports.export": ("ExportReport", "export_hf"),
    "exports.imports": ("ImportReport", "import_hf"),
    "exports.options": ("ExportOptions", "ImportOptions"),
    "exports.verify_hf": ("HFReport", "verify_hf"),
    "models.adapter": ("Adapter",),
    "models.model_source": ("Parallel",),
    "publishing.apply": ("ApplyReport", "apply_published"),
    "publishing.publish": ("PublishReport", "publish"),
    "publishing.servers": ("ReloadReport", "reload_weights"),
    "tables.families": ("register_family",),
    "tables.layouts": ("get_layout", "register_layout"),
    "tables.table": ("Family", "LayoutRow", "TensorLayout"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
