"""What Lustre's own command, `lfs`, tells of a place: the free space of each object storage target
(OST), and quotas of user, group and project.

The kernel tells neither: statvfs adds up all OSTs, and a file lies on one OST unless it is striped.
The formats are those of lfs-df(1), lfs-quota(1) and lfs-project(1). Where `lfs` is absent, fails,
or says something else, nothing is known.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_SECONDS = 10.0  # for one command: a client that has lost a server would wait for minutes
_KIB = 1024

# "scratch-OST0003_UUID  15.7  8.0  15.7  1% /scratch[OST:3]"; in KiB. A target that does not answer
# has "inactive device" or an error instead of numbers.
_OST = re.compile(r"(\S+?)(?:_UUID)?\s+\d+\s+\d+\s+(\d+)\s+\d+%\s.*\[OST:(\d+)\]")
# used (a star: above a limit; brackets: a server did not answer), soft limit, hard limit; in KiB
_QUOTA = re.compile(r"\s*\[?(\d+)\*?\]?\*?\s+\[?(\d+)\]?\s+\[?(\d+)\]?\s")
_PROJECT = re.compile(r"\s*(\d+)\s")


@dataclass(frozen=True)
class LustreTarget:
    """An OST: its name, its index (as in `lfs setstripe -i`), and its free bytes."""

    name: str
    index: int
    free: int


def targets(path: str) -> tuple[LustreTarget, ...]:
    """The OSTs of the Lustre that a path is on; none if it is on another file system."""
    output = _lfs("df", "-l", path)  # -l: ask no server that this host has no connection to
    return tuple(
        LustreTarget(match[1], int(match[3]), int(match[2]) * _KIB)
        for line in output.splitlines()
        if (match := _OST.match(line.strip()))
    )


def quotas_left(path: str) -> Iterator[tuple[str, int]]:
    """The name of each quota that limits new files of this process at a path, and its rest in
    bytes: the user's, the group's, the project's."""
    if shutil.which("lfs") is None:
        return
    status = os.stat(path)
    group = status.st_gid if status.st_mode & stat.S_ISGID else os.getegid()
    whose = [("-u", os.getuid(), "this user's Lustre quota")]
    whose.append(("-g", group, f"the Lustre quota of group {group}"))
    project = _PROJECT.match(_lfs("project", "-d", path))
    if project and int(project[1]):
        whose.append(("-p", int(project[1]), f"the Lustre quota of project {project[1]}"))
    for flag, number, name in whose:
        left = _left(_lfs("quota", "-q", flag, str(number), path), path)
        if left is not None:
            yield name, left


def _left(output: str, path: str) -> int | None:
    """The rest of a quota in bytes; None without a limit. A long path has a line of its own."""
    at = output.find(path)
    match = _QUOTA.match(output, at + len(path)) if at >= 0 else None
    if match is None:
        return None
    used, soft, hard = (int(number) for number in match.groups())
    limit = hard or soft
    return max(limit - used, 0) * _KIB if limit else None


def _lfs(*arguments: str) -> str:
    """What the command prints; "" if it is absent, fails or takes too long."""
    program = shutil.which("lfs")
    if program is None:
        return ""
    try:
        process = subprocess.Popen(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
        )
    except OSError:
        return ""
    try:
        output, _ = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # and no wait: what waits for a server in the kernel does not end at once
        return ""
    return output.decode(errors="replace")  # df fails if one target of many does not answer
