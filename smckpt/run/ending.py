"""Ends a command and all processes that it started after a signal, with one line and the signal's
own exit status.

SIGINT, SIGTERM and SIGHUP raise `Ended` in the main thread once `watch` was called. Code that
started processes ends them as the exception passes. Processes that are left are killed then, also
grandchildren that torchrun puts into sessions of their own. The module needs only the standard
library, because ./dev uses it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_KILL_SECONDS = 4.0
_LOOK_SECONDS = 0.02  # between two calls of `until`


class Ended(BaseException):
    """A signal came. `line` is printed at the end."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        self.line = f"Ended by {self.signal.name}."
        super().__init__(self.line)


def watch() -> None:
    """From now on a signal raises `Ended`, once. An uncaught `Ended` ends this process by that
    signal."""
    # children whose parent dies become children of this process, so that it can end them
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    sys.excepthook = _report
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored before, as under nohup
            signal.signal(number, _raise)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def hand_over(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Become `command`, a Python program that imports this module before anything slow.

    A signal that comes earlier waits until the program watches for it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    os.execve(command[0], list(command), dict(environment))


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    grace: float = 0.0,
    stdout: int | None = None,
    stderr: int | None = None,
    inherited: Collection[int] = (),
    until: Callable[[], bool] | None = None,
) -> int:
    """Run a command and return its exit status. No process that it started outlives it.

    Args:
        grace: seconds that the command has to end by itself after a signal, which is passed on.
        stdout, stderr: file descriptors instead of our own stdout and stderr.
        inherited: further descriptors that the command gets.
        until: called again and again; when it returns True or raises, all processes of the command
            are killed.
    """
    others = {pid for pid, _ in _tree().get(os.getpid(), ())}
    try:
        # a session of its own: Ctrl-C reaches us alone, and we pass it on
        process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=stdout, stderr=stderr,
            pass_fds=tuple(inherited), start_new_session=True,
        )  # fmt: skip
        try:
            while until is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(_LOOK_SECONDS)
                if until():
                    return -signal.SIGKILL
            return process.wait()
        except Ended as ended:
            if grace:
                process.send_signal(ended.signal)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(grace)
            raise
    finally:
        end_children(others)


def end_children(spared: Collection[int] = ()) -> None:
    """Kill every descendant of this process except `spared` and their descendants, and wait for the
    end."""
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        tree = _tree()
        alive = _descendants(tree, os.getpid(), spared)
        for pid in alive:  # parents first, so that none starts another child or reports a lost one
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid, _ in tree.get(os.getpid(), ()):
            if pid not in spared:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        if not alive:
            return
        time.sleep(0.01)  # it is not our child, so nothing can wait for it


def _descendants(
    tree: Mapping[int, Sequence[tuple[int, bool]]], parent: int, spared: Collection[int]
) -> list[int]:
    """Living processes below `parent`, parents before children."""
    found: list[int] = []
    for pid, alive in tree.get(parent, ()):
        if pid not in spared:
            found += [pid] if alive else []
            found += _descendants(tree, pid, spared)
    return found


def _tree() -> dict[int, list[tuple[int, bool]]]:
    """The children of each process on this machine, and whether each process lives."""
    tree: dict[int, list[tuple[int, bool]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # the kernel cuts a name after 15 bytes, also within a character
            state, parent = stat.read_bytes().rpartition(b")")[2].decode().split()[:2]
        except OSError:
            continue  # it has ended
        tree.setdefault(int(parent), []).append((int(stat.parent.name), state not in "ZX"))
    return tree


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    for each in SIGNALS:
        # one is enough: a second signal must not interrupt the clean-up
        signal.signal(each, signal.SIG_IGN)
    raise Ended(number)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    ended: BaseException | None = error
    while ended is not None and not isinstance(ended, Ended):
        ended = ended.__cause__  # a module in C that is being imported makes an ImportError of it
    if ended is None:
        sys.__excepthook__(kind, error, trace)
        return
    end_children()
    with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
        print("\n" + ended.line, file=sys.stderr, flush=True)
    signal.signal(ended.signal, signal.SIG_DFL)
    os.kill(os.getpid(), ended.signal)


# `hand_over` started us: watch before anything slow is imported
if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
    watch()
