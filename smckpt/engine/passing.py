"""The ranks of a load pass on what one of them has read for all (`checkpoint.reading.portions`).

A rank reads a portion into a slot of an arena, checks its blocks there, and sends a message to each
member of the team. A member on the same host has mapped the arena: it copies what it wants, and
answers when the slot is free again. A member on another host gets the bytes with the message. So a
rank holds a few slots, never an image of the state.

Two members of a team have one connection: a Unix socket without a file on one host, TCP between
hosts, on which both prove that they know each other's secret from the job's store. No collective
runs. A rank that fails sends its error; the end of a process closes its connections. Either ends
the load of all that wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from smckpt.checkpoint.reading.blocks import Destination, HostMemory
from smckpt.checkpoint.reading.portions import (
    Portion,
    PortionTargets,
    TeamRuns,
    divided,
    portion_bytes,
    portions,
    teams,
)
from smckpt.checkpoint.reading.read import Reads
from smckpt.decoding import decode
from smckpt.engine.load_plan import LoadPlan, LoadRequest
from smckpt.engine.load_rounds import Address, Rounds
from smckpt.errors import CheckpointError, PeerError, as_checkpoint_error, error_from_json
from smckpt.layout.image import ALIGNMENT
from smckpt.meeting.group import Group
from smckpt.staging.arena import Arena
from smckpt.storage.memory.wire import (
    IDLE,
    Peer,
    call,
    fill,
    is_known,
    own_address,
    receive,
    send,
)

log = logging.getLogger("smckpt")

_SLOTS = 8  # at most: twice as many cost twice the time to get their pages
_WINDOW = 128 << 20  # bytes of all slots, at most
_LOOK = 0.5  # seconds between two looks whether a member that has not come is gone
_GOODBYE = 5.0  # seconds in which a failed rank hands its error over


class Door:
    """Takes the connections of the other ranks of one load. Open it before they hear of it."""

    def __init__(self, beyond: bool) -> None:
        """`beyond`: there are ranks on other hosts."""
        self._secret = secrets.token_hex(16)
        name = f"smckpt-load-{secrets.token_hex(16)}"
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._tcp: socket.socket | None = None
        try:
            self._unix.bind(f"\0{name}")
            self._unix.listen(128)
            peer = None
            if beyond and (own := own_address()):
                self._tcp = socket.create_server((own, 0), backlog=128)
                address, port = self._tcp.getsockname()[:2]
                peer = [socket.gethostname(), address, port, self._secret]
        except BaseException:
            self.close()
            raise
        self.address = Address(_system(), name, peer)

    def accept(self, seconds: float) -> tuple[socket.socket, int] | None:
        """A connection of a member, and which; None if nobody comes in time."""
        poll = select.poll()
        doors = {door.fileno(): door for door in (self._unix, self._tcp) if door is not None}
        for number in doors:
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll(1000 * seconds):
            made, _ = doors[number].accept()
            made.settimeout(IDLE)
            try:
                if is_known(made, None if doors[number] is self._unix else self._secret):
                    return made, int(receive(made)["member"])
            except (OSError, ValueError, KeyError):
                pass  # somebody who only looks whether this rank is there, or a stranger
            made.close()
        return None

    def close(self) -> None:
        for door in (self._unix, self._tcp):
            if door is not None:
                door.close()


@dataclass
class _Link:
    """The connection to another member. window: its arena, on the same host."""

    member: int
    socket: socket.socket
    near: bool
    window: mmap.mmap | None = None
    thread: threading.Thread | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class Passing:
    """One rank's side of a load whose reads are shared; implements `read.SharedReads`. Use it as a
    context around the whole read: it tells the others why this rank fails.

    Args:
        group: the ranks that load.
        door: this rank's.
        addresses: of the members that share anything with this one.
        reads: what this rank reads; what is shared is taken out of it.
        shared: the portions of this rank's teams.
        timeout: seconds without a byte from a member after which it is given up.
    """

    def __init__(
        self,
        group: Group,
        door: Door,
        addresses: dict[int, Address],
        reads: Reads,
        shared: Sequence[Portion],
        timeout: float,
    ) -> None:
        self.reads = reads
        self.heard: CheckpointError | None = None
        self.received = 0  # bytes from other ranks
        self._group = group
        self._member = group.index
        self._door = door
        self._addresses = addresses
        self._timeout = timeout
        wanted = divided(reads, shared)
        self._own = [each for each in wanted if each.portion.reader == self._member]
        self._others = {
            each.portion[:2]: each for each in wanted if each.portion.reader != self._member
        }
        self._links: dict[int, _Link] = {}
        self._change = threading.Condition()
        self._failed = False
        self._free: list[int] = []
        self._held: dict[int, set[int]] = {}  # slot → the members that still copy from it
        self._arena: Arena | None = None
        self._ring: HostMemory | None = None

    @property
    def receivers(self) -> int:
        """How many threads take what other ranks pass on."""
        return len(self._addresses)

    # -- the reads --------------------------------------------------------------------------------

    def tasks(self, ring: HostMemory | None) -> list[Callable[[], None]]:
        self._ring = ring
        if self._own:
            size = max(each.portion.high - each.portion.low for each in self._own)
            self._slot = -(-size // ALIGNMENT) * ALIGNMENT
            slots = min(len(self._own), _SLOTS, _WINDOW // self._slot)
            self._arena = Arena(slots * self._slot)
            self._free = [*range(slots)]
        self._meet()
        return [partial(self._give, each) for each in self._own]

    def finish(self) -> None:
        with self._change:
            self._await(lambda: not self._held and not self._others)
        for link in self._links.values():
            self._send(link, {"end": True})
        for link in self._links.values():
            assert link.thread is not None
            link.thread.join()
        if self.heard is not None:
            raise self.heard

    def _give(self, wanted: PortionTargets) -> None:
        """Read a portion, pass it on, and take from it what this rank wants."""
        portion = wanted.portion
        with self._change:
            self._await(lambda: bool(self._free))
            slot = self._free.pop()
            links = [self._links[m] for m in portion.members if m != self._member]
            self._held[slot] = {self._member, *(link.member for link in links if link.near)}
        assert self._arena is not None
        data = self._arena.view(slot * self._slot, portion.high - portion.low)
        wanted.file.fill(portion.low, portion.high, [Destination(portion.low, data)])
        message = {"portion": portion[:2], "slot": slot * self._slot}
        for link in links:
            self._send(link, message, *(() if link.near else (data,)))
        wanted.take(data, self.reads.buffers, self._ring)
        self._release(slot, self._member)

    def _release(self, slot: int, member: int) -> None:
        with self._change:
            self._held[slot].discard(member)
            if not self._held[slot]:
                del self._held[slot]
                self._free.append(slot)
                self._change.notify_all()

    def _await(self, ready: Callable[[], bool]) -> None:
        while not ready():
            if self.heard is not None:
                raise self.heard
            if not self._change.wait(self._timeout) and not ready():
                slow = set().union(*self._held.values()) - {self._member}
                slow |= {wanted.portion.reader for wanted in self._others.values()}
                raise self._lost(min(slow, default=self._member), "does nothing")

    # -- what the others send ---------------------------------------------------------------------

    def _serve(self, link: _Link) -> None:
        try:
            theirs = (w.portion for w in [*self._others.values()])
            sizes = (p.high - p.low for p in theirs if p.reader == link.member and not link.near)
            spare = bytearray(max(sizes, default=0))
            while True:
                header = receive(link.socket)
                if "error" in header:
                    raise error_from_json(header["error"])
                if "end" in header:
                    return
                if "free" in header:
                    self._release(header["free"] // self._slot, link.member)
                    continue
                wanted = self._others[tuple(header["portion"])]
                if wanted.portion.reader != link.member:
                    raise ConnectionError("a portion that it does not read")
                at, size = header["slot"], wanted.portion.high - wanted.portion.low
                if link.window is not None:
                    data = memoryview(link.window)[at : at + size]
                else:
                    data = memoryview(spare)[:size]
                    fill(link.socket, data)
                wanted.take(data, self.reads.buffers, self._ring)
                data.release()
                if link.near:
                    self._send(link, {"free": at})
                with self._change:
                    del self._others[wanted.portion[:2]]
                    self.received += size
                    self._change.notify_all()
        except Exception as error:
            if not isinstance(error, CheckpointError):
                error = self._lost(link.member, f"no longer answers ({error!r})", error)
            with self._change:
                self.heard = self.heard or error
                self._change.notify_all()
            self._leave(self.heard)

    def _lost(self, member: int, what: str, cause: Exception | None = None) -> PeerError:
        error = PeerError(
            f"rank {self._group.ranks[member]} passes on bytes of this load, and {what}",
            remedy="look at the log of that rank: it died, hangs, or is slow. If hosts must not "
            "connect to each other: LoadOptions(read_once=False)",
            rank=self._group.rank,
        )
        error.__cause__ = cause
        return error

    # -- the connections --------------------------------------------------------------------------

    def _meet(self) -> None:
        """Connect to the members before this one, and await those after it."""
        until = time.monotonic() + self._timeout
        for member in sorted(self._addresses):
            if member < self._member:
                try:
                    self._begin(member, self._connected(member))
                except OSError as error:
                    raise self._lost(member, f"cannot be reached ({error!r})", error) from error
        while later := {m for m in self._addresses if m > self._member} - self._links.keys():
            came = self._door.accept(_LOOK)
            if came is not None and came[1] in later:
                self._begin(came[1], came[0])
                continue
            if self.heard is not None:
                raise self.heard
            for member in sorted(later):
                try:
                    self._connected(member, only_look=True).close()
                except OSError as error:
                    raise self._lost(member, f"has ended ({error!r})", error) from error
            if time.monotonic() > until:
                raise self._lost(min(later), "did not come in time")
        for link in self._links.values():
            link.thread = threading.Thread(
                target=self._serve, args=(link,), name="smckpt-passing", daemon=True
            )
            link.thread.start()

    def _near(self, member: int) -> bool:
        return self._addresses[member].host == self._door.address.host

    def _connected(self, member: int, only_look: bool = False) -> socket.socket:
        address = self._addresses[member]
        if not self._near(member):
            if address.peer is None:
                raise ConnectionError("it says of no address that other hosts reach")
            if only_look:
                return socket.create_connection(tuple(address.peer[1:3]), IDLE)
        made = call(f"\0{address.name}" if self._near(member) else Peer(*(address.peer or ())))
        try:
            if not only_look:
                send(made, {"member": self._member})
        except BaseException:
            made.close()
            raise
        return made

    def _begin(self, member: int, made: socket.socket) -> None:
        """Give the member this rank's arena, if it is on this host, and take that of the member."""
        link = self._links[member] = _Link(member, made, self._near(member))
        made.settimeout(self._timeout)
        if link.near:
            mine = [] if self._arena is None else [self._arena.fd]
            socket.send_fds(made, [b"."], mine)
            came, theirs, *_ = socket.recv_fds(made, 1, 1)
            if not came:
                raise self._lost(member, "has closed its connection")
            for fd in theirs:
                # all pages at once: a fault for each costs more than the copy out of it
                shared = mmap.MAP_SHARED | mmap.MAP_POPULATE
                size = os.fstat(fd).st_size
                link.window = mmap.mmap(fd, size, flags=shared, prot=mmap.PROT_READ)
                os.close(fd)

    def _send(self, link: _Link, header: dict[str, Any], *data: memoryview) -> None:
        try:
            with link.lock:
                send(link.socket, header, *data)
        except OSError as error:
            # its error, or the end of its process, is what its own connection says
            if link.thread is threading.current_thread():
                return  # and this thread reads next
            if link.thread is not None:
                link.thread.join(_GOODBYE)
            if self.heard is not None:
                raise self.heard from self.heard.__cause__
            raise self._lost(link.member, f"takes nothing ({error!r})", error) from error

    def _leave(self, error: CheckpointError | None) -> None:
        """Tell all members why this rank gives up."""
        with self._change:
            if self._failed:
                return
            self._failed = True
        for link in self._links.values():
            with contextlib.suppress(OSError):
                if link.lock.acquire(timeout=_GOODBYE):
                    try:
                        link.socket.settimeout(_GOODBYE)
                        if error is not None:
                            send(link.socket, {"error": error.to_json()})
                    finally:
                        link.lock.release()
                link.socket.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Passing:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            known = isinstance(error, Exception)
            ours = as_checkpoint_error(error, self._group.rank) if known else None
            self._leave(ours)
        self._door.close()
        until = time.monotonic() + _GOODBYE
        for link in self._links.values():
            if link.thread is not None:
                link.thread.join(max(until - time.monotonic(), 0))
                with contextlib.suppress(OSError):
                    link.socket.shutdown(socket.SHUT_RDWR)  # a member that is stopped
                link.thread.join()
            link.socket.close()
        if self._arena is not None:
            self._arena.close()


def _system() -> str:
    """A name of this host's memory and network: what is the same on ranks that share both."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        net = os.stat("/proc/self/ns/net").st_ino
        return hashlib.sha256(f"{boot}{net}".encode()).hexdigest()[:16]
    return secrets.token_hex(8)


# -- who reads what ------------------------------------------------------------------------------


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


def share(
    group: Group, planned: LoadPlan, request: LoadRequest, rounds: Rounds
) -> tuple[Passing | None, int]:
    """What this rank reads for others, and others for it; None if it shares nothing. On the first
    rank of the group also how many bytes its ranks need."""
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
