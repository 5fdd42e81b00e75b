"""Give a finished file its name only if the name is free. File systems differ in how that is done.

`link` works everywhere except on FAT and some FUSE mounts. `renameat2(RENAME_NOREPLACE)` works on
most of those. The last resort is a guard file, made with O_EXCL: its holder checks whether the name
is free and renames the file. In each case the name appears in one step, with the whole file behind
it.
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
        True: `final` is now this file, and `temporary` may or may not remain. False: `final`
            existed before.

    Raises:
        StorageError: another process holds the guard, or died and left it.
        OSError: the file system refused.
    """
    linked = _link(temporary, final)
    if linked is None:
        linked = rename_exclusive(temporary, final)
    return _rename_guarded(temporary, final) if linked is None else linked


def _link(temporary: str, final: str) -> bool | None:
    """True or False as `publish`; None if there are no hard links."""
    try:
        os.link(temporary, final)
    except FileExistsError:
        # NFS may repeat a request whose answer was lost. Then the existing name is our own.
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
            time.sleep(0.02)  # such mounts have no event to wait for
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
        "another process is creating this file, or died while it created it (this mount has "
        "neither hard links nor exclusive renames, so a guard file replaces them)",
        remedy=f"if no other job writes here, delete {guard}",
        path=final,
    )
