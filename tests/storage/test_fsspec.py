"""The generic store against real file systems of fsspec, and msc:// against a real S3 endpoint."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import smckpt
from smckpt.checkpoint.upkeep.transfer import copy_checkpoint
from smckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    UsageError,
)
from smckpt.storage import FileInfo, Storage, open_storage
from smckpt.storage.preflight import refuse_save

KINDS = ("memory", "local", "msc")


def root_of(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if kind == "memory":
        return f"memory://here/{secrets.token_hex(6)}"
    if kind == "local":
        return f"local://{tmp_path}/deep"
    return str(request.getfixturevalue("msc_root"))


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    yield open_storage(root_of(request.param, request, tmp_path) + "/new")


def test_every_verb_does_what_it_does_on_a_file_system(store: Storage) -> None:
    assert store.list() == []
    assert store.list_dirs() == []
    assert store.put_exclusive("manifest", b"first") is True
    assert store.put_exclusive("manifest", b"second") is False
    assert store.read("manifest") == b"first"
    data = os.urandom(3 << 20)
    writer = store.create_file("data", len(data))
    for at in (2 << 20, 0, 1 << 20):  # in any order
        writer.write_at(at, memoryview(data)[at : at + (1 << 20)])
    assert store.list("d") == []
    writer.finish()
    assert store.read("data", 1000, 5) == data[1000:1005]
    seen: list[int] = []
    parts = [memoryview(bytearray(n)) for n in (7, 1 << 20, 0, 9)]
    store.read_into("data", 11, parts, lambda piece: seen.append(len(piece)))
    assert b"".join(parts) == data[11 : 11 + sum(seen)]
    assert store.list() == [FileInfo("data", len(data)), FileInfo("manifest", 5)]
    store.join("a/b").put("deeper", b"x")
    assert store.list_dirs() == ["a"]
    assert store.join("a").list_dirs() == ["b"]
    with pytest.raises(CorruptCheckpointError, match="were needed"):
        store.read("data", len(data) - 1, 2)
    with pytest.raises(StorageError, match="exists already"):
        store.put("manifest", b"third")
    replaced = store.create_file("data", 2, replace=True)
    replaced.write_at(0, memoryview(b"ab"))
    replaced.finish()
    assert store.read("data") == b"ab"
    for name in ("data", "manifest", "nothing"):
        store.delete(name)
        with pytest.raises(CheckpointNotFoundError):
            store.size(name)
    with pytest.raises(UsageError, match="not a plain file name"):
        store.put("../up", b"x")


def test_of_many_that_create_one_name_one_succeeds(msc_root: str) -> None:
    for root in (msc_root, f"memory://{secrets.token_hex(4)}"):
        store = open_storage(root)
        assert store.exclusive
        tries = [(store, b"%d" % n) for n in range(24)]
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda each: each[0].put_exclusive("one", each[1]), tries))
        assert won.count(True) == 1
        assert store.read("one") == b"%d" % won.index(True)


def test_an_aborted_or_a_failed_write_publishes_nothing(
    store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted = store.create_file("data", 10)
    aborted.write_at(0, memoryview(b"12345"))
    aborted.abort()
    unfinished = store.create_file("data", 10)
    unfinished.write_at(0, memoryview(b"12345"))
    with pytest.raises(StorageError, match="5 of 10 bytes"):
        unfinished.finish()
    unfinished.abort()
    assert store.list() == []

    def broken(source: Any, target: Any, *_: Any) -> None:
        target.write(source.read(5))
        raise ConnectionError("the line broke")

    if store.url.startswith("msc://"):
        return  # it is given the file, and sends it by itself
    monkeypatch.setattr("shutil.copyfileobj", broken)
    cut = store.create_file("data", 10)
    cut.write_at(0, memoryview(b"1234567890"))
    with pytest.raises(StorageError, match="cannot write: .*the line broke"):
        cut.finish()
    assert store.list() == []


def state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((1000, 3), value)}, "step": int(value)}


def test_a_checkpoint_is_saved_and_loaded_by_one_rank(
    msc_root: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue = secrets.token_hex(4)  # its worker starts now, and so has MSC_CONFIG of this test
    for root in (msc_root, f"local://{tmp_path}/local"):
        for step in (3, 4):  # the second sweeps the first
            smckpt.save(
                state(float(step)),
                checkpoint_id=f"{root}/run",
                step=step,
                options=smckpt.SaveOptions(queue=queue),
            )
        target = state(0.0)
        newest = smckpt.latest_checkpoint(root)
        assert newest is not None
        smckpt.load(target, checkpoint_id=newest)
        assert target["step"] == 4
        assert torch.equal(target["model"]["w"], state(4.0)["model"]["w"])
        assert smckpt.verify_checkpoint(newest).ok
    assert "local:// has no exclusive create" in caplog.text
    assert "msc://" not in caplog.text


def test_a_copy_and_an_export_go_to_memory_and_come_back(tmp_path: Path) -> None:
    smckpt.save(state(5.0), checkpoint_id=tmp_path / "run")
    there = f"memory://{secrets.token_hex(4)}"
    copy_checkpoint(tmp_path / "run", f"{there}/run")
    assert smckpt.verify_checkpoint(f"{there}/run").ok
    smckpt.export_hf(
        f"{there}/run", f"{there}/out", options=smckpt.ExportOptions(against_model=False)
    )
    assert "model.safetensors" in {i.name for i in open_storage(f"{there}/out").list()}
    copy_checkpoint(f"{there}/run", tmp_path / "back")
    assert smckpt.verify_checkpoint(tmp_path / "back").ok


def test_what_a_scheme_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(smckpt.UsageError, match="memory:// keeps files in the process"):
        smckpt.save(state(1.0), checkpoint_id="memory://here/run")
    store = open_storage(f"local://{tmp_path}/run")
    refuse_save(store, 1)
    with pytest.raises(UsageError, match=r"local:// has no exclusive create, so 8 ranks"):
        refuse_save(store, 8)
    with pytest.raises(UsageError, match=r"no store is known for nobody://.*register"):
        open_storage("nobody://host/run")
    with pytest.raises(UsageError, match=r"gs:// is not installed.*gcsfs"):
        open_storage("gs://bucket/run")


def test_a_store_that_ignores_the_condition_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = fsspec.get_filesystem_class("memory")
    real = kind.pipe_file
    monkeypatch.setattr(kind, "pipe_file", lambda self, path, value, **_: real(self, path, value))
    store = open_storage(f"memory://{secrets.token_hex(4)}")
    with pytest.raises(StorageError, match="lets a second create replace an existing file"):
        store.try_out("probe")
    assert store.list() == []


class Accessed(MemoryFileSystem):
    """Says when a file was last read, as SFTP's and SMB's file systems do."""

    protocol = "accessed"
    looks = itertools.count()

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return {**super().info(path, **kwargs), "time": next(self.looks)}


def test_a_file_that_is_read_is_no_other_one() -> None:
    fsspec.register_implementation("accessed", Accessed, clobber=True)
    writing = open_storage(f"accessed://here/{secrets.token_hex(6)}")
    writing.put("data", b"first")
    store = writing.of_one_version()
    assert store.size("data") == 5
    assert [store.read("data", at, 2) for at in (0, 2)] == [b"fi", b"rs"]
    writing.delete("data")
    writing.put("data", b"other")
    with pytest.raises(CorruptCheckpointError, match="has changed since its reading began"):
        store.read("data", 0, 2)
