"""Converts messages, which are frozen dataclasses, to JSON text and back.

A field is a JSON value, a message, or a tuple, a dict or an optional of these.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any

__all__ = ["from_json", "to_text"]


def to_text(message: Any) -> str:
    """A message, or JSON data with messages in it, as compact JSON."""
    return json.dumps(message, separators=(",", ":"), default=_fields)


def from_json(kind: Any, data: Any) -> Any:
    """The message of type `kind` that `data`, read from JSON, describes.

    Raises:
        TypeError, ValueError, KeyError, AttributeError: the data does not describe one.
    """
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        made: Any = kind
        return made(**{name: from_json(hints[name], value) for name, value in data.items()})
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return tuple(from_json(inner[0], value) for value in data)
    if origin is dict:
        return {inner[0](key): from_json(inner[1], value) for key, value in data.items()}
    if origin in (types.UnionType, typing.Union):
        return None if data is None else from_json(inner[0], data)
    return data


def _fields(message: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(message):
        raise TypeError(f"a {type(message).__name__} is not a message")
    return {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
