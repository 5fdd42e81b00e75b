"""A saved state, whole, whose tensors are read when they are written: what conversions write.

`torch.save` itself wants the whole state in memory, so its archive is written here as it streams: a
zip file of uncompressed records, `data.pkl`, which describes the state, and the bytes of each
tensor's storage.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np
import torch

from smckpt.checkpoint.reading.catalogue import Catalogue, LogicalTensor, nested, under_names
from smckpt.checkpoint.reading.plan import WholeTensors
from smckpt.checkpoint.reading.read import Meter, Progress
from smckpt.errors import StateError
from smckpt.layout.containers import dims_in, flattened, is_array, items_of, like, made_again
from smckpt.layout.entries import Path, dotted
from smckpt.layout.strided import Box

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
    """Stands in the state for tensor `number`, which has a storage of its own. kind: as it was
    recorded, of its order of memory, expanded dimensions, and what it is to autograd."""

    number: int
    dtype: str
    shape: tuple[int, ...]
    kind: str = ""

    @property
    def order(self) -> tuple[int, ...]:
        """Its dimensions, in the order of its memory."""
        usual = tuple(range(len(self.shape)))
        order = dims_in(self.kind, "order") or usual
        return order if len(order) == len(usual) else usual

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its shape in memory, where an expanded dimension has one element."""
        expanded = dims_in(self.kind, "expanded") or ()
        return tuple(1 if dim in expanded else size for dim, size in enumerate(self.shape))


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
        hooks: OrderedDict[Any, Any] = OrderedDict()
        kind, _, flags = obj.kind.partition(";")
        plain = replace(obj, kind=kind)
        if "parameter" in flags:
            return torch._utils._rebuild_parameter, (plain, "grad" in flags, hooks)
        count, strides = 1, [0] * len(obj.shape)
        for dim in reversed(obj.order):
            strides[dim] = count if obj.sizes[dim] == obj.shape[dim] else 0
            count *= max(obj.sizes[dim], 1)
        numel = 0 if 0 in obj.shape else count
        view = (0, obj.shape, tuple(strides), "grad" in flags, hooks)
        dtype: torch.dtype = getattr(torch, obj.dtype)
        rebuild: Any = torch._utils._rebuild_tensor_v2
        if obj.dtype in _STORAGES:
            made: tuple[Any, ...] = (_RawStorage(_STORAGES[obj.dtype], obj.number, numel), *view)
        else:
            rebuild = torch._utils._rebuild_tensor_v3
            raw = _RawStorage(torch.UntypedStorage, obj.number, numel * dtype.itemsize)
            made = raw, *view, dtype
        if "buffer" not in flags:
            return rebuild, made
        state = {"persistent": "unsaved" not in flags, "_is_buffer": True}
        return torch._tensor._rebuild_from_type_v2, (rebuild, torch.Tensor, made, state)


AT_ONCE = 64 << 20  # bytes of tensors in memory


class WholeState:
    """The state that rank `rank` would load without a target, under logical names. An optimizer's
    parameters have their names.

    tensors, values: those that are not left out, of the whole checkpoint.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        rank: int,
        threads: int,
        *,
        left_out: Callable[[str], bool],
        progress: Progress | None = None,
    ) -> None:
        """
        Args:
            left_out: whether the tensor or value of this name is left out.
        """
        self.catalogue, self.rank = catalogue, rank
        self._threads, self._left_out = threads, left_out
        self._reads = WholeTensors(catalogue, rank, threads)
        self.kinds = self._reads.me.kinds
        self.tensors = [one for one in self._reads.tensors if not left_out(one.name)]
        values = self._reads.me.values()
        self.values = self._named_values(
            {key: (path, made_again(value)) for key, (path, value) in values.items()}
        )
        self._meter = Meter(progress, sum(tensor.nbytes for tensor in self.tensors))

    def of_rank(self, rank: int) -> WholeState:
        """The state of another rank."""
        return WholeState(self.catalogue, rank, self._threads, left_out=self._left_out)

    def add_values(self, ranks: Iterable[int]) -> None:
        """Add the values of these ranks under names that are not here yet, below dicts too: each
        rank may have one of its own."""
        for rank in ranks:
            for path, value in self._named_values(self.catalogue.objects(rank)).items():
                self.values[path] = _joined(self.values.get(path, value), value)

    @property
    def keys(self) -> set[str]:
        """The first names of what was saved."""
        return {str(path[0]) for path in (*(one.path for one in self.tensors), *self.values)}

    def leaves(self, key: str | None = None, *, held: bool = False) -> dict[Path, Any]:
        """The values, and a placeholder for each tensor; of all, or what is below the first name
        `key`. Arrays of NumPy are in memory, because formats have them among the values.

        Args:
            held: whether the tensors themselves are wanted, in memory.
        """
        leaves: dict[Path, Any] = {}
        for number, tensor in enumerate(self.tensors):
            if key not in (None, tensor.path[0]):
                continue
            kind = (self.kinds or {}).get(tensor.path, "")
            if held or is_array(kind):
                leaves[tensor.path] = self._in_memory(tensor)
            else:
                leaves[tensor.path] = Placeholder(number, tensor.dtype, tensor.shape, kind)
        for path, value in self.values.items():
            if key in (None, path[0]):
                leaves.setdefault(path, value)
        return leaves

    def nested(self, key: str | None = None, *, held: bool = False) -> Any:
        """The state of those leaves, in its containers."""
        state = nested(self.catalogue, self.leaves(key, held=held), self.kinds)
        return state if key is None else state[key]

    def in_memory(self, key: str) -> Any:
        """What is under a first name, with its tensors."""
        return self.nested(key, held=True)

    def _in_memory(self, tensor: LogicalTensor) -> Any:
        """A tensor or array that formats have among the values."""
        if tensor.nbytes > AT_ONCE:
            raise StateError(
                f"{tensor.name} has {tensor.nbytes} bytes, and torch keeps it among the values",
                remedy="save it as a tensor, in no container but dicts and lists",
                path=self.catalogue.url,
            )
        import torch

        dtype: torch.dtype = getattr(torch, tensor.dtype)
        made = torch.empty(tensor.shape, dtype=dtype)
        if tensor.nbytes:
            data: Any = made.reshape(-1).view(torch.uint8).numpy()
            self.read(tensor, Box.whole(tensor.shape), memoryview(data))
        return made.numpy() if is_array((self.kinds or {}).get(tensor.path)) else made

    def read(self, tensor: LogicalTensor, box: Box, memory: memoryview) -> None:
        self._reads.read(tensor, box, memory)
        self._meter.add(len(memory))

    # -- writing -------------------------------------------------------------------------------

    def pieces(self, numbers: Iterable[int]) -> dict[int, Iterator[memoryview]]:
        """The bytes of these tensors, row-major. A piece is valid until the next one is taken."""
        chosen = {number: self.tensors[number] for number in numbers}
        size = min(AT_ONCE, max((one.nbytes for one in chosen.values()), default=0))
        buffer = memoryview(bytearray(size))

        def of(tensor: LogicalTensor) -> Iterator[memoryview]:
            for box in tensor.chunks(AT_ONCE) if tensor.nbytes else ():
                memory = buffer[: box.numel * tensor.itemsize]
                self.read(tensor, box, memory)
                yield memory

        return {number: of(tensor) for number, tensor in chosen.items()}

    def _in_order(self, leaf: Placeholder) -> Iterator[memoryview]:
        """The bytes of a tensor as its memory has them. They lie in another order in the files, so
        each piece is an eighth, or files would be read many times."""
        tensor, order = self.tensors[leaf.number], leaf.order
        first, sizes = order[0], leaf.sizes
        row = math.prod(sizes) // max(sizes[first], 1) * tensor.itemsize
        step = max(1, max(AT_ONCE, tensor.nbytes // 8) // max(row, 1))
        for start in range(0, sizes[first] if row else 0, step):
            several = min(step, sizes[first] - start)
            shape = tuple(several if dim == first else size for dim, size in enumerate(sizes))
            offsets = tuple(start if dim == first else 0 for dim in range(len(sizes)))
            memory = memoryview(bytearray(several * row))
            self.read(tensor, Box(offsets, shape), memory)
            array = np.frombuffer(memory, np.dtype((np.void, tensor.itemsize))).reshape(shape)
            yield memoryview(array.transpose(order).tobytes())
        self._meter.add(tensor.nbytes - math.prod(sizes) * tensor.itemsize)  # of what is expanded

    def write_torch(self, file: IO[bytes], state: Any) -> None:
        """Write a state that `nested` gave, or one made of it, as one file of `torch.save`."""

        held: list[Any] = []

        def placed(value: Any) -> Any:
            import torch

            if not isinstance(value, torch.Tensor):
                return value
            held.append(value)
            dtype = str(value.dtype).removeprefix("torch.")
            return Placeholder(len(self.tensors) + len(held) - 1, dtype, tuple(value.shape))

        state = _replaced(state, placed)
        leaves = {leaf.number: leaf for leaf in _leaves(state) if isinstance(leaf, Placeholder)}
        read = self.pieces(sorted(number for number in leaves if number < len(self.tensors)))
        for number, leaf in leaves.items():
            if leaf.sizes != leaf.shape or leaf.order != tuple(range(len(leaf.shape))):
                read[number] = self._in_order(leaf)
        kept = {len(self.tensors) + at: [bytes_of(one)] for at, one in enumerate(held)}
        write_archive(file, state, {**read, **kept})

    def write_dcp(self, directory: str, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Write a state as DCP flattens it. A tensor in what DCP takes for a value, such as a tuple
        or a deque, is read with it. Gives the names whose form is changed.

        Raises:
            StateError: two values would have one name.
        """
        import torch

        from smckpt.formats.conversion.new_target import write_dcp

        parts: dict[Path, LogicalTensor] = {}
        values: dict[Path, Any] = {}

        def read(value: Any) -> Any:
            if isinstance(value, Placeholder):
                return self._in_memory(self.tensors[value.number])
            return value

        names: set[str] = set()
        for path, leaf in flattened((), state, (Placeholder, torch.Tensor)):
            if (name := dotted(path)) in names:
                raise StateError(
                    f"two values of the state have the name {name} in DCP, which keeps one of them",
                    remedy="rename one: 'a.b' beside {'a': {'b': …}} cannot be told apart, nor 1 "
                    'from "1"; or leave them out: ignore=[…]',
                    path=self.catalogue.url,
                )
            names.add(name)
            if isinstance(leaf, Placeholder):
                parts[path] = self.tensors[leaf.number]
            else:
                values[path] = _replaced(leaf, read)
        write_dcp(directory, parts, values, self.read)
        return tuple(sorted(set(_changed((), state))))

    def _named_values(self, saved: Mapping[str, tuple[Path, Any]]) -> dict[Path, Any]:
        found: dict[Path, Any] = {}
        for path, value in saved.values():
            for dotted_path, named in under_names(self.catalogue.optimizers, path, value):
                if not self._left_out(dotted(dotted_path)):
                    found.setdefault(dotted_path, named)
        return found


def _joined(first: Any, other: Any) -> Any:
    if not (isinstance(first, dict) and isinstance(other, dict)):
        return first
    joined = first.copy()
    for key, value in other.items():
        joined[key] = _joined(first[key], value) if key in first else value
    return joined


def _replaced(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Nested containers with other leaves. What has none to replace stays itself."""
    if (items := items_of(value)) is None:
        return replace(value)
    new = {key: _replaced(inner, replace) for key, inner in items}
    return value if all(new[key] is inner for key, inner in items) else like(value, new)


def _leaves(value: Any) -> Iterator[Any]:
    if (items := items_of(value)) is None:
        yield value
    for _, inner in items or ():
        yield from _leaves(inner)


def _changed(path: Path, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if not value or any(type(key) is not str for key in value):
            yield dotted(path)
        for key, inner in value.items():
            yield from _changed((*path, str(key)), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _changed((*path, index), inner)
