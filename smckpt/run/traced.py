"""Becomes a command whose calls of the kernel wait for the parent's answer: see
`smckpt.run.moments`.

It is run by its path, without a site, and needs only the standard library.

Arguments: the descriptor of a socket, the filter in hexadecimal digits, the number of the system
call `seccomp`, and the command.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading

_NO_NEW_PRIVILEGES = 38  # linux/prctl.h
_SET_MODE_FILTER = 1  # linux/seccomp.h
_NEW_LISTENER = 1 << 3
_WAIT_KILLABLE = 1 << 5  # Linux 5.19: a signal does not make a call begin again


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def main(link: str, program: str, seccomp: str, *command: str) -> None:
    ask(int(link), bytes.fromhex(program), int(seccomp))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def ask(link: int, program: bytes, seccomp: int) -> None:
    """From now on the calls of this thread, and of all threads and processes that it starts, wait
    for the answer of the process at the other end of the socket `link`, which gets the listener.
    """
    held: list[int] = []
    installed = threading.Event()

    def send() -> None:
        installed.wait()
        with socket.socket(fileno=link) as parent:
            socket.send_fds(parent, [b"x"], held)
        os.close(held[0])

    # this thread is free of the filter, so it can send the listener before anybody answers
    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    held.append(_install(program, seccomp))
    installed.set()
    sender.join()


def _install(program: bytes, seccomp: int) -> int:
    """Install the filter in this thread. Returns the listener's descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    data = ctypes.create_string_buffer(program, len(program))
    described = _Program(len(program) // 8, ctypes.addressof(data))
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    for flags in (_NEW_LISTENER | _WAIT_KILLABLE, _NEW_LISTENER):
        listener = libc.syscall(
            ctypes.c_long(seccomp), _SET_MODE_FILTER, flags, ctypes.byref(described)
        )
        if listener >= 0:
            return int(listener)
    sys.exit(f"seccomp: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main(*sys.argv[1:])
