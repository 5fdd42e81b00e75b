"""The budget in force: requests wait for their turn, and a 503 slows the whole host."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from smckpt.storage import Access, access_to
from smckpt.storage.budget import Share
from smckpt.storage.s3.config import StoreOptions
from smckpt.storage.s3.requests import HostSignal, pace_of
from smckpt.storage.s3.storage import S3Storage
from tests.support import child
from tests.support.faults.proxy import FaultyProxy, faulty_proxy
from tests.support.s3 import BUCKET, Server


@pytest.fixture
def proxy(s3_root: str, s3_server: Server) -> Iterator[FaultyProxy]:
    with faulty_proxy(s3_server.endpoint) as made:
        yield made


def config(proxy: FaultyProxy, **options: Any) -> StoreOptions:
    return StoreOptions.from_mapping(
        {"endpoint": proxy.endpoint, **options}, StoreOptions.from_environment()
    )


def test_requests_of_all_stores_in_a_bucket_keep_to_one_share(
    proxy: FaultyProxy, s3_root: str
) -> None:
    options = config(proxy, write_rate=23, read_rate=2300)
    half = Share.of_rank(0, 2)  # ten writes a second
    stores = [S3Storage(f"{s3_root}/{n}", options, half).join("deeper") for n in range(3)]
    stores[0].delete("nothing")  # the client is made
    began = time.monotonic()
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda n: stores[n % 3].put(f"file{n}", b"x"), range(12)))
    assert time.monotonic() - began >= 11 / 10
    assert [len(store.list()) for store in stores] == [4, 4, 4]  # reads have their own budget
    pace = pace_of(options, BUCKET, half)
    assert (pace.writes.bucket.taken, pace.reads.bucket.taken) == (13, 3)


def test_every_repetition_counts_and_a_503_slows_down(proxy: FaultyProxy, s3_root: str) -> None:
    options = config(proxy, write_rate=23)
    store = S3Storage(s3_root, options)
    bucket = pace_of(options, BUCKET, Share()).writes.bucket
    assert bucket.rate == bucket.most == pytest.approx(20)
    proxy.spoil("PUT", "503", 2)
    store.put("data", b"x")
    assert [line.split()[0] for line in proxy.seen] == ["PUT"] * 3
    assert bucket.taken == 3
    assert bucket.rate < bucket.most
    assert pace_of(options, BUCKET, Share()).reads.bucket.rate > 4000, "reads were not refused"


def test_a_503_to_one_process_slows_the_others_of_the_host(
    proxy: FaultyProxy, s3_root: str, s3_server: Server
) -> None:
    lane = pace_of(config(proxy), BUCKET, Share()).writes
    lane.take()
    assert lane.bucket.rate == lane.bucket.most
    proxy.spoil("PUT", "503")
    child.run(
        """
        import sys
        from smckpt.storage import open_storage
        open_storage(sys.argv[1]).put("a", b"x")
        """,
        s3_root,
        **{**s3_server.environment, "SMCKPT_S3_ENDPOINT": proxy.endpoint},
    )
    assert proxy.left == 0
    lane.take()
    assert lane.bucket.rate < 100


def test_each_signal_reaches_the_others_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("smckpt.storage.s3.requests._LOOK", 0)
    first, second = HostSignal("x"), HostSignal("x")
    assert not second.raised()
    for _ in range(2):
        first.raise_()
        assert [second.raised(), second.raised(), first.raised()] == [True, False, False]
    assert not HostSignal("x").raised(), "what was before does not concern who comes later"


def test_a_folder_that_is_not_ours_is_not_trusted_and_nothing_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("smckpt.storage.s3.requests._LOOK", 0)
    first, second = HostSignal("x"), HostSignal("x")
    (tmp_path / f"smckpt-{os.getuid()}").rmdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"smckpt-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    first.raise_()
    assert not second.raised()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_stores_beside_a_store_have_its_options_and_its_share() -> None:
    chosen, share = StoreOptions(retries=3), Share.of_rank(3, 4)
    first = access_to("s3://b/x", storage=chosen).holding(share).open("s3://b/x")
    stores = [first, first.join("y"), first.at("s3://c"), first.at("/tmp").at("s3://b/z")]
    for store in stores:
        assert isinstance(store, S3Storage)
        assert (store.config, store.access.share) == (chosen, share)
    assert Access.from_json(json.loads(json.dumps(first.access.to_json()))) == first.access
