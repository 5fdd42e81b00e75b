"""Copies of checkpoints: whole or none, checked, taken up where they were cut short."""

from __future__ import annotations

import itertools
import secrets
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

import smckpt
from smckpt.checkpoint.upkeep.transfer import copy_checkpoint
from smckpt.checkpoint.upkeep.verify import verify_checkpoint
from smckpt.errors import (
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    StorageError,
    UsageError,
)
from smckpt.storage import open_storage
from tests.support import synthetic
from tests.support.faults.copies import contents, killed_at
from tests.support.limits import seconds
from tests.support.models import shards
from tests.support.s3 import BUCKET
from tests.support.saves import hybrid
from tests.support.synthetic import Step, kept, on_mesh

MESH = hybrid((0, 1, 2, 3), 2)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A step of two groups, with things around it that are no part of it."""
    rules = [on_mesh("w", (10, 6), MESH, "R S0"), on_mesh("b", (7,), MESH, "R R"), kept("step")]
    made = synthetic.state(rules, synthetic.whole({"w": (10, 6), "b": (7,), "step": ()}))
    root = tmp_path / "step"
    Step(root, {"part0": (0, 2), "part1": (1, 3)}, made).save()
    return root


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One group of two ranks, 7 MiB each: several blocks, and parts of an upload of 5 MiB."""
    weights = {f"layer{i}.weight": torch.randn(1024, 512) for i in range(7)}
    place = tmp_path_factory.mktemp("large") / "run"
    return shards.write(place, 2, lambda rank: shards.fsdp2(weights, rank, 2), step=7)


@pytest.fixture(params=["disk", "s3"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place."""
    if request.param == "disk":
        return str(tmp_path / "deep" / "target")
    return f"{request.getfixturevalue('s3_root')}/deep/target"


def test_a_step_comes_back_from_s3_as_it_was_and_with_nothing_else(
    step: Path, s3_root: str, tmp_path: Path
) -> None:
    saved = contents(step)
    (step / "part0" / "notes.txt").write_text("not ours")
    (step / "part1" / "data-0123456789ab-00000009-r00001-0.safetensors").write_text("unfinished")
    up = copy_checkpoint(str(step), f"{s3_root}/run/there")
    across = copy_checkpoint(up.target, f"{s3_root}/elsewhere")
    back = copy_checkpoint(across.target, str(tmp_path / "back"))
    assert contents(up.target) == contents(across.target) == contents(back.target) == saved
    assert back.files == len(saved)
    assert back.files_present == 0
    assert verify_checkpoint(back.target).ok


def test_large_files_are_copied_in_parts_and_progress_is_told(
    large: Path, s3_root: str, tmp_path: Path
) -> None:
    told: list[tuple[int, int]] = []
    parts = {"chunk_size_MB": 5}
    up = copy_checkpoint(
        str(large), s3_root, progress=lambda *done: told.append(done), storage=parts
    )
    store = open_storage(s3_root)
    name = next(info.name for info in store.list("data-") if info.size > 7 << 20)
    assert store.stored_crc64(name) is not None
    assert [total for _, total in told] == [up.nbytes] * 4  # two files in two parts each
    assert max(told) == (up.nbytes, up.nbytes)
    back = copy_checkpoint(s3_root, str(tmp_path / "back"), threads=1)
    assert contents(back.target) == contents(large)


def test_keys_are_kept_byte_for_byte(step: Path, s3_root: str) -> None:
    """What is sent, since the server of the tests lists no keys with an empty part."""
    key = f"/opt/ml/{secrets.token_hex(4)}"
    events = open_storage(s3_root).run("look", s3_root, lambda client: client.meta.events)
    put: list[str] = []

    def note(request: Any, **_: Any) -> None:
        if request.method == "PUT":
            put.append(urlsplit(request.url).path)

    events.register("before-send.s3", note)
    try:
        assert copy_checkpoint(str(step), f"s3://{BUCKET}/{key}").target.endswith(key + "/")
    finally:
        events.unregister("before-send.s3", note)
    assert sorted(put) == sorted(f"/{BUCKET}/{key}/{way}" for way in contents(step))
    assert put[-1].startswith(f"/{BUCKET}/{key}/record-")


def test_what_is_there_and_whole_is_left_and_what_is_not_is_replaced(
    large: Path, target: str
) -> None:
    first = copy_checkpoint(str(large), target)
    again = copy_checkpoint(str(large), target)
    assert (again.files_present, again.nbytes_present) == (first.files, first.nbytes)
    store = open_storage(target)
    names = [info.name for info in store.list()]
    flipped, missing = (name for name in names if name.endswith(".safetensors"))
    sums, part = (next(n for n in names if n.startswith(kind)) for kind in ("data-", "part-"))
    damaged = bytearray(store.read(flipped))
    damaged[3 << 20] ^= 1
    for name, data in (
        (flipped, bytes(damaged)),
        (sums, b"short"),
        (part, store.read(part) + b"x"),
    ):
        store.delete(name)
        store.put(name, data)
    store.delete(missing)
    mended = copy_checkpoint(str(large), target)
    assert mended.files_present == first.files - len({flipped, missing, sums, part})
    assert contents(target) == contents(large)


def test_uploads_that_a_killed_copy_left_are_given_up_and_no_others(
    large: Path, s3_root: str
) -> None:
    store = open_storage(s3_root)
    ours = shards.files(large)[0].name
    parted = open_storage(s3_root, storage={"chunk_size_MB": 5})
    for name in (ours, "other"):
        parted.create_file(name, 20 << 20).write_at(0, memoryview(bytes(5 << 20)))
    assert store.list_unfinished() == [ours, "other"]
    copy_checkpoint(str(large), s3_root)
    assert store.list_unfinished() == ["other"]
    assert contents(s3_root) == contents(large)


def test_a_copy_that_meets_an_unfinished_one_takes_over_and_the_other_fails(
    large: Path, tmp_path: Path
) -> None:
    target = open_storage(str(tmp_path / "target"))
    file = shards.files(large)[0]
    size = file.stat().st_size
    first = target.create_file(file.name, size, replace=True)
    first.write_at(0, memoryview(bytes(size)))  # of a copy that is slow, or was killed
    assert target.list() == [] or file.name not in {info.name for info in target.list()}
    assert target.list_unfinished() == [file.name]
    copy_checkpoint(str(large), target.url)
    with pytest.raises(StorageError, match="another copy to this directory took over"):
        first.finish()
    first.abort()
    assert contents(target.url) == contents(large)
    late = target.create_file(file.name, size, replace=True)
    for low in range(0, size, 1 << 20):
        late.write_at(low, memoryview(file.read_bytes())[low : low + (1 << 20)])
    late.finish()  # one that was as far as the other: the same bytes in the same place
    assert contents(target.url) == contents(large)


@pytest.mark.parametrize("how", ["disk", "s3"])
def test_of_copies_to_one_place_at_one_time_one_succeeds_and_what_is_committed_is_whole(
    large: Path, tmp_path: Path, s3_root: str, how: str
) -> None:
    target = str(tmp_path / "target") if how == "disk" else s3_root
    damaged = shards.files(large)[0].name
    open_storage(target).put(damaged, b"the rest of an older tool's copy")
    start = Barrier(4)

    def copy(_: int) -> str:
        start.wait(seconds(30))
        try:
            copy_checkpoint(str(large), target)
        except StorageError as error:
            return str(error)
        assert verify_checkpoint(target).ok  # who says that it is there must be right
        return ""

    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(copy, range(4)))
    assert "" in told, told
    copy_checkpoint(str(large), target)
    assert contents(target) == contents(large)
    assert open_storage(target).list_unfinished() == []


@pytest.mark.parametrize("groups", [1, 2])
def test_a_copy_killed_at_any_write_is_no_checkpoint_and_is_taken_up_again(
    step: Path, tmp_path: Path, groups: int
) -> None:
    if groups == 1:  # committed by its manifest, not by a record
        weights = {"w": torch.randn(8, 4)}
        step = shards.write(tmp_path / "one", 2, lambda rank: shards.fsdp2(weights, rank, 2))
    saved = contents(step)
    for moment in itertools.count():
        target = str(tmp_path / f"killed-{moment}")
        if not killed_at(moment, lambda to=target: copy_checkpoint(str(step), to, threads=1)):
            break
        with pytest.raises(CheckpointNotFoundError):
            copy_checkpoint(target, str(tmp_path / "never"))
        if moment % 3 == 0:
            copy_checkpoint(str(step), target)
            assert contents(target) == saved
    assert moment >= len(saved)


@pytest.mark.parametrize("kind", ["data", "crc", "part"])
def test_a_damaged_source_is_named_and_nothing_is_committed(
    large: Path, target: str, tmp_path: Path, kind: str
) -> None:
    source = shutil.copytree(large, tmp_path / "damaged")
    pattern = {"data": "data-*-0.safetensors", "crc": "data-*.crc", "part": "part-*"}[kind]
    victim = shards.files(source, pattern)[0]
    shards.flip(victim, victim.stat().st_size // 2)
    with pytest.raises(CorruptCheckpointError) as raised:
        copy_checkpoint(str(source), target)
    assert victim.name in str(raised.value)
    with pytest.raises(CheckpointNotFoundError):
        copy_checkpoint(target, str(tmp_path / "never"))


def test_a_source_that_a_newer_save_sweeps_meanwhile_is_told_as_such_and_not_as_damaged(
    large: Path, target: str, tmp_path: Path
) -> None:
    source = shutil.copytree(large, tmp_path / "busy")

    def replace(done: int, _: int) -> None:
        old = shards.files(source, "data-*.safetensors")
        if len(old) != 2:
            return
        smckpt.save({"a": torch.ones(3)}, checkpoint_id=source)  # the first of them is copied
        end = time.monotonic() + seconds(30)
        while set(old) & set(shards.files(source, "data-*.safetensors")):  # the sweep comes after
            assert time.monotonic() < end, "what was superseded is not swept"
            time.sleep(0.01)

    with pytest.raises(CheckpointReplacedError, match="a newer save replaced.*copy again"):
        copy_checkpoint(str(source), target, threads=1, progress=replace)
    with pytest.raises(CheckpointNotFoundError):
        copy_checkpoint(target, str(tmp_path / "never"))
    again = copy_checkpoint(str(source), target)
    assert verify_checkpoint(again.target).ok


def test_another_checkpoint_at_the_target_is_neither_hidden_nor_replaced(
    step: Path, large: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="already has another checkpoint"):
        copy_checkpoint(str(large), str(step))
    with pytest.raises(UsageError, match="already has another checkpoint"):
        copy_checkpoint(str(large), str(step / "part0"))
    # one that would only be hidden from below
    shutil.copytree(large, tmp_path / "target" / "part1")
    with pytest.raises(UsageError, match="part1"):
        copy_checkpoint(str(step), str(tmp_path / "target"))


def test_places_that_make_no_sense_are_refused(step: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the same place"):
        copy_checkpoint(str(step), f"{step}/")
    with pytest.raises(UsageError, match="one group of a step") as raised:
        copy_checkpoint(str(step / "part0"), str(tmp_path / "target"))
    assert str(step) in raised.value.remedy
    with pytest.raises(CheckpointNotFoundError):
        copy_checkpoint(str(tmp_path / "absent"), str(tmp_path / "target"))
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        copy_checkpoint(str(step), str(tmp_path / "file"))
