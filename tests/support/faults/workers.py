"""Worker processes that die at a chosen moment."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import termios
import threading
import time

from smckpt.engine.background.worker_client import Worker
from tests.support.limits import seconds

__all__ = ["kill_in_mid_request"]


def kill_in_mid_request(worker: Worker) -> None:
    """Kill the running worker as soon as the next request has reached it, and not before: it is
    stopped now, and the request is seen to wait in its socket."""
    process = worker._process
    assert process is not None and worker.alive
    pid, end = process.popen.pid, process.channel.fileno()
    os.kill(pid, signal.SIGSTOP)

    def kill() -> None:
        deadline = time.monotonic() + seconds(30)
        while not _unread(end) and time.monotonic() < deadline:
            time.sleep(0.005)
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill).start()


def _unread(end: int) -> int:
    """Bytes sent through this end of a socket pair that the other has not read."""
    answer = fcntl.ioctl(end, termios.TIOCOUTQ, b"\0\0\0\0")
    return int(struct.unpack("i", answer)[0])
