"""A load: choose → plan → read → give back.

`Loader.follow` shows the whole load. It holds three rounds over the store, without collectives:
which commit to load (so that no two groups resume from different steps), whether every rank has a
plan (before a tensor is changed), and whether every rank's bytes were good.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from smckpt.checkpoint.commits.contents import noticing_replacement
from smckpt.checkpoint.commits.discover import FoundCheckpoint
from smckpt.checkpoint.reading.catalogue import Catalogue
from smckpt.checkpoint.reading.committed import CommittedCatalogue, open_any, open_catalogue
from smckpt.checkpoint.reading.read import execute, share_of_processors
from smckpt.engine.events import LoadEvent, Sinks, telling
from smckpt.engine.groups import partition_of
from smckpt.engine.load_plan import (
    LoadPlan,
    LoadRequest,
    LoadTarget,
    plan_of,
    refuse_spare,
    unread,
)
from smckpt.engine.load_rounds import (
    Choice,
    Common,
    Rounds,
    Tally,
    for_all,
    glance,
    in_common,
    open_chosen,
    refuse_other_calls,
    total,
    unless,
)
from smckpt.engine.saving.moment import loaded_steps
from smckpt.errors import (
    CheckpointError,
    CheckpointReplacedError,
    UsageError,
    as_checkpoint_error,
)
from smckpt.meeting.group import Group, Membership
from smckpt.meeting.round import Meeting, Round
from smckpt.staging.ring import OnDevice, Ring
from smckpt.state_dict.modes import neutral
from smckpt.state_dict.of_optimizers.bindings import optimizer_dicts
from smckpt.state_dict.opened import Opened
from smckpt.state_dict.parts import joined
from smckpt.state_dict.restore import restore
from smckpt.state_dict.select import Selection, Selector
from smckpt.storage import Storage

if TYPE_CHECKING:
    from smckpt.engine.passing import Passing
    from smckpt.layout.entries import Entry, Path


log = logging.getLogger("smckpt")

_TURNS = 3  # how often a load starts, if newer saves sweep its files


class _Clock:
    """The seconds from the start of a load to each of its steps, and the bytes that it took: the
    fields of this name of a `LoadEvent`."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.chosen = self.planned = self.read = 0.0
        self.begun_anew = self.fetched = self.received = 0
        self.read_ratio: float | None = None

    def now(self) -> float:
        return time.perf_counter() - self._began

    def ended(self) -> dict[str, Any]:
        noted = {name: value for name, value in vars(self).items() if name != "_began"}
        return {**noted, "ended": self.now()}


class Loader:
    """Makes the loads of one group and counts them, so that rounds of different loads do not mix.

    Args:
        note: called with the steps of parameters in each load, for the group's next saves.
    """

    def __init__(
        self,
        group: Group,
        membership: Membership,
        sinks: Sinks,
        note: Callable[[Mapping[Path, float]], None] = lambda _: None,
    ) -> None:
        self.loaded: dict[Path, float] = {}  # the steps of parameters in all loads
        self._note = note
        self.group = group
        self.membership = membership
        self._sinks = sinks
        self._numbers = 0
        self._loads = 0
        self._lock = threading.Lock()
        self._selectors: list[Selector] = []

    def load(
        self, state_dict: MutableMapping[str, Any] | None, request: LoadRequest
    ) -> MutableMapping[str, Any]:
        """Fill `state_dict` (and the live objects behind it) in place, or return the whole saved
        state. See `smckpt.load`."""
        clock = _Clock()
        planned: LoadPlan | None = None
        error: Exception | None = None
        opened = Opened()
        try:
            try:
                tree = opened.open(state_dict)
            except Exception as failed:  # the peers get the error
                tree, request = state_dict, replace(request, refusal=request.refusal or failed)
            with _without_collections():  # the plan's objects are freed inside the block
                planned = self._fill(tree, request, clock)
                if len(self.group.ranks) > 1:  # whose saves are compared
                    with neutral():
                        steps = loaded_steps(planned.state_dict, planned.selection)
                    self.loaded.update(steps)
                    self._note(steps)
            if state_dict is None:
                return joined(planned.state_dict)  # type: ignore[no-any-return]
            opened.memory.left(unread(planned, request))
            opened.settle(state_dict, tree)
            opened.memory.name_the_left()
        except BaseException as raised:
            opened.memory.undo()
            if not isinstance(raised, Exception):
                raise
            error = raised
            raise
        finally:
            ours = None if error is None else as_checkpoint_error(error, self.group.rank)
            self._sinks.deliver(
                LoadEvent(
                    directory=request.directory,
                    step=None if planned is None else planned.catalogue.step,
                    rank=self.group.rank,
                    outcome="failed" if planned is None or error is not None else "loaded",
                    error=ours,
                    nbytes=0 if planned is None else sum(map(len, planned.memory.buffers)),
                    retries=None if planned is None else planned.catalogue.stores.retries,
                    **clock.ended(),
                )
            )
        return state_dict

    def _fill(
        self, state_dict: MutableMapping[str, Any] | None, request: LoadRequest, clock: _Clock
    ) -> LoadPlan:
        with self._lock:
            number, self._numbers = self._numbers, self._numbers + 1
            count, self._loads = self._loads, self._loads + 1  # the other groups count too
        try:
            meeting = self.membership.meeting(request.options.timeout)
        except CheckpointError:
            with self._lock:  # the peers hold no round of this number, so the next load takes it
                if self._numbers == number + 1:
                    self._numbers = number
            raise
        # Each concurrent load has a selector of its own. The selector of an earlier load already
        # knows most of this state.
        selector = self._selectors.pop() if self._selectors else Selector(self.group.rank)
        try:
            while True:
                again = f"/again-{clock.begun_anew}" if clock.begun_anew else ""
                rounds = Rounds(
                    meeting,
                    None,
                    f"load/{number}{again}",
                    f"load/{count}{again}",
                    f"load/{number}{again}" if again else f"call/{number}",
                    self.membership.rank_name,
                    request.options.timeout,
                )
                try:
                    with _untouched_on_failure(state_dict):
                        return self.follow(selector, state_dict, request, rounds, clock)
                except CheckpointReplacedError as error:  # all ranks raise it, or none
                    clock.begun_anew += 1
                    if clock.begun_anew == _TURNS:
                        error.message += (
                            f"; that happened {_TURNS} times, and tensors of the target may be "
                            "partly filled"
                        )
                        raise
                    log.warning("%s. The load starts again with the newest", error)
        finally:
            self._selectors.append(selector)

    def follow(
        self,
        selector: Selector,
        state_dict: MutableMapping[str, Any] | None,
        request: LoadRequest,
        rounds: Rounds,
        clock: _Clock,
    ) -> LoadPlan:
        """Load from one commit."""
        target, rounds = self.target(selector, state_dict, request, rounds)
        chosen, found = self.choose(target, request, rounds)
        clock.chosen = clock.now()
        planned = self.plan(target, chosen, found, request, rounds)
        clock.planned = clock.now()

        passing, needed = None, 0
        if planned.agreed.shares:
            from smckpt.engine.passing import share  # not every load shares

            passing, needed = share(self.group, planned, request, rounds)

        def fill() -> Tally:
            identity = planned.catalogue.identity
            with passing or nullcontext(), noticing_replacement(request.storage, identity):
                clock.fetched = self.read(planned, request, passing)
                planned.memory.settle(planned.state_dict)
                if planned.objects is not None:  # into the dict, and through it into optimizers
                    restore(planned.state_dict, planned.objects, strict=request.strict)
                return Tally(clock.fetched, needed)

        tally = rounds.hold("read", fill, total, gives=Tally)
        clock.read = clock.now()
        clock.received, clock.read_ratio = passing.received if passing else 0, tally.ratio
        log.debug("all ranks fetched %d bytes; %d are needed", tally.fetched, tally.needed)
        if planned.selection.gathered:
            # FULL, which one rank holds, or torch's own. All ranks put it into the live objects
            # together (collectives run). Loads of other kinds fill the live objects too.
            if planned.agreed.gathered and len(self.group.ranks) == self.group.world_size:
                for _, put_through in planned.gathered:
                    put_through()
            else:
                log.warning(
                    "only the gathered copy was filled (of FULL: rank 0's), because %s: call "
                    "load_state_dict on all ranks, in the context",
                    "not all ranks loaded the same parts"
                    if planned.gathered
                    else "the dict is not the one that FULL gave",
                )
        log.info("loaded %s from %s", planned.catalogue.identity, request.directory)
        return planned

    # -- the target --------------------------------------------------------------------------

    def target(
        self,
        selector: Selector,
        state_dict: MutableMapping[str, Any] | None,
        request: LoadRequest,
        rounds: Rounds,
    ) -> tuple[LoadTarget, Rounds]:
        """Select the entries to fill, and make the rounds of all groups that load together. A
        failure is brought to the first round."""
        selection: Selection | None = None
        failure: Exception | None = None
        try:
            if request.refusal is not None:
                raise request.refusal
            if not request.directory:
                raise UsageError(
                    "checkpoint_id was left out",
                    remedy="pass checkpoint_id=, or a storage_reader that has a path",
                )
            selection = None if state_dict is None else selector.select(state_dict)
        except Exception as error:
            failure = error
        try:
            step = self._step(None if selection is None else selection.entries, request)
            rounds = replace(rounds, step=step)
        except Exception as error:
            failure = failure or error
        return LoadTarget(state_dict, selector, selection, failure), rounds

    def announce_end(self) -> None:
        """Tell peers that wait for another load of this rank that none comes."""
        self.membership.announce(
            [Round(f"call/{self._numbers}")], [Round(f"load/{self._loads}/plan")]
        )

    def find(
        self, look: Callable[[], FoundCheckpoint | None], timeout: float
    ) -> FoundCheckpoint | None:
        """One rank looks for the newest checkpoint and sends the result to all."""

        def found() -> dict[str, Any]:
            newest = look()
            return {"found": None if newest is None else newest.to_json()}

        agreed = self.agreed("latest_checkpoint", found, timeout)
        return None if agreed["found"] is None else FoundCheckpoint.from_json(agreed["found"])

    def open(self, storage: Storage, timeout: float) -> CommittedCatalogue:
        """Open the newest commit in a directory. One rank finds it and sends its name to the
        others, which list nothing.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError: all ranks raise it.
            PeerError: a rank did not come within `timeout` seconds; the message names it.
        """
        opened: list[CommittedCatalogue] = []

        def commit() -> dict[str, Any]:
            opened.append(open_catalogue(storage))
            return {"choose": opened[0].identity, "name": opened[0].name}

        agreed = self.agreed("a reader of DCP", commit, timeout)
        return opened[0] if opened else open_catalogue(storage, **agreed)

    def agreed(
        self,
        call: str,
        look: Callable[[], dict[str, Any]],
        timeout: float,
        refusal: Exception | None = None,
    ) -> Any:
        """One rank looks and sends what it found, which is JSON, to all that make this `call`. All
        raise its error, or the refusal of one."""
        with self._lock:
            number, self._numbers = self._numbers, self._numbers + 1
        meeting = self.membership.meeting(timeout)

        def decide(brought: Callable[[], dict[int, str]]) -> dict[str, Any]:
            refuse_other_calls(brought(), self.membership.rank_name)
            return look()

        bring = partial(unless, refusal, call)
        return meeting.round(f"call/{number}", bring, decide, timeout=timeout, brings=str)

    # -- which commit ------------------------------------------------------------------------

    def _step(self, entries: Sequence[Entry] | None, request: LoadRequest) -> Meeting | None:
        """The meeting of all groups of the step, for the rank that speaks for its group. Without
        entries (if the selection failed) it is known only if the caller named the groups."""
        options = request.options
        if entries is None and options.groups is None and options.parallel_state is None:
            return None
        partition = partition_of(self.group, entries or (), options)
        if partition.alone or self.group.index != 0:
            return None
        return self.membership.of_step(partition.groups, partition.mine, request.options.timeout)

    def choose(
        self, target: LoadTarget, request: LoadRequest, rounds: Rounds
    ) -> tuple[Choice, Catalogue | None]:
        """Choose the commit that this load follows. One rank of the group looks and sends the name
        to the others, which list nothing. That rank also has the catalogue.

        The first group of a step that chooses posts its choice, which cannot be changed. The others
        follow it, so a commit that is made meanwhile cannot split the groups. If any rank fails up
        to here, all ranks of all groups raise its error.
        """
        leads, failure = rounds.group.member == 0, target.failure
        early = glance(request.storage) if leads and failure is None else None
        opened: list[Catalogue] = []

        def look() -> Choice:
            found = early or open_any(request.storage)
            theirs = rounds.chosen(found.identity)
            if theirs != found.identity:
                with noticing_replacement(request.storage, theirs):
                    found = open_any(request.storage, choose=theirs)
            opened.append(found)
            shared = for_all(found, rounds.group.count)
            return Choice(found.identity, request.storage.url, found.name, shared)

        commit = rounds.choose(partial(unless, failure, "load"), look)
        return commit, opened[0] if opened else None

    # -- the plan ----------------------------------------------------------------------------

    @neutral()
    def plan(
        self,
        target: LoadTarget,
        chosen: Choice,
        found: Catalogue | None,
        request: LoadRequest,
        rounds: Rounds,
    ) -> LoadPlan:
        """Plan what each rank reads. It succeeds only if structure, shapes, dtypes and coverage are
        right on every rank. No tensor is changed."""
        made: list[LoadPlan] = []

        def bring() -> Common:
            with noticing_replacement(request.storage, chosen.choose):
                catalogue = found or open_chosen(request.storage, chosen)
                made.append(plan_of(target, catalogue, request, self.group))
            return made[0].agreed

        agreed = rounds.hold("plan", bring, in_common, gives=Common)
        refuse_spare(made[0], agreed, request)
        return replace(made[0], agreed=agreed)

    # -- the bytes ---------------------------------------------------------------------------

    def read(self, planned: LoadPlan, request: LoadRequest, passing: Passing | None) -> int:
        """Read the bytes into the memory of the target, each block checked; how many it fetched."""
        done = [0, 1]  # tasks, and of how many

        def progress(*now: int) -> None:
            done[:] = now

        def progress_text() -> str:
            return f"{100 * done[0] // done[1]}% is read from {request.directory} on this rank"

        # more than sixteen gained nothing on sixteen processors
        threads = request.options.threads or min(max(share_of_processors(), 4), 16)
        threads = max(threads, request.storage.read_threads)
        readers = threads + (passing.receivers if passing else 0)
        on_device = any(isinstance(buffer, OnDevice) for buffer in planned.memory.buffers)
        with (
            telling(self.group.rank, progress_text),
            neutral(),
            Ring(readers) if on_device else nullcontext() as ring,
        ):
            return execute(
                planned.plan.copies,
                planned.memory.buffers,
                threads=threads,
                preverify=request.options.preverify,
                progress=progress,
                ring=ring,
                shared=passing,
            )


@contextmanager
def _untouched_on_failure(state_dict: Any) -> Iterator[None]:
    """Undo changes to optimizers if the load fails, here or on a peer. Optimizers get tensors for
    the saved state before the plan is made."""
    before = [
        (
            tree,
            dict(tree),
            list(tree["param_groups"]),
            live,
            {key: dict(s) if isinstance(s, dict) else s for key, s in live.items()},
        )
        for _, tree, binding in optimizer_dicts(state_dict)
        if binding is not None
        for live in [binding.optimizer.state]
    ]
    try:
        yield
    except BaseException:
        for tree, own, groups, live, slots in before:
            tree.clear()
            tree.update(own)
            tree["param_groups"][:] = groups
            live.clear()
            live.update(slots)
        raise


@contextmanager
def _without_collections() -> Iterator[None]:
    """Switch off garbage collection. A plan is thousands of small objects and no garbage, but
    making them starts a collection of the whole process. With torch imported that costs more than
    the plan itself, and it would happen again after the block while the plan exists."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
