"""The worker: a separate process that writes what the trainer staged.

It is a program (`python -m` of this module), not a fork and not a `multiprocessing` child: it
runs none of the user's code, imports no torch, starts in tenths of a second and maps only the
arena. It serves one trainer over a socket, one request at a time, and ends with it, even in the
middle of a write.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import importlib
import mmap
import os
import select
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from smckpt._version import __version__
from smckpt.decoding import decode
from smckpt.engine.background.commands import (
    Attach,
    Channel,
    Command,
    Detach,
    Exit,
    PeerGone,
    WritePart,
    commands,
)
from smckpt.errors import CheckpointError, WorkerError
from smckpt.storage import Access

_NICENESS = 10  # added to its priority, so that it yields to training
_STDERR_LIMIT = 1 << 20
_SERVING = (
    "smckpt.engine.background.worker_write",
    "smckpt.checkpoint.commits.commit",
    "smckpt.storage.disk.posix",
)


def main(arguments: list[str] | None = None) -> None:
    """Serve until the trainer sends `Exit` or ends.

    Args:
        arguments: descriptor of the socket, descriptor of the trainer's pidfd or -1.
    """
    end, trainer = (int(a) for a in arguments or sys.argv[1:3])
    faulthandler.enable()
    # Ctrl-C and a batch system's SIGTERM go to every process of the job. The trainer may still
    # want to save; the worker ends when the trainer does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # a container may forbid it; then the priority stays normal
        os.nice(_NICENESS)
    with contextlib.suppress(OSError):  # the name that `top` shows; Linux only
        Path("/proc/self/comm").write_text("smckpt-worker")
    link = socket.socket(fileno=end)
    peer = trainer if trainer >= 0 else None

    def end_with_trainer() -> None:
        poll = select.poll()
        poll.register(end, 0)  # poll always reports a hang-up
        if peer is not None:
            poll.register(peer, select.POLLIN)
        poll.poll()
        os._exit(0)

    threading.Thread(target=end_with_trainer, daemon=True).start()
    _Server(Channel(link, peer)).serve()


class _Server:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._commands = commands()
        self._arenas: dict[int, mmap.mmap] = {}

    def serve(self) -> None:
        try:
            self._channel.send({"ready": os.getpid(), "version": __version__})
            # Now, and not at the first request: an upgrade may replace the files meanwhile.
            for module in _SERVING:
                importlib.import_module(module)
            while True:
                request, fds = self._channel.receive()
                if request["command"] == Exit.function:
                    return
                self._channel.send(self._answer(request, fds))
                # Between requests, empty a standard error file that has grown large. Only its end
                # is ever read.
                if os.fstat(2).st_size > _STDERR_LIMIT:
                    os.ftruncate(2, 0)
        except PeerGone:
            return

    def _answer(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        name = request["command"]
        try:
            kind = self._commands.get(name)
            if kind is None:
                raise WorkerError(
                    f"the worker does not know the command {name!r}",
                    remedy="trainer and worker must be the same version; check whether smckpt is "
                    "installed twice",
                )
            access = Access.from_json(request["access"])
            return {"result": self._run(decode(kind, request["payload"]), access, fds)}
        except CheckpointError as error:
            return {"error": error.to_json()}
        except Exception as error:  # the trainer must hear of any failure
            traceback.print_exc()
            if _lacks_resources(error):
                lacking = WorkerError(
                    f"{name} failed in the worker, which the system refused a resource: "
                    f"{str(error) or 'out of memory'}",
                    remedy="free memory of this host, or raise the limits on memory, open files "
                    "and processes (ulimit -v, -n, -u; the cgroup); the next save tries again",
                )
                return {"error": lacking.to_json()}
            where = traceback.extract_tb(error.__traceback__)[-1]
            return {
                "error": WorkerError(
                    f"{name} failed in the worker: {type(error).__name__}: {error} "
                    f"({Path(where.filename).name}:{where.lineno})",
                    remedy="this is a fault of smckpt: please report it",
                ).to_json()
            }

    def _run(self, command: Command[Any], access: Access, fds: list[int]) -> Any:
        if isinstance(command, Attach):
            (fd,) = fds
            try:
                self._arenas[command.id] = mmap.mmap(fd, command.size, prot=mmap.PROT_READ)
            finally:
                os.close(fd)
            return None
        if isinstance(command, Detach):
            self._arenas.pop(command.id).close()
            return None
        if isinstance(command, WritePart):
            from smckpt.engine.background.worker_write import write_part

            arena = None
            if command.files:
                assert command.arena is not None
                arena = self._arenas.get(command.arena)
                if arena is None:
                    raise WorkerError(
                        f"the worker has no arena {command.arena}",
                        remedy="attach it before naming it",
                    )
            return write_part(access, arena, command)
        commit = importlib.import_module("smckpt.checkpoint.commits.commit")
        return getattr(commit, command.function)(access, **vars(command))


def _lacks_resources(error: Exception) -> bool:
    """Whether the system refused memory, a descriptor or a thread."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
    return isinstance(error, MemoryError) or "can't start new thread" in str(error)


if __name__ == "__main__":
    main()
