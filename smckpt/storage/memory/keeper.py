"""The keeper: a process that holds files in its host's memory, for one job.

It outlives the ranks that it serves, so that a restart finds their last steps, and ends with its
job. A file is memory without a name (`memfd`); processes of the host get its descriptor, other
keepers a copy of its bytes. A keeper knows names, sizes and bytes, and nothing of checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import secrets
import select
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from smckpt.storage.disk.posix_write import write_all
from smckpt.storage.memory.wire import (
    IDLE,
    SILENT,
    KeeperRefusal,
    Peer,
    call,
    fill,
    is_known,
    local_name,
    receive,
    reply_of,
    send,
)

# Bytes that are received, and sent, at a time. A rank that waits for copies hears of each piece:
# over a slow link a larger one would take longer than IDLE.
_PIECE = 8 << 20
# Bytes of a file from which on its memory is kept for the next file of its size. New pages cost
# several times what it costs to write to them (docs/recovery.md).
_REUSED = 1 << 20
_FREEING_SECONDS = 15.0  # that a file waits for memory at most; who asks hears nothing until then


@dataclass(frozen=True)
class _Image:
    """A file. The kernel frees its memory with the last descriptor."""

    fd: int
    size: int


class Keeper:
    """
    Args:
        budget: bytes of files that it holds at most.
        address: where it listens for others; "" for none: it holds what its own host saves.
    """

    def __init__(self, budget: int, address: str = "", port: int = 0) -> None:
        self.budget = budget
        self.secret = secrets.token_hex(32)
        self._lock = threading.Lock()
        self._healing = threading.Lock()
        self._files: dict[str, dict[str, _Image]] = {}
        self._held = 0
        self._freeing = 0  # of these: what is being freed
        self._freed = threading.Condition(self._lock)
        self._spare: dict[int, list[int]] = {}  # memory of deleted files, by size: in _held too
        self._lent: set[int] = set()  # of files that somebody may still read when they are deleted
        self._replicas = 0
        self._silent: dict[int, float] = {}  # of them: which do not answer, until when it holds
        self._tcp = socket.create_server((address, port)) if address else None
        self.address: tuple[str, int] = ("", 0)
        if self._tcp is not None:
            self.address = self._tcp.getsockname()[:2]
        self._peers = [Peer(socket.gethostname(), *self.address, self.secret)]
        self._own = 0  # which of them it is itself

    def serve(self, local: socket.socket, ends: Sequence[int] = ()) -> None:
        """Answer until one of the descriptors `ends` can be read, such as a pidfd.

        Args:
            local: the listening Unix socket.
        """
        sources = {one.fileno(): one for one in (local, self._tcp) if one is not None}
        while True:
            ready, _, _ = select.select([*sources, *ends], [], [])
            if any(one in ends for one in ready):
                return
            for number in ready:
                one = sources[number]
                with contextlib.suppress(OSError, RuntimeError):  # no more files, or threads
                    made, _ = one.accept()
                    threading.Thread(
                        target=self._converse, args=(made, one is local), daemon=True
                    ).start()

    def _converse(self, made: socket.socket, local: bool) -> None:
        begun: list[tuple[int, int]] = []  # of files under way: descriptor, size
        with made, contextlib.suppress(OSError):
            made.settimeout(IDLE)
            if not is_known(made, None if local else self.secret):
                return
            made.settimeout(None if local else IDLE)
            while True:
                asked = receive(made)
                made.settimeout(IDLE)
                try:
                    self._answer(made, asked, local, begun)
                except KeeperRefusal as error:
                    send(made, {"error": [error.errno, error.strerror]})
                except OSError:
                    raise
                except Exception as error:  # whatever a value of another type makes
                    send(made, {"error": [errno.EINVAL, f"no request of smckpt: {error!r}"]})
                made.settimeout(None if local else IDLE)
        for fd, size in begun:  # never finished
            self._release((fd, size))

    def _answer(
        self, made: socket.socket, asked: dict[str, Any], local: bool, begun: list[tuple[int, int]]
    ) -> None:
        do = asked["do"]
        if do == "list":
            with self._lock:
                here = self._files.get(str(asked["directory"]), {})
                send(made, {"files": [[name, one.size] for name, one in sorted(here.items())]})
        elif do == "all":
            with self._lock:
                every = [
                    [d, n, one.size] for d, here in self._files.items() for n, one in here.items()
                ]
            send(made, {"files": every, "held": self._held, "budget": self.budget})
        elif do == "directories":
            above = f"{asked['directory']}/" if asked["directory"] else ""
            with self._lock:
                below = [one[len(above) :] for one in self._files if one and one.startswith(above)]
            send(made, {"names": sorted({one.partition("/")[0] for one in below})})
        elif do == "delete":
            with self._lock:
                here = self._files.get(str(asked["directory"]), {})
                gone = [here.pop(str(name), None) for name in asked["names"]]
                if not here:
                    self._files.pop(str(asked["directory"]), None)
            self._retire([one for one in gone if one is not None])
            send(made, {})
        elif do == "read":
            self._read(made, asked, local)
        elif do == "take":
            size, fd = int(asked["size"]), self._reserve(int(asked["size"]))
            try:
                send(made, {})  # there is room: the bytes may come
                _received(made, fd, size)
                kept = self._publish(asked, _Image(fd, size))
            except BaseException:
                self._release((fd, size))
                raise
            send(made, {"created": kept})
        elif local:
            self._answer_own_host(made, do, asked, begun)
        else:
            raise ValueError(do)

    def _answer_own_host(
        self, made: socket.socket, do: str, asked: dict[str, Any], begun: list[tuple[int, int]]
    ) -> None:
        if do == "hello":
            itself = self._peers[self._own].to_json()
            send(made, {"own": itself, "held": self._held, "budget": self.budget})
        elif do == "join":
            peers = [Peer(*map(_as, (str, str, int, str, str), each)) for each in asked["peers"]]
            own = next(n for n, one in enumerate(peers) if one.secret == self.secret)
            with self._lock:
                self._peers, self._own, self._replicas = peers, own, int(asked["replicas"])
                self._silent = {}
            send(made, {})
        elif do == "heal":
            threading.Thread(target=self._heal_once, daemon=True).start()
            send(made, {})
        elif do == "peers":
            with self._lock:
                found = [one.to_json() for one in self._peers]
            send(made, {"peers": found, "own": self._own, "silent": self._silent_now()})
        elif do == "silent":
            self._mark_silent(int(asked["peer"]))
            send(made, {})
        elif do == "create":
            size = int(asked["size"])
            fd = self._reserve(size)
            begun.append((fd, size))
            socket.send_fds(made, [b"f"], [fd])
        elif do == "abort":
            while begun:
                self._release(begun.pop())
            send(made, {})
        elif do == "finish":
            fd, size = begun.pop()
            image = _Image(fd, size)
            try:
                hosts = self._copied(asked, image, lambda: send(made, {}))
                kept = self._publish(asked, image)
            except BaseException:
                self._release((fd, size))
                raise
            send(made, {"created": kept, "hosts": hosts})
        else:
            raise ValueError(do)

    def _read(self, made: socket.socket, asked: dict[str, Any], local: bool) -> None:
        descriptor = local and bool(asked.get("descriptor"))
        offset, length = (0, 0) if descriptor else (int(asked["offset"]), int(asked["length"]))
        with self._lock:
            found = self._files.get(str(asked["directory"]), {}).get(str(asked["name"]))
            if found is None:
                raise KeeperRefusal(errno.ENOENT, "no such file")
            if offset < 0 or length < 0 or offset + length > found.size:
                raise KeeperRefusal(errno.ERANGE, f"it has {found.size} bytes")
            fd = self._lend(found) if descriptor or length else -1
        send(made, {"size": found.size})
        if fd >= 0:
            with open(fd, "rb") as file:
                if descriptor:
                    socket.send_fds(made, [b"f"], [fd])
                else:
                    made.sendfile(file, offset, length)

    def _reserve(self, size: int) -> int:
        """Memory for a file, with what is being freed if that is needed; raises KeeperRefusal where
        the budget is used up."""
        with contextlib.ExitStack() as freed, self._lock:
            if self._spare.get(size):
                return self._spare[size].pop()
            self._freed.wait_for(
                lambda: not self._freeing or size <= self.budget - self._held, _FREEING_SECONDS
            )
            for other, spare in self._spare.items():
                while spare and size > self.budget - self._held:
                    self._held -= other
                    freed.callback(os.close, spare.pop())
            if size < 0 or self._held + size > self.budget:
                raise KeeperRefusal(
                    errno.ENOSPC,
                    f"the keeper of {socket.gethostname()} holds {self._held} of {self.budget} "
                    f"bytes, and {size} more do not fit",
                )
            self._held += size
        try:
            fd = os.memfd_create("smckpt-kept", os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
        except OSError as error:
            with self._lock:
                self._held -= size
            raise KeeperRefusal(error.errno or errno.ENOMEM, error.strerror) from error
        return fd

    def _release(self, *gone: tuple[int, int]) -> None:
        """Free the memory of files: descriptor and size of each."""
        with self._lock:
            self._freeing += sum(size for _, size in gone)
        self._free(gone)

    def _free(self, gone: Sequence[tuple[int, int]]) -> None:
        with self._lock:
            self._lent.difference_update(fd for fd, _ in gone)
        for fd, size in gone:
            os.close(fd)  # takes half a second for each GiB
            with self._lock:
                self._held -= size
                self._freeing -= size
                self._freed.notify_all()

    def _lend(self, image: _Image) -> int:
        """A descriptor of a file, which may be deleted meanwhile. With the lock."""
        self._lent.add(image.fd)
        return os.dup(image.fd)

    def _retire(self, gone: Sequence[_Image]) -> None:
        """Free the memory of files that have no name any more, but for what the next save is likely
        to need: as much of a size as files of this size are left. A reader keeps what it reads.
        Other requests do not wait for it."""
        freed: list[tuple[int, int]] = []
        with self._lock:
            sizes = Counter(one.size for here in self._files.values() for one in here.values())
            for one in gone:
                if one.size >= _REUSED and one.fd not in self._lent:
                    self._spare.setdefault(one.size, []).append(one.fd)
                else:
                    freed.append((one.fd, one.size))
            for size, spare in self._spare.items():
                while len(spare) > sizes[size]:
                    freed.append((spare.pop(), size))
            self._freeing += sum(size for _, size in freed)
        self._free(freed)

    def _publish(self, asked: dict[str, Any], image: _Image) -> bool:
        """Give a file its name. False: the name is taken, and the file is released."""
        directory, name = str(asked["directory"]), str(asked["name"])
        with self._lock:
            here = self._files.setdefault(directory, {})
            old = here.get(name)
            kept = old is None or bool(asked.get("replace"))
            if kept:
                here[name] = image
        if not kept:
            self._release((image.fd, image.size))
        elif old is not None:
            self._retire([old])
        return kept

    def _copied(
        self, asked: dict[str, Any], image: _Image, goes_on: Callable[[], None]
    ) -> list[str]:
        """Send a file to other keepers, in their order from here, those of other domains first; the
        hosts that took it.

        Args:
            goes_on: called after each piece.

        Raises:
            KeeperRefusal: too few take it.
        """
        with self._lock:
            peers, own = self._peers, self._own
            wanted = min(self._replicas, len(peers) - 1)
        hosts, failed, code = list[str](), list[str](), errno.EIO
        silent = self._silent_now()
        after = [*range(own + 1, len(peers)), *range(own)]
        domain = peers[own].domain
        for at in sorted(after, key=lambda at: (at in silent, peers[at].domain == domain)):
            if len(hosts) == wanted:
                break
            try:
                _copy(peers[at], asked, image, goes_on)
                hosts.append(peers[at].host)
            except OSError as error:
                failed.append(f"{peers[at].host}: {error}")
                if not isinstance(error, KeeperRefusal):
                    self._mark_silent(at)
                elif error.errno == errno.ENOSPC:
                    code = error.errno
        if len(hosts) < wanted:
            raise KeeperRefusal(
                code, f"{len(hosts)} of {wanted} other hosts took a copy ({'; '.join(failed)})"
            )
        return hosts

    def _silent_now(self) -> list[int]:
        now = time.monotonic()
        with self._lock:
            return [at for at, until in self._silent.items() if until > now]

    def _mark_silent(self, at: int) -> None:
        """A keeper that does not answer is asked last, and for no listing, for a while: so one that
        hangs costs one wait, and not one for each file."""
        with self._lock:
            self._silent[at] = time.monotonic() + SILENT

    def _heal_once(self) -> None:
        """Each rank of the host asks for it, and one at a time does it."""
        if self._healing.acquire(blocking=False):
            try:
                self._heal()
            finally:
                self._healing.release()

    def _heal(self) -> None:
        """Copy files whose hosts have gone, so that each has its copies again.

        Of the keepers that hold a file, the first one sends it.
        """
        with self._lock:
            peers, own, wanted = self._peers, self._own, self._replicas + 1
            mine = {(d, n): one for d, here in self._files.items() for n, one in here.items()}
        held = {own: {*mine}}
        for at, peer in enumerate(peers):
            with contextlib.suppress(OSError, LookupError, TypeError, ValueError):
                if at != own:
                    with call(peer) as to:
                        send(to, {"do": "all"})
                        held[at] = {(str(d), str(n)) for d, n, _ in reply_of(to)["files"]}
        for file in sorted(mine):
            holders = sorted(at for at, files in held.items() if file in files)
            if holders[0] != own:
                continue
            known = {peers[at].domain for at in holders}
            lacking = sorted(
                held.keys() - holders, key=lambda at: (peers[at].domain in known, at < own, at)
            )
            for at in lacking[: max(wanted - len(holders), 0)]:
                with contextlib.suppress(OSError):
                    self._copy_again(peers[at], *file)

    def _copy_again(self, peer: Peer, directory: str, name: str) -> None:
        asked = {"directory": directory, "name": name}
        with self._lock:
            found = self._files.get(directory, {}).get(name)
            fd = -1 if found is None else self._lend(found)
        if found is None:
            return
        try:
            _copy(peer, asked, _Image(fd, found.size), lambda: None)
        finally:
            os.close(fd)
        with self._lock:
            gone = self._files.get(directory, {}).get(name) is not found
        if gone:  # deleted meanwhile, perhaps before the other one had it
            with call(peer) as to:
                send(to, {"do": "delete", "directory": directory, "names": [name]})
                reply_of(to)


def _copy(peer: Peer, asked: dict[str, Any], image: _Image, goes_on: Callable[[], None]) -> None:
    """Send a file to another keeper. `goes_on` is called after each piece."""
    with call(peer) as to, open(os.dup(image.fd), "rb") as file:
        send(to, {**asked, "do": "take", "size": image.size})
        reply_of(to)
        for at in range(0, image.size, _PIECE):
            to.sendfile(file, at, min(_PIECE, image.size - at))
            goes_on()
        if not reply_of(to)["created"]:
            raise KeeperRefusal(errno.EEXIST, "the name exists")


def _as(kind: Callable[[Any], Any], value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind}")
    return value


def _received(source: socket.socket, fd: int, size: int) -> None:
    buffer = memoryview(bytearray(min(size, _PIECE)))
    at = 0
    while at < size:
        piece = buffer[: min(size - at, _PIECE)]
        fill(source, piece)
        write_all(fd, piece, at)
        at += len(piece)


def listening(job: str) -> socket.socket | None:
    """The socket of this host's keeper, for a new one; None: there is a keeper."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(local_name(job))
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    made.listen(128)
    return made


def main(arguments: str) -> None:
    """The program of a keeper that a rank has started.

    Args:
        arguments: JSON: budget, address, descriptor of the listening socket, and of the pidfds with
            which it ends.
    """
    asked = json.loads(arguments)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 20)), hard))
    os.nice(10)
    local = socket.socket(fileno=asked["local"])
    Keeper(asked["budget"], asked["address"]).serve(local, asked["ends"])


if __name__ == "__main__":
    main(sys.argv[1])
