"""The store `keeper://JOB/…`: the files that the keepers of a job's hosts hold in memory.

A process reaches the keepers through the one of its own host, which knows the others. A file goes
to that one and, before it has a name, to `replicas` others. Small files, which commit a step, go to
the first few keepers: a name is created if more than half of them took it, and none of all has it.
A read takes what any keeper has, this host's first. A keeper that does not answer is passed over.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from smckpt.calls import in_threads
from smckpt.errors import CheckpointNotFoundError, MemoryBudgetError, StorageError
from smckpt.storage.base import Access, FileInfo, FileWriter, Storage
from smckpt.storage.disk.posix_read import STRETCH, Descriptor, Reading
from smckpt.storage.disk.posix_write import write_all
from smckpt.storage.faults import refuse_incomplete, refuse_outside, storage_error, too_short
from smckpt.storage.memory.wire import (
    IDLE,
    KeeperRefusal,
    Peer,
    call,
    fill,
    local_name,
    reply_of,
    send,
)
from smckpt.storage.urls import file_url

Result = TypeVar("Result")

VOTERS = 5  # keepers that hold each small file
_ASKED_AT_ONCE = 16


def job_of(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]


def asked_locally(job: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer of this host's keeper.

    Raises:
        StorageError: there is none, or it refuses.
    """
    try:
        with call(local_name(job)) as to:
            send(to, request)
            return reply_of(to)
    except OSError as error:
        raise no_keeper(job, error) from error


def no_keeper(job: str, error: Exception) -> StorageError:
    return StorageError(
        f"the keeper of job {job} on {socket.gethostname()} does not answer: {error}",
        remedy="give the command on a host of the job, while it or its keeper runs. A keeper that "
        "has ended has lost the steps of this host's memory; those on disk are not lost",
        path=f"keeper://{job}/",
        of_store=True,
    )


@dataclass(frozen=True)
class _Peers:
    """All keepers of the job, which is this host's, and which have not answered of late."""

    peers: Sequence[Peer]
    own: int
    silent: frozenset[int] = frozenset()


@dataclass(frozen=True)
class HeldBytes:
    """Bytes that the keeper of a host holds, and may hold. error: it does not answer."""

    host: str
    nbytes: int
    budget: int
    error: str = ""


class KeeperStorage(Storage):
    """The directory `keeper://JOB/…`. Sends nothing until it is used."""

    request_bytes = 8 << 20

    def __init__(self, url: str, access: Access | None = None) -> None:
        self._lock = threading.Lock()
        self._calls = _Connections()
        self._open: dict[str, tuple[Descriptor, int]] = {}  # of large files here, with their sizes
        super().__init__(url, access)
        self._job = job_of(self.url)
        self._directory = self.url.partition("://")[2].partition("/")[2].strip("/")

    # -- writing -----------------------------------------------------------------------------------

    def create_file(self, name: str, size: int, *, replace: bool = False) -> FileWriter:
        self.refuse_name(name)
        return _KeptWriter(self, name, size, replace)

    def put_exclusive(self, name: str, data: bytes) -> bool:
        self.refuse_name(name)
        known = self._peers()
        if any(info.name == name for info in self.list(name)):
            return self.read(name) == data  # an earlier try made it, but its answer was lost
        # The same for all hosts: of more keepers, two could each have a majority of their own.
        voters = range(min(len(known.peers), VOTERS))
        request = {**self._at(name), "do": "take", "size": len(data)}

        def take(to: socket.socket) -> bool:
            send(to, request)
            reply_of(to)
            to.sendall(data)
            return bool(reply_of(to)["created"])

        votes = self._each(known, voters, take)
        yes = sum(vote is True for vote in votes)
        if yes * 2 > len(voters):
            return True
        if any(vote is False for vote in votes):
            return False
        failed = next(vote for vote in votes if isinstance(vote, OSError))
        raise self._failed(failed, name, f"write to more than {yes} of {len(voters)} keepers")

    def delete(self, name: str) -> None:
        self.delete_many([name])

    def delete_many(self, names: Collection[str]) -> None:
        self._all({"do": "delete", "directory": self._directory, "names": sorted(names)})

    # -- reading -----------------------------------------------------------------------------------

    def read_into(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        seen: Callable[[memoryview], None] | None = None,
    ) -> None:
        self.refuse_name(name)
        flat = [b if b.format == "B" and b.ndim == 1 else b.cast("B") for b in buffers]
        wanted = [b for b in flat if b]
        here = self._descriptor(name)
        if here is not None:
            file, size = here
            if (end := offset + sum(map(len, wanted))) > size:
                raise too_short(name, size, end, file_url(self.url, name))
            Reading(offset, wanted, seen).run(file)
            return
        end = offset + sum(map(len, wanted))
        known = self._peers()
        lost: OSError | None = None
        others = [*range(known.own + 1, len(known.peers)), *range(known.own)]
        for at in sorted(others, key=known.silent.__contains__):
            try:
                with self._calling(known, at) as to:
                    if self._read_from(to, name, end, wanted, seen):
                        return
            except OSError as error:
                lost = error
        if lost is not None:
            raise self._failed(lost, name, "read from the keeper that has it")
        raise self._absent(name)

    def _read_from(
        self,
        other: socket.socket,
        name: str,
        end: int,
        wanted: list[memoryview],
        seen: Callable[[memoryview], None] | None,
    ) -> bool:
        """Fill what is wanted of a file up to `end`, and take it from the list, so that another
        keeper goes on where this one breaks off. False: it has no such file."""
        offset = end - sum(map(len, wanted))
        send(other, {**self._at(name), "do": "read", "offset": offset, "length": end - offset})
        try:
            reply_of(other)
        except FileNotFoundError:
            return False
        except KeeperRefusal as error:
            if error.errno != errno.ERANGE:
                raise
            size = self.size(name)
            raise too_short(name, size, end, file_url(self.url, name)) from error
        while wanted:
            stretch = wanted[0][: STRETCH - offset % STRETCH]  # whole blocks, for `seen`
            fill(other, stretch)
            if seen is not None:
                seen(stretch)
            left, offset = wanted[0][len(stretch) :], offset + len(stretch)
            wanted[:1] = [left] if left else []
        return True

    def _descriptor(self, name: str) -> tuple[Descriptor, int] | None:
        """A descriptor of a file of this host's keeper, and its size. Of a large file it stays open
        until the store is closed."""
        with self._lock:
            found = self._open.get(name)
        if found is not None:
            return found
        try:
            with self._calls.to(local_name(self._job)) as to:
                send(to, {**self._at(name), "do": "read", "descriptor": True})
                size = int(reply_of(to)["size"])
                found = Descriptor(socket.recv_fds(to, 1, 1)[1][0]), size
        except FileNotFoundError:
            return None
        except (OSError, IndexError) as error:
            raise no_keeper(self._job, error) from error
        if size > self.request_bytes:
            with self._lock:
                return self._open.setdefault(name, found)
        return found

    def size(self, name: str) -> int:
        self.refuse_name(name)
        with self._lock:
            if (found := self._open.get(name)) is not None:
                return found[1]
        with contextlib.suppress(FileNotFoundError):  # for a descriptor it would be kept
            nothing = {**self._at(name), "do": "read", "offset": 0, "length": 0}
            return int(self._here(nothing)["size"])
        for info in self.list(name):
            if info.name == name:
                return info.size
        raise self._absent(name)

    def list(self, prefix: str = "") -> list[FileInfo]:
        found: dict[str, int] = {}
        for answer in self._all({"do": "list", "directory": self._directory}):
            found |= {str(n): int(size) for n, size in answer["files"] if str(n).startswith(prefix)}
        return [FileInfo(name, size) for name, size in sorted(found.items())]

    def names(self, *prefixes: str, all_kinds: bool = False) -> Sequence[str]:
        return [one.name for one in self.list() if one.name.startswith(prefixes or "")]

    def list_dirs(self) -> Sequence[str]:
        answers = self._all({"do": "directories", "directory": self._directory})
        return sorted({str(name) for answer in answers for name in answer["names"]})

    def tree(self) -> dict[str, set[str]]:
        """The names of the files here and below, by their directory's path from here."""
        above = f"{self._directory}/" if self._directory else ""
        found: dict[str, set[str]] = {}
        for answer in self._all({"do": "all"}):
            for directory, name, _ in answer["files"]:
                if f"{directory}/".startswith(above):
                    found.setdefault(str(directory)[len(above) :], set()).add(str(name))
        return found

    def at(self, url: str) -> Storage:
        made = super().at(url)
        if isinstance(made, KeeperStorage):
            made._calls = self._calls
        return made

    def held(self) -> Sequence[HeldBytes]:
        """What each keeper of the job holds."""
        known = self._peers()
        return [
            HeldBytes(peer.host, one["held"], one["budget"])
            if isinstance(one, dict)
            else HeldBytes(peer.host, 0, 0, f"does not answer: {one}")
            for peer, one in zip(known.peers, self._answers(known, {"do": "all"}), strict=True)
        ]

    def close(self) -> None:
        with self._lock:
            self._open = {}
        self._calls.close()

    # -- the keepers -------------------------------------------------------------------------------

    def _here(self, request: dict[str, Any]) -> dict[str, Any]:
        """As `asked_locally`, over a connection that stays."""
        try:
            with self._calls.to(local_name(self._job)) as to:
                send(to, request)
                return reply_of(to)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise no_keeper(self._job, error) from error

    def _peers(self) -> _Peers:
        answer = self._here({"do": "peers"})
        silent = frozenset(map(int, answer["silent"]))
        return _Peers(tuple(Peer(*each) for each in answer["peers"]), int(answer["own"]), silent)

    @contextlib.contextmanager
    def _calling(self, known: _Peers, at: int) -> Iterator[socket.socket]:
        """A connection to one of the keepers. If it does not answer, this host's hears of it."""
        try:
            to = local_name(self._job) if at == known.own else known.peers[at]
            with self._calls.to(to) as made:
                yield made
        except (KeeperRefusal, FileNotFoundError):
            raise
        except OSError:
            if at != known.own:
                self._here({"do": "silent", "peer": at})
            raise

    def _all(self, request: dict[str, Any]) -> Sequence[dict[str, Any]]:
        """The answers of all keepers that answer; this host's must."""
        known = self._peers()
        answers = self._answers(known, request)
        if isinstance(failed := answers[known.own], OSError):
            raise no_keeper(self._job, failed)
        return [one for one in answers if isinstance(one, dict)]

    def _answers(
        self, known: _Peers, request: dict[str, Any]
    ) -> Sequence[dict[str, Any] | OSError]:
        def ask(to: socket.socket) -> dict[str, Any]:
            send(to, request)
            return reply_of(to)

        return self._each(known, range(len(known.peers)), ask)

    def _each(
        self, known: _Peers, which: Sequence[int], ask: Callable[[socket.socket], Result]
    ) -> Sequence[Result | OSError]:
        """The answer of each keeper, or its error."""

        def one(at: int) -> Result | OSError:
            if at in known.silent:
                return TimeoutError(errno.ETIMEDOUT, f"{known.peers[at].host} did not answer")
            try:
                with self._calling(known, at) as to:
                    return ask(to)
            except OSError as error:
                return error

        return in_threads(one, which, _ASKED_AT_ONCE, "smckpt-keepers")

    def _at(self, name: str) -> dict[str, Any]:
        return {"directory": self._directory, "name": name}

    def _absent(self, name: str) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(
            "no keeper that answers has this file",
            remedy="its hosts may be gone: take an older step, or one on disk",
            path=file_url(self.url, name),
        )

    def _failed(self, error: OSError, name: str, action: str) -> Exception:
        if isinstance(error, KeeperRefusal):
            return (MemoryBudgetError if error.errno == errno.ENOSPC else StorageError)(
                f"cannot {action}: {error.strerror}",
                remedy="give keepers a larger budget, or keep fewer steps in memory; steps that "
                "are committed stay",
                path=file_url(self.url, name),
            )
        return storage_error(error, file_url(self.url, name), action)


class _Connections:
    """Connections to keepers. They stay open for the next request, which needs no proof then."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[Peer | str, list[tuple[float, socket.socket]]] = {}  # since when

    @contextlib.contextmanager
    def to(self, keeper: Peer | str) -> Iterator[socket.socket]:
        made = self._idle_to(keeper) or call(keeper)
        answered = False
        try:
            yield made
            answered = True
        except (KeeperRefusal, FileNotFoundError):
            answered = True
            raise
        finally:
            if answered:
                with self._lock:
                    self._idle.setdefault(keeper, []).append((time.monotonic(), made))
            else:
                made.close()

    def _idle_to(self, keeper: Peer | str) -> socket.socket | None:
        while True:
            with self._lock:
                idle = self._idle.get(keeper, [])
                if not idle:
                    return None
                since, found = idle.pop()
            # the keeper closes it after a while; what is to be read then is its end
            if time.monotonic() - since < IDLE / 2 and not select.select([found], [], [], 0)[0]:
                return found
            found.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, {}
        for _, made in [one for each in idle.values() for one in each]:
            made.close()

    __del__ = close


class _KeptWriter(FileWriter):
    """Writes into memory of this host's keeper, which sends copies when the file is complete."""

    def __init__(self, store: KeeperStorage, name: str, size: int, replace: bool) -> None:
        self._store, self._name, self._size = store, name, size
        self._replace = replace
        self._lock = threading.Lock()
        self._written = 0
        self._finished = False
        self._stack = contextlib.ExitStack()
        try:
            self._to = self._stack.enter_context(call(local_name(store._job)))
            send(self._to, {"do": "create", "size": size})
            text, descriptors, _, _ = socket.recv_fds(self._to, 1 << 10, 1)
            if not descriptors:
                raise KeeperRefusal(*json.loads(text[4:])["error"])
            self._fd = descriptors[0]
            self._stack.callback(os.close, self._fd)
        except OSError as error:
            self._stack.close()
            raise store._failed(error, name, "make memory for the file") from error

    def write_at(self, offset: int, data: memoryview, crc64: int | None = None) -> None:
        path = file_url(self._store.url, self._name)
        refuse_outside(offset, data.nbytes, self._size, path)
        write_all(self._fd, data.cast("B") if data.format != "B" else data, offset)
        with self._lock:
            self._written += data.nbytes

    def finish(self) -> None:
        path = file_url(self._store.url, self._name)
        refuse_incomplete(self._written, self._size, path)
        request = {
            **self._store._at(self._name),
            "do": "finish",
            "replace": self._replace,
        }
        try:
            send(self._to, request)
            while "created" not in (answer := reply_of(self._to)):
                pass  # it is sending copies, and says so after each piece
        except OSError as error:
            raise self._store._failed(error, self._name, "keep the file") from error
        finally:
            self._stack.close()
        if not answer["created"]:
            raise self._store._failed(
                FileExistsError(errno.EEXIST, "exists"), self._name, "create the file"
            )
        self._finished = True

    def abort(self) -> None:
        if self._to.fileno() >= 0:  # not finished; else the connection is closed
            with contextlib.suppress(OSError):  # the keeper releases it with the connection too
                send(self._to, {"do": "abort"})
                reply_of(self._to)
        self._stack.close()
        if self._finished:
            self._finished = False
            self._store.delete(self._name)
