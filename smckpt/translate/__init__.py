"""From a checkpoint to Hugging Face files: offline, streaming, without torch."""

from __future__ import annotations

from smckpt.translate.export import ExportReport, export_hf

__all__ = ["ExportReport", "export_hf"]
