"""What an operating system's error means to the user. This is the only place that classifies
them.

Whatever a store of somebody else's raises is reported as a fault of that store, and so is an answer
of a wrong type.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from smckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    UsageError,
)

Result = TypeVar("Result")

PAUSE = 1.0  # seconds until a read whose error may pass is tried again

_SAFE = "; committed checkpoints there are untouched"

# errno → (what happened, what to do)
_MEANING: dict[int, tuple[str, str]] = {
    errno.ENOSPC: (
        "the disk is full",
        "free space, delete old checkpoints, or save elsewhere" + _SAFE,
    ),
    errno.EDQUOT: (
        "the disk quota is used up",
        "raise the quota, delete old checkpoints, or save elsewhere" + _SAFE,
    ),
    errno.EFBIG: (
        "the file is larger than this file system or process may write",
        "raise the limit (ulimit -f), or set a smaller max_file_bytes",
    ),
    errno.EROFS: ("the file system is read-only", "mount it writable, or save elsewhere"),
    errno.EACCES: ("permission denied", "give this user access, or choose another directory"),
    errno.EPERM: ("not permitted", "give this user access, or choose another directory"),
    errno.ENOTDIR: (
        "the path is a file, or one of its parents is",
        "name a directory, or a path that does not exist yet",
    ),
    errno.EISDIR: ("the path is a directory", "name a file"),
    errno.EEXIST: (
        "the name exists already",
        "names are unique to an attempt: do two jobs write here with one session?",
    ),
    errno.ESTALE: (
        "the file or its file system is gone (stale handle)",
        "check whether the server replaced or deleted it, then try again",
    ),
    errno.ENOTCONN: ("the file system is not connected", "mount it again"),
    errno.ENODEV: ("the device is gone", "mount it again"),
    errno.EIO: ("the device reported an input/output error", "read the kernel's log (dmesg)"),
    errno.ETIMEDOUT: ("the file server did not answer", "check the server, then try again"),
    errno.ENAMETOOLONG: ("the path is too long", "choose a shorter directory"),
    errno.ELOOP: ("symbolic links form a loop", "repair the links"),
    errno.ENOSYS: ("this file system lacks the operation", "save to another file system"),
    errno.EOPNOTSUPP: ("this file system lacks the operation", "save to another file system"),
    errno.EMFILE: ("too many open files in this process", "raise the limit (ulimit -n)"),
    errno.ENFILE: ("too many open files on this host", "raise fs.file-max"),
}

# Errors of this process, or of the way to the whole store. Any other path would fail likewise.
_OF_STORE = frozenset(
    {
        errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOTCONN, errno.ENODEV,
        errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT,
        errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ESHUTDOWN,
    }
)  # fmt: skip
# Errors of one path that may be over a moment later: a client that its file server put out, a bus
# that was reset. The others (no rights, links in a circle) stay until somebody acts.
_MAY_PASS = (errno.EIO, errno.ESTALE, errno.EBUSY, errno.EINTR)


def may_pass(error: BaseException) -> bool:
    """Whether the same read may succeed a moment later. (A store of objects has tried again
    itself.)"""
    cause = error.__cause__ if isinstance(error, CheckpointError) else error
    return isinstance(cause, OSError) and cause.errno in _MAY_PASS


def twice(read: Callable[[], Result]) -> Result:
    """The result of `read`, which is called a second time where its error may pass."""
    try:
        return read()
    except StorageError as error:
        if not may_pass(error):
            raise
    time.sleep(PAUSE)
    return read()


def is_of_store(error: BaseException) -> bool:
    """See `StorageError.of_store`."""
    lost = isinstance(error, (ConnectionError, TimeoutError))
    return lost or (isinstance(error, OSError) and error.errno in _OF_STORE)


def storage_error(error: OSError, path: str, action: str) -> CheckpointError:
    """The error to raise when the attempt to `action` ("write", "list") at `path` failed with
    `error`."""
    if isinstance(error, CheckpointError):
        return error
    if error.errno == errno.ENOENT:
        return CheckpointNotFoundError(
            f"cannot {action}: there is no such file or directory",
            remedy="check the path; `smckpt ls` on its parent shows what is there",
            path=path,
        )
    what, remedy = _MEANING.get(
        error.errno or 0,
        (error.strerror or str(error), "check this path with the tools of the file system"),
    )
    of_store = is_of_store(error)
    return StorageError(f"cannot {action}: {what}", remedy=remedy, path=path, of_store=of_store)


@contextlib.contextmanager
def os_errors_at(path: str, action: str) -> Iterator[None]:
    """Raise `storage_error` for an OSError of the block; smckpt's own errors pass, since some are
    OSErrors."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise storage_error(error, path, action) from error


def temporary_error(error: OSError, action: str) -> CheckpointError:
    """The error to raise when the attempt to `action` in the temporary directory failed."""
    where = os.environ.get("TMPDIR", "the temporary directory")
    return storage_error(error, where, f"{action} in the temporary directory")


# -- what a store refuses of a file ------------------------------------------------------------


def refuse_outside(offset: int, nbytes: int, size: int, path: str) -> None:
    """Refuse a write outside a file of `size` bytes."""
    if offset < 0 or offset + nbytes > size:
        raise UsageError(
            f"cannot write bytes {offset} to {offset + nbytes} of a file of {size} bytes",
            remedy="write within the size that create_file was given",
            path=path,
        )


def refuse_incomplete(written: int, size: int, path: str) -> None:
    """Refuse to finish a file of `size` bytes if not exactly `size` bytes were written."""
    if written != size:
        raise StorageError(
            f"{written} of {size} bytes were written",
            remedy="this is a fault of smckpt: please report it",
            path=path,
        )


def refuse_size(size: int, path: str) -> None:
    """Refuse to begin a file of a negative size."""
    if size < 0:
        raise UsageError(f"a file of {size} bytes", remedy="pass a size >= 0", path=path)


def name_taken(path: str) -> StorageError:
    """The error for a name that must be free and is not."""
    return StorageError(
        "cannot create the file: the name exists already",
        remedy="names are unique to an attempt: do two jobs write here with one session?",
        path=path,
    )


def too_short(name: str, size: int, needed: int, path: str) -> CorruptCheckpointError:
    """The error for a file that ends at byte `size`."""
    return CorruptCheckpointError(
        f"{name} ends at byte {size}; {needed} were needed",
        remedy="the file was cut after it was written: use an older checkpoint",
        path=path,
    )


def replaced(path: str) -> CorruptCheckpointError:
    """The error for a file that is another one than at the first look."""
    return CorruptCheckpointError(
        "the file has changed since its reading began",
        remedy="read it when nothing writes to it any more", path=path,
    )  # fmt: skip


def too_long(name: str, size: int, most: int, path: str) -> CorruptCheckpointError:
    """The error for a file that is larger than `most`."""
    return CorruptCheckpointError(
        f"{name} has {size} bytes; it should have at most {most}",
        remedy="the file was changed after it was written: use an older checkpoint, and find out "
        "what changed it",
        path=path,
    )


def _is_count(value: Any) -> bool:
    is_whole = hasattr(type(value), "__index__") and not isinstance(value, bool)  # NumPy's too
    return is_whole and operator.index(value) >= 0


def _is_list(value: Any, of: Callable[[Any], bool]) -> bool:
    return (
        isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and all(map(of, value))
    )


def _are_names(value: Any) -> bool:
    return _is_list(value, lambda name: isinstance(name, str))


def _are_files(value: Any) -> bool:
    return _is_list(
        value,
        lambda file: (
            isinstance(getattr(file, "name", None), str) and _is_count(getattr(file, "size", None))
        ),
    )


def _has(*methods: str) -> Callable[[Any], bool]:
    return lambda value: all(callable(getattr(value, method, None)) for method in methods)


# verb → what it returns, and whether a value is that
_RETURNS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "size": ("number of bytes", _is_count),
    "put_exclusive": ("bool", lambda value: isinstance(value, int)),
    "read": ("bytes", lambda value: isinstance(value, (bytes, bytearray, memoryview))),
    "list": ("list of FileInfo", _are_files),
    "list_dirs": ("list of names", _are_names),
    "names": ("list of names", _are_names),
    "list_unfinished": ("list of names", _are_names),
    "create_file": ("FileWriter", _has("write_at", "finish", "abort")),
    "join": ("store", _has("read_into", "list")),
    "at": ("store", _has("read_into", "list")),
}
_OF_STORES = (
    *_RETURNS, "read_into", "delete", "delete_many", "put", "overwrite", "fetch", "try_out",
    "discard_unfinished", "stored_crc64", "sync", "remove_directory", "rename", "refuse_links",
    "close",
)  # fmt: skip
# What ends a process or a generator is not a store's. Anything else is, also what a loop of asyncio
# or a library of Rust raises below BaseException.
_NOT_OF_STORES = (CheckpointError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit)
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
    try:
        text = str(error)
    except Exception as failed:
        text = f"(its text raises {type(failed).__name__})"
    what = f"the store {owner} raised {type(error).__name__} in {action}: {text}"
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
        except _NOT_OF_STORES:
            raise
        except BaseException as error:
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
    what, is_that = _RETURNS.get(verb, ("", lambda value: True))

    @functools.wraps(call)
    def guarding(self: Any, *args: Any, **named: Any) -> Any:
        try:
            result = call(self, *args, **named)
            wrong = None if is_that(result) else repr(str(result)[:80])
        except _NOT_OF_STORES:
            raise
        except BaseException as error:
            path, of_file = _path_of(self, verb, args), verb in _OF_FILES
            raise _fault_of(error, owner, verb, path, of_file=of_file) from error
        if wrong is not None:
            raise StorageError(
                f"the store {owner} returned {wrong} from {verb}, which is no {what}",
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
