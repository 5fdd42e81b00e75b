"""Where boto3's client comes from: a session of ours, or a function of the user's."""

from __future__ import annotations

import importlib
from typing import Any

from smckpt.errors import UsageError
from smckpt.storage.s3_config import S3Config

__all__ = ["client_from"]


def client_from(config: S3Config, settings: Any) -> Any:
    """A client for S3 with these settings (a `botocore.config.Config`).

    Raises:
        UsageError: the function that the options name cannot be found, or gives something else.
        BotoCoreError, ValueError: boto3 refuses.
    """
    import boto3

    named = {"region_name": config.region, "endpoint_url": config.endpoint, "config": settings}
    if config.client_factory is None:
        return boto3.Session(profile_name=config.profile).client("s3", **named)
    module, _, function = config.client_factory.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"client_factory={config.client_factory!r} cannot be had: {error}",
            remedy="name a function of a module that PYTHONPATH leads to: the process that writes "
            "imports it too",
        ) from error
    client = make(**named)
    if getattr(getattr(client, "meta", None), "service_model", None) is None or (
        client.meta.service_model.service_name != "s3"
    ):
        raise UsageError(
            f"client_factory={config.client_factory!r} gave no S3 client but {client!r}",
            remedy="return boto3.Session(…).client('s3', **settings)",
        )
    return client
