"""Loading: agree on a commit, check everything, read into live tensors, give the rest back.

Three meetings over the store, none of them a collective: which commit (so that no two groups resume
from different steps), whether every rank's plan holds (before a tensor is touched), and whether
every rank's bytes were good.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from smckpt.checkpoint.catalogue import Catalogue, open_catalogue
from smckpt.checkpoint.discover import Found
from smckpt.checkpoint.mismatch import differing_names, refuse_names
from smckpt.checkpoint.places import Places
from smckpt.checkpoint.plan import ReadPlan, followed_rank, plan_local, plan_logical
from smckpt.checkpoint.read import execute
from smckpt.checkpoint.replaced import noticing_replacement
from smckpt.engine.groups import Group, partition_of
from smckpt.engine.membership import Membership
from smckpt.engine.memory import Memory, memory_of
from smckpt.engine.stages import Guard, Step
from smckpt.errors import (
    CheckpointError,
    CheckpointReplacedError,
    KeysMismatchError,
    UsageError,
    as_checkpoint_error,
)
from smckpt.layout.entries import dotted
from smckpt.state_dict.optimizers import optimizer_dicts, prepare_optimizers
from smckpt.state_dict.restore import (
    empty_states,
    gathered_parts,
    restore,
    rewrap_stateful,
    unwrap_stateful,
)
from smckpt.state_dict.select import Selection, Selector
from smckpt.state_dict.values import make_extra_state, make_values, named_as_target

if TYPE_CHECKING:
    from smckpt.layout.entries import Entry

__all__ = ["LoadRequest", "Loader"]

log = logging.getLogger("smckpt")

_TURNS = 3  # times that a load begins, where newer saves sweep what it reads


@dataclass(frozen=True)
class LoadRequest:
    """What a caller of `load` asked, checked. refusal: why it cannot be done, to tell the peers."""

    directory: str
    strict: bool
    preverify: bool
    threads: int
    timeout: float
    groups: Any
    parallel_state: Any
    refusal: Exception | None = None

    def __post_init__(self) -> None:
        for name, value, kinds in (
            ("threads", self.threads, int),
            ("timeout", self.timeout, (int, float)),
        ):
            if not isinstance(value, kinds) or value <= 0:
                raise UsageError(
                    f"{name} is {value!r}", remedy="give a positive number, or leave it out"
                )


class Loader:
    """The loads of one group. Counts them, so that meetings of different loads do not mix."""

    def __init__(self, group: Group, membership: Membership) -> None:
        self.group = group
        self.membership = membership
        self._numbers = 0
        self._loads = 0
        self._lock = threading.Lock()
        self._selectors: list[Selector] = []

    def load(self, state_dict: MutableMapping[str, Any], request: LoadRequest) -> None:
        """Fill `state_dict` (and the live objects behind it) in place. See `smckpt.load`."""
        wrapped = unwrap_stateful(state_dict)
        done = False
        try:
            with _without_collections():  # its objects are gone when it is back
                self._fill(state_dict, request)
            done = True
        finally:
            rewrap_stateful(wrapped, loaded=done)

    def _fill(self, state_dict: MutableMapping[str, Any], request: LoadRequest) -> None:
        with self._lock:
            number, self._numbers = self._numbers, self._numbers + 1
            count, self._loads = self._loads, self._loads + 1  # the other groups count along
        session = self.membership.session(request.timeout)
        for turn in range(_TURNS):
            again = f"/again-{turn}" if turn else ""
            guard = Guard(
                session, f"load/{number}{again}", request.timeout, self.membership.rank_name, None
            )
            try:
                with _untouched_on_failure(state_dict):
                    self._attempt(state_dict, request, guard, f"load/{count}{again}")
                return
            except CheckpointReplacedError as error:  # of all ranks, or of none
                if turn + 1 == _TURNS:
                    error.message += (
                        f"; so it was {_TURNS} times, and targets may be filled in part"
                    )
                    raise
                log.warning("%s. The newest is loaded instead", error)

    def _attempt(
        self,
        state_dict: MutableMapping[str, Any],
        request: LoadRequest,
        guard: Guard,
        step_point: str,
    ) -> None:
        # Loads at once have one each. That of an earlier load knows most of this state.
        selector = self._selectors.pop() if self._selectors else Selector(self.group.rank)
        try:
            self._attempt_with(selector, state_dict, request, guard, step_point)
        finally:
            self._selectors.append(selector)

    def _attempt_with(
        self,
        selector: Selector,
        state_dict: MutableMapping[str, Any],
        request: LoadRequest,
        guard: Guard,
        step_point: str,
    ) -> None:
        entries: Sequence[Entry] | None = None
        failure: Exception | None = None
        try:
            selection = self._select(selector, state_dict, request)
            entries = selection.entries
        except Exception as error:  # told to the peers, then raised
            failure = error
        try:
            guard = replace(guard, step=self._step(entries, request, step_point))
        except Exception as error:
            failure = failure or error
        commit, early = self._choose(guard, request, failure)
        gathered: list[tuple[str, Any]] = []
        with guard.stage("plan", _in_common) as told, _swept(request, commit):
            catalogue = early or open_catalogue(request.directory, **commit)
            saved = followed_rank(catalogue.object_ranks, self.group.rank, self.group.ranks)
            objects = catalogue.objects(saved)
            objects = named_as_target(state_dict, objects, catalogue.optimizers)
            renewed = prepare_optimizers(
                state_dict, catalogue.logical, catalogue.held_empty, strict=request.strict
            )
            renewed |= make_extra_state(state_dict, selection, catalogue.rows_by_key, saved)
            if make_values(state_dict, objects) or renewed:
                selection = selector.select(state_dict)
            plan = self._plan(catalogue, selection, request)
            if plan.unexpected:
                told.body["spare"] = _marked(plan.unexpected, catalogue)
            self._check_objects(selection, objects, empty_states(state_dict, objects), request)
            memory = memory_of(selection, partly=not request.strict)
            if selection.gathered:
                gathered = [(dotted(path), tree) for path, tree in gathered_parts(state_dict)]
                told.body["gathered"] = [name for name, _ in gathered]
        self._refuse_spare(told.decision.get("spare", ""), catalogue, request)
        with guard.stage("read"), _swept(request, commit):
            self._read(plan, memory, request, catalogue)
            memory.settle(state_dict)
            restore(
                state_dict,
                objects,
                saved_optimizers=catalogue.optimizers,
                strict=request.strict,
            )
        if selection.gathered:
            self._put_through(gathered, told.decision.get("gathered"))
        log.info("loaded %s from %s", catalogue.identity, request.directory)

    def _select(
        self, selector: Selector, state_dict: MutableMapping[str, Any], request: LoadRequest
    ) -> Selection:
        if request.refusal is not None:
            raise request.refusal
        if not request.directory:
            raise UsageError(
                "checkpoint_id was left out",
                remedy="pass checkpoint_id=, or a storage_reader that has a path",
            )
        return selector.select(state_dict)

    def find(self, root: str, look: Callable[[str], Found | None], timeout: float) -> Found | None:
        """What one rank finds under `root`, told to all."""

        def found() -> dict[str, Any]:
            newest = look(root)
            return {"found": None if newest is None else newest.to_json()}

        told = self._told("find", found, timeout)
        return None if told["found"] is None else Found.from_json(told["found"])

    def open(self, url: str, timeout: float) -> Catalogue:
        """The newest commit at `url`: one rank finds it and tells the others, who list nothing.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError: on all of them.
            PeerError: somebody did not come within `timeout` seconds; names them.
        """
        opened: list[Catalogue] = []

        def commit() -> dict[str, Any]:
            opened.append(open_catalogue(url))
            return {"choose": opened[0].identity, "name": opened[0].commit.name}

        told = self._told("open", commit, timeout)
        return opened[0] if opened else open_catalogue(url, **told)

    def _told(self, point: str, look: Callable[[], dict[str, Any]], timeout: float) -> Any:
        with self._lock:
            number, self._numbers = self._numbers, self._numbers + 1
        session = self.membership.session(timeout)
        return session.meet(
            f"{point}/{number}", {}, lambda _: look(), timeout=timeout,
            name=self.membership.rank_name,
        )  # fmt: skip

    # -- which commit ------------------------------------------------------------------------

    def _step(
        self, entries: Sequence[Entry] | None, request: LoadRequest, point: str
    ) -> Step | None:
        """The meeting of all groups of the step, for the rank that speaks for its group. Without
        entries (they could not be had) it is known only where the caller says which groups."""
        if entries is None and request.groups is None and request.parallel_state is None:
            return None
        partition = partition_of(
            self.group,
            entries or (),
            groups=request.groups,
            parallel_state=request.parallel_state,
        )
        if partition.alone or self.group.index != 0:
            return None
        return Step(self.membership.step_session(partition, request.timeout), point)

    def _choose(
        self, guard: Guard, request: LoadRequest, failure: Exception | None
    ) -> tuple[dict[str, str], Catalogue | None]:
        """The commit that this load follows: what one rank of the group saw, told to the others,
        who need list nothing; and, on that rank, its catalogue.

        The first group of a step to look posts its choice, write-once; later ones follow it, so
        that a commit that lands meanwhile cannot split the groups. What failed on any rank until
        here fails on all, in every group.
        """
        leads = guard.session.member == 0
        early = _glance(request.directory) if leads and failure is None else None
        opened: list[Catalogue] = []

        def look(_: dict[int, dict[str, Any]]) -> dict[str, Any]:
            found = early or open_catalogue(request.directory)
            if guard.step is not None:
                session, point = guard.step.session, guard.step.point
                assert session.channel is not None
                choice = session.channel.put_once(f"{point}/choice", {"identity": found.identity})
                if choice["identity"] != found.identity:
                    theirs = {"choose": choice["identity"]}
                    with _swept(request, theirs):
                        found = open_catalogue(request.directory, **theirs)
            opened.append(found)
            return {"choose": found.identity, "name": found.commit.name}

        try:
            commit = guard.session.meet(
                f"{guard.point}/choice",
                {} if failure is None else {"error": as_checkpoint_error(failure).to_json()},
                look,
                timeout=request.timeout,
                name=guard.name,
                then=guard.tell_refusal,
            )
        except CheckpointReplacedError:
            raise  # for all: what failed here fails again
        except CheckpointError:
            if failure is not None:
                raise failure from None
            raise
        if failure is not None:  # the leader waits for all, so this cannot be; never go on
            raise failure
        return commit, opened[0] if opened else None

    # -- the plan ----------------------------------------------------------------------------

    def _plan(self, catalogue: Catalogue, selection: Selection, request: LoadRequest) -> ReadPlan:
        rank, ranks = self.group.rank, self.group.ranks
        places = Places.of(catalogue, request.parallel_state, rank, self.group.world_size)
        if catalogue.kind == "LOCAL" and selection.kind in ("LOCAL", None):
            plan = plan_local(  # each rank compares its keys with those of one saved rank
                catalogue, selection.entries, rank=rank, group_ranks=ranks, strict=request.strict,
                places=places,
            )  # fmt: skip
            self._say_left(plan.missing, plan.unexpected, request.directory)
            return replace(plan, unexpected=())
        plan = plan_logical(
            catalogue, selection.entries, rank=rank, group_ranks=ranks, strict=False, places=places
        )
        if request.strict:
            # What this rank lacks a peer may have (`_refuse_spare`); alone, it is said now.
            spare = plan.unexpected if len(ranks) == 1 else ()
            if plan.missing:
                refuse_names(plan.missing, spare, catalogue.url, rank)
        self._say_left(plan.missing, (), request.directory)
        return plan

    def _refuse_spare(self, marks: str, catalogue: Catalogue, request: LoadRequest) -> None:
        """Names that were saved and that no rank of the load has. One rank need not have all:
        pipeline stages hold different layers, and ranks may keep tensors of their own."""
        names = _unmarked(marks, catalogue)
        if request.strict:
            refuse_names((), names, catalogue.url, self.group.rank)
        self._say_left((), names, request.directory)

    def _check_objects(
        self,
        selection: Selection,
        objects: dict[str, Any],
        empty: frozenset[str],
        request: LoadRequest,
    ) -> None:
        here = {leaf.key for leaf in selection.objects}
        missing = sorted(here - objects.keys() - empty)
        extra = sorted(objects.keys() - here - empty)
        if request.strict and (missing or extra):
            raise KeysMismatchError(
                f"values that are no tensors differ: missing in the checkpoint {missing[:8]}, "
                f"not in the target {extra[:8]}",
                remedy="give the target the same structure, or pass check_keys_matched=False",
                path=request.directory,
                rank=self.group.rank,
            )
        self._say_left(missing, extra, request.directory)

    def _say_left(self, missing: Sequence[str], unexpected: Sequence[str], url: str) -> None:
        """What a load with check_keys_matched=False did not take. One rank of a group says it
        aloud: it is much the same on all."""
        if missing or unexpected:
            level = logging.WARNING if self.group.index == 0 else logging.INFO
            left = differing_names(missing, unexpected)
            log.log(level, "not loaded from %s, as check_keys_matched=False allows: %s", url, left)

    def _put_through(self, gathered: list[tuple[str, Any]], common: list[str] | None) -> None:
        """FULL state is a copy that one rank holds: into the live objects, by all ranks together
        (collectives run), as what is loaded under other kinds is in them too."""
        if common and len(self.group.ranks) == self.group.world_size:
            for _, tree in gathered:
                tree.put_through(tree)
            return
        log.warning(
            "what was loaded is in the gathered (FULL) state only, on rank 0, as %s: call "
            "load_state_dict on all ranks, in the context",
            "not all ranks loaded the same of it" if gathered else "it is not as FULL gave it",
        )

    # -- the bytes ---------------------------------------------------------------------------

    def _read(
        self,
        plan: ReadPlan,
        memory: Memory,
        request: LoadRequest,
        catalogue: Catalogue,
    ) -> None:
        execute(
            plan,
            memory.buffers,
            threads=request.threads,
            preverify=request.preverify,
            readers=catalogue.readers,
        )


@contextmanager
def _untouched_on_failure(state_dict: Any) -> Iterator[None]:
    """Optimizers get the slots that were saved before the plan is made; a load that fails, here or
    on a peer, must leave them as they were."""
    before = [
        (tree, tree["state"], binding.optimizer.state, {p: dict(s) for p, s in live.items()})
        for _, tree, binding in optimizer_dicts(state_dict)
        if binding is not None
        for live in [binding.optimizer.state]
    ]
    try:
        yield
    except BaseException:
        for tree, state, live, slots in before:
            tree["state"] = state
            live.clear()
            live.update(slots)
        raise


def _swept(request: LoadRequest, commit: dict[str, str]) -> AbstractContextManager[None]:
    return noticing_replacement(request.directory, commit["choose"])


@contextmanager
def _without_collections() -> Iterator[None]:
    """A plan is thousands of small objects and no garbage. Making them sets off a collection of the
    whole process, which in one that has imported torch costs more than the plan itself; and so does
    the first object made after that, where the plan is still there."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _glance(directory: str) -> Catalogue | None:
    """The newest commit, opened while the peers look at their states; where that fails the failure
    shows again when it matters."""
    try:
        return open_catalogue(directory)
    except CheckpointError as error:
        log.debug("nothing to read ahead: %s", error)
        return None


# -- names that this rank has no use for: one bit for each name of the checkpoint --------------


def _marked(names: Sequence[str], catalogue: Catalogue) -> str:
    chosen = set(names)
    bits = "".join("1" if name in chosen else "0" for name in sorted(catalogue.logical))
    return f"{int(bits, 2):x}"


def _unmarked(marks: str, catalogue: Catalogue) -> tuple[str, ...]:
    names = sorted(catalogue.logical)
    if not marks or int(marks, 16).bit_length() > len(names):  # of a group with names of its own
        return ()
    bits = f"{int(marks, 16):0{len(names)}b}"
    return tuple(name for name, bit in zip(names, bits, strict=True) if bit == "1")


def _in_common(bodies: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """What no member has a use for, and the gathered state that all have."""
    common = -1
    for body in bodies.values():
        common &= int(body.get("spare") or "0", 16)
    found: dict[str, Any] = {"spare": f"{common:x}"} if common > 0 else {}
    first, *others = (body.get("gathered") for body in bodies.values())
    if first and all(other == first for other in others):
        found["gathered"] = first
    return found
