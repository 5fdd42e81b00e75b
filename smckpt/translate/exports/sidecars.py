"""The files beside an export's weights: config, generation config, tokenizer, index."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from smckpt.checkpoint.records.strict_json import at_once
from smckpt.errors import UsageError
from smckpt.storage import Access, Storage
from smckpt.storage.urls import is_local, is_plain_name, local_path
from smckpt.translate.configs.config import (
    CONFIG,
    GENERATION_CONFIG,
    TEMPLATES,
    ModelConfig,
    code_files,
    is_beside_config,
    is_of_tokenizer,
    modules_of_map,
    read_config,
    tokenizer_files,
)
from smckpt.translate.models.lora import ADAPTER_CONFIG, LoraConfig
from smckpt.translate.writing.cast import CASTABLE
from smckpt.translate.writing.files import Output
from smckpt.translate.writing.targets import OutputFile, Target, is_quantized, nbytes_of

__all__ = ["index_of", "notes_on_absent", "read_settings", "tokenizer_of", "write_sidecars"]

_GENERATE = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")  # models that generate
# Bytes of a file beside a checkpoint or a config; a large tokenizer has some tens of MB.
_MOST = 1 << 28


def write_sidecars(
    output: Output,
    settings: ModelConfig | None,
    tokenizer: Path | Any | None,
    adapter: LoraConfig | None,
    targets: Sequence[Target],
    kind: str | None,
) -> None:
    """Write the files beside the weights. kind: the model's class, if the config names none."""
    if adapter is not None:
        output.put(ADAPTER_CONFIG, _json(adapter.values))
    if settings is not None:
        counts: dict[str, int] = {}
        for target in targets:
            if target.dtype in CASTABLE:
                counts[target.dtype] = counts.get(target.dtype, 0) + nbytes_of(target)
        values = settings.complete(max(counts, key=lambda name: counts[name]) if counts else None)
        # a file of the input's weights, which transformers would load in place of these
        values.pop("transformers_weights", None)
        # it describes the input's weights, which were quantized
        if not any(map(is_quantized, targets)):
            values.pop("quantization_config", None)
        if kind is not None:
            values["architectures"] = [kind]
        output.put(CONFIG, _json(values))
        for path in code_files(settings.directory) if settings.directory else settings.code:
            output.put(path.name, _read(path))
        generation = settings.generation()
        beside = settings.directory / GENERATION_CONFIG if settings.directory else None
        if settings.own_generation is None and beside is not None and beside.is_file():
            output.put(GENERATION_CONFIG, _read(beside))
        elif generation is not None:
            output.put(GENERATION_CONFIG, _json(generation))
        else:  # that of an overwritten model would be read with this one
            output.storage.delete(GENERATION_CONFIG)
    if isinstance(tokenizer, Path):
        _copy(output, tokenizer, [*tokenizer_files(tokenizer), *code_files(tokenizer)])
    elif tokenizer is not None:  # by `put`, so that a failed export removes them too
        with tempfile.TemporaryDirectory() as made:
            tokenizer.save_pretrained(made)
            _copy(output, Path(made), sorted(filter(Path.is_file, Path(made).rglob("*"))))


def _copy(output: Output, origin: Path, paths: Sequence[Path]) -> None:
    """Write a tokenizer's files. Those of an older one leave: its chat template, for example, would
    be read with the new one."""
    if any(is_of_tokenizer(path.name) for path in paths):
        templates = output.at(TEMPLATES)
        templates.delete_many(templates.names())
        output.storage.delete_many([*filter(is_of_tokenizer, output.storage.names())])
    for path in paths:
        inside = path.parent.relative_to(origin).as_posix()
        output.put(path.name, _read(path), "" if inside == "." else inside)


def _read(path: Path) -> bytes:
    """A whole file beside a config, if it has a size that such a file may have.

    Raises:
        UsageError: it is larger, or no file.
    """
    with open(path, "rb", opener=at_once) as file:
        found = os.fstat(file.fileno())
        if stat.S_ISREG(found.st_mode) and found.st_size <= _MOST:
            return file.read(_MOST)
    raise UsageError(
        f"the file has {found.st_size} bytes; a file beside a config has at most {_MOST}",
        remedy="move it out of the directory, or give config= and tokenizer= another one",
        path=str(path),
    )


def index_of(files: Sequence[OutputFile]) -> bytes:
    weight_map = {t.name: file.name for file in files for t in file.targets}
    total = sum(file.data_bytes for file in files)
    return _json(
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    )


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, sort_keys=False) + "\n").encode()


def read_settings(
    config: Any, access: Access, source: Any, copies: Callable[[], str]
) -> tuple[ModelConfig | None, tuple[str, ...]]:
    """The config that is given, or the one beside a source, with notes on it.

    Args:
        source: a path or URL; others have none beside them.
        copies: as of `config_beside`.
    """
    settings = read_config(config)
    if settings is not None or not isinstance(source, (str, os.PathLike)):
        return settings, ()
    return config_beside(access.open(source), copies)


def config_beside(
    storage: Storage, copies: Callable[[], str]
) -> tuple[ModelConfig | None, tuple[str, ...]]:
    """The model's config in the directory of a checkpoint, where the Trainer and others write one,
    and notes on it. One that is no model's is left.

    Whoever writes to the storage can put links there. They are not followed: a file of this host
    would come into the export.

    Args:
        copies: makes a directory for copies of the files.
    """
    if is_local(storage.url) and not os.path.isdir(local_path(storage.url)):
        return None, ()  # a single file
    strict = storage.without_links()
    cached = _in_cache(storage.url)
    try:
        if CONFIG not in cached and not any(file.name == CONFIG for file in strict.list(CONFIG)):
            return None, ()
        folder = _copied(strict, Path(copies()), cached)
    finally:
        strict.close()
    try:
        settings = read_config(folder)
    except UsageError as error:
        return None, (f"{CONFIG} in the checkpoint's directory was not taken: {error.message}",)
    return settings, (f"no config was given: {CONFIG} in the checkpoint's directory was taken",)


def _in_cache(url: str) -> dict[str, Path]:
    """The files of a snapshot in Hugging Face's own cache, whose names are links to
    `../../blobs/…` and to nothing else: name → blob."""
    snapshot = Path(local_path(url)) if is_local(url) else Path()
    blobs = snapshot.parent.parent / "blobs"
    if snapshot.parent.name != "snapshots" or blobs.is_symlink() or not blobs.is_dir():
        return {}
    found = {}
    for path in snapshot.iterdir():
        leads_to = path.readlink().parts if path.is_symlink() else ()
        if leads_to[:-1] == ("..", "..", "blobs") and is_plain_name(leads_to[-1]):
            blob = blobs / leads_to[-1]
            if blob.is_file() and not blob.is_symlink():
                found[path.name] = blob
    return found


def _copied(storage: Storage, folder: Path, cached: Mapping[str, Path]) -> Path:
    """Copy the files that belong to a config."""
    for name, blob in cached.items():
        if is_beside_config(name):
            (folder / name).write_bytes(_read(blob))
    for file in storage.list():
        if is_beside_config(file.name):
            (folder / file.name).write_bytes(storage.read(file.name, most=_MOST))
    if TEMPLATES not in storage.list_dirs():
        return folder
    templates = storage.join(TEMPLATES)
    for file in templates.list():
        (folder / TEMPLATES).mkdir(exist_ok=True)
        (folder / TEMPLATES / file.name).write_bytes(templates.read(file.name, most=_MOST))
    return folder


def notes_on_absent(settings: ModelConfig | None) -> tuple[str, ...]:
    """What `save_pretrained` of the model would write, and is not known here."""
    if settings is None:
        return ()
    notes = []
    names = settings.values.get("architectures") or ()
    writes = any(name.endswith(_GENERATE) for name in names)
    if writes and settings.directory is None and settings.own_generation is None:
        notes.append(
            f"{GENERATION_CONFIG} has only the config's token ids: pass "
            "ExportOptions(generation_config=model.generation_config) to write the model's own"
        )
    wanted = {f"{name}.py" for name in modules_of_map(settings.values)}
    code = code_files(settings.directory) if settings.directory else settings.code
    if lost := sorted(wanted - {path.name for path in code}):
        notes.append(
            f"the config's auto_map names {', '.join(lost)}, which are not there: put them beside "
            f"{CONFIG}, or pass config= the directory of the model"
        )
    return tuple(notes)


def tokenizer_of(tokenizer: Any, settings: ModelConfig | None) -> Path | Any | None:
    if tokenizer is None:
        return settings.directory if settings is not None else None
    if isinstance(tokenizer, (str, os.PathLike)):
        path = Path(os.fspath(tokenizer))
        if not tokenizer_files(path):
            raise UsageError(
                "the directory has no tokenizer files",
                remedy="pass a local directory with tokenizer.json or another tokenizer file",
                path=str(path),
            )
        return path
    if hasattr(tokenizer, "save_pretrained"):
        return tokenizer
    raise UsageError(
        f"tokenizer= is a {type(tokenizer).__name__}, which cannot be saved",
        remedy="pass a directory, or a tokenizer that has save_pretrained",
    )
