"""The trainer's side of its worker: starts it, passes it the arena, sends commands, and notices its
death."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from smckpt._version import __version__
from smckpt.calls import while_alive
from smckpt.decoding import decode
from smckpt.engine.background.commands import Attach, Channel, Command, Detach, Exit, PeerGone
from smckpt.errors import WorkerError, error_from_json
from smckpt.staging.arena import Arena, anonymous_file
from smckpt.storage import Access

log = logging.getLogger("smckpt")

A = TypeVar("A")

_PROGRAM = "from smckpt.engine.background.worker import main; main()"
_DETACH_TIMEOUT = 10.0  # seconds; unmapping takes 0.1 s per GB
_KILL_TIMEOUT = 2.0  # seconds; a killed process ends at once, unless a write hangs in the kernel
_EXIT_GRACE = 0.5  # seconds from the end of the connection to the end of the process
_STDERR_READ = 1 << 16  # bytes at the end of its standard error that are read
_STDERR_TAIL = 2000  # characters of it that an error shows


@dataclass
class _Process:
    """A running worker, and the trainer's descriptors for it."""

    popen: subprocess.Popen[bytes]
    channel: Channel
    pidfd: int | None
    stderr: int
    ready: bool = False

    def close(self) -> None:
        self.channel.close()
        os.close(self.stderr)
        if self.pidfd is not None:
            os.close(self.pidfd)


class Worker:
    """The worker process of this rank. Thread-safe; one request at a time, others wait.

    It starts at the first request, or earlier with `start`. When it dies, the request under way
    raises. The next request starts a new worker and passes it the arenas again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._arenas: dict[int, Arena] = {}
        self._sent: set[int] = set()
        self._next_id = 0
        self._closed = False
        self._owner = os.getpid()
        os.register_at_fork(after_in_child=while_alive(self.forget))

    @property
    def alive(self) -> bool:
        """Whether the process runs now. Before the first request it is False."""
        process = self._process
        return process is not None and process.popen.poll() is None

    @property
    def pid(self) -> int:
        """The process's id; 0 if there is none."""
        process = self._process
        return process.popen.pid if process is not None else 0

    def start(self) -> None:
        """Start the process without waiting for it to be ready."""
        self._refuse_forked()
        with self._lock:
            self._launch()

    def attach(self, arena: Arena) -> int:
        """Make the arena known to the worker with the next request. Returns its id.

        An arena that is already attached keeps its id.
        """
        self._refuse_forked()
        with self._lock:
            for known, other in self._arenas.items():
                if other is arena:
                    return known
            self._next_id += 1
            self._arenas[self._next_id] = arena
            return self._next_id

    def detach(self, arena_id: int) -> None:
        """Make the worker unmap the arena, so that its memory can be freed. A worker that does not
        answer within seconds is killed, which also unmaps it."""
        self._refuse_forked()
        with self._lock:
            self._arenas.pop(arena_id, None)
            self._unmap(arena_id)

    def call(self, command: Command[A], *, timeout: float, access: Access | None = None) -> A:
        """Send a command to the worker and wait for its answer.

        Args:
            timeout: seconds for everything: earlier requests, the start, and the answer.
            access: the access to the stores of the command; None: an access without options.

        Raises:
            CheckpointError: what the worker raised.
            WorkerError: it died, or did not answer in time and was killed.
        """
        self._refuse_forked()
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=max(timeout, 0)):
            raise WorkerError(
                f"{command.function} waited {timeout} s for an earlier request to the worker",
                remedy="find out what delays the storage, or allow more time",
            )
        try:
            if self._closed:
                raise WorkerError("the worker is closed", remedy="make a new queue")
            for arena_id, arena in list(self._arenas.items()):
                if arena.fd < 0:
                    del self._arenas[arena_id]
                    self._unmap(arena_id)
            self._launch()
            self._introduce(deadline)
            answer = self._exchange(command, deadline, access=access)
        finally:
            self._lock.release()
        if "error" in answer:
            raise error_from_json(answer["error"])
        result: A = decode(command.answer, answer["result"])
        return result

    def close(self, timeout: float = 5.0) -> None:
        """End the process, or kill it after `timeout` seconds. It may be called again."""
        if os.getpid() != self._owner:
            return  # a forked child owns no worker
        deadline = time.monotonic() + timeout
        idle = self._lock.acquire(timeout=timeout)
        self._closed = True
        process = self._process
        if not idle:
            # A request is under way. Its caller notices the death and cleans up.
            if process is not None:
                process.popen.kill()
            return
        try:
            if process is not None and process.popen.poll() is None:
                try:
                    process.channel.send({"command": Exit.function}, deadline=deadline)
                    process.popen.wait(max(deadline - time.monotonic(), 0))
                except (PeerGone, TimeoutError, subprocess.TimeoutExpired):
                    process.popen.kill()
            self._discard()
        finally:
            self._lock.release()

    def forget(self) -> None:
        """In a forked child (such as a data loader's worker), close its copy of the trainer's
        socket."""
        process, self._process = self._process, None
        if process is not None:
            process.close()
            process.popen.returncode = 0  # not its child, so there is nothing to reap

    def _refuse_forked(self) -> None:
        if os.getpid() != self._owner:
            raise WorkerError(
                "a forked child cannot use the worker, which belongs to the parent process",
                remedy="save from the training process itself",
            )

    # -- with the lock held ------------------------------------------------------------------

    def _launch(self) -> None:
        if self._process is not None and self._process.popen.poll() is not None:
            self._discard()
        if self._process is None and not self._closed:
            self._process = _spawn()

    def _introduce(self, deadline: float) -> None:
        """Wait until the process answers, and pass it the arenas that it does not know."""
        process = self._process
        assert process is not None
        if not process.ready:
            with self._watching("start"):
                hello, _ = process.channel.receive(deadline=deadline)
                if (version := hello.get("version")) != __version__:
                    # The installed files were replaced after this process loaded them. What one
                    # says, the other may take for something else.
                    raise WorkerError(
                        "smckpt was changed on disk while this job runs: the job has version "
                        f"{__version__}, a worker that starts now has {version or 'another'}",
                        remedy="restart the job, which resumes from the newest committed step; or "
                        f"install {__version__} again",
                    )
            process.ready = True
        for arena_id, arena in self._arenas.items():
            if arena_id not in self._sent:
                answer = self._exchange(Attach(arena_id, arena.size), deadline, [arena.fd])
                if "error" in answer:
                    raise error_from_json(answer["error"])
                self._sent.add(arena_id)

    def _unmap(self, arena_id: int) -> None:
        if arena_id not in self._sent or not self.alive:
            return
        self._sent.discard(arena_id)
        try:
            self._exchange(Detach(arena_id), time.monotonic() + _DETACH_TIMEOUT)
        except WorkerError as error:
            log.warning("while the arena was unmapped: %s", error)

    def _exchange(
        self,
        command: Command[Any],
        deadline: float,
        fds: Sequence[int] = (),
        access: Access | None = None,
    ) -> dict[str, Any]:
        process = self._process
        assert process is not None
        with self._watching(command.function):
            message: dict[str, Any] = {"command": command.function, "payload": command}
            message["access"] = (access or Access()).to_json()
            process.channel.send(message, fds, deadline=deadline)
            return process.channel.receive(deadline=deadline)[0]

    @contextmanager
    def _watching(self, command: str) -> Iterator[None]:
        """If an exchange breaks off, end the worker. It might still write, or answer the next
        request with the answer of this one."""
        process = self._process
        assert process is not None
        began = time.monotonic()
        try:
            yield
        except PeerGone as gone:
            code, output = self._discard(_EXIT_GRACE)
            raise WorkerError(
                f"the worker {_ending(code)} during {command}{output}",
                remedy="if it was killed, check whether the host or its cgroup ran out of memory "
                "(dmesg); the next save starts another worker",
            ) from gone
        except TimeoutError as late:
            _, output = self._discard()
            raise WorkerError(
                f"the worker did not answer {command} within {time.monotonic() - began:.1f} s, "
                f"and was killed{output}",
                remedy="check whether the storage hangs, or allow more time; the next save starts "
                "another worker",
            ) from late
        except BaseException:
            self._discard()
            raise

    def _discard(self, grace: float = 0) -> tuple[int | None, str]:
        """End the process within `grace` seconds and release it. Returns its exit code and its last
        output."""
        process, self._process = self._process, None
        self._sent.clear()
        if process is None:
            return None, ""
        code: int | None = None  # what is stuck in the kernel `subprocess` reaps later
        try:
            code = process.popen.wait(grace)
        except subprocess.TimeoutExpired:
            process.popen.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.popen.wait(_KILL_TIMEOUT)
        output = _tail(process.stderr)
        process.close()
        return code, output


def _spawn() -> _Process:
    """Start the program. It inherits only its socket and our pidfd."""
    with ExitStack() as passed, ExitStack() as kept:
        try:
            ours, theirs = socket.socketpair()
            kept.callback(ours.close)
            passed.callback(theirs.close)
            trainer = _pidfd(os.getpid())
            if trainer is not None:
                passed.callback(os.close, trainer)
            stderr = anonymous_file("smckpt-worker-stderr")
            kept.callback(os.close, stderr)
            fcntl.fcntl(stderr, fcntl.F_SETFL, os.O_APPEND)  # the worker truncates it sometimes
            inherited = [theirs.fileno()] + ([] if trainer is None else [trainer])
            command = command_of(_PROGRAM)
            command += [str(theirs.fileno()), str(-1 if trainer is None else trainer)]
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=inherited,
                cwd="/",  # the user's directory may be unmounted, and smckpt imports nothing of it
                start_new_session=True,  # the trainer handles Ctrl-C
            )
            pidfd = _pidfd(popen.pid)  # if this fails, the worker ends with its socket
        except OSError as error:
            raise WorkerError(
                f"the worker could not be started: {error}",
                remedy="check the limits on processes, open files and memory (ulimit -u, -n, -v; "
                "the cgroup)",
            ) from error
        kept.pop_all()
    return _Process(popen, Channel(ours, pidfd), pidfd, stderr)


def command_of(program: str) -> list[str]:
    """A command that runs Python code with this process's import path, but for the current
    directory, which it may leave. Without `site` (-S) it starts faster and runs no sitecustomize.

    Raises:
        WorkerError: this process does not know its Python.
    """
    python = sys.executable
    if not python:
        raise WorkerError(
            "this Python does not know its own executable (sys.executable), so it cannot start "
            "the worker",
            remedy="run a normal interpreter, or set sys.executable",
        )
    if not os.path.isabs(python):  # from a relative PATH, in a directory that the script has left
        of_prefix = os.path.join(sys.prefix, "bin", os.path.basename(python))
        python = of_prefix if os.path.exists(of_prefix) else os.path.abspath(python)
    # The absolute `sys.path` entries (Python skips what is no text), and the directory of smckpt.
    # The standard library comes first: this process may have imported its modules before the
    # user's, of the same names, were put on the path.
    texts = [entry for entry in sys.path if isinstance(entry, str) and "\n" not in entry]
    path = [entry for entry in texts if os.path.isabs(entry)]
    root = str(Path(__file__).absolute().parents[3])
    path = path if root in path else [root, *path]
    library = os.path.dirname(os.__file__)
    first = (library, os.path.join(library, "lib-dynload"))
    path.sort(key=lambda entry: entry not in first)
    begin = "import sys; sys.path[:] = sys.argv.pop(1).split(chr(10)); "
    return [python, "-S", "-c", begin + program, "\n".join(path)]


def _pidfd(pid: int) -> int | None:
    """A pidfd of the process; None if the system has none (macOS, Linux before 5.3). Then only the
    end of the socket shows its death."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM, errno.EINVAL):
            return None
        raise


def _tail(stderr: int) -> str:
    """The end of the worker's output; for a crash report, also its first line."""
    size = os.fstat(stderr).st_size
    data = os.pread(stderr, _STDERR_READ, max(size - _STDERR_READ, 0))
    text = data.decode(errors="replace").strip()
    output = text[-_STDERR_TAIL:]
    crash = text.rfind("Fatal Python error")  # faulthandler: the reason, then all stacks
    if crash >= 0 and len(text) - crash > _STDERR_TAIL:
        output = text[crash:].partition("\n")[0][:_STDERR_TAIL] + "\n…" + output
    return f"; its last output: {output}" if output else ""


def _ending(code: int | None) -> str:
    if code is None:
        return "broke off"
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
