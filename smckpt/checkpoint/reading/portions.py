"""Bytes that several ranks need, each read by one of them and passed on to the others.

Every rank says which blocks its plan reads. Ranks that need the same blocks are a team. A team's
blocks are cut into portions, and each member reads an equal part of them. All members derive the
same portions from the same runs, so only the runs travel. Who passes bytes on, and how, is not
known here.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from smckpt.checkpoint.reading.blocks import Destination, HostMemory, SavedFile, Span
from smckpt.checkpoint.reading.read import Reads, StoredCopy, halves, ranges, source_of
from smckpt.checkpoint.records.crc import BLOCK
from smckpt.layout.strided import elements
from smckpt.layout.strided import execute as copy_elements

_PORTION = 4 << 20  # bytes; larger ones leave the processor's cache before they are copied
_FAR = 16 << 20  # bytes of a portion where requests take tens of milliseconds
_TEAM = 64  # members: each talks with each other one


def portion_bytes(request_bytes: int) -> int:
    """The bytes of a portion of a store that takes requests of so many well."""
    return max(_PORTION, min(request_bytes // 2, _FAR))


@dataclass(frozen=True)
class TeamRuns:
    """The bytes that one rank shares. runs: (number of the file, first byte, end, team), in one
    order on all members. teams: members of each. most: bytes of a portion."""

    most: int = _PORTION
    files: list[str] = field(default_factory=list)
    runs: list[tuple[int, int, int, int]] = field(default_factory=list)
    teams: dict[int, tuple[int, ...]] = field(default_factory=dict)


class Portion(NamedTuple):
    """Bytes of a file that `reader` reads and passes on to the other `members` of the team."""

    team: int
    number: int
    path: str
    low: int
    high: int
    reader: int
    members: tuple[int, ...]


def teams(
    needs: Mapping[int, Mapping[str, Sequence[int]]], most: int = _PORTION
) -> tuple[dict[int, TeamRuns], int]:
    """What each member shares, and how many bytes all of them need, each counted once.

    Args:
        needs: member → path → the first byte and the end of each run of blocks, one after the
            other.
        most: bytes of a portion, whole blocks.
    """
    edges: dict[str, list[tuple[int, int, int]]] = {}
    for member, files in needs.items():
        for path, bounds in files.items():
            for low, high in zip(bounds[::2], bounds[1::2], strict=True):
                edges.setdefault(path, []).extend(((low, 1, member), (high, 0, member)))
    found: dict[int, TeamRuns] = {}
    numbers: dict[tuple[int, ...], int] = {}
    nbytes = 0
    for path in sorted(edges):
        active: set[int] = set()
        before = 0
        for at, begins, member in sorted(edges[path]):
            if active and at > before:
                nbytes += at - before
                everyone = sorted(active)
                for first in range(0, len(everyone), _TEAM):
                    team = tuple(everyone[first : first + _TEAM])
                    if len(team) > 1:
                        number = numbers.setdefault(team, len(numbers))
                        for one in team:
                            shared = found.setdefault(one, TeamRuns(most))
                            if path not in shared.files[-1:]:
                                shared.files.append(path)
                            shared.teams[number] = team
                            shared.runs.append((len(shared.files) - 1, before, at, number))
            before = at
            (active.add if begins else active.discard)(member)
    return found, nbytes


def portions(shared: TeamRuns) -> Iterator[Portion]:
    """The portions of all teams of a member, the same on all members of a team."""
    for number, members in shared.teams.items():
        runs = [run for run in shared.runs if run[3] == number]
        total = sum(_blocks(low, high) for _, low, high, _ in runs)
        done = count = 0
        for file, low, high, _ in runs:
            while low < high:
                turn = done * len(members) // total
                left = -(-(turn + 1) * total // len(members)) - done  # of this reader's blocks
                end = min(high, low + min(left * BLOCK, shared.most))
                reader = members[(turn + number) % len(members)]  # small teams: not all the first
                yield Portion(number, count, shared.files[file], low, end, reader, members)
                done, count, low = done + _blocks(low, end), count + 1, end


def _blocks(low: int, high: int) -> int:
    return -(-(high - low) // BLOCK)


@dataclass
class PortionTargets:
    """What a rank takes out of a portion: segments as they are, and copies of short runs."""

    file: SavedFile
    portion: Portion
    segments: list[Destination] = field(default_factory=list)
    gathers: list[StoredCopy] = field(default_factory=list)

    def take(self, data: memoryview, buffers: Sequence[Span], ring: HostMemory | None) -> None:
        """Copy them out of the portion's bytes."""
        if self.segments and ring is not None:
            with ring.lent(self.segments) as hosts:
                self._fill(data, hosts)
        else:
            self._fill(data, self.segments)
        for stored in self.gathers:
            ((_, _, offset, nbytes),) = source_of(stored)
            at = offset - self.portion.low
            target = buffers[stored.target]
            assert isinstance(target, memoryview)  # `scattered` has named it
            copy_elements(
                stored.copy.from_start(),
                elements(data[at : at + nbytes], stored.itemsize),
                elements(target, stored.itemsize),
            )

    def _fill(self, data: memoryview, segments: Sequence[Destination]) -> None:
        for offset, buffer in segments:
            at = offset - self.portion.low
            assert isinstance(buffer, memoryview)
            # NumPy lets other threads run meanwhile
            elements(buffer, 1)[:] = elements(data[at : at + len(buffer)], 1)


class _PortionFinder:
    """Finds the portions in which bytes of files are."""

    def __init__(self, wanted: Sequence[PortionTargets]) -> None:
        self._of: dict[str, list[PortionTargets]] = {}
        for each in sorted(wanted, key=lambda w: w.portion.low):
            self._of.setdefault(each.portion.path, []).append(each)
        self._lows = {path: [w.portion.low for w in of] for path, of in self._of.items()}

    def cut(
        self, file: SavedFile, low: int, high: int
    ) -> Iterator[tuple[PortionTargets | None, int, int]]:
        """A range at the portions' ends: each part with its portion; None if it is in none."""
        of, lows = self._of.get(file.path, ()), self._lows.get(file.path, ())
        at = max(bisect.bisect_right(lows, low) - 1, 0)
        while low < high:
            while at < len(of) and of[at].portion.high <= low:
                at += 1
            begin = of[at].portion.low if at < len(of) else high
            inside = begin <= low
            end = min(high, of[at].portion.high if inside else begin)
            yield (of[at] if inside else None), low, end
            low = end


def divided(reads: Reads, shared: Sequence[Portion]) -> list[PortionTargets]:
    """Take what is in portions out of `reads`, which keeps the rest."""
    files = {file.path: file for file in reads.files()}
    wanted = [PortionTargets(files[portion.path], portion) for portion in shared]
    finder = _PortionFinder(wanted)
    direct, reads.direct = reads.direct, {}
    gathers, reads.gathers = reads.gathers, []

    def put(file: SavedFile, segment: Destination) -> None:
        for inside, low, high in finder.cut(file, segment.offset, segment.end):
            part = segment.buffer[low - segment.offset : high - segment.offset]
            into = reads.direct.setdefault(file, []) if inside is None else inside.segments
            into.append(Destination(low, part))

    for file, segments in direct.items():
        for segment in segments:
            put(file, segment)
    while gathers:
        stored = gathers.pop()
        found = [
            inside
            for _, file, offset, nbytes in source_of(stored)
            for inside, _, _ in finder.cut(file, offset, offset + nbytes)
        ]
        if not any(found):
            reads.gathers.append(stored)
        elif len(found) == 1:
            found[0].gathers.append(stored)  # type: ignore[union-attr]
        elif max(stored.copy.sizes) > 1 and stored.copy.stretch()[0]:
            gathers += halves(stored)
        else:  # one run, over an end
            for low, to, count in stored.copy.runs():
                begin, end = low * stored.itemsize, (low + count) * stored.itemsize
                for at, file, offset, nbytes in ranges(stored.slots, begin, end):
                    position = to * stored.itemsize + at
                    target = reads.buffers[stored.target][position : position + nbytes]
                    put(file, Destination(offset, target))
    return wanted
