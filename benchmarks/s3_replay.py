"""Repeats a real S3 server's answers on loopback, at almost no cost.

For `benchmarks/s3_dcp.py --replay`. A real store has cores of its own, but a server on this machine
shares the clients' cores. The replay passes the first GET or HEAD of an object on to the server,
and keeps the answer. It answers the same request again from memory, with the body by `sendfile`. It
answers any other request, such as PUT, with 501.

    python benchmarks/s3_replay.py http://127.0.0.1:8333    # prints its URL; until stdin closes
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from dataclasses import dataclass
from urllib.parse import urlsplit

_TIMEOUT = 60.0
# the header fields on which an answer depends, besides the request line
_VARY = (b"range", b"if-match", b"x-amz-checksum-mode")
_REFUSED = b"HTTP/1.1 501 Not Implemented\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True)
class Answer:
    """Where an answer's body is in the memory file."""

    head: bytes
    at: int
    size: int


class Kept:
    """The answers of all connections."""

    def __init__(self) -> None:
        self.file = os.memfd_create("answers")
        self._answers: dict[tuple[bytes, ...], Answer] = {}
        self._end = 0
        self._lock = threading.Lock()

    def find(self, request: tuple[bytes, ...]) -> Answer | None:
        return self._answers.get(request)

    def room(self, size: int) -> int:
        with self._lock:
            at, self._end = self._end, self._end + size
            return at

    def keep(self, request: tuple[bytes, ...], answer: Answer) -> None:
        self._answers[request] = answer


class Connection:
    """One client's requests, one after the other."""

    def __init__(self, client: socket.socket, server: tuple[str, int], kept: Kept) -> None:
        self.client, self.server, self.kept = client, server, kept
        self.upstream: socket.socket | None = None

    def serve(self) -> None:
        try:
            rest = b""
            while True:
                head, rest = receive_head(self.client, rest)
                if not head:
                    return
                method = head.partition(b" ")[0]
                if method not in (b"GET", b"HEAD"):
                    self.client.sendall(_REFUSED)
                    return
                fields = fields_of(head)
                request = (head.partition(b"\r\n")[0], *(fields.get(name, b"") for name in _VARY))
                answer = self.kept.find(request) or self.ask(head, method, request)
                self.give(answer)
        except ConnectionError:
            return  # the client went away
        finally:
            self.client.close()
            if self.upstream:
                self.upstream.close()

    def ask(self, head: bytes, method: bytes, request: tuple[bytes, ...]) -> Answer:
        """Get the server's answer, and keep it."""
        if self.upstream is None:
            self.upstream = socket.create_connection(self.server, timeout=_TIMEOUT)
        self.upstream.sendall(head)
        answer, rest = receive_head(self.upstream, b"")
        fields = fields_of(answer)
        if method == b"GET" and b"content-length" not in fields:
            raise ConnectionError("an answer of unknown length")
        size = int(fields[b"content-length"]) if method == b"GET" else 0
        at = self.kept.room(size)
        got = os.pwrite(self.kept.file, rest, at) if rest else 0
        scratch = memoryview(bytearray(1 << 20))
        while got < size:
            taken = self.upstream.recv_into(scratch[: min(len(scratch), size - got)])
            if not taken:
                raise ConnectionError("the server cut its answer")
            got += os.pwrite(self.kept.file, scratch[:taken], at + got)
        made = Answer(answer, at, size)
        if answer.split(b" ", 2)[1] in (b"200", b"206"):
            self.kept.keep(request, made)
        return made

    def give(self, answer: Answer) -> None:
        self.client.sendall(answer.head)
        sent = 0
        while sent < answer.size:
            left = answer.size - sent
            sent += os.sendfile(self.client.fileno(), self.kept.file, answer.at + sent, left)


def receive_head(sock: socket.socket, rest: bytes) -> tuple[bytes, bytes]:
    """A head with its empty line, and the bytes after it; both empty if the peer has closed."""
    while b"\r\n\r\n" not in rest:
        more = sock.recv(65536)
        if not more:
            return b"", b""
        rest += more
    head, end, rest = rest.partition(b"\r\n\r\n")
    return head + end, rest


def fields_of(head: bytes) -> dict[bytes, bytes]:
    pairs = [line.partition(b":") for line in head.split(b"\r\n")[1:]]
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def main() -> None:
    url = urlsplit(sys.argv[1])
    assert url.hostname and url.port
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)
    arguments = (listening, (url.hostname, url.port), Kept())
    threading.Thread(target=_accept, args=arguments, daemon=True).start()
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    sys.stdin.read()


def _accept(listening: socket.socket, server: tuple[str, int], kept: Kept) -> None:
    while True:
        sock, _ = listening.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=Connection(sock, server, kept).serve, daemon=True).start()


if __name__ == "__main__":
    main()
