"""S3 behind a proxy that spoils requests: what passes is tried again, what does not is told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from smckpt.errors import StorageError
from smckpt.storage.s3 import S3Storage
from smckpt.storage.s3_config import S3Config
from tests.support.proxy import FaultyProxy, faulty_proxy
from tests.support.s3 import Server

MIB = 1 << 20
MORE_THAN_BOTOCORES = 4  # its own tries are three; the fourth fault is ours to get over


@pytest.fixture
def proxy(s3_root: str, s3_server: Server) -> Iterator[FaultyProxy]:
    with faulty_proxy(s3_server.endpoint) as made:
        yield made


def through(proxy: FaultyProxy, url: str, **options: Any) -> S3Storage:
    fields = {"endpoint": proxy.endpoint, "chunk_size_MB": 5, **options}
    return S3Storage(url, S3Config.from_mapping(fields, S3Config.from_environment()))


def write(store: S3Storage, name: str, data: bytes) -> None:
    writer = store.create_file(name, len(data))
    view = memoryview(data)
    for at in range(0, len(data), writer.piece):
        writer.write_at(at, view[at : at + writer.piece])
    writer.finish()


@pytest.mark.parametrize("fault", ["503", "500", "before", "after", "wrong"])
def test_parts_that_fail_in_passing_are_sent_again_from_their_first_byte(
    proxy: FaultyProxy, s3_root: str, fault: str
) -> None:
    store, data = through(proxy, s3_root), os.urandom(6 * MIB)
    proxy.spoil("PUT", fault, MORE_THAN_BOTOCORES, path="partNumber=1")
    write(store, "data", data)
    assert proxy.left == 0
    assert store.read("data", 0, len(data)) == data


@pytest.mark.parametrize("fault", ["503", "after"])
def test_an_upload_is_completed_once_though_the_answer_is_lost(
    proxy: FaultyProxy, s3_root: str, fault: str
) -> None:
    store, data = through(proxy, s3_root), os.urandom(6 * MIB)
    proxy.spoil("POST", fault, MORE_THAN_BOTOCORES, path="uploadId=")
    write(store, "data", data)
    assert proxy.left == 0
    assert store.read("data", 0, len(data)) == data


@pytest.mark.parametrize("times", [1, MORE_THAN_BOTOCORES])
def test_who_created_a_name_hears_so_though_the_answer_is_lost(
    proxy: FaultyProxy, s3_root: str, times: int
) -> None:
    store = through(proxy, s3_root)
    proxy.spoil("PUT", "after", times)
    assert store.put_exclusive("manifest", b"ours") is True
    assert proxy.left == 0
    assert store.put_exclusive("manifest", b"late") is False


@pytest.mark.parametrize("fault", ["503", "before", "half"])
def test_reads_that_break_off_are_done_again(proxy: FaultyProxy, s3_root: str, fault: str) -> None:
    store, data = through(proxy, s3_root), os.urandom(3 * MIB)
    store.put("data", data)
    proxy.spoil("GET", fault, MORE_THAN_BOTOCORES)
    assert store.read("data", 0, len(data)) == data
    proxy.spoil("GET", fault, MORE_THAN_BOTOCORES)
    assert store.read("data") == data
    assert proxy.left == 0


def test_a_store_that_stays_overloaded_is_reported_with_what_was_tried(
    proxy: FaultyProxy, s3_root: str
) -> None:
    store = through(proxy, s3_root, retries=1)
    proxy.spoil("PUT", "503", 1000)
    with pytest.raises(StorageError, match=r"SlowDown.*tried 2 times in"):
        store.put("data", b"x")


def test_the_deadline_ends_the_tries(proxy: FaultyProxy, s3_root: str) -> None:
    store = through(proxy, s3_root, retries=1000, timeout_s=1)
    proxy.spoil("PUT", "500", 1000)
    with pytest.raises(StorageError, match=r"tried \d+ times in"):
        store.put("data", b"x")
