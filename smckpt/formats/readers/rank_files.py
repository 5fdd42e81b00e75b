"""Readers of a source's tensors: files of ranks, or a checkpoint.

A reader says what it holds, and copies blocks of it into memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from smckpt.checkpoint.records.sealed import strict_json
from smckpt.errors import CorruptCheckpointError, UsageError
from smckpt.formats.boxes import BoxTensors, SavedTensor, whole_tensor
from smckpt.formats.degrees import Degrees
from smckpt.formats.names import (
    ADAPTER_WEIGHTS_BIN,
    CONFIG,
    INDEX,
    INDEX_BIN,
    SINGLE,
    SINGLE_BIN,
    unwrapped,
)
from smckpt.formats.readers.torch_files import StoredState, stored_state
from smckpt.formats.source_files import ArchiveRecord, Folder, SourceFiles
from smckpt.formats.tensors import TensorKey
from smckpt.formats.torch_archive import StoredTensor
from smckpt.storage.urls import is_plain_name

_INDEX_LIMIT, _CONFIG_LIMIT = 256 << 20, 64 << 20  # bytes


def open_files(
    files: Mapping[str, StoredState], degrees: Degrees, source: SourceFiles,
    alone: re.Pattern[str] | None = None, among: Collection[str] = (),
) -> BoxTensors:  # fmt: skip
    """Open the files of all ranks, in Megatron's order: tensor-parallel ranks innermost, then
    expert-parallel ones. What the first rank alone holds, and `alone` matches, is every rank's.

    Raises:
        UsageError: the number of files is not the number of ranks; a file is of another kind;
            names or dtypes differ between ranks.
    """
    if len(files) != degrees.ranks:
        raise UsageError(
            f"{len(files)} files were passed for {degrees}",
            remedy=f"pass the {degrees.ranks} files of all ranks, in the order of ranks",
        )
    tensors: dict[TensorKey, SavedTensor] = {}
    dtypes: dict[str, str] = {}
    names: dict[str, set[str]] = {}
    everyones: dict[str, StoredTensor] = {}
    for number, (file, state) in enumerate(files.items()):
        found = state.tensors
        if alone is not None and not number:
            everyones = {name: t for name, t in found.items() if alone.fullmatch(name)}
        found = {**everyones, **found}
        names[file] = set(found)
        for name, stored in found.items():
            if dtypes.setdefault(name, stored.dtype) != stored.dtype:
                raise UsageError(
                    f"{name} is {dtypes[name]} in one rank's file, but {stored.dtype} in another's",
                    remedy="pass files of one and the same step",
                    path=file,
                )
            key = TensorKey(name, number % degrees.tp, number // degrees.tp)
            tensors[key] = whole_tensor((name,), stored)
    first = next(iter(names.values()))
    for file, held in names.items():
        if held != first:
            raise UsageError(
                f"the files of the ranks have different names: {sorted(held ^ first)[:8]}",
                remedy="pass the files of all ranks of one step, and pp= if they are of pipeline "
                "stages",
                path=file,
            )
    clean = {old: new for new, old in unwrapped({name: name for name in dtypes}, among).items()}
    keyed = {key._replace(name=clean[key.name]): tensor for key, tensor in tensors.items()}
    return BoxTensors(next(iter(files.values())).path, keyed, source)


def open_stages(
    files: Mapping[str, StoredState], degrees: Degrees, pp: int, source: SourceFiles,
    alone: re.Pattern[str] | None = None,
) -> list[BoxTensors]:  # fmt: skip
    """Open the files of all ranks of `pp` pipeline stages, each as by `open_files`. Pipeline-
    parallel ranks are outermost.

    Raises:
        UsageError: as `open_files`, or recorded steps differ between ranks, of one stage or two.
    """
    each = degrees.ranks
    if len(files) != each * pp:
        raise UsageError(
            f"{len(files)} files were passed for {degrees}" + (f", pp={pp}" if pp > 1 else ""),
            remedy=f"pass the {each * pp} files of all ranks, in the order of ranks",
        )
    steps = {file: state.step for file, state in files.items()}
    if len(set(steps.values())) > 1:
        raise UsageError(
            f"the files belong to different steps: {steps}",
            remedy="pass files of one and the same step",
        )
    every = list(files.items())
    stages = [dict(every[at : at + each]) for at in range(0, len(every), each)]
    names = {name for state in files.values() for name in state.tensors}
    return [open_files(stage, degrees, source, alone, names) for stage in stages]


def open_directory(directory: Path, *, exact: bool = False) -> BoxTensors:
    """Open the weights of a Hugging Face directory, those that transformers loads.

    Args:
        exact: the index must name every tensor with its file.

    Raises:
        UsageError: there are no weights.
        CorruptCheckpointError: as `weight_files`, or a tensor is in two files.
    """
    folder = Folder(SourceFiles(), str(directory.absolute()))
    return BoxTensors(folder.url.rstrip("/"), hub_tensors(folder, exact=exact), folder.source)


def hub_tensors(folder: Folder, *, exact: bool = False) -> dict[TensorKey, SavedTensor]:
    """The tensors that `open_directory` reads, in a store too."""
    directory = folder.url.rstrip("/")
    files, where = weight_files(folder)
    if not files:
        raise UsageError(
            f"the directory has none of {', '.join(_NAMES)}",
            remedy="pass the directory that export_hf or save_pretrained wrote", path=directory,
        )  # fmt: skip
    tensors: dict[TensorKey, SavedTensor] = {}
    for name, file in files.items():
        try:
            state = stored_state(folder.source, file)
        except UsageError as error:
            if "prefix=" in (error.remedy or ""):  # of a file with several models
                error.remedy = f"pass the file itself, and {error.remedy}"
            raise
        for tensor, stored in state.tensors.items():
            key = TensorKey(tensor, 0, 0)
            if key in tensors:
                raise CorruptCheckpointError(
                    f"{tensor} is in {name} and in another file of the index",
                    remedy="remove the files of another model", path=directory,
                )  # fmt: skip
            if exact and where and where.get(tensor) != name:
                raise CorruptCheckpointError(
                    f"{tensor} is in {name}, but the index says {where.get(tensor)}",
                    remedy="export it again", path=directory,
                )  # fmt: skip
            tensors[key] = whole_tensor((tensor,), stored)
    if exact and (lost := sorted(where.keys() - {key.name for key in tensors})):
        raise CorruptCheckpointError(
            f"the index names {lost[:8]}, but no file has them", remedy="export it again",
            path=directory,
        )  # fmt: skip
    return tensors


_NAMES = (SINGLE, INDEX, SINGLE_BIN, INDEX_BIN)  # transformers looks in this order
_SHARD = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")


def weight_files(folder: Folder) -> tuple[dict[str, ArchiveRecord], dict[str, str]]:
    """The files of weights of a Hugging Face directory, and its index: tensor → file. Both are
    empty where there are none.

    As transformers, it takes what the config names, or else one file, or else those of an index;
    safetensors before torch's. transformers leaves an old index beside the one file that it saves.

    Raises:
        CorruptCheckpointError: an index is damaged or missing, or a file that it or the config
            names is.
    """
    named = _of_config(folder)
    chosen = named or next((name for name in _NAMES if name in folder.files), None)
    if chosen is None:
        if alone := sorted(filter(_SHARD.fullmatch, folder.files)):
            raise CorruptCheckpointError(
                f"{alone[0]} is one of several files of a model, and no index names the others",
                remedy="download the directory again", path=folder.url,
            )  # fmt: skip
        return {}, {}
    where: dict[str, str] = {}
    names, by = [chosen], CONFIG
    if chosen.endswith(".index.json") and chosen in folder.files:
        where = weight_map(folder, chosen)
        names, by = sorted({*where.values()}), chosen
    for name in names:
        if name not in folder.files:
            raise CorruptCheckpointError(
                f"{name} is missing, which {by} names",
                remedy="download the directory again", path=folder.url,
            )  # fmt: skip
    return {name: folder.files[name] for name in names}, where


def _of_config(folder: Folder) -> str | None:
    """The file of weights, or the index, that config.json names (`transformers_weights`).
    transformers then loads no other.

    Raises:
        CorruptCheckpointError: transformers refuses the name or the whole file, or what it names is
            not beside the config.
    """
    try:  # as transformers reads it: NaN and a key that occurs twice are accepted
        values = json.loads(folder.read(CONFIG, _CONFIG_LIMIT).decode())
    except KeyError:
        return None  # there is no config
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{CONFIG} cannot be read, and it may name weights (transformers_weights): {error}",
            remedy="write it as JSON in UTF-8 without a byte order mark, or move it away",
            path=folder.url,
        ) from error
    name = values.get("transformers_weights") if isinstance(values, dict) else None
    endings = (".safetensors", ".safetensors.index.json")
    if name is None or (
        isinstance(name, str)
        and is_plain_name(name)
        and (name.endswith(endings) or name == ADAPTER_WEIGHTS_BIN)
    ):
        return name
    raise CorruptCheckpointError(
        f"transformers_weights={name!r} in {CONFIG} is no safetensors file or index beside it",
        remedy="move the file there and name it so, or remove the key to load model.safetensors",
        path=folder.url,
    )


def weight_map(folder: Folder, index: str) -> dict[str, str]:
    """Tensor → file beside the index.

    Raises:
        CorruptCheckpointError: the index has no such map, or names a file that is not beside it.
    """
    path = folder.files[index].path
    try:
        found = dict(strict_json(folder.read(index, _INDEX_LIMIT).decode())["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError):
        found = {"": None}
    if not all(isinstance(name, str) for name in found.values()):
        raise CorruptCheckpointError(
            "the index has no weight_map of names and files", remedy="download the directory again",
            path=path,
        )  # fmt: skip
    for name in found.values():
        if not is_plain_name(name):
            raise CorruptCheckpointError(
                f"the index names the file {name!r}, which is not beside it",
                remedy="download the directory again, from a source that you trust",
                path=path,
            )
    return found
