"""An archive of `torch.save`, written as it streams: the counterpart of `torch_archive`.

`torch.save` itself wants the whole state in memory. The archive is a zip file of uncompressed
records: `data.pkl`, which describes the state, and the bytes of each tensor's storage.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch

__all__ = ["Placeholder", "bytes_of", "write_archive"]

_FOLDER = "archive"
_ALIGNMENT = 64  # of a storage in the file, as torch's, so that a mapped tensor is aligned
_LOCAL, _ZIP64, _FIELD = 30, 20, 4  # bytes of a record's header, of two fields behind its name
_VERSION = b"3\n"
# dtypes that torch.save writes as a storage of that type; it writes others as bytes
_STORAGES = {
    "float64": torch.DoubleStorage, "float32": torch.FloatStorage, "float16": torch.HalfStorage,
    "bfloat16": torch.BFloat16Storage, "int64": torch.LongStorage, "int32": torch.IntStorage,
    "int16": torch.ShortStorage, "int8": torch.CharStorage, "uint8": torch.ByteStorage,
    "bool": torch.BoolStorage, "complex128": torch.ComplexDoubleStorage,
    "complex64": torch.ComplexFloatStorage,
}  # fmt: skip


@dataclass(frozen=True)
class Placeholder:
    """Stands in the state for tensor `number`, which is row-major and has a storage of its own."""

    number: int
    dtype: str
    shape: tuple[int, ...]


def write_archive(
    file: IO[bytes], state: Any, storages: Mapping[int, Iterable[memoryview]]
) -> None:
    """Write an archive that `torch.load(weights_only=True)` reads, with `mmap=True` too.

    Args:
        state: nested containers and plain values, with a `Placeholder` for each tensor.
        storages: the bytes of each tensor, by its placeholder's number.
    """
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        data = io.BytesIO()
        _TensorPickler(data, protocol=2).dump(state)
        _put(archive, file, "data.pkl", [data.getvalue()])
        _put(archive, file, "byteorder", [b"little"])
        for number, pieces in storages.items():
            _put(archive, file, f"data/{number}", pieces)
        _put(archive, file, "version", [_VERSION])


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in memory, row-major."""
    plain = tensor.detach().cpu().contiguous()
    data: Any = plain.reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


def _put(
    archive: zipfile.ZipFile, file: IO[bytes], name: str, pieces: Iterable[bytes | memoryview]
) -> None:
    info = zipfile.ZipInfo(f"{_FOLDER}/{name}")  # its time is 1980: equal states, equal bytes
    begin = file.tell() + _LOCAL + len(info.filename) + _ZIP64 + _FIELD
    padding = -begin % _ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=True) as record:
        for piece in pieces:
            record.write(piece)


class _RawStorage:
    def __init__(self, kind: Any, number: int, count: int) -> None:
        self.id = ("storage", kind, str(number), "cpu", count)


class _TensorPickler(pickle.Pickler):
    """Writes placeholders as the tensors that they stand for."""

    def persistent_id(self, obj: Any) -> Any:
        return obj.id if isinstance(obj, _RawStorage) else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Placeholder):
            return NotImplemented
        count = 1
        strides: list[int] = []
        for size in reversed(obj.shape):
            strides.insert(0, count)
            count *= max(size, 1)
        numel = 0 if 0 in obj.shape else count
        hooks: OrderedDict[Any, Any] = OrderedDict()
        view = (0, obj.shape, tuple(strides), False, hooks)
        dtype: torch.dtype = getattr(torch, obj.dtype)
        if obj.dtype in _STORAGES:
            storage = _RawStorage(_STORAGES[obj.dtype], obj.number, numel)
            return torch._utils._rebuild_tensor_v2, (storage, *view)
        storage = _RawStorage(torch.UntypedStorage, obj.number, numel * dtype.itemsize)
        return torch._utils._rebuild_tensor_v3, (storage, *view, dtype)
