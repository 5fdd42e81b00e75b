"""The moments at which a command can be killed: each call by which one of its processes changes
files below a directory, or sends something to an object store.

The kernel stops each such call and asks (seccomp's user notifications, Linux 5.5). So calls of all
processes and threads count, in whatever language they are written, and at the chosen moment every
process stands still before its next call. Writes through mapped memory and io_uring do not count.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from smckpt.errors import UsageError
from smckpt.run import traced
from smckpt.storage.urls import disk_path

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_AT_CWD = -100  # AT_FDCWD
_LONGEST = 4096  # bytes of a path
_PORT = 443
_ENDPOINTS = (
    *("SMCKPT_S3_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    *("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"),
)


@dataclass(frozen=True)
class _Call:
    """A system call. numbers: on x86-64 and on arm64 (None: it has none). paths: for each path, the
    places of its directory's descriptor (None: relative to the working directory) and of its text.
    fd: the place of a descriptor. flags: the place of the flags of open."""

    numbers: tuple[int | None, int | None]
    paths: tuple[tuple[int | None, int], ...] = ()
    fd: int | None = None
    flags: int | None = None


_FILES = {
    "open": _Call((2, None), ((None, 0),), flags=1),
    "creat": _Call((85, None), ((None, 0),)),
    "openat": _Call((257, 56), ((0, 1),), flags=2),
    "write": _Call((1, 64), fd=0),
    "pwrite64": _Call((18, 68), fd=0),
    "writev": _Call((20, 66), fd=0),
    "pwritev": _Call((296, 70), fd=0),
    "pwritev2": _Call((328, 287), fd=0),
    "sendfile": _Call((40, 71), fd=0),
    "copy_file_range": _Call((326, 285), fd=2),
    "fsync": _Call((74, 82), fd=0),
    "fdatasync": _Call((75, 83), fd=0),
    "ftruncate": _Call((77, 46), fd=0),
    "fallocate": _Call((285, 47), fd=0),
    "truncate": _Call((76, 45), ((None, 0),)),
    "rename": _Call((82, None), ((None, 0), (None, 1))),
    "renameat": _Call((264, 38), ((0, 1), (2, 3))),
    "renameat2": _Call((316, 276), ((0, 1), (2, 3))),
    "link": _Call((86, None), ((None, 0), (None, 1))),
    "linkat": _Call((265, 37), ((0, 1), (2, 3))),
    "symlink": _Call((88, None), ((None, 1),)),
    "symlinkat": _Call((266, 36), ((1, 2),)),
    "unlink": _Call((87, None), ((None, 0),)),
    "unlinkat": _Call((263, 35), ((0, 1),)),
    "mkdir": _Call((83, None), ((None, 0),)),
    "mkdirat": _Call((258, 34), ((0, 1),)),
    "rmdir": _Call((84, None), ((None, 0),)),
}
_MESSAGES = {
    "sendto": _Call((44, 206), fd=0),
    "sendmsg": _Call((46, 211), fd=0),
    "write": _Call((1, 64), fd=0),
    "writev": _Call((20, 66), fd=0),
}
# machine → its place in `_Call.numbers`, its name in the kernel's audit, and the call `seccomp`
_MACHINES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}

# linux/seccomp.h, linux/bpf_common.h
_NOTIFY, _ALLOW = 0x7FC00000, 0x7FFF0000
_GET_ACTION = 2
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # ioctls
_CONTINUE = 1
_NOTICE = struct.Struct("=QIIiIQ6Q")  # id, thread, flags, call, machine, address, arguments
_ANSWER = struct.Struct("=QqiI")  # id, value, error, flags
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


class Moments:
    """Counts the moments of one run of a command, and stops the run at one of them.

    Args:
        root: the directory or URL. For a URL, what is sent to the store's port counts.
        stop_at: the moment, counted from 1, at which every process of the run stands still until it
            is killed; None: only count.
        on_stop: called then, from a thread.

    Raises:
        UsageError: this system has no such notifications.
    """

    def __init__(
        self, root: str, stop_at: int | None = None, on_stop: Callable[[], None] | None = None
    ) -> None:
        there = disk_path(root)  # None: in a store
        self.count = 0
        self.stopped = ""  # the call before which the run was stopped
        self._on_stop = on_stop
        self._stop_at = stop_at
        self._calls, self._audit, self.seccomp = _calls(_FILES if there else _MESSAGES)
        self._described: Callable[[_Notice], str] = (
            _FileCalls(there).described if there else _Messages(os.environ).described
        )
        self._ours, self._theirs = socket.socketpair()
        self._wake = os.pipe()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def wrap(self, command: list[str]) -> list[str]:
        """The command that runs `command` and asks. It needs the descriptor `inherited`."""
        head = [sys.executable, "-I", "-S", os.path.abspath(traced.__file__)]
        return [*head, str(self.inherited), self.program.hex(), str(self.seccomp), *command]

    @property
    def program(self) -> bytes:
        """The filter for `traced.ask`, in the kernel's instructions. It passes over what can be
        told from numbers: other calls, opens that only read, and writes to stdout and stderr."""
        program = [
            *((_LOAD, 0, 0, 4), (_EQUAL, 1, 0, self._audit)),
            *((_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, 0)),
        ]
        ask = (_RETURN, 0, 0, _NOTIFY)
        for number, (_, call) in self._calls.items():
            test: list[tuple[int, int, int, int]] = []
            if call.flags is not None:
                test = [(_LOAD, 0, 0, 16 + 8 * call.flags), (_ANY_BIT, 0, 1, _WRITES)]
            elif call.fd is not None:
                test = [(_LOAD, 0, 0, 16 + 8 * call.fd), (_AT_LEAST, 0, 1, 3)]
            rest = [*test, ask, (_RETURN, 0, 0, _ALLOW)]
            program += [(_EQUAL, 0, len(rest), number), *rest]
        program.append((_RETURN, 0, 0, _ALLOW))
        return b"".join(struct.pack("=HBBI", *each) for each in program)

    @property
    def inherited(self) -> int:
        """The descriptor of the socket, for `traced.ask`."""
        return self._theirs.fileno()

    def reached(self) -> bool:
        """Whether the run stands still."""
        if self._error is not None:
            raise self._error
        return bool(self.stopped)

    def __enter__(self) -> Moments:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """All processes of the run have ended."""
        os.write(self._wake[1], b"x")
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._ours.close()
        self._theirs.close()
        for fd in self._wake:
            os.close(fd)

    def _serve(self) -> None:
        listener = -1
        try:
            _, (listener, *_), *_ = socket.recv_fds(self._ours, 1, 1)
            self._answer_all(listener)
        except ValueError:  # it ended before it had a listener; its status tells
            pass
        except BaseException as error:
            self._error = error
        finally:
            if listener >= 0:
                os.close(listener)

    def _answer_all(self, listener: int) -> None:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        poll.register(self._wake[0], select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if self._wake[0] in ready or ready.get(listener, 0) & select.POLLHUP:
                return
            if self.stopped:
                continue
            data = bytearray(_NOTICE.size)
            try:
                fcntl.ioctl(listener, _RECEIVE, data)
            except OSError:  # the thread has ended meanwhile
                continue
            notice = _Notice.of(data, self._calls)
            text = self._described(notice)
            if text:
                self.count += 1
                if self.count == self._stop_at:
                    poll.unregister(listener)  # nobody is answered any more
                    self.stopped = text
                    if self._on_stop is not None:
                        self._on_stop()
                    continue
            answer = bytearray(_ANSWER.pack(notice.id, 0, 0, _CONTINUE))
            with contextlib.suppress(OSError):
                fcntl.ioctl(listener, _SEND, answer)


def _calls(table: Mapping[str, _Call]) -> tuple[dict[int, tuple[str, _Call]], int, int]:
    """The calls of this machine by number, its name in the audit, and the call `seccomp`."""
    machine = _MACHINES.get(platform.machine())
    action = ctypes.c_uint32(_NOTIFY)
    if machine is not None and sys.platform == "linux":
        which, audit, seccomp = machine
        libc = ctypes.CDLL(None, use_errno=True)
        call = libc.syscall(ctypes.c_long(seccomp), _GET_ACTION, 0, ctypes.byref(action))
        if call == 0:
            numbers = {call.numbers[which]: (name, call) for name, call in table.items()}
            return {n: named for n, named in numbers.items() if n is not None}, audit, seccomp
    raise UsageError(
        "this system does not tell the calls of a process (seccomp's user notifications)",
        remedy="use Linux 5.5 or newer on x86-64 or arm64; a container must allow seccomp",
    )


@dataclass(frozen=True)
class _Notice:
    """A call that waits."""

    id: int
    thread: int
    name: str
    call: _Call
    arguments: tuple[int, ...]

    @classmethod
    def of(cls, data: bytes | bytearray, calls: Mapping[int, tuple[str, _Call]]) -> _Notice:
        id_, thread, _, number, _, _, *arguments = _NOTICE.unpack(data)
        return cls(id_, thread, *calls[number], tuple(arguments))

    def descriptor(self) -> int:
        assert self.call.fd is not None
        return self.arguments[self.call.fd] & 0xFFFFFFFF

    def link(self, fd: int) -> str:
        """What a descriptor of the process is: a path, or "socket:[number]"; "" if it is closed."""
        where = "cwd" if fd == _AT_CWD else f"fd/{fd}"
        try:
            return os.readlink(f"/proc/{self.thread}/{where}")
        except OSError:
            return ""

    def paths(self) -> list[str]:
        found = []
        for directory, text in self.call.paths:
            path = os.fsdecode(self.memory(self.arguments[text], _LONGEST).partition(b"\0")[0])
            if not os.path.isabs(path):
                fd = _AT_CWD
                if directory is not None:  # a signed number
                    fd = ctypes.c_int32(self.arguments[directory] & 0xFFFFFFFF).value
                path = os.path.join(self.link(fd), path)
            found.append(path)
        return found

    def memory(self, address: int, size: int) -> bytes:
        try:
            with open(f"/proc/{self.thread}/mem", "rb", 0) as memory:
                return os.pread(memory.fileno(), size, address)
        except (OSError, OverflowError):
            return b""


class _FileCalls:
    """Calls that change files below a directory."""

    def __init__(self, root: str) -> None:
        self._root = os.path.realpath(root)

    def described(self, notice: _Notice) -> str:
        if notice.call.fd is not None:
            paths = [notice.link(notice.descriptor())]
        else:
            paths = [
                os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
                for path in notice.paths()
            ]
        subpaths = [
            path[len(self._root) + 1 :] for path in paths if path.startswith(self._root + "/")
        ]
        return f"{notice.name} {' '.join(subpaths)}" if subpaths else ""


class _Messages:
    """What is sent to the port of the object store, or to that of a proxy."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._ports = {_PORT}
        for url in filter(None, map(environment.get, _ENDPOINTS)):
            parts = urlsplit(url if "//" in url else f"//{url}")
            self._ports.add(parts.port or (80 if parts.scheme == "http" else _PORT))
        self._known: dict[str, bool] = {}

    def described(self, notice: _Notice) -> str:
        what = notice.link(notice.descriptor())
        if not what.startswith("socket:["):
            return ""
        if what not in self._known:
            self._known[what] = _remote_port(notice.thread, what[8:-1]) in self._ports
        if not self._known[what]:
            return ""
        line = b""
        if notice.name in ("sendto", "write"):
            line = notice.memory(notice.arguments[1], min(notice.arguments[2], 512))
        request = (
            line.split(b" HTTP/", 1)[0].decode("ascii", "replace") if b" HTTP/" in line else ""
        )
        return f"{notice.name} {request}" if request.isprintable() and request else notice.name


def _remote_port(thread: int, inode: str) -> int:
    """The port at the other end of a TCP socket; 0 if it is something else."""
    for kind in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{thread}/net/{kind}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] == inode:
                    return int(fields[2].rpartition(":")[2], 16)
    return 0
