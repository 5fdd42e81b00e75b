"""Removes a committed checkpoint: the files that its record and manifests name, and no others; and
the pins of readers, which no removal passes over.

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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from msgspec import Meta

from smckpt.checkpoint.commits.choose import choose_commit, commits_at, commits_in
from smckpt.checkpoint.commits.contents import Contents, contents_of
from smckpt.checkpoint.commits.leases import leases_at
from smckpt.checkpoint.records.format import (
    ATTEMPTS,
    FORMAT_VERSION,
    Owner,
    Rank,
    name_of,
    order_of,
    ours_among,
    parse_name,
    parse_temporary,
)
from smckpt.checkpoint.records.prefixes import spread_over
from smckpt.checkpoint.records.sealed import OF_OTHERS, read_file, seal_json
from smckpt.decoding import Count
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
from smckpt.storage.budget import Spread

log = logging.getLogger("smckpt")


@dataclass(frozen=True)
class RemoveReport:
    """What was removed. nbytes: 0 where a removal that was cut short had begun it. left: the older
    commit that is the newest there now, if there is one."""

    path: str
    identity: str
    files: int
    nbytes: int
    left: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RemovalGroup:
    """The files of a group. directory: relative to the checkpoint's. parts: (rank, names of its
    part, data and checksums, in the order of deletion)."""

    directory: str
    manifest: str
    fencing_token: Count
    session: str
    parts: tuple[tuple[Rank, Annotated[tuple[str, ...], Meta(min_length=1)]], ...]
    prefix_sharding: Spread | None  # the word of the mark

    def __post_init__(self) -> None:
        name_of(self.manifest, "manifest")
        for _, names in self.parts:
            for name in names:
                name_of(name, "part", "data", "crc")


@dataclass(frozen=True)
class Removal:
    """All files of a checkpoint to delete. It is enough to finish a deletion after the manifests
    are gone."""

    record: str | None
    groups: Annotated[tuple[RemovalGroup, ...], Meta(min_length=1)]

    def __post_init__(self) -> None:
        if self.record is not None:
            name_of(self.record, "record")

    @property
    def identity(self) -> str:
        return self.record or self.groups[0].manifest

    @property
    def files(self) -> int:
        named = sum(1 + sum(len(names) for _, names in group.parts) for group in self.groups)
        return named + (self.record is not None)


def removal_of(contents: Contents) -> Removal:
    """The files that a removal of this checkpoint deletes.

    Raises:
        UsageError: a group's directory is a link, which would lead to somebody else's files.
    """
    groups = []
    for group in contents.groups:
        manifest = group.manifest
        group.storage.refuse_links()
        parts = []
        for part in manifest.parts:
            names = [part.name, *(f.name for f in part.files), *(f.crc_name for f in part.files)]
            parts.append((part.rank, tuple(names)))
        groups.append(
            RemovalGroup(
                group.directory,
                group.manifest_name,
                manifest.fencing_token,
                manifest.session,
                tuple(parts),
                group.storage.spread,
            )
        )
    return Removal(contents.record, tuple(groups))


def remove_probes(root: Storage, steps: Iterable[str]) -> None:
    """Remove the directories in which a save was killed before it had written anything. A directory
    that holds another file stays as it is.

    Args:
        steps: directories below `root`, where nobody saves any more.
    """
    for subpath in steps:
        try:
            _remove_probes(root.join(subpath))
        except CheckpointError as error:
            log.warning("what a killed save has left in %s stays: %s", subpath, error)


def _remove_probes(step: Storage) -> None:
    groups = [step.join(name) for name in step.list_dirs()]
    if any(store.list_dirs() for store in groups):
        return
    tried = [(store, store.names()) for store in (*groups, step)]
    parsed = [parse_name(name) or parse_temporary(name) for _, names in tried for name in names]
    if not parsed or any(one is None or one.kind != "probe" for one in parsed):
        return
    for store, _ in tried:
        store.refuse_links()
    for store, names in tried:
        store.delete_many(names)
        store.remove_directory()


def carry_out(top: Storage, removal: Removal, seen: Collection[str]) -> None:
    """Delete the files in the directory `top` and below. After a call that was cut short, call it
    again.

    Args:
        seen: the names that `top` had just now. So each directory is listed once.

    Raises:
        UsageError: a directory is a link, which would lead to somebody else's files.
        StorageError: the store refused.
    """
    groups = [
        (spread_over(top.join(group.directory), [group.prefix_sharding]), group)
        for group in removal.groups
    ]
    for store, _ in groups:  # all places, before anything is deleted
        store.refuse_links()
    if removal.record is not None:
        top.delete(removal.record)
        top.sync()
    for store, group in groups:
        store.delete(group.manifest)
    for store, _ in groups:  # a power failure could bring a manifest back without its files
        store.sync()
    for store, group in groups:
        store.delete_many([names[0] for _, names in group.parts])
    for store, group in groups:
        store.delete_many([name for _, names in group.parts for name in names[1:]])
    directories = [store for store, _ in groups]
    left: dict[str, Collection[str]] = {}
    for store in {one.url: one for one in (top, *directories)}.values():
        if store.url != top.url or store.spread is not None:
            # with files of saves that did not spread theirs
            left[store.url] = spread_over(store, [store.spread, None]).names()
        else:
            inside = [group for group in removal.groups if not group.directory]
            gone = {name for group in inside for _, names in group.parts for name in names}
            gone |= {removal.record or "", *(group.manifest for group in inside)}
            left[store.url] = sorted({*seen} - gone)
    _tidy(top, removal, directories, left)


def _tidy(
    top: Storage,
    removal: Removal,
    directories: Sequence[Storage],
    left: Mapping[str, Collection[str]],
) -> None:
    """Remove the lease under which the checkpoint was made, and directories that are empty now.

    Leases tell later runs from earlier ones. So earlier leases are deleted only if no file of a
    save is left, and later ones stay.

    Args:
        left: the names that are left in each directory, by URL.
    """
    urls = {store.url for store in directories}
    names = {name for store in directories for name in left[store.url]}
    written = ours_among(names, "record", "manifest", "part", "data", "crc")
    fencing_token = max(group.fencing_token for group in removal.groups)
    ours = not any(p.fencing_token == fencing_token for p in written)
    sessions = {group.session for group in removal.groups}
    for store in {store.url: store for store in (*directories, top)}.values():
        try:
            leases = leases_at(store, left[store.url])
        except CheckpointError as error:
            log.warning("leases stay: %s", error)
            return
        for probe in ours_among(left[store.url], "probe"):
            if probe.session in sessions:
                store.delete(probe.name)
        for lease in leases:
            over = (
                ours
                if lease.fencing_token == fencing_token
                else lease.fencing_token < fencing_token and not written
            )
            if over and lease.scope <= urls:
                store.delete(lease.name)
        for name in left[store.url]:  # what a creation could not remove, as the disk failed
            tmp = parse_temporary(name)
            if tmp is not None and (tmp.session in sessions or tmp.fencing_token == fencing_token):
                store.delete(name)
    if ATTEMPTS in left[top.url]:
        top.delete(ATTEMPTS)
    for store in directories:
        store.remove_directory()
    for group in removal.groups:
        subpath = group.directory.split("/")
        for depth in range(len(subpath) - 1, 0, -1):
            top.join("/".join(subpath[:depth])).remove_directory()
    top.remove_directory()


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
        if time.monotonic() > until or all(one.name != wanted for one in commits_at(storage)):
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
        newest = [one.name for one in commits_in(names)[:1]]
        # a newer manifest may be of a step that was never committed
        if newest != [contents.identity] and contents_of(top).identity != contents.identity:
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
    last = max(finished, key=lambda one: order_of(one.identity), default=None)
    if contents is not None and (
        last is None or order_of(contents.identity) > order_of(last.identity)
    ):
        remove_checkpoint(contents)
        identity, files, nbytes = contents.identity, contents.files, contents.commit.nbytes
    else:
        assert last is not None
        identity, files, nbytes = last.identity, last.files, 0
    try:
        left = choose_commit(top).identity
    except (CheckpointNotFoundError, CorruptCheckpointError):  # or the rest of a swept commit
        left = None
    return RemoveReport(top.url, identity, files, nbytes, left)


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
        stands = False  # whether the checkpoint that the mark names is still committed
        if _held(top, names):
            with contextlib.suppress(CheckpointError):
                stands = contents_of(top).identity == removal.identity
        if stands:
            top.delete(mark)  # it was cut short before it deleted anything, and a reader came
            continue
        carry_out(top, removal, names)
        _end(top, mark, names)
        finished.append(removal)
    return finished


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
