"""From a checkpoint to Hugging Face files: offline, streaming, without torch."""

from __future__ import annotations

from smckpt.translate.export import ExportReport, export_hf
from smckpt.translate.verify_hf import HFReport, verify_hf

__all__ = ["ExportReport", "HFReport", "export_hf", "verify_hf"]
