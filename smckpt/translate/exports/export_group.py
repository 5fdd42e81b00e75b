"""Several processes that carry out one export: which process writes which files, and where they
meet.

They hold rounds over the job's store, as saves do, without collectives. If one process raises,
every process raises its error. Each gives signs of life while it writes. If one is killed, the
others notice after `timeout` seconds without a byte from it. The whole export has no time limit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

from smckpt.errors import CheckpointError, JobStoreError, UsageError, as_checkpoint_error
from smckpt.meeting.group import group_of, ranks_digest
from smckpt.meeting.keys import Store, client_of
from smckpt.meeting.round import Meeting, alone
from smckpt.meeting.store import agree

__all__ = ["ExportGroup", "export_group_of", "export_group_of_environment", "shares"]

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
