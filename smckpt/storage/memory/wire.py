"""Messages to and from a keeper: a JSON header, then as many bytes as it says.

On its own host a keeper listens at a Unix socket without a file (Linux's abstract names) and takes
processes of its own user alone. Other keepers and hosts reach it over TCP: both sides prove first
that they know its secret (HMAC-SHA256 of the other's random challenge), and the secret is not sent.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
from dataclasses import dataclass
from typing import Any

MOST = 1 << 26  # bytes of a header: a listing of a million files
_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("3i")  # process, user, group
ANSWER = 5.0  # seconds until another host has to prove itself
SILENT = 60.0  # seconds for which a keeper that does not answer is asked last
IDLE = 20.0  # seconds without a byte after which a connection is given up
_UNPROVEN = 1 << 10  # bytes of a header from somebody who has not proven anything


@dataclass(frozen=True)
class Peer:
    """A keeper: its host, for errors, where it listens, its secret, and what may fail with it."""

    host: str
    address: str
    port: int
    secret: str
    domain: str = ""

    def to_json(self) -> list[Any]:
        return [self.host, self.address, self.port, self.secret, self.domain]


class KeeperRefusal(OSError):
    """A keeper does not do what it was asked."""


def local_name(job: str) -> str:
    """The name of the keeper's Unix socket on its host. It ends with the keeper."""
    digest = hashlib.sha256(f"{os.getuid()}\0{job}".encode()).hexdigest()[:32]
    return f"\0smckpt-keeper-{digest}"


def own_address() -> str:
    """The address of this host that others reach: the one from which it would talk to rank 0's, or
    to other networks; "" if there is none."""
    for host in (os.environ.get("MASTER_ADDR"), "192.0.2.1"):  # RFC 5737: nobody's
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
            if host:
                made.connect((host, 9))  # sends nothing
                return str(made.getsockname()[0])
    return ""


def user_of(other: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket."""
    raw = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def send(to: socket.socket, header: dict[str, Any], *data: memoryview) -> None:
    text = json.dumps(header).encode()
    to.sendall(_LENGTH.pack(len(text)) + text)
    for each in data:
        to.sendall(each)


def receive(source: socket.socket, most: int = MOST) -> dict[str, Any]:
    """
    Raises:
        ConnectionError: the other side has closed, or sends no message.
    """
    (length,) = _LENGTH.unpack(bytes(_exactly(source, _LENGTH.size)))
    if length > most:
        raise ConnectionError(f"a header of {length} bytes")
    try:
        header = json.loads(bytes(_exactly(source, length)))
    except (ValueError, RecursionError) as error:
        raise ConnectionError("a header that is no JSON") from error
    if not isinstance(header, dict):
        raise ConnectionError("a header that is no object")
    return header


def fill(source: socket.socket, target: memoryview) -> None:
    while target:
        got = source.recv_into(target)
        if not got:
            raise ConnectionError("it closed the connection")
        target = target[got:]


def _exactly(source: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    fill(source, memoryview(data))
    return data


def reply_of(source: socket.socket) -> dict[str, Any]:
    """The answer to a request.

    Raises:
        FileNotFoundError: it has no such file. KeeperRefusal: it refuses; with its errno and text.
    """
    header = receive(source)
    if "error" in header:
        code, text = header["error"]
        if code == errno.ENOENT:
            raise FileNotFoundError(code, str(text))
        raise KeeperRefusal(int(code), str(text))
    return header


def call(to: Peer | str) -> socket.socket:
    """A connection to a keeper: the one of this host, by `local_name`, or one over TCP.

    Raises:
        OSError: nobody answers, or not as a keeper of the job.
    """
    if isinstance(to, str):
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        made = socket.create_connection((to.address, to.port), ANSWER)
    try:
        if isinstance(to, str):
            made.settimeout(IDLE)
            made.connect(to)
            if user_of(made) != os.getuid():  # a name without a file belongs to whoever takes it
                raise ConnectionError("another user listens under the name of the keeper")
        else:
            _prove(made, to.secret)
            made.settimeout(IDLE)
    except BaseException:
        made.close()
        raise
    return made


def _prove(to: socket.socket, secret: str) -> None:
    """Show a keeper that this side knows its secret, and let it show the same."""
    _at_once(to)
    theirs = str(receive(to, _UNPROVEN).get("challenge"))
    ours = secrets.token_hex(16)
    send(to, {"proof": _proof(secret, "caller", theirs, ours), "challenge": ours})
    answer = str(receive(to, _UNPROVEN).get("proof"))
    if not hmac.compare_digest(answer, _proof(secret, "keeper", theirs, ours)):
        raise ConnectionError("it is no keeper of this job")


def is_known(by: socket.socket, secret: str | None) -> bool:
    """Whether a caller is of this user, on a Unix socket; or over TCP, where it and this side show
    that they know the secret."""
    if secret is None:
        return user_of(by) == os.getuid()
    _at_once(by)
    ours = secrets.token_hex(16)
    send(by, {"challenge": ours})
    answer = receive(by, _UNPROVEN)
    theirs = str(answer.get("challenge"))
    wanted = _proof(secret, "caller", ours, theirs)
    if not hmac.compare_digest(str(answer.get("proof")), wanted):
        return False
    send(by, {"proof": _proof(secret, "keeper", ours, theirs)})
    return True


def _at_once(of: socket.socket) -> None:
    """Send what is small without waiting for the other side's receipt of what went before: with
    the header of an answer on the way, its bytes would wait for 40 ms."""
    of.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _proof(secret: str, side: str, keepers: str, callers: str) -> str:
    text = f"{side}\0{keepers}\0{callers}".encode()
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()
