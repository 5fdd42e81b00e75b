"""Recognise other formats in a directory without a checkpoint of ours, and say which call reads
them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smckpt.storage import Storage

__all__ = ["foreign_below", "foreign_format", "natural_order"]

_WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model).*\.(safetensors|bin|index\.json)")


_SMP = "_partial"  # behind the user's tag
_ORBAX = frozenset({"_CHECKPOINT_METADATA", "_METADATA"})


def foreign_format(found: Collection[str], path: str) -> tuple[str, str] | None:
    """The format of a directory's files and the call that reads them; None if the format is
    unknown."""
    names = frozenset(found)
    if ".metadata" in names and any(name.endswith(".distcp") for name in names):
        return (
            "this is a checkpoint of torch.distributed.checkpoint (DCP)",
            f"load it with smckpt.load(state, checkpoint_id={path!r}), make one of smckpt's of it "
            f"(smckpt convert {path} TARGET --to smckpt), look at it with `smckpt show`, or make a "
            "Hugging Face model of it with `smckpt export`",
        )
    if path.rstrip("/").endswith(_SMP) and any(name.endswith(".pt") for name in names):
        return (
            "this is a partial checkpoint of SMP v1 (Amazon's SageMaker model parallel)",
            f"make a Hugging Face model of it with `smckpt export {path}`; if that does not read "
            "it, load it with smp.resume_from_checkpoint and save it whole (partial=False)",
        )
    if not names.isdisjoint(_ORBAX):
        return (
            "this is a checkpoint of Orbax (JAX)",
            "export it with the library that wrote it, as safetensors",
        )
    if any(_WEIGHTS.fullmatch(name) for name in names):
        if "adapter_config.json" in names:
            return (
                "this is an adapter in PEFT's format",
                f"load it with peft.PeftModel.from_pretrained(model, {path!r})",
            )
        return (
            "this is a model in Hugging Face's format",
            f"load it with transformers' from_pretrained({path!r}), or make a checkpoint from it: "
            f"smckpt import {path} OUT --layout LAYOUT",
        )
    return None


def foreign_below(storage: Storage, depth: int = 2) -> Iterator[str]:
    """What directories at and below `storage` hold in other formats, newest name first: each as one
    sentence with its directory's name and the call that reads it."""
    known = foreign_format(storage.names(), storage.url)
    if known is not None:
        what, remedy = known
        yield f"{storage.url}: {what}; {remedy}"
        return
    for name in sorted(storage.list_dirs(), key=natural_order, reverse=True) if depth else ():
        yield from foreign_below(storage.join(name), depth - 1)


def natural_order(name: str) -> list[tuple[int, str]]:
    """A sort key that puts step_20 before step_100."""
    return [(int(text), "") if text.isdigit() else (-1, text) for text in re.split(r"(\d+)", name)]
