"""Pins of readers and marks of deletions: whichever comes later sees the earlier one.

A reader writes its pin and then looks for marks. A deletion writes its mark and then lists the
directory; if that has a pin, it deletes the mark. So no pinned checkpoint is deleted, and no
checkpoint under deletion is pinned. A reader that sees a mark waits for a moment, because the mark
goes if the deletion has seen this or another pin. The mark lists every file to delete, so a later
run can finish a deletion that was cut short after the manifest went.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from smckpt.checkpoint.commits.choose import choose_commit, commits_at, commits_in
from smckpt.checkpoint.commits.contents import Contents, contents_of
from smckpt.checkpoint.commits.remove import Removal, RemoveReport, carry_out, removal_of
from smckpt.checkpoint.records.files import OF_OTHERS, read_file
from smckpt.checkpoint.records.format import Owner, parse_name
from smckpt.checkpoint.records.sealed import FORMAT_VERSION, seal_json
from smckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointPinnedError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    FormatVersionError,
    UsageError,
)
from smckpt.storage import Storage, StoreOptions, open_storage

__all__ = ["finish_removals", "pinned", "remove_checkpoint", "remove_newest"]

log = logging.getLogger("smckpt")

_PIN = re.compile(r"pin-[0-9a-f]{16}\.json")
_MARK = re.compile(r"removing-\d{8,}-[0-9a-f]{12}\.json", re.ASCII)
_MAX_PIN = 1 << 16  # bytes
_SKEW = 60 * 10**9  # nanoseconds by which clocks of healthy hosts may differ
_WITHDRAWAL = 2.0  # seconds in which a deletion that has seen a pin deletes its mark
_LOOK = 0.05  # seconds between two looks for the mark


@contextlib.contextmanager
def pinned(
    checkpoint: str | os.PathLike[str],
    *,
    seconds: float = 3600.0,
    storage: StoreOptions | Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """While the block runs, smckpt does not delete this checkpoint: no retention of a manager or of
    a framework does, and `smckpt.remove` refuses. Only a newer save into the same directory does.

    An evaluation or an export uses it while the run goes on. The pin is a small file in the
    checkpoint's directory, so the reader needs permission to write there.

    Args:
        checkpoint: the directory of a step.
        seconds: the pin ends by itself after this time, so that a killed reader leaves none.
        storage: as in `smckpt.load`.

    Raises:
        CheckpointNotFoundError: there is no committed checkpoint, or a run is deleting it.
        UsageError: `seconds` is not positive.
    """
    if seconds <= 0:
        raise UsageError(f"seconds is {seconds!r}", remedy="give a positive number")
    opened = open_storage(checkpoint, storage=storage)
    wanted = contents_of(opened).identity
    name = f"pin-{secrets.token_hex(8)}.json"
    body = {
        "format": list(FORMAT_VERSION),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "until": time.time_ns() + int(seconds * 1e9),
    }
    opened.put_exclusive(name, seal_json(body))
    try:
        _wait_for_marks(opened, wanted)
        yield
    except CheckpointNotFoundError:
        opened.delete(name)
        opened.remove_directory()  # our pin may have made it anew
        raise
    finally:
        opened.delete(name)


def _wait_for_marks(storage: Storage, wanted: str) -> None:
    """Wait until no deletion has a mark on the checkpoint `wanted`, for at most `_WITHDRAWAL`.

    Raises:
        CheckpointNotFoundError: it is being deleted, or was.
    """
    until = time.monotonic() + _WITHDRAWAL
    while _marks(storage):
        if time.monotonic() > until or all(name != wanted for *_, name in commits_at(storage)):
            raise _going(storage)
        time.sleep(_LOOK)
    try:
        still = contents_of(storage, wanted).identity
    except CheckpointNotFoundError as error:
        raise _going(storage) from error
    if still != wanted:
        raise _going(storage)


def _going(storage: Storage) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        "the checkpoint is being deleted", remedy="take a newer one", path=storage.url
    )


def remove_checkpoint(contents: Contents) -> None:
    """Delete the files of a checkpoint, and no others. The record and manifests are deleted first,
    so a removal that is cut short leaves no half checkpoint, only files that no reader takes for
    one, and the mark, by which `finish_removals` deletes the rest.

    Files that are already gone are fine. If no file of a save is left, the leases are deleted last,
    and then empty directories, the checkpoint's own included.

    Raises:
        CheckpointPinnedError: a reader has pinned it; nothing was deleted.
        CheckpointReplacedError: a newer commit has taken its place; nothing was deleted.
        UsageError: a group's directory is a link, which would lead to somebody else's files.
        StorageError: the store refused; what is left can be loaded only if nothing was deleted.
    """
    top = contents.storage
    parsed = parse_name(contents.identity)
    assert parsed is not None
    mark = f"removing-{parsed.number:08d}-{parsed.session}.json"
    removal = removal_of(contents)
    body = {"format": list(FORMAT_VERSION), **asdict(removal)}
    top.put_exclusive(mark, seal_json(body))
    names = top.names()  # the one listing, after the mark
    try:
        if pin := _held(top, names):
            raise CheckpointPinnedError(
                "a reader has pinned the checkpoint",
                remedy=f"wait until the reader has ended; {pin} says which process it is",
                path=top.url,
            )
        if _replaced(top, names, contents.identity):
            raise CheckpointReplacedError(
                "a newer save has replaced the checkpoint",
                remedy="look at the directory again",
                path=top.url,
            )
    except CheckpointError:
        top.delete(mark)
        raise
    carry_out(top, removal, names)
    _end(top, mark, names)


def remove_newest(top: Storage) -> RemoveReport:
    """Remove the newest checkpoint in a directory. Where an earlier removal of the newest was cut
    short, only finish that one.

    Raises:
        CheckpointNotFoundError: nothing committed is there. Else as `remove_checkpoint`.
    """
    finished = finish_removals(top)
    try:
        contents = contents_of(top)
    except CheckpointNotFoundError:
        if not finished:
            raise
        contents = None
    last = max(finished, key=lambda one: _order(one.identity), default=None)
    if contents is not None and (last is None or _order(contents.identity) > _order(last.identity)):
        remove_checkpoint(contents)
        identity, files, nbytes = contents.identity, contents.files, contents.nbytes
    else:
        assert last is not None
        identity, files, nbytes = last.identity, last.files, 0
    try:
        left = choose_commit(top).identity
    except (CheckpointNotFoundError, CorruptCheckpointError):  # or the rest of a swept commit
        left = None
    return RemoveReport(top.url, identity, files, nbytes, left)


def _order(identity: str) -> tuple[int, int]:
    parsed = parse_name(identity)
    assert parsed is not None
    return parsed.fencing_token, parsed.number


def _replaced(top: Storage, names: Iterable[str], identity: str) -> bool:
    """Whether a newer commit has taken the place of this one."""
    newest = commits_in(names)[:1]
    # a newer manifest may be of a step that was never committed
    return [name for *_, name in newest] != [identity] and contents_of(top).identity != identity


def finish_removals(top: Storage) -> list[Removal]:
    """Finish the removals that were cut short in this directory; returns them.

    Raises:
        CheckpointError: the store refused, or another program wrote the mark.
    """
    finished = []
    marks = _marks(top)
    names = top.names() if marks else ()
    for mark in marks:
        removal = read_file(Removal, top, mark, remedy=OF_OTHERS)
        if _held(top, names) and _stands(top, removal):
            top.delete(mark)  # it was cut short before it deleted anything, and a reader came
            continue
        carry_out(top, removal, names)
        _end(top, mark, names)
        finished.append(removal)
    return finished


def _stands(top: Storage, removal: Removal) -> bool:
    """Whether the checkpoint that a mark names is still committed."""
    with contextlib.suppress(CheckpointError):
        return contents_of(top).identity == removal.identity
    return False


def _marks(storage: Storage) -> list[str]:
    return [name for name in storage.names("removing-") if _MARK.fullmatch(name)]


def _held(storage: Storage, names: Iterable[str]) -> str:
    """A reader's pin among the files; "" if there is none. This deletes pins whose time is over."""
    held = ""
    for name in names:
        if _PIN.fullmatch(name) is None:
            continue
        try:
            until = read_file(Owner, storage, name, most=_MAX_PIN).until
        except CheckpointNotFoundError:
            continue  # its time is over
        except (CorruptCheckpointError, FormatVersionError):
            # half written, so its reader is about to look for marks; or written by a newer version
            held = name
            continue
        if until is None or until + _SKEW > time.time_ns():
            held = name
        else:
            storage.delete(name)
    return held


def _end(top: Storage, mark: str, names: Iterable[str]) -> None:
    top.delete(mark)
    for name in names:  # what a process that was killed left of the mark
        if name.startswith(f".{mark}."):
            top.delete(name)
    top.remove_directory()
