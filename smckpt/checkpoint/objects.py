"""Values that are no tensors: exact JSON where JSON can hold them, torch.save bytes where it must.

What JSON cannot hold stands as {"~": tag, "v": …}: tuples, sets, bytes, complex numbers, non-finite
floats, dicts whose keys are not strings, numpy scalars, torch dtypes and sizes. Anything else is
refused, unless its type was allowed by name or it reads back with `weights_only=True`. Nothing
that is read is ever executed.
"""

from __future__ import annotations

import base64
import io
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from smckpt.errors import CorruptCheckpointError, StateError

__all__ = ["decode_object", "encode_object"]

_TAG = "~"


def encode_object(value: Any, allow: Sequence[type] = (), path: str = "") -> Any:
    """A JSON-able form of `value`, from which `decode_object` makes an equal one.

    Args:
        allow: types that may be stored with torch.save though they are no plain data; reading
            them back needs `torch.serialization.add_safe_globals`.
        path: where the value stands, for errors.

    Raises:
        StateError: the value, or something in it, cannot be stored safely; names where.
    """
    if value is None or type(value) in (bool, str, int):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else _tagged("float", repr(value))
    if type(value) is list:
        return [encode_object(v, allow, f"{path}.{i}") for i, v in enumerate(value)]
    if type(value) in (dict, OrderedDict):
        return _encode_dict(value, allow, path)
    return _encode_other(value, allow, path)


def _tagged(tag: str, v: Any) -> dict[str, Any]:
    return {_TAG: tag, "v": v}


def _encode_dict(value: dict[Any, Any], allow: Sequence[type], path: str) -> Any:
    plain = type(value) is dict and _TAG not in value and all(type(k) is str for k in value)
    if plain:
        return {k: encode_object(v, allow, f"{path}.{k}") for k, v in value.items()}
    pairs = [
        [encode_object(k, allow, path), encode_object(v, allow, f"{path}.{k}")]
        for k, v in value.items()
    ]
    return _tagged("dict" if type(value) is dict else "ordered", pairs)


def _encode_other(value: Any, allow: Sequence[type], path: str) -> Any:
    if type(value) is tuple:
        return _tagged(
            "tuple", [encode_object(v, allow, f"{path}.{i}") for i, v in enumerate(value)]
        )
    if type(value) in (set, frozenset):
        items = [encode_object(v, allow, path) for v in value]
        return _tagged(type(value).__name__, items)
    if type(value) in (bytes, bytearray):
        return _tagged(type(value).__name__, base64.b64encode(value).decode())
    if type(value) is complex:
        return _tagged("complex", [repr(value.real), repr(value.imag)])
    kind = type(value).__module__.split(".")[0]
    if kind == "numpy" and _is_numpy_scalar(value):
        return _tagged("numpy", [value.dtype.str, base64.b64encode(value.tobytes()).decode()])
    if kind == "torch":
        name = type(value).__name__
        if name == "dtype":
            return _tagged("torch.dtype", str(value).removeprefix("torch."))
        if name == "Size":
            return _tagged("torch.Size", list(value))
        if name == "device":
            return _tagged("torch.device", str(value))
    if isinstance(value, list) and type(value).__module__.startswith("smckpt"):
        return encode_object(list(value), allow, path)
    if isinstance(value, dict) and type(value).__module__.startswith("smckpt"):
        return encode_object(dict(value), allow, path)
    return _encode_torch(value, allow, path)


def _is_numpy_scalar(value: Any) -> bool:
    import numpy

    return isinstance(value, numpy.generic) and value.dtype.kind in "biufc"


def _encode_torch(value: Any, allow: Sequence[type], path: str) -> Any:
    import torch

    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        data = buffer.getvalue()
        with torch.serialization.safe_globals(list(allow)):
            torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise StateError(
            f"the {kind} at {path or 'the top'} is no plain data: reading it back would run code",
            remedy="store plain data instead (its state_dict(), a dict, a list), or pass its type "
            "in allow_objects= and to torch.serialization.add_safe_globals before loading",
        ) from error
    return _tagged("torch.save", base64.b64encode(data).decode())


def decode_object(data: Any) -> Any:
    """The value that `encode_object` took.

    Raises:
        CorruptCheckpointError: an unknown tag.
        StateError: a torch.save payload whose types are not allowed here.
    """
    if isinstance(data, list):
        return [decode_object(v) for v in data]
    if not isinstance(data, dict):
        return data
    if _TAG not in data:
        return {k: decode_object(v) for k, v in data.items()}
    return _decode_tagged(data[_TAG], data["v"])


def _decode_tagged(tag: str, v: Any) -> Any:
    if tag == "float":
        return float(v)
    if tag == "dict":
        return {decode_object(k): decode_object(x) for k, x in v}
    if tag == "ordered":
        return OrderedDict((decode_object(k), decode_object(x)) for k, x in v)
    if tag in ("tuple", "set", "frozenset"):
        kinds: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}
        return kinds[tag](decode_object(x) for x in v)
    if tag == "bytes":
        return base64.b64decode(v)
    if tag == "bytearray":
        return bytearray(base64.b64decode(v))
    if tag == "complex":
        return complex(float(v[0]), float(v[1]))
    if tag == "numpy":
        import numpy

        return numpy.frombuffer(base64.b64decode(v[1]), dtype=numpy.dtype(v[0]))[0]
    if tag.startswith("torch."):
        return _decode_torch(tag, v)
    raise CorruptCheckpointError(
        f"a value has the unknown tag {tag!r}", remedy="read it with the smckpt that wrote it"
    )


def _decode_torch(tag: str, v: Any) -> Any:
    import torch

    if tag == "torch.dtype":
        return getattr(torch, v)
    if tag == "torch.Size":
        return torch.Size(v)
    if tag == "torch.device":
        return torch.device(v)
    try:
        return torch.load(io.BytesIO(base64.b64decode(v)), weights_only=True)
    except Exception as error:
        raise StateError(
            f"a stored object may not be read: {str(error).splitlines()[0]}",
            remedy="call torch.serialization.add_safe_globals with its type before loading",
        ) from error
