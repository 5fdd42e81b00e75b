"""Make boto3's client for S3. It refuses answers that do not come from S3.

boto3 is imported with the first request, so neither `import smckpt` nor a save to a disk waits for
it. Its retries are off, because `requests.Requests` retries.

Python's http.client takes the end of the connection for the end of the headers, and a number of
which only the first digits arrived for the number.
"""

from __future__ import annotations

import email.errors
import functools
import http.client
import importlib
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

from smckpt._version import __version__
from smckpt.errors import UsageError
from smckpt.storage.s3.bodies import refresh_in_time
from smckpt.storage.s3.config import StoreOptions
from smckpt.storage.s3.faults import BadBody

_CONNECT_SECONDS = 10

# Fields that the answer of every store has.
_ANSWERS = {
    "PutObject": "ETag",
    "UploadPart": "ETag",
    "CreateMultipartUpload": "UploadId",
    "CompleteMultipartUpload": "ETag",
    "GetObject": "ETag",
    "HeadObject": "ETag",
    "ListObjectsV2": "IsTruncated",
}
# Where the next page of a listing begins.
_NEXT = ("NextContinuationToken", "NextKeyMarker", "NextUploadIdMarker")
_PACKED = ("gzip", "x-gzip", "deflate", "br", "zstd")


def make_client(config: StoreOptions) -> Any:
    """Make a client for S3 with these options.

    Raises:
        UsageError: `client_factory` names a function that cannot be found, fails, or returns
            something else.
        BotoCoreError, ValueError: boto3 refuses the options.
    """
    client = _client(config, _settings(config))
    # Bodies are signed, which costs a SHA-256, only over plain HTTP to another host. TLS protects
    # them, loopback needs no protection, and the CRC is checked in any case.
    where = urlsplit(client.meta.endpoint_url)  # AWS settings may name it too
    if where.scheme == "http" and where.hostname not in ("127.0.0.1", "localhost", "::1"):
        client = _client(config, _settings(config, signs=True))
    # What these options add to each request that has a field for it
    fields = {
        "RequestPayer": "requester" if config.requester_pays else "",
        "ServerSideEncryption": "aws:kms" if config.sse_kms_key else "",
        "SSEKMSKeyId": config.sse_kms_key or "",
        "StorageClass": config.storage_class or "",
        "Tagging": urlencode(config.tags),
    }

    def options(params: dict[str, Any], model: Any, **_: Any) -> None:
        known = model.input_shape.members if model.input_shape else ()
        params.update({name: value for name, value in fields.items() if value and name in known})

    client.meta.events.register("provide-client-params.s3", options, unique_id="smckpt-options")
    client.meta.events.register("after-call.s3", _refuse_strange, unique_id="smckpt-strange")
    client.meta.events.register("needs-retry.s3.HeadBucket", _ask_once, unique_id="smckpt-region")
    refuse_half_headers(client)
    refresh_in_time(client, config.timeout_s)
    return client


def _settings(config: StoreOptions, signs: bool = False) -> Any:
    from botocore.config import Config

    return Config(
        retries={"mode": "standard", "total_max_attempts": 1},
        max_pool_connections=max(config.max_write_concurrency, config.max_read_concurrency) + 4,
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=config.read_timeout_s,
        tcp_keepalive=True,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra=f"smckpt/{__version__}",
        # No other field of the s3 section is set, so that the user's AWS settings hold: some stores
        # need addressing_style = virtual. By default boto3 puts the bucket into the path for an
        # endpoint.
        s3={"payload_signing_enabled": signs},
    )


def _client(config: StoreOptions, settings: Any) -> Any:
    named = {"region_name": config.region, "endpoint_url": config.endpoint, "config": settings}
    if config.client_factory is None:
        import boto3

        return boto3.Session(profile_name=config.profile).client("s3", **named)
    factory = config.client_factory
    from botocore.exceptions import BotoCoreError, ClientError

    module, _, function = factory.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"cannot import client_factory={factory!r}: {error}",
            remedy="name a function of a module on PYTHONPATH: the process that writes imports it "
            "too",
        ) from error
    try:
        client = make(**named)
    except (BotoCoreError, ClientError, OSError):  # classified like the errors of requests
        raise
    except Exception as error:
        raise UsageError(
            f"client_factory={factory!r} failed: {type(error).__name__}: {error}",
            remedy="correct that function; it is called with region_name=, endpoint_url= and "
            "config=",
        ) from error
    service = getattr(getattr(client, "meta", None), "service_model", None)
    if getattr(service, "service_name", "") != "s3":
        raise UsageError(
            f"client_factory={factory!r} returned {client!r}, which is not an S3 client",
            remedy="return boto3.Session(…).client('s3', **settings)",
        )
    return client


def _refuse_strange(http_response: Any, parsed: dict[str, Any], model: Any, **_: Any) -> None:
    """Refuse an answer that says "success" but does not come from S3, such as a proxy's page or a
    compressed body.

    Raises:
        BadBody: the answer is of that kind.
    """
    strange = f"the answer to {model.name} does not come from S3"
    if http_response.status_code == 404:  # one would take it for a file that is missing
        if model.name == "HeadObject" and "etag" in http_response.headers:
            raise BadBody(f"{strange}: 404 for an object that it describes")
        if model.name == "GetObject" and parsed.get("Error", {}).get("Code") == "404":
            raise BadBody(f"{strange}: 404 without S3's reason")
    if http_response.status_code >= 300:
        return
    field = _ANSWERS.get(model.name)
    if field is not None and not parsed.get(field) and parsed.get(field) is not False:
        raise BadBody(f"{strange}: it lacks {field}")
    if model.name in ("ListObjectsV2", "ListMultipartUploads"):
        _refuse_strange_list(strange, http_response.content, parsed)
    kind = str(http_response.headers.get("Content-Type", "")).lower()
    # no field of the answers of these tells
    if model.name in ("DeleteObject", "AbortMultipartUpload") and "html" in kind:
        raise BadBody(f"{strange}: it is a page")
    packed = str(parsed.get("ContentEncoding", "")).lower()
    if packed in _PACKED:
        if hasattr(parsed.get("Body"), "close"):
            parsed["Body"].close()
        raise BadBody(f"something compressed the answer on its way (Content-Encoding: {packed})")


def _refuse_strange_list(what: str, text: bytes, parsed: Mapping[str, Any]) -> None:
    """Refuse a listing that contradicts itself: it was changed on its way."""
    prefix = parsed.get("Prefix") or ""
    entries = [*parsed.get("Contents", ()), *parsed.get("Uploads", ())]
    below = parsed.get("CommonPrefixes", ())
    if any(not str(one.get("Key", "-")).startswith(prefix) for one in entries):
        raise BadBody(f"{what}: a key in it does not begin with {prefix!r}")
    if any("Key" not in one for one in entries) or any("Prefix" not in one for one in below):
        raise BadBody(f"{what}: a key is missing in it")
    # a store may take "a//" for "a/"
    if "//" not in prefix and any(not str(one["Prefix"]).startswith(prefix) for one in below):
        raise BadBody(f"{what}: a prefix in it does not begin with {prefix!r}")
    objects = parsed.get("Contents", ())
    if len({one["Key"] for one in objects}) < len(objects):
        raise BadBody(f"{what}: a key is in it twice")
    if parsed.get("Delimiter") and any("/" in one["Key"][len(prefix) :] for one in objects):
        raise BadBody(f"{what}: a key in it is below another prefix")
    sizes = [one.get("Size") for one in objects]
    if any(type(size) is not int or not 0 <= size < 1 << 63 for size in sizes):
        raise BadBody(f"{what}: a size is missing in it, or is none")
    if any(not isinstance(one.get("UploadId"), str) for one in parsed.get("Uploads", ())):
        raise BadBody(f"{what}: an upload without an id is in it")
    if parsed.get("KeyCount", 0) > len(entries) + len(below):
        raise BadBody(f"{what}: keys are missing in it")
    if not re.search(rb"<IsTruncated>(true|false)</IsTruncated>", text):
        raise BadBody(f"{what}: it does not say whether it is the last page")
    if parsed.get("IsTruncated") and not any(parsed.get(name) for name in _NEXT):
        raise BadBody("the store says that there are more keys, but not where they begin")


def _ask_once(request_dict: dict[str, Any], response: Any = None, **_: Any) -> None:
    """If a redirection names no region, botocore asks again by HEAD, and so without end if those
    answers name none. This stops it: an answer without a region is returned unchanged."""
    headers = response[1]["ResponseMetadata"]["HTTPHeaders"] if response else {}
    if "x-amz-bucket-region" not in headers:
        request_dict["context"].setdefault("s3_redirect", {})["redirected"] = True


_BLANK = (b"\r\n", b"\n")
_DEFECTS = (  # a line that is no header
    email.errors.MissingHeaderBodySeparatorDefect,
    email.errors.FirstHeaderLineIsContinuationDefect,
)


class _Lines:
    """A file whose lines are headers; remembers the last one."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.last = b""

    def readline(self, limit: int = -1) -> bytes:
        self.last = self._file.readline(limit)
        return self.last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _WholeHeaders(http.client.HTTPResponse):
    """An answer that is refused unless a blank line ends its headers, and each of them is one."""

    def begin(self) -> None:
        if self.headers is not None:
            return
        fp = self.fp
        lines: Any = _Lines(fp)
        self.fp = lines
        try:
            super().begin()
        finally:
            if self.fp is lines:
                self.fp = fp
        if lines.last not in _BLANK or any(isinstance(d, _DEFECTS) for d in self.headers.defects):
            self._close_conn()
            raise http.client.RemoteDisconnected("the headers of the answer broke off")


def _whole(answer: Any) -> type:
    return type("Answer", (_WholeHeaders, answer), {})


class _Continues(http.client.HTTPConnection):
    """What botocore's connection does with an answer to `Expect: 100-continue`, mended."""

    def _handle_expect_response(self: Any, message_body: Any) -> None:
        botocores: Any = super()
        botocores._handle_expect_response(message_body)
        early = self.response_class  # botocore's own, with the status that it has read
        if isinstance(early, functools.partial):
            self.response_class = functools.partial(_whole(early.func), **early.keywords)

    def _consume_headers(self, fp: Any) -> None:
        while (line := fp.readline()) not in _BLANK:
            if not line:  # botocore would read on without end
                raise http.client.RemoteDisconnected("the answer broke off after 100 Continue")


def refuse_half_headers(client: Any) -> None:
    """Make the connections of this client refuse them. A client of another make stays as it is."""
    session = getattr(getattr(client, "_endpoint", None), "http_session", None)
    pools = getattr(session, "_pool_classes_by_scheme", {})
    for scheme, pool in list(pools.items()):
        connection = pool.ConnectionCls
        answer = connection.response_class
        if not issubclass(answer, http.client.HTTPResponse) or issubclass(answer, _WholeHeaders):
            continue
        members = {"response_class": _whole(answer)}
        checked = type("Connection", (_Continues, connection), members)
        pools[scheme] = type("Pool", (pool,), {"ConnectionCls": checked})
