"""The store `hyperpod://HOST:PORT/NAMESPACE/SCHEME/PATH`: large files in the memory of HyperPod's
daemons, the others in the store SCHEME://PATH (of a disk: NAMESPACE/file/PATH).

The daemon (HTTP, port 9200 of each host) holds one blob under a namespace, a rank and a step. It
replaces what is there, lists no names, reads whole blobs only, and drops the oldest of a rank. So
it cannot create exclusively, and no commit can be in it. Here it only holds what `create_file`
writes. Parts, manifests, leases, and for each blob a note of where it is, are small files in the
other store, which creates exclusively. They have names that no reader of that store takes for a
checkpoint's. A blob is the file that its note means if it came with the note's token.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from smckpt.calls import in_threads
from smckpt.decoding import decode
from smckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MemoryBudgetError,
    StorageError,
    UsageError,
)
from smckpt.storage.base import Access, FileInfo, Storage
from smckpt.storage.faults import name_taken, too_short
from smckpt.storage.spool import SpooledWriter
from smckpt.storage.urls import file_url, is_local

RANKS = 1024  # of a namespace in the daemon; those above are in further ones
RETAINED = 8  # blobs of a rank that the daemon keeps, so that dead jobs cannot fill it
SECONDS = 60.0  # for each piece of an answer, as the package waits
_ASKED_AT_ONCE = 16
_MOST = 1 << 20  # bytes of a note, or of the text of an error
_OF_FILE, _NOTE = "kept-", "held-"  # before the names in the other store
_NAMESPACE = re.compile(r"[A-Za-z0-9_-]+")
_OF_RANK = re.compile(r"-r(\d+)-(\d+)\.")  # in the names of ranks' files


def daemon_url(daemon: str, root: str) -> str:
    """The store of a run whose small files are below `root`.

    Args:
        daemon: "http://HOST:PORT/NAMESPACE".

    Raises:
        UsageError: it is something else.
    """
    found = re.fullmatch(r"http://([A-Za-z0-9.-]+:\d+)/([A-Za-z0-9_-]+)/?", daemon)
    if found is None:
        raise UsageError(
            f"the daemon {daemon!r} is no address with a namespace",
            remedy='such as "http://127.0.0.1:9200/job-1"',
        )
    path = f"file{root}" if is_local(root) else root.replace("://", "/", 1)
    return f"hyperpod://{found[1]}/{found[2]}/{path.rstrip('/')}/memory"


@dataclass(frozen=True)
class _Note:
    """Where a blob is: the daemon's namespace, rank and step. token: that it came with."""

    namespace: str
    rank: int
    step: int
    size: int
    token: str

    def __post_init__(self) -> None:
        if not _NAMESPACE.fullmatch(self.namespace) or min(self.rank, self.step, self.size) < 0:
            raise ValueError(f"{self} is of no blob")

    @property
    def path(self) -> str:
        return f"/v1/cp/checkpoints/{self.namespace}/{self.rank}/{self.step}"


class Daemon:
    """Requests to the daemons behind one address; the tests of the package have their forms."""

    def __init__(self, address: str) -> None:
        self.address = address

    def reach(self, namespace: str) -> None:
        """
        Raises:
            StorageError: nothing answers there as a daemon does.
        """
        with self._answer("GET", f"/v1/cp/namespaces/{namespace}", missing=True):
            pass

    def put(self, note: _Note, body: BinaryIO) -> None:
        for attempt in range(2):
            body.seek(0)
            # the daemon gives this back with the blob
            meta = json.dumps({"checksum": note.token, "algorithm": "smckpt"})
            headers = {"Content-Length": str(note.size), "Shard-Meta": meta}
            with self._answer("POST", note.path, body, headers, missing=not attempt) as answer:
                if answer is not None:
                    return
            asked = f"?num_ranks={RANKS}&steps_retained={RETAINED}"
            path = f"/v1/cp/namespaces/{note.namespace}{asked}"
            with self._answer("POST", path, taken=True):
                pass

    @contextlib.contextmanager
    def blob(self, note: _Note) -> Iterator[http.client.HTTPResponse | None]:
        """The answer whose body is the blob; None: the daemon has it no longer."""
        with self._answer("GET", note.path, missing=True) as answer:
            if answer is None or answer.length != note.size:
                yield None
                return
            try:
                token = json.loads(answer.headers.get("Shard-Meta", ""))["checksum"]
            except (ValueError, TypeError, KeyError):
                token = ""
            yield answer if token == note.token else None

    def delete(self, note: _Note) -> None:
        with self._answer("DELETE", note.path, missing=True):
            pass

    @contextlib.contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        body: BinaryIO | None = None,
        headers: dict[str, str] | None = None,
        *,
        missing: bool = False,
        taken: bool = False,
    ) -> Iterator[http.client.HTTPResponse | None]:
        """
        Args:
            missing, taken: status 404, or 409, is no error; the answer is None.
        """
        connection = http.client.HTTPConnection(self.address, timeout=SECONDS, blocksize=1 << 20)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            if (missing and answer.status == 404) or (taken and answer.status == 409):
                yield None
                return
            if answer.status // 100 != 2:
                text = answer.read(_MOST).decode("utf-8", "replace")[:500]
                kind = MemoryBudgetError if answer.status == 507 else StorageError
                raise kind(
                    f"the daemon refuses {method} with status {answer.status}: {text}",
                    remedy="give the managed tier more of the hosts' memory, or keep fewer steps",
                    path=f"http://{self.address}{path}",
                )
            yield answer
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(
                f"the daemon does not answer {method}: {error or type(error).__name__}",
                remedy="see whether HyperPod's managed tier runs on this host; steps on disk or in "
                "S3 are not lost",
                path=f"http://{self.address}{path}",
            ) from error
        finally:
            connection.close()


class HyperPodStorage(Storage):
    """The directory `hyperpod://…`. Sends nothing until it is used. What it has read of a blob, the
    whole of it, stays in memory until it is closed."""

    read_once = True

    def __init__(self, url: str, access: Access | None = None) -> None:
        super().__init__(url, access)
        address, namespace, scheme, path = [*self.url.partition("://")[2].split("/", 3), *"   "][:4]
        path = path.strip().rstrip("/")
        if not (namespace.strip() and scheme.strip() and path):
            raise UsageError(
                "this names no daemon, namespace and store for the commits",
                remedy="write hyperpod://HOST:PORT/NAMESPACE/s3/BUCKET/PREFIX, or …/file/PATH",
                path=url,
            )
        self._daemon, self._namespace = Daemon(address), namespace
        self._small = self.access.open(f"/{path}" if scheme == "file" else f"{scheme}://{path}")
        self.exclusive, self.one_process = self._small.exclusive, self._small.one_process
        self._lock = threading.Lock()
        self._notes: dict[str, _Note] = {}
        self._blobs: dict[str, bytearray] = {}
        self._fetching: dict[str, threading.Lock] = {}

    # -- writing -----------------------------------------------------------------------------------

    def create_file(self, name: str, size: int, *, replace: bool = False) -> SpooledWriter:
        self.refuse_name(name)
        path = file_url(self.url, name)

        def send(body: BinaryIO) -> None:
            # A place of its own for a blob, so that no attempt replaces another one's. The
            # daemon's step is the clock, so that it drops the oldest.
            of_rank = _OF_RANK.search(name)
            if of_rank is not None:
                rank, number = int(of_rank[1]), of_rank[2]
            else:
                rank, number = zlib.crc32(name.encode()) % RANKS, "x"
            namespace = f"{self._namespace}-{number}-{rank // RANKS}"
            step, token = time.time_ns() // 1000, secrets.token_hex(16)
            note = _Note(namespace, rank % RANKS, step, size, token)
            self._daemon.put(note, body)
            data = json.dumps(vars(note)).encode()
            if replace:
                self.delete(name)
                self._small.overwrite(_NOTE + name, data)
            elif not self._small.put_exclusive(_NOTE + name, data):
                self._daemon.delete(note)
                raise name_taken(path)

        return SpooledWriter(path, size, send, lambda: self.delete(name), in_memory=True)

    def put_exclusive(self, name: str, data: bytes) -> bool:
        self.refuse_name(name)
        return self._small.put_exclusive(_OF_FILE + name, data)

    def put(self, name: str, data: bytes) -> None:
        self.refuse_name(name)
        self._small.put(_OF_FILE + name, data)

    def delete(self, name: str) -> None:
        self.delete_many([name])

    def delete_many(self, names: Collection[str]) -> None:
        held = [name for name in self._held_names() if name in names]
        for name in held:
            with contextlib.suppress(CheckpointNotFoundError):  # somebody else deletes it too
                self._daemon.delete(self._note(name))
            with self._lock:
                self._notes.pop(name, None)
                self._blobs.pop(name, None)
        small = [name for name in names if name not in held]
        self._small.delete_many([*(_NOTE + name for name in held), *(_OF_FILE + n for n in small)])

    def reach(self) -> None:
        """
        Raises:
            StorageError: the daemon does not answer this process.
        """
        self._daemon.reach(self._namespace)

    def try_out(self, name: str) -> str:
        self.reach()
        return self._small.try_out(_OF_FILE + name)

    def sync(self) -> None:
        self._small.sync()

    def remove_directory(self) -> None:
        self._small.remove_directory()

    # -- reading -----------------------------------------------------------------------------------

    def read_into(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        seen: Callable[[memoryview], None] | None = None,
    ) -> None:
        self.refuse_name(name)
        with self._lock:
            known = name in self._notes
        if not known:
            try:
                self._small.read_into(_OF_FILE + name, offset, buffers, seen)
                return
            except CheckpointNotFoundError:
                pass  # it is in the daemon
        note = self._note(name)
        wanted = [b if b.format == "B" and b.ndim == 1 else b.cast("B") for b in buffers]
        if (end := offset + sum(map(len, wanted))) > note.size:
            raise too_short(name, note.size, end, file_url(self.url, name))
        blob = memoryview(self._blob(name, note))
        for buffer in wanted:
            buffer[:] = blob[offset : offset + len(buffer)]
            offset += len(buffer)
            if seen is not None:
                seen(buffer)

    def size(self, name: str) -> int:
        self.refuse_name(name)
        try:
            return self._small.size(_OF_FILE + name)
        except CheckpointNotFoundError:
            note = self._note(name)
            if not self._is_held(note):
                raise self._lost(name) from None
            return note.size

    def list(self, prefix: str = "") -> list[FileInfo]:
        small = self._small.list(_OF_FILE + prefix)
        found = [FileInfo(info.name.removeprefix(_OF_FILE), info.size) for info in small]
        names = [name for name in self._held_names(prefix) if name]
        notes = self._each(self._note, names)
        held = self._each(self._is_held, notes)
        found += [
            FileInfo(name, note.size)
            for name, note, is_held in zip(names, notes, held, strict=True)
            if is_held
        ]
        return sorted(found, key=lambda info: info.name)

    def names(self, *prefixes: str, all_kinds: bool = False) -> Sequence[str]:
        """With those of files that the daemon has no longer, so that they can be deleted."""
        marks = [mark + prefix for prefix in prefixes or ("",) for mark in (_OF_FILE, _NOTE)]
        here = self._small.names(*marks)
        return sorted({name[len(_OF_FILE) :] for name in here})

    def list_dirs(self) -> Sequence[str]:
        return self._small.list_dirs()

    def tree(self) -> dict[str, set[str]]:
        """The names of the files here and below, by their directory's path from here."""
        found = {"": set(self.names())}
        for name in self.list_dirs():
            below = self.join(name)
            assert isinstance(below, HyperPodStorage)
            found |= {f"{name}/{rest}".rstrip("/"): names for rest, names in below.tree().items()}
        return {directory: names for directory, names in found.items() if names}

    def close(self) -> None:
        with self._lock:
            self._blobs, self._notes, self._fetching = {}, {}, {}
        self._small.close()

    # -- the blobs ---------------------------------------------------------------------------------

    def _held_names(self, prefix: str = "") -> Sequence[str]:
        return [name.removeprefix(_NOTE) for name in self._small.names(_NOTE + prefix)]

    def _note(self, name: str) -> _Note:
        with self._lock:
            found = self._notes.get(name)
        if found is None:
            try:
                text = self._small.read(_NOTE + name, most=_MOST)
            except CheckpointNotFoundError as error:
                raise self._lost(name) from error
            try:
                found = decode(_Note, json.loads(text))
            except ValueError as error:
                raise CorruptCheckpointError(
                    f"the note of where the daemon has the file cannot be read: {error}",
                    remedy="take an older step, or one on disk or in S3",
                    path=file_url(self.url, name),
                ) from error
            with self._lock:
                self._notes[name] = found
        return found

    def _is_held(self, note: _Note) -> bool:
        with self._daemon.blob(note) as answer:  # its head; the body is left
            return answer is not None

    def _blob(self, name: str, note: _Note) -> bytearray:
        with self._lock:
            fetching = self._fetching.setdefault(name, threading.Lock())
        with fetching:
            if name not in self._blobs:
                with self._daemon.blob(note) as answer:
                    if answer is None:
                        raise self._lost(name)
                    data = bytearray(note.size)
                    left = memoryview(data)
                    while left and (done := answer.readinto(left)):
                        left = left[done:]
                if left:
                    size = note.size - len(left)
                    raise too_short(name, size, note.size, file_url(self.url, name))
                self._blobs[name] = data
            return self._blobs[name]

    def _each(self, ask: Callable[[Any], Any], of: Collection[Any]) -> Sequence[Any]:
        return in_threads(ask, of, _ASKED_AT_ONCE, "smckpt-hyperpod")

    def _lost(self, name: str) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(
            "the daemon has this file no longer, or never had",
            remedy="take an older step, or one on disk or in S3",
            path=file_url(self.url, name),
        )
