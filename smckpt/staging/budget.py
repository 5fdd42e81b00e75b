"""Checks that the arenas of a host's ranks fit its memory, before any of them is made.

The kernel does not refuse memory that it lacks: it kills a process. So this module first reads the
host's MemAvailable and the limits of this process's cgroups (v1 and v2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from smckpt.errors import MemoryBudgetError

__all__ = ["check_memory"]

_RESERVE = 64 << 20  # per rank, for the worker process and its buffers


@dataclass(frozen=True)
class _Room:
    """Memory that is still free, in bytes, and the name of the bound."""

    free: int
    what: str


def check_memory(
    arena_bytes: int, ranks_on_host: int, copies: int = 1, *, root: Path = Path("/")
) -> None:
    """Refuse arenas that do not fit; the error shows the arithmetic.

    Args:
        arena_bytes: of one arena.
        ranks_on_host: ranks on this host whose arenas are still to be made.
        copies: arenas per rank.
        root: of the host's /proc and /sys.

    Raises:
        MemoryBudgetError: they need more than the host has available or a cgroup still allows.
    """
    need = (arena_bytes * copies + _RESERVE) * ranks_on_host
    rooms = [*_host(root), *_cgroup2(root), *_cgroup1(root)]
    if not rooms:
        return  # no such files (macOS): the kernel will have to answer
    tightest = min(rooms, key=lambda room: room.free)
    if need > tightest.free:
        times = f" × {copies} copies" if copies > 1 else ""
        raise MemoryBudgetError(
            f"{ranks_on_host} ranks on this host need ({_gib(arena_bytes)} of arena{times} + "
            f"{_gib(_RESERVE)}) each = {_gib(need)}, but {tightest.what} leaves "
            f"{_gib(tightest.free)}",
            remedy="raise the limit, run fewer ranks on this host, or save a smaller state per "
            "rank (shard further)",
        )


def _host(root: Path) -> Iterator[_Room]:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield _Room(int(line.split()[1]) * 1024, "the host's MemAvailable")


def _cgroup2(root: Path) -> Iterator[_Room]:
    for line in _lines(root / "proc/self/cgroup"):
        hierarchy, _, path = line.partition("::")
        if hierarchy != "0":
            continue
        for mount in (root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"):
            for group in _ancestry(mount, path):
                limit, used = _number(group / "memory.max"), _number(group / "memory.current")
                if limit is not None and used is not None:
                    kept = _reclaimable(group / "memory.stat", "inactive_file")
                    yield _Room(limit - used + kept, f"the cgroup limit {group}/memory.max")


def _cgroup1(root: Path) -> Iterator[_Room]:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" not in controllers.split(","):
            continue
        for group in _ancestry(root / "sys/fs/cgroup/memory", path):
            limit = _number(group / "memory.limit_in_bytes")
            used = _number(group / "memory.usage_in_bytes")
            if limit is not None and used is not None:
                kept = _reclaimable(group / "memory.stat", "total_inactive_file")
                what = f"the cgroup limit {group}/memory.limit_in_bytes"
                yield _Room(limit - used + kept, what)


def _ancestry(mount: Path, path: str) -> Iterator[Path]:
    """The group's directory and its parents. In a container the path may be the host's, and only
    the mount itself exists."""
    group = mount / path.lstrip("/")
    while group != mount:
        if ".." not in group.parts:
            yield group
        group = group.parent
    yield mount


def _reclaimable(path: Path, name: str) -> int:
    """File pages that the kernel drops before it refuses memory."""
    for line in _lines(path):
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    """None: no such file, or no limit ("max")."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # absent or not readable: no known bound
        return []


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"
