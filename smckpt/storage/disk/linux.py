"""System calls that Python does not offer. Each one says so if this system lacks it, instead of
failing."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import sys

_RENAME_NOREPLACE = 1
_OPENAT2 = {"x86_64": 437, "aarch64": 437}  # the number of the system call
_NO_LINKS_BENEATH = 0x04 | 0x08  # RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH of linux/openat2.h
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_ONE_PROCESS, _CLASS_SHIFT = 1, 13  # linux/ioprio.h
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM)

_ENDS_WITH_US = """
import ctypes, os, sys
_, parent, *command = sys.argv
if sys.platform.startswith("linux"):
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: it outlives the exec
    os.getppid() == int(parent) or os._exit(1)
os.execvp(command[0], command)
"""


def ends_with_us() -> tuple[str, ...]:
    """What stands before a command of others that is to end with the calling thread, also where
    that is killed. A function that runs between fork and exec would do, were there no threads."""
    return sys.executable, "-I", "-S", "-c", _ENDS_WITH_US, str(os.getpid())


def fallocate(fd: int, size: int) -> bool:
    """Reserve `size` bytes for the file, so that a full disk is found before anything is written.

    `os.posix_fallocate` is not used: if the file system cannot reserve, glibc writes a byte to
    every block.

    Returns:
        True: the space is reserved and the file has that size. False: the file system cannot
            reserve.

    Raises:
        OSError: no space, quota, file too large.
    """
    if size == 0 or not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "fallocate64", None) or libc.fallocate  # musl has only the second name
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while call(fd, 0, 0, size):
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


def open_beneath(fd: int, path: str, flags: int) -> int | None:
    """Open a path below a directory in one call, while no part of it is a link (openat2, Linux
    5.6).

    Returns:
        the descriptor. None: this system cannot, or the call failed. To open one name after the
        other tells why.
    """
    number = _OPENAT2.get(platform.machine())
    if number is None or not sys.platform.startswith("linux"):
        return None
    how = (ctypes.c_uint64 * 3)(flags, 0, _NO_LINKS_BENEATH)  # flags, mode, resolve
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    text = ctypes.c_char_p(os.fsencode(path))
    size = ctypes.c_size_t(ctypes.sizeof(how))
    found: int = call(ctypes.c_long(number), ctypes.c_int(fd), text, ctypes.byref(how), size)
    return found if found >= 0 else None


def rename_exclusive(fd: int, source: str, target: str) -> bool | None:
    """Rename in the directory `fd`, unless `target` exists, in one step (renameat2 with
    RENAME_NOREPLACE).

    Returns:
        True: renamed. False: `target` exists. None: the file system or kernel has no such call.

    Raises:
        OSError: anything else.
    """
    if not sys.platform.startswith("linux"):
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:  # glibc before 2.28
        return None
    call.argtypes = (
        ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint,
    )  # fmt: skip
    old, new = os.fsencode(source), os.fsencode(target)
    if call(fd, old, fd, new, _RENAME_NOREPLACE) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EEXIST:
        return False
    if code in _UNSUPPORTED:
        return None
    raise OSError(code, os.strerror(code), target)


def lower_priority(niceness: int | None, io_class: int | None) -> None:
    """Let this process yield the processor and the disk to training.

    Refusals (a container forbids it) leave the priority as it is.

    Args:
        niceness: at least this much; it is never made less.
        io_class: 2 is normal, 3 is idle.
    """
    if niceness is not None and (more := niceness - os.nice(0)) > 0:
        with contextlib.suppress(OSError):
            os.nice(more)
    number = _IOPRIO_SET.get(platform.machine())
    if io_class is not None and number is not None and sys.platform.startswith("linux"):
        ctypes.CDLL(None).syscall(number, _ONE_PROCESS, 0, io_class << _CLASS_SHIFT)
