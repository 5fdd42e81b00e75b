"""Daemons of HyperPod's managed tier on loopback: a small one of ours, and the stand-in that the
sdist of `amzn-sagemaker-checkpointing` ships, if SMCKPT_MANAGED_TIER names its unpacked folder.

Both hold blobs by namespace, rank and step, replace them, and drop the oldest of a rank.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.support.launch import free_port
from tests.support.limits import seconds

VARIABLE = "SMCKPT_MANAGED_TIER"
NAMED = "the unpacked sdist of amzn-sagemaker-checkpointing 1.1.3 (with fastapi and uvicorn here)"
_SERVER = """
import importlib.util, sys, uvicorn
spec = importlib.util.spec_from_file_location("membrain_server", sys.argv[1])
module = sys.modules["membrain_server"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
uvicorn.run(module.app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
"""


@dataclass
class Held:
    """namespaces: name → how many blobs of a rank stay. blobs: by namespace, rank and step."""

    namespaces: dict[str, int] = field(default_factory=dict)
    blobs: dict[tuple[str, int, int], tuple[bytes, str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, key: tuple[str, int, int], blob: tuple[bytes, str]) -> None:
        self.blobs[key] = blob
        steps = sorted(step for *of, step in self.blobs if of == [*key[:2]])
        for old in steps[: -self.namespaces[key[0]]]:
            del self.blobs[(*key[:2], old)]


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    held: Held

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # of a client that wanted the head alone
            super().handle()

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: bytes = b"{}", meta: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if meta:
            self.send_header("Shard-Meta", meta)
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # a client that wanted the head alone
            self.wfile.write(body)

    def act(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        split, held = urlsplit(self.path), self.held
        named = re.fullmatch(r"/v1/cp/namespaces/([\w-]+)", split.path)
        blob = re.fullmatch(r"/v1/cp/checkpoints/([\w-]+)/(\d+)/(\d+)", split.path)
        with held.lock:
            if split.path == "/v1/cp/cluster/reset":
                held.namespaces.clear()
                held.blobs.clear()
                return self.answer(200)
            if named is not None and self.command == "POST":
                known = named[1] in held.namespaces
                if not known:
                    held.namespaces[named[1]] = int(parse_qs(split.query)["steps_retained"][0])
                return self.answer(409 if known else 200)
            if named is not None:
                return self.answer(200 if named[1] in held.namespaces else 404)
            assert blob is not None, self.path
            key = blob[1], int(blob[2]), int(blob[3])
            if blob[1] not in held.namespaces or (self.command != "POST" and key not in held.blobs):
                return self.answer(404)
            if self.command == "POST":
                held.put(key, (body, self.headers.get("Shard-Meta", "")))
            elif self.command == "DELETE":
                del held.blobs[key]
            else:
                return self.answer(200, *held.blobs[key])
        return self.answer(200)

    do_GET = do_POST = do_DELETE = act


@contextlib.contextmanager
def small_daemon() -> Iterator[str]:
    """Its address."""
    requests = type("Requests", (_Requests,), {"held": Held()})
    with ThreadingHTTPServer(("127.0.0.1", 0), requests) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def stand_in() -> Iterator[str]:
    """The address of that of the sdist."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} can name {NAMED}")
    program = os.path.join(folder, "tests", "local_tests", "membrain_server.py")
    port = free_port()
    server = subprocess.Popen([sys.executable, "-c", _SERVER, program, str(port)])
    try:
        deadline = time.monotonic() + seconds(60)
        while True:
            try:
                ask(f"127.0.0.1:{port}", "GET", "/health")
                break
            except ConnectionError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(seconds(30))


DAEMONS = {"small": small_daemon, "sdist": stand_in}


def ask(
    address: str, method: str, path: str, body: bytes = b"", meta: str = ""
) -> tuple[int, bytes, str]:
    """The status, the body and the blob's header."""
    connection = http.client.HTTPConnection(address, timeout=seconds(30))
    try:
        connection.request(method, path, body, {"Shard-Meta": meta} if meta else {})
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers.get("Shard-Meta", "")
    finally:
        connection.close()


def blob_of(note: bytes) -> str:
    """The path of the blob that a note means."""
    at = json.loads(note)
    return f"/v1/cp/checkpoints/{at['namespace']}/{at['rank']}/{at['step']}"
