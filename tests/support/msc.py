"""Profiles of the Multi-Storage Client. A process keeps the client of a profile, so each profile
has a name of its own."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.s3 import BUCKET, KEY, SECRET

__all__ = ["configured", "on_disk", "on_s3"]


def on_s3(endpoint: str, **options: Any) -> dict[str, Any]:
    """A profile of the tests' bucket."""
    told = {"base_path": BUCKET, "region_name": "us-east-1", "endpoint_url": endpoint}
    return {
        "storage_provider": {"type": "s3", "options": {**told, **options}},
        "credentials_provider": {
            "type": "S3Credentials",
            "options": {"access_key": KEY, "secret_key": SECRET},
        },
    }


def on_disk(folder: Path) -> dict[str, Any]:
    return {"storage_provider": {"type": "file", "options": {"base_path": str(folder)}}}


def configured(profile: Mapping[str, Any], **rest: Any) -> str:
    """Add a profile, and other keys, to the file that MSC_CONFIG names. Returns its place."""
    path = Path(os.environ["MSC_CONFIG"])
    config = json.loads(path.read_text()) if path.exists() else {"profiles": {}}
    name = f"ours{secrets.token_hex(4)}"
    config["profiles"][name] = profile
    path.write_text(json.dumps({**config, **rest}))
    return f"msc://{name}"
