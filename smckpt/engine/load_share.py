"""Who reads what for whom: manifests, and the round before a read that takes each byte once."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smckpt.checkpoint.commits.choose import Commit
from smckpt.checkpoint.reading.catalogue import Catalogue
from smckpt.checkpoint.reading.committed import CommittedCatalogue, catalogue_of, open_any
from smckpt.checkpoint.reading.portions import TeamRuns, portion_bytes, portions, teams
from smckpt.checkpoint.reading.read import Reads
from smckpt.decoding import decode
from smckpt.engine.load_plan import LoadPlan, LoadRequest
from smckpt.engine.load_rounds import Address, Choice, Rounds
from smckpt.errors import CheckpointError, UsageError
from smckpt.meeting.group import Group
from smckpt.meeting.keys import to_text
from smckpt.storage import Storage

if TYPE_CHECKING:
    from smckpt.engine.passing import Passing

log = logging.getLogger("smckpt")


_MOST = 256 << 20  # bytes that the job's store sends at most for the manifests of all ranks
_PART = 200  # bytes, at least, of what a manifest says of a rank


@dataclass(frozen=True)
class Offer:
    """What a rank brings: where others reach it, and which bytes it needs (`Reads.needs`)."""

    address: Address
    needs: dict[str, list[int]]


@dataclass(frozen=True)
class Team:
    """What a rank hears: what it shares, and where the other members are."""

    shared: TeamRuns = field(default_factory=TeamRuns)
    addresses: dict[int, Address] = field(default_factory=dict)


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


def share(
    group: Group, planned: LoadPlan, request: LoadRequest, rounds: Rounds
) -> tuple[Passing | None, int]:
    """What this rank reads for others, and others for it; None if it shares nothing. On the first
    rank of the group also how many bytes its ranks need, if they say so."""
    if not planned.agreed.shares:
        return None, 0
    from smckpt.engine.passing import Door, Passing  # not every load shares

    meeting, point = rounds.group, f"{rounds.point}/share"
    reads = Reads(planned.plan.copies, planned.memory.buffers)
    most = portion_bytes(request.storage.request_bytes)
    needed = 0

    def decide(brought: Callable[[], dict[int, Offer]]) -> bool:
        nonlocal needed
        offers = brought()
        needs = {member: offer.needs for member, offer in offers.items()}
        found, needed = teams(needs, most)
        hosts = {offer.address.host for offer in offers.values()}
        if len(hosts) > 1 and any(offer.address.peer is None for offer in offers.values()):
            for host in sorted(hosts):  # each shares what its own ranks read
                here = {m: needs[m] for m in needs if offers[m].address.host == host}
                for member in here:
                    found.pop(member, None)
                found |= teams(here, most)[0]
        for member, shared in found.items():
            others = {m for team in shared.teams.values() for m in team} - {member}
            addresses = {other: offers[other].address for other in sorted(others)}
            # a key for each member: an answer for all would grow with the square of their number
            meeting.first(f"{point}/team/{member}", Team(shared, addresses))
        return bool(found)

    with ExitStack() as stack:
        door = Door(beyond=int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < group.world_size)
        stack.callback(door.close)
        team = Team()
        if meeting.round(
            point,
            lambda: Offer(door.address, reads.needs()),
            decide,
            timeout=rounds.timeout,
            brings=Offer,
        ):
            own = f"{point}/team/{meeting.member}"
            team = decode(Team, meeting.first(own, team))
            meeting.drop([own])
        if not team.addresses:
            return None, needed
        shared = [*portions(team.shared)]
        passing = Passing(group, door, team.addresses, reads, shared, rounds.timeout)
        stack.pop_all()  # it closes the door
        return passing, needed


def glance(storage: Storage) -> Catalogue | None:
    """Open the newest commit while the peers look at their states. A failure here is only logged,
    because the choice fails in the same way."""
    try:
        return open_any(storage)
    except Exception as error:  # raised here, it would leave the peers waiting
        log.debug("nothing to read ahead: %s", error)
        return None
