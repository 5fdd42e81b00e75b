"""The one decoder of records and messages, by the annotations of their dataclasses.

msgspec compares each value with the annotation of its field, bounds and patterns included. Then it
makes the dataclass, whose `__post_init__` checks what no annotation says.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, TypeVar, cast

import msgspec

T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Checksum = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]  # CRC-64, in hex

# What code raises that takes a malformed value for a right one.
SENSELESS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


def decode(kind: type[T], data: Any, *, newer: bool = False) -> T:
    """The value of type `kind` that `data`, read from JSON, describes. Dataclasses that are made
    already stay as they are.

    Args:
        newer: ignore fields that `kind` lacks. A file may have some, if a newer version wrote it. A
            message has none, because all processes of a job run one version.

    Raises:
        ValueError: the data does not describe one; it names the field and both types.
    """
    try:
        _prepare(cast(Hashable, kind))
        made = msgspec.convert(data, kind, str_keys=True)
    except SENSELESS as error:
        raise ValueError(str(error) or type(error).__name__) from error
    if not newer:
        _refuse_unknown(made, data)
    return made


_PREPARING = threading.Lock()


@cache
def _prepare(kind: Hashable) -> None:
    """Let msgspec read the annotations of a type, one thread at a time. It keeps what it makes of
    a dataclass on the class before that is filled: 0.22 crashes where a second thread uses it."""
    with _PREPARING, suppress(msgspec.ValidationError):
        msgspec.convert(None, cast(Any, kind))


def _refuse_unknown(made: Any, data: Any) -> None:
    if made is data or not isinstance(data, (dict, list, tuple)):
        return
    if isinstance(data, dict):
        known = made if isinstance(made, dict) else vars(made)  # which lacks defaults
        named = {str(key): value for key, value in known.items()}
        if unknown := sorted(data.keys() - named.keys()):
            raise ValueError(f"a {type(made).__name__} has no field {unknown[0]!r}")
        pairs = [(named[key], data[key]) for key in data]
    else:
        pairs = [] if isinstance(made, frozenset) else list(zip(made, data, strict=True))
    for value, raw in pairs:
        _refuse_unknown(value, raw)
