"""An act that is killed at each of its moments, on disk or in S3, with all its processes.

A moment is what `smckpt chaos` counts: a call of any of its processes that changes files below the
place, or a message to the store.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from smckpt.run import ending, traced
from smckpt.run.chaos import _spread
from smckpt.run.moments import Moments
from smckpt.storage import Storage, open_storage

__all__ = ["SAMPLE_OR_ALL", "Act", "copied", "everything", "forked", "fresh", "killed_everywhere"]

Act = Callable[[str], Any]
SAMPLE_OR_ALL = pytest.mark.parametrize(
    "only",
    [
        pytest.param(2, id="sample"),
        pytest.param(None, marks=[pytest.mark.long, pytest.mark.timeout(7200)], id="all"),
    ],
)


def forked(act: Act, place: str, stop_at: int | None = None) -> Moments:
    """Run `act(place)` in a child of this process, until the moment."""
    child: list[int] = []
    found, pid = _moments(place, stop_at, child), os.fork()
    if pid == 0:
        gc.disable()  # what an earlier test left may end threads, which only its process has
        status = 1
        with contextlib.suppress(BaseException):
            status = _asking(found, lambda: act(place))
        os._exit(status)
    child.append(pid)
    with found:
        status = os.waitpid(pid, 0)[1]
    assert found.stopped or status == 0, f"it ended with {status}"
    return found


def killed_everywhere(
    make: Callable[[], str],
    act: Act,
    judge: Act,
    only: int | None,
    *,
    least: int = 10,
) -> Counter[str]:
    """For each moment: `make` a place, kill the act there, and ask `judge` what it left. Returns
    how often it gave each answer, and prints it.

    Args:
        only: at so many moments, evenly spread; None: at all.
        least: how many moments it must have.
    """
    place = make()
    count = forked(act, place).count
    assert count >= least
    judge(place)
    found: Counter[str] = Counter()
    for moment in _spread(count, only or count):
        place = make()
        call = forked(act, place, moment).stopped
        try:
            found[str(judge(place)) if call else "not reached"] += 1
        except BaseException as error:
            error.args = (f"killed at moment {moment} of {count}, before {call}: {error}",)
            raise
    name = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0].rpartition("::")[2]
    print(f"\n{name}: {count} moments, {dict(found)}", flush=True)
    return found


def copied(source: Path, target: str) -> str:
    """All files of a directory at another place, the leases too."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            way = path.relative_to(source)
            store = open_storage(f"{target}/{way.parent}" if len(way.parts) > 1 else target)
            store.put(path.name, path.read_bytes())
    return target


def everything(place: str) -> dict[str, bytes]:
    """All files at and below a place, the leases too."""
    return dict(_below(open_storage(place)))


def fresh(root: str) -> str:
    """A place that nobody has used, with nothing beside it that a repair would read."""
    return f"{root}/{secrets.token_hex(6)}/place"


def _below(store: Storage, way: str = "") -> Iterable[tuple[str, bytes]]:
    for info in store.list():
        yield f"{way}{info.name}", store.read(info.name)
    for name in store.list_dirs():
        yield from _below(store.join(name), f"{way}{name}/")


def _moments(place: str, stop_at: int | None, child: list[int]) -> Moments:
    """Moments at which the child and all processes below it are killed."""

    def kill() -> None:
        for pid in (*child, *ending._descendants(ending._tree(), child[0], ())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    return Moments(place, stop_at, kill)


def _asking(moments: Moments, act: Callable[[], Any]) -> int:
    try:
        traced.ask(moments.inherited, moments.program, moments.seccomp)
        act()
        return 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        return 1
