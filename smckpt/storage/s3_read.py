"""Ranged reads from the socket into the caller's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smckpt.storage.s3_faults import BadBody

__all__ = ["fill", "split"]


def split(
    buffers: Sequence[memoryview], offset: int, limit: int
) -> list[tuple[int, list[memoryview]]]:
    """Requests (offset, buffers) of at most `limit` bytes each, which together fill `buffers`."""
    out: list[tuple[int, list[memoryview]]] = []
    room = 0
    for buffer in buffers:
        at = 0
        while at < len(buffer):
            if room == 0:
                out.append((offset, []))
                room = limit
            piece = buffer[at : at + room]
            out[-1][1].append(piece)
            at, offset, room = at + len(piece), offset + len(piece), room - len(piece)
    return out


def fill(body: Any, buffers: Sequence[memoryview]) -> None:
    """The answer's body, all of it, into `buffers`.

    Raises:
        BadBody: it ended early or broke off; the connection is dropped.
    """
    from botocore.exceptions import BotoCoreError
    from urllib3.exceptions import HTTPError

    raw = _plain(body)
    reader = body if raw is None else raw._fp
    try:
        for buffer in buffers:
            at = 0
            while at < len(buffer):
                count = reader.readinto(buffer[at:])
                if not count:
                    raise BadBody(f"the answer's body ended {len(buffer) - at} bytes early")
                at += count
    except (BotoCoreError, HTTPError, OSError, ValueError, AttributeError) as error:
        body.close()
        raise BadBody(f"the answer's body broke off: {error}") from error
    except BaseException:
        body.close()
        raise
    if raw is not None:
        raw.release_conn()
    else:
        body.read()  # meets the end, so that the connection is used again


def _plain(body: Any) -> Any:
    """The HTTP response below the body, if its bytes come as they are and it reads into memory.

    urllib3 gives a copy of what it read; the response below it reads from the socket to where the
    bytes belong. What lies below is private: anything unexpected falls back to the public way.
    """
    raw = getattr(body, "_raw_stream", None)
    below = getattr(raw, "_fp", None)
    headers = getattr(raw, "headers", {})
    plain = (
        callable(getattr(below, "readinto", None))
        and callable(getattr(raw, "release_conn", None))
        and not getattr(below, "chunked", True)
        and "content-encoding" not in {key.lower() for key in headers}
        and getattr(raw, "_fp_bytes_read", 0) == 0
    )
    return raw if plain else None
