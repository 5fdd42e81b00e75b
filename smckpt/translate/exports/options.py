"""What an export and an import take beside the model, its config and the ranks; and the processes
that carry out one export: which of them writes which files, and where they meet.

These processes hold rounds over the job's store, as saves do, without collectives. If one raises,
every process raises its error. Each gives signs of life while it writes. If one is killed, the
others notice after `timeout` seconds without a byte from it. The whole export has no time limit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from smckpt.errors import CheckpointError, JobStoreError, UsageError, as_checkpoint_error
from smckpt.formats.degrees import check_counts, check_flags
from smckpt.meeting.group import group_of, ranks_digest
from smckpt.meeting.keys import Store, client_of
from smckpt.meeting.round import Meeting, alone
from smckpt.meeting.store import agree
from smckpt.translate.models.contents import HUB, MODULE
from smckpt.translate.prediction import DROP, check_mtp

# seconds that the first process, which may host the store, waits for the others to leave
_LEAVE = 10.0

B = TypeVar("B")
D = TypeVar("D")


class ExportGroup:
    """The processes of an export, seen from one of them."""

    def __init__(self, meeting: Meeting) -> None:
        self.member = meeting.member
        self.count = meeting.count
        # on the first process: called with the bytes written by all
        self.tell: Callable[[int], None] | None = None
        self._meeting = meeting
        self._pulse = meeting.pulse

    @property
    def leads(self) -> bool:
        return self.member == 0

    def meet(self, point: str, act: Callable[[], B], decide: Callable[[dict[int, B]], D]) -> D:
        """Hold a round: each process calls `act`, the first process decides from the results, and
        all get its decision.

        Raises:
            CheckpointError: the error of any process. PeerError: one does not come.
        """
        return self._meeting.round(point, act, lambda brought: decide(brought()))

    @contextmanager
    def telling(self) -> Iterator[None]:
        """If the block raises outside a round, bring the error to the other processes too."""
        try:
            yield
        except BaseException as error:
            if self._pulse is not None:
                with suppress(JobStoreError):
                    self._pulse.fail(as_checkpoint_error(error))
            raise

    def beat(self, done: int) -> None:
        """Give a sign of life: how many bytes this process has written.

        Raises:
            CheckpointError: another process has failed.
        """
        if self._pulse is not None:
            self._pulse.tell = self.tell
            self._pulse.beat(done)
        elif self.tell is not None:
            self.tell(done)

    def close(self) -> None:
        """Leave the group. The first process leaves last."""
        with suppress(CheckpointError):
            self._meeting.leave(_LEAVE)


def export_group_of(process_group: Any, timeout: float) -> ExportGroup:
    """Make the group of all members of a process group; None: this process alone.

    Raises:
        UsageError: this process is not a member.
        PeerError: a member did not come.
    """
    if process_group is None:
        return ExportGroup(alone())
    if isinstance(process_group, ExportGroup):
        return process_group
    group = group_of(process_group)
    if group is None:
        raise UsageError(
            "this process is not a member of process_group",
            remedy="call export_hf only on its members",
        )
    return _agreed(group.store, group.index, group.ranks, timeout)


def export_group_of_environment(timeout: float) -> ExportGroup | None:
    """The processes that torchrun started, if it started several."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    from torch.distributed.rendezvous import rendezvous

    store, rank, world = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    return _agreed(store, rank, range(world), timeout)


def _agreed(store: Store | None, member: int, ranks: Sequence[int], timeout: float) -> ExportGroup:
    if len(ranks) == 1 or store is None:
        return ExportGroup(alone())
    meeting = agree(
        client_of(store),
        f"smckpt/export/{ranks_digest([ranks])}",
        member=member,
        count=len(ranks),
        timeout=timeout,
        name=lambda m: f"rank {ranks[m]}",
        rank=ranks[member],
        silence=timeout,
    )
    return ExportGroup(meeting)


def shares(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Deal files out to `count` processes, the largest file first, each to the process with the
    fewest bytes. Returns the numbers of the files."""
    out: list[list[int]] = [[] for _ in range(count)]
    load = [0] * count
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        least = load.index(min(load))
        out[least].append(number)
        load[least] += sizes[number]
    return [sorted(numbers) for numbers in out]


_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@dataclass(frozen=True)
class WriteOptions:
    """What options of an export and of an import share. Their docstrings say what each means."""

    overwrite: bool = False
    threads: int | None = None
    progress: Callable[[int, int], None] | None = None
    allow_nonfinite: bool = False
    mtp: str = DROP

    def __post_init__(self) -> None:
        check_flags(overwrite=self.overwrite, allow_nonfinite=self.allow_nonfinite)
        check_counts(threads=self.workers)
        check_mtp(self.mtp)
        if self.progress is not None and not callable(self.progress):
            raise UsageError(f"progress={self.progress!r}", remedy="pass a function")

    @property
    def workers(self) -> int:
        """How many threads there are."""
        return min(8, os.cpu_count() or 1) if self.threads is None else self.threads


@dataclass(frozen=True)
class ExportOptions(WriteOptions):
    """Options of an export. The defaults suit most models; each line says what changes.

    overwrite: replace a model in `out_dir`. The old one is removed first.
    threads: how many threads read and write; by default one for each processor, at most 8.
    progress: called with (bytes written, bytes in total) after each chunk, one call at a time. It
        begins again where released checkpoints turn out to have other names.
    allow_nonfinite: also export weights with NaN or infinity; the report counts them.
    mtp: layers that predict further tokens (multi-token prediction), of families with a table of
        them: "drop" leaves them out, as transformers does, and a note says so; "keep" writes them
        under the names of the release. The config's num_nextn_predict_layers is what is written.
    max_shard_size: how much data one file may have, in bytes or as "5GB", "512MiB".
    against_model: compare names and shapes with the config's model: with the table of a built-in
        family, and, if they do not fit it exactly and transformers is installed, with the model
        that transformers makes on the meta device.
    naming: "hub": the names of released models, as `save_pretrained` writes them. For families
        without a table, transformers gives them; a note says if it cannot. "module": the names in
        the state dict, which not all servers and versions load.
    card: write README.md, a model card: step, checkpoint, sizes, dtype and checksums. One that
        smckpt did not write stays as it is.
    generation_config: the model's own: `model.generation_config`, a directory or file, or a dict.
        By default the file beside `config`, or the token ids in the config.
    gguf: also write `model-<gguf>.gguf`, with llama.cpp's own converter: "f16", "bf16", "f32",
        "q8_0", "auto" or what else that writes. It reads the finished directory, which needs a
        tokenizer, and stays whole if the converter fails.
    gguf_converter: with `gguf`, the script `convert_hf_to_gguf.py`, or a command line that runs it.
        By default that in the variable SMCKPT_GGUF_CONVERTER, or the one on PATH.
    process_group: the processes that call this together, with the same arguments, and share the
        files: a torch process group, or the `ExportGroup` of `export_group_of_environment`. Only
        the first of them calls `progress`. None: this process exports alone.
    timeout: with `process_group`: all give up when one of them has not written a byte for this many
        seconds.
    """

    max_shard_size: int | str = "5GB"
    against_model: bool = True
    naming: str = HUB
    card: bool = True
    generation_config: Any = None
    gguf: str | None = None
    gguf_converter: str | os.PathLike[str] | None = None
    process_group: Any = None
    timeout: float = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(against_model=self.against_model, card=self.card)
        if self.naming not in (HUB, MODULE):
            raise UsageError(f"naming={self.naming!r}", remedy=f"pass {HUB!r} or {MODULE!r}")
        if not isinstance(self.timeout, (int, float)) or self.timeout <= 0:
            raise UsageError(f"timeout={self.timeout!r}", remedy="pass seconds > 0")
        _ = self.limit

    @property
    def limit(self) -> int:
        """`max_shard_size` in bytes."""
        match = re.fullmatch(
            r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", str(self.max_shard_size).upper()
        )
        unit = match.group(2) if match else "?"
        if match is None or unit not in _SIZES or float(match.group(1)) * _SIZES[unit] < 1:
            raise UsageError(
                f"max_shard_size={self.max_shard_size!r}",
                remedy='pass bytes, or a text such as "5GB" or "512MiB"',
            )
        return int(float(match.group(1)) * _SIZES[unit])


@dataclass(frozen=True)
class ImportOptions(WriteOptions):
    """Options of an import.

    overwrite: replace a checkpoint in `out_dir`. The old one stays until the new one is whole.
    threads, progress: as in `ExportOptions`.
    allow_nonfinite: also import weights with NaN or infinity; the report counts them.
    mtp: layers that predict further tokens (DeepSeek's `num_nextn_predict_layers`): "drop" leaves
        them out, and a note says so; "keep" writes them as Megatron-core's `mtp`, and refuses a
        layout that has no such layers, and pipeline stages.
    pad_vocab_to_multiple_of: each rank's rows are padded to this multiple (Megatron's
        make_vocab_size_divisible_by). A note says if a later export will need `padded_vocab_size`.
    """

    pad_vocab_to_multiple_of: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(pad_vocab_to_multiple_of=self.pad_vocab_to_multiple_of)
