"""Before the first save: the size of a step, and whether it fits the file system."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smckpt.checkpoint.commits.run_directory import RetentionPolicy
from smckpt.engine.api import bytes_of, prewarm
from smckpt.engine.groups import ReplicationGroup
from smckpt.engine.saving.job import SaveOptions, bytes_text
from smckpt.errors import StorageError, count_text, few
from smckpt.layout.containers import items_of
from smckpt.manager.retention import Best, Newest
from smckpt.meeting.round import Meeting
from smckpt.state_dict.of_optimizers.bindings import is_optimizer_dict
from smckpt.state_dict.tags import is_stateful
from smckpt.storage import Storage
from smckpt.storage.disk import lustre
from smckpt.topology import ParallelState

log = logging.getLogger("smckpt")

_NAMED = 4  # full targets in one warning
_COORDINATE = re.compile(r"(\D+?)(\d+)(?:_|$)")
_Q_GETQUOTA = 0x800007 << 8  # of a user: type 0


@dataclass(frozen=True)
class Room:
    """nbytes: the bytes that this user may still write. of: the name of the limit."""

    nbytes: int
    of: str


class _Quota(ctypes.Structure):
    """struct if_dqblk of linux/quota.h; limits in blocks of 1,024 bytes."""

    _fields_ = (
        ("hard", ctypes.c_uint64),
        ("soft", ctypes.c_uint64),
        ("used_bytes", ctypes.c_uint64),
        ("files", ctypes.c_uint64 * 5),
        ("valid", ctypes.c_uint32),
    )


def room_at(root: Storage) -> Room | None:
    """The free space at a directory, which need not exist yet. None if it is not known: an object
    store, or a file system without a size."""
    if root.folder is None:
        return None
    path = _existing(root.folder)
    try:
        stats = os.statvfs(path)
    except OSError:
        return None
    if not stats.f_blocks:
        return None
    rooms = [Room(stats.f_bavail * stats.f_frsize, "the file system")]
    quota = _quota_left(path)
    if quota is not None:
        rooms.append(Room(quota, "this user's quota"))
    rooms += [Room(left, name) for name, left in lustre.quotas_left(path)]
    return min(rooms, key=lambda room: room.nbytes)


def _existing(path: str) -> str:
    """The path, or the first directory above that exists."""
    while not os.path.lexists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def _quota_left(path: str) -> int | None:
    """The rest of the user's disk quota; None without one, or if the kernel does not tell."""
    device = _device_of(path)
    call = getattr(ctypes.CDLL(None), "quotactl", None)
    if device is None or call is None:
        return None
    quota = _Quota()
    if call(_Q_GETQUOTA, os.fsencode(device), os.getuid(), ctypes.byref(quota)):
        return None
    limit = quota.hard or quota.soft
    if not limit:
        return None
    return max(int(limit) * 1024 - int(quota.used_bytes), 0)


def _device_of(path: str) -> str | None:
    """The block device that is mounted there."""
    number = os.stat(path).st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            before, _, after = line.partition(" - ")
            if before.split()[2] == wanted:
                source = after.split()[1]
                return source if source.startswith("/") else None
    return None


def degrees_text(given: ParallelState | None, groups: Sequence[str]) -> str:
    """The degrees of a job, such as " (tp 2, shard 4)".

    Args:
        given: None: the names of the ranks' groups tell, such as "dp_shard0_tp1".
    """
    if given is not None:
        sizes = {"pp": given.pp_size, "tp": given.tp_size, "ep": given.ep_size}
        sizes |= {"shard": given.fsdp_size, "replicas": given.rep_size}
    else:
        parts = [_COORDINATE.findall(name) for name in groups]
        found = {
            dim: {index for one in parts for d, index in one if d == dim}
            for one in parts
            for dim, _ in one
        }
        sizes = {dim: len(indices) for dim, indices in found.items()}
    text = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return f" ({text})" if text else ""


def check_room(
    root: Storage,
    bytes_of_ranks: Mapping[int, int],
    replicas: int,
    policies: Sequence[RetentionPolicy],
    saved: Callable[[], int],
    degrees: str = "",
    save_seconds: float | None = None,
) -> None:
    """Log the size of a step, and check that it fits. One rank calls it.

    Args:
        bytes_of_ranks: bytes of a step by rank.
        replicas: ranks that hold the same shards.
        policies: those that keep steps; without any, all stay.
        saved: bytes of the steps that this run has saved already, all of which the policies may
            let go one day.
        degrees: as text. save_seconds: those of the run's last save until its commit, if known.

    Raises:
        StorageError: not even one step fits.
    """
    ranks, step = len(bytes_of_ranks), sum(bytes_of_ranks.values())
    time = "the first commit will tell the time of a save"
    if save_seconds is not None:
        time = f"a save takes about {save_seconds:.3g} s, as the run's last one"
    line = (
        f"saves to {root.url}: {count_text(ranks, 'rank')}{degrees}, "
        f"{count_text(ranks // replicas, 'group')} of {replicas}; "
        f"{bytes_text(step)} a step, up to {bytes_text(max(bytes_of_ranks.values()))} a rank; "
        f"{time}"
    )
    room = room_at(root)
    if room is None:
        log.info("%s; the free space is not known", line)
        return
    left = f"{bytes_text(room.nbytes)} left in {room.of}"
    log.info("%s; %s, room for %s", line, left, count_text(room.nbytes // max(step, 1), "step"))
    if step > room.nbytes:
        raise StorageError(
            f"a step takes {bytes_text(step)}, and there are {left}",
            remedy="free space, raise the quota, or save elsewhere",
            path=root.url,
        )
    if root.folder is not None:
        _warn_of_full_targets(root.folder, max(bytes_of_ranks.values()))
    if not policies:
        return
    counted = [one for one in policies if isinstance(one, (Newest, Best))]
    others = [repr(one) for one in policies if one not in counted]
    stay = sum(one.count for one in counted)
    needed = (stay + 1) * step  # the newest is committed before the oldest is deleted
    if needed > room.nbytes + saved():
        log.warning(
            "the policies keep up to %d steps%s, and one more while it is written: %s, but there "
            "are %s. Saves will fail: free space, or keep fewer",
            stay,
            f", and those of {', '.join(others)}" if others else "",
            bytes_text(needed),
            left,
        )


def _warn_of_full_targets(folder: str, rank: int) -> None:
    """Name the targets of a Lustre that have less room than a rank writes: a file that Lustre puts
    there cannot be written, although the file system as a whole has room."""
    targets = lustre.targets(_existing(folder))
    full = sorted((one for one in targets if one.free < rank), key=lambda one: one.free)
    if not full:
        return
    named = few([f"{one.name} ({bytes_text(one.free)} left)" for one in full], _NAMED)
    log.warning(
        "%d of %d Lustre targets have less room than a rank writes (up to %s): %s. A file that "
        "Lustre places there fails with ENOSPC. Delete or move files there (`lfs find "
        "%s --ost %d`, `lfs migrate`), spread new files over all targets (`lfs "
        "setstripe -c -1 %s`), or ask the administrator to stop new files there",
        len(full),
        len(targets),
        bytes_text(rank),
        named,
        folder,
        full[0].index,
        folder,
    )


def meet_about_room(
    meeting: Meeting,
    point: str,
    live: Mapping[str, Any],
    group: ReplicationGroup,
    root: Storage,
    policies: Sequence[RetentionPolicy],
    saved: Callable[[], int],
    degrees: ParallelState | None,
    save_seconds: float | None,
    options: SaveOptions,
    timeout: float,
) -> None:
    """Before a manager's first save, on all ranks: is there room for the steps that stay?

    Raises:
        StorageError: not for one. All ranks raise it.
    """

    def mine() -> list[Any]:
        try:
            return [bytes_of(live, group.process_group, options), group.name]
        except Exception:  # async_save finds it too, and tells the peers
            return [0, group.name]

    def decide(brought: Callable[[], dict[int, list[Any]]]) -> None:
        found = brought()
        text = degrees_text(degrees, [name for _, name in found.values()])
        sizes = {rank: size for rank, (size, _) in found.items()}
        check_room(root, sizes, len(group.ranks), policies, saved, text, save_seconds)

    meeting.round(point, mine, decide, timeout=timeout)


def get_memory(
    take: Callable[[], Mapping[str, Any] | None], process_group: Any, queues: Sequence[SaveOptions]
) -> None:
    """`prewarm` for the first saves of a training whose state `take` gives, models, optimizers and
    tensors. A user's other objects are not asked for their state: to ask may change it, or run a
    collective. What fails here fails those saves, or nothing."""
    try:
        state = _without_objects(take())
        for options in queues:
            prewarm(state, process_group=process_group, options=options)
    except Exception as error:
        log.info("the first save gets its memory itself: %s", error)


def _without_objects(value: Any) -> Any:
    """The same value where nothing is left out: an optimizer's dict is known by its identity."""
    pairs = None if is_optimizer_dict(value) else items_of(value)
    if pairs is None or isinstance(value, (torch.Tensor, torch.nn.Module)):
        return value
    items = dict(pairs)
    kept = {k: _without_objects(child) for k, child in items.items() if not _is_users(child)}
    if len(kept) == len(items) and all(kept[key] is items[key] for key in kept):
        return value
    return kept if isinstance(value, dict) else [*kept.values()]


def _is_users(value: Any) -> bool:
    return is_stateful(value) and not isinstance(value, (torch.nn.Module, torch.optim.Optimizer))
