"""An archive of `torch.save`, read without torch: what it describes, and where its tensors lie.

The archive is a zip file of uncompressed records: `data.pkl`, and the bytes of each storage. It may
be a part of a larger file. torch itself reads values that are not tensors, and runs no code that
they name.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, cast

from smckpt.checkpoint.records.objects import refuse_inflating
from smckpt.errors import CorruptCheckpointError, StateError, UsageError, errors_at
from smckpt.formats.pickled import Global, Inert, read_pickle, refuse_endless
from smckpt.formats.source_files import ArchiveRecord, HeadersFile, SourceFiles
from smckpt.layout.entries import DTYPES
from smckpt.layout.mesh import MOST_DIMS, Shape

_PICKLE_LIMIT = 256 << 20  # bytes of an archive's pickle
_DIRECTORY = 48 << 20  # bytes; what it says of a million records takes a gigabyte
_TAIL = 64 << 10  # bytes at the end: for most archives all of the directory
_LOCAL = b"PK\3\4"
_HEAD = 30  # bytes of a local header before the name
# A torch before 1.6 wrote pickles one after the other, and then the storages.
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_STORAGES: Mapping[str, str] = MappingProxyType(
    {
        "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
        "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
        "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
        "BoolStorage": "bool", "ComplexDoubleStorage": "complex128",
        "ComplexFloatStorage": "complex64", "UntypedStorage": "uint8",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a record: strides and the first element are in elements."""

    dtype: str
    shape: Shape
    strides: Shape
    start: int
    record: ArchiveRecord


class _Storage(NamedTuple):
    dtype: str
    key: str


@dataclass(frozen=True)
class Archive:
    """root: what was saved, with `StoredTensor` for tensors and `Inert` for other objects."""

    root: Any
    records: Mapping[str, ArchiveRecord]


def is_archive(start: bytes) -> bool:
    """Whether a file that begins so is an archive of today's `torch.save`."""
    return start.startswith(_LOCAL)


def open_archive(source: SourceFiles, archive: ArchiveRecord) -> Archive:
    """Read the directory and the pickle of an archive, which is a file or a part of one.

    Raises:
        CorruptCheckpointError: it is damaged, or is no such archive; the message says where.
    """
    path, offset = archive.path, archive.offset
    records = _directory(source, archive)
    pickles = [name for name in records if name.endswith("data.pkl") and name.count("/") <= 1]
    if len(pickles) != 1:
        _bad(path, f"the archive at byte {offset} has {len(pickles)} records data.pkl")
    folder = pickles[0].removesuffix("data.pkl")
    record = records[pickles[0]]
    if not record.crc:  # torch.serialization.set_crc32_options(False): then all are 0
        records = {name: replace(found, crc=None) for name, found in records.items()}
        record = records[pickles[0]]
    if record.nbytes > _PICKLE_LIMIT:
        _bad(path, f"the pickle has {record.nbytes} bytes, more than {_PICKLE_LIMIT}")
    order = records.get(f"{folder}byteorder")
    if order is not None and order.nbytes < 16 and source.read(order) != b"little":
        _bad(path, "the tensors are in big-endian order")
    text = source.read(record)
    if record.crc is not None and zlib.crc32(text) != record.crc:
        _bad(path, f"the record {pickles[0]} at byte {record.offset} differs from its CRC-32")
    inside = {
        name.removeprefix(f"{folder}data/"): found
        for name, found in records.items()
        if name.startswith(f"{folder}data/")
    }
    try:
        with errors_at(path):
            root = _Tensors(inside).resolved(read_pickle(text, _storage))
    except StateError:  # a TypeError too
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        _bad(path, f"the pickle at byte {record.offset} is {error}")
    return Archive(root, inside)


def open_legacy(source: SourceFiles, file: ArchiveRecord) -> Archive | None:
    """What a torch before 1.6 wrote; None: it did not. Such a file has no checksums.

    Raises:
        CorruptCheckpointError: it is damaged.
    """
    try:
        if read_pickle(source.read(file, 0, min(64, file.nbytes))) != _MAGIC:
            return None
    except ValueError:
        return None
    most = 1 << 20
    while True:  # nothing says how long the pickles are
        head = source.read(file, 0, min(most, file.nbytes))
        try:
            with errors_at(file.path):
                return _legacy(file, head)
        except StateError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            if most >= min(file.nbytes, _PICKLE_LIMIT):
                _bad(file.path, str(error))
            most *= 8


def _legacy(file: ArchiveRecord, head: bytes) -> Archive:
    stream = io.BytesIO(head)
    sizes: dict[str, int] = {}

    def stored(pid: Any) -> Any:
        if pid[0] == "module":  # the class of a module that was saved itself, with its source
            return pid[1]
        kind, named, key, _, numel, view = pid
        found = _storage((kind, named, key, None, numel))
        if view is not None or type(numel) is not int:
            raise ValueError("a storage that is a part of another one")
        sizes[key] = numel * DTYPES[found.dtype].itemsize
        return found

    _, protocol, system = (read_pickle(stream) for _ in range(3))
    if protocol != _PROTOCOL or not system["little_endian"]:
        raise ValueError("its storages are in big-endian order")
    root = read_pickle(stream, stored)
    keys = read_pickle(stream)
    records, at = {}, stream.tell()
    for key in keys:
        records[key] = file.part(at + 8, sizes[key])  # the count of elements stands before them
        at += 8 + sizes[key]
    return Archive(_Tensors(records).resolved(root), records)


def _bad(path: str, what: str) -> NoReturn:
    raise CorruptCheckpointError(
        f"this is no whole archive of torch.save: {what}",
        remedy="fetch the file again, or use another checkpoint",
        path=path,
    )


# -- the pickle: tensors ---------------------------------------------------------------------------


def _storage(pid: Any) -> _Storage:
    kind, storage, key, _, _ = pid
    if kind != "storage" or not isinstance(storage, Global) or not isinstance(key, str):
        raise ValueError("with an id that is no storage's")
    return _Storage(_STORAGES.get(storage.name, storage.name), key)


class _Tensors:
    """Puts `StoredTensor` in the place of the calls that make tensors, at any depth."""

    def __init__(self, records: Mapping[str, ArchiveRecord]) -> None:
        self._records = records
        self._done: dict[int, Any] = {}
        self._alive: list[Any] = []  # so that no identity is used again

    def resolved(self, value: Any) -> Any:
        """A container is changed in place, and once."""
        if isinstance(value, (list, dict)):
            if id(value) not in self._done:
                self._done[id(value)] = value
                self._alive.append(value)
                for key in value if isinstance(value, dict) else range(len(value)):
                    value[key] = self.resolved(value[key])
            return value
        if isinstance(value, tuple) and not isinstance(value, _Storage):
            if id(value) not in self._done:
                self._alive.append(value)
                self._done[id(value)] = tuple(map(self.resolved, value))
            return self._done[id(value)]
        if isinstance(value, Inert) and isinstance(value.of, Global):
            return self._object(value)
        return value

    def _object(self, value: Inert) -> Any:
        name = str(value.of)
        if name in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"):
            storage, start, shape, strides, *more = value.args
            own = more.pop(2).name if name.endswith("3") else storage.dtype
            views = more[2] if len(more) > 2 and isinstance(more[2], dict) else {}
            if lazy := [view for view, seen in views.items() if seen is True]:
                # torch.conj and a negation that are not carried out in the storage
                return Inert(
                    Global("torch", f"Tensor with lazy {' and '.join(map(str, lazy))}"), ()
                )
            return self._tensor(storage, own, start, shape, strides)
        if name in (
            "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state",
        ):  # fmt: skip
            return self.resolved(value.args[0])
        if name == "torch._tensor._rebuild_from_type_v2" and str(value.args[1]) in (
            "torch.Tensor", "torch.nn.parameter.Parameter",
        ):  # fmt: skip
            return self._object(Inert(value.args[0], value.args[2]))
        return value

    def _tensor(self, storage: Any, dtype: str, start: Any, shape: Any, strides: Any) -> Any:
        if not isinstance(storage, _Storage) or storage.key not in self._records:
            raise ValueError("of a tensor without a storage")
        if dtype not in DTYPES:
            return Inert(Global("torch", dtype), (shape,))
        record = self._records[storage.key]
        if len(shape) > MOST_DIMS or len(strides) > MOST_DIMS:
            raise ValueError(f"of a tensor of {len(shape)} dimensions")
        numbers = (start, *shape, *strides)
        if any(type(n) is not int or n < 0 for n in numbers) or len(shape) != len(strides):
            raise ValueError(f"of a tensor of the shape {shape} and the strides {strides}")
        extent = (
            0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        )
        if extent and (start + extent) * DTYPES[dtype].itemsize > record.nbytes:
            raise ValueError(
                f"of a tensor {dtype} {tuple(shape)}, but its storage has {record.nbytes} bytes"
            )
        return StoredTensor(dtype, tuple(shape), tuple(strides), start, record)


# -- the zip file ----------------------------------------------------------------------------------


def _directory(source: SourceFiles, archive: ArchiveRecord) -> dict[str, ArchiveRecord]:
    """The records, by name. Each one's local header says where its bytes begin."""
    path, headers = archive.path, HeadersFile(source, archive, _DIRECTORY, tail=_TAIL)
    try:
        with zipfile.ZipFile(cast(Any, headers)) as found:
            entries = {info.filename: info for info in found.infolist()}
            count = len(found.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as error:
        _bad(path, str(error))
    if len(entries) != count:
        _bad(path, "two records have one name")
    if any("/code/__torch__" in name for name in entries):
        raise UsageError(
            "this is a program of TorchScript, not a state dict",
            remedy="save torch.jit.load(file).state_dict()", path=path,
        )  # fmt: skip
    for name, info in entries.items():
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            _bad(path, f"its record {name!r} is compressed, or damaged")
        if not 0 <= info.header_offset <= archive.nbytes - _HEAD:
            _bad(path, f"its directory points to byte {info.header_offset} of {archive.nbytes}")
    heads = source.read_each(archive, [info.header_offset for info in entries.values()], _HEAD)
    records = {}
    for (name, info), head in zip(entries.items(), heads, strict=True):
        if head[:4] != _LOCAL:
            _bad(path, f"there is no record at byte {archive.offset + info.header_offset}")
        begin = info.header_offset + _HEAD + sum(struct.unpack("<HH", head[26:30]))
        records[name] = archive.part(begin, info.file_size, info.CRC)
    return records


def read_value(source: SourceFiles, record: ArchiveRecord, name: str) -> Any:
    """The value that `torch.save` wrote there.

    Raises:
        CorruptCheckpointError: it differs from its CRC-32.
        StateError: it has objects of classes that are not plain data.
    """
    data = source.read(record)
    where = f"the value {name} at byte {record.offset}"
    archive = is_archive(data) or data[-22:].startswith(b"PK\5\6")
    if archive and (damage := _damage(data)) is not None:
        _bad(record.path, f"{where}: {damage}")
    try:
        value = plain_load(io.BytesIO(data))
        refuse_endless(value)
        return value
    except Exception as error:  # torch, zip and pickle raise many kinds
        why = (str(error).splitlines() or [type(error).__name__])[0]
        if archive and isinstance(error, RuntimeError):  # of the reader of records
            _bad(record.path, f"{where}: {why}")
        raise StateError(
            f"the value {name} is not plain data: {why}",
            remedy="leave it out by name (ignore=), or save plain data: numbers, texts, arrays",
            path=record.path,
        ) from error


def _damage(data: bytes) -> str | None:
    """What is wrong with an archive: torch compares no record with the CRC-32 that it wrote."""
    try:
        file = io.BytesIO(data)
        refuse_inflating(file, len(data))
        with zipfile.ZipFile(file) as archive:
            files = archive.infolist()
            if any(one.external_attr & 0x10 for one in files):  # torch reads no pickle there
                return "a record is a directory"
            pickles = [one for one in files if one.filename.endswith("data.pkl")]
            # 0 in all: torch.serialization.set_crc32_options(False)
            damaged = archive.testzip() if any(one.CRC for one in pickles) else None
    except Exception as error:  # zipfile raises many kinds
        return f"{type(error).__name__}: {error}"
    return None if damaged is None else f"{damaged} differs from its CRC-32"


def _no_bytes() -> bytes:
    """b"", and the bytes of an array without elements, as protocol 2 of pickle writes them."""
    return b""


def plain_load(source: Any, **options: Any) -> Any:
    """`torch.load` of plain data and of NumPy's arrays. Anything else raises."""
    import torch

    with contextlib.ExitStack() as stack:
        file = source if isinstance(source, io.BytesIO) else stack.enter_context(open(source, "rb"))
        if is_archive(file.read(4)):
            refuse_inflating(file, file.seek(0, io.SEEK_END))
        file.seek(0)
    with plain_globals():
        return torch.load(source, map_location="cpu", weights_only=True, **options)


def plain_globals() -> Any:
    """Lets torch's restricted unpickler make what `plain_load` reads."""
    import numpy as np
    import torch

    # what NumPy's arrays and scalars are made with, under the names of NumPy 1 and 2
    core = "_core" if hasattr(np, "_core") else "core"
    multiarray = importlib.import_module(f"numpy.{core}.multiarray")
    kinds = {type(np.dtype(code)) for code in np.typecodes["All"] if code not in "OV"}
    made: list[Any] = [np.ndarray, np.dtype, *kinds]
    for name in ("_reconstruct", "scalar"):
        function = getattr(multiarray, name)
        made += [(function, f"numpy.{module}.multiarray.{name}") for module in ("core", "_core")]
    made.append((_no_bytes, "builtins.bytes"))
    return torch.serialization.safe_globals(made)
