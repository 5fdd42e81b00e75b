"""Values that are no tensors: exact JSON where JSON can hold them, torch.save bytes where it must.

What JSON cannot hold stands as {"~": tag, "v": …}: tuples, sets, bytes, complex numbers, non-finite
floats, very large integers, dicts whose keys are not strings, numpy scalars and arrays, torch
dtypes and sizes. Anything else is refused, unless it reads back with `weights_only=True`, for which
its type may be allowed by name. Nothing that is read is ever executed.
"""

from __future__ import annotations

import base64
import io
import json
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from smckpt.errors import CheckpointError, CorruptCheckpointError, StateError

__all__ = ["decode_object", "encode_object"]

_TAG = "~"
_PLAIN_INT = 1 << 63  # beyond it other languages' JSON fails, and Python's at 4,300 digits
_NAN = struct.pack("<d", float("nan"))
_NUMPY_KINDS = frozenset("biufcSUmM")  # numbers, text and times: never objects


def encode_object(value: Any, allow: Sequence[type] = (), path: str = "") -> Any:
    """A JSON-able form of `value`, from which `decode_object` makes an equal one.

    Args:
        allow: types that may be stored with torch.save though they are no plain data; reading
            them back needs `torch.serialization.add_safe_globals`.
        path: where the value stands, for errors.

    Raises:
        StateError: the value, or something in it, cannot be stored safely; names where.
    """
    try:
        return _Encoder(allow).encode(value, path)
    except RecursionError as error:
        raise StateError(
            f"the value at {path or 'the top'} is nested too deeply",
            remedy="store it flatter, or as bytes",
        ) from error


class _Encoder:
    def __init__(self, allow: Sequence[type]) -> None:
        self._allow = tuple(allow)
        self._open: set[int] = set()  # the containers that we are in

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
            if kind is tuple:
                return _tagged("tuple", self._items(value, path))
            if type(value).__module__ == "torch" and type(value).__name__ == "Size":
                return _tagged("torch.Size", list(value))
            if kind in (set, frozenset):
                # In an order of their own: equal sets give equal bytes.
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

    def _foreign(self, value: Any, path: str) -> Any:
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
        except Exception as error:  # pickling runs the object's own code: anything may come
            why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise StateError(
                f"the {kind} at {path or 'the top'} cannot be stored without carrying code: {why}",
                remedy="store plain data (its state_dict(), a dict, a list), or pass "
                "allow_objects=[its type] and torch.serialization.add_safe_globals on both sides",
            ) from error
        return buffer.getvalue()


def _known_kind(value: Any) -> type | None:
    """The container type as which `value` is stored, None for a type that we do not know."""
    kind = type(value)
    if kind in (list, dict, tuple, set, frozenset, OrderedDict):
        return kind
    if kind.__module__.split(".")[0] == "smckpt":  # what our own state dicts are made of
        return list if isinstance(value, list) else dict if isinstance(value, dict) else None
    return None


def _tagged(tag: str, value: Any) -> dict[str, Any]:
    return {_TAG: tag, "v": value}


def _float_text(value: float) -> str:
    """ "inf", "-inf", "nan", or the bytes in hex of a NaN with another sign or payload."""
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
    """The value that `encode_object` took.

    Raises:
        CorruptCheckpointError: an unknown tag, or a value that does not fit its tag.
        StateError: a torch.save payload whose types are not allowed here.
    """
    if isinstance(data, list):
        return [decode_object(item) for item in data]
    if not isinstance(data, dict):
        return data
    if _TAG not in data:
        return {key: decode_object(item) for key, item in data.items()}
    tag = data[_TAG]
    decoder = _DECODERS.get(tag) if isinstance(tag, str) else None
    if decoder is None:
        raise CorruptCheckpointError(
            f"a value has the unknown tag {tag!r}", remedy="read it with the smckpt that wrote it"
        )
    try:
        return decoder(data["v"])
    except CheckpointError:
        raise
    except Exception as error:  # whatever numpy, torch or a constructor makes of bad data
        raise CorruptCheckpointError(
            f"a value of tag {tag!r} does not make sense: {type(error).__name__} {error}",
            remedy="use an older checkpoint",
        ) from error


def _pairs(data: Any) -> list[tuple[Any, Any]]:
    return [(decode_object(key), decode_object(item)) for key, item in data]


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

    try:
        return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    except Exception as error:
        raise StateError(
            f"a stored object may not be read: {str(error).splitlines()[0]}",
            remedy="call torch.serialization.add_safe_globals with its type before loading",
        ) from error


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda v: int(v, 16),
    "float": _decode_float,
    "complex": lambda v: complex(decode_object(v[0]), decode_object(v[1])),
    "bytes": lambda v: base64.b64decode(v, validate=True),
    "bytearray": lambda v: bytearray(base64.b64decode(v, validate=True)),
    "tuple": lambda v: tuple(decode_object(item) for item in v),
    "set": lambda v: {decode_object(item) for item in v},
    "frozenset": lambda v: frozenset(decode_object(item) for item in v),
    "dict": lambda v: dict(_pairs(v)),
    "ordered": lambda v: OrderedDict(_pairs(v)),
    "numpy": lambda v: _decode_array([*v, [1]])[0],
    "ndarray": _decode_array,
    "torch.dtype": _decode_dtype,
    "torch.Size": _decode_size,
    "torch.device": _decode_device,
    "torch.save": _decode_torch,
}
