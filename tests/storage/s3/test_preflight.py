"""What hinders saves to S3 is found and named before the first of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from smckpt.checkpoint.commits.leases import probe
from smckpt.errors import CheckpointError, StorageError, UsageError
from smckpt.storage import access_to
from smckpt.storage.s3.config import StoreOptions
from smckpt.storage.s3.storage import S3Storage
from tests.support.faults.proxy import FaultyProxy, faulty_proxy
from tests.support.s3 import Server

SESSION = "0123456789ab"


@pytest.fixture
def proxy(s3_root: str, s3_server: Server) -> Iterator[FaultyProxy]:
    with faulty_proxy(s3_server.endpoint) as made:
        yield made


def try_out(proxy: FaultyProxy, url: str, **options: Any) -> dict[str, Any]:
    fields = {"endpoint": proxy.endpoint, "retries": 1, **options}
    access = access_to(url, storage=fields)
    return probe(access, url, SESSION, create=True, leave=False)


def test_a_sound_store_is_tried_by_six_requests_that_leave_nothing(
    proxy: FaultyProxy, s3_root: str
) -> None:
    assert try_out(proxy, s3_root) == {"seen": True}
    # The second PUT meets the first's object, whose size is then looked at: it might be our own.
    assert [line.split()[0] for line in proxy.seen] == [
        "PUT",
        "PUT",
        "HEAD",
        "GET",
        "GET",
        "DELETE",
    ]
    assert all(f"probe-{SESSION}.json" in line for line in proxy.seen)
    assert S3Storage(s3_root, StoreOptions.from_environment()).list() == []


def test_a_store_that_lists_an_object_elsewhere_or_not_at_once_is_refused(
    proxy: FaultyProxy, s3_root: str
) -> None:
    with pytest.raises(StorageError, match="the listing lacks.*contains //"):
        try_out(proxy, f"{s3_root}//twice")  # the real server takes // for /, and lists a single /
    proxy.spoil("GET", f"says probe-{SESSION} => elsewhere", path="list-type")
    with pytest.raises(StorageError, match="the listing lacks"):
        try_out(proxy, s3_root)
    assert S3Storage(s3_root, StoreOptions.from_environment()).list() == []


def test_it_can_be_switched_off(proxy: FaultyProxy, s3_root: str) -> None:
    assert try_out(proxy, s3_root, preflight=False) == {"seen": True}
    assert proxy.seen == []


def test_a_store_that_ignores_conditions_is_refused(proxy: FaultyProxy, s3_root: str) -> None:
    proxy.spoil("PUT", "unconditional", 2)
    with pytest.raises(StorageError, match="ignores If-None-Match"):
        try_out(proxy, s3_root)
    assert S3Storage(s3_root, StoreOptions.from_environment()).list() == []


@pytest.mark.parametrize(
    ("method", "answer", "said"),
    [
        ("PUT", "403 AccessDenied", "cannot write: access denied.*allow s3:PutObject"),
        ("GET", "403 AccessDenied", "cannot read: access denied.*GetObject"),
        ("DELETE", "403 AccessDenied", "written here but not deleted.*object lock"),
        ("PUT", "400 ExpiredToken", "credentials have expired"),
        ("PUT", "403 RequestTimeTooSkewed", "clock differs.*set the clock"),
        ("PUT", "501 NotImplemented", "lacks this operation.*needs conditional PUT"),
        ("PUT", "400 IllegalLocationConstraintException", "in another region.*SMCKPT_S3_REGION"),
        (
            "PUT",
            "301 PermanentRedirect",
            "bucket is in eu-central-1.*SMCKPT_S3_REGION=eu-central-1",
        ),
        ("PUT", "400 InvalidRequest", "InvalidRequest"),
    ],
)
def test_what_the_store_refuses_is_told_at_once(
    proxy: FaultyProxy, s3_root: str, method: str, answer: str, said: str
) -> None:
    proxy.spoil(method, answer, 100)
    with pytest.raises(StorageError) as caught:
        try_out(proxy, s3_root)
    assert re.search(said, str(caught.value), re.DOTALL), caught.value
    assert sum(line.startswith(method) for line in proxy.seen) <= 2, "no retries of what stays"


def test_a_bucket_in_another_region_is_followed_there(proxy: FaultyProxy, s3_root: str) -> None:
    proxy.spoil("PUT", "301 PermanentRedirect")
    assert try_out(proxy, s3_root) == {"seen": True}
    assert proxy.left == 0


def test_no_bucket_and_too_long_a_key_are_told(proxy: FaultyProxy, s3_root: str) -> None:
    with pytest.raises(StorageError, match="no such bucket"):
        try_out(proxy, "s3://no-such-bucket/x")
    with pytest.raises(UsageError, match="S3 takes at most 1,024"):
        try_out(proxy, f"{s3_root}/{'x' * 960}")  # a probe's key would do, a data file's not


@pytest.mark.parametrize("locked", [False, True])
def test_a_bucket_that_keeps_versions_is_remarked_and_one_that_locks_objects_too(
    proxy: FaultyProxy, s3_root: str, locked: bool
) -> None:
    bucket = "locked" if locked else "versioned"
    store = S3Storage(f"s3://{bucket}/x", StoreOptions.from_environment())

    def make(client: Any) -> None:
        client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=locked)
        if not locked:
            enabled = {"Status": "Enabled"}
            client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration=enabled)
            return
        rule = {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}}
        client.put_object_lock_configuration(
            Bucket=bucket,
            ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": rule},
        )

    store.run("make", "", make)
    assert "keeps versions" in try_out(proxy, store.url)["remark"]
    assert store.list() == []


def test_peers_are_told_why_they_cannot_read(proxy: FaultyProxy, s3_root: str) -> None:
    config = StoreOptions(endpoint=proxy.endpoint, region="us-east-1", retries=0)
    access = access_to(s3_root, storage=config)
    assert probe(access, s3_root, SESSION, create=True) == {"seen": True}
    assert probe(access, s3_root, SESSION, create=False) == {"seen": True}
    proxy.spoil("GET", "403 RequestTimeTooSkewed")
    with pytest.raises(CheckpointError, match="clock"):
        probe(access, s3_root, SESSION, create=False)
