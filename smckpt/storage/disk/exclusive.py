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
from smckpt.storage.disk.directory import Directory
from smckpt.storage.disk.linux import rename_exclusive

__all__ = ["GUARD_SUFFIX", "publish"]

GUARD_SUFFIX = ".guard"
_NO_LINK = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EXDEV)
_GUARD_WAIT = 5.0  # seconds; a holder needs one rename


def publish(directory: Directory, temporary: str, final: str) -> bool:
    """Move the durable file `temporary` to `final`, unless `final` exists. Both are names in a
    directory.

    Returns:
        True: `final` is now this file, and `temporary` may or may not remain. False: `final`
            existed before.

    Raises:
        StorageError: another process holds the guard, or died and left it.
        OSError: the file system refused.
    """
    linked = _link(directory, temporary, final)
    if linked is None:
        linked = rename_exclusive(directory.fd, temporary, final)
    return _rename_guarded(directory, temporary, final) if linked is None else linked


def _link(directory: Directory, temporary: str, final: str) -> bool | None:
    """True or False as `publish`; None if there are no hard links."""
    fd = directory.fd
    try:
        os.link(temporary, final, src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
    except FileExistsError:
        # NFS may repeat a request whose answer was lost. Then the existing name is our own.
        mine, theirs = directory.status(temporary), directory.status(final)
        return mine is not None and theirs is not None and os.path.samestat(mine, theirs)
    except OSError as error:
        if error.errno in _NO_LINK:
            return None
        raise
    return True


def _rename_guarded(directory: Directory, temporary: str, final: str) -> bool:
    guard = f".{final}{GUARD_SUFFIX}"
    deadline = time.monotonic() + _GUARD_WAIT
    while directory.status(final) is None:
        try:
            os.close(directory.create(guard))
        except FileExistsError:
            if time.monotonic() > deadline:
                raise _stuck(directory, guard, final) from None
            time.sleep(0.02)  # such mounts have no event to wait for
            continue
        try:
            if directory.status(final) is not None:
                return False
            directory.rename(temporary, final)
        finally:
            directory.remove(guard)
        return True
    return False


def _stuck(directory: Directory, guard: str, final: str) -> StorageError:
    return StorageError(
        "another process is creating this file, or died while it created it (this mount has "
        "neither hard links nor exclusive renames, so a guard file replaces them)",
        remedy=f"if no other job writes here, delete {os.path.join(directory.path, guard)}",
        path=os.path.join(directory.path, final),
    )
