"""The files beside a model's config: of its tokenizer or processor, its templates and its code."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from smckpt.checkpoint.records.sealed import read_json
from smckpt.errors import UsageError
from smckpt.formats.names import CONFIG

GENERATION_CONFIG = "generation_config.json"

# Files that tokenizers and processors of transformers save beside a model.
_TOKENIZER_FILES = (
    "added_tokens.json",
    "audio_tokenizer_config.json",
    "bpe.codes",
    "byte_maps.json",
    "chat_template.jinja",
    "chat_template.json",
    "dict.txt",
    "emoji.json",
    "entity_vocab.json",
    "merges.txt",
    "normalizer.json",
    "preprocessor_config.json",
    "processor_config.json",
    "prophetnet.tokenizer",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "target_vocab.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab-src.json",
    "vocab-tgt.json",
    "vocab.json",
    "vocab.txt",
    "word_pronunciation.json",
    "word_shape.json",
)
# `fast_tokenizer_files` and `configuration_files` name them
_OF_VERSION, _CONFIG_OF_VERSION = (
    re.compile(rf"{name}\.\d[\d.]*\.json") for name in ("tokenizer", "config")
)
_TOKENIZER_ENDINGS = (".model", ".spm", ".tiktoken")
TEMPLATES = "additional_chat_templates"  # a directory of *.jinja
# Files whose `auto_map` names classes in Python files beside them.
_WITH_CODE = (
    CONFIG, "tokenizer_config.json", "processor_config.json", "preprocessor_config.json",
    "video_preprocessor_config.json",
)  # fmt: skip
_MOST_CODE = 1 << 24  # bytes of a module that is searched for imports
_NAMED = re.compile(
    r"""["']([^"'\\/\n]{1,255})["']"""
)  # a text of Python that may be a file's name
# of the model itself, and of other weights than those that are written
_OF_MODEL = (
    CONFIG, GENERATION_CONFIG, "adapter_config.json", "hf_quant_config.json",
    "quantize_config.json", "params.json",
)  # fmt: skip
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
_IMPORTED = re.compile(r"^[ \t]*(?:from\s+\.(\w+)\s+import|import\s+\.(\w+))", re.MULTILINE)


def is_beside_config(name: str) -> bool:
    """Whether a file of this name belongs to a model's config: of a tokenizer, or code."""
    if name in (CONFIG, GENERATION_CONFIG) or _CONFIG_OF_VERSION.fullmatch(name):
        return True
    return is_of_tokenizer(name) or name.endswith(".py")


def is_of_tokenizer(name: str) -> bool:
    """Whether a file of this name belongs to a tokenizer or processor."""
    return (
        name in _TOKENIZER_FILES
        or name.endswith(_TOKENIZER_ENDINGS)
        or _OF_VERSION.fullmatch(name) is not None
    )


def tokenizer_files(directory: Path) -> list[Path]:
    """The files of a tokenizer or processor in `directory`, with its further chat templates and
    what custom code names."""
    inside = [path for path in directory.glob("*") if path.is_symlink() or not path.is_dir()]
    names = {path.name for path in inside if is_of_tokenizer(path.name)}
    names.update(named_in_code(code_files(directory), [path.name for path in inside]))
    found = [directory / name for name in sorted(names.union(_TOKENIZER_FILES))]
    templates = directory / TEMPLATES
    if not templates.is_dir():
        has_file(templates)  # it is absent, or refused
    return [path for path in (*found, *sorted(templates.glob("*.jinja"))) if has_file(path)]


def has_file(path: Path) -> bool:
    """Whether a file has the name. Without what else has it, an export would be in silence.

    Raises:
        UsageError: a directory, a pipe, a socket, a device, or a link that leads nowhere has it.
    """
    if path.is_file():
        return True
    if os.path.lexists(path):
        raise UsageError(
            f"{path.name} is no file: it is a directory, pipe, socket or device, or a link that "
            "leads nowhere",
            remedy="put the file itself there, or remove it",
            path=str(path),
        )
    return False


def code_files(directory: Path) -> list[Path]:
    """The Python files in `directory` that an `auto_map` there names, and those that they import
    from beside them. `trust_remote_code=True` runs them; an export copies them as they are. A name
    that leads out of `directory` is none of them."""
    return with_imported(directory, _mapped(directory))


def _mapped(directory: Path) -> list[str]:
    wanted: list[str] = []
    for path in (directory / file for file in _WITH_CODE):
        with suppress(OSError, ValueError):
            wanted += modules_of_map(read_json(path, given=False) if path.is_file() else {})
    return wanted


def named_in_code(code: list[Path], names: Iterable[str]) -> set[str]:
    """Those of the files beside custom code that it names: a tokenizer's own vocabulary, which
    transformers looks for under such a name. Weights are none of them."""
    texts = set[str]()
    for path in code:
        if path.stat().st_size <= _MOST_CODE:
            texts.update(_NAMED.findall(path.read_text(errors="replace")))
    return {
        name
        for name in texts.intersection(names)
        if name not in _OF_MODEL and not name.endswith((*_WEIGHTS, ".index.json", ".py"))
    }


def left_folders(directory: Path) -> list[str]:
    """The folders in `directory` with a tokenizer and no more: a processor's further ones, and not
    the checkpoints of a run."""
    folders = {path.parent for path in directory.glob("*/tokenizer_config.json")}
    return sorted(f.name for f in folders if holds_tokenizer([path.name for path in f.iterdir()]))


def holds_tokenizer(names: Sequence[str]) -> bool:
    """Whether these are the files of a tokenizer alone."""
    return "tokenizer_config.json" in names and all(map(is_of_tokenizer, names))


def absent_code(directory: Path) -> list[str]:
    """The Python files that an `auto_map` in `directory` names, and that are not there."""
    there = {path.name for path in code_files(directory)}
    return sorted({f"{name}.py" for name in _mapped(directory)} - there)


def with_imported(directory: Path, wanted: list[str]) -> list[Path]:
    """The modules in a directory, and those that they import from beside them."""
    from smckpt.storage.urls import is_plain_name  # the child that compares needs no store

    found: dict[str, Path] = {}
    while wanted:
        name = wanted.pop()
        path = directory / f"{name}.py"
        if name in found or not is_plain_name(name):
            continue
        if not os.path.lexists(path) or not has_file(path):  # a name may be too long for a file
            continue
        found[name] = path
        if path.stat().st_size > _MOST_CODE:
            continue
        text = path.read_text(errors="replace")
        wanted += [a or b for a, b in _IMPORTED.findall(text)]
    return [found[name] for name in sorted(found)]


def modules_of_map(contents: Any) -> list[str]:
    """The modules that an `auto_map` names, except those in another repository."""
    named = contents.get("auto_map") if isinstance(contents, Mapping) else None
    values = named.values() if isinstance(named, dict) else [named]
    each = [c for value in values for c in (value if isinstance(value, list) else [value])]
    return [c.split(".")[0] for c in each if isinstance(c, str) and "--" not in c]
