"""Loading: agree on a commit, check everything, read into live tensors, give the rest back.

Four meetings over the store, none of them a collective: which commit (so that no two groups resume
from different steps), whether every rank's plan holds (before a tensor is touched), whether every
rank's bytes were good, and the end.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from smckpt.checkpoint.catalogue import Catalogue, open_catalogue
from smckpt.checkpoint.discover import Found
from smckpt.checkpoint.plan import ReadPlan, plan_local, plan_logical
from smckpt.checkpoint.read import execute
from smckpt.engine.groups import Group, Partition, partition_of
from smckpt.engine.membership import Membership
from smckpt.engine.session import Session
from smckpt.errors import CheckpointError, StateError, UsageError
from smckpt.state_dict.optimizers import optimizer_dicts, prepare_optimizers
from smckpt.state_dict.restore import restore, rewrap_stateful, unwrap_stateful
from smckpt.state_dict.select import Selection, Selector

if TYPE_CHECKING:
    import torch

__all__ = ["LoadRequest", "Loader"]

log = logging.getLogger("smckpt")


@dataclass(frozen=True)
class LoadRequest:
    """What a caller of `load` asked, checked."""

    directory: str
    strict: bool
    preverify: bool
    threads: int
    timeout: float
    groups: Any
    parallel_state: Any


class Loader:
    """The loads of one group. Counts them, so that meetings of different loads do not mix."""

    def __init__(self, group: Group, membership: Membership) -> None:
        self.group = group
        self.membership = membership
        self._numbers = 0
        self._steps: dict[tuple[tuple[int, ...], ...], int] = {}
        self._lock = threading.Lock()

    def load(self, state_dict: MutableMapping[str, Any], request: LoadRequest) -> None:
        """Fill `state_dict` (and the live objects behind it) in place. See `smckpt.load`."""
        wrapped = unwrap_stateful(state_dict)
        done = False
        try:
            self._fill(state_dict, request)
            done = True
        finally:
            rewrap_stateful(wrapped, loaded=done)

    def _fill(self, state_dict: MutableMapping[str, Any], request: LoadRequest) -> None:
        with self._lock:
            number, self._numbers = self._numbers, self._numbers + 1
        session = self.membership.session(request.timeout)
        point = f"load/{number}"
        guard = _Guard(session, point, request.timeout, self.membership.rank_name, None)
        with guard.stage("select"):
            if not request.directory:
                raise UsageError(
                    "checkpoint_id was left out",
                    remedy="pass checkpoint_id=, or a storage_reader that has a path",
                )
            selection = Selector(self.group.rank).select(state_dict)
            partition = partition_of(
                self.group,
                selection.entries,
                groups=request.groups,
                parallel_state=request.parallel_state,
            )
        step = self._step(partition, request)
        identity = self._choose(session, point, step, request)
        guard = replace(guard, step=step)
        with _untouched_on_failure(state_dict), guard.stage("plan"):
            catalogue = open_catalogue(request.directory, choose=identity)
            prepare_optimizers(state_dict, catalogue.logical, strict=request.strict)
            selection = Selector(self.group.rank).select(state_dict)
            plan = self._plan(catalogue, selection, request)
            objects = catalogue.objects(self._object_rank(catalogue))
            self._check_objects(selection, objects, request)
        with guard.stage("read"):
            self._read(plan, selection.tensors, request)
            restore(
                state_dict,
                objects,
                saved_optimizers=catalogue.optimizers,
                strict=request.strict,
            )
        log.info("loaded %s from %s", catalogue.identity, request.directory)

    def find(self, root: str, look: Callable[[str], Found | None], timeout: float) -> Found | None:
        """What one rank finds under `root`, told to all."""
        with self._lock:
            number, self._numbers = self._numbers, self._numbers + 1

        def decide(_: dict[int, dict[str, Any]]) -> dict[str, Any]:
            found = look(root)
            return {"found": None if found is None else found.to_json()}

        session = self.membership.session(timeout)
        told = session.meet(
            f"find/{number}", {}, decide, timeout=timeout, name=self.membership.rank_name
        )
        return None if told["found"] is None else Found.from_json(told["found"])

    # -- which commit ------------------------------------------------------------------------

    def _step(self, partition: Partition, request: LoadRequest) -> _Step | None:
        """The meeting of all groups of the step, for the rank that speaks for its group."""
        with self._lock:
            count = self._steps.get(partition.groups, 0)
            self._steps[partition.groups] = count + 1
        if partition.alone or self.group.index != 0:
            return None
        return _Step(self.membership.step_session(partition, request.timeout), f"load/{count}")

    def _choose(
        self, session: Session, point: str, step: _Step | None, request: LoadRequest
    ) -> str:
        """The commit that this load follows: one rank of the group looks, the others are told.

        The first group of a step to look posts its choice, write-once; later ones follow it, so
        that a commit that lands meanwhile cannot split the groups.
        """

        def look(_: dict[int, dict[str, Any]]) -> dict[str, Any]:
            choice = {"identity": open_catalogue(request.directory).identity}
            if step is None:
                return choice
            assert step.session.channel is not None
            return step.session.channel.put_once(f"{step.point}/choice", choice)

        decision = session.meet(
            f"{point}/choice",
            {},
            look,
            timeout=request.timeout,
            name=self.membership.rank_name,
        )
        return str(decision["identity"])

    # -- the plan ----------------------------------------------------------------------------

    def _plan(self, catalogue: Catalogue, selection: Selection, request: LoadRequest) -> ReadPlan:
        rank, ranks = self.group.rank, self.group.ranks
        if catalogue.kind == "LOCAL" and selection.kind in ("LOCAL", None):
            return plan_local(
                catalogue, selection.entries, rank=rank, group_ranks=ranks, strict=request.strict
            )
        return plan_logical(
            catalogue, selection.entries, rank=rank, group_ranks=ranks, strict=request.strict
        )

    def _object_rank(self, catalogue: Catalogue) -> int:
        """Whose objects this rank takes: the i-th rank of the group those of saved rank i mod n."""
        saved = sorted(catalogue.object_ranks)
        return saved[self.group.index % len(saved)]

    def _check_objects(
        self, selection: Selection, objects: dict[str, Any], request: LoadRequest
    ) -> None:
        if not request.strict:
            return
        from smckpt.errors import KeysMismatchError

        missing = sorted(leaf.key for leaf in selection.objects if leaf.key not in objects)
        here = {leaf.key for leaf in selection.objects}
        extra = sorted(key for key in objects if key not in here)
        if missing or extra:
            raise KeysMismatchError(
                f"values that are no tensors differ: missing in the checkpoint {missing[:8]}, "
                f"not in the target {extra[:8]}",
                remedy="give the target the same structure, or pass check_keys_matched=False",
                path=request.directory,
                rank=self.group.rank,
            )

    # -- the bytes ---------------------------------------------------------------------------

    def _read(self, plan: ReadPlan, tensors: Sequence[torch.Tensor], request: LoadRequest) -> None:
        buffers, late = _buffers(tensors)
        execute(plan, buffers, threads=request.threads, preverify=request.preverify)
        for tensor, staged in late:
            tensor.copy_(staged)


@contextmanager
def _untouched_on_failure(state_dict: Any) -> Iterator[None]:
    """Optimizers get the slots that were saved before the plan is made; a plan that fails, here or
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


def _buffers(
    tensors: Sequence[torch.Tensor],
) -> tuple[list[memoryview], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Writable bytes for each tensor: its own memory, or that of a stand-in copied at the end."""
    import torch

    buffers, late = [], []
    for tensor in tensors:
        with torch.no_grad():
            live = tensor.detach()
            if live.device.type != "cpu" or not live.is_contiguous() or live.is_conj():
                staged = torch.empty(live.shape, dtype=live.dtype)
                late.append((live, staged))
                live = staged
            flat = live.reshape(-1).view(torch.uint8)
            array: Any = flat.numpy()
            buffers.append(memoryview(array).cast("B"))
    return buffers, late


@dataclass(frozen=True)
class _Step:
    """One load of all groups of a step, seen by the rank that speaks for its group."""

    session: Session
    point: str


@dataclass(frozen=True)
class _Guard:
    """Turns one rank's failure in a stage into every rank's, in every group of the step."""

    session: Session
    point: str
    timeout: float
    name: Callable[[int], str]
    step: _Step | None

    def stage(self, what: str) -> _Stage:
        return _Stage(self, what)

    def tell_groups(self, what: str, answer: dict[str, Any]) -> dict[str, Any]:
        """The leader's answer for its group, after hearing those of the other groups."""
        if self.step is None:
            return answer
        try:
            self.step.session.meet(
                f"{self.step.point}/{what}",
                {"error": answer["error"]} if "error" in answer else {},
                lambda _: {},
                timeout=self.timeout,
                name=lambda member: f"group {member} of the step",
            )
        except CheckpointError as error:
            return answer if "error" in answer else {"error": error.to_json()}
        return answer


class _Stage:
    """`with guard.stage("plan"):` all ranks leave the block together, or all raise."""

    def __init__(self, guard: _Guard, what: str) -> None:
        self._guard = guard
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # KeyboardInterrupt and the like: go at once
        guard = self._guard
        body: dict[str, Any] = {}
        if error is not None:
            told = error if isinstance(error, CheckpointError) else _wrapped(error)
            body = {"error": told.to_json()}
        try:
            guard.session.meet(
                f"{guard.point}/{self._what}",
                body,
                lambda _: {},
                timeout=guard.timeout,
                name=guard.name,
                then=lambda answer: guard.tell_groups(self._what, answer),
            )
        except CheckpointError:
            if error is None:
                raise  # a peer's; ours is under way by itself


def _wrapped(error: Exception) -> CheckpointError:
    return StateError(
        f"{type(error).__name__}: {error}",
        remedy="see the traceback on that rank",
        rank=int(os.environ.get("RANK", "0")),
    )
