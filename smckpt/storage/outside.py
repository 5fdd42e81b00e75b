"""Stores that others wrote. Whatever their code raises is reported as a fault of that store, and so
is an answer of a wrong type."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from smckpt.errors import CheckpointError, CheckpointNotFoundError, StorageError
from smckpt.storage.faults import is_of_store

__all__ = ["guard", "guarded", "owner_of"]

# verb → what it returns
_RETURNS: Mapping[str, tuple[type, ...]] = {
    "size": (int,), "put_exclusive": (bool, int), "read": (bytes, bytearray, memoryview),
    "list": (Sequence,), "list_dirs": (Sequence,), "names": (Sequence,),
    "list_unfinished": (Sequence,),
}  # fmt: skip
_OF_STORES = (
    *_RETURNS, "create_file", "read_into", "delete", "delete_many", "put", "fetch", "try_out",
    "discard_unfinished", "stored_crc64", "remove_directory", "refuse_links", "join", "at", "close",
)  # fmt: skip
_OF_FILES = ("read_into", "size", "read", "fetch", "stored_crc64")  # of one file, by name
_OF_WRITERS = ("write_at", "finish", "abort")


def owner_of(call: Any) -> str:
    """The name of somebody's class or function in errors."""
    named = call if hasattr(call, "__qualname__") else getattr(call, "func", type(call))
    return f"{named.__module__}.{named.__qualname__}"


def _fault_of(
    error: BaseException, owner: str, action: str, path: str | None, *, of_file: bool = False
) -> CheckpointError:
    """The error for what the code of a store raised.

    Args:
        owner: names that code, such as "pkg.module.MyStore".
        of_file: whether it was about one file, so that FileNotFoundError says that it is missing.
    """
    kind = CheckpointNotFoundError if of_file and isinstance(error, FileNotFoundError) else None
    what = f"the store {owner} raised {type(error).__name__} in {action}: {error}"
    remedy = "this is an error of that store and not of smckpt: correct it there, or ask its author"
    if kind is not None:
        return kind(what, remedy=remedy, path=path)
    return StorageError(what, remedy=remedy, path=path, of_store=is_of_store(error))


def guarded(call: Callable[..., Any], owner: str, action: str, path: str) -> Callable[..., Any]:
    """A function of a store's, so that it raises errors of smckpt alone."""

    @functools.wraps(call)
    def guarding(*args: Any, **named: Any) -> Any:
        try:
            return call(*args, **named)
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:
            raise _fault_of(error, owner, action, path) from error

    return guarding


def guard(cls: type) -> None:
    """Guard the verbs that this class of a store, or of a writer, defines itself; smckpt's own
    classes classify their errors where they arise."""
    if cls.__module__.partition(".")[0] == "smckpt":
        return
    owner = owner_of(cls)
    for verb in (*_OF_STORES, *_OF_WRITERS):
        found = cls.__dict__.get(verb)
        if callable(found) and not getattr(found, "__isabstractmethod__", False):
            setattr(cls, verb, _verb(found, owner, verb))


def _verb(call: Callable[..., Any], owner: str, verb: str) -> Callable[..., Any]:
    wanted = _RETURNS.get(verb)

    @functools.wraps(call)
    def guarding(self: Any, *args: Any, **named: Any) -> Any:
        try:
            result = call(self, *args, **named)
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:
            path, of_file = _path_of(self, verb, args), verb in _OF_FILES
            raise _fault_of(error, owner, verb, path, of_file=of_file) from error
        if wanted is not None and not isinstance(result, wanted):
            raise StorageError(
                f"the store {owner} returned {str(result)[:80]!r} from {verb}, which is no "
                f"{wanted[0].__name__}",
                remedy="this is an error of that store and not of smckpt: correct it there",
                path=_path_of(self, verb, args),
            )
        if verb == "create_file":
            with contextlib.suppress(AttributeError):  # the errors of the writer name it
                result.path_of_errors = _path_of(self, verb, args)
        return result

    return guarding


def _path_of(self: Any, verb: str, args: Sequence[Any]) -> str | None:
    """The file, or the directory, that a call was about."""
    if verb in _OF_WRITERS:
        found = getattr(self, "path_of_errors", None)
        return found if isinstance(found, str) else None
    url = str(getattr(self, "url", ""))
    named = verb not in ("list", "names", "join", "at") and args and isinstance(args[0], str)
    return f"{url.rstrip('/')}/{args[0]}" if named else url or None
