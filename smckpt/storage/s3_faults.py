"""What a failed request to S3 means: whether to try again and, if not, what to tell the user."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from typing import Any

from smckpt.errors import CheckpointError, CheckpointNotFoundError, StorageError

__all__ = [
    "BadBody",
    "Unanswered",
    "code_of",
    "is_transient",
    "lacks_credentials",
    "length_of",
    "s3_error",
    "status_of",
]

# code → (what happened, what to do)
_MEANING: dict[str, tuple[str, str]] = {
    "NoSuchBucket": (
        "there is no such bucket",
        "create the bucket, or correct its name; smckpt makes none",
    ),
    "AccessDenied": (
        "access denied",
        "allow s3:PutObject, GetObject, ListBucket, ListBucketMultipartUploads, DeleteObject and "
        "AbortMultipartUpload there (and the KMS key, if one encrypts the bucket)",
    ),
    "InvalidAccessKeyId": ("the access key is unknown to the store", "look at the credentials"),
    "SignatureDoesNotMatch": (
        "the secret key does not belong to the access key",
        "look at the credentials",
    ),
    "ExpiredToken": (
        "the credentials have expired",
        "use credentials that refresh themselves (a role, SSO), or renew them",
    ),
    "InvalidToken": ("the session token is not valid", "look at AWS_SESSION_TOKEN"),
    "RequestTimeTooSkewed": (
        "this host's clock differs from the store's by more than 15 minutes",
        "set the clock (chrony, ntp)",
    ),
    "InvalidBucketName": ("this is no name of a bucket", "write s3://bucket/prefix"),
    "KeyTooLongError": ("the key is longer than 1,024 bytes", "choose a shorter prefix"),
    "BadDigest": (
        "the store received other bytes than were sent (its checksum differs)",
        "look at the network and at proxies between here and the store",
    ),
    "NotImplemented": (
        "the store lacks this operation",
        "if it refuses checksums, set SMCKPT_S3_CHECKSUM=none; conditional PUT it must have",
    ),
    "NoSuchUpload": (
        "the upload was given up meanwhile",
        "look whether another copy, or another job, writes to the same place, or a lifecycle rule "
        "aborts uploads too early",
    ),
    "InvalidObjectState": ("the object is archived", "restore it from its archive tier first"),
    "QuotaExceeded": ("the quota is used up", "raise it, or delete old checkpoints"),
}
_REGION = (
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "301",
)
_TRANSIENT = frozenset(
    {
        "SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "Throttling",
        "ThrottlingException", "RequestLimitExceeded", "RequestThrottled", "TooManyRequests",
        "ConditionalRequestConflict", "OperationAborted", "BandwidthLimitExceeded", "BadDigest",
        "IncompleteBody", "XAmzContentChecksumMismatch", "PriorRequestNotComplete",
    }
)  # fmt: skip

# Said of credentials that are over, or that were replaced.
_LAPSED = frozenset(
    {
        "ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidToken",
        "RequestExpired", "SignatureDoesNotMatch", "TokenRefreshRequired",
    }
)  # fmt: skip


class BadBody(Exception):
    """An answer's body ended early, broke off, or was changed on its way."""


class Unanswered(Exception):
    """Credentials, or a function that makes a client, did not come in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"not after {seconds:g} s")


def code_of(error: BaseException) -> str:
    """S3's code for what went wrong; "" if the store did not say."""
    response: Any = getattr(error, "response", None)
    return str(response["Error"].get("Code", "")) if isinstance(response, dict) else ""


def status_of(error: BaseException) -> int:
    """The HTTP status; 0 if there was no answer."""
    response: Any = getattr(error, "response", None)
    if not isinstance(response, dict):
        return 0
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def length_of(answer: Mapping[str, Any]) -> int:
    """Bytes of an object's answer.

    Raises:
        BadBody: it does not say, as where a proxy on the way packs it anew.
    """
    if "ContentLength" not in answer:
        raise BadBody("the answer does not say how long it is (Content-Length)")
    return int(answer["ContentLength"])


def is_transient(error: BaseException) -> bool:
    """Whether the same request may well succeed in a moment."""
    from botocore import exceptions as bc

    if isinstance(error, bc.ClientError):
        return code_of(error) in _TRANSIENT or _passes(status_of(error))
    if isinstance(error, bc.SSLError):
        return _tls_broke_off(error)
    if isinstance(error, bc.ProxyConnectionError):
        return not _proxy_refusal(error)
    return isinstance(
        error,
        (
            bc.HTTPClientError,
            bc.ConnectionError,
            bc.ResponseStreamingError,
            bc.IncompleteReadError,
            BadBody,
        ),
    ) or (isinstance(error, OSError) and not isinstance(error, CheckpointError))


def lacks_credentials(error: BaseException) -> bool:
    """Whether the credentials at hand were refused, or new ones could not be had."""
    from botocore import exceptions as bc

    if isinstance(error, bc.ClientError):
        # The answer to HEAD has no body to say which 400 it is.
        return code_of(error) in _LAPSED or (code_of(error) == "400" == str(status_of(error)))
    lacking = (bc.CredentialRetrievalError, bc.TokenRetrievalError, Unanswered)
    return isinstance(error, lacking)


def _passes(status: int) -> bool:
    """Whether a status says that it may be better in a moment; gateways have some of their own."""
    return status in (408, 429) or (500 <= status < 600 and status not in (501, 505, 507))


def _wrapped(error: BaseException) -> Iterator[BaseException]:
    """An error of botocore, what it wraps (urllib3's), what that wraps, and so on."""
    below: BaseException | None = error
    while below is not None:
        yield below
        inside = (getattr(below, "kwargs", {}).get("error"), *below.args)
        below = next((each for each in inside if isinstance(each, BaseException)), None)


def _tls_error(error: BaseException) -> ssl.SSLError | None:
    """What the ssl module said."""
    return next((each for each in _wrapped(error) if isinstance(each, ssl.SSLError)), None)


def _tls_broke_off(error: BaseException) -> bool:
    """Whether a connection was cut, or bytes of it changed, as against one that is not trusted."""
    below = _tls_error(error)
    return isinstance(below, (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)) or (
        "BAD_RECORD_MAC" in (getattr(below, "reason", None) or "")
    )


def _proxy_refusal(error: BaseException) -> str:
    """What an HTTP proxy answered that will not make a tunnel; "" if it could not be reached."""
    said = next((str(each) for each in _wrapped(error) if "Tunnel connection" in str(each)), "")
    return said if "failed: 4" in said else ""


def s3_error(error: BaseException, url: str, action: str, tried: str = "") -> CheckpointError:
    """The error to raise for `error`, met at `url` while trying to `action` ("write", "list").

    Args:
        tried: what was tried before giving up, such as "9 times in 300 s".
    """
    if isinstance(error, CheckpointError):
        return error
    code, status = code_of(error), status_of(error)
    missing = code in ("NoSuchKey", "404", "NotFound") or (status == 404 and code not in _MEANING)
    if missing and not action.startswith("list"):  # of no objects a listing is empty
        return CheckpointNotFoundError(
            f"cannot {action}: there is no such object",
            remedy="look at the URL; `smckpt ls` on its parent shows what is there",
            path=url,
        )
    what, remedy = _meaning(error, code, status)
    after = f"; tried {tried}" if tried else ""
    return StorageError(f"cannot {action}: {what}{after}", remedy=remedy, path=url)


def _meaning(error: BaseException, code: str, status: int) -> tuple[str, str]:
    from botocore import exceptions as bc

    if code in _REGION or (status in (301, 307) and not code):
        headers = error.response["ResponseMetadata"].get("HTTPHeaders", {})  # type: ignore[attr-defined]
        there = headers.get("x-amz-bucket-region")
        return (
            f"the bucket is in {there or 'another region'}",
            f"set SMCKPT_S3_REGION={there or '<region>'} or s3_region=",
        )
    if code in _MEANING:
        return _MEANING[code]
    if code == "400":
        return (
            "the store refuses it and does not say why",
            "look whether the credentials have expired; `smckpt ls` on its parent may tell more",
        )
    if status == 403:
        return _MEANING["AccessDenied"]
    if isinstance(error, (bc.NoCredentialsError, bc.PartialCredentialsError)):
        return (
            "no credentials were found",
            "give the host a role, run `aws configure`, or set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY",
        )
    if isinstance(error, (bc.ProfileNotFound, bc.CredentialRetrievalError, bc.TokenRetrievalError)):
        return (f"credentials could not be had: {error}", "look at the AWS configuration")
    if isinstance(error, Unanswered):
        return (
            f"credentials, or the client, could not be had: {error}",
            "look at what client_factory=, or credential_process in the AWS configuration, waits "
            "for; timeout_s= says how long it may take",
        )
    if isinstance(error, bc.SSLError) and not _tls_broke_off(error):
        return _untrusted(error)
    if status == 407 or _proxy_refusal(error):
        return (
            f"the HTTP proxy refuses: {_proxy_refusal(error) or error}",
            "look at HTTP_PROXY and HTTPS_PROXY and the name and password in them; NO_PROXY names "
            "hosts that are reached without",
        )
    if isinstance(error, bc.ProxyConnectionError):
        return (
            f"the HTTP proxy cannot be reached: {error}",
            "look at HTTP_PROXY and HTTPS_PROXY; NO_PROXY names hosts that are reached without",
        )
    if isinstance(error, bc.EndpointConnectionError):
        return (f"the store cannot be reached: {error}", "look at the network and the endpoint")
    if isinstance(error, BadBody):
        return (
            f"the store did not carry it out ({error})",
            "look at the endpoint, whether that is the store, and at proxies between here and "
            "there",
        )
    if is_transient(error):
        said = f"{code or status or type(error).__name__}: {error}"
        return (
            f"the store did not carry it out ({said})",
            "look whether the store is overloaded or down; lower max_write_concurrency",
        )
    if status in (302, 303, 307, 308):
        headers = error.response["ResponseMetadata"].get("HTTPHeaders", {})  # type: ignore[attr-defined]
        return (
            f"requests are sent on to {headers.get('location', 'elsewhere')} ({status})",
            "look at the endpoint and the region",
        )
    if status == 417:
        return (
            "something on the way does not understand Expect: 100-continue (417)",
            "look at HTTP proxies between here and the store; NO_PROXY names hosts that are "
            "reached without",
        )
    if status in (404, 405) and code in ("", str(status)):
        return (f"what answers is no S3 ({status})", "look at the endpoint")
    said = f"{code or type(error).__name__}: {error}" + ("" if code else f" (HTTP {status})")
    return (said, "see what the store says about this URL")


def _untrusted(error: BaseException) -> tuple[str, str]:
    *_, below = _wrapped(error)
    if isinstance(below, ssl.SSLCertVerificationError) or "doesn't match" in str(below):
        return (
            f"the store's certificate is not trusted: {below}",
            "name the file of the authority's certificate in AWS_CA_BUNDLE, and the store by a "
            "name that its certificate has",
        )
    if isinstance(below, ssl.SSLError) and below.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return ("there is no TLS at the store's port", "look at the endpoint: is it https?")
    return (
        f"TLS cannot be set up: {below}",
        "look at the file that AWS_CA_BUNDLE names, and at the endpoint",
    )
