"""A proxy in front of the S3 server that spoils chosen requests; over TLS too, and as the HTTP
proxy through which a client is told to go."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import random
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tests.support.limits import seconds

__all__ = ["FAULTS", "FaultyProxy", "faulty_proxy", "secure_proxy"]

FAULTS = ("503", "500", "before", "after", "half", "wrong", "wrong answer")
_CODES = {"503": "SlowDown", "500": "InternalError"}
_REFUSED = (
    '<?xml version="1.0"?><Error><Code>{}</Code><Message>spoiled</Message>'
    "<RequestId>1</RequestId></Error>"
)


class FaultyProxy:
    """Passes requests on, and spoils those that `spoil` names. Thread-safe."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream.partition("://")[2]
        self.endpoint = ""
        self.seen: list[str] = []
        self.ranges: list[str] = []  # asked for, in order
        self.spoiled = 0  # by chance
        self.cut_handshakes = 0  # so many connections more, before a word is said
        self.ended = threading.Event()
        self._plan: list[tuple[str, str, str]] = []
        self._end: tuple[int, Callable[[], None]] | None = None
        self._chance: tuple[random.Random, float, Sequence[str]] | None = None
        self._lock = threading.Condition()

    def spoil(self, method: str, fault: str, times: int = 1, path: str = "") -> None:
        """The next `times` requests by `method` with `path` in their target suffer `fault`:

        503, 500, or a status with a code ("403 ExpiredToken"): refused with that answer; by 301
        the bucket is in another region. before,
        after: the connection is cut before, or after, the request is carried out. half: the
        answer's body breaks off in the middle. wrong, wrong answer: a byte of a PUT's body, or of a
        GET's answer, is changed on its way. late N: answered N seconds later. trickle: the
        answer's body comes byte by byte, with pauses, for as long as somebody takes it; of a PUT's
        body as little is taken. whole: all of the
        object is answered, not the range that was asked for. unconditional: what stands under the
        name is deleted first, as if the store ignored If-None-Match. without NAME: the answer lacks
        that header; without a length its body comes in chunks. page: nothing is carried out, and
        200 answered with a page of HTML. packed: the answer's body is compressed. moved: the answer
        is 307, and no body. says A => B: in its body B stands
        in the place of A. cut WHERE: the connection ends in the middle of a line of the answer:
        "status", the name of a header, or "blank", which is the line that ends them. header NAME =>
        VALUE: that header has another value. flip N: one bit differs in the byte at N percent of
        the answer's body. empty, bare STATUS: nothing is carried out, and 200, or that status,
        answered with nothing.
        """
        with self._lock:
            self._plan += [(method, path, fault)] * times

    def spoil_at_random(self, share: float, faults: Sequence[str] = FAULTS, seed: int = 0) -> None:
        """From now on that share of all requests suffers one of the faults."""
        with self._lock:
            self._chance = (random.Random(seed), share, faults) if share else None

    def end_at(self, number: int, call: Callable[[], None]) -> None:
        """Call `call` when request `number`, counted from now as 1, arrives. It and what comes
        after it is not carried out."""
        with self._lock:
            self._end = (len(self.seen) + number, call)

    def wait_for(self, count: int, timeout: float = 30) -> None:
        """Until so many requests have arrived in all."""
        with self._lock:
            came = self._lock.wait_for(lambda: len(self.seen) >= count, seconds(timeout))
            assert came, self.seen

    @property
    def left(self) -> int:
        """Faults that have not come about."""
        with self._lock:
            return len(self._plan)

    def fault(self, method: str, target: str) -> str:
        with self._lock:
            self.seen.append(f"{method} {target}")
            self._lock.notify_all()
            if self._end is not None and len(self.seen) >= self._end[0]:
                if len(self.seen) == self._end[0]:
                    self._end[1]()
                return "before"
            for item in self._plan:
                if item[0] == method and item[1] in target:
                    self._plan.remove(item)
                    return item[2]
            if self._chance is not None:
                dice, share, faults = self._chance
                if dice.random() < share:
                    self.spoiled += 1
                    return dice.choice(faults)
        return ""


@contextlib.contextmanager
def faulty_proxy(upstream: str, tls: ssl.SSLContext | None = None) -> Iterator[FaultyProxy]:
    """A proxy on a port of its own, until the block ends.

    Args:
        tls: it speaks TLS with these certificates.
    """
    proxy = FaultyProxy(upstream)

    class Handler(_Handler):
        plan = proxy

    server = _Server(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    proxy.endpoint = f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield proxy
    finally:
        proxy.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def secure_proxy(upstream: str, authority: Path) -> Iterator[FaultyProxy]:
    """The same over TLS; the certificate of the authority that vouches for it is put in a file."""
    import trustme

    made = trustme.CA()
    made.cert_pem.write_to_path(str(authority))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    made.issue_cert("127.0.0.1").configure_cert(tls)
    with faulty_proxy(upstream, tls) as proxy:
        yield proxy


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Quiet about clients that go away, or that do not trust it."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    plan: FaultyProxy
    cut_in = ""

    def setup(self) -> None:
        if isinstance(self.request, ssl.SSLSocket):
            if self.plan.cut_handshakes:
                self.plan.cut_handshakes -= 1
                raise ConnectionAbortedError
            self.request.do_handshake()  # here, since it may wait for the client
        super().setup()

    def do_CONNECT(self) -> None:
        """A tunnel to the address that the client names."""
        fault = self.plan.fault(self.command, self.path)
        if fault == "before":
            return self._cut()
        if fault:
            return self._answer(int(fault[:3]), [], b"")
        host, _, port = self.path.rpartition(":")
        with socket.create_connection((host, int(port)), 60) as far:
            self.send_response(200)
            self.end_headers()
            back = threading.Thread(target=_pass_on, args=(far, self.connection))
            back.start()
            _pass_on(self.connection, far)
            back.join()
        self._cut()

    def handle_one(self) -> None:
        if "Range" in self.headers:
            self.plan.ranges.append(self.headers["Range"])
        fault = self.plan.fault(self.command, self.path)
        if fault == "trickle" and self.command == "PUT":
            return self._take_slowly()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if fault == "before":
            return self._cut()
        if fault[:3].isdigit():
            code = fault[4:] or _CODES[fault]
            answer = _REFUSED.format(code).encode()
            headers = [("Content-Type", "application/xml")]
            if fault.startswith("301"):
                headers.append(("x-amz-bucket-region", "eu-central-1"))
            return self._answer(int(fault[:3]), headers, answer)
        if fault == "page":
            return self._answer(200, [("Content-Type", "text/html")], b"<html>Log in</html>")
        if fault == "empty" or fault.startswith("bare "):
            return self._answer(int(fault[5:]) if fault[5:].isdigit() else 200, [], b"")
        if fault == "moved":
            return self._answer(307, [("Location", "https://elsewhere.example/")], b"")
        if fault.startswith("late "):
            self.plan.ended.wait(float(fault[5:]))
        if fault == "unconditional":
            _delete(self.plan.upstream, self.path)
        if fault == "wrong" and self.command == "PUT":
            body = _changed(body)
        if fault == "whole":
            return self._answer(200, [("ETag", '"1"')], _object(self.plan.upstream, self.path))
        status, headers, answer = self._forward(body)
        if fault == "after":
            return self._cut()
        if fault == "packed":
            answer = gzip.compress(answer)
            headers = [each for each in headers if each[0].lower() != "content-length"]
            headers.append(("Content-Encoding", "gzip"))
        if fault == "wrong answer" and self.command == "GET" and status in (200, 206):
            answer = _changed(answer)
        if fault.startswith("flip ") and answer:
            at = min(len(answer) * int(fault[5:]) // 100, len(answer) - 1)
            answer = answer[:at] + bytes([answer[at] ^ 1]) + answer[at + 1 :]
        if fault.startswith("header "):
            named, _, value = fault[7:].partition(" => ")
            headers = [(n, value if n.lower() == named.lower() else v) for n, v in headers]
        if fault.startswith("cut "):
            self.cut_in = fault[4:].lower()
        if fault.startswith("without "):
            headers = [each for each in headers if each[0].lower() != fault[8:].lower()]
        if fault == "without Content-Length":
            headers.append(("Transfer-Encoding", "chunked"))
            answer = b"%x\r\n%s\r\n0\r\n\r\n" % (len(answer), answer)
        if fault.startswith("says "):
            old, _, new = fault[5:].encode().partition(b" => ")
            headers = [each for each in headers if each[0].lower() != "content-length"]
            answer = answer.replace(old, new)
        with contextlib.suppress(ConnectionError):  # it may have given up waiting
            self._answer(status, headers, answer, half=fault == "half", slowly=fault == "trickle")

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_one

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        link = http.client.HTTPConnection(self.plan.upstream, timeout=60)
        target = self.path  # a client that takes us for its proxy names the host too
        if target.startswith("http://"):
            target = "/" + target.removeprefix("http://").partition("/")[2]
        link.putrequest(self.command, target, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("expect", "connection"):
                link.putheader(name, value)
        link.endheaders(body or None)
        answer = link.getresponse()
        data = answer.read()
        headers = [
            (name, value)
            for name, value in answer.getheaders()
            if name.lower() not in ("connection", "transfer-encoding", "date", "server")
        ]
        link.close()
        return answer.status, headers, data

    def _answer(
        self,
        status: int,
        headers: list[tuple[str, str]],
        body: bytes,
        half: bool = False,
        slowly: bool = False,
    ) -> None:
        self.send_response(status)
        known = {name.lower() for name, _ in headers}
        for name, value in headers:
            self.send_header(name, value)
        if not {"content-length", "transfer-encoding"} & known and status != 204:
            self.send_header("Content-Length", str(len(body)))
        if self.cut_in:
            return self._half_headers()
        self.end_headers()
        if slowly:
            for at in range(len(body)):
                self.wfile.write(body[at : at + 1])
                self.plan.ended.wait(0.05)
        elif self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if half else body)
        if half:
            self._cut()

    def _half_headers(self) -> None:
        """The answer up to the middle of a line of its headers, and no more."""
        lines = b"".join(self._headers_buffer).splitlines(keepends=True)  # type: ignore[attr-defined]
        names = [line.partition(b":")[0].decode().lower() for line in lines]
        names[0] = "status"
        at = names.index(self.cut_in) if self.cut_in in names else len(lines)
        line = lines[at] if at < len(lines) else b"\r\n"
        self.wfile.write(b"".join(lines[:at]) + line[: max(len(line) * 3 // 4, 1)])
        self.cut_in = ""
        self._cut()

    def _take_slowly(self) -> None:
        """As fast as it takes to keep the client from thinking that nobody takes anything."""
        if self.headers.get("Expect"):
            self.send_response_only(100)
            self.end_headers()
        while not self.plan.ended.is_set() and self.rfile.read1(1 << 16):
            self.plan.ended.wait(0.01)
        self._cut()

    def _cut(self) -> None:
        self.close_connection = True


def _pass_on(near: socket.socket, far: socket.socket) -> None:
    """Until one of them ends."""
    with contextlib.suppress(OSError):
        while data := near.recv(1 << 16):
            far.sendall(data)
    with contextlib.suppress(OSError):
        far.shutdown(socket.SHUT_RDWR)


def _changed(body: bytes) -> bytes:
    return bytes([body[0] ^ 1]) + body[1:] if body else body


def _delete(upstream: str, target: str) -> None:
    client, named = _client(upstream, target)
    client.delete_object(**named)


def _object(upstream: str, target: str) -> bytes:
    client, named = _client(upstream, target)
    data: bytes = client.get_object(**named)["Body"].read()
    return data


def _client(upstream: str, target: str) -> tuple[Any, dict[str, str]]:
    """boto3's client, and which object it is about."""
    import boto3

    bucket, _, key = unquote(target.partition("?")[0]).lstrip("/").partition("/")
    client = boto3.client("s3", endpoint_url=f"http://{upstream}", region_name="us-east-1")
    return client, {"Bucket": bucket, "Key": key}
