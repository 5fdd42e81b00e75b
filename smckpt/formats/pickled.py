"""A pickle, read as data: nothing that it names is imported or called.

Objects of classes, and the results of functions, become `Inert`: what was named, the arguments and
the state. A few plain containers become themselves. Work and memory are bounded by the length of
the pickle.
"""

from __future__ import annotations

import pickletools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, BinaryIO

from smckpt.errors import StateError

_OBJECTS = 6_000_000  # containers and stand-ins; their memory is below a gigabyte
_KEY = 16  # scalars in a tuple that is a key: hashing deep tuples may take for ever
_WORD = 1 << 64  # a key that is a whole number is smaller: a long one is hashed anew each time
_KEY_BYTES = 64  # of texts that are keys, for each byte of the pickle: equal ones are compared
_AT_FIRST = 16 << 20  # bytes, however short the pickle is
_DEPTH = 200  # of containers one in another
_AGAIN = 4  # times that a walk meets each item of a container, beyond the first million
_COPIES = 4  # items of containers that are copied, for each byte of the pickle


@dataclass(frozen=True, slots=True)
class Global:
    """A class, a function or a constant, by its name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Inert:
    """In place of an object: what would have been called, and with what. It does nothing."""

    __slots__ = ("args", "items", "of", "state")

    def __init__(self, of: Any, args: Any) -> None:
        self.of = of
        self.args = args
        self.state: Any = None
        self.items: Any = None  # of a class that is a list or a dict

    def __repr__(self) -> str:
        return f"<{self.of}>"

    def field(self, name: str, default: Any = None) -> Any:
        """An attribute of the object."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


def read_pickle(data: bytes | BinaryIO, persistent: Callable[[Any], Any] | None = None) -> Any:
    """What the pickle describes.

    Args:
        data: the pickle, or a file from where it stands on; the file then stands behind it.
        persistent: what stands for an object that is not in the pickle, of its id.

    Raises:
        ValueError: it is damaged, or has what no pickle of plain objects has; says at which byte.
        StateError: it has no end, as `refuse_endless` says.
    """
    machine = _Machine(persistent or (lambda pid: Inert(Global("pickle", "persistent id"), pid)))
    at: int | None = 0
    try:
        for opcode, argument, offset in pickletools.genops(data):
            at, machine.at = offset, offset or 0
            if opcode.name == "STOP":
                refuse_endless(machine.stack[-1])
                return machine.stack.pop()
            handler = _HANDLERS.get(opcode.name)
            if handler is None:
                raise ValueError(f"it has the opcode {opcode.name}")
            handler(machine, argument)
    except StateError:  # a TypeError too
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"damaged at byte {at}: {error}") from error
    raise ValueError("it does not end")


def refuse_endless(root: Any) -> None:
    """
    Raises:
        StateError: a walk through containers, as code that knows a state dict takes it, would not
            end: one holds itself, or a few hold each other so often that there is no end of items.
    """
    weights: dict[int, int] = {}
    items = 0

    def weight(value: Any, depth: int) -> int:
        nonlocal items
        if not isinstance(value, (dict, list, tuple)):
            return 1
        if id(value) not in weights:
            if depth > _DEPTH:
                raise _endless(f"a container holds itself, or {_DEPTH} others one in another")
            items += len(value)
            inner = value.values() if isinstance(value, dict) else value
            weights[id(value)] = 1 + sum(weight(one, depth + 1) for one in inner)
        return weights[id(value)]

    if (walked := weight(root, 0)) > (1 << 20) + _AGAIN * items:
        raise _endless(f"{items} items are used again and again, as {walked}")


def _endless(what: str) -> StateError:
    return StateError(
        f"the saved state is nested without end: {what}",
        remedy="save it without what holds itself; if nobody saved it so, fetch the file again",
    )


class _Machine:
    def __init__(self, persistent: Callable[[Any], Any]) -> None:
        self.persistent = persistent
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # what lies under each mark
        self.memo: dict[int, Any] = {}
        self.made = 0
        self.at = 0  # the byte of the pickle
        self.keyed = 0  # bytes of keys
        self.copied = 0  # items

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def make(self, value: Any) -> None:
        self.count()
        self.stack.append(value)

    def count(self, objects: int = 1) -> None:
        self.made += objects
        if self.made > _OBJECTS:
            raise ValueError(f"more than {_OBJECTS} objects")

    def mark(self) -> None:
        self.count()
        self.below.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def keep(self, number: int | None = None) -> None:
        self.memo[len(self.memo) if number is None else number] = self.stack[-1]

    def own_items(self, kind: Callable[[], Any]) -> Any:
        """The last object, or the items of one whose class is a list or a dict."""
        target = self.stack[-1]
        if not isinstance(target, Inert):
            return target
        if target.items is None:
            target.items = kind()
        return target.items

    def extend(self, items: list[Any]) -> None:
        target = self.own_items(list)
        if not isinstance(target, list):
            raise ValueError(f"items are added to a {type(target).__name__}")
        target.extend(items)

    def update(self, items: list[Any]) -> None:
        target = self.own_items(dict)
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError(f"keys are set in a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[self.key(key)] = value

    def union(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], set):
            raise ValueError("members are added to what is no set")
        self.stack[-1].update(map(self.key, items))

    def key(self, key: Any) -> Any:
        """A key that is quick to hash and to compare."""
        parts = key if isinstance(key, tuple) else (key,)
        if len(parts) > _KEY or any(isinstance(part, (tuple, frozenset)) for part in parts):
            raise ValueError("a key is a long or nested tuple, or a set")
        if any(isinstance(part, int) and not -_WORD < part < _WORD for part in parts):
            raise ValueError("a key is a number of more than 64 bits")
        self.keyed += sum(len(part) for part in parts if isinstance(part, (str, bytes)))
        if self.keyed > _AT_FIRST + _KEY_BYTES * self.at:
            raise ValueError("long keys are used again and again")
        return key

    def named(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name is no text")
        self.make(Global(module, name))

    def call(self, named: Any, args: Any) -> None:
        if not isinstance(args, tuple):
            raise ValueError("arguments are no tuple")
        plain = _PLAIN.get(str(named)) if isinstance(named, Global) else None
        if plain is not None and args and hasattr(args[0], "__len__"):
            self.copied += len(args[0])  # each time that the memo names them
            if self.copied > _AT_FIRST // 4096 + _COPIES * self.at:
                raise ValueError("one container is copied again and again")
        self.make(Inert(named, args) if plain is None else plain(self, args))

    def build(self, state: Any) -> None:
        target = self.stack[-1]
        if isinstance(target, Inert):
            target.state = state
        elif not isinstance(target, dict):  # an OrderedDict has attributes
            raise ValueError(f"a {type(target).__name__} gets a state")


def _size(_: _Machine, args: Any) -> tuple[int, ...]:
    (sizes,) = args
    if not isinstance(sizes, (tuple, list)) or any(type(n) is not int for n in sizes):
        raise ValueError("a torch.Size is no sequence of integers")
    return tuple(sizes)


def _members(m: _Machine, args: Any) -> set[Any]:
    return set(map(m.key, *args))


def _counts(counted: Any) -> dict[Any, Any]:
    if not isinstance(counted, dict):
        raise ValueError("a Counter is made of what is no dict")
    return counted


def _bytes(text: Any, code: Any) -> bytes:
    """As protocol 2 has them."""
    if not isinstance(text, str) or code != "latin1":
        raise ValueError("bytes are made of what is no text")
    return text.encode("latin1")


_PLAIN: Mapping[str, Callable[[_Machine, Any], Any]] = MappingProxyType(
    {
        "collections.Counter": lambda m, args: Counter(*map(_counts, args)),
        "collections.OrderedDict": lambda m, args: {},
        "collections.defaultdict": lambda m, args: {},
        "torch.Size": _size,
        "_codecs.encode": lambda m, args: _bytes(*args),
        "builtins.set": _members,
        "__builtin__.set": _members,
    }
)


def _tuple(number: int) -> Callable[[_Machine, Any], None]:
    def run(m: _Machine, _: Any) -> None:
        if len(m.stack) < number:
            raise ValueError("too few items for a tuple")
        items = tuple(m.stack[-number:])
        del m.stack[-number:]
        m.make(items)

    return run


def _two(use: Callable[[_Machine, Any, Any], None]) -> Callable[[_Machine, Any], None]:
    def run(m: _Machine, _: Any) -> None:
        second = m.stack.pop()
        use(m, m.stack.pop(), second)

    return run


def _one(use: Callable[[_Machine, Any], None]) -> Callable[[_Machine, Any], None]:
    return lambda m, _: use(m, m.stack.pop())


def _with_keywords(m: _Machine, _: Any) -> None:
    keywords, args = m.stack.pop(), m.stack.pop()
    m.call(m.stack.pop(), args)
    if keywords and isinstance(m.stack[-1], Inert):
        m.stack[-1].state = keywords


_VALUES = (
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINSTRING", "SHORT_BINSTRING",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8",
)  # fmt: skip
_HANDLERS: Mapping[str, Callable[[_Machine, Any], None]] = MappingProxyType(
    {
        **dict.fromkeys(_VALUES, _Machine.push),
        **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.keep),
        **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda m, n: m.push(m.memo[n])),
        "PROTO": lambda m, _: None,
        "FRAME": lambda m, _: None,
        "MEMOIZE": lambda m, _: m.keep(),
        "NONE": lambda m, _: m.push(None),
        "NEWTRUE": lambda m, _: m.push(True),
        "NEWFALSE": lambda m, _: m.push(False),
        "MARK": lambda m, _: m.mark(),
        "POP": _one(lambda m, _: None),
        "POP_MARK": lambda m, _: m.since_mark().clear(),
        "EMPTY_LIST": lambda m, _: m.make([]),
        "EMPTY_DICT": lambda m, _: m.make({}),
        "EMPTY_SET": lambda m, _: m.make(set()),
        "EMPTY_TUPLE": lambda m, _: m.push(()),
        "TUPLE": lambda m, _: m.make(tuple(m.since_mark())),
        "TUPLE1": _tuple(1),
        "TUPLE2": _tuple(2),
        "TUPLE3": _tuple(3),
        "FROZENSET": lambda m, _: m.make(frozenset(map(m.key, m.since_mark()))),
        "APPEND": _one(lambda m, item: m.extend([item])),
        "APPENDS": lambda m, _: m.extend(m.since_mark()),
        "SETITEM": _two(lambda m, key, value: m.update([key, value])),
        "SETITEMS": lambda m, _: m.update(m.since_mark()),
        "ADDITEMS": lambda m, _: m.union(m.since_mark()),
        "GLOBAL": lambda m, text: m.named(*text.split(" ", 1)),
        "STACK_GLOBAL": _two(_Machine.named),
        "REDUCE": _two(_Machine.call),
        "NEWOBJ": _two(_Machine.call),
        "NEWOBJ_EX": _with_keywords,
        "BUILD": _one(_Machine.build),
        "BINPERSID": _one(lambda m, pid: m.make(m.persistent(pid))),
    }
)
