"""Giving a finished file its name only if nobody has it, on file systems that differ in how.

`link` does it everywhere but on FAT and some FUSE mounts; `renameat2(RENAME_NOREPLACE)` on most of
those; the last way is a guard file, made with O_EXCL, under which existence is checked and the file
renamed. In each the name appears in one step, with the whole file behind it.
"""

from __future__ import annotations

import errno
import os
import time

from smckpt.errors import StorageError
from smckpt.storage.linux import rename_exclusive

__all__ = ["GUARD_SUFFIX", "publish"]

GUARD_SUFFIX = ".guard"
_NO_LINK = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EXDEV)
_GUARD_WAIT = 5.0  # seconds; a holder needs one rename


def publish(temporary: str, final: str) -> bool:
    """Move the durable file `temporary` to `final`, unless `final` exists.

    Returns:
        True: `final` is now this file, and `temporary` may or may not remain. False: it exists.

    Raises:
        StorageError: another process holds, or left, the guard.
        OSError: the file system refused.
    """
    linked = _link(temporary, final)
    if linked is None:
        linked = rename_exclusive(temporary, final)
    return _rename_guarded(temporary, final) if linked is None else linked


def _link(temporary: str, final: str) -> bool | None:
    """True, False as `publish`; None where there are no hard links."""
    try:
        os.link(temporary, final)
    except FileExistsError:
        # NFS may repeat a request whose answer was lost: then the name that exists is our own.
        return os.path.samefile(temporary, final)
    except OSError as error:
        if error.errno in _NO_LINK:
            return None
        raise
    return True


def _rename_guarded(temporary: str, final: str) -> bool:
    directory, name = os.path.split(final)
    guard = os.path.join(directory, f".{name}{GUARD_SUFFIX}")
    deadline = time.monotonic() + _GUARD_WAIT
    while not os.path.lexists(final):
        try:
            os.close(os.open(guard, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
        except FileExistsError:
            if time.monotonic() > deadline:
                raise _stuck(guard, final) from None
            time.sleep(0.02)  # such mounts offer no event to wait for
            continue
        try:
            if os.path.lexists(final):
                return False
            os.rename(temporary, final)
        finally:
            os.unlink(guard)
        return True
    return False


def _stuck(guard: str, final: str) -> StorageError:
    return StorageError(
        "another process is creating this file, or died while it did (this mount has neither "
        "hard links nor exclusive renames, so a guard file stands in for them)",
        remedy=f"if no other job writes here, delete {guard}",
        path=final,
    )
