"""Containers in a state, and values of classes that a checkpoint knows by their names.

A container is a dict, list, tuple or deque, a named tuple, or a dataclass or other object of a
class that `register_value_class` was called on. A member of an enum is such a value too. A
checkpoint records the name of the class and the parts. A load makes the value without an import and
without a call of its constructor: of a registered class, or of an enum in an imported module.

The last functions cut a state into leaves as torch DCP cuts it, and join them again.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from smckpt.errors import StateError
from smckpt.layout.entries import Path
from smckpt.registry import Registry

# The key of what is no tensor in a tensor that holds others, beside its parts.
FACTS = "__tensor__"

PLAIN_DICTS = (dict, OrderedDict, defaultdict)  # not those of a class of the user's

FACTORIES: dict[str, Any] = {
    "": None,
    **{kind.__name__: kind for kind in (dict, list, set, tuple, int, float, str, bool)},
    **{kind.__name__: kind for kind in (OrderedDict, Counter, deque, complex, bytes, frozenset)},
}

_CLASSES: Registry[type] = Registry("class of values", type, "smckpt.value_classes", {})


def register_value_class(kind: type) -> None:
    """Let saves and loads make values of this class: an enum, a dataclass, a named tuple, or a
    class whose objects are their attributes alone. Register it before the save and before the load.

    Raises:
        UsageError: another class has this name.
    """
    _CLASSES.register(class_name(kind), kind)


def class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def class_of_name(name: str) -> type | None:
    """The registered class of that name, or the enum of that name in a module that is imported."""
    return _CLASSES.find(name) or _imported_enum(name)


def _imported_enum(name: str) -> type | None:
    words = name.split(".")
    for count in range(len(words) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(words[:count]))
        if found is not None:
            for word in words[count:]:  # `getattr` might import
                found = getattr(found, "__dict__", {}).get(word)
            return found if isinstance(found, type) and issubclass(found, enum.Enum) else None
    return None


def named_class(value: Any) -> str | None:
    """The form in which a checkpoint stores this value by the name of its class: "enum", "named" (a
    named tuple), "data" (the attributes of an object of a registered class); None for any other
    value."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        return "enum"
    if isinstance(value, tuple):
        return "named" if hasattr(kind, "_fields") and kind.__module__ != "torch" else None
    if isinstance(value, (dict, list, type)):
        return None
    opaque = not hasattr(value, "__dict__") and not dataclasses.is_dataclass(value)
    return None if opaque or class_of_name(class_name(kind)) is not kind else "data"


def items_of(value: Any) -> list[tuple[Any, Any]] | None:
    """The children of a container with their keys; None for another value, such as a torch.Size."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)) or type(value) is deque:
        return None if type(value).__module__ == "torch" else list(enumerate(value))
    if named_class(value) != "data":
        return None
    names = [field.name for field in dataclasses.fields(value)] if _is_data(value) else []
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return list({**found, **getattr(value, "__dict__", {})}.items())


def like(value: Any, items: Mapping[Any, Any]) -> Any:
    """A container of the kind of `value` with these children."""
    if isinstance(value, OrderedDict):
        return OrderedDict(items)
    if isinstance(value, Counter):
        return Counter(items)
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory, items)
    if isinstance(value, Mapping):
        return dict(items)
    ordered = items.values()
    if isinstance(value, deque):
        return deque(ordered, value.maxlen)
    if isinstance(value, list):
        return list(ordered)
    if isinstance(value, tuple):
        named = hasattr(value, "_fields")
        return _built("named", type(value), items) if named else type(value)(ordered)
    return _built("data", type(value), items)


def renewed(value: Any, items: Mapping[Any, Any]) -> Any:
    """The container with these values for some of its keys: itself if it can change, else one like
    it."""
    if isinstance(value, (MutableMapping, list)) or type(value) is deque:
        for key, child in items.items():
            value[key] = child
        return value
    if named_class(value) == "data":
        try:
            for key, child in items.items():
                setattr(value, key, child)
            return value
        except AttributeError:  # a frozen one
            pass
    return like(value, {**dict(items_of(value) or ()), **items})


def lacking_keys(wanted: Any, saved: Any, at: str) -> Iterator[str]:
    """Names in a dict that is wanted, and in dicts in it, that the saved dict there lacks."""
    if type(wanted) not in PLAIN_DICTS or not isinstance(saved, dict):
        return
    for key, value in wanted.items():
        if key in saved:
            yield from lacking_keys(value, saved[key], f"{at}.{key}")
        else:
            yield f"{at}.{key}"


def _is_data(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


# -- kinds, by the names that a checkpoint records ------------------------------------------------


def container_kind(value: Any) -> str | None:
    """ "list", "tuple", "ordered", "defaultdict:<default factory>", "deque:<its bound>",
    "named:<class>" or "data:<class>"; None for a dict. "keys:" stands before the kind of a dict
    some of whose keys are neither text nor whole numbers, and have their text in a path."""
    kind: str | None = None
    if (form := named_class(value)) in ("named", "data"):
        return f"{form}:{class_name(type(value))}"
    if isinstance(value, list):
        return "list"
    if isinstance(value, tuple):
        return "tuple"
    if type(value) is deque:
        return f"deque:{'' if value.maxlen is None else value.maxlen}"
    if isinstance(value, OrderedDict):
        kind = "ordered"
    if type(value) is Counter:
        kind = "counter"
    if isinstance(value, defaultdict):
        name = getattr(value.default_factory, "__name__", "")
        known = name in FACTORIES and FACTORIES[name] is value.default_factory
        kind = f"defaultdict:{name}" if known else None
    if isinstance(value, dict) and any(type(key) not in (str, int) for key in value):
        return f"keys:{kind or ''}"
    return kind


def is_made(value: Any) -> bool:
    """Whether `made` gives a container of its class."""
    kind = type(value)
    if kind in (dict, list, tuple, deque, OrderedDict, Counter):
        return True
    if kind is defaultdict:
        return container_kind(value) is not None
    return named_class(value) == "data" or kind.__module__.split(".")[0] == "smckpt"


def in_sequence(keys: list[Any], kind: str | None) -> str:
    """The kind of a dict in which a value stands before a tensor, with its keys in order. A reader
    finds tensors first."""
    return f"sequence:{json.dumps(keys)}{kind or ''}"


def object_kind(kind: type, inner: str | None = None) -> str:
    """The kind of what an object inside another one's state gave, before the kind of its dict."""
    return f"object:{class_name(kind)}/{inner or ''}"


def object_in(kind: str | None) -> str | None:
    """The name of the class in an `object_kind`."""
    form, _, what = (kind or "").partition(":")
    return what.partition("/")[0] if form == "object" else None


def of_object(kind: str | None) -> tuple[str, str]:
    """A kind in two: the words of `object_kind`, if there are any, and the kind behind them."""
    behind = kind or ""
    if object_in(kind) is not None:
        behind = behind.partition("/")[2]
    return (kind or "").removesuffix(behind) if behind else kind or "", behind


def is_closed(kind: str | None) -> bool:
    """Whether it is the kind of a container that one rank has as a whole, so that another rank's
    keys are not of it: a list, tuple, deque or `Counter`, or the attributes of an object."""
    form, _, what = of_object(kind)[1].removeprefix("keys:").partition(":")
    if form == "sequence":
        return is_closed(what[json.JSONDecoder().raw_decode(what)[1] :])
    return form in ("list", "tuple", "deque", "named", "data", "counter")


def is_extra_state(key: Any) -> bool:
    """Whether torch gives the value of this key to a module's `set_extra_state`."""
    return isinstance(key, str) and key.endswith("_extra_state")


def text_of_key(key: Any) -> Any:
    """A dict's key in a path: text and whole numbers as they are, any other plain value as Python
    writes it.

    Raises:
        ValueError: a load could not tell the key from this text.
    """
    if type(key) is int or (type(key) is str and _key(key) is key):
        return key
    text = repr(key)
    if type(key) not in (tuple, float, bool, bytes, type(None)) or _key(text) != key:
        raise ValueError(text)
    return text


def made(kind: str | None, items: Mapping[Any, Any]) -> Any:
    """A container of a recorded kind. One of an unknown class is a tuple or a dict."""
    form, _, what = (kind or "").partition(":")
    if form == "sequence":
        keys, end = json.JSONDecoder().raw_decode(what)
        at = {key: number for number, key in enumerate(keys)}
        pairs = sorted(items.items(), key=lambda pair: at.get(pair[0], len(at)))
        return made(what[end:] or None, dict(pairs))
    if form == "object":
        return made(what.partition("/")[2] or None, items)
    if form == "keys":
        return made(what or None, {_key(key): child for key, child in items.items()})
    if form in ("list", "tuple", "deque", "named"):
        ordered = [items[key] for key in sorted(items)]
        if form == "deque":
            return deque(ordered, int(what) if what else None)
        if form == "named" and (found := class_of_name(what)) is not None:
            return _built("named", found, dict(enumerate(ordered)))
        return ordered if form == "list" else tuple(ordered)
    if form == "ordered":
        return OrderedDict(items)
    if form == "counter":
        return Counter(items)
    if form == "defaultdict":
        return defaultdict(FACTORIES[what], items)
    if form == "data" and (found := class_of_name(what)) is not None:
        return _built("data", found, items)
    return items


def _key(text: Any) -> Any:
    """The inverse of `text_of_key`, in a dict in which no text reads as another key."""
    if not isinstance(text, str) or text[:1] not in "(-0123456789NTFb":
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return text if type(value) in (str, int) else value


def kind_with(form: str, dims: tuple[int, ...]) -> str:
    """The kind of an array whose dimensions lie in another order in memory: "order:1,0", or
    "ndarray:1,0"; or of one in which all elements along these dimensions are one: "expanded:0".
    What a tensor is to autograd follows a semicolon: "order:1,0;grad", ";gradparameter"; and
    "whole" if a mesh divided its parameter, but not the tensor, or "@0,-1" if it held a tensor of
    FULL state otherwise."""
    return f"{form}:" + ",".join(map(str, dims))


def is_array(kind: str | None) -> bool:
    """Whether it is the kind of an array of NumPy."""
    return of_object(kind)[1].partition(":")[0] == "ndarray"


def dims_in(kind: str | None, *forms: str) -> tuple[int, ...] | None:
    """The inverse of `kind_with`; None for a kind of another form."""
    name, _, dims = of_object(kind)[1].partition(";")[0].partition(":")
    numbers = dims.split(",")
    if name not in forms or not all(number.isdecimal() for number in numbers):
        return None
    found = tuple(map(int, numbers))
    if name != "expanded" and sorted(found) != list(range(len(found))):
        return None
    return found


# -- values of classes by name --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)  # it may stand in a set
class Unmade:
    """A saved value of a class that is not registered. form: as in `named_class`. parts: of an
    enum's member the name or value; otherwise [[name, value], …] in order."""

    form: str
    name: str
    parts: Any


def made_again(value: Any, where: str | None = None) -> Any:
    """A value with those in it made whose classes are registered by now.

    Args:
        where: its key, if the class must be registered; None: a member becomes its name, a named
            tuple a tuple, and an object a dict.

    Raises:
        StateError: no class of that name is registered, or it has other fields.
    """
    if isinstance(value, (set, frozenset)):
        members = [(member, made_again(member, where)) for member in value]
        same = all(new is member for member, new in members)
        return value if same else type(value)(new for _, new in members)
    if isinstance(value, Unmade):
        parts = made_again(value.parts, where)
        kind = class_of_name(value.name)
        if kind is None and where is None:
            if value.form == "enum":
                return parts if isinstance(parts, str) else parts[0]
            fields = dict(map(tuple, parts))
            return tuple(fields.values()) if value.form == "named" else fields
        if kind is None:
            raise StateError(
                f"{where} is a {value.name}, which no load may make: it is not registered",
                remedy="call smckpt.state_dict.register_value_class on the class first; the module "
                "of an enum may be imported instead",
            )
        return value_of(value.form, kind, parts)
    items = items_of(value) if not isinstance(value, (str, int, float, bytes)) else None
    if items is not None:
        new = [(made_again(k, where), made_again(v, where)) for k, v in items]
        if any(a is not c or b is not d for (a, b), (c, d) in zip(new, items, strict=True)):
            return like(value, dict(new))
    return value


def value_of(form: str, kind: type, parts: Any) -> Any:
    """
    Raises:
        StateError: the class is of another form, or has other fields.
    """
    if form != "enum":
        return _built(form, kind, dict(map(tuple, parts)))
    try:
        if not issubclass(kind, enum.Enum):
            raise ValueError("it is no enum")
        return kind[parts] if isinstance(parts, str) else kind(parts[0])
    except (KeyError, ValueError, TypeError) as error:
        raise _other(kind, f"no member {parts!r}") from error


def parts_of_value(value: Any) -> Any:
    """The parts of a value that `named_class` names, for `value_of`."""
    if isinstance(value, enum.Enum):
        named = type(value).__members__.get(value.name or "") is value
        return value.name if named else [value.value]
    if isinstance(value, tuple):
        return [list(pair) for pair in zip(type(value)._fields, value, strict=True)]  # type: ignore[attr-defined]
    return [list(pair) for pair in items_of(value) or ()]


def _built(form: str, kind: Any, items: Mapping[Any, Any]) -> Any:
    """A named tuple or an object, without a call of its constructor."""
    if form == "named":
        fields = getattr(kind, "_fields", None)
        names = [key for key in items if isinstance(key, str)]
        if fields is None or len(fields) != len(items) or (names and names != list(fields)):
            raise _other(kind, f"other fields than {names or len(items)}")
        return tuple.__new__(kind, items.values())
    is_data = dataclasses.is_dataclass(kind)
    fields = {field.name for field in dataclasses.fields(kind)} if is_data else set()
    try:
        value = object.__new__(kind)
        if lacking := sorted(name for name in fields - items.keys() if not hasattr(value, name)):
            raise AttributeError(f"no {lacking} was saved")
        for name, part in items.items():
            object.__setattr__(value, name, part)
    except (AttributeError, TypeError) as error:
        raise _other(kind, f"other attributes than {sorted(items)}: {error}") from error
    return value


def _other(kind: type, what: str) -> StateError:
    return StateError(
        f"{class_name(kind)} has {what}",
        remedy="give the class what it had when it was saved, or leave the value out of the target",
    )


def flattened(
    path: Path, value: Any, tensor: type | tuple[type, ...]
) -> Iterator[tuple[Path, Any]]:
    """The leaves of `value` as DCP flattens it: through mappings, and lists that have mappings or
    tensors, at any depth. A tuple is a leaf.

    Args:
        tensor: the class of tensors, or of what stands for them.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flattened((*path, str(key)), inner, tensor)
    elif isinstance(value, list) and not _is_leaf(value, tensor):
        for index, inner in enumerate(value):
            yield from flattened((*path, index), inner, tensor)
    else:
        yield path, value


def _is_leaf(value: Any, tensor: type | tuple[type, ...]) -> bool:
    if isinstance(value, Mapping):
        return False
    if not isinstance(value, list):
        return True
    return not any(
        isinstance(v, tensor) or (isinstance(v, (Mapping, list)) and not _is_leaf(v, tensor))
        for v in value
    )


def joined(values: Mapping[Path, Any], tensors: Iterable[Path]) -> list[tuple[Path, Any]]:
    """The largest subtrees of the state dict without a tensor, joined from DCP's leaves."""
    root: dict[Any, Any] = {}
    leaf = object()  # marks a value: dicts may be values too
    for path, value in values.items():
        node = root
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    above = {path[:depth] for path in tensors for depth in range(len(path) + 1)} | {()}

    def built(node: dict[Any, Any]) -> Any:
        if leaf in node:
            return node[leaf]
        if all(isinstance(part, int) for part in node):
            return [built(node[index]) for index in sorted(node)]
        return {part: built(inner) for part, inner in node.items()}

    def walk(path: Path, node: dict[Any, Any]) -> Iterator[tuple[Path, Any]]:
        for part, inner in node.items():
            here = (*path, part)
            if here in above and leaf not in inner:
                yield from walk(here, inner)
            else:
                yield here, built(inner)

    return list(walk((), root))
