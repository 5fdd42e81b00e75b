"""The files beside a commit: what the Trainer itself writes into a checkpoint's directory.

The directory that the Trainer sees is always a local path. A checkpoint that is elsewhere (a URL,
or `smckpt_root`) gets copies of those files.

The module also has the small files that the Trainer saves with each model (path → content), and
what its checkpoint holds: which tensors of the model, and the random numbers.
"""

from __future__ import annotations

import io
import os
import random
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.utils import GENERATION_CONFIG_NAME, logging
from transformers.utils.import_utils import is_peft_available

from smckpt.checkpoint.commits.run_directory import Template
from smckpt.checkpoint.records.format import parse_name
from smckpt.errors import UsageError
from smckpt.formats.conversion.stock import ADAPTERS, is_stock
from smckpt.integrations.url_files import send_file
from smckpt.state_dict.fsdp1 import Fsdp1View
from smckpt.storage import Storage
from smckpt.storage.disk.directory import Directory

STEPS = Template("checkpoint-{step}")

# on_save of transformers' own callbacks → whether it looks at the checkpoint's directory.
_LOOKS: dict[str, Callable[[Any], bool]] = {
    "WandbCallback": lambda one: getattr(one._log_model, "value", "") == "checkpoint",
    "MLflowCallback": lambda one: bool(one._log_artifacts),
    "NeptuneCallback": lambda one: bool(one._should_upload_checkpoint),
    "ClearMLCallback": lambda one: bool(one._log_model),
    "FlyteCallback": lambda one: bool(one.sync_checkpoints),
    "DVCLiveCallback": lambda one: one._log_model == "all",
    "TrackioCallback": lambda one: False,
    "SwanLabCallback": lambda one: False,
}


def is_looked_at(callback: Any) -> bool:
    """Whether `on_save` of a callback may look at the checkpoint. A callback whose `on_save` does
    not can say so with `smckpt_looks = False`."""
    if (answer := getattr(callback, "smckpt_looks", None)) is not None:
        return bool(answer)
    if "on_save" in getattr(callback, "__dict__", {}):
        return True
    owner = next((kind for kind in type(callback).__mro__ if "on_save" in vars(kind)), None)
    if owner is None or owner is TrainerCallback:
        return False
    if owner.__module__.startswith("transformers.") and owner.__name__ in _LOOKS:
        return _LOOKS[owner.__name__](callback)
    return True


def open_seen(directory: str, *below: str, make: bool = False) -> Directory:
    """The local directory that the Trainer sees of a checkpoint, of one in S3 too; or one below it.

    Raises:
        UsageError: one of them is a link.
    """
    above, name = os.path.split(os.path.abspath(directory))
    return Directory.open(above, [name, *below], make=make)


def make_directory(directory: str, stale: str = "") -> None:
    """Make the directory that the Trainer sees of a checkpoint, without the file `stale`. A link in
    its place is left to the save, which refuses it on all ranks."""
    with suppress(UsageError), open_seen(directory, make=True) as here:
        if stale:
            here.remove(stale)


def replace_file(directory: str, path: str, data: bytes) -> None:
    """Write a small file below the directory that the Trainer sees, in place of one that is
    there."""
    *below, name = path.split("/")
    begun = f".{name}.{secrets.token_hex(6)}"
    with open_seen(directory, *below, make=True) as here:
        with open(here.create(begun), "wb") as file:
            file.write(data)
        here.rename(begun, name)


def put_file(storage: Storage, path: str, data: bytes) -> None:
    """Write a small file at a path below a store, in place of one that is there."""
    folder, _, name = path.rpartition("/")
    if folder:
        storage = storage.join(folder)
    storage.overwrite(name, data)


def send(storage: Storage, directory: str, names: Mapping[str, Any]) -> None:
    """Copy these files and folders of a local directory to the checkpoint's store."""
    top = Path(directory)
    paths = [top / name for name in names]
    paths += [below for path in paths for below in path.rglob("*")]
    for path in sorted(filter(Path.is_file, paths)):
        there = storage
        for part in path.relative_to(top).parts[:-1]:
            there = there.join(part)
        with open(path, "rb") as file:
            send_file(there, path.name, file.fileno())


def empty_store(storage: Storage, *, stock_only: bool = False, kept: Any = ()) -> None:
    """Remove the files in a checkpoint's directory of a store, but for smckpt's own."""
    for name in storage.list_dirs():
        if name not in kept and (not stock_only or is_stock(name)):
            empty_store(storage.join(name))
    names = [name for name in storage.names() if parse_name(name) is None and name not in kept]
    storage.delete_many([name for name in names if not stock_only or is_stock(name)])
    if not stock_only:
        storage.remove_directory()


log = logging.get_logger("transformers.smckpt")


def files_of_tokenizer(trainer: Any) -> Mapping[str, bytes]:
    """Those of the tokenizer or processor, and the generation config."""
    made: Any = getattr(trainer, "processing_class", None)
    if made is None:  # in the Trainer's order
        made = getattr(getattr(trainer, "data_collator", None), "tokenizer", None)
    can_generate = getattr(trainer.model, "can_generate", lambda: False)
    with tempfile.TemporaryDirectory() as folder:
        if hasattr(made, "save_pretrained"):
            made.save_pretrained(folder)
        if can_generate():
            try:
                trainer.model.generation_config.save_pretrained(folder)
            except ValueError as error:  # settings that contradict each other
                log.warning("%s is not saved: %s", GENERATION_CONFIG_NAME, error)
        return read_all(folder)


def files_of_run(trainer: Any) -> Mapping[str, bytes]:
    """The Trainer's state and arguments, and the config of the model or of its adapters."""
    made = io.BytesIO()
    try:
        torch.save(trainer.args, made)
    except Exception as error:  # pickle raises what it likes
        log.warning("%s is not saved: %s", TRAINING_ARGS_NAME, error)
        made = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        trainer.state.save_to_json(os.path.join(folder, TRAINER_STATE_NAME))
        adapters: Any = getattr(trainer.model, "peft_config", None)
        config: Any = getattr(trainer.model, "config", None)
        if adapters is not None:
            for name, adapter in adapters.items():
                adapter.save_pretrained(folder if name == "default" else os.path.join(folder, name))
        elif hasattr(config, "save_pretrained"):  # an export needs it
            config.save_pretrained(folder)
        arguments = {TRAINING_ARGS_NAME: made.getvalue()} if made.tell() else {}
        return {**read_all(folder), **arguments}


def read_all(folder: str) -> dict[str, bytes]:
    """The files below a local directory."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


# What wrappers put into the names of modules, and leave out of the names of a state dict.
_WRAPPERS = Fsdp1View.components
_RUNNING = ("running_mean", "running_var", "num_batches_tracked")  # training changes them


def adapter_only(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The part of a model's state that training adapters changes, as the Trainer saves it; all of
    the state, if the model has no adapters of PEFT.

    The frozen base is left out, quantized or not: a script loads it before it resumes. Adapters
    that are frozen at the moment are kept, because they may have been trained before.
    """
    bare = model
    while hasattr(bare, "module"):  # DDP
        bare = bare.module
    if not any(hasattr(one, "peft_config") for one in bare.modules()):
        return state
    kept = tuple(set(_changing(bare)))
    chosen = {
        name: value
        for name, value in state.items()
        if name in kept or name.startswith(tuple(f"{one}." for one in kept))
    }
    return chosen


def model_state(trainer: Any) -> dict[str, Any]:
    """What a save takes of the model, and how PEFT names that in its files."""
    wrapped = trainer._wrapped
    with trainer._block():
        state = {"model": adapter_only(wrapped, wrapped.state_dict())}
    if trainer.args.should_save:
        named = _names_in_peft(trainer.accelerator.unwrap_model(trainer.model), state["model"])
        if named:
            state[ADAPTERS] = named
    return state


def _names_in_peft(model: Any, state: Iterable[str]) -> dict[str, Any]:
    """Adapter → name in its file → name in the state. What PEFT computes at a save (prompts) has
    none."""
    if not is_peft_available() or not isinstance(model, (peft := import_module("peft")).PeftModel):
        return {}
    stand_ins = {name: torch.empty(0) for name in state}
    names = {id(one): name for name, one in stand_ins.items()}
    found: dict[str, Any] = {}
    for adapter in model.peft_config:
        with suppress(Exception):  # PEFT changes tensors of some adapters, and raises what it likes
            made = peft.get_peft_model_state_dict(
                model, stand_ins, adapter, save_embedding_layers=False
            )
            if all(id(one) in names for one in made.values()):
                found[adapter] = {key: names[id(one)] for key, one in made.items()}
    return found


def _changing(model: Any) -> Iterator[str]:
    """The names of adapters' modules, and of what else of the model training changes."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            yield _clean(name)
    for name, module in model.named_modules(remove_duplicate=False):
        for attribute in getattr(module, "adapter_layer_names", ()):
            yield _clean(f"{name}.{attribute}")
        if "prompt_encoder" in module._modules:
            yield _clean(f"{name}.prompt_encoder")
        for buffer in _RUNNING:
            if module._buffers.get(buffer) is not None:
                yield _clean(f"{name}.{buffer}")


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part and part not in _WRAPPERS)


def rng_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and len(state.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
