"""The worker: a process of its own that writes what the trainer staged.

It is a program (`python -m smckpt.engine.worker`), not a fork and not a `multiprocessing` child: it
runs none of the user's code, imports no torch, starts in tenths of a second and holds no memory but
the arena. It obeys one trainer over a socket, one request at a time, and ends with it, even in the
middle of a write.
"""

from __future__ import annotations

import contextlib
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

from smckpt.engine.worker_channel import Channel, PeerGone
from smckpt.errors import CheckpointError, WorkerError
from smckpt.storage.budget import Share
from smckpt.storage.s3_config import S3Config, using_s3
from smckpt.storage.s3_pace import sharing

__all__ = ["main"]

# Functions of smckpt.checkpoint.commit that a request names, with its payload as arguments.
_COMMIT = frozenset(
    {"publish_manifest", "publish_record", "claim_epoch", "sweep", "sweep_records", "probe"}
)
_STDERR_LIMIT = 1 << 20


def main(arguments: list[str] | None = None) -> None:
    """Serve until the trainer says so or ends.

    Args:
        arguments: descriptor of the socket, descriptor of the trainer's pidfd or -1, niceness,
            threads.
    """
    end, trainer, niceness, threads = (int(a) for a in arguments or sys.argv[1:5])
    faulthandler.enable()
    # Ctrl-C and a batch system's SIGTERM go to every process of the job. The trainer may still
    # want to save; the worker ends when the trainer does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # a container may forbid it: then at normal priority
        os.nice(niceness)
    with contextlib.suppress(OSError):  # what `top` shows; Linux only
        Path("/proc/self/comm").write_text("smckpt-worker")
    link = socket.socket(fileno=end)
    peer = trainer if trainer >= 0 else None
    threading.Thread(target=_end_with_trainer, args=(end, peer), daemon=True).start()
    _Server(Channel(link, peer), threads).serve()


def _end_with_trainer(end: int, peer: int | None) -> None:
    poll = select.poll()
    poll.register(end, 0)  # a hang-up is reported without being asked for
    if peer is not None:
        poll.register(peer, select.POLLIN)
    poll.poll()
    os._exit(0)


class _Server:
    def __init__(self, channel: Channel, threads: int) -> None:
        self._channel = channel
        self._threads = threads
        self._arenas: dict[int, mmap.mmap] = {}

    def serve(self) -> None:
        try:
            self._channel.send({"ready": os.getpid()})
            while True:
                request, fds = self._channel.receive()
                if request["command"] == "exit":
                    return
                self._channel.send(self._answer(request, fds))
                _bound_stderr()
        except PeerGone:
            return

    def _answer(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        command = request["command"]
        try:
            s3 = S3Config.from_mapping(request["s3"]) if "s3" in request else None
            share = Share(**request["share"]) if s3 is not None else None
            with using_s3(s3), sharing(share):
                return {"result": self._run(command, request["payload"], fds)}
        except CheckpointError as error:
            return {"error": error.to_json()}
        except Exception as error:  # the trainer must hear of any failure, whatever it is
            traceback.print_exc()
            where = traceback.extract_tb(error.__traceback__)[-1]
            return {
                "error": WorkerError(
                    f"{command} failed in the worker: {type(error).__name__}: {error} "
                    f"({Path(where.filename).name}:{where.lineno})",
                    remedy="this is a fault of smckpt: please report it",
                ).to_json()
            }

    def _run(self, command: str, payload: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        if command == "attach":
            (fd,) = fds
            try:
                self._arenas[payload["id"]] = mmap.mmap(fd, payload["size"], prot=mmap.PROT_READ)
            finally:
                os.close(fd)
            return {}
        if command == "detach":
            self._arenas.pop(payload["id"]).close()
            return {}
        if command == "write_part":
            from smckpt.engine.worker_write import write_part

            arena = self._arena(payload.pop("arena")) if payload["files"] else None
            payload.pop("arena", None)
            return write_part(arena, threads=self._threads, **payload)
        if command in _COMMIT:
            commit = importlib.import_module("smckpt.checkpoint.commit")
            result: dict[str, Any] = getattr(commit, command)(**payload)
            return result
        raise WorkerError(
            f"the worker knows no command {command!r}",
            remedy="trainer and worker must be of one version: is smckpt installed twice?",
        )

    def _arena(self, number: int) -> mmap.mmap:
        if number not in self._arenas:
            raise WorkerError(
                f"the worker has no arena {number}", remedy="attach it before naming it"
            )
        return self._arenas[number]


def _bound_stderr() -> None:
    """Between requests, forget a standard error that has grown large; only its end is ever read."""
    if os.fstat(2).st_size > _STDERR_LIMIT:
        os.ftruncate(2, 0)


if __name__ == "__main__":
    main()
