"""Convert a checkpoint into another format: smckpt's, torch DCP's, or one file of `torch.save`.

Every source is a catalogue (`foreign_catalogue`), so each format is read, and each written, in one
way only. Memory: one part of 64 MiB, and what describes the tensors.
"""

from __future__ import annotations

import fnmatch
import io
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, NoReturn, TypeAlias

from smckpt.calls import alone
from smckpt.checkpoint.catalogue import Catalogue
from smckpt.checkpoint.meter import Meter, Progress
from smckpt.checkpoint.nested import kind_of, nested
from smckpt.checkpoint.parameter_names import under_names
from smckpt.checkpoint.per_rank import differing_names
from smckpt.checkpoint.reshard import write_resharded
from smckpt.checkpoint.whole import WholeTensor, WholeTensors
from smckpt.errors import StateError, UsageError
from smckpt.layout.entries import Path, dotted
from smckpt.layout.leaves import flattened
from smckpt.layout.strided import Box
from smckpt.storage import Access, access_to
from smckpt.storage.directory import Directory
from smckpt.storage.exclusive import publish
from smckpt.storage.faults import storage_error
from smckpt.storage.urls import is_local, local_path
from smckpt.translate.foreign_catalogue import ForeignCatalogue, open_any

__all__ = ["FORMATS", "ConvertReport", "convert"]

FORMATS = ("smckpt", "dcp", "torch")
UNFINISHED = ".unfinished"
_GENERATORS = "manager.random."  # `CheckpointManager` saves each rank's random generators below it
_AT_ONCE = 64 << 20  # bytes
_Read: TypeAlias = Callable[[WholeTensor, Box, memoryview], None]  # fills memory with a box


@dataclass(frozen=True)
class ConvertReport:
    """What was written. source_format: "smckpt", or the name of another format. ranks: for how many
    ranks. ignored: the names that were left out. changed: names whose form DCP changes: keys that
    are not text become text, and empty dicts are not there."""

    source: str
    target: str
    source_format: str
    format: str
    ranks: int
    tensors: int
    values: int
    nbytes: int
    seconds: float
    ignored: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@alone()
def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str,
    shard: int = 1,
    rank: int | None = None,
    ignore: Sequence[str] = (),
    threads: int = 4,
    progress: Progress | None = None,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> ConvertReport:
    """Write the checkpoint at `source` in another format, bit for bit and under the same names:
    tensors, the optimizer's state with its `param_groups`, and all other values.

    Tensors are whole, by logical name, as a load without a target gives them. The target appears
    whole or not at all.

    Args:
        source: a checkpoint of smckpt of any kind; a directory of torch DCP (also accelerate's,
            torchtitan's, Megatron-core's); a file of `torch.save` or safetensors; a directory of
            Hugging Face.
        target: for "smckpt" an empty directory, on disk or in S3. For "dcp" a directory that is
            made, or is empty. For "torch" a file that does not exist.
        to: "smckpt", "dcp" (which `torch.distributed.checkpoint.load` reads) or "torch" (one file,
            which `torch.load(weights_only=True)` reads).
        shard: for "smckpt": the number of ranks, as `smckpt reshard` writes them; 1: kind FULL.
        rank: the saved rank whose values are taken where ranks hold different ones. None: such
            names are refused.
        ignore: globs of names that are left out. The random generators of a run with a manager
            are left out too where the ranks' differ and `rank` takes none.
        threads: how many threads read.
        progress: called with (bytes done, bytes in total), one call at a time.
        s3_region: as for `smckpt.load`.
        s3client_config: as for `smckpt.load`.

    Raises:
        CheckpointNotFoundError: no checkpoint of a known format is at `source`.
        StateError: values cannot be carried, because the format holds no such objects, or because
            ranks hold different ones; the message names them.
        UsageError: an argument is wrong; `target` is there already.
        CorruptCheckpointError: the source is damaged; nothing is left at `target`.
    """
    began = time.monotonic()
    if to not in FORMATS:
        raise UsageError(f"to={to!r}", remedy=f"pass one of {', '.join(FORMATS)}")
    access = access_to(source, target, s3_region=s3_region, s3client_config=s3client_config)
    catalogue = open_any(access.open(source))
    if not catalogue.whole:
        raise UsageError(
            "this is one group of a step; it is no checkpoint without the other groups",
            remedy=f"pass the directory of the step, {catalogue.above}", path=catalogue.url,
        )  # fmt: skip
    work = _Work(catalogue, tuple(ignore), threads, progress)
    try:
        if to == "smckpt":
            made = work.to_ours(access, target, shard, rank)
        else:
            if shard != 1:
                raise UsageError(f"shard={shard!r} with to={to!r}", remedy='pass it to="smckpt"')
            made = work.to_torch(os.fspath(target), to, rank)
    finally:
        catalogue.readers.close()
    return ConvertReport(
        catalogue.url, made.target, "smckpt" if catalogue.ours else catalogue.identity, to,
        made.ranks, made.tensors, made.values, made.nbytes, time.monotonic() - began,
        tuple(sorted(work.ignored)), made.changed,
    )  # fmt: skip


@dataclass(frozen=True)
class _Converted:
    target: str
    ranks: int
    tensors: int
    values: int
    nbytes: int
    changed: tuple[str, ...] = ()


class _Work:
    """One conversion."""

    def __init__(
        self, catalogue: Catalogue, ignore: Sequence[str], threads: int, progress: Progress | None
    ) -> None:
        self._catalogue, self._ignore = catalogue, ignore
        self._threads, self._progress = threads, progress
        self.ignored: set[str] = set()

    def to_ours(
        self, access: Access, target: str | os.PathLike[str], shard: int, rank: int | None
    ) -> _Converted:
        if rank is not None:
            raise UsageError(
                'rank= with to="smckpt"', remedy="leave it out: each rank keeps its own values"
            )
        self._refuse_unread()
        written = write_resharded(
            self._catalogue, access.open(target), shard=shard, ignore=self._ignore,
            threads=self._threads, progress=self._progress,
        )  # fmt: skip
        for name in self._catalogue.logical:
            self._left_out(name)
        values = [n for n in self._values(self._catalogue.object_ranks[0]) if not self._left_out(n)]
        return _Converted(
            written.target, written.ranks, written.tensors, len(values), written.nbytes
        )

    def to_torch(self, target: str, to: str, rank: int | None) -> _Converted:
        if not is_local(target):
            raise UsageError(
                f"torch writes {to} to disks only",
                remedy="convert to a local path, and copy it from there", path=target,
            )  # fmt: skip
        target = os.path.abspath(local_path(target))
        self._refuse_unread()
        self._refuse_differing(rank)
        first = self._catalogue.object_ranks[0] if rank is None else rank
        reads = WholeTensors(self._catalogue, first, self._threads)
        tensors = [t for t in reads.tensors if not self._left_out(t.name)]
        values = self._named_values(first)
        meter = Meter(self._progress, sum(tensor.nbytes for tensor in tensors))

        def read(tensor: WholeTensor, box: Box, memory: memoryview) -> None:
            reads.read(tensor, box, memory)
            meter.add(len(memory))

        changed: tuple[str, ...] = ()
        with _Beside(target, directory=to == "dcp") as place:
            state = self._state(tensors, values, read, to)
            if to == "dcp":
                changed = _to_dcp(place.path(), tensors, state, read)
            else:
                _to_file(place, tensors, state, read)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return _Converted(target, 1, len(tensors), len(values), nbytes, changed)

    def _state(
        self, tensors: Sequence[WholeTensor], values: Mapping[Path, Any], read: _Read, to: str
    ) -> dict[str, Any]:
        """The nested state, with a placeholder for each tensor. Arrays of NumPy are in memory, for
        the format has them among the values; so is, for DCP, what tuples hold."""
        from smckpt.translate.torch_write import Placeholder

        leaves: dict[Path, Any] = dict(values)
        for number, tensor in enumerate(tensors):
            path, array = tensor.path, kind_of(self._catalogue, tensor.path) == "ndarray"
            inner = to == "dcp" and any(
                kind_of(self._catalogue, path[:depth]) == "tuple" for depth in range(len(path))
            )
            if array or inner:
                if tensor.nbytes > _AT_ONCE:
                    _refuse([tensor.name], f"has {tensor.nbytes} bytes, and torch keeps it among "
                            "the values", "save it as a tensor, outside of tuples",
                            self._catalogue.url)  # fmt: skip
                leaves[path] = _in_memory(tensor, read, array)
            else:
                leaves[path] = Placeholder(number, tensor.dtype, tensor.shape)
        if to == "torch":
            plain = {path: v for path, v in leaves.items() if not isinstance(v, Placeholder)}
            _refuse_unsafe(plain, self._catalogue.url)
        return nested(self._catalogue, leaves)

    # -- what is carried -----------------------------------------------------------------------

    def _left_out(self, name: str) -> bool:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._ignore):
            self.ignored.add(name)
            return True
        return False

    def _values(self, rank: int) -> dict[str, tuple[Path, Any]]:
        return self._catalogue.objects(rank)

    def _named_values(self, rank: int) -> dict[Path, Any]:
        """The values of a rank, and those that only the lowest rank saved. An optimizer's
        parameters have their names."""
        found: dict[Path, Any] = {}
        for saved in dict.fromkeys((rank, self._catalogue.object_ranks[0])):
            for path, value in self._values(saved).values():
                for place, named in under_names(self._catalogue.optimizers, path, value):
                    if not self._left_out(dotted(place)):
                        found.setdefault(place, named)
        return found

    def _refuse_unread(self) -> None:
        if isinstance(self._catalogue, ForeignCatalogue):
            self._catalogue.refuse_unread(self._left_out)

    def _refuse_differing(self, rank: int | None) -> None:
        if rank is not None:
            if rank not in self._catalogue.object_ranks:
                raise UsageError(
                    f"rank={rank!r}, but ranks {list(self._catalogue.object_ranks)[:16]} saved",
                    remedy="name one of those", path=self._catalogue.url,
                )  # fmt: skip
            return
        differing = differing_names(self._catalogue)
        # A manager's generators go on only in the job that saved them, and no other format has a
        # copy for each rank.
        self._ignore = (*self._ignore, *(n for n in differing if n.startswith(_GENERATORS)))
        if apart := [n for n in differing if not self._left_out(n)]:
            _refuse(apart, "are different on different ranks, and the format has one of each name",
                    "pass rank= to take those of one rank, or leave them out: ignore=[…]",
                    self._catalogue.url)  # fmt: skip


def _refuse(names: Sequence[str], what: str, remedy: str, path: str) -> NoReturn:
    more = f" and {len(names) - 8} more" if names[8:] else ""
    raise StateError(f"{', '.join(names[:8])}{more} {what}", remedy=remedy, path=path)


def _in_memory(tensor: WholeTensor, read: _Read, array: bool) -> Any:
    import torch

    dtype: torch.dtype = getattr(torch, tensor.dtype)
    made = torch.empty(tensor.shape, dtype=dtype)
    if tensor.nbytes:
        data: Any = made.reshape(-1).view(torch.uint8).numpy()
        read(tensor, Box.whole(tensor.shape), memoryview(data))
    return made.numpy() if array else made


def _to_file(
    place: _Beside, tensors: Sequence[WholeTensor], state: dict[str, Any], read: _Read
) -> None:
    from smckpt.translate.torch_write import Placeholder, write_archive

    numbers = [leaf.number for leaf in _placeholders(state) if isinstance(leaf, Placeholder)]
    written = [tensors[number] for number in sorted(numbers)]
    buffer = memoryview(bytearray(min(_AT_ONCE, max((t.nbytes for t in written), default=0))))

    def pieces(tensor: WholeTensor) -> Iterator[memoryview]:
        for box in tensor.chunks(_AT_ONCE) if tensor.nbytes else ():
            memory = buffer[: box.numel * tensor.itemsize]
            read(tensor, box, memory)
            yield memory

    with place.file() as file:
        write_archive(file, state, {n: pieces(tensors[n]) for n in sorted(numbers)})
        file.flush()
        os.fsync(file.fileno())


def _placeholders(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _placeholders(inner)
    else:
        yield value


def _to_dcp(
    place: str, tensors: Sequence[WholeTensor], state: dict[str, Any], read: _Read
) -> tuple[str, ...]:
    """Write the state as DCP flattens it; gives the names whose form that changes."""
    import torch

    from smckpt.translate.dcp.write import write_dcp
    from smckpt.translate.torch_write import Placeholder

    parts: dict[Path, WholeTensor] = {}
    values: dict[Path, Any] = {}
    for path, leaf in flattened((), state, (Placeholder, torch.Tensor)):
        if isinstance(leaf, Placeholder):
            parts[path] = tensors[leaf.number]
        else:
            values[path] = leaf
    write_dcp(place, parts, values, read)
    return tuple(sorted(set(_changed((), state))))


def _changed(path: Path, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if not value or any(type(key) is not str for key in value):
            yield dotted(path)
        for key, inner in value.items():
            yield from _changed((*path, str(key)), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _changed((*path, index), inner)


def _refuse_unsafe(values: Mapping[Path, Any], url: str) -> None:
    """Refuse values that `torch.load(weights_only=True)` would not read."""
    import torch

    unsafe = []
    for path, value in values.items():
        data = io.BytesIO()
        torch.save(value, data)
        data.seek(0)
        try:
            torch.load(data, weights_only=True)
        except Exception:  # torch, zip and pickle raise many kinds
            unsafe.append(dotted(path))
    if unsafe:
        what = "hold objects that torch.load(weights_only=True) does not read"
        _refuse(unsafe, what, 'leave them out: ignore=[…]; or pass to="dcp", which holds them', url)


class _Beside:
    """A new file or directory beside `target` that becomes it at the end of the block, unless it
    fails or something is there by then.

    Nothing is reached through a link that somebody puts there meanwhile: the directory above both,
    which the user named, stays open, and so does what is made in it.
    """

    def __init__(self, target: str, *, directory: bool) -> None:
        self._target, self._directory = target, directory
        self._name = os.path.basename(target)
        self._begun = f"{self._name}.{secrets.token_hex(6)}{UNFINISHED}"

    def __enter__(self) -> _Beside:
        above = os.path.dirname(self._target)
        try:
            self._above = Directory.open(above, make=True)
        except OSError as error:
            raise storage_error(error, above, "make the directory") from error
        try:
            if self._is_taken():
                raise self._taken()
            if self._directory:
                self._made = self._above.make(self._begun)
            else:
                self._fd = self._above.create(self._begun)
        except BaseException as error:
            self._above.close()
            if isinstance(error, OSError):
                raise storage_error(error, self._target, "write") from error
            raise
        return self

    def file(self) -> BinaryIO:
        """The new file, which its `with` block closes."""
        return open(os.dup(self._fd), "wb")

    def path(self) -> str:
        """A path of the new directory, for writers that take no descriptor."""
        path = f"/proc/self/fd/{self._made.fd}"  # leads to the open directory, and not by a name
        return path if os.path.isdir(path) else self._made.path

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if error is None:
                self._publish()
            elif isinstance(error, OSError):
                raise storage_error(error, self._target, "write") from error
        finally:
            if self._directory:
                self._made.close()
            else:
                os.close(self._fd)
            with self._above, suppress(OSError):
                self._above.remove_all(self._begun)

    def _publish(self) -> None:
        try:
            if self._directory:
                self._made.sync()
                self._above.rename(self._begun, self._name)  # refused unless the target is empty
            elif not publish(self._above, self._begun, self._name):
                raise self._taken()
            self._above.sync()
        except OSError as error:
            if self._above.status(self._name) is not None:
                raise self._taken() from error
            raise storage_error(error, self._target, "name the finished checkpoint") from error

    def _is_taken(self) -> bool:
        there = self._above.status(self._name)
        if there is None or not (self._directory and stat.S_ISDIR(there.st_mode)):
            return there is not None
        with self._above.below(self._name) as directory:
            return bool(directory.names())

    def _taken(self) -> UsageError:
        return UsageError(
            "something is there already", remedy="choose another target", path=self._target
        )
