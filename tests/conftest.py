"""What every test gets: an environment without a launcher's variables, and few threads."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Test processes are many and cores are few; children inherit this too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("smckpt", deadline=None, print_blob=True)
settings.load_profile("smckpt")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test run started under torchrun must not look like one of its ranks."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
