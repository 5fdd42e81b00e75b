"""The names of `amzn-sagemaker-checkpointing` 1.1, HyperPod's managed tiers of checkpoints; and
`save`, `async_save` and `load` of torch.distributed.checkpoint, where the writer or reader names
tiers. All other calls go to what stood there before.

DCP would plan one file for each rank. Here the writer and the reader only say which step is meant,
in which tiers. Each save goes to the memory of the hosts (`integrations/kept.py`), and to the disk
or S3 when the config says so. A load takes the newest step that is whole over both.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from smckpt.checkpoint.commits.discover import FoundCheckpoint
from smckpt.engine import api
from smckpt.engine.api import membership
from smckpt.engine.saving.job import SaveHandle, SaveOptions
from smckpt.errors import CheckpointError, CheckpointNotFoundError, UsageError
from smckpt.integrations.dcp import calls as dcp_calls
from smckpt.integrations.kept import KeptSteps
from smckpt.integrations.replaced import run_directory
from smckpt.manager.memory import Memory
from smckpt.meeting.group import Group, group_of
from smckpt.storage.urls import is_s3_url, join_url, normal_url

__all__ = [
    "DefaultS3PathStrategy",
    "RayS3PathStrategy",
    "S3PathStrategy",
    "SageMakerCheckpointConfig",
    "SageMakerInMemoryTierError",
    "SageMakerS3TierError",
    "SageMakerTieredStorageConfigError",
    "SageMakerTieredStorageError",
    "SageMakerTieredStorageReader",
    "SageMakerTieredStorageWriter",
    "Snapshot",
    "async_save",
    "load",
    "save",
]

log = logging.getLogger("smckpt")

KEEP = 3  # steps in memory, as the package has its daemon keep
QUEUE = "hyperpod"  # of the saves to disk and S3
STEPS = "step_{step}"
SECONDS = 1800.0  # that the ranks wait for each other, as in a load
# "http://HOST:9200": HyperPod's daemon holds the steps in memory, in place of our keepers
DAEMON = "SMCKPT_HYPERPOD_DAEMON"

# what stood there before `smckpt run --for hyperpod` replaced the names
_save, _async_save = state_dict_saver.save, state_dict_saver.async_save
_load = state_dict_loader.load


class SageMakerTieredStorageError(CheckpointError):
    """Root of what the tiers raise where they are made."""


class SageMakerInMemoryTierError(SageMakerTieredStorageError):
    """A step was to be in memory only, and is not."""


class SageMakerS3TierError(SageMakerTieredStorageError):
    """Here for scripts that catch it. What S3 does wrong is a `StorageError`, as everywhere."""


class SageMakerTieredStorageConfigError(SageMakerTieredStorageError):
    """An argument of the config is missing, contradicts another one, or is not honoured."""


class S3PathStrategy:
    """Where a namespace's steps are in S3: in `BASE/NAMESPACE/step_N`, of all ranks together."""

    def __init__(self, base_path: str, logger: logging.Logger | None = None) -> None:
        self.base_path = base_path
        self.logger = logger

    def get_checkpoint_dir(self, namespace: str, step: int) -> str:
        return join_url(self.base_path, f"{namespace}/step_{step}").rstrip("/")


class DefaultS3PathStrategy(S3PathStrategy):
    """The package has a directory for each rank here, and cannot resume with fewer or more ranks.
    smckpt has one for each step."""


class RayS3PathStrategy(S3PathStrategy):
    """The step's directory is the one that Ray Train is told of."""


@dataclass
class SageMakerCheckpointConfig:
    """Not frozen: scripts set `save_to_s3` before each save.

    Args:
        namespace: names the job: letters, digits, hyphens and underscores.
        world_size: the number of ranks of this job. Steps of a job of another size are loaded too.
        s3_tier_base_path: s3://bucket/prefix. The steps are below it, in directories NAMESPACE.
        s3_path_strategy: instead of `s3_tier_base_path`.
        save_to_s3: save the next step there as well as in memory.
        disk_tier_base_path, save_to_disk: the same for a directory that all hosts share.
        logger: is told of each step; None: the logger "smckpt".
    """

    namespace: str
    world_size: int
    disk_tier_base_path: str = ""
    s3_tier_base_path: str = ""
    s3_path_strategy: S3PathStrategy | None = None
    save_to_s3: bool = False
    save_to_disk: bool = False
    logger: logging.Logger | None = None

    def __post_init__(self) -> None:
        if self.s3_tier_base_path and self.s3_path_strategy:
            raise ValueError("s3_tier_base_path and s3_path_strategy are both given: leave one out")

    def get_s3_strategy(self) -> S3PathStrategy | None:
        if self.s3_path_strategy is not None or not self.s3_tier_base_path:
            return self.s3_path_strategy
        return DefaultS3PathStrategy(self.s3_tier_base_path, self.logger)


@dataclass(frozen=True)
class Snapshot:
    """What a config says when a writer or reader is made of it.

    root: of the steps on disk or in S3; "": the config names none. durable: save there.
    """

    namespace: str
    root: str
    durable: bool

    @classmethod
    def of(cls, config: SageMakerCheckpointConfig) -> Snapshot:
        """
        Raises:
            SageMakerTieredStorageConfigError: a field is wrong; names it.
        """
        strategy, group = config.get_s3_strategy(), group_of(None)
        base = strategy.base_path if strategy else config.disk_tier_base_path
        assert group is not None
        wrong, remedy = "", ""
        if not re.fullmatch(r"[A-Za-z0-9_-]+", config.namespace or ""):
            wrong = f"namespace is {config.namespace!r}"
            remedy = "use letters, digits, hyphens and underscores"
        elif config.world_size != group.world_size:
            wrong = f"world_size is {config.world_size}, and the job has {group.world_size} ranks"
            remedy = "pass dist.get_world_size(): steps of other sizes are found as well"
        elif config.save_to_s3 and not strategy:
            wrong, remedy = "save_to_s3 is set without a path", "set s3_tier_base_path"
        elif config.save_to_disk and not config.disk_tier_base_path:
            wrong, remedy = "save_to_disk is set without a path", "set disk_tier_base_path"
        elif strategy and config.disk_tier_base_path:
            wrong = "disk_tier_base_path is not honoured beside a path in S3"
            remedy = "leave one out: below memory there is one tier, on disk or in S3"
        elif strategy and not is_s3_url(strategy.base_path):
            wrong, remedy = f"{base!r} is not a path in S3", "such as s3://bucket/prefix"
        elif (
            strategy and type(strategy).get_checkpoint_dir is not S3PathStrategy.get_checkpoint_dir
        ):
            wrong = f"get_checkpoint_dir of {type(strategy).__name__} is not honoured"
            remedy = "leave it out: a step is in BASE/NAMESPACE/step_N"
        if wrong:
            raise SageMakerTieredStorageConfigError(
                f"{wrong}, in SageMakerCheckpointConfig", remedy=remedy
            )
        root = join_url(normal_url(base), config.namespace) if base else ""
        return cls(config.namespace, root, config.save_to_s3 or config.save_to_disk)


class _NotPlanned:
    """The calls of DCP, all refused."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"torch's own save and load do not know the tiers of a {type(self).__name__}",
            remedy="run the script by `smckpt run --for hyperpod`, or import save, async_save and "
            "load from smckpt.integrations.hyperpod",
        )

    reset = set_up_storage_writer = set_up_storage_reader = read_metadata = _refuse
    prepare_local_plan = prepare_global_plan = write_data = read_data = finish = _refuse

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class SageMakerTieredStorageWriter(_NotPlanned, StorageWriter):
    """Names a step that is saved in memory, and also on disk or in S3 if the config says so now.

    Args:
        path: instead of `step`: the N of "step_N" in it.

    Attributes:
        in_memory_success, s3_success: of the save, once its future is done.

    Raises:
        SageMakerTieredStorageConfigError: the config is wrong; names the field.
        SageMakerTieredStorageError: neither `step` nor `path` names a step.
    """

    def __init__(
        self,
        checkpoint_config: SageMakerCheckpointConfig,
        path: str | os.PathLike[str] = "",
        step: int = -1,
        *more: Any,
        **named: Any,
    ) -> None:
        super().__init__()
        if more or named:
            raise UsageError(
                f"{[*more, *named]} are arguments that the tiers do not honour",
                remedy="leave them out",
            )
        found = re.search(r"step_(\d+)(?:/|$)", os.fspath(path))
        if step == -1 and found:
            step = int(found[1])
        if type(step) is not int or step < 0:
            raise SageMakerTieredStorageError(
                f"step is {step!r} and path is {os.fspath(path)!r}",
                remedy="pass a whole number from 0 as step=",
            )
        self.checkpoint_config = checkpoint_config
        self.step = step
        self.asked = Snapshot.of(checkpoint_config)  # a script changes it for the next step
        self.in_memory_success = self.s3_success = False

    @property
    def s3_checkpoint_dir(self) -> str | None:
        """Where the step is in S3 if it is saved there; None: the config has no path in S3."""
        strategy = self.checkpoint_config.get_s3_strategy()
        return (
            None
            if strategy is None
            else strategy.get_checkpoint_dir(self.asked.namespace, self.step)
        )


class SageMakerTieredStorageReader(_NotPlanned, StorageReader):
    """Names the step to load.

    Args:
        step: None: the newest one that is whole, over all tiers; after the load, that one.

    Raises:
        SageMakerTieredStorageConfigError: the config is wrong; names the field.
    """

    def __init__(
        self, checkpoint_config: SageMakerCheckpointConfig, step: int | None = None
    ) -> None:
        super().__init__()
        self.checkpoint_config = checkpoint_config
        self.step = step
        self.asked = Snapshot.of(checkpoint_config)


@dataclass
class TiersOfJob:
    """The steps in memory, of each namespace and root that this process has named; kept by the
    runtime, whose own queues have the saves."""

    group: Group
    kept: dict[tuple[str, str], KeptSteps] = field(default_factory=dict)
    made: int = 0  # how many have been; all ranks count alike

    @property
    def flying(self) -> SaveHandle | None:
        return None

    def finalize(self, blocking: bool, timeout: float | None = None) -> list[int]:
        return []

    def close(self, timeout: float) -> list[SaveHandle]:
        return []

    def of(self, group: Group, asked: Snapshot) -> KeptSteps:
        if not self.group.same_life(group):  # the process group was made again
            self.group, self.kept = group, {}
        key = asked.namespace, asked.root
        if key not in self.kept:
            self._agree(group, key)
            daemon = os.environ.get(DAEMON) or None
            if daemon is not None and not asked.root:
                raise SageMakerTieredStorageConfigError(
                    f"{DAEMON} is set, and the config names no place for the commits, which the "
                    "daemon cannot hold",
                    remedy=f"set s3_tier_base_path, or leave {DAEMON} out",
                )
            daemon = daemon and f"{daemon.rstrip('/')}/{asked.namespace}"
            self.kept[key] = KeptSteps(
                Memory(interval=1, keep=KEEP, daemon=daemon),
                run_directory(asked.root, STEPS, {}) if asked.root else None,
                named=asked.namespace,
                template=STEPS,
            )
        return self.kept[key]

    def _agree(self, group: Group, mine: tuple[str, str]) -> None:
        """On all ranks at once: the names of jobs are often made of the time, which differs.

        Raises:
            SageMakerTieredStorageConfigError: the ranks name different tiers; on every rank.
        """

        def different(brought: Callable[[], dict[int, list[str]]]) -> list[str]:
            named = sorted({" below ".join(filter(None, each)) for each in brought().values()})
            return named if len(named) > 1 else []

        self.made += 1
        meeting = membership(group, "hyperpod").meeting(SECONDS)
        named = meeting.round(f"tiers/{self.made}", lambda: [*mine], different, timeout=SECONDS)
        if named:
            raise SageMakerTieredStorageConfigError(
                f"the ranks name different tiers: {', '.join(named)}",
                remedy="give all ranks one namespace and path: send those of rank 0 to the others",
            )


def save(state_dict: dict[str, Any], positional: Any = None, **named: Any) -> Any:
    """As `async_save`, and wait until all tiers are done.

    Returns:
        The save's `Timings`, where DCP returns its `Metadata`.
    """
    writer = named.pop("storage_writer", None) if positional is None else positional
    if not isinstance(writer, SageMakerTieredStorageWriter):
        return _save(state_dict, storage_writer=writer, **named)
    in_memory, decisive = _begun(state_dict, writer, **named)
    if in_memory is not None:
        in_memory.ended()
    return dcp_calls.Upload(decisive, dcp_calls.ranks_of(None)).result()


def async_save(state_dict: dict[str, Any], *, storage_writer: Any = None, **named: Any) -> Any:
    """Copy the state, once for each tier, and return. It is written and committed in the
    background.

    Args:
        named: as in DCP. checkpoint_id, a planner with caches or rules of its own, no_dist and
            process_group are refused.

    Returns:
        A future: of the step on disk or in S3 where the config wants it there, else in memory.

    Raises:
        CheckpointException: this call, or an earlier save that nobody asked about, failed.
    """
    if not isinstance(storage_writer, SageMakerTieredStorageWriter):
        return _async_save(state_dict, storage_writer=storage_writer, **named)
    _, decisive = _begun(state_dict, storage_writer, **named)
    return dcp_calls.Upload(decisive, dcp_calls.ranks_of(None))


def load(
    state_dict: MutableMapping[str, Any],
    positional: Any = None,
    *,
    storage_reader: Any = None,
    planner: Any = None,
    **named: Any,
) -> None:
    """Load the reader's step, or the newest one that is whole in memory, on disk or in S3. Where a
    rank finds a step damaged, all go on to the next older one.

    Raises:
        CheckpointException: no step can be loaded, or it does not fit; on every rank.
    """
    reader = storage_reader if positional is None else positional
    if not isinstance(reader, SageMakerTieredStorageReader):
        _load(state_dict, storage_reader=reader, planner=planner, **named)
        return

    def fill(found: FoundCheckpoint) -> None:
        try:
            dcp_calls.load(state_dict, checkpoint_id=found.path, planner=planner)
        except CheckpointException as error:  # which of ours says whether an older step may load
            raise (error.__cause__ or error) from None
        reader.step = found.step

    def filled() -> None:
        kept, wanted = _kept(reader.asked, named), reader.step
        if not kept.resume(fill, only=wanted):
            what = "no step" if wanted is None else f"step {wanted}"
            raise CheckpointNotFoundError(
                f"{what} of namespace {reader.asked.namespace} is whole in memory"
                + (f" or below {reader.asked.root}" if reader.asked.root else ""),
                remedy="save one first; without a path in S3, steps end with the job",
                path=reader.asked.root or None,
            )

    dcp_calls.as_dcp(filled, None)


def _begun(
    state_dict: dict[str, Any],
    writer: SageMakerTieredStorageWriter,
    planner: Any = None,
    async_checkpointer_type: Any = None,
    async_stager: Any = None,
    use_collectives: bool = True,
    **named: Any,
) -> tuple[SaveHandle | None, SaveHandle]:
    """The save in memory, and the one that decides whether the step is saved."""
    del async_checkpointer_type, async_stager, use_collectives  # our engine copies and writes
    asked, step = writer.asked, writer.step
    logger = writer.checkpoint_config.logger or log

    def note(tier: str, success: str, handle: SaveHandle) -> None:
        setattr(writer, success, handle.error is None)
        if handle.error is None:
            logger.info("step %d of %s is in %s", step, asked.namespace, tier)
        else:
            logger.warning(
                "step %d of %s is not in %s: %s", step, asked.namespace, tier, handle.error
            )

    def both() -> tuple[SaveHandle | None, SaveHandle | None]:
        if not dcp_calls.is_plain_save(planner):
            raise UsageError(
                f"a {type(planner).__name__} is not honoured with a tiered writer",
                remedy="leave planner= out, or save with another writer",
            )
        in_memory = _kept(asked, named).save(step, lambda: state_dict)
        if in_memory is not None:
            in_memory.add_done_callback(partial(note, "memory", "in_memory_success"))
        if not asked.durable:
            return in_memory, in_memory
        run = run_directory(asked.root, STEPS, {})
        durable = api.async_save(
            state_dict,
            checkpoint_id=run.root.join(run.template.subpath(step)).url,
            step=step,
            options=SaveOptions(queue=QUEUE),
        )
        assert durable is not None
        durable.add_done_callback(partial(note, asked.root, "s3_success"))
        return in_memory, durable

    in_memory, decisive = dcp_calls.as_dcp(both, None)
    if decisive is None:
        error = SageMakerInMemoryTierError(
            f"step {step} of {asked.namespace} is not saved: memory takes none, as the log says",
            remedy="save it to S3 as well (save_to_s3), or give the hosts' keepers more memory",
        )
        raise dcp_calls.dcp_error(error, dcp_calls.ranks_of(None)) from error
    return in_memory, decisive


def _kept(asked: Snapshot, named: MutableMapping[str, Any]) -> KeptSteps:
    """
    Raises:
        UsageError: an argument of DCP's is not honoured; names it.
    """
    if other := sorted(name for name, value in named.items() if value not in (None, False)):
        raise UsageError(
            f"{', '.join(other)} is not honoured with a tiered writer or reader",
            remedy="leave it out: the config names the place, and all ranks take part",
        )
    group = group_of(None)
    assert group is not None
    tiers = api._RUNTIME.adopt(QUEUE, group.ranks, lambda: TiersOfJob(group))
    assert isinstance(tiers, TiersOfJob)
    return tiers.of(group, asked)
