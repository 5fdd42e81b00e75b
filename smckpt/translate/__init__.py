"""Between checkpoints and Hugging Face files: offline, streaming, proven before data moves."""

from __future__ import annotations

from smckpt.translate.export import ExportReport, export_hf
from smckpt.translate.imports import ImportReport, import_hf
from smckpt.translate.layouts import get_layout, register_layout
from smckpt.translate.table import Layout, Row
from smckpt.translate.verify_hf import HFReport, verify_hf

__all__ = [
    "ExportReport",
    "HFReport",
    "ImportReport",
    "Layout",
    "Row",
    "export_hf",
    "get_layout",
    "import_hf",
    "register_layout",
    "verify_hf",
]
