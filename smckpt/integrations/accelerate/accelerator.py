"""accelerate's methods that save and load, through smckpt."""

from __future__ import annotations

import io
import os
import tempfile
import weakref
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator, DistributedType
from accelerate.utils import RNG_STATE_NAME
from accelerate.utils import broadcast_object_list as broadcast_objects
from torch.optim import Optimizer

import smckpt
from smckpt.checkpoint.commits.discover import FoundCheckpoint
from smckpt.checkpoint.commits.run_directory import RunDirectory, Whole
from smckpt.checkpoint.records.format import parse_name
from smckpt.errors import CheckpointNotFoundError, UsageError
from smckpt.integrations.replaced import (
    below_run,
    fsdp_of,
    keep_last,
    remove_stale,
    run_directory,
    stamps,
    stock_files,
    store_arguments,
)
from smckpt.manager.retention import first_whole
from smckpt.manager.room import get_memory
from smckpt.manager.state import optimizer_state
from smckpt.meeting.round import over_group
from smckpt.storage.urls import disk_path, parent_url

Result = TypeVar("Result")

_HAS_MEMORY = "_smckpt_has_memory"  # of an accelerator that has saved or loaded, or got it early
_HOOKED = "files of hooks"  # a checkpoint's metadata: name in the directory → its stamp
_OURS = (
    DistributedType.NO,
    DistributedType.FSDP,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
)


class SmckptAccelerator(Accelerator):  # type: ignore[misc]
    """accelerate's `Accelerator`. Arguments and calls stay as they are.

    `save_state` returns when the state is copied; it is committed in the background, and only then
    does `total_limit` remove older checkpoints. With automatic naming, `load_state` takes the
    newest committed checkpoint. It still loads checkpoints that accelerate itself wrote.

    smckpt_root: the directory of checkpoints, such as "s3://bucket/run"; None: `project_dir`.
    smckpt_arguments: more arguments for `smckpt.async_save` and `smckpt.load` (`storage`).

    Raises:
        UsageError: a kind of training or a setting is not honoured; the message names it. So does
            a save whose hooks have a URL to write to, or change weights.
    """

    smckpt_root: str | None = None
    smckpt_arguments: dict[str, Any] = {}  # noqa: RUF012 - a user's class or object sets its own

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse(self, {}, "SmckptAccelerator")

    def prepare_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        return prepare_optimizer(self, super().prepare_optimizer, *args, **kwargs)

    def save_state(
        self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any
    ) -> str:
        return save_state(self, super().save_state, output_dir, safe_serialization, **kwargs)

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        load_state(self, super().load_state, input_dir, load_kwargs, **kwargs)

    def end_training(self) -> None:
        smckpt.maybe_finalize_async_calls()
        super().end_training()


def prepare_optimizer(
    accelerator: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """After the first step of each optimizer of a new run: begin to get the first save's memory. An
    optimizer that has not stepped has no state yet; to ask for it would give it one.

    Args:
        stock: accelerate's own method, bound.
    """
    prepared = stock(*args, **kwargs)
    optimizer = prepared.optimizer
    if not isinstance(optimizer, Optimizer) or hasattr(prepared, "_smckpt_stepped"):
        return prepared

    known = weakref.ref(prepared)  # its memory is to go with the last reference of the script's

    def stepped(*_: Any) -> None:  # stays: torch is walking through the hooks when it runs
        if (one := known()) is not None:
            one._smckpt_stepped = True
        of = vars(accelerator)
        if not of.get(_HAS_MEMORY) and all(map(_has_stepped, accelerator._optimizers)):
            of[_HAS_MEMORY] = True
            every = list(range(len(accelerator._models)))
            get_memory(lambda: _live(accelerator, every), None, [smckpt.SaveOptions()])

    with suppress(AttributeError):  # a wrapper that does not call torch's __init__
        optimizer.register_step_post_hook(stepped)
        prepared._smckpt_stepped = False
    return prepared


def _has_stepped(prepared: Any) -> bool:
    return bool(getattr(prepared, "_smckpt_stepped", True))


def save_state(
    accelerator: Any,
    stock: Callable[..., Any],
    output_dir: Any = None,
    safe_serialization: bool = True,
    **kwargs: Any,
) -> str:
    """
    Args:
        stock: accelerate's own method, bound.

    Returns:
        Where the checkpoint will be.

    Raises:
        UsageError: an argument or a kind of training is not honoured; the message names it.
        ValueError: there is a committed checkpoint of this iteration. accelerate raises the same
            error.
        SaveFailedError: an earlier save was not committed.
    """
    _refuse(accelerator, kwargs, "save_state")
    vars(accelerator)[_HAS_MEMORY] = True
    named = accelerator.project_configuration.automatic_checkpoint_naming
    iteration = accelerator.save_iteration
    arguments = _arguments(accelerator)
    directory = os.path.expanduser(output_dir or "")  # as accelerate finds it at the load
    if named:
        directory = f"{_folder(accelerator)}/checkpoint_{iteration}"
        if _on_main(lambda: is_committed(directory, arguments)):
            raise ValueError(
                f"Checkpoint directory {directory} ({iteration}) already exists. Set "
                "`project_configuration.iteration` to the iteration to begin with."
            )
    elif not directory:
        raise UsageError("save_state has no directory", remedy="pass output_dir")
    there = disk_path(directory)
    before = stock_files(there) if there and accelerator.is_main_process else {}
    # before the rest, as accelerate does: a hook may draw random numbers
    models, hooked = _saved_by_hooks(accelerator, directory, arguments)
    with _rest_alone(accelerator), tempfile.TemporaryDirectory() as folder:
        stock(folder, safe_serialization)
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for path in sorted(filter(Path.is_file, Path(folder).rglob("*"))):
                # without its time, so that a run that is repeated saves the same bytes
                name = str(path.relative_to(folder))
                archive.writestr(zipfile.ZipInfo(name), path.read_bytes())
        own = packed.getvalue()
    shared = [own]
    if accelerator.num_processes > 1:
        shared = broadcast_objects([own if accelerator.is_main_process else b""])
    limit = accelerator.project_configuration.total_limit

    def after_commit(_: smckpt.SaveHandle) -> None:
        if there:
            remove_stale(there, before)
        if named and limit is not None:
            _keep_last(accelerator, max(limit, 1), iteration)

    smckpt.async_save(
        {**_live(accelerator, models), "files": shared[0], "own_files": own},
        checkpoint_id=below_run(directory) if named else directory,
        step=iteration,
        options=smckpt.SaveOptions(
            on_commit=after_commit,
            metadata={**fsdp_of(accelerator), **({_HOOKED: hooked} if hooked else {})},
        ),
        **arguments,
    )
    return directory


def _saved_by_hooks(
    accelerator: Any, directory: str, arguments: dict[str, Any]
) -> tuple[list[int], dict[str, tuple[int, int]]]:
    """Run the script's hooks on all ranks, as accelerate does.

    Returns:
        The numbers of the models that no hook has taken from the weights; what the hooks have
        written, by its name in the directory, with `stamps`.

    Raises:
        UsageError: the directory is a URL, or has a whole checkpoint, whose files they would
            replace one by one; or a hook has changed what is to be saved. On all ranks, as what a
            hook raises on one of them.
        SaveFailedError: an earlier save was not committed.
    """
    hooks, models = accelerator._save_model_state_pre_hook.values(), accelerator._models
    if not _has_hooks(hooks):
        return list(range(len(models))), {}
    smckpt.maybe_finalize_async_calls()  # they may write over the files of a save in flight
    weights: list[Any] = []
    if accelerator.distributed_type != DistributedType.FSDP:  # accelerate gives none there
        weights = [accelerator.get_state_dict(model, unwrap=False) for model in models]
    given = [(one, dict(one)) for one in weights]
    seen: dict[str, tuple[int, int]] = {}

    def ready() -> None:
        there = disk_path(directory)
        if not there or is_committed(there, arguments) or _is_of_accelerate(there):
            raise UsageError(
                "hooks of register_save_state_pre_hook write to a path, and a file at a time: they "
                "have no URL, and no directory with a whole checkpoint",
                remedy="save each step into a new local directory, or remove the old checkpoint "
                "there first (smckpt.remove)",
                path=directory,
            )
        os.makedirs(directory, exist_ok=True)
        seen.update(stamps(directory))

    def run() -> None:
        for hook in hooks:
            hook(models, weights, directory)
        for one, before in given:
            if not any(one is left for left in weights):
                continue
            if one.keys() != before.keys() or any(one[key] is not before[key] for key in before):
                raise _changed_by_a_hook(directory)

    def looked() -> tuple[list[int], dict[str, tuple[int, int]]]:
        left = [at for at, (one, _) in enumerate(given) if any(one is other for other in weights)]
        if len(left) != len(weights):
            raise _changed_by_a_hook(directory)
        wrote = {name: at for name, at in stamps(directory).items() if seen.get(name) != at}
        for name in wrote:
            for path in [Path(directory, name), *Path(directory, name).rglob("*")]:
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
        return list(range(len(models))) if not given else left, wrote

    _on_main(ready)
    return over_group().round("hooks", run, lambda brought: (brought(), looked())[1])


def _changed_by_a_hook(directory: str) -> UsageError:
    return UsageError(
        "a hook of register_save_state_pre_hook has changed weights, or put others among them",
        remedy="let it take a model's weights away, and write them itself",
        path=directory,
    )


def _run_on_load(hooks: dict[Any, Any], models: list[Any], directory: str) -> None:
    """Run the hooks of loads, which take models from the list."""

    def run() -> None:
        for hook in hooks.values():
            hook(models, directory)

    over_group().round("hooks", run, lambda brought: brought() and None)


@dataclass(frozen=True)
class _HighestNumbers:
    """Keeps `count` steps beside `newest`, which may have a lower number than they: accelerate
    numbers from 0 after a load."""

    count: int
    newest: int

    def kept(self, steps: Sequence[FoundCheckpoint], whole: Whole) -> list[FoundCheckpoint]:
        others = sorted(steps, key=lambda one: one.step or 0, reverse=True)
        return first_whole([one for one in others if one.step != self.newest], self.count, whole)


def _keep_last(accelerator: Any, count: int, newest: int) -> None:
    """Remove older checkpoints, with what hooks wrote into their directories. Beside the newest one
    those of the highest numbers stay, as accelerate counts them."""
    run = _run(accelerator)
    before = {one.path: one.metadata.get(_HOOKED) or {} for one in run.all()}
    keep_last(run, _HighestNumbers(count - 1, newest), newest)
    left = {one.path for one in run.all()}
    for path, hooked in before.items():
        if path not in left:
            remove_stale(path, {name: tuple(stamp) for name, stamp in hooked.items()})
            with suppress(OSError):  # the user has files there
                os.rmdir(path)


def load_state(
    accelerator: Any,
    stock: Callable[..., Any],
    input_dir: Any = None,
    load_kwargs: Any = None,
    **kwargs: Any,
) -> None:
    """
    Args:
        stock: accelerate's own method, bound.

    Raises:
        UsageError: as `save_state`.
        SaveFailedError: an earlier save was not committed.
        CheckpointError: as `smckpt.load`.
    """
    _refuse(accelerator, {}, "load_state")
    vars(accelerator)[_HAS_MEMORY] = True
    arguments = _arguments(accelerator)
    smckpt.maybe_finalize_async_calls()  # the newest may be in flight
    directory, ours = _on_main(lambda: _to_load(accelerator, input_dir))
    wanted = list(range(len(accelerator._models)))  # those that no hook takes
    if not ours:
        stock(directory or input_dir, load_kwargs, **kwargs)
    elif kwargs:
        raise UsageError(
            f"load_state does not honour {sorted(kwargs)[0]!r} for a checkpoint of smckpt",
            remedy="leave it out",
        )
    else:
        hooks = accelerator._load_model_state_pre_hook
        hooked = _has_hooks(hooks)
        fsdp = accelerator.distributed_type == DistributedType.FSDP
        if hooked and not fsdp:
            left = [*accelerator._models]
            _run_on_load(hooks, left, directory)
            of = enumerate(accelerator._models)
            wanted = [at for at, one in of if any(one is other for other in left)]
        target = {**_live(accelerator, wanted), "files": b"", "own_files": b""}
        matched: Any = "target" if hooked else True  # a hook may leave what the checkpoint has, too
        smckpt.load(target, checkpoint_id=directory, check_keys_matched=matched, **arguments)
        with _rest_alone(accelerator), tempfile.TemporaryDirectory() as folder:
            if hooked and fsdp:  # where accelerate calls them, without models: all are loaded
                run = {0: lambda *_: _run_on_load(hooks, [], directory)}
                accelerator._load_model_state_pre_hook = run
            for name in ("files", "own_files"):  # files of the second replace those of the first
                with zipfile.ZipFile(io.BytesIO(target[name])) as packed:
                    packed.extractall(folder)
            stock(folder, load_kwargs)
    if accelerator._optimizers:
        get_memory(lambda: _live(accelerator, wanted), None, [smckpt.SaveOptions()])


# -- what is saved -----------------------------------------------------------------------------


def _live(accelerator: Any, wanted: Sequence[int]) -> dict[str, Any]:
    """The state under the names of accelerate's files: model, model_1, optimizer, optimizer_1.

    Args:
        wanted: the numbers of the models.
    """
    state: dict[str, Any] = {}
    models = accelerator._models
    for index in wanted:
        with smckpt.sm_state_dict_type(models[index], smckpt.SHARDED):
            state[f"model_{index}" if index else "model"] = models[index].state_dict()
    for index, each in enumerate(accelerator._optimizers):
        key = f"optimizer_{index}" if index else "optimizer"
        state[key] = optimizer_state(each.optimizer, models, smckpt.SHARDED)
    return state


@contextmanager
def _rest_alone(accelerator: Any) -> Iterator[None]:
    """accelerate's own methods see no models, optimizers and hooks, and use the folder that they
    are given."""
    models, optimizers = accelerator._models, accelerator._optimizers
    hooks = accelerator._save_model_state_pre_hook, accelerator._load_model_state_pre_hook
    configuration = accelerator.project_configuration
    named = configuration.automatic_checkpoint_naming
    accelerator._models, accelerator._optimizers = [], []
    accelerator._save_model_state_pre_hook = accelerator._load_model_state_pre_hook = {}
    configuration.automatic_checkpoint_naming = False
    try:
        yield
    finally:
        accelerator._models, accelerator._optimizers = models, optimizers
        accelerator._save_model_state_pre_hook, accelerator._load_model_state_pre_hook = hooks
        configuration.automatic_checkpoint_naming = named


# -- where -------------------------------------------------------------------------------------


def _arguments(accelerator: Any) -> dict[str, Any]:
    return store_arguments(getattr(accelerator, "smckpt_arguments", {}))


def _folder(accelerator: Any) -> str:
    root = getattr(accelerator, "smckpt_root", None) or accelerator.project_dir
    return f"{os.fspath(root).rstrip('/')}/checkpoints"


def _has_hooks(hooks: Collection[Any]) -> bool:
    """Whether a rank has some: accelerate calls a hook where the script has registered it."""
    return over_group().round("any", lambda: bool(hooks), lambda brought: any(brought().values()))


def _on_main(look: Callable[[], Result]) -> Result:
    """What the main process finds, on all ranks; they all raise its error."""
    return over_group().round("look", lambda: None, lambda _: look())


def is_committed(directory: str, arguments: dict[str, Any]) -> bool:
    return bool(smckpt.find_checkpoints(directory, sure=True, **arguments))


def _is_of_accelerate(directory: str) -> bool:
    """Whether accelerate itself saved it: the last that it writes for a rank are random numbers,
    while weights may be of a hook."""
    return any(name.startswith(f"{RNG_STATE_NAME}_") for name in stamps(directory))


def _run(accelerator: Any) -> RunDirectory:
    """The checkpoints with automatic names."""
    return run_directory(_folder(accelerator), "checkpoint_{step}", _arguments(accelerator))


def _to_load(accelerator: Any, input_dir: Any) -> tuple[str, bool]:
    """The directory to load, and whether smckpt saved it; "": accelerate finds it, or refuses.

    Raises:
        CheckpointNotFoundError: only a save of smckpt has begun there, or accelerate can load
            nothing from a URL. The message names the newest whole checkpoint beside it.
    """
    at = os.path.expanduser(input_dir or "")
    at_store = bool(at) and disk_path(at) is None
    if not at and accelerator.project_configuration.automatic_checkpoint_naming:
        run = _run(accelerator)
        newest = run.newest()
        directories = run.directories()
        folder = _folder(accelerator)
        stock = (one for one, subpath in directories if _is_of_accelerate(f"{folder}/{subpath}"))
        committed = [] if newest is None else [newest.step or 0]
        number = max([*committed, *stock], default=None)
        if number is None:
            number = directories[0][0] if directories else None
        at_store = disk_path(folder) is None
        if number is None and not at_store:
            return "", False
        at = f"{folder}/checkpoint_{number or 0}"
    if at and is_committed(at, _arguments(accelerator)):
        return at, True
    # whether a local directory has files of a save of smckpt, and nothing but what hooks write
    names = os.listdir(at) if os.path.isdir(at) else []
    ours = [name.startswith(".") or parse_name(name) is not None for name in names]
    begun = os.path.isdir(at) and (all(ours) or (any(ours) and not _is_of_accelerate(at)))
    if at_store or begun:
        beside = smckpt.find_checkpoints(parent_url(at), sure=True, **_arguments(accelerator))[-1:]
        raise CheckpointNotFoundError(
            "no checkpoint is committed here: the job ended before the save was",
            remedy=f"load {beside[0]}, the newest whole one beside it"
            if beside
            else "begin anew, without load_state",
            path=at,
        )
    return at, False


def _refuse(accelerator: Any, kwargs: dict[str, Any], what: str) -> None:
    if accelerator.distributed_type not in _OURS:
        raise UsageError(
            f"{accelerator.distributed_type} is not honoured by smckpt's {what}",
            remedy="use accelerate's own Accelerator for it",
        )
    given = ["save_on_each_node"] if accelerator.project_configuration.save_on_each_node else []
    if given := [*given, *sorted(kwargs)]:
        raise UsageError(f"{what} does not honour {given[0]!r}", remedy="leave it out")
