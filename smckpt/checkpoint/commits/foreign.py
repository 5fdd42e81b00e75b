"""Other systems' checkpoints in a directory: recognise them, say which call reads them, and decide
whether one of torch's own DCP is newer than ours beside it.

DCP writes `.metadata` last, under one name for every save. A commit of ours records the checksum of
the `.metadata` that it found, and deletes that checkpoint once it has committed. So where both are
in a directory, ours is the newer one if its commit names this `.metadata`: the process ended before
it could delete. Otherwise DCP saved after our commit, or somebody has mixed two directories. Times
do not tell those apart, because a copy changes them. Then nothing is read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator

from smckpt.checkpoint.records.crc import crc64, hex64
from smckpt.errors import CheckpointError, CheckpointNotFoundError, UsageError
from smckpt.storage import Storage

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


_GO_BACK = "export the model that it was made from"
# The names of files of other programs, how they begin, what they are, and what to do.
_NOT_READ = (
    (r".*\.gguf", (b"GGUF",), "llama.cpp (GGUF)", "pass the model that it was converted from; or "
     "load it with from_pretrained(gguf_file=) of transformers, and save that"),
    (r"ggml.*\.bin|.*\.ggml", (b"tjgg", b"fmgg", b"lmgg"), "llama.cpp before GGUF", _GO_BACK),
    (r".*\.npz", (), "NumPy's .npz", "make safetensors of it: safetensors.numpy.save_file"),
    (r".*\.npy", (b"\x93NUMPY",), "NumPy, with one array", "save a state dict of all tensors"),
    (r".*\.(?:h5|hdf5|keras)", (b"\x89HDF",), "HDF5 (Keras, TensorFlow)",
     "load it with from_pretrained(from_tf=True) of transformers 4, and save that"),
    (r".*\.msgpack", (), "Flax (msgpack)",
     "load it with from_pretrained(from_flax=True) of transformers 4, and save that"),
    (r".*\.onnx(?:_data)?", (), "ONNX", _GO_BACK),
    (r".*\.tflite", (), "TensorFlow Lite", _GO_BACK),
    (r"(?:rank\d+|model)\.(?:engine|plan)", (), "TensorRT", _GO_BACK),
)  # fmt: skip


def not_read(name: str, begins: bytes | None = None) -> tuple[str, str] | None:
    """What a file is and what to do, if it is one of a format that holds weights and that smckpt
    does not read.

    Args:
        begins: the file's first bytes, which then decide; None: its name does.
    """
    for pattern, magics, kind, remedy in _NOT_READ:
        if begins.startswith(magics) if begins is not None else re.fullmatch(pattern, name):
            return f"a file of {kind}, which smckpt does not read", remedy
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
    parts = re.split(r"(\d+)", name)
    return [(int(text), "") if text.isdecimal() else (-1, text) for text in parts]


log = logging.getLogger("smckpt")

_METADATA, _OF_RANK_0 = ".metadata", "__0.metadata"  # the latter where each rank plans for itself
_OF_RANKS = re.compile(r"__\d+\.metadata")
_DATA = re.compile(r"__\d+_\d+\.distcp")


def holds_dcp(names: Iterable[str]) -> bool:
    """Whether one of the names of a directory says that DCP wrote a checkpoint there."""
    return any(name in (_METADATA, _OF_RANK_0) for name in names)


def checksum_of_dcp(storage: Storage) -> str | None:
    """Of the metadata of DCP's checkpoint here, which is another one for each save; None: there is
    none."""
    found = [n for n in storage.names(_METADATA, _OF_RANK_0) if n in (_METADATA, _OF_RANK_0)]
    if not found:
        return None
    storage = storage.with_links()  # files of others
    try:
        return hex64(crc64(b"".join(storage.read(name) for name in found)))
    except CheckpointNotFoundError:  # deleted since
        return None


def refuse_newer_dcp(storage: Storage, replaced: str | None) -> None:
    """Check that the newest commit here is newer than DCP's checkpoint here, if there is one.

    Args:
        replaced: what the commit records.

    Raises:
        UsageError: nothing tells which is newer.
    """
    there = checksum_of_dcp(storage)
    if there is None or there == replaced:
        return
    raise UsageError(
        "two checkpoints are in this directory, one of smckpt and one of "
        "torch.distributed.checkpoint, which was written or copied here later: nothing is read, "
        "because one of them is old",
        remedy=f"to read smckpt's, delete {_METADATA} and the files *.distcp; to read torch's, "
        "move its files to a directory of their own, or run `smckpt rm` on this one; then let one "
        "of the two save here",
        path=storage.url,
    )


def delete_dcp(storage: Storage, replaced: str | None) -> None:
    """Delete DCP's checkpoint, which a commit of ours has just replaced; its metadata first. Raises
    nothing, because the commit stands."""
    if replaced is None:
        return
    try:
        if checksum_of_dcp(storage) != replaced:
            return  # DCP has saved again
        names = storage.names("__")
        storage.delete(_METADATA)
        storage.delete_many([name for name in names if _OF_RANKS.fullmatch(name)])
        doomed = [name for name in names if _DATA.fullmatch(name)]
        storage.delete_many(doomed)
        log.warning(
            "this save replaces the checkpoint that torch.distributed.checkpoint wrote to %s: its "
            "%d files are deleted",
            storage.url,
            len(doomed) + 1,
        )
    except CheckpointError as error:
        log.warning("a replaced checkpoint of torch.distributed.checkpoint is left: %s", error)
