"""`limit_num_subdirs`, which removes the oldest directories of a run, and further small names.

SMP's rule stays beside that of `RunDirectory`: its caller gives the names by a pattern and their
order by a function, and a directory may hold several checkpoints, or none of smckpt's.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import smckpt
from smckpt.checkpoint.records.format import parse_name
from smckpt.integrations.replaced import remove_or_keep
from smckpt.meeting.group import get_global_ranks

__all__ = ["SORT_BY_LAST_INT", "get_global_ranks", "limit_num_subdirs", "timeit"]


logger = logging.getLogger("smckpt")


def SORT_BY_LAST_INT(name: str) -> int:  # SMP has this name
    """By the last number in a name: 20 of "run3-20steps"; -1 if there is none."""
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else -1


def limit_num_subdirs(
    directory: str | os.PathLike[str],
    num_max: int,
    sort_fn: Callable[[str], Any] | None = SORT_BY_LAST_INT,
    regex: str | None = None,
    log: bool = True,
) -> list[str]:
    """Keep the newest directories, and remove the others.

    A directory with an unfinished save stays and does not count. So a committed one is removed only
    when enough newer ones are committed.

    Args:
        directory: the parent of the directories, on a file system.
        num_max: the number to keep; below 1 keeps all.
        sort_fn: the sort key of a name, higher for later ones. None: the name.
        regex: only directories whose name it matches from the beginning.
        log: whether this process removes; in SMP's scripts one rank of the job does.

    Returns:
        The removed names.
    """
    if not log or num_max < 1:
        return []
    root = Path(directory)
    names = [
        path.name
        for path in root.iterdir()
        if path.is_dir() and not path.is_symlink() and re.match(regex or "", path.name)
    ]
    whole = []
    for name in sorted(names, key=sort_fn or str):
        ours = any(parse_name(file.name) is not None for file in (root / name).rglob("*"))
        if not ours or smckpt.find_checkpoints(root / name):  # else: without a commit yet
            whole.append(name)
    gone = []
    for name in whole[:-num_max]:
        # the commit goes first: a crash leaves nothing that loads
        removed = [remove_or_keep(one, {}) for one in smckpt.find_checkpoints(root / name)]
        if not all(removed):
            continue
        gone.append(name)
        logger.info("removed %s", root / name)
        shutil.rmtree(root / name, ignore_errors=not (root / name).exists())
    return gone


SMP_IS_LOAD_INFO_KEY = "smp_is_load_info"
SMP_IS_PARTIAL_KEY = "smp_is_partial"


log = logging.getLogger("smckpt")


@contextmanager
def timeit(enabled: bool = True, message: str = "", rank: int = 0) -> Iterator[None]:
    """Log how long the block took."""
    began = time.perf_counter()
    yield
    if enabled:
        log.info("%s took %.2f s on rank %d", message, time.perf_counter() - began, rank)
