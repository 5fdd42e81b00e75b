"""Answers of S3 that break off or are changed on their way, at each verb: they are asked for again,
and what cannot be mended is a typed error."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import smckpt
from smckpt import CheckpointError, StorageError
from smckpt.checkpoint.upkeep.transfer import copy_checkpoint
from smckpt.storage.s3.config import StoreOptions
from smckpt.storage.s3.storage import S3Storage
from tests.support.faults.proxy import FaultyProxy, faulty_proxy
from tests.support.s3 import Server

MIB = 1 << 20
DATA = bytes(range(256)) * 40
LARGE = os.urandom(6 * MIB)
REGIONS = ("status", "blank", "content-length", "etag", "content-type")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each of the hundreds of requests that are sent again."""
    monkeypatch.setattr("smckpt.storage.s3.requests._FIRST_PAUSE", 0.001)


@pytest.fixture
def proxy(s3_root: str, s3_server: Server) -> Iterator[FaultyProxy]:
    with faulty_proxy(s3_server.endpoint) as made:
        yield made


def through(proxy: FaultyProxy, url: str, **options: Any) -> S3Storage:
    fields = {"endpoint": proxy.endpoint, "chunk_size_MB": 5, **options}
    return S3Storage(url, StoreOptions.from_mapping(fields, StoreOptions.from_environment()))


def uploaded(store: S3Storage) -> bytes:
    writer = store.create_file("large", len(LARGE))
    for at in range(0, len(LARGE), writer.piece):
        writer.write_at(at, memoryview(LARGE)[at : at + writer.piece])
    writer.finish()
    return store.read("large")


def begun(store: S3Storage) -> list[str]:
    """The unfinished uploads after one was begun, and after it was discarded."""
    store.create_file("begun", len(LARGE))
    found = list(store.list_unfinished())
    store.discard_unfinished(found)
    return [*found, "-", *store.list_unfinished()]


def read_part(store: S3Storage) -> bytes:
    return store.read("here", 100, 900)


def gone(store: S3Storage) -> list[str]:
    for name in ("a", "b", "c"):
        store.put(name, b"x")
    store.delete("a")
    store.delete_many(["b", "c"])
    return [name for name in ("a", "b", "c") if name in store.names()]


VERBS: dict[str, tuple[Callable[[S3Storage], Any], Any, tuple[str, ...]]] = {
    "create": (lambda s: s.put_exclusive("new", b"ours"), True, ("PUT",)),
    "create what is there": (lambda s: s.put_exclusive("here", b"late"), False, ("PUT", "HEAD")),
    "put": (lambda s: (s.put("put", DATA), s.read("put"))[1], DATA, ("PUT", "GET")),
    "upload": (uploaded, LARGE, ("POST", "PUT", "GET")),
    "read": (lambda s: s.read("here"), DATA, ("GET",)),
    "read a range": (read_part, DATA[100:1000], ("GET",)),
    "size": (lambda s: s.size("here"), len(DATA), ("HEAD",)),
    "checksum": (lambda s: s.stored_crc64("here") or 0, None, ("HEAD",)),
    "list": (lambda s: [(i.name, i.size) for i in s.list()], [("here", len(DATA))], ("GET",)),
    "list directories": (lambda s: list(s.list_dirs()), ["below"], ("GET",)),
    "uploads": (begun, ["begun", "-"], ("POST", "GET", "DELETE")),
    "delete": (gone, [], ("PUT", "DELETE", "POST", "GET")),
}


def prepared(s3_root: str, server: Server, name: str) -> str:
    root = f"{s3_root}/{name}"
    config = StoreOptions.from_mapping(
        {"endpoint": server.endpoint}, StoreOptions.from_environment()
    )
    for url, key in ((root, "here"), (f"{root}/below", "other")):
        S3Storage(url, config).put(key, DATA)
    return root


@pytest.mark.parametrize("verb", VERBS)
def test_an_answer_whose_headers_break_off_is_asked_for_again(
    proxy: FaultyProxy, s3_root: str, s3_server: Server, verb: str
) -> None:
    act, wanted, methods = VERBS[verb]
    for number, (method, region) in enumerate((m, r) for m in methods for r in REGIONS):
        store = through(proxy, prepared(s3_root, s3_server, f"{number}"))
        expected = act(store) if wanted is None else wanted
        proxy.spoil(method, f"cut {region}")
        assert act(store) == expected, (method, region)
        assert proxy.left == 0 and store.retries == 1, (method, region)


SPOILED = (
    "empty", "page", "half", "packed", "header ETag => ", "without ETag", "without Content-Length",
    "header Content-Type => text/html", "header Content-Range => bytes x-y/z",
)  # fmt: skip
# the answer's end is not known: each waits for a minute of silence
ENDLESS = "header Content-Length => x1"
# CI meets each verb with three faults and each fault with four verbs, and besides these pairs of a
# fault with the verb that it would harm most
IN_CI = {(verb, fault) for v, verb in enumerate(VERBS) for fault in SPOILED[v % 3 :: 3]} | {
    ("size", "without Content-Length"), ("upload", "without ETag"), ("upload", "header ETag => "),
    ("read a range", "header Content-Range => bytes x-y/z"), ("read", "half"), ("list", "half"),
    ("delete", "empty"), ("uploads", "empty"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("verb", "fault"),
    [
        pytest.param(verb, fault, marks=() if (verb, fault) in IN_CI else pytest.mark.long)
        for verb in VERBS
        for fault in (*SPOILED, ENDLESS)
    ],
)
def test_an_answer_that_is_none_of_s3s_is_asked_for_again(
    proxy: FaultyProxy, s3_root: str, s3_server: Server, verb: str, fault: str
) -> None:
    act, wanted, methods = VERBS[verb]
    for method in methods:
        if method == "DELETE" and fault == "empty":
            continue  # 200 and nothing is what a store may answer
        store = through(proxy, prepared(s3_root, s3_server, method))
        expected = act(store) if wanted is None else wanted
        proxy.spoil(method, fault)
        assert act(store) == expected, method
        assert proxy.left == 0, method


@pytest.mark.parametrize("checksum", ["crc64nvme", "none"])
def test_an_etag_of_a_part_that_was_changed_is_looked_up(
    proxy: FaultyProxy, s3_root: str, s3_server: Server, checksum: str
) -> None:
    store = through(proxy, prepared(s3_root, s3_server, "parts"), checksum=checksum)
    proxy.spoil("PUT", 'header ETag => "0123456789abcdef0123456789abcdef"', 2, path="partNumber=")
    assert uploaded(store) == LARGE and proxy.left == 0


LISTED = (
    "says <Size>10240</Size> => <Size>1x240</Size>", "says <Size>10240</Size> => ",
    "says /here</Key> => /her", "says <IsTruncated>false => <IsTruncated>fblse",
    "says <Contents> => <Dontents>", "says <KeyCount>2 => <KeyCount>x",
    "says <Key> => <Kez>", "says > => ",
    "says LastModified>2 => LastModified>x", "says <Size>10240 => <Size>-10240",
    "says <IsTruncated>false => <IsTruncated>true", "says /here</Key> => /he/re</Key>",
    "says PREFIX/below/ => elsewhere/below/",
    "says </Contents> => </Contents><Contents><Key>PREFIX/here</Key><Size>5</Size></Contents>",
)  # fmt: skip


@pytest.mark.parametrize("fault", LISTED)
def test_a_listing_that_was_changed_is_asked_for_again(
    proxy: FaultyProxy, s3_root: str, s3_server: Server, fault: str
) -> None:
    store = through(proxy, prepared(s3_root, s3_server, "listed"))
    fault = fault.replace("PREFIX", store.url.split("/", 3)[3].rstrip("/"))
    proxy.spoil("GET", fault)
    assert [(i.name, i.size) for i in store.list()] == [("here", len(DATA))]
    proxy.spoil("GET", fault)
    assert store.list_dirs() == ["below"]
    assert proxy.left == 0 and store.retries == 2


RANGES = ("100-500/10240", "100-999/500", "101-1000/10240", "100-1100/10240", "100-/10240")


def test_facts_about_a_body_that_contradict_each_other_are_asked_for_again(
    proxy: FaultyProxy, s3_root: str, s3_server: Server
) -> None:
    store = through(proxy, prepared(s3_root, s3_server, "facts"))
    for number, span in enumerate(RANGES, 1):
        proxy.spoil("GET", f"header Content-Range => bytes {span}")
        assert read_part(store) == DATA[100:1000] and store.retries == number, span
    for length in ("900\r\nContent-Length: 901", "99999999999999999"):
        proxy.spoil("GET", f"header Content-Length => {length}", 2)
        assert store.read("here") == DATA and read_part(store) == DATA[100:1000], length
        assert proxy.left == 0


def test_a_listing_that_is_always_changed_is_a_typed_error(
    proxy: FaultyProxy, s3_root: str, s3_server: Server
) -> None:
    store = through(proxy, prepared(s3_root, s3_server, "listed"), retries=1)
    proxy.spoil("GET", LISTED[0], 2)
    with pytest.raises(StorageError, match="cannot be read|size is missing") as caught:
        store.list()
    assert "report" not in str(caught.value)


def test_each_bit_of_a_listing_that_flips_gives_a_listing_or_a_typed_error(
    proxy: FaultyProxy, s3_root: str, s3_server: Server
) -> None:
    store = through(proxy, prepared(s3_root, s3_server, "listed"), retries=0)
    for percent in range(0, 100, 2):
        proxy.spoil("GET", f"flip {percent}")
        try:
            infos = store.list()
        except CheckpointError:
            continue
        assert all(type(i.size) is int and type(i.name) is str for i in infos), percent


def saved(root: str, config: StoreOptions) -> dict[str, Any]:
    state = {"model": {"w": torch.arange(50.0)}, "n": 3}
    smckpt.save(state, checkpoint_id=root, storage=config, step=3)
    return state


@pytest.mark.parametrize("file", ["manifest-", "part-", ".crc", ".safetensors"])
def test_a_small_object_that_is_changed_on_its_way_is_read_again(
    proxy: FaultyProxy, s3_root: str, s3_server: Server, file: str
) -> None:
    base = StoreOptions.from_environment()
    saved(s3_root, StoreOptions.from_mapping({"endpoint": s3_server.endpoint}, base))
    config = StoreOptions.from_mapping({"endpoint": proxy.endpoint}, base)
    for fault in ("wrong answer", "flip 30", "flip 99", "half"):
        proxy.spoil("GET", fault, 1, path=file)
        target = {"model": {"w": torch.zeros(50)}, "n": 0}
        smckpt.load(target, checkpoint_id=s3_root, storage=config)
        assert target["n"] == 3 and torch.equal(target["model"]["w"], torch.arange(50.0))
        assert proxy.left == 0, fault
    proxy.spoil("GET", "wrong answer", 1, path=file)
    assert smckpt.verify_checkpoint(s3_root, storage=config).ok
    assert proxy.left == 0


def test_small_objects_of_all_kinds_are_read_again(
    proxy: FaultyProxy, s3_root: str, s3_server: Server, tmp_path: Path
) -> None:
    from smckpt.checkpoint.commits.leases import claimed, leases_at
    from smckpt.checkpoint.commits.remove import pinned

    base = StoreOptions.from_environment()
    saved(s3_root, StoreOptions.from_mapping({"endpoint": s3_server.endpoint}, base))
    config = StoreOptions.from_mapping({"endpoint": proxy.endpoint}, base)
    store = S3Storage(s3_root, config)
    whole = leases_at(store)
    assert whole
    proxy.spoil("GET", "wrong answer", 1, path="epoch-")
    assert leases_at(store) == whole and proxy.left == 0
    with pinned(s3_root, storage=config):
        pass
    assert not claimed(store, "none")
    proxy.spoil("GET", "wrong answer", 1, path="manifest-")
    copy_checkpoint(s3_root, str(tmp_path / "copy"), storage=config)
    assert proxy.left == 0 and smckpt.verify_checkpoint(tmp_path / "copy").ok


def test_a_404_that_s3_does_not_send_is_no_missing_file(
    proxy: FaultyProxy, s3_root: str, s3_server: Server
) -> None:
    store = through(proxy, prepared(s3_root, s3_server, "listed"))
    proxy.spoil("GET", "bare 404", path="here")
    assert store.read("here") == DATA
    assert proxy.left == 0


@pytest.mark.parametrize(
    ("verb", "method", "fault"),
    [("create", "PUT", "bare 412"), ("read a range", "GET", "bare 416")],
)
def test_a_refusal_that_contradicts_the_store_is_no_fact(
    proxy: FaultyProxy, s3_root: str, s3_server: Server, verb: str, method: str, fault: str
) -> None:
    act, wanted, _ = VERBS[verb]
    store = through(proxy, prepared(s3_root, s3_server, "listed"))
    proxy.spoil(method, fault)
    assert act(store) == wanted
    assert proxy.left == 0 and store.retries == 1


def test_a_range_behind_the_end_is_still_told_as_the_end(
    proxy: FaultyProxy, s3_root: str, s3_server: Server
) -> None:
    store = through(proxy, prepared(s3_root, s3_server, "listed"))
    with pytest.raises(CheckpointError, match="ends at byte"):
        store.read("here", len(DATA), 10)
    assert store.retries == 0
