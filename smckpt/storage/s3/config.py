"""Options for S3, and where they come from."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smckpt.errors import UsageError
from smckpt.storage.budget import PREFIX_READS, PREFIX_WRITES
from smckpt.storage.urls import is_s3_url

MIN_PART_MB, MAX_PART_MB = 5, 5120  # S3's limits
CHECKSUMS = ("crc64nvme", "crc32", "none")
_VARIABLE = "SMCKPT_S3_"


@dataclass(frozen=True)
class StoreOptions:
    """Options of S3. The defaults suit AWS; each line says when to change it.

    region: the bucket's region. None: the AWS settings decide, and S3's redirection is followed.
    endpoint: the URL of a compatible store or of a VPC endpoint.
    profile: a profile of the AWS configuration file. None: the usual chain of credentials.
    client_factory: "module:function", a function that makes boto3's S3 client, instead of a
        profile. Each process that reaches the store calls it with region_name=, endpoint_url= and
        config=.
    chunk_size_MB: the size of an upload's parts in MiB, 5 to 5,120. It grows by itself for files of
        more than 10,000 parts.
    max_write_concurrency, max_read_concurrency: how many requests of one rank are in flight.
    retries: how often a request is tried again after a temporary failure.
    read_timeout_s: a try fails after so many seconds without a byte.
    timeout_s: how many seconds all tries of one request may take together. The wait for its turn is
        not counted.
    write_rate, read_rate: how many requests per second the bucket answers to the whole job. AWS
        promises 3,500 and 5,500 for each partitioned prefix. Raise them if your bucket can do more.
    prefixes: over how many stable prefixes the ranks' files are spread, 1 to 256. Each prefix
        answers write_rate and read_rate after S3 has split it off, tens of minutes after the first
        save.
    prefix_root: where those prefixes are made, an s3:// URL above all checkpoints of the run. None:
        the parent of the step's directory.
    preflight: whether a session tries out, before its first save into a bucket, everything that
        saves need.
    checksum: "crc64nvme", or "crc32" or "none" for stores that refuse newer checksums.
    requester_pays: accept that AWS charges the reader.
    sse_kms_key: the id of the KMS key that encrypts new objects.
    storage_class: the storage class of new objects, such as "INTELLIGENT_TIERING".
    tags: the tags of new objects, as pairs or a mapping.
    """

    region: str | None = None
    endpoint: str | None = None
    profile: str | None = None
    client_factory: str | None = None
    chunk_size_MB: int = 64
    max_write_concurrency: int = 8
    max_read_concurrency: int = 8
    retries: int = 8
    read_timeout_s: float = 60.0
    timeout_s: float = 300.0
    write_rate: float = PREFIX_WRITES
    read_rate: float = PREFIX_READS
    prefixes: int = 1
    prefix_root: str | None = None
    preflight: bool = True
    checksum: str = "crc64nvme"
    requester_pays: bool = False
    sse_kms_key: str | None = None
    storage_class: str | None = None
    tags: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", _pairs(self.tags))  # a frozen dataclass is hashed
        # A wrong type, such as "64" from a settings file, would fail in the middle of a save.
        for field in dataclasses.fields(self):
            value, default = getattr(self, field.name), field.default
            if field.name == "tags":
                continue
            if default is None or isinstance(default, str):
                fine = isinstance(value, str) or (value is None and default is None)
            else:
                kinds = (int, float) if isinstance(default, float) else (type(default),)
                fine = type(value) in kinds
            if not fine:
                raise UsageError(f"{field.name}={value!r}", remedy=f"give {field.type}")
        module, _, function = (self.client_factory or "module:function").partition(":")
        rules = {
            "chunk_size_MB": (MIN_PART_MB <= self.chunk_size_MB <= MAX_PART_MB, "give 5 to 5120"),
            "max_write_concurrency": (1 <= self.max_write_concurrency <= 256, "give 1 to 256"),
            "max_read_concurrency": (1 <= self.max_read_concurrency <= 256, "give 1 to 256"),
            "prefixes": (1 <= self.prefixes <= 256, "give 1 to 256"),
            "retries": (self.retries >= 0, "give 0 or more"),
            "timeout_s": (self.timeout_s > 0, "give seconds above 0"),
            "read_timeout_s": (0 < self.read_timeout_s < math.inf, "give seconds above 0"),
            "write_rate": (0 < self.write_rate < math.inf, "give requests a second above 0"),
            "read_rate": (0 < self.read_rate < math.inf, "give requests a second above 0"),
            "prefix_root": (is_s3_url(self.prefix_root or "s3://b"), "write s3://bucket/run"),
            "checksum": (self.checksum in CHECKSUMS, f"give one of {', '.join(CHECKSUMS)}"),
            "client_factory": (bool(module) and function.isidentifier(), "write module:function"),
            "profile": (not (self.profile and self.client_factory), "leave out client_factory"),
            "endpoint": (
                (self.endpoint or "http://").startswith(("http://", "https://")),
                "write https://host[:port]",
            ),
        }
        for name, (fine, remedy) in rules.items():
            if not fine:
                raise UsageError(f"{name}={getattr(self, name)!r} is not possible", remedy=remedy)

    @property
    def part_bytes(self) -> int:
        return self.chunk_size_MB << 20

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "tags": [list(pair) for pair in self.tags]}

    @classmethod
    def from_mapping(
        cls, given: Mapping[str, Any], base: StoreOptions | None = None
    ) -> StoreOptions:
        """`base` with the given fields replaced.

        Raises:
            UsageError: a field is unknown.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(given) - known)
        if unknown:
            raise UsageError(
                f"storage= has unknown fields: {', '.join(unknown)}",
                remedy=f"use fields of StoreOptions: {', '.join(sorted(known))}",
            )
        return dataclasses.replace(base or cls(), **given)

    @classmethod
    def from_environment(cls) -> StoreOptions:
        """Options from SMCKPT_S3_REGION, SMCKPT_S3_CHUNK_SIZE_MB and so on. The rest have defaults.

        Raises:
            UsageError: a variable that begins with SMCKPT_S3_ names no field, or its text is no
                value of the field.
        """
        known = {_VARIABLE + field.name.upper(): field for field in dataclasses.fields(cls)}
        unknown = sorted(n for n in os.environ if n.startswith(_VARIABLE) and n not in known)
        if unknown:
            raise UsageError(
                f"the environment has unknown variables: {', '.join(unknown)}",
                remedy=f"unset them; known variables are {', '.join(sorted(known))}",
            )
        given = {name: text for name in known if (text := os.environ.get(name))}
        return cls(**{known[n].name: _parsed(n, given[n], known[n].default) for n in given})


def _pairs(tags: Any) -> tuple[tuple[str, str], ...]:
    try:
        pairs = tags.items() if isinstance(tags, Mapping) else tags
        return tuple((str(key), str(value)) for key, value in pairs)
    except (TypeError, ValueError) as error:
        raise UsageError(f"tags={tags!r}", remedy='give pairs: {"team": "a"}') from error


def _parsed(name: str, text: str, default: Any) -> Any:
    try:
        if isinstance(default, bool):
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        if isinstance(default, tuple):
            pairs = [pair.split("=", 1) for pair in text.split(",")]
            return tuple((key.strip(), value.strip()) for key, value in pairs)
        return text if default is None or isinstance(default, str) else type(default)(text)
    except (KeyError, ValueError) as error:
        raise UsageError(f"{name}={text!r} is not valid", remedy="see StoreOptions") from error


def s3_options(url: str, given: StoreOptions | Mapping[str, Any] | None) -> StoreOptions | None:
    """The options that `storage=` gives, over those of the environment. None if `url` is not in S3.

    Args:
        given: a `StoreOptions`, which replaces the environment's options, or a mapping of some of
            its fields.

    Raises:
        UsageError: they are given for a store that is not S3, or have an unknown field.
    """
    if not is_s3_url(url):
        if url and given is not None:
            raise UsageError(
                "options of S3 (storage=) are given, but the place is not in S3",
                remedy="leave them out, or save to s3://bucket/prefix",
                path=url,
            )
        return None
    if isinstance(given, StoreOptions):
        return given
    if not isinstance(given, (Mapping, type(None))):
        raise UsageError(
            f"storage={given!r} is a {type(given).__name__}",
            remedy="pass a smckpt.StoreOptions, or a mapping of some of its fields",
        )
    return StoreOptions.from_mapping(given or {}, StoreOptions.from_environment())
