"""Convert a checkpoint into another format: smckpt's, torch DCP's, or one file of `torch.save`.

Every source is a catalogue (`foreign_catalogue`), so each format is read, and each written, in one
way only. Memory: one part of 64 MiB, and what describes the tensors.
"""

from __future__ import annotations

import fnmatch
import io
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from smckpt.calls import alone
from smckpt.checkpoint.reading.catalogue import Catalogue
from smckpt.checkpoint.reading.committed import open_any
from smckpt.checkpoint.reading.read import Progress
from smckpt.checkpoint.upkeep.reshard import differing_names, write_resharded
from smckpt.errors import StateError, UsageError, few
from smckpt.formats.conversion.new_target import NewTarget
from smckpt.formats.conversion.stock import STOCK, refuse_without
from smckpt.formats.conversion.whole_state import WholeState
from smckpt.formats.readers.foreign_catalogue import ForeignCatalogue
from smckpt.layout.containers import items_of, text_of_key
from smckpt.layout.entries import Path, dotted
from smckpt.storage import Access, StoreOptions, access_to
from smckpt.storage.urls import path_on_disk

FORMATS = ("smckpt", "dcp", "torch", *STOCK)
_GENERATORS = "manager.random."  # `CheckpointManager` saves each rank's random generators below it


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
    storage: StoreOptions | Mapping[str, Any] | None = None,
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
            made, or is empty. For "torch" and "lightning" a file that does not exist.
        to: "smckpt", "dcp" (which `torch.distributed.checkpoint.load` reads) or "torch" (one file,
            which `torch.load(weights_only=True)` reads). "trainer", "accelerate", "lightning" and
            "torchtitan": what that framework itself resumes from, with the state of each rank; of
            a checkpoint that smckpt saved in that framework.
        shard: for "smckpt": the number of ranks, as `smckpt reshard` writes them; 1: kind FULL.
        rank: the saved rank whose values are taken where ranks hold different ones. None: such
            names are refused.
        ignore: globs of names that are left out. The random generators of a run with a manager
            are left out too for "torch", and where the ranks' differ and `rank` takes none.
        threads: how many threads read.
        progress: called with (bytes done, bytes in total), one call at a time.
        storage: as for `smckpt.load`.

    Raises:
        CheckpointNotFoundError: no checkpoint of a known format is at `source`.
        StateError: values cannot be carried, because the format holds no such objects, or because
            ranks hold different ones; the message names them. Or it has no state of the framework.
        UsageError: an argument is wrong; `target` is there already.
        CorruptCheckpointError: the source is damaged; nothing is left at `target`.
    """
    began = time.monotonic()
    if to not in FORMATS:
        raise UsageError(f"to={to!r}", remedy=f"pass one of {', '.join(FORMATS)}")
    access = access_to(source, target, storage=storage)
    catalogue = open_any(access.open(source))
    catalogue.refuse_one_group()
    work = _Work(catalogue, tuple(ignore), threads, progress)
    try:
        if to == "smckpt":
            made = work.to_ours(access, target, shard, rank)
        else:
            if shard != 1:
                raise UsageError(f"shard={shard!r} with to={to!r}", remedy='pass it to="smckpt"')
            if to in STOCK:
                if rank is not None:
                    raise UsageError(
                        f"rank={rank!r} with to={to!r}",
                        remedy="leave it out: each rank's own state is written",
                    )
                made = work.to_framework(os.fspath(target), to)
            else:
                made = work.to_torch(os.fspath(target), to, rank)
    finally:
        catalogue.stores.close()
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
        saved = self._catalogue.objects(self._catalogue.object_ranks[0])
        values = [name for name in saved if not self._left_out(name)]
        return _Converted(
            written.target, written.ranks, written.tensors, len(values), written.nbytes
        )

    def to_torch(self, target: str, to: str, rank: int | None) -> _Converted:
        target = _local(target, to)
        self._refuse_unread()
        if rank is not None and rank not in self._catalogue.object_ranks:
            raise UsageError(
                f"rank={rank!r}, but ranks {list(self._catalogue.object_ranks)[:16]} saved",
                remedy="name one of those", path=self._catalogue.url,
            )  # fmt: skip
        differing = differing_names(self._catalogue) if rank is None else ()
        # A manager's generators go on only in the job that saved them. No other format has a copy
        # for each rank, and a file of torch none of NumPy's.
        if to == "torch" or any(name.startswith(_GENERATORS) for name in differing):
            self._ignore = (*self._ignore, f"{_GENERATORS}*")
        if apart := [n for n in differing if not self._left_out(n)]:
            self._refuse(
                apart, "are different on different ranks, and the format has one of each name",
                "pass rank= to take those of one rank, or leave them out: ignore=[…]",
            )  # fmt: skip
        first = self._catalogue.object_ranks[0] if rank is None else rank
        whole = WholeState(
            self._catalogue, first, self._threads, left_out=self._left_out, progress=self._progress
        )
        changed: tuple[str, ...] = ()
        with NewTarget(target, directory=to == "dcp") as new:
            if to == "dcp":
                changed = whole.write_dcp(new.path(), whole.nested())
            else:
                state = whole.nested()
                leaves = whole.leaves()
                unsafe = [dotted(at) for at, v in leaves.items() if not _is_safe(v)]
                if unsafe := [*unsafe, *_unsafe_containers((), state, leaves)]:
                    self._refuse(
                        unsafe, "hold objects that torch.load(weights_only=True) does not read",
                        f'leave each out, with what is in it: ignore=["{unsafe[0]}", '
                        f'"{unsafe[0]}.*"]; or pass to="dcp", which holds them',
                    )  # fmt: skip
                with new.file() as file:
                    whole.write_torch(file, state)
        return _converted(target, 1, whole, changed)

    def to_framework(self, target: str, framework: str) -> _Converted:
        target = _local(target, framework)
        stock = STOCK[framework]
        ranks = self._catalogue.object_ranks
        whole = WholeState(
            self._catalogue, ranks[0], self._threads, left_out=self._left_out,
            progress=self._progress,
        )  # fmt: skip
        refuse_without(whole, framework)
        with NewTarget(target, directory=not stock.one_file) as new:
            changed = stock.write(whole, new)
        return _converted(target, len(ranks), whole, changed)

    # -- what is carried -----------------------------------------------------------------------

    def _refuse(self, names: Sequence[str], what: str, remedy: str) -> NoReturn:
        raise StateError(f"{few(names)} {what}", remedy=remedy, path=self._catalogue.url)

    def _left_out(self, name: str) -> bool:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._ignore):
            self.ignored.add(name)
            return True
        return False

    def _refuse_unread(self) -> None:
        if isinstance(self._catalogue, ForeignCatalogue):
            self._catalogue.refuse_unread(self._left_out)


def _converted(target: str, ranks: int, whole: WholeState, changed: tuple[str, ...]) -> _Converted:
    nbytes = sum(tensor.nbytes for tensor in whole.tensors)
    return _Converted(target, ranks, len(whole.tensors), len(whole.values), nbytes, changed)


def _local(target: str, to: str) -> str:
    return path_on_disk(
        target,
        f"torch writes {to} to disks only",
        "convert to a local path, and copy it from there",
    )


def _unsafe_containers(path: Path, value: Any, leaves: Container[Path]) -> Iterator[str]:
    """The names of containers above the leaves that `torch.load(weights_only=True)` does not read:
    those of classes, deques, and dicts with a default."""
    if path in leaves or (items := items_of(value)) is None:
        return
    if type(value) not in (dict, OrderedDict, Counter, list, tuple):
        yield dotted(path)
    for key, inner in items:
        yield from _unsafe_containers((*path, text_of_key(key)), inner, leaves)


def _is_safe(value: Any) -> bool:
    """Whether `torch.load(weights_only=True)` reads it."""
    import torch

    from smckpt.formats.conversion.whole_state import Placeholder

    if isinstance(value, Placeholder):
        return True
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    try:
        torch.load(data, weights_only=True)
    except Exception:  # torch, zip and pickle raise many kinds
        return False
    return True
