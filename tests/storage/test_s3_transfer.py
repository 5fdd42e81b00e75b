"""s3transfer: whole files of copies, and all else where our own client cannot be used."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from smckpt.checkpoint.transfer import copy_checkpoint
from smckpt.checkpoint.verify import verify_checkpoint
from smckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from smckpt.storage import open_storage, s3_client, s3_read
from smckpt.storage.budget import Share
from smckpt.storage.s3 import S3Storage
from smckpt.storage.s3_config import S3Config, using_s3
from smckpt.storage.s3_pace import pace_of
from tests.support import rebuilt, shards
from tests.support.copies import contents
from tests.support.proxy import FaultyProxy, faulty_proxy
from tests.support.s3 import BUCKET, Server

MIB = 1 << 20
CLIENTS = ["direct", "s3transfer"]


def options(**fields: Any) -> S3Config:
    return S3Config.from_mapping({"chunk_size_MB": 5, **fields}, S3Config.from_environment())


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
def by_s3transfer(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The names of what it uploads and downloads."""
    from s3transfer.manager import TransferManager

    noted: dict[str, list[str]] = {"upload": [], "download": []}
    for verb, at in (("upload", 2), ("download", 1)):
        real = getattr(TransferManager, verb)

        def call(
            *given: Any, real: Any = real, names: list[str] = noted[verb], at: int = at
        ) -> Any:
            names.append(given[1 + at].rpartition("/")[2])
            return real(*given)

        monkeypatch.setattr(TransferManager, verb, call)
    return noted


# -- whole files of copies -------------------------------------------------------------------------


@pytest.mark.parametrize("client", CLIENTS)
def test_small_files_of_a_copy_go_whole_and_what_commits_it_by_a_conditional_put(
    small: Path, s3_root: str, tmp_path: Path, by_s3transfer: dict[str, list[str]], client: str
) -> None:
    names = set(contents(small))
    commits = {name for name in names if name.startswith("manifest-")}
    with using_s3(options(client=client)):
        conditional: list[str] = []
        events = open_storage(s3_root).run("look", s3_root, lambda c: c.meta.events)  # type: ignore[attr-defined]

        def note(params: dict[str, Any], **_: Any) -> None:
            if params.get("IfNoneMatch") == "*":
                conditional.append(params["Key"].rpartition("/")[2])

        events.register("provide-client-params.s3.PutObject", note)
        try:
            copy_checkpoint(str(small), s3_root)
        finally:
            events.unregister("provide-client-params.s3.PutObject", note)
        store = open_storage(s3_root)
        data = {name for name in names if name.endswith(".safetensors")}
        assert all(store.stored_crc64(name) is not None for name in data)
        copy_checkpoint(s3_root, str(tmp_path / "back"))
    assert set(conditional) == commits != set()
    assert set(by_s3transfer["upload"]) == names - commits
    assert set(by_s3transfer["download"]) == data != set()
    assert contents(s3_root) == contents(tmp_path / "back") == contents(small)


def test_requests_of_s3transfer_are_counted_and_tried_again_like_all_others(
    small: Path, proxy: FaultyProxy, s3_root: str, tmp_path: Path
) -> None:
    config = options(endpoint=proxy.endpoint)
    pace = pace_of(config, BUCKET, Share())
    name = shards.files(small)[0].name
    for fault in ("503", "500", "before", "after", "wrong"):  # more than botocore's own three tries
        proxy.spoil("PUT", fault, path=name)
    for fault in ("503", "half", "before", "half"):
        proxy.spoil("GET", fault, path=name)
    with using_s3(config):
        copy_checkpoint(str(small), s3_root)
        copy_checkpoint(s3_root, str(tmp_path / "back"))
    assert proxy.left == 0
    assert contents(tmp_path / "back") == contents(small)
    sent = [line.partition(" ")[0] for line in proxy.seen]
    assert pace.writes.bucket.taken == sum(method not in ("GET", "HEAD") for method in sent)
    assert pace.reads.bucket.taken == sum(method in ("GET", "HEAD") for method in sent)


@pytest.mark.parametrize("client", CLIENTS)
def test_wrong_bytes_are_fetched_again_and_then_named_and_nothing_is_committed(
    small: Path, proxy: FaultyProxy, s3_root: str, tmp_path: Path, client: str
) -> None:
    copy_checkpoint(str(small), s3_root)
    name = shards.files(small)[0].name
    with using_s3(options(endpoint=proxy.endpoint, client=client)):
        proxy.spoil("GET", "wrong answer", 2, path=name)
        copy_checkpoint(s3_root, str(tmp_path / "back"))
        assert proxy.left == 0
        proxy.spoil("GET", "wrong answer", 3, path=name)
        with pytest.raises(CorruptCheckpointError, match=f"bytes 0 to 1048576 of {name}"):
            copy_checkpoint(s3_root, str(tmp_path / "never"))
        with pytest.raises(CheckpointNotFoundError):
            copy_checkpoint(str(tmp_path / "never"), str(tmp_path / "no"))
        proxy.spoil("GET", "wrong answer", 3, path=name)
        assert not verify_checkpoint(s3_root).ok
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
        ("data", 4, "does not end at byte 4"),
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


# -- the fallback ----------------------------------------------------------------------------------


def there_and_back(store: S3Storage) -> None:
    """A file in parts, one in a single request, ranges of both."""
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


@pytest.fixture
def nothing_private(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call may reach our own ways."""
    from smckpt.storage import s3

    def refuse(*_: Any) -> Any:
        raise AssertionError("our own way was taken")

    monkeypatch.setattr(s3, "Body", refuse)
    monkeypatch.setattr(s3_read, "_plain", refuse)
    monkeypatch.setattr(s3_client, "hand_over_pages", refuse)
    monkeypatch.setattr(s3_client, "reads_below", refuse)


def test_the_fallback_uses_public_methods_alone(nothing_private: None, s3_root: str) -> None:
    there_and_back(S3Storage(s3_root, options(client="s3transfer", retries=3)))


@pytest.mark.parametrize("what", ["session", "body"])
def test_a_botocore_that_is_built_otherwise_is_found_out_and_told_once(
    what: str, s3_root: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    s3_client._say_once.cache_clear()
    fields: dict[str, Any] = {"retries": 4 if what == "body" else 5}  # clients are kept by options
    if what == "session":
        fields["client_factory"] = "tests.support.rebuilt:client_with_another_session"
    else:
        for module in ("botocore.response", "botocore.endpoint"):
            monkeypatch.setattr(f"{module}.StreamingBody", rebuilt.OtherBody)
    with caplog.at_level(logging.WARNING, "smckpt"):
        there_and_back(S3Storage(f"{s3_root}/1", options(**fields)))
        there_and_back(S3Storage(f"{s3_root}/2", options(**fields, write_rate=3000)))
    [said] = [record.getMessage() for record in caplog.records]
    assert "requests go by public methods" in said
    assert {"session": "_pool_classes_by_scheme", "body": "bodies of answers"}[what] in said
    assert not S3Storage(s3_root, options(**fields))._requests.direct


def test_the_botocore_that_is_installed_is_the_one_we_know(
    s3_root: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "smckpt"):
        assert S3Storage(s3_root, options(retries=6))._requests.direct
    assert caplog.records == []
