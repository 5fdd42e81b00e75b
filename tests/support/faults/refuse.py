"""Make the kernel refuse system calls to this process and its children, with a seccomp filter.

For tests of file systems that lack an operation: the refusal is the kernel's own, no fake stands
between the code under test and the call. A filter cannot be taken back: use it in a child process.
"""

from __future__ import annotations

import ctypes
import platform
import struct

_NUMBERS = {
    "x86_64": (
        0xC000003E,
        {
            "link": 86, "linkat": 265, "renameat2": 316, "fallocate": 285, "fsync": 74,
            "rename": 82, "renameat": 264, "openat2": 437, "symlink": 88, "pidfd_open": 434,
            "memfd_create": 319,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "linkat": 37, "renameat": 38, "openat2": 437, "renameat2": 276, "fallocate": 47,
            "fsync": 82, "symlinkat": 36,
            "pidfd_open": 434, "memfd_create": 279,
        },
    ),
}  # fmt: skip
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF: ld abs word, jeq, ret
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def available() -> bool:
    """Whether this machine's kernel and processor are ones that the filter is written for."""
    return platform.system() == "Linux" and platform.machine() in _NUMBERS


def refuse(calls: dict[str, int]) -> None:
    """From now on each named system call fails in this process with its errno.

    A call that the processor does not have (aarch64 has no `link`) is skipped.
    """
    arch, numbers = _NUMBERS[platform.machine()]
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, 0)]
    for name, number in calls.items():
        if name in numbers:
            code += [(_EQUAL, 0, 1, numbers[name]), (_RETURN, 0, 0, _ERRNO | number)]
    code.append((_RETURN, 0, 0, _ALLOW))
    raw = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = _Program(len(code), ctypes.cast(raw, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(
        set_seccomp, filter_mode, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "seccomp")
