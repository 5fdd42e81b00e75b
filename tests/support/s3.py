"""The S3 server of the tests: that of the example, with one bucket."""

from __future__ import annotations

from contextlib import AbstractContextManager

from examples.loopback_s3 import KEY, SECRET, Server, server_program
from examples.loopback_s3 import serve as serve_bucket

__all__ = ["BUCKET", "KEY", "SECRET", "Server", "serve", "server_program"]

BUCKET = "ckpt"


def serve() -> AbstractContextManager[Server]:
    """A fresh server; what it holds goes with it."""
    return serve_bucket(BUCKET)
