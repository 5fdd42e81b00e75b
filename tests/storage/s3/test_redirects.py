"""An endpoint that answers everything by sending it elsewhere: told as that, by each verb."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from smckpt.checkpoint.commits.discover import find_checkpoints
from smckpt.checkpoint.upkeep.verify import verify_checkpoint
from smckpt.errors import StorageError
from smckpt.storage.s3.config import StoreOptions
from smckpt.storage.s3.storage import S3Storage

MIB = 1 << 20
URL = "s3://bucket/run"
Endpoint = tuple[str, list[str]]
AWAY = "https://elsewhere.example/console"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    status, location, body = 307, AWAY, b""
    asked: list[str]

    def sent_on(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append(f"{self.command} {self.path}")
        self.send_response(self.status)
        if self.location:
            self.send_header("Location", self.location)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self.body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = sent_on

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def sending_on(status: int, where: str = AWAY, page: bytes = b"") -> Iterator[Endpoint]:
    """An endpoint, and what it was asked."""
    asked: list[str] = []
    fields = {"status": status, "location": where, "body": page, "asked": asked}
    handler = type("Handler", (_Handler,), fields)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.delenv("AWS_PROFILE", raising=False)


VERBS: dict[str, Callable[[S3Storage], object]] = {
    "put": lambda store: store.put("data", b"x"),
    "put_exclusive": lambda store: store.put_exclusive("data", b"x"),
    "create_file": lambda store: store.create_file("data", 11 * MIB),
    "read": lambda store: store.read("data"),
    "read a range": lambda store: store.read("data", 3, 9),
    "size": lambda store: store.size("data"),
    "stored_crc64": lambda store: store.stored_crc64("data"),
    "list": lambda store: store.list(),
    "list_dirs": lambda store: store.list_dirs(),
    "list_unfinished": lambda store: store.list_unfinished(),
    "delete": lambda store: store.delete("data"),
    "try_out": lambda store: store.try_out("probe"),
}


@pytest.mark.parametrize("answer", [301, 302, 307, 308])
def test_every_verb_tells_that_its_requests_are_sent_on(answer: int) -> None:
    with sending_on(answer) as (endpoint, asked):
        store = S3Storage(URL, StoreOptions(endpoint=endpoint, region="us-east-1", chunk_size_MB=5))
        for verb, call in VERBS.items():
            del asked[:]
            with pytest.raises(StorageError) as told:
                call(store)
            said = f"{verb}: {told.value}"
            assert "redirects requests to" in said and AWAY in said and "check the endpoint" in said
            assert told.value.path and told.value.path.startswith(URL), said
            assert len(asked) <= 3, asked


@pytest.mark.parametrize(
    ("where", "page"),
    [("", b""), ("/run", b""), (AWAY, b"<html>Log in</html>"), ("", b"\xff\xfe" * 999)],
    ids=["nowhere", "to itself", "a page", "noise"],
)
def test_wherever_it_leads_and_whatever_stands_beside_is_one_error(where: str, page: bytes) -> None:
    with sending_on(307, where, page) as (endpoint, asked):
        config = StoreOptions(endpoint=endpoint, region="us-east-1")
        for look in (find_checkpoints, verify_checkpoint):
            del asked[:]
            with pytest.raises(StorageError, match="cannot list.*endpoint"):
                look(URL, storage=config)
            assert len(asked) <= 3, asked
