"""The checkpoints that frameworks themselves write, made of those that smckpt's doors saved:
`checkpoint-N` of transformers' Trainer, a directory of accelerate's `save_state`, a `.ckpt` of
Lightning's Trainer, a `step-N` of torchtitan.

A framework is not imported: the machine that converts need not have it.

Lightning's checkpoint dict becomes a state of smckpt, and that the dict again. `state_dict` and
`optimizer_states` are saved as "model", "optimizer", "optimizer_1" …, so `smckpt export`, `diff`
and `verify` find them. Everything else (loops, callbacks, schedulers, hyper-parameters) stands
under "lightning": as values if smckpt can store them without code, as tensors if they are large,
and otherwise pickled, which a load reads as far as `weights_only` says.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from smckpt.checkpoint.reading.catalogue import are_groups
from smckpt.checkpoint.records.format import parse_name
from smckpt.checkpoint.records.objects import decode_object, encode_object
from smckpt.errors import CorruptCheckpointError, StateError, UsageError
from smckpt.formats.conversion.new_target import NewTarget
from smckpt.formats.conversion.whole_state import Placeholder, WholeState
from smckpt.layout.entries import DTYPES
from smckpt.layout.image import METADATA, safetensors_header
from smckpt.state_dict.tensors import flags_of
from smckpt.storage import Storage
from smckpt.storage.urls import is_local

_REST, _KINDS = "lightning", "lightning_kinds"
LIGHTNING_KEYS = (_REST, _KINDS)  # of all but model and optimizers
_TYPE = re.compile(r"(?:GLOBAL|global) ([\w.]+) was not")  # in the message of torch.load
_SMALL = 1 << 20  # bytes of tensors that a value may hold; more are saved as tensors


def optimizer_key(index: int) -> str:
    """The key of an optimizer's state."""
    return f"optimizer_{index}" if index else "optimizer"


def state_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The state to save. Tensors are those of `checkpoint`; pickled values are copies.

    Raises:
        StateError: a value cannot even be pickled; names its key.
    """
    rest = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")}
    state: dict[str, Any] = {}
    if "state_dict" in checkpoint:
        state["model"] = checkpoint["state_dict"]
    optimizers = checkpoint.get("optimizer_states")
    for index, each in enumerate(optimizers or ()):
        state[optimizer_key(index)] = each
    stored = {key: _stored(key, value) for key, value in rest.items()}
    state[_REST] = {key: value for key, (_, value) in stored.items()}
    kinds = {key: kind for key, (kind, _) in stored.items()}
    number = None if optimizers is None else len(optimizers)
    state[_KINDS] = {"keys": kinds, "optimizers": number}
    return state


def checkpoint_of(state: Mapping[str, Any], weights_only: bool | None = None) -> dict[str, Any]:
    """The inverse of `state_of`.

    Args:
        weights_only: as in `torch.load`; it concerns what is pickled only. None: True.

    Raises:
        UsageError: something is pickled that needs code, and `weights_only` is not False.
    """
    checkpoint = rest_of(state, weights_only)
    if "model" in state:
        checkpoint["state_dict"] = state["model"]
    number = state[_KINDS]["optimizers"]
    if number is not None:
        checkpoint["optimizer_states"] = [state[optimizer_key(i)] for i in range(number)]
    return checkpoint


def rest_of(state: Mapping[str, Any], weights_only: bool | None = None) -> dict[str, Any]:
    """The checkpoint without model and optimizers."""
    try:
        kinds, values = state[_KINDS]["keys"], state[_REST]
        return {key: _given(key, kinds[key], values[key], weights_only) for key in kinds}
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"what is saved beside model and optimizers cannot be understood: {error!r}",
            remedy="use an older checkpoint, or load it with smckpt.load(checkpoint_id=…)",
        ) from error


def _stored(key: str, value: Any) -> tuple[str, Any]:
    leaves = list(_leaves(value))
    tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
    if any(type(one) not in (torch.Tensor, torch.nn.Parameter) for one in tensors):  # parts
        return "tensors", value
    large = sum(one.numel() * one.element_size() for one in tensors) > _SMALL
    try:
        if large:
            if any(one.layout != torch.strided or one.is_quantized for one in tensors):
                raise StateError("not dense", remedy="pickle it")
            if any(flags_of(one) or isinstance(one, torch.nn.Buffer) for one in tensors):
                raise StateError("parameters come back as tensors", remedy="pickle it")
            encode_object([one for one in leaves if not isinstance(one, torch.Tensor)], path=key)
            return "tensors", value
        encoded = encode_object(value, path=key)
    except StateError:
        made = io.BytesIO()
        try:
            torch.save(value, made)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise StateError(
                f"the checkpoint's {key!r} cannot be pickled: {error}",
                remedy="put only data into it (on_save_checkpoint, save_hyperparameters(ignore=…))",
            ) from error
        return "pickled", made.getvalue()
    return ("text", json.dumps(encoded)) if tensors else ("value", value)


def _given(key: str, kind: str, value: Any, weights_only: bool | None) -> Any:
    if kind == "text":
        return decode_object(json.loads(value))
    if kind != "pickled":
        return value
    strict = weights_only is not False
    try:
        return torch.load(io.BytesIO(value), map_location="cpu", weights_only=strict)
    except pickle.UnpicklingError as error:
        named = _TYPE.search(str(error))
        raise UsageError(
            f"the checkpoint's {key!r} holds objects that only code can make"
            + (f", such as {named[1]}" if named else ""),
            remedy="if you trust the checkpoint, pass weights_only=False, or name the types with "
            "torch.serialization.add_safe_globals",
        ) from error


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for child in value.values():
            yield from _leaves(child)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for child in value:
            yield from _leaves(child)
    else:
        yield value


# Weights and training state as the Trainer, accelerate, PEFT and DeepSpeed write them.
_STOCK = re.compile(
    r"(model|pytorch_model|adapter_model)([-_.].*)?\.(safetensors|bin)(\.index\.json)?"
    r"|(optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.(pt|bin)|scaler\.pt|training_args\.bin"
    r"|rng_state(_\d+)?\.pth|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl"
    r"|pytorch_model_fsdp_\d+|optimizer_\d+|global_step\d+|latest|zero_to_fp32\.py"
)


def is_stock(name: str) -> bool:
    """Whether a file or folder of this name holds another system's weights or training state."""
    return _STOCK.fullmatch(name) is not None and parse_name(name) is None


@dataclass(frozen=True)
class StockFormat:
    """
    Args:
        saver: what saves the checkpoints that this can be made of, for errors.
        needs: the first names that are in each of those.
        write: writes it, and gives the names whose form it changes.
        one_file: it is a file, and no directory.
    """

    saver: str
    needs: frozenset[str]
    write: Callable[[WholeState, NewTarget], tuple[str, ...]]
    one_file: bool = False


def numbered(state: Any) -> Any:
    """Number the parameters by their order in param_groups, as torch does.

    Args:
        state: of an optimizer, under the names of its parameters. Any other is left as it is.
    """
    if not isinstance(state, dict) or not are_groups(state.get("param_groups")):
        return state
    names = [name for group in state["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [
        {**group, "params": [numbers[name] for name in group["params"]]}
        for group in state["param_groups"]
    ]
    if not isinstance(state.get("state"), dict):
        return {**state, "param_groups": groups}
    found = {numbers.get(name, name): slots for name, slots in state["state"].items()}
    order = sorted(found, key=lambda key: key if isinstance(key, int) else len(names))
    return {**state, "state": {key: found[key] for key in order}, "param_groups": groups}


def is_sharded(whole: WholeState, key: str) -> bool:
    """Whether ranks hold shards of what is under a first name."""
    for row in whole.catalogue.rows:
        rule = row.geometry
        if row.path[0] != key or rule.per_rank:
            continue
        degree = rule.shard_degree()  # 0: unknown, of explicit boxes
        if degree > 1 or (degree == 0 and rule.local_shape(row.ranks[0]) != rule.whole_shape):
            return True
    return False


ADAPTERS = "adapters"  # of a Trainer's state: the names of their tensors in PEFT's files
FSDP = "fsdp"  # in the metadata of the doors' checkpoints: the plugin's version and state_dict_type
_FULL = "FULL_STATE_DICT"


def fsdp_form(whole: WholeState, number: str = "") -> dict[str, Any] | None:
    """What FSDP's plugin in accelerate reads; None: the run was without FSDP.

    Args:
        number: of the model among those that accelerate prepared: "", "_1" …
    """
    recorded = whole.catalogue.metadata.get(FSDP)
    if isinstance(recorded, dict):
        return recorded
    return {} if is_sharded(whole, "model" + number) else None  # of an older smckpt


def write_sharded(
    whole: WholeState, key: str, target: NewTarget, form: Mapping[str, Any], state: Any
) -> tuple[str, ...]:
    """Write one model or optimizer, the parameters under their names, as accelerate reads it with
    the plugin's `state_dict_type`: one file, or a directory of DCP."""
    kind, _, number = key.partition("_")
    name = "pytorch_model_fsdp" if kind == "model" else kind
    if form.get("state_dict_type") == _FULL:
        with target.file(f"{name}_{number}.bin" if number else f"{name}.bin") as file:
            whole.write_torch(file, state)
        return ()
    with target.folder(f"{name}_{number or 0}") as path:
        return whole.write_dcp(path, {kind: state})


def write_safetensors(
    whole: WholeState, state: Mapping[str, Any], target: NewTarget, name: str
) -> None:
    """Write the tensors of a model under the names of `state`.

    Raises:
        StateError: it has something else than tensors of dtypes that safetensors knows.
    """
    wrong = [
        each for each, leaf in state.items()
        if not isinstance(leaf, Placeholder) or DTYPES[leaf.dtype].code is None
        or each == METADATA
    ]  # fmt: skip
    if wrong:
        raise StateError(
            f"{', '.join(wrong[:8])} cannot be in a file of safetensors",
            remedy="only a model of plain tensors goes back to a framework's own checkpoint",
            path=whole.catalogue.url,
        )
    numbers = [leaf.number for leaf in state.values()]
    tensors = (
        (each, str(DTYPES[leaf.dtype].code), leaf.shape, whole.tensors[leaf.number].nbytes)
        for each, leaf in state.items()
    )
    with target.file(name) as file:
        file.write(safetensors_header(tensors, {"format": "pt"}))
        for pieces in whole.pieces(numbers).values():
            for piece in pieces:
                file.write(piece)


# -- the frameworks --------------------------------------------------------------------------------


_ARGUMENTS, _STATE = "training_args.bin", "trainer_state.json"
_ADAPTER = "adapter_config.json"
_MOST = 1 << 28  # bytes of a file beside the checkpoint


def _write_trainer(whole: WholeState, target: NewTarget) -> tuple[str, ...]:
    keys, ranks = whole.keys, whole.catalogue.object_ranks
    beside = dict(_beside(whole.catalogue.stores.storage(whole.catalogue.url).without_links()))
    adapters = {  # by their folder there
        name.rpartition("/")[0]: name.rpartition("/")[0] or "default"
        for name in beside
        if name.rpartition("/")[2] == _ADAPTER
    }
    form, changed = fsdp_form(whole), list[str]()
    models = _of_peft(whole, adapters, form) if adapters else {"": whole.nested("model")}
    if form is None:
        for folder, state in models.items():
            name = "adapter_model.safetensors" if adapters else "model.safetensors"
            write_safetensors(whole, state, target, f"{folder}/{name}".lstrip("/"))
        if "optimizer" in keys:
            with target.file("optimizer.pt") as file:
                whole.write_torch(file, numbered(whole.nested("optimizer")))
    else:
        (model,) = models.values()
        changed += write_sharded(whole, "model", target, form, model)
        if "optimizer" in keys:
            changed += write_sharded(whole, "optimizer", target, form, whole.nested("optimizer"))
    for key, name in (("scheduler", "scheduler.pt"), ("scaler", "scaler.pt")):
        if key in keys:
            target.put(name, _saved(whole.in_memory(key)))
    for rank in ranks if "rng" in keys else ():
        one = whole if rank == whole.rank else whole.of_rank(rank)
        name = "rng_state.pth" if len(ranks) == 1 else f"rng_state_{rank}.pth"
        state = one.in_memory("rng")
        if len(ranks) == 1 and "cuda" in state:  # the generator of its device, and no list
            state = {**state, "cuda": state["cuda"][0]}
        target.put(name, _saved(state))
    for name, data in beside.items():
        target.put(name, data)
    trainer = whole.in_memory("trainer")
    best = trainer.get("best_model_checkpoint")
    if isinstance(best, str):  # the Trainer loads it, and keeps it, by path
        beside_it = os.path.join(os.path.dirname(target.target), os.path.basename(best))
        relative = is_local(best) and not os.path.isabs(best)
        trainer["best_model_checkpoint"] = os.path.relpath(beside_it) if relative else beside_it
    target.put(_STATE, (json.dumps(trainer, indent=2, sort_keys=True) + "\n").encode())
    return tuple(changed)


def _of_peft(
    whole: WholeState, adapters: Mapping[str, str], form: Mapping[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """The model as PEFT has it in its files: adapter → name → tensor.

    Args:
        adapters: folder → name.
    """
    named = whole.in_memory(ADAPTERS) if ADAPTERS in whole.keys else {}
    model = whole.nested("model")
    known = {name for each in adapters.values() for name in named.get(each, {}).values()}
    others = sorted(model.keys() - known) or [one for one in adapters.values() if one not in named]
    if others or (form is not None and len(adapters) > 1):
        what = ", ".join(others[:8]) or f"under FSDP the adapters {', '.join(adapters.values())}"
        raise StateError(
            f"of {what} PEFT itself writes no tensor, or the smckpt that saved this did not ask it",
            remedy="resume with SmckptTrainer",
            path=whole.catalogue.url,
        )
    if form and (form.get("state_dict_type"), form.get("version")) == (_FULL, 2):
        return {"": model}  # accelerate has the model's names there
    return {
        folder: {there: model[name] for there, name in named[adapter].items()}
        for folder, adapter in adapters.items()
    }


def _saved(value: Any) -> bytes:
    made = io.BytesIO()
    torch.save(value, made)
    return made.getvalue()


def _beside(storage: Storage, folder: str = "") -> Iterator[tuple[str, bytes]]:
    """The files that are beside the checkpoint and belong to it: config, tokenizer, arguments."""
    for file in storage.list():
        ours = parse_name(file.name) is not None or file.name.startswith(".")
        state = file.name == _STATE or (is_stock(file.name) and file.name != _ARGUMENTS)
        if not ours and not state and file.size <= _MOST:
            yield folder + file.name, storage.read(file.name, most=_MOST)
    for name in storage.list_dirs():
        if not is_stock(name) and not name.startswith("."):
            yield from _beside(storage.join(name), f"{folder}{name}/")


_PREPARED = re.compile(r"(model|optimizer)(_\d+)?")


def _write_accelerate(whole: WholeState, target: NewTarget) -> tuple[str, ...]:
    changed: list[str] = []
    for key in sorted(whole.keys):
        found = _PREPARED.fullmatch(key)
        if found is None:
            continue
        kind, number = found[1], found[2] or ""
        state = whole.nested(key)
        if (form := fsdp_form(whole, number)) is not None:
            changed += write_sharded(whole, key, target, form, state)
            continue
        # accelerate takes tied weights twice from a file of torch.save, and not of safetensors
        name = f"pytorch_model{number}.bin" if kind == "model" else f"optimizer{number}.bin"
        with target.file(name) as file:
            whole.write_torch(file, state if kind == "model" else numbered(state))
    for name, data in _files(whole).items():
        target.put(name, data)
    return tuple(changed)


def _files(whole: WholeState) -> dict[str, bytes]:
    """What accelerate itself wrote on each rank: schedulers, samplers, random numbers, scaler,
    registered objects."""
    found: dict[str, bytes] = {}
    for rank in reversed(whole.catalogue.object_ranks):  # the main process writes what all share
        one = whole if rank == whole.rank else whole.of_rank(rank)
        for packed in (one.values[("own_files",)], one.values[("files",)]):
            try:
                with zipfile.ZipFile(io.BytesIO(packed)) as archive:
                    for name in archive.namelist():
                        if ".." not in name.split("/") and not name.startswith("/"):
                            found[name] = archive.read(name)
            except (zipfile.BadZipFile, TypeError) as error:
                raise CorruptCheckpointError(
                    f"what accelerate wrote on rank {rank} cannot be read: {error}",
                    remedy="use an older checkpoint", path=whole.catalogue.url,
                ) from error  # fmt: skip
    return found


def _write_lightning(whole: WholeState, target: NewTarget) -> tuple[str, ...]:
    try:
        checkpoint = checkpoint_of(whole.nested())
    except UsageError as error:
        raise UsageError(
            error.message,
            remedy="if you trust the checkpoint, convert it in Python: name the types with "
            "torch.serialization.add_safe_globals, then call smckpt.convert",
            path=whole.catalogue.url,
        ) from error
    # Lightning's sharded strategies read one file too, with parameters under their names
    if "optimizer_states" in checkpoint and not is_sharded(whole, "model"):
        checkpoint["optimizer_states"] = [numbered(each) for each in checkpoint["optimizer_states"]]
    with target.file() as file:
        whole.write_torch(file, checkpoint)
    return ()


def _write_torchtitan(whole: WholeState, target: NewTarget) -> tuple[str, ...]:
    whole.add_values(whole.catalogue.object_ranks)  # the position of each rank in the data
    return whole.write_dcp(target.path(), whole.nested())


STOCK = MappingProxyType(
    {
        "trainer": StockFormat("SmckptTrainer", frozenset({"model", "trainer"}), _write_trainer),
        "accelerate": StockFormat(
            "SmckptAccelerator", frozenset({"files", "own_files"}), _write_accelerate
        ),
        "lightning": StockFormat(
            "SmckptCheckpointIO", frozenset({"lightning", "lightning_kinds"}), _write_lightning,
            one_file=True,
        ),
        "torchtitan": StockFormat(
            "SmckptCheckpointManager", frozenset({"train_state", "optimizer"}), _write_torchtitan
        ),
    }
)  # fmt: skip


def refuse_without(whole: WholeState, framework: str) -> None:
    """
    Raises:
        StateError: another door saved the checkpoint, or none; the state is not in it.
    """
    stock, ours = STOCK[framework], whole.catalogue.ours
    absent = sorted(stock.needs - whole.keys if ours else stock.needs)
    if not absent:
        return
    remedy = f"pass a checkpoint that {stock.saver} saved"
    for name, other in STOCK.items():
        if ours and other.needs <= whole.keys:
            remedy += f", or --to {name}: {other.saver} saved this one"
            break
    raise StateError(
        f"{framework} cannot resume from this checkpoint: it has no {', '.join(absent)}, which "
        f"{stock.saver} saves",
        remedy=f"{remedy}; to carry the weights alone, use `smckpt export`",
        path=whole.catalogue.url,
    )
