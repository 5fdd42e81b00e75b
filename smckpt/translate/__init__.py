"""Translation between checkpoints and Hugging Face files: offline, streaming, and proven before
data moves."""

from __future__ import annotations

from smckpt.translate.apply import ApplyReport, apply_published
from smckpt.translate.convert import ConvertReport, convert
from smckpt.translate.export import ExportReport, export_hf
from smckpt.translate.families import register_family
from smckpt.translate.family import Family
from smckpt.translate.imports import ImportReport, import_hf
from smckpt.translate.layouts import get_layout, register_layout
from smckpt.translate.publish import PublishReport, publish
from smckpt.translate.servers import ReloadReport, reload_weights
from smckpt.translate.table import LayoutRow, TensorLayout
from smckpt.translate.verify_hf import HFReport, verify_hf

__all__ = [
    "ApplyReport",
    "ConvertReport",
    "ExportReport",
    "Family",
    "HFReport",
    "ImportReport",
    "LayoutRow",
    "PublishReport",
    "ReloadReport",
    "TensorLayout",
    "apply_published",
    "convert",
    "export_hf",
    "get_layout",
    "import_hf",
    "publish",
    "register_family",
    "register_layout",
    "reload_weights",
    "verify_hf",
]
