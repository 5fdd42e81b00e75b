"""Values that are not tensors: exact JSON if JSON can hold them, otherwise bytes of torch.save.

These are stored as {"~": tag, "v": …}, because JSON cannot hold them: tuples, sets, bytes, complex
numbers, non-finite floats, very large integers, dicts whose keys are not strings, paths, time
spans, BytesIO, argparse's Namespace, numpy scalars and arrays, torch dtypes and sizes. Anything
else is refused, unless it reads back with `weights_only=True`, for which its type may be allowed by
name. Nothing that is read is ever executed.
"""

from __future__ import annotations

import base64
import datetime
import io
import json
import math
import struct
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import IO, Any

from smckpt.errors import CheckpointError, CorruptCheckpointError, StateError
from smckpt.layout.containers import FACTORIES, container_kind

__all__ = ["decode_object", "encode_object", "refuse_inflating"]

_TAG = "~"
_PLAIN_INT = 1 << 63  # JSON parsers of other languages fail above it, Python's at 4,300 digits
_NAN = struct.pack("<d", float("nan"))
_NUMPY_KINDS = frozenset("biufcSUmM")  # numbers, text and times: never objects


def encode_object(value: Any, allow: Sequence[type] = (), path: str = "") -> Any:
    """A form of `value` for JSON, from which `decode_object` makes an equal value.

    Args:
        allow: types that may be stored with torch.save although they are not plain data. To read
            them back, `torch.serialization.add_safe_globals` is needed.
        path: where the value is in the state, for errors.

    Raises:
        StateError: the value, or something in it, cannot be stored safely; the message says where.
    """
    try:
        return _Encoder(allow).encode(value, path)
    except RecursionError as error:
        raise StateError(
            f"the value at {path or 'the top'} is nested too deeply",
            remedy="store it with less nesting, or as bytes",
        ) from error


class _Encoder:
    def __init__(self, allow: Sequence[type]) -> None:
        self._allow = tuple(allow)
        self._open: set[int] = set()  # the containers around the present value

    def encode(self, value: Any, path: str) -> Any:
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int:
            return value if abs(value) < _PLAIN_INT else _tagged("int", hex(value))
        if type(value) is float:
            return value if math.isfinite(value) else _tagged("float", _float_text(value))
        if type(value) is complex:
            return _tagged(
                "complex", [self.encode(value.real, path), self.encode(value.imag, path)]
            )
        if type(value) in (bytes, bytearray):
            return _tagged(type(value).__name__, base64.b64encode(value).decode())
        if isinstance(value, (list, dict, tuple, set, frozenset)):
            return self._container(value, path)
        return self._foreign(value, path)

    def _container(self, value: Any, path: str) -> Any:
        if id(value) in self._open:
            raise StateError(
                f"the {type(value).__name__} at {path or 'the top'} contains itself",
                remedy="store data without cycles",
            )
        self._open.add(id(value))
        try:
            kind = _known_kind(value)
            if kind is list:
                return self._items(value, path)
            if kind in (dict, OrderedDict):
                return self._dict(value, kind is dict, path)
            if type(value) is defaultdict and (factory := container_kind(value)) is not None:
                pairs = self._dict(value, False, path)["v"]
                return _tagged("defaultdict", [factory.partition(":")[2], pairs])
            if kind is tuple:
                return _tagged("tuple", self._items(value, path))
            if type(value).__module__ == "torch" and type(value).__name__ == "Size":
                return _tagged("torch.Size", list(value))
            if kind in (set, frozenset):
                # Sorted, so that equal sets give equal bytes.
                items = sorted(self._items(value, path), key=json.dumps)
                return _tagged(kind.__name__, items)
            return self._foreign(value, path)
        finally:
            self._open.discard(id(value))

    def _items(self, values: Iterable[Any], path: str) -> list[Any]:
        return [self.encode(item, f"{path}.{index}") for index, item in enumerate(values)]

    def _dict(self, value: dict[Any, Any], plain: bool, path: str) -> Any:
        if plain and _TAG not in value and all(type(key) is str for key in value):
            return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
        pairs = [
            [self.encode(key, f"a key of {path or 'the top'}"), self.encode(item, f"{path}.{key}")]
            for key, item in value.items()
        ]
        return _tagged("dict" if plain else "ordered", pairs)

    def _standard(self, value: Any, path: str) -> Any:
        """A value of a few more types of Python's library; None for any other."""
        if type(value) is type(Path()) or type(value) in (PurePosixPath, PureWindowsPath):
            kind = "Path" if isinstance(value, Path) else type(value).__name__
            return _tagged("path", [kind, str(value)])
        if type(value) is datetime.timedelta:
            return _tagged("timedelta", [value.days, value.seconds, value.microseconds])
        if type(value) is io.BytesIO:
            return _tagged("BytesIO", [base64.b64encode(value.getvalue()).decode(), value.tell()])
        if f"{type(value).__module__}.{type(value).__qualname__}" == "argparse.Namespace":
            return _tagged("Namespace", self.encode(vars(value), path))
        return None

    def _foreign(self, value: Any, path: str) -> Any:
        if (known := self._standard(value, path)) is not None:
            return known
        library = type(value).__module__.split(".")[0]
        if library == "numpy" and (encoded := _numpy(value)) is not None:
            return encoded
        if library == "torch" and type(value).__name__ in ("dtype", "device"):
            return _tagged(f"torch.{type(value).__name__}", str(value).removeprefix("torch."))
        return _tagged("torch.save", base64.b64encode(self._torch_bytes(value, path)).decode())

    def _torch_bytes(self, value: Any, path: str) -> bytes:
        import torch

        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            with torch.serialization.safe_globals(list(self._allow)):
                torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except Exception as error:  # pickling runs the object's own code, which may raise anything
            why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise StateError(
                f"the {kind} at {path or 'the top'} cannot be stored without carrying code: {why}",
                remedy="store plain data (its state_dict(), a dict, a list), or pass "
                "allow_objects=[its type] and torch.serialization.add_safe_globals on both sides",
            ) from error
        return buffer.getvalue()


def _known_kind(value: Any) -> type | None:
    """The container type as which `value` is stored; None for an unknown type."""
    kind = type(value)
    if kind in (list, dict, tuple, set, frozenset, OrderedDict):
        return kind
    if kind.__module__.split(".")[0] == "smckpt":  # the containers of our own state dicts
        return list if isinstance(value, list) else dict if isinstance(value, dict) else None
    return None


def _tagged(tag: str, value: Any) -> dict[str, Any]:
    return {_TAG: tag, "v": value}


def _float_text(value: float) -> str:
    """ "inf", "-inf", "nan", or, for a NaN with another sign or payload, its bytes in hex."""
    if math.isinf(value) or struct.pack("<d", value) == _NAN:
        return repr(value)
    return struct.pack("<d", value).hex()


def _numpy(value: Any) -> dict[str, Any] | None:
    import numpy

    if type(value) is not numpy.ndarray and not isinstance(value, numpy.generic):
        return None
    if value.dtype.kind not in _NUMPY_KINDS or value.dtype.metadata:
        return None
    data = [value.dtype.str, base64.b64encode(value.tobytes()).decode()]
    if isinstance(value, numpy.generic):
        return _tagged("numpy", data)
    return _tagged("ndarray", [*data, list(value.shape)])


# -- reading -----------------------------------------------------------------------------------


def decode_object(data: Any) -> Any:
    """The value that `encode_object` was given.

    Raises:
        CorruptCheckpointError: an unknown tag, or a value that does not fit its tag.
        StateError: torch.save wrote the value and its types are not allowed here, or torch is not
            installed.
    """
    try:
        return _decoded(data)
    except RecursionError as error:
        raise CorruptCheckpointError(
            "a value is nested too deeply", remedy="use an older checkpoint"
        ) from error


def _decoded(data: Any) -> Any:
    if isinstance(data, list):
        return [_decoded(item) for item in data]
    if not isinstance(data, dict):
        return data
    if _TAG not in data:
        return {key: _decoded(item) for key, item in data.items()}
    tag = data[_TAG]
    decoder = _DECODERS.get(tag) if isinstance(tag, str) else None
    if decoder is None:
        raise CorruptCheckpointError(
            f"a value has the unknown tag {tag!r}", remedy="read it with the smckpt that wrote it"
        )
    try:
        return decoder(data["v"])
    except (CheckpointError, RecursionError):
        raise
    except ImportError as error:
        raise StateError(
            f"a value with the tag {tag!r} needs a library that is not installed: {error}",
            remedy="install it",
        ) from error
    except Exception as error:  # numpy, torch or a constructor may raise anything for bad data
        raise CorruptCheckpointError(
            f"a value with the tag {tag!r} cannot be decoded: {type(error).__name__} {error}",
            remedy="use an older checkpoint",
        ) from error


def _pairs(data: Any) -> list[tuple[Any, Any]]:
    return [(_decoded(key), _decoded(item)) for key, item in data]


_PATHS: dict[str, type[PurePath]] = {
    "Path": Path,
    "PurePosixPath": PurePosixPath,
    "PureWindowsPath": PureWindowsPath,
}


def _decode_namespace(data: Any) -> Any:
    import argparse

    return argparse.Namespace(**_decoded(data))


def _decode_stream(data: Any) -> io.BytesIO:
    stream = io.BytesIO(base64.b64decode(data[0], validate=True))
    stream.seek(data[1])
    return stream


def _decode_float(text: str) -> float:
    if text in ("inf", "-inf", "nan"):
        return float(text)
    value: float = struct.unpack("<d", bytes.fromhex(text))[0]
    return value


def _decode_array(data: Any) -> Any:
    import numpy

    kind, text, shape = data
    dtype = numpy.dtype(kind)
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"numpy dtype {kind}")
    raw = base64.b64decode(text, validate=True)
    return numpy.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


def _decode_dtype(name: str) -> Any:
    import torch

    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype: {name}")
    return dtype


def _decode_size(data: Any) -> Any:
    import torch

    return torch.Size(data)


def _decode_device(text: str) -> Any:
    import torch

    return torch.device(text)


def _decode_torch(text: str) -> Any:
    import torch

    data = base64.b64decode(text, validate=True)
    refuse_inflating(io.BytesIO(data), len(data))
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:
        raise StateError(
            f"a stored object has a type that is not allowed: {str(error).splitlines()[0]}",
            remedy="call torch.serialization.add_safe_globals with its type before loading",
        ) from error


def refuse_inflating(file: IO[bytes], size: int) -> None:
    """Refuse an archive of `size` bytes that claims to hold more than that; it could fill the
    memory. torch.save does not compress.

    Raises:
        ValueError: it does.
        zipfile.BadZipFile: it is no archive.
    """
    with zipfile.ZipFile(file) as archive:
        inside = archive.infolist()
    packed = any(info.compress_type != zipfile.ZIP_STORED for info in inside)
    if packed or sum(info.file_size for info in inside) > size:
        raise ValueError("the archive is compressed, or claims to hold more than its own bytes")


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda v: int(v, 16),
    "float": _decode_float,
    "complex": lambda v: complex(_decoded(v[0]), _decoded(v[1])),
    "bytes": lambda v: base64.b64decode(v, validate=True),
    "bytearray": lambda v: bytearray(base64.b64decode(v, validate=True)),
    "tuple": lambda v: tuple(_decoded(item) for item in v),
    "set": lambda v: {_decoded(item) for item in v},
    "frozenset": lambda v: frozenset(_decoded(item) for item in v),
    "dict": lambda v: dict(_pairs(v)),
    "ordered": lambda v: OrderedDict(_pairs(v)),
    "defaultdict": lambda v: defaultdict(FACTORIES[v[0]], _pairs(v[1])),
    "path": lambda v: _PATHS[v[0]](v[1]),
    "timedelta": lambda v: datetime.timedelta(*v),
    "BytesIO": _decode_stream,
    "Namespace": _decode_namespace,
    "numpy": lambda v: _decode_array([*v, [1]])[0],
    "ndarray": _decode_array,
    "torch.dtype": _decode_dtype,
    "torch.Size": _decode_size,
    "torch.device": _decode_device,
    "torch.save": _decode_torch,
}
