"""Let chosen system calls of this process and its children fail, hang or go on, as a test says.

A seccomp filter hands each of these calls to a thread of this process, which answers it: with an
errno, with "go on", or not yet. So the call under test is the real one, and the fault comes and
goes. A filter cannot be taken back: use it in a process of its own (`run_ranks`, `child.run`).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import struct
import threading

__all__ = ["HANG", "Kernel", "available"]

HANG = -1  # instead of an errno: the call does not return, until `heal`

_NUMBERS = {
    "x86_64": (
        0xC000003E, 317,
        {
            "pwrite64": 18, "fsync": 74, "rename": 82, "link": 86, "linkat": 265, "unlink": 87,
            "unlinkat": 263, "fallocate": 285, "renameat2": 316, "mkdir": 83, "preadv2": 327,
            "preadv": 295,
        },
    ),
    "aarch64": (
        0xC00000B7, 277,
        {
            "pwrite64": 68, "fsync": 82, "renameat": 38, "linkat": 37, "unlinkat": 35,
            "fallocate": 47, "renameat2": 276, "mkdirat": 34, "preadv2": 286, "preadv": 69,
        },
    ),
}  # fmt: skip
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF: ld abs word, jeq, ret
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_NEW_LISTENER, _FILTER_MODE, _NO_NEW_PRIVILEGES = 1 << 3, 1, 38
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # ioctls of linux/seccomp.h
_CONTINUE = 1


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def available() -> bool:
    """Whether this kernel and processor can do it (Linux 5.5 and later)."""
    if platform.system() != "Linux" or platform.machine() not in _NUMBERS:
        return False
    return tuple(int(n) for n in platform.release().split(".")[:2] if n.isdigit()) >= (5, 5)


class Kernel:
    """Answers the named system calls from now on. Make it before what it is to answer starts.

    Names that this processor does not have are left out (aarch64 has no `unlink`).
    """

    def __init__(self, *names: str) -> None:
        arch, self._seccomp, numbers = _NUMBERS[platform.machine()]
        self._names = {numbers[name]: name for name in names if name in numbers}
        self._faults: dict[str, tuple[int, int]] = {}  # name → errno, calls that still go well
        self._hung: list[int] = []
        self._lock = threading.Lock()
        self.failed = 0  # how many calls have failed or hung
        self._fd = self._listen(arch)
        threading.Thread(target=self._serve, daemon=True).start()

    def fail(self, code: int, *names: str, after: int = 0) -> None:
        """From now on these calls fail with this errno (or `HANG`), after so many that go well."""
        with self._lock:
            for name in names:
                self._faults[name] = code, after

    def heal(self) -> None:
        """From now on all calls go well, those that hang too."""
        with self._lock:
            self._faults = {}
            hung, self._hung = self._hung, []
        for call in hung:
            self._answer(call, 0)

    def _listen(self, arch: int) -> int:
        code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, 0)]
        for number in self._names:
            code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _NOTIFY)]
        code.append((_RETURN, 0, 0, _ALLOW))
        raw = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
        program = _Program(len(code), ctypes.cast(raw, ctypes.c_void_p))
        libc = ctypes.CDLL(None, use_errno=True)
        fd = -1
        if not libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
            fd = libc.syscall(self._seccomp, _FILTER_MODE, _NEW_LISTENER, ctypes.byref(program))
        if fd < 0:
            raise OSError(ctypes.get_errno(), "seccomp")
        os.set_inheritable(fd, False)
        return fd

    def _serve(self) -> None:
        while True:
            told = bytearray(80)
            try:
                fcntl.ioctl(self._fd, _RECEIVE, told)
            except OSError:  # the caller was killed before we heard of it
                continue
            call, _, _, number = struct.unpack_from("QIIi", told)
            code = self._code(self._names[number])
            if code == HANG:
                with self._lock:
                    self._hung.append(call)
            else:
                self._answer(call, code)

    def _code(self, name: str) -> int:
        with self._lock:
            code, left = self._faults.get(name, (0, 0))
            if code and left:
                self._faults[name] = code, left - 1
                return 0
            self.failed += code != 0
            return code

    def _answer(self, call: int, code: int) -> None:
        answer = struct.pack("QqiI", call, 0, -code, 0 if code else _CONTINUE)
        try:
            fcntl.ioctl(self._fd, _SEND, bytearray(answer))
        except OSError:
            return  # the caller was killed meanwhile
