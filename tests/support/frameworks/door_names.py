"""What a door of `smckpt run` changes, against what it says: refuse a version, tell, take back.

As a script, for an environment of its own: the arguments are doors.
"""

from __future__ import annotations

import sys
import warnings
from types import ModuleType
from typing import Any

from smckpt.errors import UsageError
from smckpt.integrations import TESTED
from smckpt.run import provide
from smckpt.run.doors import DOORS

PACKAGES = (
    "torch", "transformers", "accelerate", "lightning", "nemo", "nvidia_resiliency_ext",
    "torchtune", "torchtitan", "fsspec", "amzn_sagemaker_checkpointing",
)  # fmt: skip


def names() -> dict[str, Any]:
    """All modules of those packages, what is in them, and what is in their classes."""
    found: dict[str, Any] = {}

    def add(path: str, value: Any) -> None:
        found[path] = value
        own = isinstance(value, type) and f"{value.__module__}.{value.__qualname__}" == path
        for name, inner in list(vars(value).items()) if own else ():
            add(f"{path}.{name}", inner)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are deprecated
        for path, module in list(sys.modules.items()):
            if path.partition(".")[0] in PACKAGES and isinstance(module, ModuleType):
                found[path] = module
                for name, value in list(vars(module).items()):
                    add(f"{path}.{name}", value)
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    absent = object()
    return {
        path
        for path in before.keys() | after.keys()
        if before.get(path, absent) is not after.get(path, absent)
    }


def check(door: str) -> None:
    provide([door]).undo()  # what the door needs is imported from here on
    before = names()
    package = DOORS[door][0]
    tested, TESTED[package] = TESTED[package], ("0.0",)
    try:
        provide([door])
        raise AssertionError(f"{door} takes a version that was not tested")
    except UsageError as error:
        assert "was not tested; 0.0 was" in str(error) and "--force" in str(error), error
        assert not changed(before, names()), door
        provide([door], force=True).undo()
    finally:
        TESTED[package] = tested
    with provide([door]) as provided:
        told = [line.split(": ")[0].split(" ")[1:] for line in provided.lines]
        new = changed(before, names())
    assert not changed(before, names()), (door, "has left", changed(before, names()))
    # "the strategy 'fsdp'" is an entry of Lightning's registry, and no name
    said = {words[0] for words in told if len(words) == 1}
    assert len(said) == len([words for words in told if len(words) == 1]), told
    for name in said:
        assert any(path == name or path.startswith(f"{name}.") for path in new), (door, name)
    for path in new:
        assert any(path == name or path.startswith(f"{name}.") for name in said), (door, path)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        check(each)
