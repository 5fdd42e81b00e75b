"""Uploads that a dead attempt left unfinished: invisible, and paid for until they are aborted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from smckpt.checkpoint.commits.sweep import sweep
from smckpt.checkpoint.records.format import data_name
from smckpt.errors import StorageError
from smckpt.storage import Access, access_to
from smckpt.storage.s3.config import StoreOptions
from smckpt.storage.s3.storage import S3Storage
from tests.support.faults.proxy import FaultyProxy, faulty_proxy
from tests.support.s3 import Server
from tests.support.saves import Group, hybrid, state_of

A, B, C = "aaaaaaaaaaaa", "bbbbbbbbbbbb", "cccccccccccc"
MIB = 1 << 20


@pytest.fixture
def proxy(s3_root: str, s3_server: Server) -> Iterator[FaultyProxy]:
    with faulty_proxy(s3_server.endpoint) as made:
        yield made


def store_at(url: str) -> S3Storage:
    base = StoreOptions.from_environment()
    return S3Storage(url, StoreOptions.from_mapping({"chunk_size_MB": 5}, base))


def begin(store: S3Storage, name: str, parts: int = 1) -> None:
    """An upload that is never finished."""
    writer = store.create_file(name, 12 * MIB)
    for number in range(parts):
        writer.write_at(5 * MIB * number, memoryview(bytes(5 * MIB)))


def group_at(url: str) -> Group:
    return Group(url, range(1), session=A, state=state_of(hybrid(range(1), 1)))  # type: ignore[arg-type]


def attempt(session: str, number: int) -> str:
    return data_name(f"{session}-{number:08d}", 0, 0)


def test_a_sweep_aborts_the_uploads_of_dead_attempts_and_no_others(s3_root: str) -> None:
    store = store_at(s3_root)
    begin(store, attempt(B, 3))  # of a run that was killed before it had any object here
    begin(store, attempt(B, 3), parts=0)  # tried twice
    group = group_at(s3_root)
    group.lease()
    for name in (attempt(A, 0), attempt(A, 9), attempt(C, 0), "data.bin"):
        begin(store, name, parts=0)
    begin(store.join("deeper"), attempt(B, 3), parts=0)  # type: ignore[arg-type]
    next(group.numbers)
    kept = group.save()
    assert store.list_unfinished() == sorted(
        {attempt(B, 3), attempt(A, 0), attempt(A, 9), attempt(C, 0), "data.bin"}
    )
    sweep(Access(), s3_root, [kept["manifest"]], group.lease())
    # Later ones of this session, and those of a session that came after, may live.
    assert store.list_unfinished() == sorted({attempt(A, 9), attempt(C, 0), "data.bin"})
    assert store.join("deeper").list_unfinished() == [attempt(B, 3)]
    assert [info.name for info in store.list("fence-")] == []


def test_a_finished_file_stays_when_what_was_begun_under_its_name_goes(s3_root: str) -> None:
    store = store_at(s3_root)
    begin(store, "data")
    store.put("data", b"whole")
    store.discard_unfinished(["data", "nothing"])
    assert store.list_unfinished() == []
    assert store.read("data") == b"whole"


def test_uploads_are_listed_page_by_page(s3_root: str) -> None:
    store = store_at(s3_root)
    for name in ("a", "b", "b", "c"):
        begin(store, name, parts=0)
    events = store.run("look", s3_root, lambda client: client.meta.events)

    def one_by_one(params: dict[str, Any], **_: Any) -> None:
        params["MaxUploads"] = 1

    events.register("provide-client-params.s3.ListMultipartUploads", one_by_one)
    try:
        assert store.list_unfinished() == ["a", "b", "c"]
        store.discard_unfinished(["b", "c"])
        assert store.list_unfinished() == ["a"]
    finally:
        events.unregister("provide-client-params.s3.ListMultipartUploads", one_by_one)


def test_who_may_not_list_uploads_is_told_and_the_rest_is_swept(
    proxy: FaultyProxy, s3_root: str
) -> None:
    fields: dict[str, Any] = {"endpoint": proxy.endpoint}
    access = access_to(s3_root, storage=fields)
    proxy.spoil("GET", "403 AccessDenied", 100, path="uploads")
    group = group_at(s3_root)
    group.access = access
    group.save()
    kept = group.save()
    with pytest.raises(StorageError, match="cannot list the uploads: access denied"):
        sweep(access, s3_root, [kept["manifest"]], group.lease())
    names = [info.name for info in store_at(s3_root).list()]
    assert not any(f"{A}-00000000" in name for name in names)
    assert any(f"{A}-00000001" in name for name in names)
