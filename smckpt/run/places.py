"""Provides or replaces names of other packages, and undoes it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from smckpt.errors import UsageError
from smckpt.integrations.versions import ANY_VERSION, refuse_version

__all__ = ["DOORS", "Provided", "provide", "refuse_shadow", "refuse_version"]

# A name for `--for` → "module:function" that puts the door in place.
_NAMES = (
    "sagemaker",
    "transformers",
    "accelerate",
    "lightning",
    "nemo",
    "torchtune",
    "torchtitan",
    "nvrx",
    "dcp",
)
DOORS = {name: f"smckpt.run.doors.{name}:put" for name in _NAMES}
# torch.sagemaker is absent, so providing it replaces nothing. Other doors replace names, and are
# used only on request.
_BY_DEFAULT = ("sagemaker",)

_ABSENT = object()


class Provided:
    """The changes of `provide`; `undo()`, or the end of a `with` block, undoes them.

    lines: one for each name, for people.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._back: list[Callable[[], None]] = []

    def module(self, name: str, module: ModuleType) -> None:
        """Make `import name` return this module.

        Raises:
            UsageError: there is a module of that name already.
        """
        if name in sys.modules:
            raise UsageError(
                f"{name} is imported already", remedy="undo() the earlier provide() first"
            )
        sys.modules[name] = module
        self._back.append(lambda: _forget(name, module))
        above, _, last = name.rpartition(".")
        if above and getattr(sys.modules[above], last, None) is not module:
            self._set(sys.modules[above], last, module)
        self.lines.append(f"provided {name}")

    def attribute(self, owner: Any, name: str, value: Any, what: str) -> None:
        """Replace one name of a module or class.

        Args:
            what: a text that says what the replacement does and the original does not.
        """
        self._set(owner, name, value)
        where = owner.__name__
        if isinstance(owner, type):
            where = f"{owner.__module__}.{owner.__qualname__}"
        self.lines.append(f"replaced {where}.{name}: {what}")

    def environment(self, name: str, value: str) -> None:
        """Set a variable of the environment, for child processes too."""
        before = os.environ.get(name)
        os.environ[name] = value

        def back() -> None:
            os.environ.pop(name, None)
            if before is not None:
                os.environ[name] = before

        self._back.append(back)

    def by(self, undo: Callable[[], None], *lines: str) -> None:
        """Add changes that other code made, with the function that undoes them."""
        self._back.append(undo)
        self.lines += lines

    def undo(self) -> None:
        """Undo all changes, the last one first. A second call does nothing."""
        while self._back:
            self._back.pop()()

    def __enter__(self) -> Provided:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def _set(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner).get(name, _ABSENT)  # for a class, the descriptor itself
        setattr(owner, name, value)

        def back() -> None:
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._back.append(back)


def provide(
    doors: Sequence[str] | None = None, *, force: bool = False, shadow: bool = False
) -> Provided:
    """Provide smckpt under other packages' names in this process. A module that has already
    imported a name keeps the original.

    Args:
        doors: names as for `smckpt run --for`; None provides sagemaker.
        force: also with versions of packages that were not tested.
        shadow: also where the real package is installed.

    Raises:
        UsageError: a door is unknown; or a version is untested and `force` is not set; or the real
            package is installed and `shadow` is not set; or the door's framework is not installed.
            Nothing is changed then.
    """
    chosen = list(_BY_DEFAULT if doors is None else doors)
    for name in chosen:
        if name not in DOORS:
            raise UsageError(f"{name!r} is not a door", remedy=f"the doors are {', '.join(DOORS)}")
    provided = Provided()
    try:
        if force:
            provided.environment(ANY_VERSION, "1")  # for the integrations' own check
        for name in chosen:
            module, _, function = DOORS[name].partition(":")
            put = getattr(importlib.import_module(module), function)
            try:
                put(provided, force=force, shadow=shadow)
            except ModuleNotFoundError as error:
                raise UsageError(
                    f"the door to {name} needs {error.name}, which is not installed here",
                    remedy=f"install it, or leave {name} out of --for",
                ) from error
    except BaseException:
        provided.undo()
        raise
    return provided


def refuse_shadow(name: str, shadow: bool) -> None:
    """
    Raises:
        UsageError: the real package is installed, and `shadow` is not set.
    """
    try:
        found = name in sys.modules or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is absent
        found = False
    if found and not shadow:
        raise UsageError(
            f"{name} is installed or provided here already",
            remedy="leave it out of --for, or pass --shadow (shadow=True) to use smckpt in "
            "its place",
        )


def _forget(name: str, module: ModuleType) -> None:
    if sys.modules.get(name) is module:
        del sys.modules[name]
