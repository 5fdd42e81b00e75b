"""Deleting what a newer commit supersedes, and what dead attempts left.

Only files whose names are ours, only of attempts that are over: earlier epochs, or earlier numbers
of the same session. Records go first, then manifests, then what they name, so that nothing half
deleted can be taken for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from smckpt.checkpoint.format import ParsedName, open_json, parse_name
from smckpt.errors import CorruptCheckpointError
from smckpt.storage import Storage, open_storage
from smckpt.storage.urls import join_url

__all__ = ["sweep", "sweep_records"]

_ORDER = {"record": 0, "manifest": 1, "part": 2, "data": 3, "crc": 4, "epoch": 5, "probe": 5}


def sweep(directory: str, keep: Sequence[str], epoch: int) -> dict[str, Any]:
    """Delete what the manifests in `keep` supersede in a group's directory.

    Args:
        keep: names of manifests to keep, with all that they name. Each must be readable.
        epoch: of the caller; nothing of a later epoch is touched.

    Returns:
        {"deleted": number of files}.
    """
    storage = open_storage(directory)
    kept_sessions: dict[str, int] = {}
    keep_numbers: set[tuple[str, int]] = set()
    for name in keep:
        manifest = open_json(storage.read(name), join_url(directory, name))
        keep_numbers.add((manifest["session"], manifest["number"]))
        session, number = manifest["session"], manifest["number"]
        kept_sessions[session] = max(kept_sessions.get(session, -1), number)
    sessions = _sessions_of_earlier_epochs(storage, epoch)
    doomed = []
    for info in storage.list():
        parsed = parse_name(info.name)
        if parsed is None or parsed.kind == "record" or info.name in keep:
            continue
        if _is_over(parsed, keep_numbers, kept_sessions, sessions, epoch):
            doomed.append((parsed.kind, info.name))
    return {"deleted": _delete(storage, doomed)}


def sweep_records(directory: str, keep: Sequence[str], epoch: int, number: int) -> dict[str, Any]:
    """Delete the records that the one in `keep` supersedes; before their manifests go."""
    storage = open_storage(directory)
    doomed = []
    for info in storage.list():
        parsed = parse_name(info.name)
        if parsed is None or info.name in keep:
            continue
        if parsed.kind == "record" and (parsed.epoch, parsed.number) < (epoch, number):
            doomed.append((parsed.kind, info.name))
        elif parsed.kind == "epoch" and parsed.epoch < epoch:
            doomed.append((parsed.kind, info.name))
    return {"deleted": _delete(storage, doomed)}


def _sessions_of_earlier_epochs(storage: Storage, epoch: int) -> set[str]:
    """Sessions that claimed an epoch here before `epoch`, or published under one."""
    sessions = set()
    for info in storage.list():
        parsed = parse_name(info.name)
        if parsed is None or not 0 <= parsed.epoch < epoch:
            continue
        if parsed.kind == "manifest":
            sessions.add(parsed.session)
        elif parsed.kind == "epoch":
            try:
                claim = open_json(storage.read(info.name), join_url(storage.url, info.name))
                sessions.add(claim["session"])
            except CorruptCheckpointError:
                continue  # a claim that cannot be read condemns nobody
    return sessions


def _is_over(
    parsed: ParsedName,
    keep_numbers: Iterable[tuple[str, int]],
    kept_sessions: dict[str, int],
    earlier_sessions: set[str],
    epoch: int,
) -> bool:
    if parsed.kind == "epoch":
        return parsed.epoch < epoch
    if (parsed.session, parsed.number) in keep_numbers:
        return False
    if parsed.kind == "manifest":
        if parsed.epoch != epoch:
            return parsed.epoch < epoch
        return parsed.number < kept_sessions.get(parsed.session, -1)
    if parsed.session in kept_sessions:
        # The probe of a session has done its work once a save of that session is committed.
        return parsed.kind == "probe" or parsed.number < kept_sessions[parsed.session]
    return parsed.session in earlier_sessions


def _delete(storage: Storage, doomed: list[tuple[str, str]]) -> int:
    for _, name in sorted(doomed, key=lambda item: (_ORDER[item[0]], item[1])):
        storage.delete(name)
    return len(doomed)
