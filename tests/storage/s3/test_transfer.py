"""Whole files of copies: what is sent and asked for, and what is not taken for the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from smckpt.checkpoint.upkeep.transfer import copy_checkpoint
from smckpt.checkpoint.upkeep.verify import verify_checkpoint
from smckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from smckpt.storage import open_storage
from smckpt.storage.budget import Share
from smckpt.storage.s3.config import StoreOptions
from smckpt.storage.s3.requests import pace_of
from smckpt.storage.s3.storage import S3Storage
from tests.support.faults import rebuilt
from tests.support.faults.copies import contents
from tests.support.faults.proxy import FaultyProxy, faulty_proxy
from tests.support.models import shards
from tests.support.s3 import BUCKET, Server

MIB = 1 << 20


def options(**fields: Any) -> StoreOptions:
    return StoreOptions.from_mapping(
        {"chunk_size_MB": 5, **fields}, StoreOptions.from_environment()
    )


@pytest.fixture
def proxy(s3_root: str, s3_server: Server) -> Iterator[FaultyProxy]:
    with faulty_proxy(s3_server.endpoint) as made:
        yield made


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two ranks, two MiB each."""
    weights = {f"layer{i}.weight": torch.randn(1024, 256) for i in range(4)}
    place = tmp_path_factory.mktemp("small") / "run"
    return shards.write(place, 2, lambda rank: shards.fsdp2(weights, rank, 2), step=7)


@pytest.fixture
def asked(s3_root: str) -> Iterator[dict[str, list[tuple[str, dict[str, Any]]]]]:
    """The names of the objects that are put and got, each with the fields of its request."""
    noted: dict[str, list[tuple[str, dict[str, Any]]]] = {"PutObject": [], "GetObject": []}
    events = open_storage(s3_root).run("look", s3_root, lambda c: c.meta.events)  # type: ignore[attr-defined]

    def note(params: dict[str, Any], model: Any, **_: Any) -> None:
        noted[model.name].append((params["Key"].rpartition("/")[2], dict(params)))

    for name in noted:
        events.register(f"provide-client-params.s3.{name}", note)
    yield noted
    for name in noted:
        events.unregister(f"provide-client-params.s3.{name}", note)


# -- whole files of copies -------------------------------------------------------------------------


def test_small_files_of_a_copy_go_whole_and_what_commits_it_by_a_conditional_put(
    small: Path,
    s3_root: str,
    tmp_path: Path,
    asked: dict[str, list[tuple[str, dict[str, Any]]]],
) -> None:
    names = set(contents(small))
    commits = {name for name in names if name.startswith("manifest-")}
    copy_checkpoint(str(small), s3_root)
    store = open_storage(s3_root)
    data = {name for name in names if name.endswith(".safetensors")}
    assert all(store.stored_crc64(name) is not None for name in data)
    asked["GetObject"].clear()
    copy_checkpoint(s3_root, str(tmp_path / "back"))
    put = asked["PutObject"]
    conditional = [name for name, fields in put if fields.get("IfNoneMatch") == "*"]
    assert sorted(conditional) == sorted(commits) != []
    assert sorted(name for name, _ in put) == sorted(names)
    assert all("ChecksumCRC64NVME" in fields for _, fields in put)
    got = [name for name, _ in asked["GetObject"] if name in data]
    assert sorted(got) == sorted(data) != []
    assert contents(s3_root) == contents(tmp_path / "back") == contents(small)


def test_requests_of_a_copy_are_counted_and_tried_again(
    small: Path, proxy: FaultyProxy, s3_root: str, tmp_path: Path
) -> None:
    config = options(endpoint=proxy.endpoint)
    pace = pace_of(config, BUCKET, Share())
    name = shards.files(small)[0].name
    for fault in ("503", "500", "before", "after", "wrong"):
        proxy.spoil("PUT", fault, path=name)
    for fault in ("503", "half", "before", "half"):
        proxy.spoil("GET", fault, path=name)
    copy_checkpoint(str(small), s3_root, storage=config)
    copy_checkpoint(s3_root, str(tmp_path / "back"), storage=config)
    assert proxy.left == 0
    assert contents(tmp_path / "back") == contents(small)
    sent = [line.partition(" ")[0] for line in proxy.seen]
    assert pace.writes.bucket.taken == sum(method not in ("GET", "HEAD") for method in sent)
    assert pace.reads.bucket.taken == sum(method in ("GET", "HEAD") for method in sent)


def test_wrong_bytes_are_fetched_again_and_then_named_and_nothing_is_committed(
    small: Path, proxy: FaultyProxy, s3_root: str, tmp_path: Path
) -> None:
    copy_checkpoint(str(small), s3_root)
    name = shards.files(small)[0].name
    config = options(endpoint=proxy.endpoint)
    proxy.spoil("GET", "wrong answer", 2, path=name)
    copy_checkpoint(s3_root, str(tmp_path / "back"), storage=config)
    assert proxy.left == 0
    proxy.spoil("GET", "wrong answer", 3, path=name)
    with pytest.raises(CorruptCheckpointError, match=f"bytes 0 to 1048576 of {name}"):
        copy_checkpoint(s3_root, str(tmp_path / "never"), storage=config)
    with pytest.raises(CheckpointNotFoundError):
        copy_checkpoint(str(tmp_path / "never"), str(tmp_path / "no"))
    proxy.spoil("GET", "wrong answer", 3, path=name)
    assert not verify_checkpoint(s3_root, storage=config).ok
    assert contents(tmp_path / "back") == contents(small)


def test_an_object_of_another_size_is_not_taken_for_the_file(s3_root: str) -> None:
    store = S3Storage(s3_root, options())
    store.put("data", b"12345")
    store.put("empty", b"")
    target = memoryview(bytearray(5))
    store.fetch("data", target)
    assert target == b"12345"
    for name, size, said in (
        ("data", 6, "ends at byte 5; 6 were needed"),
        ("data", 4, "is longer than 4 bytes"),
        ("empty", 1, "ends at byte 0"),
    ):
        with pytest.raises(CorruptCheckpointError, match=said):
            store.fetch(name, memoryview(bytearray(size)))
    with pytest.raises(CheckpointNotFoundError):
        store.fetch("nothing", target)


def test_what_cannot_pass_fails_at_once(proxy: FaultyProxy, s3_root: str) -> None:
    store = S3Storage(s3_root, options(endpoint=proxy.endpoint))
    proxy.spoil("PUT", "403 AccessDenied")
    with pytest.raises(StorageError, match="access denied"):
        store.create_file("data", 1, replace=True).write_at(0, memoryview(b"x"))
    store.put("data", b"x")
    proxy.spoil("GET", "403 AccessDenied")
    with pytest.raises(StorageError, match="access denied"):
        store.fetch("data", memoryview(bytearray(1)))
    assert len(proxy.seen) == 3
    with pytest.raises(StorageError, match="no such bucket"):
        S3Storage("s3://no-such-bucket/x", options()).fetch("data", memoryview(bytearray(1)))


# -- another botocore ------------------------------------------------------------------------------


def test_bodies_of_a_botocore_that_is_built_otherwise_are_read_too(
    s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("botocore.response", "botocore.endpoint"):
        monkeypatch.setattr(f"{module}.StreamingBody", rebuilt.OtherBody)
    store = S3Storage(s3_root, options())
    data = memoryview(os.urandom(6 * MIB + 7))
    for name, size in (("parted", len(data)), ("single", MIB)):
        writer = store.create_file(name, size)
        for at in range(0, size, writer.piece):
            writer.write_at(at, data[at : min(at + writer.piece, size)])
        writer.finish()
        assert store.read(name) == data[:size]
        first, second = memoryview(bytearray(99)), memoryview(bytearray(size - 100))
        store.read_into(name, 1, [first, second])
        assert bytes(first) + bytes(second) == data[1:size]
    assert store.put_exclusive("single", b"other") is False
    assert store.stored_crc64("parted") is not None
