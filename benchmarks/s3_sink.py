"""An HTTP server on loopback that answers like S3, drops every body and serves zeros.

For `benchmarks/s3.py`: a client's own cost shows best if the server costs almost nothing. The sink
keeps nothing and checks nothing. GET and HEAD of `…/zeros-<bytes>` find an object.

    python benchmarks/s3_sink.py [PEM]    # prints its URL and serves until stdin closes

PEM: a file with a private key and its certificate; with it the sink speaks TLS.
"""

from __future__ import annotations

import re
import socket
import ssl
import sys
import threading

_SCRATCH = 4 << 20
_BEGUN = (
    b"<InitiateMultipartUploadResult><Bucket>b</Bucket><Key>k</Key><UploadId>1</UploadId>"
    b"</InitiateMultipartUploadResult>"
)
_COMPLETED = (
    b"<CompleteMultipartUploadResult><Location>l</Location><Bucket>b</Bucket><Key>k</Key>"
    b"<ETag>&quot;1&quot;</ETag></CompleteMultipartUploadResult>"
)


class Connection:
    """One client's requests, one after the other."""

    def __init__(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        self.sock = sock
        self.tls = tls
        self.scratch = memoryview(bytearray(_SCRATCH))
        self.zeros = memoryview(bytes(_SCRATCH))
        self.rest = b""

    def serve(self) -> None:
        try:
            if self.tls is not None:
                self.sock = self.tls.wrap_socket(self.sock, server_side=True)
            while head := self.head():
                self.answer(head)
        except (OSError, ValueError):
            return  # the client went away
        finally:
            self.sock.close()

    def head(self) -> bytes:
        while b"\r\n\r\n" not in self.rest:
            more = self.sock.recv(65536)
            if not more:
                return b""
            self.rest += more
        head, _, self.rest = self.rest.partition(b"\r\n\r\n")
        return head

    def answer(self, head: bytes) -> None:
        method, target, _ = head.split(b"\r\n", 1)[0].split(b" ", 2)
        pairs = [line.partition(b":") for line in head.split(b"\r\n")[1:]]
        fields = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if fields.get(b"expect", b"").lower() == b"100-continue":
            self.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fields.get(b"transfer-encoding", b"").lower() == b"chunked":
            self.drop_chunks()
        else:
            self.drop(int(fields.get(b"content-length", b"0")))
        found = re.search(rb"zeros-(\d+)", target)
        if method in (b"GET", b"HEAD") and found:
            self.send_zeros(method, int(found[1]), fields.get(b"range"))
        elif method == b"POST" and b"uploadId=" in target:
            self.reply(_COMPLETED)
        elif method == b"POST":
            self.reply(_BEGUN)
        elif method == b"GET":
            self.reply(b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
        else:
            self.reply(b"")

    def drop(self, size: int) -> None:
        taken = min(size, len(self.rest))
        self.rest, size = self.rest[taken:], size - taken
        while size:
            got = self.sock.recv_into(self.scratch[: min(size, _SCRATCH)])
            if not got:
                raise ConnectionError
            size -= got

    def drop_chunks(self) -> None:
        while True:
            while b"\r\n" not in self.rest:
                self.rest += self.sock.recv(65536)
            line, _, self.rest = self.rest.partition(b"\r\n")
            size = int(line.split(b";")[0], 16)
            self.drop(size + 2 if size else 0)
            if size == 0:  # trailers, up to an empty line
                while not self.rest.startswith(b"\r\n") and b"\r\n\r\n" not in self.rest:
                    self.rest += self.sock.recv(65536)
                cut = 2 if self.rest.startswith(b"\r\n") else self.rest.index(b"\r\n\r\n") + 4
                self.rest = self.rest[cut:]
                return

    def send_zeros(self, method: bytes, size: int, wanted: bytes | None) -> None:
        start, stop, status = 0, size, b"200 OK"
        extra = b""
        if wanted:
            first, _, last = wanted.removeprefix(b"bytes=").partition(b"-")
            start, stop = int(first), min(size, int(last) + 1 if last else size)
            status = b"206 Partial Content"
            extra = b"Content-Range: bytes %d-%d/%d\r\n" % (start, stop - 1, size)
        self.sock.sendall(
            b'HTTP/1.1 %s\r\nContent-Length: %d\r\nETag: "1"\r\nAccept-Ranges: bytes\r\n'
            b"Last-Modified: Wed, 01 Jan 2025 00:00:00 GMT\r\n"
            b"Content-Type: binary/octet-stream\r\n%s\r\n" % (status, stop - start, extra)
        )
        left = stop - start if method == b"GET" else 0
        while left:
            left -= self.sock.send(self.zeros[: min(left, _SCRATCH)])

    def reply(self, body: bytes) -> None:
        self.sock.sendall(
            b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Type: application/xml\r\n'
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )


def main() -> None:
    tls = None
    if len(sys.argv) > 1:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(sys.argv[1])
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)
    threading.Thread(target=_accept, args=(listening, tls), daemon=True).start()
    scheme = "https" if tls else "http"
    print(f"{scheme}://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    sys.stdin.read()


def _accept(listening: socket.socket, tls: ssl.SSLContext | None) -> None:
    while True:
        sock, _ = listening.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=Connection(sock, tls).serve, daemon=True).start()


if __name__ == "__main__":
    main()
