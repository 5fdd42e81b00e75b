"""Values of `torch.save` that are not tensors, read without running code that they name."""

from __future__ import annotations

import contextlib
import importlib
import io
from typing import Any

from smckpt.checkpoint.records.objects import refuse_inflating
from smckpt.errors import StateError
from smckpt.translate.archives.source_files import ArchiveRecord, SourceFiles
from smckpt.translate.archives.torch_archive import is_archive

__all__ = ["plain_load", "read_value"]


def read_value(source: SourceFiles, record: ArchiveRecord, name: str) -> Any:
    """The value that `torch.save` wrote there.

    Raises:
        StateError: it has objects of classes that are not plain data.
    """
    data = source.read(record)
    try:
        return plain_load(io.BytesIO(data))
    except Exception as error:  # torch, zip and pickle raise many kinds
        raise StateError(
            f"the value {name} is not plain data: {str(error).splitlines()[0]}",
            remedy="leave it out by name (ignore=), or save plain data: numbers, texts, arrays",
            path=record.path,
        ) from error


def plain_load(source: Any, **options: Any) -> Any:
    """`torch.load` of plain data and of NumPy's arrays. Anything else raises."""
    import torch

    with contextlib.ExitStack() as stack:
        file = source if isinstance(source, io.BytesIO) else stack.enter_context(open(source, "rb"))
        if is_archive(file.read(4)):
            refuse_inflating(file, file.seek(0, io.SEEK_END))
        file.seek(0)
    # what NumPy's arrays and scalars are made with, under the names of NumPy 1 and 2
    import numpy as np

    core = "_core" if hasattr(np, "_core") else "core"
    multiarray = importlib.import_module(f"numpy.{core}.multiarray")
    kinds = {type(np.dtype(code)) for code in np.typecodes["All"] if code not in "OV"}
    made: list[Any] = [np.ndarray, np.dtype, *kinds]
    for name in ("_reconstruct", "scalar"):
        function = getattr(multiarray, name)
        made += [(function, f"numpy.{module}.multiarray.{name}") for module in ("core", "_core")]
    with torch.serialization.safe_globals(made):
        return torch.load(source, map_location="cpu", weights_only=True, **options)
