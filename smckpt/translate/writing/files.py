"""The directory of an export: checks the files that were there before, writes the new ones, and
makes them loadable.

Weights are written first and made durable. The index, or the name model.safetensors, makes them
loadable and comes last. An export that is killed leaves files that nothing loads.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from smckpt.checkpoint.commits.part import SummedFile
from smckpt.errors import StorageError, UsageError
from smckpt.storage import FileWriter, Storage
from smckpt.storage.faults import name_taken
from smckpt.storage.urls import file_url, is_local, local_path, normal_url
from smckpt.translate.configs.config import TEMPLATES
from smckpt.translate.writing.targets import INDEX, OutputFile

__all__ = ["Output", "aligned", "refuse_into_source"]

UNFINISHED = ".unfinished"

# Weights in any form that from_pretrained or a server loads, and what tells of them. Where
# from_pretrained finds an adapter's config, it loads that adapter, whatever else is there; where
# vLLM finds ModelOpt's or GPTQ's settings, it takes the weights for quantized.
_WEIGHTS = re.compile(
    r"(model|adapter_model|pytorch_model|tf_model|flax_model|consolidated)[^/]*"
    r"\.(safetensors|bin|h5|msgpack|pth|gguf|unfinished)(\.index\.json)?$"
    r"|(adapter_config|hf_quant_config|quantize_config|params)\.json$"
)
_FILE = re.compile(r"\.[A-Za-z]+$")  # the end of a file's name, not of a step's directory


class Output:
    """The directory `storage`, which is empty (or overwritten) and becomes a whole model."""

    def __init__(self, storage: Storage, files: Sequence[OutputFile]) -> None:
        self.storage = storage
        self.url = url = storage.url
        # a single file loads by itself, so it has another name until it is whole
        self._hidden = is_local(url) and len(files) == 1
        self._files = tuple(files)
        self._lock = threading.Lock()
        self._open: dict[str, SummedFile] = {}
        self._chunks: dict[str, int] = {}
        self._made: list[str] = []
        self._folders: dict[str, Storage] = {}
        self._nested: list[tuple[Storage, str]] = []
        self._new = is_local(url) and not os.path.exists(local_path(url))

    def prepare(self, *, overwrite: bool) -> None:
        """Refuse a directory that is not empty, or remove the old model from it.

        Raises:
            UsageError: it is not empty and `overwrite` is False.
            StorageError: there is too little space, or the directory cannot be used.
        """
        present = self._present(overwrite)
        self.at(TEMPLATES).refuse_links()  # before anything is removed
        # The index first: after that no mixture of two models can be loaded.
        for name in sorted(filter(_WEIGHTS.match, present), key=lambda n: not n.endswith(".json")):
            self.storage.delete(name)
        if self.storage.is_file_system:  # of an export that was killed before its index had a name
            self.storage.discard_unfinished([INDEX])
        self._check_space()

    def writer(self, file: OutputFile, chunks: int) -> FileWriter:
        """The writer of `file`. The first call makes it and writes the header."""
        with self._lock:
            if file.name not in self._open:
                name = self._stored(file)
                writer = self._begun(file, name)
                self._open[file.name] = writer
                self._chunks[file.name] = chunks
                self._made.append(name)
                memory = aligned(len(file.header))
                memory[:] = file.header
                writer.write_at(0, memory)
                if chunks == 0:
                    self._finish(file)
            return self._open[file.name]

    def chunk_done(self, file: OutputFile) -> None:
        """Count a finished chunk. The last one makes the file durable."""
        with self._lock:
            self._chunks[file.name] -= 1
            if self._chunks[file.name]:
                return
        self._finish(file)

    def put(self, name: str, data: bytes, folder: str = "") -> None:
        """Write a small file, in the directory or a folder of it. It may replace an old one, which
        only `overwrite` allows."""
        storage = self.at(folder) if folder else self.storage
        storage.delete(name)
        storage.put(name, data)
        if folder:
            self._nested.append((storage, name))
        else:
            self._made.append(name)

    def at(self, folder: str) -> Storage:
        """A folder of the directory."""
        if folder not in self._folders:
            self._folders[folder] = self.storage.join(folder)
        return self._folders[folder]

    def refuse_absent(self) -> None:
        """
        Raises:
            StorageError: files that other processes wrote are missing here.
        """
        sizes = {info.name: info.size for info in self.storage.list()}
        absent = [f.name for f in self._files if sizes.get(self._stored(f)) != f.size]
        if absent:
            raise StorageError(
                f"this process does not see {len(absent)} files that other processes wrote: "
                f"{absent[:8]}",
                remedy="pass an out_dir on a file system that all hosts share, or in S3",
                path=self.url,
            )

    def publish(self, index: bytes | None) -> None:
        """Make the model loadable: write the index, or give a single file its name."""
        if index is not None:
            # not `put`, which shows a name before its bytes
            if not self.storage.put_exclusive(INDEX, index):
                raise name_taken(file_url(self.url, INDEX))
            return
        if not self._hidden:
            return
        for file in self._files:
            self.storage.rename(self._stored(file), file.name)

    def abandon(self) -> None:
        """Remove the written files, as far as the store allows."""
        with ExitStack() as each:  # go on after one that cannot be removed
            for name in self._made:
                each.callback(self.storage.delete, name)
            for storage, name in self._nested:  # a folder goes if it is empty then
                each.callback(storage.remove_directory)
                each.callback(storage.delete, name)
            for writer in self._open.values():
                each.callback(writer.abort)
        if self._new and self._made:
            self.storage.remove_directory()  # it stays if files of others are there

    def close(self) -> None:
        for storage in (self.storage, *self._folders.values()):
            storage.close()

    def _present(self, overwrite: bool) -> list[str]:
        present = [f.name for f in self.storage.list()]
        if (present or self.storage.list_dirs()) and not overwrite:
            raise UsageError(
                "the directory is not empty",
                remedy="choose another out_dir, or pass options with overwrite=True to "
                "replace the model there",
                path=self.url,
            )
        return present

    def _check_space(self) -> None:
        if not is_local(self.url):
            return
        there = local_path(self.url)
        while not os.path.isdir(there):
            there = os.path.dirname(there)
        need = sum(file.size for file in self._files)
        free = shutil.disk_usage(there).free
        if free < need:
            raise StorageError(
                f"the model needs {need:,} bytes, but only {free:,} are free",
                remedy="free space, or choose an out_dir on another disk",
                path=self.url,
            )

    def checksum_of(self, file: OutputFile) -> str:
        """The CRC-64/NVME of a file that this process wrote, in hexadecimal."""
        return self._open[file.name].crc64

    def _begun(self, file: OutputFile, name: str) -> SummedFile:
        return SummedFile(self.storage.create_file(name, file.size), file.size)

    def _finish(self, file: OutputFile) -> None:
        self._open[file.name].finish()

    def _stored(self, file: OutputFile) -> str:
        """The present name of a file. A file that can be loaded by itself has another name until
        the end. An object always appears whole."""
        return file.name + UNFINISHED if self._hidden else file.name


def refuse_into_source(
    out_dir: str | os.PathLike[str], *files: str | os.PathLike[str], **given: Any
) -> None:
    """Raise UsageError if `out_dir` contains files of ranks or of another argument. They would be
    lost when an old model, or the rest of a failed export, is removed."""
    url = os.fspath(out_dir)
    there = _places(url)[0]
    reserved_paths = [
        (reserved, "a rank's file") for path in files for reserved in _places(path)[1:]
    ]
    for name, value in given.items():
        if isinstance(value, (str, os.PathLike)):
            reserved_paths += [(reserved, f"{name}=") for reserved in _places(value)]
    for reserved, what in reserved_paths:
        if reserved == there:
            raise UsageError(
                f"out_dir is the directory of {what}, which a failed export would delete",
                remedy="choose another out_dir",
                path=url,
            )


def _places(path: str | os.PathLike[str]) -> list[str]:
    """A path, and the directory that it is in if it is a file. In a store its name tells that."""
    url = os.fspath(path)
    if is_local(url):
        found = os.path.realpath(local_path(url))
        return [found, os.path.dirname(found)] if os.path.isfile(found) else [found]
    found = normal_url(url)
    parent, _, name = found.rstrip("/").rpartition("/")
    return [found, f"{parent}/"] if _FILE.search(name) else [found]


def aligned(size: int) -> memoryview:
    """`size` bytes of page-aligned memory, which direct writes need. It is freed with its last
    view."""
    return memoryview(mmap.mmap(-1, max(size, 1)))[:size]
