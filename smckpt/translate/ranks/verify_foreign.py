"""Reads all that a checkpoint of another system holds, and compares it with the checksums that the
system wrote."""

from __future__ import annotations

import os

from smckpt.checkpoint.reading.read import Meter, Progress
from smckpt.checkpoint.reading.whole import WholeTensors
from smckpt.checkpoint.upkeep.verify import Problem, Report
from smckpt.errors import CorruptCheckpointError
from smckpt.storage import access_to
from smckpt.translate.ranks.foreign_catalogue import foreign_catalogue

__all__ = ["verify_foreign"]

_AT_ONCE = 64 << 20  # bytes


def verify_foreign(
    url: str | os.PathLike[str], *, threads: int = 4, progress: Progress | None = None
) -> Report | None:
    """Read every tensor of a checkpoint of torch DCP, `torch.save`, safetensors or Hugging Face.

    torch's files have a CRC-32 of each tensor, which the read compares. Safetensors have none:
    there only what is missing or short is found.

    Returns:
        A `Report`; None if nothing that others wrote is there.

    Raises:
        CheckpointError: its metadata or index cannot be read.
    """
    storage = access_to(url).open(url)
    catalogue = foreign_catalogue(storage)
    if catalogue is None:
        return None
    reads = WholeTensors(catalogue, catalogue.object_ranks[0], threads)
    tell = Meter(progress, sum(tensor.nbytes for tensor in reads.tensors))
    size = min(_AT_ONCE, max((tensor.nbytes for tensor in reads.tensors), default=0))
    buffer, problems = memoryview(bytearray(size)), []
    for tensor in reads.tensors:
        for box in tensor.chunks(_AT_ONCE) if tensor.nbytes else ():
            nbytes = box.numel * tensor.itemsize
            try:
                reads.read(tensor, box, buffer[:nbytes])
            except CorruptCheckpointError as error:
                problems.append(
                    Problem(error.path or storage.url, f"{tensor.name}: {error.message}")
                )
                break
            tell.add(nbytes)
    return Report(
        url=os.fspath(url),
        identity=catalogue.identity,
        files=len({box.file for saved in catalogue.source.saved.values() for box in saved.boxes}),
        tensors=len(reads.tensors),
        nbytes=sum(tensor.nbytes for tensor in reads.tensors),
        problems=tuple(problems),
    )
