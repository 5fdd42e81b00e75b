"""The rounds of a load. All ranks of all groups of a step go on together, or all raise. And the
manifests of the commit that they choose, which one rank reads for all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from smckpt.checkpoint.commits.choose import Commit
from smckpt.checkpoint.reading.catalogue import Catalogue
from smckpt.checkpoint.reading.committed import CommittedCatalogue, catalogue_of, open_any
from smckpt.errors import CheckpointError, UsageError
from smckpt.meeting.keys import to_text
from smckpt.meeting.round import Meeting
from smckpt.storage import Storage

log = logging.getLogger("smckpt")

T = TypeVar("T")


@dataclass(frozen=True)
class Address:
    """Where a rank takes connections. host: its system and network, whose ranks share memory. name:
    of its Unix socket. peer: for other hosts; None if all ranks are on one, or if no network leads
    to this one."""

    host: str
    name: str
    peer: list[Any] | None


@dataclass(frozen=True)
class Choice:
    """A commit: its identity, the directory where one rank has found it, and the name of the file
    that committed it, if it is known. read: the commit as that rank has read it for all, if it is
    small."""

    choose: str
    directory: str
    name: str | None = None
    read: Commit | None = None


@dataclass(frozen=True)
class Common:
    """What one rank says of its plan, or what all ranks say together. spare: a bit for each name of
    the checkpoint that they do not use. tops: the top keys of their targets. gathered: paths of
    FULL state that they hold. shares: whether they read each byte once, together."""

    spare: str = ""
    tops: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    shares: bool = False


@dataclass(frozen=True)
class Tally:
    """Bytes: those that ranks fetched from the store, and those that any of them needs; 0 if it is
    not known."""

    fetched: int = 0
    needed: int = 0

    @property
    def ratio(self) -> float | None:
        return self.fetched / self.needed if self.needed else None


@dataclass(frozen=True)
class Rounds:
    """The rounds of one load. A failure on one rank fails on all ranks, in every group of the step.

    group: the meeting of this rank's group. step: the meeting of all groups of the step, on the
        rank that speaks for its group. point, step_point: the names of this load's rounds in each.
    first: that of the first one, in which ranks say what they call. name: as errors call members.
    """

    group: Meeting
    step: Meeting | None
    point: str
    step_point: str
    first: str
    name: Callable[[int], str]
    timeout: float

    def hold(
        self,
        what: str,
        bring: Callable[[], T],
        decide: Callable[[dict[int, T]], T],
        gives: type[T] | None = None,
    ) -> T:
        """Hold a round. `decide` makes one message from those of all ranks, and then one from those
        of all groups."""
        return self.group.round(
            f"{self.point}/{what}",
            bring,
            lambda brought: self._among_groups(what, lambda: decide(brought()), decide, gives),
            timeout=self.timeout,
            brings=gives,
            gives=gives,
        )

    def choose(self, bring: Callable[[], str], look: Callable[[], Choice]) -> Choice:
        """One rank of the group finds the commit. A group that fails here brings its error to the
        other groups' plan round, where they wait for it."""

        def decide(brought: Callable[[], dict[int, str]]) -> Choice:
            try:
                refuse_other_calls(brought(), self.name)
                return look()
            except Exception as error:
                self._among_groups("plan", partial(unless, error, ""), nothing, None)
                raise

        return self.group.round(
            self.first, bring, decide, timeout=self.timeout, brings=str, gives=Choice
        )

    def chosen(self, identity: str) -> str:
        """The commit that the first group of the step chose."""
        if self.step is None:
            return identity
        return str(self.step.first(f"{self.step_point}/choice", identity))

    def _among_groups(
        self,
        what: str,
        bring: Callable[[], T],
        decide: Callable[[dict[int, T]], T],
        gives: type[T] | None,
    ) -> T:
        if self.step is None:
            return bring()
        return self.step.round(
            f"{self.step_point}/{what}",
            bring,
            lambda brought: decide(brought()),
            timeout=self.timeout,
            brings=gives,
            gives=gives,
            spent=(f"{self.step_point}/choice",) if what == "plan" else (),
        )


def refuse_other_calls(calls: Mapping[int, str], name: Callable[[int], str]) -> None:
    """
    Raises:
        UsageError: the ranks of a group made different calls.
    """
    by_call: dict[str, list[int]] = {}
    for member, call in sorted(calls.items()):
        by_call.setdefault(call, []).append(member)
    if len(by_call) > 1:
        made = (f"{call} on {', '.join(map(name, who[:8]))}" for call, who in by_call.items())
        raise UsageError(
            f"the ranks made different calls: {' and '.join(made)}",
            remedy="make the same call of smckpt, with the same planner= and reader, on all ranks "
            "of process_group",
        )


def unless(failure: Exception | None, call: str) -> str:
    if failure is not None:
        raise failure
    return call


def nothing(*_: object) -> None:
    """Used as `bring` or `decide` in a round that only shows that all have reached it."""


def in_common(bodies: dict[int, Common]) -> Common:
    """The names that no member uses, the top keys that any member asks for, and the gathered state
    that all have."""
    spare = -1
    for body in bodies.values():
        spare &= int(body.spare or "0", 16)
    first, *others = (body.gathered for body in bodies.values())
    same = all(other == first for other in others)
    tops = sorted({top for body in bodies.values() for top in body.tops})
    shares = all(body.shares for body in bodies.values())
    return Common(f"{spare:x}" if spare > 0 else "", tuple(tops), first if same else (), shares)


def total(bodies: dict[int, Tally]) -> Tally:
    return Tally(
        sum(body.fetched for body in bodies.values()), sum(body.needed for body in bodies.values())
    )


# -- the chosen commit -----------------------------------------------------------------------------

_MOST = 256 << 20  # bytes that the job's store sends at most for the manifests of all ranks
_PART = 200  # bytes, at least, of what a manifest says of a rank


def glance(storage: Storage) -> Catalogue | None:
    """Open the newest commit while the peers look at their states. A failure here is only logged,
    because the choice fails in the same way."""
    try:
        return open_any(storage)
    except Exception as error:  # raised here, it would leave the peers waiting
        log.debug("nothing to read ahead: %s", error)
        return None


def for_all(catalogue: Catalogue, count: int) -> Commit | None:
    """The commit with its manifests, for `count` ranks; None if the store of the checkpoint sends
    them sooner than the job's, or if they are not ours."""
    if count == 1 or not isinstance(catalogue, CommittedCatalogue):
        return None
    if _PART * len(catalogue.parts) * count > _MOST:
        return None
    return catalogue.commit if len(to_text(catalogue.commit)) * count <= _MOST else None


def open_chosen(storage: Storage, commit: Choice) -> Catalogue:
    """The catalogue of the commit that another rank has chosen. Where this rank was asked for
    another directory, such as its host's own, that one has to hold it too.

    Raises:
        UsageError: it does not.
    """
    if commit.directory != storage.url:
        try:
            return open_any(storage, choose=commit.choose, name=commit.name)
        except CheckpointError as error:
            what = (
                f"this rank loads from {storage.url}, which does not hold the commit that its "
                f"group loads from {commit.directory}: {error.message}"
            )
        # not from that error, which would look like that of a commit that was swept
        raise UsageError(
            what, remedy="pass the same checkpoint_id on all ranks of process_group",
            path=storage.url,
        )  # fmt: skip
    if commit.read is None:
        return open_any(storage, choose=commit.choose, name=commit.name)
    return catalogue_of(storage, commit.read)
