"""Values that are not tensors: exact JSON if JSON can hold them, otherwise bytes of torch.save.

These are stored as {"~": tag, "v": …}, because JSON cannot hold them: tuples, sets, bytes, complex
numbers, non-finite floats, very large integers, dicts whose keys are not strings, deques, paths,
dates, times, time spans, ranges, slices, decimals, fractions, UUIDs, BytesIO, argparse's Namespace,
numpy scalars, arrays and dtypes, torch dtypes and sizes; and members of enums, named tuples and
dataclasses, by the names of their classes. Anything else is refused, unless it reads back with
`weights_only=True`, for which its type may be allowed by name. Nothing that is read is ever
executed.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import io
import json
import math
import struct
import zipfile
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from importlib import import_module
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import IO, Any
from uuid import UUID

from smckpt.errors import CheckpointError, CorruptCheckpointError, StateError
from smckpt.layout.containers import (
    FACTORIES,
    Unmade,
    class_name,
    class_of_name,
    container_kind,
    named_class,
    parts_of_value,
    value_of,
)

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
        if (form := named_class(value)) is not None and type(value) not in self._allow:
            name = class_name(type(value))
            if class_of_name(name) is type(value):
                return self._guarded(
                    value,
                    lambda: _tagged(form, [name, self._parts(parts_of_value(value), path)]),
                    path,
                )
        elif isinstance(value, (list, dict, tuple, set, frozenset, deque)):
            return self._guarded(value, lambda: self._container(value, path), path)
        return self._foreign(value, path)

    def _parts(self, parts: Any, path: str) -> Any:
        if isinstance(parts, str):
            return parts
        return [
            [part[0], self.encode(part[1], f"{path}.{part[0]}")]
            if isinstance(part, list) and len(part) == 2
            else self.encode(part, path)
            for part in parts
        ]

    def _guarded(self, value: Any, encode: Callable[[], Any], path: str) -> Any:
        if id(value) in self._open:
            raise StateError(
                f"the {type(value).__name__} at {path or 'the top'} contains itself",
                remedy="store data without cycles",
            )
        self._open.add(id(value))
        try:
            return encode()
        finally:
            self._open.discard(id(value))

    def _container(self, value: Any, path: str) -> Any:
        kind = _known_kind(value)
        if kind is list:
            return self._items(value, path)
        if kind in (dict, OrderedDict):
            return self._dict(value, kind is dict, path)
        if type(value) is defaultdict:
            named = container_kind(defaultdict(value.default_factory))
            if named is not None:
                pairs = self._dict(value, False, path)["v"]
                return _tagged("defaultdict", [named.partition(":")[2], pairs])
        if kind is tuple:
            return _tagged("tuple", self._items(value, path))
        if kind is deque:
            return _tagged("deque", [value.maxlen, self._items(value, path)])
        if type(value).__module__ == "torch" and type(value).__name__ == "Size":
            return _tagged("torch.Size", list(value))
        if kind in (set, frozenset):
            # Sorted, so that equal sets give equal bytes.
            items = sorted(self._items(value, path), key=json.dumps)
            return _tagged(kind.__name__, items)
        return self._foreign(value, path)

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
        """A value of a few more types of Python's library, of NumPy's or of torch's; any other as
        torch saves it."""
        if type(value) is type(Path()) or type(value) in (PurePosixPath, PureWindowsPath):
            kind = "Path" if isinstance(value, Path) else type(value).__name__
            return _tagged("path", [kind, str(value)])
        if type(value) in (datetime.datetime, datetime.time) and _zone(value.tzinfo) is not None:
            naive = value.replace(tzinfo=None, fold=0).isoformat()
            kind = type(value).__name__
            return _tagged("datetime", [kind, naive, value.fold, _zone(value.tzinfo)])
        if type(value) is datetime.date:
            return _tagged("datetime", ["date", value.isoformat()])
        if isinstance(value, datetime.tzinfo) and (zone := _zone(value)) is not None:
            return _tagged("datetime", ["tzinfo", zone])
        if type(value) is datetime.timedelta:
            return _tagged("timedelta", [value.days, value.seconds, value.microseconds])
        if type(value) is io.BytesIO:
            return _tagged("BytesIO", [base64.b64encode(value.getvalue()).decode(), value.tell()])
        for name, (kind, arguments, _) in _BY_ARGUMENTS.items():
            if type(value) is kind:
                return _tagged("called", [name, self._items(arguments(value), path)])
        if f"{type(value).__module__}.{type(value).__qualname__}" == "argparse.Namespace":
            return _tagged("Namespace", self.encode(vars(value), path))
        library = type(value).__module__.split(".")[0]
        if library == "numpy" and (encoded := _numpy(value)) is not None:
            return encoded
        if library == "torch" and type(value).__name__ in ("dtype", "device"):
            return _tagged(f"torch.{type(value).__name__}", str(value).removeprefix("torch."))
        if library == "torch" and type(value).__name__ == "Generator":
            state = value.get_state().numpy().tobytes()
            return _tagged("torch.Generator", [str(value.device), base64.b64encode(state).decode()])
        return _tagged("torch.save", base64.b64encode(self._torch_bytes(value, path)).decode())

    def _torch_bytes(self, value: Any, path: str) -> bytes:
        import torch

        buffer = io.BytesIO()
        if isinstance(value, torch.Tensor):  # a load may have no such device
            value = value.detach().cpu()
        try:
            torch.save(value, buffer)
            with torch.serialization.safe_globals(list(self._allow)):
                torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except Exception as error:  # pickling runs the object's own code, which may raise anything
            why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            remedy = "store plain data (its state_dict(), a dict, a list), or "
            if named_class(value) is not None or dataclasses.is_dataclass(value):
                why = "its class is not registered"
                remedy += "call smckpt.state_dict.register_value_class on its class on both sides"
            else:
                remedy += (
                    "pass SaveOptions(allow_objects=[its type]), and call "
                    "torch.serialization.add_safe_globals on both sides"
                )
            raise StateError(
                f"the {class_name(type(value))} at {path or 'the top'} cannot be stored without "
                f"carrying code: {why}",
                remedy=remedy,
            ) from error
        return buffer.getvalue()


# Types whose constructor makes an equal value from these arguments, and what those are: a Fraction
# of a text like "1e9999999999", or of such a Decimal, would compute for hours.
_BY_ARGUMENTS: dict[str, tuple[Any, Callable[[Any], Sequence[Any]], Sequence[type]]] = {
    "range": (range, lambda v: [v.start, v.stop, v.step], [int] * 3),
    "slice": (slice, lambda v: [v.start, v.stop, v.step], [object] * 3),
    "Decimal": (Decimal, lambda v: [str(v)], [str]),
    "Fraction": (Fraction, lambda v: [v.numerator, v.denominator], [int] * 2),
    "UUID": (UUID, lambda v: [str(v)], [str]),
    "Ellipsis": (type(...), lambda v: [], []),
}


def _known_kind(value: Any) -> type | None:
    """The container type as which `value` is stored; None for an unknown type."""
    kind = type(value)
    if kind in (list, dict, tuple, set, frozenset, OrderedDict, deque):
        return kind
    if kind.__module__.split(".")[0] == "smckpt":  # the containers of our own state dicts
        return list if isinstance(value, list) else dict if isinstance(value, dict) else None
    return None


def _zone(zone: Any) -> list[Any] | None:
    """A time zone; [] without one; None if it is of another class."""
    if zone is None:
        return []
    if type(zone) is datetime.timezone:
        span = zone.utcoffset(None)
        return ["offset", span.days, span.seconds, span.microseconds, zone.tzname(None)]
    key = getattr(zone, "key", None)
    known = class_name(type(zone)) == "zoneinfo.ZoneInfo" and isinstance(key, str)
    return ["zone", key] if known else None


def _tagged(tag: str, value: Any) -> dict[str, Any]:
    return {_TAG: tag, "v": value}


def _float_text(value: float) -> str:
    """ "inf", "-inf", "nan", or, for a NaN with another sign or payload, its bytes in hex."""
    if math.isinf(value) or struct.pack("<d", value) == _NAN:
        return repr(value)
    return struct.pack("<d", value).hex()


def _numpy(value: Any) -> dict[str, Any] | None:
    import numpy

    if isinstance(value, numpy.dtype) and value.kind in _NUMPY_KINDS and not value.metadata:
        return _tagged("numpy.dtype", value.str)
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


def _decode_stream(data: Any) -> io.BytesIO:
    stream = io.BytesIO(base64.b64decode(data[0], validate=True))
    stream.seek(data[1])
    return stream


def _decode_zone(zone: list[Any]) -> datetime.tzinfo | None:
    if not zone:
        return None
    if zone[0] == "zone":
        import zoneinfo

        return zoneinfo.ZoneInfo(zone[1])
    plain = datetime.timezone(datetime.timedelta(*zone[1:4]))
    named = datetime.timezone(datetime.timedelta(*zone[1:4]), zone[4])
    return plain if plain.tzname(None) == zone[4] else named


def _decode_datetime(data: Any) -> Any:
    kind, text = data[0], data[1]
    if kind == "tzinfo":
        return _decode_zone(text)
    if kind == "date":
        return datetime.date.fromisoformat(text)
    made: Any = {"datetime": datetime.datetime, "time": datetime.time}[kind]
    found = made.fromisoformat(text)
    return found.replace(tzinfo=_decode_zone(data[3]), fold=data[2])


def _decode_named(form: str, data: Any) -> Any:
    name, parts = data
    if not isinstance(name, str) or not isinstance(parts, (str, list)):
        raise ValueError(f"a {form} of {data!r}")
    parts = _decoded(parts)
    if form != "enum" and not all(isinstance(p, list) and type(p[0]) is str for p in parts):
        raise ValueError(f"a {form} of {parts!r}")
    kind = class_of_name(name)
    return Unmade(form, name, parts) if kind is None else value_of(form, kind, parts)


def _decode_float(text: str) -> float:
    if text in ("inf", "-inf", "nan"):
        return float(text)
    value: float = struct.unpack("<d", bytes.fromhex(text))[0]
    return value


def _decode_called(data: Any) -> Any:
    name, given = data
    kind, _, types = _BY_ARGUMENTS[name]
    arguments = _decoded(given)
    if len(arguments) != len(types) or not all(map(isinstance, arguments, types)):
        raise ValueError(f"a {name} of {arguments!r:.80}")
    return kind(*arguments)


def _decode_numpy_dtype(kind: Any) -> Any:
    import numpy

    dtype = numpy.dtype(str(kind))
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"numpy dtype {kind}")
    return dtype


def _decode_array(data: Any) -> Any:
    import numpy

    kind, text, shape = data
    dtype = _decode_numpy_dtype(kind)
    raw = base64.b64decode(text, validate=True)
    return numpy.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


def _decode_dtype(name: str) -> Any:
    import torch

    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype: {name}")
    return dtype


def _decode_generator(data: Any) -> Any:
    import torch

    device, text = torch.device(data[0]), base64.b64decode(data[1], validate=True)
    try:
        made = torch.Generator(device)
    except RuntimeError as error:
        raise StateError(
            f"a random generator was saved on the device {device}, which is not here: {error}",
            remedy="load it on such a device, or leave it out of the target",
        ) from error
    return made.set_state(torch.frombuffer(bytearray(text), dtype=torch.uint8))


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
    "deque": lambda v: deque((_decoded(item) for item in v[1]), v[0]),
    "enum": lambda v: _decode_named("enum", v),
    "named": lambda v: _decode_named("named", v),
    "data": lambda v: _decode_named("data", v),
    "datetime": _decode_datetime,
    "path": lambda v: _PATHS[v[0]](v[1]),
    "called": _decode_called,
    "timedelta": lambda v: datetime.timedelta(*v),
    "BytesIO": _decode_stream,
    "Namespace": lambda v: import_module("argparse").Namespace(**_decoded(v)),
    "numpy": lambda v: _decode_array([*v, [1]])[0],
    "ndarray": _decode_array,
    "numpy.dtype": _decode_numpy_dtype,
    "torch.dtype": _decode_dtype,
    "torch.Size": lambda v: import_module("torch").Size(v),
    "torch.device": lambda v: import_module("torch").device(v),
    "torch.Generator": _decode_generator,
    "torch.save": _decode_torch,
}
