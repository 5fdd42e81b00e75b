"""Publish a model for servers: what changed since the last time, and nothing else."""

from __future__ import annotations

import itertools
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import Any

from smckpt.calls import alone
from smckpt.checkpoint.records.crc import BLOCK, combine, crc64
from smckpt.checkpoint.records.format import ours_among
from smckpt.checkpoint.records.sealed import strict_json
from smckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError, UsageError
from smckpt.formats.degrees import check_counts, check_paths
from smckpt.formats.names import INDEX, SINGLE
from smckpt.layout.image import safetensors_header
from smckpt.storage import Storage, StoreOptions, access_to
from smckpt.storage.urls import file_url, normal_url
from smckpt.translate.files import UNFINISHED, aligned
from smckpt.translate.publishing.published import (
    FILES,
    MANIFEST,
    MAX_NUMBER,
    NEW_RECORD,
    RECORD,
    Publish,
    PublishedFile,
    PublishedTensor,
    chain_to,
    folder_of,
    header_of,
    is_folder,
    numbers_in,
    put_files,
    read_files,
    read_publish,
    spans,
    state_after,
)

log = logging.getLogger("smckpt")

_PIECE = 16 << 20  # bytes in memory at once, if the store does not say
_WEIGHTS = ".safetensors"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")  # an export writes their index last
_MAX_INDEX = 1 << 28  # bytes


@dataclass(frozen=True)
class PublishReport:
    """What was published.

    number: of the publish at `directory`. full: whether it needs no other one.
    tensors: how many changed, of how many. nbytes: of all files written. changed_bytes: of the
        changed tensors or blocks, and of whole files.
    """

    directory: str
    number: int
    full: bool
    tensors: int
    tensors_in_all: int
    nbytes: int
    changed_bytes: int
    seconds: float


@alone()
def publish(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    delta: str | None = "tensor",
    full_every: int = 20,
    storage: StoreOptions | Mapping[str, Any] | None = None,
) -> PublishReport:
    """Write to `out` what changed in a model's directory since the last publish there.

    `apply_published` makes the directory again, byte for byte, wherever servers are. The publish
    counts once its manifest is written. A process that was killed leaves nothing that counts, and
    the next one goes on. One process publishes at a time. It holds 16 MiB in memory, or one part of
    an upload.

    Args:
        source: a directory of safetensors files and those beside them, such as an export; on disk
            or in S3. Nobody may change it meanwhile.
        out: a directory of its own, on disk or in S3.
        delta: "tensor": write the tensors that changed; the file is safetensors with their names,
            dtypes and shapes. "block": write the blocks of 1 MiB that changed. None: write all.
        full_every: write all after this many publishes. Then those before the last full publish but
            one are deleted.
        storage: as in `smckpt.load`.

    Returns:
        the report. If nothing changed, it is about the last publish, with 0 bytes.

    Raises:
        UsageError: an argument is wrong, or `source` is no model.
        CorruptCheckpointError: the source changed meanwhile, or the last publish is damaged.
        StorageError: a store refused, or another process published at this moment.
    """
    began = time.monotonic()
    check_paths(source=source, out=out)
    check_counts(full_every=full_every)
    if delta not in ("tensor", "block", None):
        raise UsageError(f"delta={delta!r}", remedy='pass "tensor", "block" or None')
    if normal_url(os.fspath(source)) == normal_url(os.fspath(out)):
        raise UsageError(
            "out is the source", remedy="choose another directory", path=os.fspath(out)
        )
    access = access_to(source, out, storage=storage)
    with ExitStack() as cleanup:
        model = access.open(source).of_one_version().with_links()
        root = access.open(out).without_links()
        cleanup.callback(model.close)
        cleanup.callback(root.close)
        scanned = _scanned(model)
        chain: list[Publish] = []
        if delta is not None:
            with suppress(CheckpointNotFoundError):
                chain = chain_to(root)
        number = _next_number(root, chain)
        full = delta is None or not chain or len(chain) >= full_every
        old = {} if full else state_after(chain)
        there = root.join(folder_of(number))
        work = _Publishing(model, there, delta or "tensor", scanned, old)
        cleanup.callback(work.storage.close)
        if not full and not work.files and not work.removed:
            return work.report(chain[-1], full=False, nbytes=0, began=began)
        on_failure = cleanup.enter_context(ExitStack())
        on_failure.callback(work.abandon)
        work.write_files()
        last = number if full else chain[-1].number
        if any(_counts(root, n) for n in numbers_in(root) if n > last and n != number):
            raise work.overtaken()
        made = work.write_manifest(number, None if full else chain[-1].identity)
        on_failure.pop_all()
        # Of publishes that get their manifests at one moment, the largest number is what is served.
        if any(_counts(root, n) for n in numbers_in(root) if n > number):
            raise work.overtaken()
        if full:
            # What publishes wrote before the last full one but this one is deleted. That stays, for
            # those who are reading its chain.
            kept = False
            for each in reversed([each for each in numbers_in(root) if each < number]):
                try:
                    found = read_publish(root, each)
                    if kept:
                        _delete(root, each, found)
                    kept = kept or (found is not None and found.base is None)
                except CorruptCheckpointError as error:
                    log.warning("publish %d stays: %s", each, error)
        return work.report(made, full, work.nbytes, began)


def _next_number(root: Storage, chain: Sequence[Publish]) -> int:
    """The number after the last publish that counts. One whose directory is there already, of a
    killed publish or of somebody else, is passed over.

    Raises:
        UsageError: there is no number left.
    """
    numbers = numbers_in(root)
    counting = (each for each in reversed(numbers) if _counts(root, each))
    last = chain[-1].number if chain else next(counting, -1)
    taken = {*numbers, *(int(n) for n in root.names(all_kinds=True) if is_folder(n))}
    number = next(n for n in itertools.count(last + 1) if n not in taken)
    if number > MAX_NUMBER:
        raise UsageError(
            f"the last publish has the number {last}, and no number is larger than {MAX_NUMBER}",
            remedy="publish to another directory",
            path=root.url,
        )
    return number


def _counts(root: Storage, number: int) -> bool:
    try:
        return read_publish(root, number) is not None
    except CorruptCheckpointError:
        return True


def _scanned(model: Storage) -> dict[str, PublishedFile]:
    """All files of a model's directory, with the checksums of their blocks."""
    # not the record of a directory that was applied: each host writes its own
    own = {RECORD, NEW_RECORD}
    names = set(model.names(all_kinds=True)) - own
    infos = {info.name: info.size for info in model.list() if info.name not in own}
    if ours_among(infos, "data", "manifest", "record"):
        raise UsageError(
            "this is a checkpoint of training, not the directory of a model",
            remedy="export it first: smckpt export CHECKPOINT OUT --config config.json",
            path=model.url,
        )
    unfinished = [name for name in infos if name.endswith(UNFINISHED) or name in (MANIFEST, FILES)]
    unfinished += [name for name in infos if "\\" in name]  # in no `Name`, which a host refuses
    # a link that leads nowhere, a pipe: the publish would be without it
    others = sorted({*model.list_dirs(), *names} - infos.keys())
    if unfinished or others or not any(name.endswith(_WEIGHTS) for name in infos):
        raise UsageError(
            "this is not the directory of one whole model: it has "
            f"{', '.join(sorted(unfinished or others or infos)[:8]) or 'no files'}",
            remedy="pass a directory with *.safetensors, such as an export, without folders",
            path=model.url,
        )
    if SINGLE not in infos:  # it is loaded before an index
        if INDEX not in infos:
            missing = [INDEX] if any(map(_SHARD.fullmatch, infos)) else []
        else:
            try:
                found = strict_json(model.read(INDEX, most=_MAX_INDEX).decode())["weight_map"]
                missing = sorted({*found.values()} - {*infos})
                if not all(isinstance(name, str) for name in missing):
                    raise TypeError(missing)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                missing = ["a weight_map in its index"]
        if missing:
            raise UsageError(
                f"this is not the directory of one whole model: it lacks {', '.join(missing[:8])}",
                remedy="wait for the export that writes it, or export it again",
                path=model.url,
            )
    return {name: _scan(model, name, size) for name, size in infos.items()}


def _scan(model: Storage, name: str, size: int) -> PublishedFile:
    header = header_of(model, name, size) if name.endswith(_WEIGHTS) else None
    spans = {"": (0, size)}
    if header is not None:
        spans = {
            key: (slot.offset, slot.offset + slot.nbytes) for key, slot in header.slots.items()
        }
    start = 0 if header is None else header.data_start
    head = whole = crc64(model.read(name, 0, start)) if start else 0
    tensors: dict[str, PublishedTensor] = {}
    memory = aligned(min(_PIECE, max(size, 1)))
    for key, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        blocks: dict[int, int] = {}
        for low in range(begin, end, len(memory)):
            view = memory[: min(len(memory), end - low)]
            model.read_into(name, low, [view])
            for at in range(0, len(view), BLOCK):
                block = view[at : at + BLOCK]
                value = blocks[(low - begin + at) // BLOCK] = crc64(block)
                whole = combine(whole, value, len(block))
        tensors[key] = PublishedTensor(begin, end, blocks)
    return PublishedFile(size, whole, head, True, tensors)


class _Publishing:
    """What one publish writes.

    files: as its manifest has them. scanned: the model's files. old: those of the last publish.
    """

    def __init__(
        self,
        model: Storage,
        storage: Storage,
        unit: str,
        scanned: Mapping[str, PublishedFile],
        old: Mapping[str, PublishedFile],
    ) -> None:
        self.model, self.storage, self.unit, self.scanned = model, storage, unit, scanned
        self.files: dict[str, PublishedFile] = {}
        for name, file in scanned.items():
            if name not in old:
                self.files[name] = file
            elif (was := old[name]).crc64 != file.crc64 or was.size != file.size:
                found = file
                if "" not in file.tensors and (file.size, file.header) == (was.size, was.header):
                    changed = {}
                    for key, tensor in file.tensors.items():
                        before = was.tensors[key].blocks
                        blocks = {n: crc for n, crc in tensor.blocks.items() if crc != before[n]}
                        if blocks:
                            kept = tensor.blocks if self.unit == "tensor" else blocks
                            changed[key] = replace(tensor, blocks=kept)
                    found = replace(file, whole=False, tensors=changed)
                # a delta has one tensor of a name: of two files with it, the second goes whole
                self.files[name] = file if self.changed.keys() & found.tensors.keys() else found
        self.removed = tuple(sorted(old.keys() - scanned.keys()))
        self.nbytes = 0
        self._made: list[str] = []
        self._written: tuple[str, int] | None = None  # the delta

    @property
    def changed(self) -> dict[str, tuple[str, PublishedTensor]]:
        """The tensors of the delta: name → file and blocks."""
        return {
            key: (name, tensor)
            for name, file in self.files.items() if not file.whole
            for key, tensor in file.tensors.items()
        }  # fmt: skip

    def write_files(self) -> None:
        """Write everything but the manifest."""
        whole = {name: file for name, file in self.files.items() if file.whole}
        delta_name = f"delta-{secrets.token_hex(4)}{_WEIGHTS}"
        # Whoever creates the record has the directory, until it counts. It names all that is made.
        if not put_files(self.storage, [*whole, *([delta_name] if self.changed else [])]):
            raise self.overtaken()
        self._made.append(FILES)
        if self.storage.names(MANIFEST):  # whose publisher has removed the record again
            raise self.overtaken()
        for name, file in whole.items():
            self._write(name, file.size, self._copied(name, file))
        if changed := self.changed:  # the tensors, or their blocks, as one safetensors file
            tensors = []
            sizes = {name: self.scanned[name].size for name, _ in changed.values()}
            headers = {
                name: header_of(self.model, name, size).slots for name, size in sizes.items()
            }
            for key, (name, tensor) in changed.items():
                nbytes, slot = _nbytes(tensor), headers[name][key]
                code, shape = ("U8", (nbytes,)) if self.unit == "block" else (slot.code, slot.shape)
                tensors.append((key, code, shape, nbytes))
            head = safetensors_header(tensors, {"format": "pt", "smckpt.unit": self.unit})
            size = len(head) + sum(nbytes for *_, nbytes in tensors)
            first: _Fill = len(head), lambda view: view.__setitem__(slice(None), head)
            blocks = (self._blocks(name, tensor) for name, tensor in changed.values())
            self._write(delta_name, size, itertools.chain([first], *blocks))
            self._written = delta_name, size

    def write_manifest(self, number: int, base: str | None) -> Publish:
        """Let the publish count."""
        made = Publish(
            number, "", base, self.unit, self._written, self.files, self.removed,
            {"source": self.model.url, "published_at": time.time_ns()},
        )  # fmt: skip
        sealed = made.sealed()
        # From now on it may count, also where the store raises: then it keeps its files, and the
        # record of them is left for a later publish.
        files, self._made = self._made, []
        if not self.storage.put_exclusive(MANIFEST, sealed):
            self._made = files
            raise self.overtaken()
        self.nbytes += len(sealed)
        self.storage.delete(FILES)  # now the manifest has the names
        return made

    def overtaken(self) -> StorageError:
        return StorageError(
            "another process has published at this moment",
            remedy="let one process publish at a time",
            path=self.storage.url,
        )

    def abandon(self) -> None:
        with ExitStack() as each:
            each.callback(self.storage.remove_directory)
            for name in self._made:
                each.callback(self.storage.delete, name)

    def report(self, made: Publish, full: bool, nbytes: int, began: float) -> PublishReport:
        counts = [len(f.tensors) for f in self.scanned.values() if "" not in f.tensors]
        moved = [f for f in self.files.values() if "" not in f.tensors]
        whole = sum(f.size for f in self.files.values() if f.whole)
        return PublishReport(
            self.storage.url if nbytes else f"{os.path.dirname(self.storage.url)}/{made.folder}",
            made.number, full, sum(len(f.tensors) for f in moved), sum(counts), nbytes,
            whole + sum(_nbytes(tensor) for _, tensor in self.changed.values()),
            time.monotonic() - began,
        )  # fmt: skip

    def _copied(self, name: str, file: PublishedFile) -> Iterator[_Fill]:
        tensors = sorted(file.tensors.values(), key=lambda tensor: tensor.begin)
        start = tensors[0].begin if tensors else file.size
        if start:
            yield start, self._reading(name, 0, file.header)
        for tensor in tensors:
            yield from self._blocks(name, tensor)

    def _blocks(self, name: str, tensor: PublishedTensor) -> Iterator[_Fill]:
        for number, low, length in spans(tensor.begin, tensor.end):
            if number in tensor.blocks:
                yield length, self._reading(name, low, tensor.blocks[number])

    def _reading(self, name: str, low: int, crc: int) -> Callable[[memoryview], None]:
        def read(view: memoryview) -> None:
            self.model.read_into(name, low, [view])
            if crc64(view) != crc:
                raise CorruptCheckpointError(
                    f"bytes {low} to {low + len(view)} changed while they were published",
                    remedy="publish a directory that nobody writes",
                    path=file_url(self.model.url, name),
                )

        return read

    def _write(self, name: str, size: int, fills: Iterator[_Fill]) -> None:
        """Write a file from consecutive pieces: blocks, and perhaps a header before them."""
        writer = self.storage.create_file(name, size)
        with ExitStack() as on_failure:
            on_failure.callback(writer.abort)
            memory, used, at = aligned(writer.piece or _PIECE), 0, 0
            for length, fill in fills:
                if used + length > len(memory):
                    writer.write_at(at, memory[:used])
                    at, used = at + used, 0
                if length > len(memory):
                    memory = aligned(length)
                fill(memory[used : used + length])
                used += length
            if used or size == 0:
                writer.write_at(at, memory[:used])
            writer.finish()
            on_failure.pop_all()
        self._made.append(name)  # now it is ours: in S3 another process may have been first
        self.nbytes += size


_Fill = tuple[int, Callable[[memoryview], None]]


def _nbytes(tensor: PublishedTensor) -> int:
    return sum(n for number, _, n in spans(tensor.begin, tensor.end) if number in tensor.blocks)


def _delete(root: Storage, number: int, found: Publish | None) -> None:
    """Delete a publish's files, by its manifest or by the record of one that was not finished or is
    half deleted. A user's files stay, and then so does the directory."""
    with closing(root.join(folder_of(number))) as storage:
        listed = read_files(storage)
        if found is not None:
            names = {name for name, file in found.files.items() if file.whole}
            names |= {found.delta[0]} if found.delta else set()
            if listed is not None and listed != names:
                # of one who came second and was killed
                storage.delete_many(listed - names)
                storage.delete(FILES)
            put_files(storage, names)
            storage.delete(MANIFEST)
            storage.sync()
            listed = read_files(storage)
        if listed is not None:
            storage.delete_many(listed)
            storage.delete(FILES)
        try:
            storage.discard_unfinished([*(listed or ()), MANIFEST, FILES])
        except StorageError as error:  # a policy may forbid to list uploads
            log.warning("unfinished files of publish %d stay: %s", number, error)
        storage.remove_directory()
