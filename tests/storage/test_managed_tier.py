"""The store over HyperPod's daemon: the verbs, what the daemon drops or loses, and what stands in
the other store. Against a small daemon of the tests and the stand-in that the package ships."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from smckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    UsageError,
)
from smckpt.storage import FileInfo, Storage, open_storage
from smckpt.storage.memory.hyperpod import RETAINED, daemon_url
from tests.support.frameworks.managed_tier import DAEMONS, ask, blob_of


@pytest.fixture(params=DAEMONS)
def daemon(request: pytest.FixtureRequest) -> Iterator[str]:
    with DAEMONS[request.param]() as address:
        yield address


@pytest.fixture
def small() -> Iterator[str]:
    with DAEMONS["small"]() as address:
        yield address


def store_at(address: str, root: Path) -> Storage:
    return open_storage(daemon_url(f"http://{address}/job-1", str(root)) + "/step_1")


def written(store: Storage, name: str, data: bytes, *, replace: bool = False) -> None:
    writer = store.create_file(name, len(data), replace=replace)
    half = len(data) // 2
    writer.write_at(half, memoryview(data)[half:])  # in any order
    writer.write_at(0, memoryview(data)[:half])
    writer.finish()


def test_every_verb_does_what_it_does_on_a_file_system(daemon: str, tmp_path: Path) -> None:
    store = store_at(daemon, tmp_path)
    assert (store.list(), store.list_dirs()) == ([], [])
    assert store.put_exclusive("manifest", b"first") is True
    assert store.put_exclusive("manifest", b"second") is False
    assert store.read("manifest") == b"first"
    data = os.urandom(3 << 20)
    written(store, "data-1-r3-0.safetensors", data)
    name = "data-1-r3-0.safetensors"
    assert store.read(name, 1000, 5) == data[1000:1005]
    seen: list[int] = []
    parts = [memoryview(bytearray(n)) for n in (7, 1 << 20, 0, 9)]
    store.read_into(name, 11, parts, lambda piece: seen.append(len(piece)))
    assert b"".join(parts) == data[11 : 11 + sum(seen)]
    assert store.list() == [FileInfo(name, len(data)), FileInfo("manifest", 5)]
    assert (store.names("data"), store.names("x")) == ([name], [])
    store.join("a/b").put("deeper", b"x")
    assert (store.list_dirs(), store.join("a").list_dirs()) == (["a"], ["b"])
    with pytest.raises(CorruptCheckpointError, match="were needed"):
        store.read(name, len(data) - 1, 2)
    with pytest.raises(StorageError, match="exists already"):
        written(store, name, b"other")
    written(store, name, b"ab", replace=True)
    assert (store.read(name), store.size(name)) == (b"ab", 2)
    for each in (name, "manifest", "nothing"):
        store.delete(each)
        with pytest.raises(CheckpointNotFoundError):
            store.size(each)
    with pytest.raises(UsageError, match="not a plain file name"):
        store.put("../up", b"x")
    aborted = store.create_file("data", 4)
    aborted.write_at(0, memoryview(b"four"))
    aborted.abort()
    assert store.names() == []


def test_what_the_daemon_has_lost_or_replaced_is_not_there(daemon: str, tmp_path: Path) -> None:
    store = store_at(daemon, tmp_path)
    name = "data-1-r0-0.safetensors"
    written(store, name, b"whole")
    note = (tmp_path / "memory" / "step_1" / f"held-{name}").read_bytes()
    _, body, meta = ask(daemon, "GET", blob_of(note))
    assert body == b"whole", "in one piece, as the daemon's other clients read it"
    other = json.dumps({**json.loads(meta), "checksum": "of another file"})
    for changed in (b"other", b"longer than it"):  # somebody else has put a blob there
        ask(daemon, "POST", blob_of(note), changed, other)
        fresh = store_at(daemon, tmp_path)
        assert (fresh.list(), fresh.names()) == ([], [name])
        with pytest.raises(CheckpointNotFoundError, match="no longer"):
            fresh.read(name)
    ask(daemon, "POST", "/v1/cp/cluster/reset")
    fresh = store_at(daemon, tmp_path)
    assert fresh.list() == []
    fresh.delete(name)
    assert fresh.names() == []


def test_a_rank_of_dead_jobs_fills_no_more_than_the_daemon_retains(
    daemon: str, tmp_path: Path
) -> None:
    store = store_at(daemon, tmp_path)
    names = [f"data-{number}-r1025-0.safetensors" for number in range(RETAINED + 2)]
    for name in names:
        written(store, name, name.encode())
    assert [info.name for info in store.list()] == sorted(names[2:])
    notes = (tmp_path / "memory" / "step_1").glob("held-*")
    assert {json.loads(one.read_bytes())["namespace"] for one in notes} == {"job-1-0-1"}


def test_readers_of_the_other_store_see_no_checkpoint_there(small: str, tmp_path: Path) -> None:
    import torch

    import smckpt

    url = daemon_url(f"http://{small}/job-1", str(tmp_path)) + "/step_7"
    smckpt.save({"w": torch.arange(4.0)}, checkpoint_id=url, step=7)
    assert smckpt.latest_checkpoint(tmp_path) is None
    found = smckpt.latest_checkpoint(url.rpartition("/")[0])
    assert found is not None and found.step == 7
    smckpt.load(target := {"w": torch.zeros(4)}, checkpoint_id=url)
    assert target["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    smckpt.remove(url)
    assert ask(small, "GET", "/v1/cp/namespaces/job-1-0-0")[0] == 200
    assert not [*(tmp_path / "memory" / "step_7").glob("held-*")]


def test_a_note_that_is_forged_reaches_nothing_and_runs_nothing(small: str, tmp_path: Path) -> None:
    store = store_at(small, tmp_path)
    name = "data-1-r0-0.safetensors"
    written(store, name, b"whole")
    note = tmp_path / "memory" / "step_1" / f"held-{name}"
    real = json.loads(note.read_bytes())
    for forged in (
        json.dumps({**real, "namespace": "../../cluster"}).encode(),
        json.dumps({**real, "rank": -1}).encode(),
        json.dumps({**real, "size": "5"}).encode(),
        pickle.dumps(real),
        b"[]",
    ):
        note.write_bytes(forged)
        with pytest.raises(CorruptCheckpointError, match="note of where"):
            store_at(small, tmp_path).read(name)


def test_a_daemon_that_is_gone_or_refuses_is_named(small: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"127.0.0.1:1.*|does not answer"):
        written(store_at("127.0.0.1:1", tmp_path), "data", b"x")
    with pytest.raises(UsageError, match="no address with a namespace"):
        daemon_url("https://host/job", "/root")
    for url in (f"hyperpod://{small}", f"hyperpod://{small}/job-1", f"hyperpod://{small}/j/s3"):
        with pytest.raises(UsageError, match="store for the commits"):
            open_storage(url)
