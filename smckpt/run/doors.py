"""What `smckpt run --for NAME` provides or replaces under the names of other packages, a function
for each door, and how it is undone."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import accumulate
from types import ModuleType
from typing import Any

from smckpt.errors import UsageError
from smckpt.integrations import ANY_VERSION, refuse_untested

# torch.sagemaker is absent, so providing it replaces nothing. Other doors replace names, and are
# used only on request.
_BY_DEFAULT = ("sagemaker",)
_ABSENT = object()


class Provided:
    """The changes of `provide`; `undo()`, or the end of a `with` block, undoes them.

    lines: for people, one for each name that is replaced, and for each package that is provided.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._back: list[Callable[[], None]] = []

    def module(self, name: str, module: ModuleType) -> None:
        """Make `import name` return this module.

        Raises:
            UsageError: there is a module of that name already.
        """
        if name in sys.modules:
            raise UsageError(
                f"{name} is imported already", remedy="undo() the earlier provide() first"
            )
        sys.modules[name] = module

        def forget() -> None:
            if sys.modules.get(name) is module:
                del sys.modules[name]

        self._back.append(forget)
        above, _, last = name.rpartition(".")
        if above and getattr(sys.modules[above], last, None) is not module:
            self._set(sys.modules[above], last, module)
        if not any(name.startswith(f"{line.removeprefix('provided ')}.") for line in self.lines):
            self.lines.append(f"provided {name}")  # with all that is below it

    def attribute(self, owner: Any, name: str, value: Any, what: str) -> None:
        """Replace one name of a module or class.

        Args:
            what: a text that says what the replacement does and the original does not.
        """
        self._set(owner, name, value)
        is_class = isinstance(owner, type)
        where = f"{owner.__module__}.{owner.__qualname__}" if is_class else owner.__name__
        self.lines.append(f"replaced {where}.{name}: {what}")

    def environment(self, name: str, value: str) -> None:
        """Set a variable of the environment, for child processes too."""
        before = os.environ.get(name)
        os.environ[name] = value

        def back() -> None:
            os.environ.pop(name, None)
            if before is not None:
                os.environ[name] = before

        self._back.append(back)

    def by(self, undo: Callable[[], None], *lines: str) -> None:
        """Add changes that other code made, with the function that undoes them."""
        self._back.append(undo)
        self.lines += lines

    def undo(self) -> None:
        """Undo all changes, the last one first. A second call does nothing."""
        while self._back:
            self._back.pop()()

    def __enter__(self) -> Provided:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def _set(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner).get(name, _ABSENT)  # for a class, the descriptor itself
        setattr(owner, name, value)

        def back() -> None:
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._back.append(back)


def provide(
    doors: Sequence[str] | None = None, *, force: bool = False, shadow: bool = False
) -> Provided:
    """Provide smckpt under other packages' names in this process. A module that has already
    imported a name keeps the original.

    Args:
        doors: names as for `smckpt run --for`; None provides sagemaker.
        force: also with versions of packages that were not tested.
        shadow: also where the real package is installed.

    Raises:
        UsageError: a door is unknown; a version is untested without `force`; the real package is
            installed, without `shadow`; the framework is absent. Nothing is changed then.
    """
    chosen = list(_BY_DEFAULT if doors is None else doors)
    for name in chosen:
        if name not in DOORS:
            raise UsageError(f"{name!r} is not a door", remedy=f"the doors are {', '.join(DOORS)}")
    provided = Provided()
    try:
        if force:
            provided.environment(ANY_VERSION, "1")  # for children too
        for name in chosen:
            package, put = DOORS[name]
            try:
                importlib.import_module(package)
                refuse_untested(package)
                put(provided, shadow)
            except ModuleNotFoundError as error:
                if error.name is None:  # the package is there, and says itself what fails in it
                    raise
                raise UsageError(
                    f"the door to {name} needs {error.name}, which is not installed here",
                    remedy=f"install it, or leave {name} out of --for",
                ) from error
    except BaseException:
        provided.undo()
        raise
    return provided


def _refuse_shadow(name: str, shadow: bool) -> None:
    """
    Raises:
        UsageError: the real package is installed, and `shadow` is not set.
    """
    try:
        found = name in sys.modules or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is absent
        found = False
    if found and not shadow:
        raise UsageError(
            f"{name} is installed or provided here already",
            remedy="leave it out of --for, or pass --shadow (shadow=True) to use smckpt in "
            "its place",
        )


def _put_package(provided: Provided, ours: str, theirs: str) -> None:
    """Provide a package of ours, which imports its modules, and all paths below it under another
    name."""
    importlib.import_module(ours)
    for name in sorted(name for name in sys.modules if f"{name}.".startswith(f"{ours}.")):
        provided.module(theirs + name.removeprefix(ours), sys.modules[name])


def _put_modules(provided: Provided, modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Provide modules of an absent package (name → what is in it), and those above them."""
    parts = (name.split(".") for name in modules)
    for name in sorted({above for each in parts for above in accumulate(each, "{}.{}".format)}):
        module = ModuleType(name, "smckpt, in the place of another package")
        module.__dict__.update(modules.get(name, {}))
        module.__path__ = []  # it may have others below it
        provided.module(name, module)


def put_sagemaker(provided: Provided, shadow: bool) -> None:
    """Provide smckpt as the absent `torch.sagemaker`, and replace four calls of torch."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import optimizer
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    import smckpt
    from smckpt.full.context import is_extended

    _refuse_shadow("torch.sagemaker", shadow)
    _put_package(provided, "smckpt.integrations.sagemaker", "torch.sagemaker")
    from smckpt.integrations.sagemaker import state
    from smckpt.integrations.sagemaker.state_handler import (
        either_order,
        over_shard_groups,
        with_process_group,
    )

    name = "load_sharded_optimizer_state_dict"
    loads = with_process_group(optimizer.load_sharded_optimizer_state_dict)
    for owner in (optimizer, checkpoint):
        provided.attribute(owner, name, loads, "takes process_group=")
    name = "optim_state_dict_to_load"
    orders = staticmethod(either_order(FSDP.optim_state_dict_to_load))
    provided.attribute(FSDP, name, orders, "also takes the state dict as its first argument")
    shards = over_shard_groups(FSDP.__init__, lambda: state)
    provided.attribute(FSDP, "__init__", shards, "shards as torch.sagemaker.init() says")
    if is_extended():  # the script's own call, or torch.sagemaker.init() before
        return
    extension = smckpt.extend_torch_config(parallel_state=lambda: state.parallel)
    takers = (
        "torch.distributed.fsdp.api.FullStateDictConfig",
        f"{FSDP.__module__}.{FSDP.__qualname__}.state_dict_type",
    )
    provided.by(extension.undo, *(f"replaced {name}: takes translate_on_save" for name in takers))


def put_transformers(provided: Provided, shadow: bool) -> None:
    """Replace its trainer classes."""
    from transformers import trainer, trainer_seq2seq, trainer_utils

    from smckpt.integrations import transformers as ours

    # transformers puts another module there during its import
    transformers = sys.modules["transformers"]
    bases = (ours.SmckptTrainerMixin, trainer_seq2seq.Seq2SeqTrainer)
    effect = "saves in the background, resumes from committed checkpoints"
    for name, kind, module in (
        ("Trainer", ours.SmckptTrainer, trainer),
        ("Seq2SeqTrainer", type("SmckptSeq2SeqTrainer", bases, {}), trainer_seq2seq),
    ):
        for owner in (transformers, module):
            provided.attribute(owner, name, kind, effect)
    effect = "finds checkpoints below a URL too"
    provided.attribute(trainer_utils, "get_last_checkpoint", ours.get_last_checkpoint, effect)


def put_accelerate(provided: Provided, shadow: bool) -> None:
    """Replace methods of its `Accelerator`."""
    import accelerate
    from accelerate.commands import merge

    import smckpt
    from smckpt.integrations import accelerate as ours

    kind = accelerate.Accelerator
    end_training = kind.end_training

    def through(name: str) -> Any:
        method, stock = getattr(ours, name), getattr(kind, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return method(self, stock.__get__(self), *args, **kwargs)

        return call

    def end(self: Any) -> None:
        smckpt.maybe_finalize_async_calls()
        end_training(self)

    for name, effect in (
        ("save_state", "saves in the background, in one commit"),
        ("load_state", "loads committed checkpoints"),
        ("prepare_optimizer", "gets the first save's memory after the first step"),
    ):
        provided.attribute(kind, name, through(name), effect)
    provided.attribute(kind, "end_training", end, "waits for the last commit")
    name, effect = "merge_fsdp_weights", "merges committed checkpoints"
    for owner in (accelerate.utils, accelerate.utils.fsdp_utils, merge):
        provided.attribute(owner, name, getattr(ours, name), effect)


# the package of Lightning's other edition → the one that these classes derive from
_EDITIONS = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def put_lightning(provided: Provided, shadow: bool) -> None:
    """Replace its default plugin, its sharded strategies and its connector.

    pytorch_lightning, which holds the same code a second time, becomes lightning.pytorch.

    Raises:
        UsageError: that package is imported already, so the script would run on it.
    """
    from lightning.fabric.strategies import strategy as of_fabric
    from lightning.pytorch import strategies as top
    from lightning.pytorch.trainer import trainer

    from smckpt.integrations import lightning as ours

    effect = "saves in the background, on disk and in S3"
    for owner, but in ((top.strategy, ""), (of_fabric, "; Fabric's sharded strategies stay stock")):
        provided.attribute(owner, "TorchCheckpointIO", ours.SmckptCheckpointIO, effect + but)
    effect = "resumes from what was committed, random numbers included"
    provided.attribute(trainer, "_CheckpointConnector", ours.SmckptCheckpointConnector, effect)
    for name in ("core.saving.pl_load", "plugins.io.AsyncCheckpointIO.save_checkpoint"):
        provided.lines.append(f"replaced lightning.pytorch.{name}, by import: waits for commits")

    effect = "saves each rank's shards in the background"
    for module, name in (("fsdp", "FSDPStrategy"), ("model_parallel", "ModelParallelStrategy")):
        for owner in (top, importlib.import_module(f"{top.__name__}.{module}")):
            provided.attribute(owner, name, getattr(ours, f"Smckpt{name}"), effect)
    for name in ("fsdp", "fsdp_cpu_offload"):
        entry = top.StrategyRegistry[name]
        stock, entry["strategy"] = entry["strategy"], ours.SmckptFSDPStrategy
        back = functools.partial(entry.__setitem__, "strategy", stock)
        provided.by(back, f"replaced the strategy {name!r}: {effect}")

    for name, real in _EDITIONS.items():
        if name in sys.modules:
            raise UsageError(
                f"{name} is imported already, and smckpt's classes are those of {real}",
                remedy=f"provide before it is imported, or import {real}",
            )
    finder = _OtherName()
    sys.meta_path.insert(0, finder)

    def undo() -> None:
        sys.meta_path.remove(finder)
        for name in [one for one in sys.modules if one.partition(".")[0] in _EDITIONS]:
            del sys.modules[name]

    provided.by(undo, "provided the package pytorch_lightning: it is lightning.pytorch")


class _OtherName(MetaPathFinder, Loader):
    """Imports a module of lightning under the name that it has in the package's other edition."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        top, dot, below = fullname.partition(".")
        if top not in _EDITIONS:
            return None
        module = importlib.import_module(_EDITIONS[top] + dot + below)
        return ModuleSpec(fullname, self, loader_state=(module, module.__spec__))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = spec.loader_state[0]
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        _, module.__spec__ = module.__spec__.loader_state


def put_nemo(provided: Provided, shadow: bool) -> None:
    """Provide NeMo's modules of S3 checkpointing, where NeMo is absent."""
    from smckpt.integrations import lightning as ours
    from smckpt.integrations.lightning import s3
    from smckpt.storage.urls import build_s3_url

    _refuse_shadow("nemo", shadow)
    names_of_resume = ("NeMoCheckpointConnector", "NeMoModelCheckpoint")
    resumes = {name: getattr(ours, name) for name in names_of_resume}
    sizes = {name: getattr(s3, name) for name in s3.__all__ if name.startswith("DEFAULT_")}
    modules: dict[str, dict[str, Any]] = {
        "nemo.utils.s3_dirpath_utils": {
            "S3_PATH_PREFIX": "s3://",
            "build_s3_url": build_s3_url,
            "is_s3_url": s3.S3Utils.is_s3_url,
        },
        "nemo.utils.s3_utils": {"S3Utils": s3.S3Utils, **sizes},
        "nemo.utils.exp_manager": resumes,
        "nemo.utils.callbacks.s3_checkpoint_io": {"S3CheckpointIO": ours.S3CheckpointIO},
        "nemo.utils.callbacks.nemo_model_checkpoint": resumes,
    }
    _put_modules(provided, modules)


def put_torchtune(provided: Provided, shadow: bool) -> None:
    """Replace methods of its `CheckpointClient`, and name what its own checkpointers save."""
    from torchtune.training.checkpointing._checkpoint_client import CheckpointClient

    from smckpt.integrations.torchtune import OWN, take_over

    names = ("_get_dcp_checkpointer", "_save_checkpoint_sync", "load_distributed_checkpoint")
    effect = "with enable_async_checkpointing, intermediate checkpoints go through smckpt"
    lines = [(CheckpointClient, name, effect) for name in names]
    lines += [(kind, "save_checkpoint", "warns of what it saves") for kind in OWN]
    shown = (f"replaced {k.__module__}.{k.__qualname__}.{name}: {text}" for k, name, text in lines)
    provided.by(take_over(always=True), *shown)


def put_torchtitan(provided: Provided, shadow: bool) -> None:
    """Let configs of its checkpoint manager build smckpt's."""
    from torchtitan.components.checkpointer import CheckpointManager

    from smckpt.integrations.torchtitan import take_over

    name = f"{CheckpointManager.__module__}.{CheckpointManager.__qualname__}"
    provided.by(
        take_over(),
        f"replaced {name}.Config._owner: it builds smckpt's, for all but Hugging Face's files",
        f"replaced {name}.__init__: it refuses managers of other classes",
    )


def put_nvrx(provided: Provided, shadow: bool) -> None:
    """Provide smckpt as the absent `nvidia_resiliency_ext.checkpointing`."""
    from smckpt.integrations.nvrx import VERSION

    above = "nvidia_resiliency_ext"
    _refuse_shadow(f"{above}.checkpointing", shadow)
    if above not in sys.modules:
        if importlib.util.find_spec(above) is not None:
            importlib.import_module(above)
        else:
            top = ModuleType(above, "Stands for NVRx, of which smckpt has the checkpointing.")
            top.__path__ = []  # a package, without modules of its own
            vars(top)["__version__"] = VERSION  # Megatron-core asks for it
            provided.module(above, top)
    _put_package(provided, "smckpt.integrations.nvrx", f"{above}.checkpointing")


def put_dcp(provided: Provided, shadow: bool) -> None:
    """Replace DCP's save, load, reader and writer."""
    from smckpt.integrations.dcp import calls

    effects = {
        "save": "saves in smckpt's format",
        "async_save": "saves in the background, by a process of its own",
        "load": "loads smckpt's checkpoints and DCP's",
    }
    _put_calls(provided, calls, effects)
    put_storage(provided)


def _put_calls(provided: Provided, calls: ModuleType, effects: Mapping[str, str]) -> None:
    """Replace DCP's functions of these names."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    for name, effect in effects.items():
        for owner in (checkpoint, state_dict_loader if name == "load" else state_dict_saver):
            provided.attribute(owner, name, getattr(calls, name), effect)


def put_hyperpod(provided: Provided, shadow: bool) -> None:
    """Provide the names of the absent `amzn_sagemaker_checkpointing`, and have DCP's save and load
    take its writer and reader."""
    from smckpt.integrations import hyperpod

    top = "amzn_sagemaker_checkpointing"
    _refuse_shadow(top, shadow)
    effect = "a writer or reader of tiers goes to smckpt, others as before"
    calls = dict.fromkeys(("async_save", "load", "save"), effect)
    names = {name: getattr(hyperpod, name) for name in hyperpod.__all__ if name not in calls}
    files = f"{top}.checkpointing.filesystem"
    paths = [f"{top}.config.{name}" for name in ("sagemaker_checkpoint_config", "s3_path_strategy")]
    paths += [
        files,
        *(f"{files}.{name}" for name in ("exceptions", "filesystem", "reader", "writer")),
    ]
    _put_modules(provided, dict.fromkeys(paths, names))
    _put_calls(provided, hyperpod, calls)


def put_storage(provided: Provided) -> None:
    """Replace the reader and the writer alone, so that DCP plans and smckpt stores."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import filesystem

    from smckpt.integrations.dcp import calls

    # their classes derive from DCP's reader and writer, so they are made before the names change
    for module in ("_fsspec_filesystem", "hf_storage", "quantized_hf_storage"):
        with suppress(ImportError):  # a package that it needs is absent
            importlib.import_module(f"{checkpoint.__name__}.{module}")
    owners = [checkpoint, filesystem]
    with suppress(ImportError):  # where DCP's own functions find a reader for a path
        owners.append(importlib.import_module(f"{checkpoint.__name__}._storage_utils"))
    for owner in owners:
        effect = "writes smckpt's format"
        provided.attribute(owner, "FileSystemWriter", calls.FileSystemWriter, effect)
        effect = "reads smckpt's checkpoints and DCP's"
        provided.attribute(owner, "FileSystemReader", calls.FileSystemReader, effect)


_Door = Callable[[Provided, bool], None]
# A name for `--for` → the package whose version it was tested with, and what puts it in place.
DOORS: dict[str, tuple[str, _Door]] = {
    "sagemaker": ("torch", put_sagemaker),
    "transformers": ("transformers", put_transformers),
    "accelerate": ("accelerate", put_accelerate),
    "lightning": ("lightning", put_lightning),
    "nemo": ("lightning", put_nemo),
    "torchtune": ("torchtune", put_torchtune),
    "torchtitan": ("torchtitan", put_torchtitan),
    "nvrx": ("torch", put_nvrx),
    "dcp": ("torch", put_dcp),
    "hyperpod": ("torch", put_hyperpod),
}
