"""The files beside an export's weights: config, generation config, tokenizer, index, model card
(README.md), GGUF file.

llama.cpp's own converter, `convert_hf_to_gguf.py`, makes the GGUF file in a process of its own.
Nothing of it is imported or rewritten here, so a family and a type are known where it knows them.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smckpt._version import __version__
from smckpt.checkpoint.records.sealed import at_once
from smckpt.errors import CorruptCheckpointError, StorageError, UsageError
from smckpt.formats.names import CONFIG
from smckpt.storage import Access, Storage
from smckpt.storage.disk.directory import Directory
from smckpt.storage.disk.linux import ends_with_us
from smckpt.storage.faults import temporary_error
from smckpt.storage.urls import disk_path, is_plain_name, local_path, path_on_disk
from smckpt.translate.beside import (
    GENERATION_CONFIG,
    TEMPLATES,
    absent_code,
    code_files,
    has_file,
    holds_tokenizer,
    is_beside_config,
    is_of_tokenizer,
    left_folders,
    modules_of_map,
    named_in_code,
    tokenizer_files,
)
from smckpt.translate.cast import CASTABLE
from smckpt.translate.config import ModelConfig, read_config
from smckpt.translate.config_values import class_of_others
from smckpt.translate.files import Output, OutputFile, Target, is_quantized, nbytes_of
from smckpt.translate.hidden import new_name
from smckpt.translate.models.contents import ExportContents
from smckpt.translate.models.lora import ADAPTER_CONFIG, LoraConfig

_GENERATE = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")  # models that generate
# Bytes of a file beside a checkpoint or a config; a large tokenizer has some tens of MB.
MOST = 1 << 28


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
        if settings.own_generation is None and beside is not None and has_file(beside):
            output.put(GENERATION_CONFIG, _read(beside))
        elif generation is not None:
            output.put(GENERATION_CONFIG, _json(generation))
        else:  # that of an overwritten model would be read with this one
            output.storage.delete(GENERATION_CONFIG)
    if isinstance(tokenizer, Path):
        _copy(output, tokenizer, [*tokenizer_files(tokenizer), *code_files(tokenizer)])
    elif tokenizer is not None:  # by `put`, so that a failed export removes them too
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
            tokenizer.save_pretrained(made)
            saved = sorted(filter(Path.is_file, Path(made).rglob("*")))
            for path in saved:
                if path.name in (CONFIG, GENERATION_CONFIG):
                    raise UsageError(
                        f"tokenizer= is a {type(tokenizer).__name__}, which saves {path.name}",
                        remedy="pass a tokenizer or processor, and the config as config=",
                    )
            _copy(output, Path(made), saved)


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
        if stat.S_ISREG(found.st_mode) and found.st_size <= MOST:
            return file.read(MOST)
    raise UsageError(
        f"the file has {found.st_size} bytes; a file beside a config has at most {MOST}",
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
    config: Any, access: Access, source: Any, cleanup: ExitStack
) -> tuple[ModelConfig | None, tuple[str, ...]]:
    """The config that is given, or the one beside a source, with notes on it.

    Args:
        source: a path or URL; others have none beside them.
        cleanup: as of `config_beside`.
    """
    settings = read_config(config)
    if settings is not None or not isinstance(source, (str, os.PathLike)):
        return settings, ()
    return config_beside(access.open(source), cleanup)


def config_beside(
    storage: Storage, cleanup: ExitStack
) -> tuple[ModelConfig | None, tuple[str, ...]]:
    """The model's config in the directory of a checkpoint, where the Trainer and others write one,
    and notes on it. One that is no model's is left.

    Whoever writes to the storage can put links there. They are not followed: a file of this host
    would come into the export.

    Args:
        cleanup: removes the directory with copies of the files.

    Raises:
        StorageError: they cannot be copied there.
    """
    if (path := disk_path(storage.url)) is not None and not os.path.isdir(path):
        return None, ()  # a single file
    strict = storage.without_links()
    cached = _in_cache(storage.url)
    try:
        if CONFIG not in cached and not any(file.name == CONFIG for file in strict.list(CONFIG)):
            return None, ()
        copies = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        folder = Path(cleanup.enter_context(copies))
        for name, blob in cached.items():
            if is_beside_config(name):
                (folder / name).write_bytes(_read(blob))
        files = [file.name for file in strict.list()]
        for name in filter(is_beside_config, files):
            (folder / name).write_bytes(strict.read(name, most=MOST))
        for name in named_in_code(code_files(folder), {*files, *cached} - {*os.listdir(folder)}):
            data = _read(cached[name]) if name in cached else strict.read(name, most=MOST)
            (folder / name).write_bytes(data)
        if TEMPLATES in strict.list_dirs():
            templates = strict.join(TEMPLATES)
            for file in templates.list():
                (folder / TEMPLATES).mkdir(exist_ok=True)
                (folder / TEMPLATES / file.name).write_bytes(templates.read(file.name, most=MOST))
        left = _left_beside(strict, folder)
    except OSError as error:
        raise temporary_error(error, f"copy the files beside {storage.url}") from error
    finally:
        strict.close()
    try:
        settings = read_config(folder)
    except UsageError as error:
        return None, (f"{CONFIG} in the checkpoint's directory was not taken: {error.message}",)
    taken = f"no config was given: {CONFIG} in the checkpoint's directory was taken"
    if not left:
        return settings, (taken,)
    return settings, (
        taken,
        f"beside it, {', '.join(left)} are links, pipes or folders, and not in the export: pass "
        "tokenizer= the tokenizer or processor, or config= a directory with the files themselves",
    )


def _left_beside(strict: Storage, folder: Path) -> list[str]:
    """The names of a tokenizer's or config's files beside a checkpoint that have no copy."""
    there = strict.names(all_kinds=True)
    names = [name for name in there if is_beside_config(name)]
    names += named_in_code(code_files(folder), there)
    names += [name for name in strict.list_dirs() if holds_tokenizer(strict.join(name).names())]
    if TEMPLATES in strict.list_dirs():
        inside = strict.join(TEMPLATES).names(all_kinds=True)
        names += [f"{TEMPLATES}/{name}" for name in inside if name.endswith(".jinja")]
    elif TEMPLATES in strict.names(all_kinds=True):
        names.append(TEMPLATES)
    return sorted({name for name in names if not (folder / name).exists()})


def _in_cache(url: str) -> dict[str, Path]:
    """The files of a snapshot in Hugging Face's own cache, whose names are links to
    `../../blobs/…` and to nothing else: name → blob."""
    snapshot = Path(disk_path(url) or "")
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


def notes_on_absent(settings: ModelConfig | None, tokenizer: Any) -> tuple[str, ...]:
    """What `save_pretrained` of the model and its tokenizer would write, and is not known here."""
    notes = []
    if isinstance(tokenizer, Path):
        if left := left_folders(tokenizer):
            notes.append(
                f"the folders {', '.join(left)} beside the tokenizer's files have tokenizers of "
                "their own, which are not in the export: pass tokenizer= the processor itself"
            )
        own = settings is not None and settings.directory == tokenizer
        if lost := [] if own else absent_code(tokenizer):
            notes.append(
                f"an auto_map beside the tokenizer names {', '.join(lost)}, which are not there"
            )
    if settings is None:
        return tuple(notes)
    names = settings.values.get("architectures") or ()
    writes = any(name.endswith(_GENERATE) for name in names)
    if writes and settings.directory is None and settings.own_generation is None:
        notes.append(
            f"{GENERATION_CONFIG} has only the config's token ids: pass "
            "ExportOptions(generation_config=model.generation_config) to write the model's own"
        )
    if (other := class_of_others(settings.values)) is not None:
        notes.append(
            f"the config names the class {other}, which is none of "
            f"{settings.values['model_type']}: vLLM and llama.cpp go by this name, and load the "
            "model only if they have such a class"
        )
    if settings.directory is not None:
        lost = absent_code(settings.directory)
    else:
        wanted = {f"{name}.py" for name in modules_of_map(settings.values)}
        lost = sorted(wanted - {path.name for path in settings.code})
    if lost:
        notes.append(
            f"the config's auto_map names {', '.join(lost)}, which are not there: put them beside "
            f"{CONFIG}, or pass config= the directory of the model"
        )
    return tuple(notes)


def tokenizer_of(tokenizer: Any, settings: ModelConfig | None) -> Path | Any | None:
    if tokenizer is None:
        directory = settings.directory if settings is not None else None
        if directory is not None:  # what is no file there is refused before weights are written
            tokenizer_files(directory)
            if settings is not None and settings.own_generation is None:
                has_file(directory / GENERATION_CONFIG)
        return directory
    if isinstance(tokenizer, (str, os.PathLike)):
        path = Path(os.fspath(tokenizer))
        if not tokenizer_files(path):
            raise UsageError(
                "the directory has no tokenizer files",
                remedy="pass a local directory with tokenizer.json or another tokenizer file",
                path=str(path),
            )
        return path
    if hasattr(tokenizer, "save_pretrained") and not hasattr(tokenizer, "state_dict"):
        return tokenizer
    raise UsageError(
        f"tokenizer= is a {type(tokenizer).__name__}, which is no tokenizer or processor",
        remedy="pass a directory, or a tokenizer that has save_pretrained",
    )


CONVERTER = "SMCKPT_GGUF_CONVERTER"  # the variable
_SCRIPT = "convert_hf_to_gguf.py"
_TYPES = ("auto", "f32", "f16", "bf16", "q8_0", "tq1_0", "tq2_0")  # that it writes
_LINES = 12  # of the last that it prints


@dataclass(frozen=True)
class GgufConverter:
    """The command of the converter, and the type of file that it is to write."""

    command: tuple[str, ...]
    kind: str

    @staticmethod
    def find(kind: str, command: str | os.PathLike[str] | None, out_dir: str) -> GgufConverter:
        """
        Args:
            command: the script, or a command line that runs it; None: the variable
                SMCKPT_GGUF_CONVERTER, or else the script on PATH.

        Raises:
            UsageError: the type is unknown, there is no converter, or `out_dir` is in a store.
        """
        if kind not in _TYPES:
            raise UsageError(f"gguf={kind!r}", remedy=f"pass one of {', '.join(_TYPES)}")
        path_on_disk(
            out_dir, "llama.cpp's converter reads and writes disks only",
            "export to a disk, and copy the GGUF file from there",
        )  # fmt: skip
        given = command or os.environ.get(CONVERTER) or shutil.which(_SCRIPT)
        text = os.fspath(given or "")
        words = (text,) if os.path.isfile(text) else tuple(shlex.split(text))
        if len(words) == 1 and os.path.isfile(words[0]) and not os.access(words[0], os.X_OK):
            words = (sys.executable, *words)
        if not words or shutil.which(words[0]) is None:
            what = f"{text!r} cannot be run" if given else f"{_SCRIPT} is not here"
            raise UsageError(
                f"{what}, which makes GGUF files of a Hugging Face directory",
                remedy=f"get llama.cpp's source, install its requirements, and put {_SCRIPT} on "
                f"PATH, or into the variable {CONVERTER} (a path, or a command line)",
            )
        return GgufConverter(words, kind)

    def convert(self, directory: str) -> str:
        """Make the file of an export, which appears whole. Returns the path.

        Raises:
            UsageError: the converter failed; the message has the last lines that it wrote.
        """
        at = os.path.abspath(local_path(directory))
        name = f"model-{self.kind}.gguf"
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        begun = new_name()
        with (
            os.fdopen(os.memfd_create("smckpt"), "w+b") as output,
            Directory.open(at) as above,
            above.make(begun, 0o700) as made,  # the converter follows links: nobody puts one there
        ):
            try:
                done = subprocess.run(
                    [*ends_with_us(), *self.command, at,
                     "--outfile", f"{made.path_for_others()}/{name}", "--outtype", self.kind],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    env=environment, check=False,
                )  # fmt: skip
                if done.returncode or made.status(name) is None:
                    size = output.seek(0, os.SEEK_END)
                    output.seek(max(0, size - (64 << 10)))
                    lines = output.read().decode(errors="replace").splitlines()
                    lines = [line for line in lines if line.strip()][-_LINES:]
                    text = "; ".join(lines) or "it wrote nothing"
                    raise UsageError(
                        f"llama.cpp's converter ended with {done.returncode}: {text}",
                        remedy="the Hugging Face directory is whole: look at these lines, and run "
                        f"the converter on it again ({shlex.join(self.command)})",
                        path=at,
                    )
                os.rename(name, name, src_dir_fd=made.fd, dst_dir_fd=above.fd)
                above.sync()
            finally:
                above.remove_all(begun)
        return os.path.join(at, name)


CARD = "README.md"
_OURS = "<!-- smckpt export writes this file anew: remove this line to keep yours -->"
_MOST_OF_CARD = 1 << 20  # bytes of an older card
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
    if (theirs := output.has_beside(CARD)) or CARD in output.storage.names():
        try:
            card = b"" if theirs else output.storage.read(CARD, most=_MOST_OF_CARD)
            old = card.decode(errors="replace")
        except (CorruptCheckpointError, StorageError):  # a link, or too large
            old = ""
        if _OURS not in old:
            return (f"{CARD} was left as it is: smckpt did not write it",)
    output.put(CARD, "\n".join(_card(found, settings, files, checksums)).encode())
    return ()


def _card(
    found: ExportContents, settings: ModelConfig | None, files: Sequence[OutputFile],
    checksums: Mapping[str, str],
) -> Iterator[str]:  # fmt: skip
    names = [] if settings is None else settings.values.get("architectures") or []
    adapter = found.adapter
    base = "" if adapter is None else str(adapter.values.get("base_model_name_or_path"))
    yield "---"  # what the Hub reads
    yield f"library_name: {'transformers' if adapter is None else 'peft'}"
    for ending, task in _TASKS.items():
        if names and names[0].endswith(ending):
            yield f"pipeline_tag: {task}"
    if _HUB_NAME.fullmatch(base):
        yield f"base_model: {base}"
    yield from ("tags:", "- smckpt", "---", "")
    targets = [target for file in files for target in file.targets]
    numbers = sum(math.prod(target.shape) for target in targets)
    kind = "" if settings is None else str(settings.values["model_type"])
    made_from = found.source_format + (f", layout {found.layout}" if found.layout else "")
    sizes: dict[str, int] = {}
    for target in targets:
        sizes[target.dtype] = sizes.get(target.dtype, 0) + nbytes_of(target)
    facts = {
        "model": ", ".join([*names[:1], *filter(None, [kind])]),
        "adapter": "" if adapter is None else str(adapter.values.get("peft_type") or "LORA"),
        "base": "" if adapter is None else adapter.values.get("base_model_name_or_path"),
        "parameters": f"{numbers:,}",
        # that of the most bytes first
        "dtype": ", ".join(sorted(sizes, key=lambda dtype: -sizes[dtype])),
        "step": "" if found.step is None else str(found.step),
        "checkpoint": found.source.url,
        "commit": found.identity,
        "made from": made_from,
        "left out": ", ".join(found.left_out[:8]) + (" and more" if found.left_out[8:] else ""),
        "written by": f"smckpt {__version__}",
    }
    yield from (f"# {_plain(names[0] if names else kind or 'A model')}", "", "| | |", "|---|---|")
    for name, value in facts.items():
        if value:
            yield f"| {name} | {_plain(value)} |"
    yield from ("", "## Files", "", "| file | bytes | CRC-64/NVME |", "|---|---|---|")
    for file in files:
        yield f"| {file.name} | {file.size} | {checksums.get(file.name, '')} |"
    yield from ("", _OURS, "")


def _plain(text: object) -> str:
    """Text of a file as text of a table: nothing in it is markup."""
    shown = "".join(c if c.isprintable() else " " for c in str(text))
    return re.sub(r"([\\`*<>|\[\]&])", r"\\\1", shown)
