"""Finds things by name: built in, registered in this process, or from an installed package.

A package declares a thing as an entry point with the thing's name. Entry points are read only for a
name that is not built in and not registered; and by `refuse_taken`.

A room calls one above it by what that one registers here: readers of other systems' checkpoints,
the translator of live models, and torch DCP's planners.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from smckpt.errors import UsageError

if TYPE_CHECKING:
    from importlib import metadata

__all__ = [
    "BACKENDS",
    "READERS",
    "TRANSLATORS",
    "Backend",
    "LiveTranslator",
    "Reader",
    "Registry",
    "register_reader",
]

T = TypeVar("T")


class Registry(Generic[T]):
    """Things of one kind by name.

    Args:
        word: the word for such a thing in errors.
        kind: its class; an entry point of another class is refused.
        group: the group of entry points.
        built_in: things that are always there and cannot be replaced.
    """

    def __init__(self, word: str, kind: type[T], group: str, built_in: Mapping[str, T]) -> None:
        self._word = word
        self._kind = kind
        self._group = group
        self._built_in = dict(built_in)
        self._registered: dict[str, T] = {}

    def register(self, name: str, thing: T) -> None:
        """Register a thing for the life of the process. To register an equal one again is allowed.

        Raises:
            UsageError: another thing has this name, or this one is of another class.
        """
        self._check(name, thing)
        known = self._built_in.get(name, self._registered.get(name, thing))
        if known != thing or name in self._built_in:
            raise UsageError(
                f"the {self._word} {name!r} exists already", remedy="give yours another name"
            )
        self._registered[name] = thing

    def find(self, name: str) -> T | None:
        """The thing of that name, or None.

        Raises:
            UsageError: an installed package declares one that cannot be used.
        """
        found = self._built_in.get(name, self._registered.get(name))
        return self._brought({name}).get(name) if found is None else found

    def __getitem__(self, name: str) -> T:
        """The thing of that name, which the package itself registers."""
        found = self.find(name)
        assert found is not None
        return found

    def refuse_taken(self, name: str) -> None:
        """
        Raises:
            UsageError: the thing of that name is built in, and an installed package declares one
                too, which `find` passes over.
        """
        for point in self._points if name in self._built_in else ():
            if point.name == name:
                package = f"the package {point.dist.name}" if point.dist else "a package"
                raise UsageError(
                    f"the {self._word} {name!r} is built in, and {package} brings another one "
                    f"({point.value})",
                    remedy="give that one another name, or uninstall the package",
                )

    def all(self) -> dict[str, T]:
        """Every thing by its name: built in, then registered, then from packages."""
        known = {**self._built_in, **self._registered}
        return known | self._brought(self.names - known.keys())

    @property
    def registered(self) -> Mapping[str, T]:
        """The things that were registered in this process."""
        return self._registered

    @property
    def names(self) -> set[str]:
        """Every name that `find` knows. No package is imported."""
        return {*self._built_in, *self._registered, *(point.name for point in self._points)}

    @cached_property
    def _points(self) -> tuple[metadata.EntryPoint, ...]:
        """The entry points of installed packages, read once: to read them takes milliseconds."""
        # it imports many modules, and `smckpt ls` need not wait for them
        from importlib import metadata

        return tuple(metadata.entry_points(group=self._group))

    def _brought(self, names: set[str]) -> dict[str, T]:
        out: dict[str, T] = {}
        for point in self._points if names else ():
            if point.name in names and point.name not in out:
                out[point.name] = self._loaded(point)
        return out

    def _loaded(self, point: metadata.EntryPoint) -> T:
        try:
            thing = point.load()
        except Exception as error:  # importing a package may raise anything
            raise UsageError(
                f"the {self._word} {point.name!r} ({point.value}) cannot be imported: {error}",
                remedy="repair or uninstall the package that brings it",
            ) from error
        self._check(point.name, thing)
        return thing  # type: ignore[no-any-return]

    def _check(self, name: str, thing: object) -> None:
        if not isinstance(thing, self._kind):
            raise UsageError(
                f"the {self._word} {name!r} is a {type(thing).__name__}",
                remedy=f"give a {self._kind.__name__}",
            )


@dataclass(frozen=True)
class Reader:
    """A reader of checkpoints of other systems.

    Args:
        open: gives the `Catalogue` of what other systems wrote in a directory or file, whose
            `Storage` it gets, or None where it knows nothing there. It raises UsageError for what
            it knows and cannot read as one state, and CorruptCheckpointError for what is damaged.
    """

    open: Callable[[Any], Any]


@dataclass(frozen=True)
class LiveTranslator:
    """What makes the full state of a live, tensor-parallel model.

    Args:
        recognises: whether some names of parameters are those of a tensor-parallel layout.
        full_state: as `smckpt.full.parallel.full_state`.
    """

    recognises: Callable[[Collection[str]], bool]
    full_state: Callable[..., dict[str, Any] | None]


@dataclass(frozen=True)
class Backend:
    """Saves and loads that another library plans, with its planners, readers and writers.

    Args:
        save: begins a save; gets the runtime, the group, and what `async_save` got. It gives the
            handle.
        load: fills a state dict; gets the runtime, and what `load` got. It gives the state dict.
    """

    save: Callable[..., Any]
    load: Callable[..., Any]


READERS = Registry("reader of checkpoints", Reader, "smckpt.readers", {})
TRANSLATORS = Registry("translator of live models", LiveTranslator, "smckpt.live_translators", {})
BACKENDS = Registry("backend of saves and loads", Backend, "smckpt.backends", {})


def register_reader(name: str, reader: Reader) -> None:
    """Register a reader for the life of the process. Readers are asked in the order of their
    registration, and those of installed packages (entry points of the group `smckpt.readers`) last.

    Raises:
        UsageError: another reader has this name.
    """
    READERS.register(name, reader)
