"""Alarms: a save reports faults of the state that it saves, so that no failure of training is
silent.

Each rank looks at its own bytes, where a save passes over them anyway: the worker computes the
checksums of blocks, and those of watched entries come out of the same pass. Only the comparison of
replicas reads more, so it is off by default. A rank brings its observations with its part, and the
coordinator decides. So alarms need no collective and no round of their own.
"""

from __future__ import annotations

import fnmatch
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from smckpt.checkpoint.records.crc import combine
from smckpt.engine.background.commands import PartWritten, Watched
from smckpt.errors import StateError, UsageError, few
from smckpt.layout.entries import HAS_NONFINITE, Entry
from smckpt.layout.image import Layout, shares
from smckpt.staging.copies import checksums

NAMED = 6  # names in a message
CHOICES = ("off", "warn", "error")

log = logging.getLogger("smckpt")


@dataclass(frozen=True)
class Alarms:
    """What a save watches for. Each is "off", "warn" (the coordinator logs it, and the events of
    all ranks have it), or "error" (the save fails by name on all ranks; nothing is committed).

    unchanged: all parameters of the group are bit for bit those of the queue's last committed save,
        though the step is a later one: an optimizer that does not step, or a state dict that is not
        taken anew. It costs no further pass over the bytes. The parameters are known if the state
        was taken in `sm_state_dict_type` or by the manager, or are DTensors.
    replicas: replicas of the group hold different values in an entry that they share, or a rank
        wrote other bytes than it held (bad memory of a host; a state that changed while it was
        copied). While `async_save` blocks, each rank reads all that it shares with others.
    replicas_every: only in every so many saves of the queue, beginning with the first. Raise it if
        the check blocks training for too long.
    nonfinite: elements that are NaN or infinite, counted by the worker process.
    ignore: globs of names that no alarm watches, such as "model.*.mask". They are those that the
        alarms name.
    """

    unchanged: str = "warn"
    replicas: str = "off"
    replicas_every: int = 1
    nonfinite: str = "off"
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("unchanged", "replicas", "nonfinite"):
            if getattr(self, name) not in CHOICES:
                raise UsageError(
                    f"Alarms({name}={getattr(self, name)!r}) is not known",
                    remedy='pass "off", "warn" or "error"',
                )
        if type(self.replicas_every) is not int or self.replicas_every < 1:
            raise UsageError(
                f"Alarms(replicas_every={self.replicas_every!r})", remedy="pass a whole number ≥ 1"
            )
        if isinstance(self.ignore, str) or not all(isinstance(one, str) for one in self.ignore):
            raise UsageError(
                f"Alarms(ignore={self.ignore!r})", remedy="pass a tuple of globs of names"
            )
        object.__setattr__(self, "ignore", tuple(self.ignore))

    def compares_replicas(self, number: int) -> bool:
        """Whether save `number` of the queue compares replicas."""
        return self.replicas != "off" and number % self.replicas_every == 0

    def watches(self, name: str) -> bool:
        return not any(fnmatch.fnmatchcase(name, glob) for glob in self.ignore)


@dataclass(frozen=True)
class Shared:
    """Checksums of what `writers` share, from one of them, as hex of 16 digits each.

    held: of every part, in an order that is the same on all, as this rank holds it. counts: how
    many of the parts each writer writes. wrote: of this rank's own, as it wrote them. names: of all
    parts; only the first writer brings them.
    """

    writers: tuple[int, ...]
    counts: tuple[int, ...]
    held: str
    wrote: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Observed:
    """A rank's observations, for the coordinator.

    alarms: as text, because all ranks must have passed the same. unchanged: the bytes of its
    parameters if all are those of the last save; 0 if some are not; None if it cannot tell. names:
    some of their names. since: the last save. nonfinite: name → count.
    """

    alarms: str
    unchanged: int | None = None
    names: tuple[str, ...] = ()
    since: str = ""
    nonfinite: dict[str, int] = field(default_factory=dict)
    shared: tuple[Shared, ...] = ()


@dataclass(frozen=True)
class Last:
    """A committed save: which slots were watched, its step, how it is called, and the checksums of
    its parameters."""

    watched: str
    step: int | None
    called: str
    sums: tuple[int, ...]


@dataclass(frozen=True)
class _WatchedSlot:
    """A slot that is watched. parameter: for `unchanged`."""

    name: str
    entry: int
    start: int
    nbytes: int
    parameter: bool
    where: Watched


class Observer:
    """Looks at one rank's saves of one layout. Used by one thread at a time."""

    def __init__(self, alarms: Alarms, layout: Layout, parameters: frozenset[str]) -> None:
        self.alarms = alarms
        self.layout = layout
        self.parameters = parameters
        self._names = [_name(entry) for entry in layout.entries]
        self._shares: dict[tuple[int, ...], list[list[tuple[int, int, int]]]] = {}

        def compared(entry: int, start: int, stop: int) -> bool:
            return stop > start and alarms.watches(self._names[entry])

        if alarms.replicas != "off":
            self._shares = {
                writers: [[each for each in part if compared(*each)] for part in parts]
                for writers, parts in shares(layout).items()
            }

    def hold(self, number: int, tensors: Sequence[Any]) -> dict[tuple[int, ...], list[int]]:
        """Writers → the checksums of all that they share, as this rank holds it now. Call it while
        the state does not change."""
        if not self.alarms.compares_replicas(number):
            return {}
        return {
            writers: checksums(self.layout.entries, tensors, [e for part in parts for e in part])
            for writers, parts in self._shares.items()
        }

    def watched(self, compares: bool) -> list[_WatchedSlot]:
        """The slots of this rank that the worker looks at, by file and place."""
        found, alarms = [], self.alarms
        shared = self._shares.values() if compares else ()
        common = {entry for parts in shared for part in parts for entry, *_ in part}
        for slot in self.layout.slots:
            entry, name = self.layout.entries[slot.entry], self._names[slot.entry]
            nbytes = (slot.stop - slot.start) * entry.itemsize
            parameter = alarms.unchanged != "off" and entry.key in self.parameters
            counted = alarms.nonfinite != "off" and entry.dtype in HAS_NONFINITE
            wanted = parameter or counted or slot.entry in common
            if not nbytes or not wanted or not alarms.watches(name):
                continue
            dtype = entry.dtype if counted else ""
            where = Watched(slot.file, slot.offset, slot.offset + nbytes, dtype)
            found.append(_WatchedSlot(name, slot.entry, slot.start, nbytes, parameter, where))
        return sorted(found, key=lambda one: (one.where.file, one.where.start))

    def looked(
        self,
        held: Mapping[tuple[int, ...], list[int]],
        slots: Sequence[_WatchedSlot],
        done: PartWritten,
        now: Last,
        last: Last | None,
    ) -> tuple[Observed, Last]:
        """This rank's observations of the part that its worker has written; and the save with which
        the next one is compared, once this one is committed.

        Args:
            held: of `hold`.
            slots: of `watched`.
            now: this save, without its checksums.
            last: the last committed save of the queue.
        """
        nonfinite = Counter[str]()
        for slot, count in zip(slots, done.nonfinite, strict=True):
            if count:
                nonfinite[slot.name] += count
        ours = [number for number, slot in enumerate(slots) if slot.parameter]
        sums = tuple(done.checksums[number] for number in ours)
        watched = " ".join([self.layout.fingerprint, *(slots[number].name for number in ours)])
        now = replace(now, watched=watched, sums=sums)
        unchanged, since = None, ""
        if sums and last is not None and last.watched == watched and _is_later(now, last):
            same, since = sums == last.sums, last.called
            unchanged = sum(slots[number].nbytes for number in ours) if same else 0
        looked = Observed(
            alarms=str(self.alarms),
            unchanged=unchanged,
            names=tuple(slots[number].name for number in ours[:NAMED]) if unchanged else (),
            since=since,
            nonfinite=dict(nonfinite),
            shared=tuple(self._shared(held, slots, done.checksums)),
        )
        return looked, now

    def _shared(
        self,
        held: Mapping[tuple[int, ...], list[int]],
        slots: Sequence[_WatchedSlot],
        sums: Sequence[int],
    ) -> Iterator[Shared]:
        wrote: dict[int, list[tuple[int, int, int]]] = {}
        for slot, crc in zip(slots, sums, strict=True):
            wrote.setdefault(slot.entry, []).append((slot.start, slot.nbytes, crc))
        for writers, checks in held.items():
            parts = self._shares[writers]
            mine = writers.index(self.layout.rank)
            own = []
            for entry, _, _ in parts[mine]:
                total = 0
                for _, nbytes, crc in sorted(wrote[entry]):  # of several files, where it is split
                    total = combine(total, crc, nbytes)
                own.append(total)
            names = [self._names[entry] for part in parts for entry, *_ in part]
            yield Shared(
                writers,
                tuple(len(part) for part in parts),
                _hex(checks),
                _hex(own),
                tuple(names) if mine == 0 else (),
            )


def _is_later(now: Last, last: Last) -> bool:
    """Whether training has gone on since the last save, as far as the steps tell. A step that is
    not later is the same one again, or one of another run."""
    return now.step is None or last.step is None or now.step > last.step


# -- the coordinator -------------------------------------------------------------------------------


def judge(
    alarms: Alarms, called: str, brought: Mapping[int, tuple[str, Observed | None]], path: str
) -> tuple[str, ...]:
    """Decide on the observations of a group's ranks. Logs the warnings, and returns them.

    Args:
        called: how the save is called.
        brought: rank → its host and its observations.

    Raises:
        StateError: an alarm that is an error.
        UsageError: the ranks passed different alarms.
    """
    seen = {rank: looked for rank, (_, looked) in brought.items() if looked is not None}
    hosts = {rank: host for rank, (host, _) in brought.items()}
    settings = sorted({looked.alarms for looked in seen.values()})
    if len(settings) > 1:
        raise UsageError(
            f"the ranks of the group passed different alarms: {', '.join(settings[:4])}",
            remedy="pass the same SaveOptions(alarms=) on all ranks of process_group",
            path=path,
        )
    found: list[str] = []
    for kind, alarm in (
        ("unchanged", _unchanged(seen)),
        ("nonfinite", _nonfinite(seen)),
        ("replicas", _replicas(seen, hosts)),
    ):
        if alarm is None:
            continue
        text, remedy, rank = alarm
        text = f"{called}: {text}"
        if getattr(alarms, kind) == "error":
            raise StateError(text, remedy=remedy, path=path, rank=rank, host=hosts[rank])
        log.warning("%s. What to do: %s", text, remedy)
        found.append(text)
    return tuple(found)


_Alarm = tuple[str, str, int]  # text, remedy, the rank where it is


def _unchanged(seen: Mapping[int, Observed]) -> _Alarm | None:
    compared = {rank: looked for rank, looked in seen.items() if looked.unchanged is not None}
    if not compared or any(looked.unchanged == 0 for looked in compared.values()):
        return None
    names = dict.fromkeys(name for looked in compared.values() for name in looked.names)
    first = min(compared)
    size = sum(looked.unchanged or 0 for looked in compared.values())
    return (
        f"all parameters ({size:,} bytes: {few(list(names), NAMED)}) are bit for bit those of "
        f"{compared[first].since}",
        "find out whether the optimizer steps, and whether the state dict is taken anew for each "
        'save; if it is meant, pass SaveOptions(alarms=Alarms(unchanged="off"))',
        first,
    )


def _nonfinite(seen: Mapping[int, Observed]) -> _Alarm | None:
    counts: dict[str, Counter[int]] = {}
    for rank, looked in seen.items():
        for name, count in looked.nonfinite.items():
            counts.setdefault(name, Counter())[rank] += count
    if not counts:
        return None
    tensors = [
        f"{name} ({sum(by.values()):,}, on rank {few(sorted(by), NAMED)})"
        for name, by in sorted(counts.items())
    ]
    rank = min(rank for by in counts.values() for rank in by)
    return (
        f"{len(counts)} tensors have NaN or infinite elements: {few(tensors, NAMED)}",
        "resume from a step before it, and find out what made them; names that may have them go "
        "into Alarms(ignore=)",
        rank,
    )


def _replicas(seen: Mapping[int, Observed], hosts: Mapping[int, str]) -> _Alarm | None:
    by_writers: dict[tuple[int, ...], dict[int, Shared]] = {}
    for rank, looked in seen.items():
        for shared in looked.shared:
            by_writers.setdefault(shared.writers, {})[rank] = shared
    names: dict[str, list[str]] = {}  # what is wrong → names
    where: list[int] = []

    for writers, brought in sorted(by_writers.items()):
        if set(brought) != set(writers) or len({one.counts for one in brought.values()}) > 1:
            continue  # they hold different entries, which the commit refuses by name
        for rank, what, name in _apart(writers, brought, hosts):
            where.append(rank)
            names.setdefault(what, []).append(name)
    if not names:
        return None
    parts = [f"{what}: {few(list(dict.fromkeys(of)), NAMED)}" for what, of in names.items()]
    return (
        f"replicas differ. {'; '.join(parts)}",
        "check the memory of that host and what changes the state on one rank alone; all replicas "
        "load what the checkpoint holds, so a resume ends the difference",
        where[0],
    )


def _apart(
    writers: tuple[int, ...], brought: Mapping[int, Shared], hosts: Mapping[int, str]
) -> Iterator[tuple[int, str, str]]:
    """The rank concerned, what is wrong, and the name of the entry."""
    names = brought[writers[0]].names
    starts = [0]
    for count in brought[writers[0]].counts:
        starts.append(starts[-1] + count)
    for writer, (low, high) in zip(writers, pairwise(starts), strict=True):
        for at in range(low, high):
            held = {rank: _at(one.held, at) for rank, one in brought.items()}
            if _at(brought[writer].wrote, at - low) != held[writer]:
                what = f"{_rank(writer, hosts)} wrote other bytes than it held"
                yield writer, what, names[at]
            value, votes = Counter(held.values()).most_common(1)[0]
            odd = sorted(rank for rank in held if held[rank] != value)
            if not odd:
                continue
            agree = sorted(rank for rank in held if held[rank] == value)
            if 2 * votes > len(held):
                of = ", ".join(_rank(rank, hosts) for rank in odd[:NAMED])
                what = f"{of} {'hold' if odd[1:] else 'holds'} other values than rank"
                yield (
                    odd[0],
                    f"{what}{'s' if agree[1:] else ''} {few(agree, NAMED)}",
                    names[at],
                )
            else:
                of = " and ".join(_rank(rank, hosts) for rank in sorted((agree[0], odd[0])))
                yield odd[0], f"{of} hold different values", names[at]


def _rank(rank: int, hosts: Mapping[int, str]) -> str:
    return f"rank {rank} (host {hosts[rank]})"


def _name(entry: Entry) -> str:
    """The logical name; for a flat parameter, its key with the first of its tensors."""
    fqns = entry.fqns
    if len(fqns) == 1:
        return entry.logical_name(fqns[0])
    return f"{entry.key} ({fqns[0]} and {len(fqns) - 1} more)" if fqns else entry.key


def _hex(values: Sequence[int]) -> str:
    return "".join(f"{value:016x}" for value in values)


def _at(values: str, index: int) -> str:
    return values[16 * index : 16 * index + 16]
