"""How S3 is reached: options, where they come from, and those in force here.

Which URL a reader follows stands in manifests, so stores are opened in many places, by a worker
process too. Options are therefore not passed from function to function: those of the call under
way are in force for its context, and otherwise those of the environment.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from smckpt.errors import UsageError
from smckpt.storage.budget import PREFIX_LIMITS
from smckpt.storage.urls import is_s3_url

__all__ = ["S3Config", "chosen_s3", "current_s3", "given_s3", "s3_options", "using_s3"]

MIN_PART_MB, MAX_PART_MB = 5, 5120  # what S3 takes
_VARIABLE = "SMCKPT_S3_"


@dataclass(frozen=True)
class S3Config:
    """Options of S3. The defaults suit AWS; each line says when to change it.

    region: of the bucket; None takes what the AWS settings say and follows S3's redirection.
    endpoint: URL of a compatible store, or of a VPC endpoint.
    profile: of the AWS configuration file; None takes the usual chain of credentials.
    client_factory: "module:function" that makes boto3's S3 client, in place of a profile; called
        with region_name=, endpoint_url= and config=, in each process that reaches the store.
    client: "direct", or "s3transfer", which is slower and uses public methods of boto3 and
        s3transfer alone: where "direct" makes trouble. A botocore that is built otherwise than
        "direct" needs is found out, and this one used, without being asked.
    chunk_size_MB: a part of an upload, in MiB, 5 to 5,120; grows by itself for files of more than
        10,000 parts.
    max_write_concurrency, max_read_concurrency: requests of one rank in flight.
    retries: tries of a request that failed for a passing cause, beyond botocore's own few.
    read_timeout_s: seconds without a byte after which a try counts as failed.
    timeout_s: seconds that all tries of one request may take together, waits for its turn aside.
    write_rate, read_rate: requests a second that the bucket answers, for all ranks of the job
        together: AWS promises 3,500 and 5,500 for a partitioned prefix; more where yours has more.
    prefixes: under how many stable prefixes the ranks' files are spread, 1 to 256; each stands
        write_rate and read_rate once S3 has split them off, tens of minutes after the first save.
    prefix_root: where those prefixes are made, an s3:// URL above all checkpoints of the run; None
        takes the parent of the step's directory.
    preflight: try out, at a session's first save into a bucket, all that saves will need.
    checksum: "crc64nvme", "crc32" or "none", for stores that refuse newer checksums.
    requester_pays: accept that reading is charged to us.
    sse_kms_key: id of the KMS key that encrypts new objects.
    storage_class: of new objects, such as "INTELLIGENT_TIERING".
    tags: of new objects, as pairs or a mapping.
    """

    region: str | None = None
    endpoint: str | None = None
    profile: str | None = None
    client_factory: str | None = None
    client: str = "direct"
    chunk_size_MB: int = 64
    max_write_concurrency: int = 8
    max_read_concurrency: int = 8
    retries: int = 8
    read_timeout_s: float = 60.0
    timeout_s: float = 300.0
    write_rate: float = PREFIX_LIMITS.writes
    read_rate: float = PREFIX_LIMITS.reads
    prefixes: int = 1
    prefix_root: str | None = None
    preflight: bool = True
    checksum: str = "crc64nvme"
    requester_pays: bool = False
    sse_kms_key: str | None = None
    storage_class: str | None = None
    tags: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", _pairs(self.tags))  # it is hashed
        self._refuse_kinds()
        if not MIN_PART_MB <= self.chunk_size_MB <= MAX_PART_MB:
            raise UsageError(
                f"chunk_size_MB={self.chunk_size_MB} is no size of a part",
                remedy=f"S3 takes {MIN_PART_MB} to {MAX_PART_MB} MiB; 64 is the default",
            )
        for name in ("max_write_concurrency", "max_read_concurrency"):
            if not 1 <= getattr(self, name) <= 256:
                raise UsageError(f"{name}={getattr(self, name)}", remedy="give 1 to 256")
        if self.retries < 0 or not (self.timeout_s > 0 and 0 < self.read_timeout_s < math.inf):
            raise UsageError(
                f"retries={self.retries}, timeout_s={self.timeout_s}, "
                f"read_timeout_s={self.read_timeout_s}",
                remedy="give retries >= 0 and positive numbers of seconds",
            )
        if not (0 < self.write_rate < math.inf and 0 < self.read_rate < math.inf):
            raise UsageError(
                f"write_rate={self.write_rate}, read_rate={self.read_rate}",
                remedy="give requests a second above 0",
            )
        if not 1 <= self.prefixes <= 256:
            raise UsageError(f"prefixes={self.prefixes}", remedy="give 1 to 256")
        if self.prefix_root is not None and not is_s3_url(self.prefix_root):
            raise UsageError(
                f"prefix_root={self.prefix_root!r} is no URL of S3", remedy="write s3://bucket/run"
            )
        if self.checksum not in ("crc64nvme", "crc32", "none"):
            raise UsageError(
                f"checksum={self.checksum!r} is unknown", remedy="give crc64nvme, crc32 or none"
            )
        if self.client not in ("direct", "s3transfer"):
            raise UsageError(
                f"client={self.client!r} is unknown", remedy="give direct or s3transfer"
            )
        if self.client_factory is not None:
            module, _, function = self.client_factory.partition(":")
            if not (module and function.isidentifier()):
                raise UsageError(
                    f"client_factory={self.client_factory!r}", remedy="write module:function"
                )
            if self.profile is not None:
                raise UsageError(
                    "client_factory and profile are both given", remedy="give one of the two"
                )
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise UsageError(
                f"the endpoint {self.endpoint!r} is no URL", remedy="write https://host[:port]"
            )

    def _refuse_kinds(self) -> None:
        """A value of another type, such as "64" from a file of settings, would be met in the midst
        of a save."""
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

    @property
    def part_bytes(self) -> int:
        return self.chunk_size_MB << 20

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any], base: S3Config | None = None) -> S3Config:
        """`base` with the fields that are given.

        Raises:
            UsageError: a field is unknown.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(given) - known)
        if unknown:
            raise UsageError(
                f"s3client_config has {', '.join(unknown)}, which is not honoured",
                remedy=f"S3Config has {', '.join(sorted(known))}",
            )
        return dataclasses.replace(base or cls(), **given)

    @classmethod
    def from_environment(cls) -> S3Config:
        """From SMCKPT_S3_REGION, SMCKPT_S3_CHUNK_SIZE_MB and so on; defaults for the rest.

        Raises:
            UsageError: a variable of that beginning is no field's, or its text is no value of it.
        """
        known = {_VARIABLE + field.name.upper(): field for field in dataclasses.fields(cls)}
        unknown = sorted(n for n in os.environ if n.startswith(_VARIABLE) and n not in known)
        if unknown:
            raise UsageError(
                f"the environment has {', '.join(unknown)}, which is not honoured",
                remedy=f"unset it; there are {', '.join(sorted(known))}",
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
        raise UsageError(f"{name}={text!r} cannot be read", remedy="see S3Config") from error


_CURRENT: ContextVar[S3Config | None] = ContextVar("smckpt_s3", default=None)


def chosen_s3() -> S3Config | None:
    """The options that `using_s3` put in force; None if those of the environment hold."""
    return _CURRENT.get()


def current_s3() -> S3Config:
    """The options in force here."""
    return _CURRENT.get() or S3Config.from_environment()


@contextmanager
def using_s3(config: S3Config | None) -> Iterator[None]:
    """Stores that this thread opens inside the block use `config`; None changes nothing."""
    if config is None:
        yield
        return
    token = _CURRENT.set(config)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def s3_options(
    url: str, region: str | None = None, config: S3Config | Mapping[str, Any] | Any = None
) -> S3Config | None:
    """What the keywords `s3_region=` and `s3client_config=` say, over the environment; None where
    `url` is not in S3.

    Args:
        config: an `S3Config`, which replaces the environment's; a mapping of some of its fields; or
            an `S3ClientConfig` of s3torchconnector.

    Raises:
        UsageError: they are given for another store, contradict each other, or have a field that
            is not honoured.
    """
    if not is_s3_url(url):
        if url and (region is not None or config is not None):
            raise UsageError(
                "s3_region= and s3client_config= are not honoured outside S3",
                remedy="leave them out, or save to s3://bucket/prefix",
                path=url,
            )
        return None
    if isinstance(config, S3Config):
        chosen = config
    else:
        fields = config if isinstance(config, Mapping) else _of_connector(config)
        chosen = S3Config.from_mapping(fields, S3Config.from_environment())
    if region is None:
        return chosen
    said = config.get("region") if isinstance(config, Mapping) else getattr(config, "region", None)
    if said not in (None, region):
        raise UsageError(
            f"s3_region={region!r}, but s3client_config says {said!r}",
            remedy="give one of the two",
            path=url,
        )
    return dataclasses.replace(chosen, region=region)


def given_s3(url: str, region: str | None, config: Any, storage: Any = None) -> S3Config | None:
    """The same where one of the two is given; else those that `storage`, a reader or writer of
    ours, was given, or None: then those in force hold.

    Raises:
        UsageError: as above, or both the call and `storage` have options.
    """
    own = getattr(storage, "s3", None)
    own = own if isinstance(own, S3Config) else None
    if region is None and config is None:
        return own
    if own is not None:
        raise UsageError(
            f"options of S3 are given to the call and to its {type(storage).__name__}",
            remedy="give them to one of the two",
            path=url,
        )
    return s3_options(url, region, config)


def _of_connector(config: Any) -> dict[str, Any]:
    """The fields of an S3ClientConfig that have a meaning here."""
    if config is None:
        return {}
    if not hasattr(config, "part_size"):
        raise UsageError(
            f"s3client_config is a {type(config).__name__}",
            remedy="pass a smckpt.S3Config, a mapping of its fields, or an S3ClientConfig",
        )
    if getattr(config, "unsigned", False):
        raise UsageError("unsigned=True is not honoured", remedy="use credentials that may write")
    fields: dict[str, Any] = {"chunk_size_MB": max(MIN_PART_MB, int(config.part_size) >> 20)}
    if getattr(config, "profile", None):
        fields["profile"] = config.profile
    if getattr(config, "max_attempts", None):
        fields["retries"] = int(config.max_attempts) - 1
    return fields
