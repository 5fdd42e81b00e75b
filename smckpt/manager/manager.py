"""`CheckpointManager`: a run's checkpoints below one root, from the first save to the last."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any

from smckpt.calls import alone, while_alive
from smckpt.checkpoint.commits.discover import FoundCheckpoint
from smckpt.checkpoint.commits.run_directory import RetentionPolicy, RunDirectory, rooted
from smckpt.engine.api import (
    async_save,
    leave_queue,
    load,
    maybe_finalize_async_calls,
    membership,
    prewarm,
)
from smckpt.engine.groups import ReplicationGroup, agreed_group
from smckpt.engine.load_plan import LoadOptions
from smckpt.engine.saving.job import SaveHandle, SaveOptions, options_of
from smckpt.errors import UsageError
from smckpt.manager.memory import Memory, MemoryTier, Tiers
from smckpt.manager.notice import Signals, Watch, signals_of
from smckpt.manager.record import mark_of, recorded, save_seconds_of
from smckpt.manager.resume import resume
from smckpt.manager.retention import Best, Retention, Rivals, policies_of
from smckpt.manager.room import get_memory, meet_about_room
from smckpt.manager.schedule import Interval, Schedule
from smckpt.manager.state import (
    Failed,
    give_back,
    go_on_at_random,
    models_in,
    optimizers_in,
    random_state,
    random_target,
    refuse_positions_of_ranks,
    run_state,
    taken,
)
from smckpt.meeting.group import group_of
from smckpt.meeting.round import Round
from smckpt.state_dict import LOCAL, SHARDED
from smckpt.state_dict.of_optimizers.bindings import optimizer_dicts
from smckpt.storage import StoreOptions, access_to
from smckpt.storage.urls import Below, is_below, normal_url

log = logging.getLogger("smckpt")

QUEUE = "manager"
LEAVE_SECONDS = 30.0  # how long the store's host waits for peers that still read from it


class CheckpointManager:
    """Saves a run's steps below a root, deletes those that the rules do not keep, and restores.

        with CheckpointManager(root, interval=100, keep_last_n=3) as manager:
            step = manager.restore(into=state)
            while step < steps:
                train()
                step += 1
                if manager.should_save(step):
                    manager.save(step, state)

    Initialise the process group first. All ranks make a manager with the same arguments, and make
    the same calls in the same order. Rank 0 reads the root, deletes, and tells the others through
    the job's store, without collectives. A step counts once all of its groups have committed.

    Args:
        root: a directory, or s3://bucket/prefix. Each step gets a directory of its own below it,
            named "{step}". The root may end in other names: "run/step_{step:08d}",
            "run/{epoch}/{step}"; also those of a step's groups, by their coordinates:
            "run/{step}/tp{tp}_ep{ep}_fsdp{fsdp}".
        keep_last_n: N keeps the newest N steps that are committed and whole. 0 keeps the newest
            alone, which no rule deletes. None keeps all. Deletion runs in the background on rank 0,
            after a newer step is committed and whole. It spares checkpoints that a reader has
            `pinned`. It deletes only what this run has saved; a run that restores a step also
            takes over what the run before it saved.
        keep: policies that keep other steps too: `Every(1000)`, `Best("loss", 3)`, or one of your
            own (`RetentionPolicy`). `best` uses the first `Best`.
        interval: when `should_save` is true. A number of steps: at each multiple of it. A
            `datetime.timedelta`: at the first step after so much time since the last save, by rank
            0's clock. "auto": likewise, after a time that follows from how long a save holds
            training up and how often this run has failed (docs/manager.md). None: never.
        memory: keep the last steps in the hosts' memory too; `should_save` is true for those as
            well, and `save` copies such a step there alone (docs/recovery.md).
        signals: signals that ask the job to end, or `Signals` with the time and the exit status
            too. One signal on one rank is enough: the ranks agree, through the job's store, on a
            last step. `should_save` is true for it, and `save` waits for its commit and raises
            SystemExit. An empty tuple installs no handler.
        random: also save and restore the random generators of Python, NumPy, torch and the device.
        options: options of each save; see `SaveOptions`. Give its `parallel_state` where tensor-,
            expert- or pipeline-parallel ranks hold plain tensors of their own, which no mesh
            describes. Ranks with the same coordinates save together.
        timeout: seconds for each round of the ranks; without `options` for each stage of a save.
        storage: as in `async_save`.

    Raises:
        UsageError: an argument is out of range, or contradicts another one.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last_n: int | None = None,
        keep: Sequence[RetentionPolicy] = (),
        interval: Interval | None = None,
        memory: Memory | None = None,
        signals: Signals | Sequence[str] = ("SIGTERM", "SIGUSR1"),
        random: bool = True,
        options: SaveOptions | None = None,
        timeout: float = 1800.0,
        storage: StoreOptions | Mapping[str, Any] | None = None,
    ) -> None:
        top, self._template = rooted(os.fspath(root))
        self.root = normal_url(top)
        self._store_options = storage
        if memory is not None and memory.daemon is not None and storage is not None:
            raise UsageError(
                "storage= is not honoured with Memory(daemon=), whose commits go to the same store",
                remedy="set SMCKPT_S3_* and the AWS settings in the environment",
            )
        self._policies = policies_of(keep_last_n, keep)
        self._options = replace(options_of(options, timeout), queue=QUEUE)
        self._random, self._timeout = random, timeout
        self._access = access_to(self.root, storage=self._store_options)
        group = group_of(None)
        assert group is not None
        digest = hashlib.sha256(f"{self.root}\0{self._template.text}".encode()).hexdigest()[:12]
        self._membership = membership(group, f"manager/{digest}")
        self._rank, self._world = group.rank, group.world_size
        self._degrees = self._options.parallel_state
        self._steps = RunDirectory(self._access.open(self.root), self._template)
        self._rivals = Rivals(self._steps)
        run = secrets.token_hex(6)
        self._retention = Retention(self._steps, self._policies, run, self._rivals)
        self._schedule = Schedule(self._membership, interval, timeout)
        self._watch = Watch(self._membership, signals_of(signals), timeout)
        of_memory = memory.interval if memory is not None else None
        second = Schedule(self._membership, of_memory, timeout, self._schedule)
        self._memory = MemoryTier(memory, self.root, self._template, self._options, second)
        self._only_memory: int | None = None  # the last step that is due there and not on disk
        self._groups: ReplicationGroup | None = None
        self._rounds = count(1)  # the ranks call it alike
        # of a new run, until its first save is due: the state, and the optimizers in it
        self._begins: tuple[Mapping[str, Any], list[Any]] | None = None
        self._prepared = self._timed = False  # there is room; the first save
        self._closed = self._announced = False
        self._pid = os.getpid()
        atexit.register(while_alive(self._announce_end))

    # -- saving ------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether to save `step`, which has just ended. The answer is the same on all ranks.

        Call it after each step. It takes microseconds; after a new run's first one the time to look
        through models and optimizers, to begin to get the first save's memory. Once any rank has
        received a signal, it waits until the ranks have agreed on a last step.
        """
        if (new := self._begins) and any(getattr(one, "state", True) for one in new[1]):
            self._begins = None
            self._get_memory(partial(run_state, new[0], step, self._random))
        due = self._watch.is_last(step) or self._schedule.is_due(step)
        self._only_memory = step if self._memory.is_due(step) and not due else None
        return due or self._only_memory == step

    @alone("CheckpointManager.save", outer=True)
    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        epoch: int | None = None,
    ) -> SaveHandle:
        """Copy the state into memory and return; write and commit it in the background.

        Args:
            step: the number of training steps done.
            state: a dict of live objects: models, optimizers, schedulers, loaders, scalers,
                anything with `state_dict` and `load_state_dict`, also in nested dicts and lists;
                tensors and plain values beside them. It has the same keys on all ranks.
            metrics: numbers, such as {"loss": 2.1}. Those of rank 0 count.
            metadata: JSON values to record. The keys "manager" and "metrics" are reserved.
            epoch: needed where the names of the steps' directories have {epoch}.

        Before the manager's first save the ranks compute the size of a step. Rank 0 logs it with
        the free space, and warns if the steps that the rules keep do not fit.

        Returns:
            The save's handle. Call `wait()` to wait for the commit.

        Raises:
            SaveFailedError: *earlier* saves failed more often than `max_consecutive_failures`
                allows. This save still goes on.
            UsageError, StateError: this step or state cannot be saved. All ranks fail this save.
            StorageError: before the first save: there is no room for one step. All ranks raise it.
            SystemExit: after a signal, this was the last step. It is committed.
        """
        self._refuse_closed()
        self._begins = None
        last = self._watch.is_last(step)
        group = self._group(state)
        memory = self._memory if self._only_memory == step and not last else None
        if memory is None:
            self._schedule.saved(step)
        subpath, record = "", {}
        live: Mapping[str, Any]
        try:
            subpath = self._template.subpath(step, epoch)
            if self._rank == 0 and memory is None:
                self._rivals.refuse(subpath, self._retention.run or "")
            record = recorded(self._recorded(), metrics, metadata)
            live = run_state(state, step, self._random)
        except Exception as error:
            live = Failed(error)  # async_save tells the peers, who count this save too, and raises
        if not self._prepared:
            meeting, point = self._membership.meeting(self._timeout), f"room/{next(self._rounds)}"
            run = self._steps.root, self._policies, self._retention.nbytes, self._degrees
            line = self._watch.save_seconds, self._options, self._timeout
            meet_about_room(meeting, point, live, group, *run, *line)
            self._prepared = True
        number = step if type(step) is int else None
        save = partial(async_save, process_group=group.process_group, step=number)
        kept = None if memory is None else memory.save(save, live, subpath, group, record)
        if kept is not None:
            return kept
        directory = f"{self.root.rstrip('/')}/{subpath}" if subpath else self.root
        handle = save(
            live,  # type: ignore[arg-type]
            checkpoint_id=Below(group.directory(directory), self.root),
            options=replace(self._options, metadata=record, on_commit=self._committed(subpath)),
            storage=self._store_options,
        )
        assert handle is not None
        if last:
            handle.wait()
            self._watch.leave_saved(step)
        return handle

    def _committed(self, subpath: str) -> Callable[[SaveHandle], None]:
        def committed(handle: SaveHandle) -> None:
            if handle.timings is not None:
                self._watch.save_seconds = handle.timings.committed
            if self._rank == 0 and handle.timings is not None:
                self._schedule.measured(handle.timings)
                if not self._timed:
                    self._timed = True
                    stall = handle.timings.blocked - handle.timings.waited
                    text = (
                        "a step is committed after %.3g s, and a save holds training up for %.3g s"
                    )
                    log.info(text, handle.timings.committed, stall)
                self._retention.committed(subpath)

        return committed

    def _recorded(self) -> dict[str, Any]:
        """The run's record for the manifest, besides the engine's."""
        history, notice = self._schedule.history(), self._watch.notice
        return {
            "run": self._retention.run,
            "claim": self._rivals.claim(),
            "ranks": self._world,
            "replicas": len(self._groups.ranks) if self._groups else self._world,
            "degrees": self._degrees and self._degrees.to_json(),
            "groups": self._template.group,
            "save_seconds": self._watch.save_seconds,
            "random": sorted(random_state()) if self._random else [],
            "failures": history.failures,
            "seconds": round(history.seconds, 1),
            "ended": notice.signal if notice is not None else None,
            "interval": self._schedule.chosen(),
            "memory": self._memory.root,
        }

    # -- going on ----------------------------------------------------------------------------

    @alone("CheckpointManager.restore", outer=True)
    def restore(
        self,
        into: MutableMapping[str, Any],
        *,
        check_keys_matched: bool = True,
        renamed: Mapping[str, str] | None = None,
    ) -> int:
        """Fill the objects in `into` from the newest step that all ranks can load. If one is lost
        (damaged, or it cannot be read), all take the next older one, and the log says so. `into`
        holds what the state for `save` holds. Tensors are filled in place, other objects get their
        state through `load_state_dict`, `into` gets plain values. Random generators go on if the
        job has as many ranks as before. Else they are seeded from step, rank and number of ranks.

        Args:
            check_keys_matched: False loads the names that `into` and the checkpoint have both, and
                logs the others. What the checkpoint lacks stays as it is in `into`.
            renamed: as for `smckpt.load`; then `into` has no optimizer.

        Returns:
            The step; 0 where there is no checkpoint.

        Raises:
            CorruptCheckpointError, StorageError: there are checkpoints, but none of them loads.
            KeysMismatchError, TensorMismatchError, StorageError and others of `load`: the program
                does not fit the checkpoint, or the store does not answer. On all ranks.
            TopologyError: a loader or dataset of torchdata or datasets, and other numbers of ranks.
        """
        self._refuse_closed()
        group = self._group(into)
        filled: list[dict[str, Any]] = []
        how = LoadOptions(renamed=renamed, timeout=self._timeout, parallel_state=self._degrees)
        by = partial(load, check_keys_matched=check_keys_matched, options=how)

        def fill(found: FoundCheckpoint) -> None:
            filled[:] = [self._filled(found, into, group, by)]

        meeting = self._membership.meeting(self._timeout)
        self._steps.forget()
        self._memory.discard_unfinished()
        point = f"restore/{next(self._rounds)}"
        tiers = Tiers(self._steps, self._memory.steps)
        found, lost = resume(meeting, point, tiers, fill, self._timeout)
        self._memory.restored(0 if found is None else found.step or 0)
        self._schedule.goes_on(self._steps.root, found)
        self._begins = (into, optimizers_in(into)) if found is None else None
        if found is None:
            if self._rank == 0:
                log.info("no checkpoint below %s: the run starts from step 0", self.root)
            return 0
        (loaded,) = filled
        step, saved, own = found.step or 0, dict(loaded), loaded.pop("manager", {})
        give_back(into, loaded)
        if self._random and own.get("random"):
            go_on_at_random(found.metadata["manager"], own["random"], step, self._rank, self._world)
        self._retention.run = mark_of(found) or self._retention.run
        self._schedule.restored(step)
        self._watch.save_seconds = save_seconds_of(found, self._world)
        if self._rank == 0:
            log.log(
                logging.WARNING if lost else logging.INFO,
                "restored step %d from %s%s",
                step,
                found,
                f"; lost: {'; '.join(lost)}" if lost else "",
            )
        if optimizers_in(saved) or any(optimizer_dicts(saved)):  # without, it only evaluates
            self._get_memory(lambda: saved)
        return step

    def _get_memory(self, take: Callable[[], Mapping[str, Any]]) -> None:
        memory = [self._memory.options] if self._memory.root else []
        get_memory(take, self._group(None).process_group, [self._options, *memory])

    def _filled(
        self, found: FoundCheckpoint, into: Mapping[str, Any], group: ReplicationGroup, load: Any
    ) -> dict[str, Any]:
        """The loaded state of the objects in `into`. Its tensors are the live ones."""
        mark = found.metadata.get("manager") or {}
        if mark:
            refuse_positions_of_ranks(into, mark.get("ranks"), self._world)
        now = self._recorded()
        same = all(mark.get(name) == now[name] for name in ("ranks", "replicas", "degrees"))
        same = same and mark.get("groups", "") == now["groups"]
        target = taken(into, LOCAL if same else SHARDED)
        if mark:
            target["manager"] = {"step": 0, **random_target(mark.get("random") or [])}
        load(
            target,
            checkpoint_id=group.directory(found.path) if same else found.path,
            process_group=group.process_group if same else None,
            storage=self._store_options if is_below(found.path, self.root) else None,
        )
        return target

    # -- looking -----------------------------------------------------------------------------

    def latest(self) -> FoundCheckpoint | None:
        """The newest step that is committed and can be read, or None. All ranks call it."""
        found = self.all()
        return found[-1] if found else None

    def best(self) -> FoundCheckpoint | None:
        """The best committed step by the first `Best` of `keep=`, or None. All ranks call it.

        Raises:
            UsageError: the manager was made without one.
        """
        best = next((one for one in self._policies if isinstance(one, Best)), None)
        if best is None:
            raise UsageError(
                "best() needs a metric",
                remedy='make the manager with keep=[Best("loss")]; or call '
                'Best("loss").ranked(manager.all())',
            )
        ranked = best.ranked(self.all())
        return ranked[0] if ranked else None

    @alone("CheckpointManager.all", outer=True)
    def all(self) -> list[FoundCheckpoint]:
        """The committed steps, oldest first. All ranks call it.

        Raises:
            StorageError: the store fails to read the root, or any of the steps; on all ranks.
        """
        self._refuse_closed()

        def look(brought: Callable[[], dict[int, None]]) -> list[dict[str, Any]]:
            brought()
            self._steps.forget()
            return [one.to_json() for one in self._steps.all(sure=True)]

        meeting = self._membership.meeting(self._timeout)
        rows = meeting.round(f"all/{next(self._rounds)}", lambda: None, look, timeout=self._timeout)
        return [FoundCheckpoint.from_json(each) for each in rows]

    # -- the end -----------------------------------------------------------------------------

    @alone("CheckpointManager.close", outer=True)
    def close(self) -> None:
        """Wait for saves and deletions to end.

        Raises:
            SaveFailedError: a save was not committed; on every rank, with the cause.
        """
        if self._closed:
            return
        try:
            self._memory.close(self._timeout)
            maybe_finalize_async_calls(queue=QUEUE)
        finally:
            leave_queue(QUEUE, self._timeout)
            self._end(self._timeout)

    def _end(self, timeout: float) -> None:
        self._closed, self._begins = True, None
        if os.getpid() != self._pid:  # a forked child that unwinds owns nothing here
            return
        self._watch.close()
        self._schedule.close()
        self._retention.close(timeout)
        self._announce_end()
        self._membership.leave(min(timeout, LEAVE_SECONDS))

    def _announce_end(self) -> None:
        """Peers that wait for another call of this rank hear that none comes."""
        if not self._announced and os.getpid() == self._pid:
            self._announced, number = True, next(self._rounds)
            whats = f"groups/{number}", f"room/{number}", f"all/{number}", f"restore/{number}/0"
            self._membership.announce([*map(Round, whats)], ends=not self._closed)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:  # saves go on; the exit of the process waits for them
            self._end(0)

    # -- what the calls need -----------------------------------------------------------------

    def _group(self, state: Any) -> ReplicationGroup:
        """The ranks that save together with this one, found once from the model."""
        if self._groups is None:
            meeting, point = self._membership.meeting(self._timeout), f"groups/{next(self._rounds)}"
            how = self._degrees, self._template, self._timeout
            self._groups = agreed_group(meeting, point, lambda: models_in(state), *how)
            group, met_within = self._groups.process_group, self._timeout
            prewarm(process_group=group, options=replace(self._options, timeout=met_within))
            self._memory.begin(self._membership, group, met_within)
        return self._groups

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UsageError("the manager is closed", remedy="make another one")
        if os.getpid() != self._pid:
            raise UsageError(
                "a forked child uses the manager of its parent",
                remedy="call it in the training process itself",
            )
