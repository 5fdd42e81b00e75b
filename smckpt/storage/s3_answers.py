"""Answers that say "200" and are none of S3's: a proxy's page, a console's, nothing at all.

botocore takes what lacks every field for an empty answer, and so a page for a listing of nothing.
"""

from __future__ import annotations

from typing import Any

from smckpt.storage.s3_faults import BadBody

__all__ = ["refuse_strange"]

# What every store says in answer to these. Of GET and HEAD the bytes themselves are checked.
_SAID = {
    "PutObject": "ETag",
    "UploadPart": "ETag",
    "CreateMultipartUpload": "UploadId",
    "CompleteMultipartUpload": "ETag",
    "ListObjectsV2": "IsTruncated",
}
_PACKED = ("gzip", "x-gzip", "deflate", "br", "zstd")


def refuse_strange(client: Any) -> None:
    """Let a client take an answer of another kind for one that broke off."""
    client.meta.events.register("after-call.s3", _refuse, unique_id="smckpt-strange")


def _refuse(http_response: Any, parsed: dict[str, Any], model: Any, **_: Any) -> None:
    if http_response.status_code >= 300:
        return
    field = _SAID.get(model.name)
    if field is not None and field not in parsed:
        raise BadBody(f"the answer to {model.name} is none of S3's: it lacks {field}")
    packed = str(parsed.get("ContentEncoding", "")).lower()
    if packed in _PACKED:
        if hasattr(parsed.get("Body"), "close"):
            parsed["Body"].close()
        raise BadBody(f"the answer was packed on its way (Content-Encoding: {packed})")
