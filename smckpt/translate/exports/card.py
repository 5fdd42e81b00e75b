"""The model card of an export, README.md: what it holds, from which step of which checkpoint, and
the checksums of its files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from smckpt._version import __version__
from smckpt.errors import CorruptCheckpointError, StorageError
from smckpt.translate.configs.config import ModelConfig
from smckpt.translate.models.contents import ExportContents
from smckpt.translate.writing.files import Output
from smckpt.translate.writing.targets import OutputFile, nbytes_of

__all__ = ["CARD", "write_card"]

CARD = "README.md"
_OURS = "<!-- smckpt export writes this file anew: remove this line to keep yours -->"
_MOST = 1 << 20  # bytes of an older card
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # of a model, and not a path
_TASKS = {"ForCausalLM": "text-generation", "LMHeadModel": "text-generation"}


def write_card(
    output: Output, found: ExportContents, settings: ModelConfig | None,
    files: Sequence[OutputFile], checksums: Mapping[str, str],
) -> tuple[str, ...]:  # fmt: skip
    """Write the card, unless one of the user's own is there.

    Args:
        checksums: file → CRC-64/NVME, in hexadecimal.

    Returns:
        a note if it is not written.
    """
    if CARD in output.storage.names():
        try:
            old = output.storage.read(CARD, most=_MOST).decode(errors="replace")
        except (CorruptCheckpointError, StorageError):  # a link, or too large
            old = ""
        if _OURS not in old:
            return (f"{CARD} was left as it is: smckpt did not write it",)
    text = "\n".join([*_head(found, settings), *_facts(found, settings, files),
                      *_files(files, checksums), "", _OURS, ""])  # fmt: skip
    output.put(CARD, text.encode())
    return ()


def _head(found: ExportContents, settings: ModelConfig | None) -> Iterator[str]:
    """What the Hub reads."""
    names = [] if settings is None else settings.values.get("architectures") or []
    base = "" if found.adapter is None else str(found.adapter.values.get("base_model_name_or_path"))
    yield "---"
    yield f"library_name: {'transformers' if found.adapter is None else 'peft'}"
    for ending, task in _TASKS.items():
        if names and names[0].endswith(ending):
            yield f"pipeline_tag: {task}"
    if _HUB_NAME.fullmatch(base):
        yield f"base_model: {base}"
    yield "tags:"
    yield "- smckpt"
    yield "---"
    yield ""


def _facts(
    found: ExportContents, settings: ModelConfig | None, files: Sequence[OutputFile]
) -> Iterator[str]:
    targets = [target for file in files for target in file.targets]
    numbers = sum(math.prod(target.shape) for target in targets)
    kind = "" if settings is None else str(settings.values["model_type"])
    names = [] if settings is None else settings.values.get("architectures") or []
    made_from = found.source_format + (f", layout {found.layout}" if found.layout else "")
    adapter = found.adapter
    sizes: dict[str, int] = {}
    for target in targets:
        sizes[target.dtype] = sizes.get(target.dtype, 0) + nbytes_of(target)
    facts = {
        "model": ", ".join([*names[:1], *filter(None, [kind])]),
        "adapter": "" if adapter is None else str(adapter.values.get("peft_type") or "LORA"),
        "base": "" if adapter is None else adapter.values.get("base_model_name_or_path"),
        "parameters": f"{numbers:,}",
        "dtype": ", ".join(
            sorted(sizes, key=lambda dtype: -sizes[dtype])
        ),  # that of most bytes first
        "step": "" if found.step is None else str(found.step),
        "checkpoint": found.source.url,
        "commit": found.identity,
        "made from": made_from,
        "left out": ", ".join(found.left_out[:8]) + (" and more" if found.left_out[8:] else ""),
        "written by": f"smckpt {__version__}",
    }
    yield f"# {_plain(names[0] if names else kind or 'A model')}"
    yield ""
    yield "| | |"
    yield "|---|---|"
    for name, value in facts.items():
        if value:
            yield f"| {name} | {_plain(value)} |"
    yield ""


def _files(files: Sequence[OutputFile], checksums: Mapping[str, str]) -> Iterator[str]:
    yield "## Files"
    yield ""
    yield "| file | bytes | CRC-64/NVME |"
    yield "|---|---|---|"
    for file in files:
        yield f"| {file.name} | {file.size} | {checksums.get(file.name, '')} |"


def _plain(text: object) -> str:
    """Text of a file as text of a table: nothing in it is markup."""
    shown = "".join(c if c.isprintable() else " " for c in str(text))
    return re.sub(r"([\\`*<>|\[\]&])", r"\\\1", shown)
