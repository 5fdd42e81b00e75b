"""A `checkpoint-N` as transformers' Trainer itself writes it."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any

import torch

from smckpt.checkpoint.records.format import parse_name
from smckpt.errors import StateError
from smckpt.storage import Storage
from smckpt.translate.archives.new_target import NewTarget
from smckpt.translate.conversion.stock.format import StockFormat, is_stock
from smckpt.translate.conversion.stock.optimizers import numbered
from smckpt.translate.conversion.stock.sharded import is_sharded, write_sharded
from smckpt.translate.conversion.stock.weights import write_safetensors
from smckpt.translate.conversion.whole_state import WholeState

__all__ = ["FORMAT"]

_ARGUMENTS, _STATE = "training_args.bin", "trainer_state.json"
_ADAPTER = "adapter_config.json"
_OF_LORA = re.compile(
    r"base_model\.model\..*\.(lora_(A|B|embedding_A|embedding_B)\.default(\.\w+)?"
    r"|modules_to_save\.default\..*)"
)
_MOST = 1 << 28  # bytes of a file beside the checkpoint


def _write(whole: WholeState, target: NewTarget) -> tuple[str, ...]:
    keys, ranks = whole.keys, whole.catalogue.object_ranks
    beside = dict(_beside(whole.catalogue.readers.storage(whole.catalogue.url).without_links()))
    adapter = _is_adapter(whole, beside)
    changed: tuple[str, ...] = ()
    if is_sharded(whole, "model"):
        for key in {"model", "optimizer"} & keys:
            changed += write_sharded(whole, key, target, 0)
    elif adapter:
        write_safetensors(whole, "model", target, "adapter_model.safetensors", _in_adapter)
    else:
        write_safetensors(whole, "model", target, "model.safetensors")
    if "optimizer" in keys and not is_sharded(whole, "model"):
        with target.file("optimizer.pt") as file:
            whole.write_torch(file, numbered(whole.nested("optimizer")))
    for key, name in (("scheduler", "scheduler.pt"), ("scaler", "scaler.pt")):
        if key in keys:
            target.put(name, _saved(whole.in_memory(key)))
    for rank in ranks if "rng" in keys else ():
        one = whole if rank == whole.rank else whole.of_rank(rank)
        name = "rng_state.pth" if len(ranks) == 1 else f"rng_state_{rank}.pth"
        target.put(name, _saved(_random(one.in_memory("rng"), alone=len(ranks) == 1)))
    for name, data in beside.items():
        target.put(name, data)
    state = json.dumps(whole.in_memory("trainer"), indent=2, sort_keys=True) + "\n"
    target.put(_STATE, state.encode())
    return changed


def _random(state: dict[str, Any], *, alone: bool) -> dict[str, Any]:
    """One process saves the generator of its device, and no list."""
    if alone and "cuda" in state:
        return {**state, "cuda": state["cuda"][0]}
    return state


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


def _is_adapter(whole: WholeState, beside: dict[str, bytes]) -> bool:
    """Whether the model is one adapter of LoRA, as PEFT saves it.

    Raises:
        StateError: it is another adapter, or more than one.
    """
    configs = [name for name in beside if name.rpartition("/")[2] == _ADAPTER]
    if not configs:
        return False
    config = json.loads(beside[configs[0]])
    others = [name for name in whole.nested("model") if not _OF_LORA.fullmatch(name)]
    plain = config.get("peft_type") == "LORA" and not config.get("use_dora")
    if configs != [_ADAPTER] or not plain or others or is_sharded(whole, "model"):
        what = f"it has {', '.join(others[:8])}" if others else f"the adapters are {configs}"
        raise StateError(
            "of adapters (PEFT), only the Trainer's own checkpoints of a single one of LoRA, "
            f"without DoRA or FSDP, are written; {what}",
            remedy="resume with SmckptTrainer",
            path=whole.catalogue.url,
        )
    return True


def _in_adapter(name: str) -> str:
    """PEFT leaves the adapter's name out."""
    return name.replace(".modules_to_save.default.", ".").replace(".default", "")


FORMAT = StockFormat("SmckptTrainer", frozenset({"model", "trainer"}), _write)
