"""Where boto3's client comes from: a session of ours, or a function of the user's."""

from __future__ import annotations

import importlib
from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from smckpt._version import __version__
from smckpt.errors import UsageError
from smckpt.storage.s3_config import S3Config

__all__ = ["client_from", "parse_time"]


def client_from(config: S3Config, settings: Any) -> Any:
    """A client for S3 with these settings (a `botocore.config.Config`).

    Raises:
        UsageError: the function that the options name cannot be found, fails, or gives something
            else.
        BotoCoreError, ValueError: boto3 refuses.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    named = {"region_name": config.region, "endpoint_url": config.endpoint, "config": settings}
    if config.client_factory is None:
        return _own_client(config.profile, named)
    module, _, function = config.client_factory.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"client_factory={config.client_factory!r} cannot be had: {error}",
            remedy="name a function of a module that PYTHONPATH leads to: the process that writes "
            "imports it too",
        ) from error
    try:
        client = make(**named)
    except (BotoCoreError, ClientError, OSError):  # classified with those of requests
        raise
    except Exception as error:
        raise UsageError(
            f"client_factory={config.client_factory!r} failed: {type(error).__name__}: {error}",
            remedy="mend that function; it is called with region_name=, endpoint_url= and config=",
        ) from error
    if getattr(getattr(client, "meta", None), "service_model", None) is None or (
        client.meta.service_model.service_name != "s3"
    ):
        raise UsageError(
            f"client_factory={config.client_factory!r} gave no S3 client but {client!r}",
            remedy="return boto3.Session(…).client('s3', **settings)",
        )
    return client


def _own_client(profile: str | None, named: dict[str, Any]) -> Any:
    """From a session of ours, which does two things once, or simpler, that take boto3 a fifth of
    the processor's time of each request: to say who asks, and to read the date in the answer."""
    import boto3
    import botocore.session
    from botocore.config import Config

    below = botocore.session.get_session()
    session = boto3.Session(profile_name=profile, botocore_session=below)
    parsers = below.get_component("response_parser_factory")
    parsers.set_parser_defaults(timestamp_parser=parse_time)
    settings = named["config"].merge(Config(user_agent=_user_agent(below)))
    return session.client("s3", **{**named, "config": settings})


def _user_agent(session: Any) -> str:
    """What stands in the store's logs; botocore adds its own name."""
    base = session.user_agent().removesuffix(f" {session.user_agent_extra}")
    name = session.get_config_variable("user_agent_appid")  # AWS_SDK_UA_APP_ID
    return f"{base} smckpt/{__version__}" + (f" app/{name}" if name else "")


def parse_time(value: Any) -> datetime:
    """As botocore reads it; by a shorter way where it is written as HTTP headers have it."""
    from botocore.utils import parse_timestamp

    if isinstance(value, str) and value.endswith(" GMT"):
        with suppress(ValueError):
            return parsedate_to_datetime(value)
    found: datetime = parse_timestamp(value)
    return found
