"""Finding checkpoints below a directory."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypedDict, TypeVar, cast, get_type_hints

from smckpt.calls import alone
from smckpt.checkpoint.commits.choose import choose_commit, commits_at
from smckpt.checkpoint.commits.foreign import natural_order
from smckpt.checkpoint.records.format import parse_name
from smckpt.checkpoint.records.prefixes import is_prefix
from smckpt.decoding import decode
from smckpt.errors import CheckpointError, CheckpointNotFoundError, PeerError, StorageError
from smckpt.storage import Storage, StoreOptions, access_to
from smckpt.storage.faults import os_errors_at, twice
from smckpt.storage.urls import normal_url, relative_url

log = logging.getLogger("smckpt")

Kind = TypeVar("Kind")

# Errors that stay until somebody changes the directory. It is not ours, or we cannot use it.
_FOREIGN = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG)
_SKEW = 60 * 10**9  # nanoseconds by which the clocks of healthy hosts may differ
DEPTH = 3  # how many levels of directories below the root are searched


@dataclass(frozen=True, repr=False, eq=False)
class FoundCheckpoint(str):
    """A committed checkpoint. It is the text of its path, or of its URL without the last slash.

    So you can pass it wherever a path is expected: `load(checkpoint_id=found)`, `open(found /
    "notes.txt")`, `f"{found}/part0"`, `Path(found)`. It also has these facts from the commit:

    Args:
        path: the same text.
        step: the step that the save recorded, or None.
        fencing_token: of the session that made it.
        number: of the save in that session.
        committed_at: nanoseconds since 1970.
        kind: "LOCAL", "SHARDED", "FULL" or None.
        nbytes: of all data files.
        groups: the groups' directories, relative to `path`.
        identity: the name of the file that commits it.
        metadata: the `metadata=` of the save.
    """

    path: str
    step: int | None
    fencing_token: int
    number: int
    committed_at: int
    kind: str | None
    nbytes: int
    groups: tuple[str, ...]
    identity: str
    metadata: dict[str, Any] = field(default_factory=dict)

    def __new__(cls, path: str, *_: Any, **__: Any) -> FoundCheckpoint:
        return super().__new__(cls, path)

    def __repr__(self) -> str:
        return f"FoundCheckpoint({self.path!r}, step={self.step})"

    def __truediv__(self, name: str | os.PathLike[str]) -> str:
        """The path of something inside it, written with `/` as for `pathlib`."""
        return f"{self.path.rstrip('/')}/{os.fspath(name)}"

    def to_json(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_json(cls, data: Any) -> FoundCheckpoint:
        """What a peer sent.

        Raises:
            PeerError: the data is something else.
        """
        try:
            return cls(**decode(_FACTS, data))
        except ValueError as error:
            raise PeerError(
                f"a peer's message about a checkpoint cannot be decoded: {error}",
                remedy="all ranks must run one version of smckpt",
            ) from error


# The fields alone: no decoder makes a text.
_FACTS = cast(
    "type[dict[str, Any]]",
    TypedDict("_FACTS", get_type_hints(FoundCheckpoint, include_extras=True)),  # type: ignore[operator]
)


@alone()
def find_checkpoints(
    root: str | os.PathLike[str],
    depth: int = DEPTH,
    *,
    sure: bool = False,
    storage: StoreOptions | Mapping[str, Any] | None = None,
) -> list[FoundCheckpoint]:
    """Find all committed checkpoints at and below `root`, oldest first. Each directory gives one,
    its newest. If all have a step, they are ordered by step. Otherwise the saves of one session are
    ordered by their numbers, and sessions by their clocks; a warning says where those clocks cannot
    be right.

    Unfinished, half-written and foreign directories are skipped. A directory that cannot be read is
    skipped with a warning in the log. A group's directory is found as a part of its step, or by
    itself if it is the root.

    Args:
        sure: for a job that resumes. A read that may succeed a moment later is tried again. If the
            store as a whole fails, or can read none of the checkpoints, it raises, so that this
            does not look like an empty root.
        storage: as for `smckpt.load`.

    Raises:
        StorageError: the root cannot be read; with `sure`, see there.
    """
    access = access_to(root, storage=storage)
    return found_below(access.open(root), depth, sure=sure)


def found_below(top: Storage, depth: int = DEPTH, *, sure: bool = False) -> list[FoundCheckpoint]:
    """`find_checkpoints` for a directory that is already open."""
    top.list_dirs()  # raises if the root cannot be read: it must not look empty
    found: list[FoundCheckpoint] = []
    unread: list[CheckpointError] = []
    for storage, _, error in walk(top, depth):
        try:
            if error is not None:
                raise error
            look = partial(found_at, storage, group=storage is top)
            one = twice(look) if sure else look()
        except CheckpointError as error:
            if sure and isinstance(error, StorageError) and error.of_store:
                raise
            log.warning("skipped: %s", error)
            unread += [error] if _may_be_ours(error) else []
            continue
        if one is not None:
            found.append(one)
    if sure and unread and not found:
        raise unread[0]
    return in_order(once(top, found, str))


def refuse_absent(root: Storage) -> None:
    """An empty answer for a mistyped directory would look like an answer.

    Raises:
        CheckpointNotFoundError: it is on a file system, and is no directory.
        StorageError: nobody can tell, as where links form a loop.
    """
    if root.folder is None or os.path.isdir(root.folder):
        return
    with (
        os_errors_at(root.url, "look for the directory"),
        suppress(FileNotFoundError, NotADirectoryError),
    ):
        os.stat(root.folder)
    if os.path.isfile(root.folder):
        what, remedy = "this is a file, not a directory", "`smckpt show` says what is in it"
    else:
        what, remedy = "no such directory", "check the path, and that the file system is mounted"
    raise CheckpointNotFoundError(what, remedy=remedy, path=root.url)


def walk(
    storage: Storage, depth: int
) -> Iterator[tuple[Storage, Sequence[str], CheckpointError | None]]:
    """All directories at this one and down to `depth` levels below, with the names of those in
    each (of the lowest level none), or with the error of one that cannot be listed. Those that hold
    ranks' files of the checkpoints beside them are left out."""
    try:
        below = twice(storage.list_dirs) if depth else ()
    except CheckpointError as error:
        yield storage, (), error
        return
    names = [name for name in below if not is_prefix(name)]
    yield storage, names, None
    for name in names:
        yield from walk(storage.join(name), depth - 1)


def once(top: Storage, found: Iterable[Kind], url_of: Callable[[Kind], str]) -> list[Kind]:
    """Each directory below `top` once: a link beside it, such as `latest`, is no other one."""
    kept: dict[str, Kind] = {}
    for one in found:
        url = url_of(one).rstrip("/")
        folder = top.at(url).folder
        real = url if folder is None else os.path.realpath(folder)
        if real not in kept or os.path.basename(url) == os.path.basename(real):
            kept[real] = one
    return list(kept.values())


def found_at(storage: Storage, *, group: bool = False) -> FoundCheckpoint | None:
    """The newest commit in this very directory, or None.

    Args:
        group: whether one group of a step counts too.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        candidates = commits_at(storage)
        commit = choose_commit(storage, candidates=candidates) if candidates else None
    except CheckpointNotFoundError:
        return None  # a manifest of a step that was never committed
    if commit is None:
        return None
    first, url = commit.first, storage.url
    if not (group or commit.whole):
        return None  # one group of a step whose record is in another directory
    return FoundCheckpoint(
        path=_as_text(url),
        step=first.step,
        fencing_token=commit.order[0],
        number=commit.order[1],
        committed_at=commit.committed_at,
        kind=first.kind,
        nbytes=commit.nbytes,
        groups=tuple(relative_url(at, url) for at, _ in commit.manifests),
        identity=commit.identity,
        metadata=first.metadata,
    )


def latest(root: Storage, depth: int = DEPTH) -> FoundCheckpoint | None:
    """The newest of `found_below`, or None.

    Raises:
        StorageError: the store as a whole fails, or can read none of the checkpoints. A job would
            start anew.
    """
    found = found_below(root, depth, sure=True)
    return found[-1] if found else None


def _may_be_ours(error: CheckpointError) -> bool:
    """Whether the store could not read what may be a checkpoint. A file with the name of a commit
    is one; a directory that is closed to this user is probably none."""
    if not isinstance(error, StorageError):
        return False
    cause = error.__cause__
    foreign = isinstance(cause, OSError) and cause.errno in _FOREIGN
    return not foreign or parse_name((error.path or "").rpartition("/")[2]) is not None


def in_order(found: list[FoundCheckpoint]) -> list[FoundCheckpoint]:
    """Sort, oldest first. A step never goes back, and neither does the number of a session's save,
    but a clock may."""
    if all(f.step is not None for f in found):
        return sorted(found, key=lambda f: (f.step, f.committed_at, f.fencing_token, f.number))
    seen: dict[str, int] = {}  # session → its latest time so far
    times: dict[str, int] = {}
    for one in sorted(found, key=lambda f: (f.number, f.committed_at)):
        session = _session(one)
        seen[session] = max(seen.get(session, 0), one.committed_at)
        times[one.path] = seen[session]
    ordered = sorted(found, key=lambda f: (times[f.path], f.number, f.fencing_token))
    if len(seen) > 1:
        _doubt(ordered)
    return ordered


def _session(found: FoundCheckpoint) -> str:
    name = parse_name(found.identity)
    return name.session if name else ""


def _doubt(ordered: list[FoundCheckpoint]) -> None:
    """Warn if the order of sessions, which depends on clocks, cannot be trusted."""
    newest = ordered[-1]
    why = ""
    if newest.committed_at > time.time_ns() + _SKEW:
        why = "its time lies in the future, so a host's clock is or was wrong"
    for other in ordered[:-1]:
        a, b = natural_order(other.path), natural_order(newest.path)
        alike = [text for _, text in a] == [text for _, text in b]  # they differ only in numbers
        if _session(other) != _session(newest) and a > b and alike:
            why = f"{other} has a higher number, but was committed earlier by its host's clock"
    if why:
        log.warning(
            "%s is taken as the newest checkpoint, but %s. Not all checkpoints here record their "
            "step: pass step= to async_save, or put a whole number 'step' into the state. To "
            "resume from another checkpoint, pass its directory",
            newest,
            why,
        )


def _as_text(url: str) -> str:
    """A location without the slash at its end, so that `/name` can be appended."""
    return url[:-1] if url.endswith("/") and normal_url(url[:-1]) == url else url
