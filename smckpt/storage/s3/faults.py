"""What a failed request to S3 means: whether to try again and, if not, which error the user
gets."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from typing import Any

from smckpt.errors import CheckpointError, CheckpointNotFoundError, StorageError

# code → (what happened, what to do)
_MEANING: dict[str, tuple[str, str]] = {
    "NoSuchBucket": (
        "there is no such bucket",
        "create the bucket, or correct its name; smckpt creates no buckets",
    ),
    "AccessDenied": (
        "access denied",
        "allow s3:PutObject, GetObject, ListBucket, ListBucketMultipartUploads, DeleteObject and "
        "AbortMultipartUpload there (and the KMS key, if one encrypts the bucket)",
    ),
    "InvalidAccessKeyId": ("the store does not know the access key", "check the credentials"),
    "SignatureDoesNotMatch": (
        "the secret key does not belong to the access key",
        "check the credentials",
    ),
    "ExpiredToken": (
        "the credentials have expired",
        "use credentials that refresh themselves (a role, SSO), or renew them",
    ),
    "InvalidToken": ("the session token is not valid", "check AWS_SESSION_TOKEN"),
    "RequestTimeTooSkewed": (
        "this host's clock differs from the store's by more than 15 minutes",
        "set the clock (chrony, ntp)",
    ),
    "InvalidBucketName": ("this is not a valid bucket name", "write s3://bucket/prefix"),
    "KeyTooLongError": ("the key is longer than 1,024 bytes", "choose a shorter prefix"),
    "BadDigest": (
        "the store received other bytes than smckpt sent (its checksum differs)",
        "check the network and proxies between here and the store",
    ),
    "NotImplemented": (
        "the store lacks this operation",
        "if the store refuses checksums, set SMCKPT_S3_CHECKSUM=none; smckpt needs conditional PUT",
    ),
    "NoSuchUpload": (
        "the upload was aborted meanwhile",
        "check whether another copy or job writes to the same place, or a lifecycle rule aborts "
        "uploads too early",
    ),
    "InvalidObjectState": ("the object is archived", "restore it from its archive tier first"),
    "QuotaExceeded": ("the quota is used up", "raise it, or delete old checkpoints"),
}
_REGION = (
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
)
_SENT_ON = (301, 302, 303, 307, 308)
_TRANSIENT = frozenset(
    {
        "SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "Throttling",
        "ThrottlingException", "RequestLimitExceeded", "RequestThrottled", "TooManyRequests",
        "ConditionalRequestConflict", "OperationAborted", "BandwidthLimitExceeded", "BadDigest",
        "IncompleteBody", "XAmzContentChecksumMismatch", "PriorRequestNotComplete",
    }
)  # fmt: skip

# Codes for credentials that have expired or were replaced.
_LAPSED = frozenset(
    {
        "ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidToken",
        "RequestExpired", "SignatureDoesNotMatch", "TokenRefreshRequired",
    }
)  # fmt: skip


class BadBody(Exception):
    """The body of an answer ended early, broke off, or was changed on its way."""


class Unanswered(Exception):
    """The provider of credentials, or the function that makes a client, did not answer in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:g} s")


def code_of(error: BaseException) -> str:
    """S3's error code; "" if the store gave none."""
    return str(_section(error, "Error").get("Code", ""))


def status_of(error: BaseException) -> int:
    """The HTTP status; 0 if there was no answer."""
    return int(_section(error, "ResponseMetadata").get("HTTPStatusCode", 0))


def _section(error: BaseException, section: str) -> Mapping[str, Any]:
    """A section of the answer; empty if there was none."""
    response = getattr(error, "response", None)
    found: Mapping[str, Any] = response.get(section, {}) if isinstance(response, dict) else {}
    return found


def length_of(answer: Mapping[str, Any]) -> int:
    """The length in bytes that the answer for an object states.

    Raises:
        BadBody: it states none, for instance because a proxy compressed it.
    """
    if type(answer.get("ContentLength")) is not int or answer["ContentLength"] < 0:
        raise BadBody("the answer lacks Content-Length")
    return int(answer["ContentLength"])


def failed_there(error: BaseException) -> bool:
    """Whether the store or the network failed, and not our own code."""
    from botocore.exceptions import BotoCoreError, ClientError

    kinds = (BotoCoreError, ClientError, BadBody, Unanswered, OSError)
    return isinstance(error, kinds) and not isinstance(error, CheckpointError)


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed a moment later."""
    from botocore import exceptions as bc

    if isinstance(error, bc.ClientError):
        status = status_of(error)  # gateways have statuses of their own
        passes = status in (408, 429) or (500 <= status < 600 and status not in (501, 505, 507))
        return passes or code_of(error) in _TRANSIENT
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
    """Whether the store refused the credentials, or new ones could not be got."""
    from botocore import exceptions as bc

    if isinstance(error, bc.ClientError):
        # The answer to HEAD has no body that says which 400 it is.
        return code_of(error) in _LAPSED or (code_of(error) == "400" == str(status_of(error)))
    lacking = (bc.CredentialRetrievalError, bc.TokenRetrievalError, Unanswered)
    return isinstance(error, lacking)


def _wrapped(error: BaseException) -> Iterator[BaseException]:
    """An error of botocore, the error that it wraps (urllib3's), the error that this one wraps, and
    so on."""
    below: BaseException | None = error
    while below is not None:
        yield below
        inside = (getattr(below, "kwargs", {}).get("error"), *below.args)
        below = next((each for each in inside if isinstance(each, BaseException)), None)


def _tls_broke_off(error: BaseException) -> bool:
    """Whether a TLS connection was cut or its bytes were changed. False if the certificate is not
    trusted."""
    # The error of the ssl module among the wrapped errors
    below = next((each for each in _wrapped(error) if isinstance(each, ssl.SSLError)), None)
    return isinstance(below, (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)) or (
        "BAD_RECORD_MAC" in (getattr(below, "reason", None) or "")
    )


def _proxy_refusal(error: BaseException) -> str:
    """The answer of an HTTP proxy that refuses a tunnel; "" if the proxy could not be reached."""
    refusal = next((str(each) for each in _wrapped(error) if "Tunnel connection" in str(each)), "")
    return refusal if "failed: 4" in refusal else ""


def s3_error(error: BaseException, url: str, action: str, tried: str = "") -> CheckpointError:
    """The error to raise when the attempt to `action` ("write", "list") at `url` failed with
    `error`.

    Args:
        tried: how often it was tried, such as "9 times in 300 s".
    """
    if isinstance(error, CheckpointError):
        return error
    code, status = code_of(error), status_of(error)
    missing = code in ("NoSuchKey", "404", "NotFound") or (status == 404 and code not in _MEANING)
    if missing and not action.startswith("list"):  # a listing of no objects is empty, not missing
        return CheckpointNotFoundError(
            f"cannot {action}: there is no such object",
            remedy="check the URL; `smckpt ls` on its parent shows what is there",
            path=url,
        )
    what, remedy = _meaning(error, code, status)
    after = f"; tried {tried}" if tried else ""
    return StorageError(
        f"cannot {action}: {what}{after}", remedy=remedy, path=url, of_store=_of_store(error)
    )


def _of_store(error: BaseException) -> bool:
    """Whether requests about other objects would fail likewise. False: the store has decided about
    this object (denied, archived), or it fails at this object whenever it is asked."""
    from botocore import exceptions as bc

    if not isinstance(error, bc.ClientError) or lacks_credentials(error):
        return True
    if is_transient(error):
        return status_of(error) != 500 and code_of(error) != "InternalError"
    return code_of(error) in (*_REGION, "NoSuchBucket", "RequestTimeTooSkewed")


def _meaning(error: BaseException, code: str, status: int) -> tuple[str, str]:
    from botocore import exceptions as bc

    headers = _section(error, "ResponseMetadata").get("HTTPHeaders", {})
    there = headers.get("x-amz-bucket-region")
    if code in _REGION or (there and status in _SENT_ON):
        return (
            f"the bucket is in {there or 'another region'}",
            f"set SMCKPT_S3_REGION={there or '<region>'}, or pass it in storage=",
        )
    if code in _MEANING:
        return _MEANING[code]
    if code == "400":
        return (
            "the store refuses the request and does not say why",
            "check whether the credentials have expired; `smckpt ls` on the parent may show more",
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
        return (f"could not get credentials: {error}", "check the AWS configuration")
    if isinstance(error, Unanswered):
        return (
            f"could not get credentials, or make the client: {error}",
            "find out what client_factory= (or credential_process in the AWS configuration) "
            "waits for; timeout_s= sets how long it may take",
        )
    if isinstance(error, bc.SSLError) and not _tls_broke_off(error):
        return _untrusted(error)
    if status == 407 or _proxy_refusal(error):
        return (
            f"the HTTP proxy refuses: {_proxy_refusal(error) or error}",
            "check HTTP_PROXY and HTTPS_PROXY and the user name and password in them; NO_PROXY "
            "names hosts that need no proxy",
        )
    if isinstance(error, bc.ProxyConnectionError):
        return (
            f"the HTTP proxy cannot be reached: {error}",
            "check HTTP_PROXY and HTTPS_PROXY; NO_PROXY names hosts that need no proxy",
        )
    if isinstance(error, bc.EndpointConnectionError):
        return (f"the store cannot be reached: {error}", "check the network and the endpoint")
    if isinstance(error, BadBody):
        return (
            f"the store did not carry out the request ({error})",
            "check the endpoint, and the proxies between here and the store",
        )
    if is_transient(error):
        text = f"{code or status or type(error).__name__}: {error}"
        return (
            f"the store did not carry out the request ({text})",
            "check whether the store is overloaded or down; lower max_write_concurrency",
        )
    if status in _SENT_ON:
        return (
            f"the store redirects requests to {headers.get('location', 'elsewhere')} ({status})",
            "check the endpoint and the region",
        )
    if status == 417:
        return (
            "a proxy or the store does not understand Expect: 100-continue (417)",
            "check HTTP proxies between here and the store; NO_PROXY names hosts that need no "
            "proxy",
        )
    if status in (404, 405) and code in ("", str(status)):
        return (f"the answer does not come from S3 ({status})", "check the endpoint")
    text = f"{code or type(error).__name__}: {error}" + ("" if code else f" (HTTP {status})")
    return (text, "check this URL with the tools of the store")


def _untrusted(error: BaseException) -> tuple[str, str]:
    *_, below = _wrapped(error)
    if isinstance(below, ssl.SSLCertVerificationError) or "doesn't match" in str(below):
        return (
            f"the store's certificate is not trusted: {below}",
            "set AWS_CA_BUNDLE to the file with the authority's certificate, and use a host name "
            "that the store's certificate has",
        )
    if isinstance(below, ssl.SSLError) and below.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return ("the store's port does not speak TLS", "check whether the endpoint is https")
    return (
        f"TLS cannot be set up: {below}",
        "check the file that AWS_CA_BUNDLE names, and the endpoint",
    )
