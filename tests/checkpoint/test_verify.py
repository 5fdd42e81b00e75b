"""Verifying: every flipped bit, missing file and element that is stored never or twice is told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import smckpt
from smckpt.checkpoint.records.crc import BLOCK
from smckpt.checkpoint.records.rows import encode_rows
from smckpt.checkpoint.upkeep.transfer import copy_checkpoint
from smckpt.checkpoint.upkeep.verify import verify_checkpoint
from smckpt.errors import CheckpointNotFoundError, CheckpointReplacedError
from smckpt.layout.image import compile_layout
from smckpt.layout.mesh import Mesh
from smckpt.layout.strided import Box
from smckpt.storage.s3.config import StoreOptions
from smckpt.storage.s3.storage import S3Storage
from tests.support import saves, synthetic
from tests.support.faults.proxy import faulty_proxy
from tests.support.limits import seconds
from tests.support.s3 import Server
from tests.support.saves import hybrid
from tests.support.synthetic import Step, boxes, flip, kept, on_mesh

SHAPES = {"w": (10, 6), "b": (7,)}
MESH = hybrid((0, 1, 2, 3), 2)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A step of two replication groups."""
    rules = [on_mesh("w", (10, 6), MESH, "R S0"), on_mesh("b", (7,), MESH, "R R")]
    made = synthetic.state([*rules, kept("step")], {**synthetic.whole({**SHAPES, "step": ()})})
    Step(tmp_path / "step", {"part0": (0, 2), "part1": (1, 3)}, made).save()
    return tmp_path / "step"


def files_of(root: Path) -> Iterator[Path]:
    """All files that a load may read: leases are not among them."""
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.name.startswith("epoch-"):
            yield path


def test_a_whole_checkpoint_has_no_problems_and_is_counted(step: Path) -> None:
    told: list[tuple[int, int]] = []
    report = verify_checkpoint(str(step), progress=lambda done, total: told.append((done, total)))
    data = list(step.rglob("data-*.safetensors"))
    assert report.ok and report.problems == ()
    assert report.files == len(data) == 4
    assert report.nbytes == sum(path.stat().st_size for path in data)
    assert told[-1] == (report.nbytes, report.nbytes)


def test_a_quick_look_finds_all_but_changed_data(step: Path) -> None:
    assert verify_checkpoint(str(step), quick=True).to_json()["quick"] is True
    for path in files_of(step):
        body = path.read_bytes()
        for what, broken in (("short", body[:-1]), ("empty", b""), ("missing", None)):
            path.unlink()
            if broken is not None:
                path.write_bytes(broken)
            if broken is None and path.name.startswith("record-"):
                with pytest.raises(CheckpointNotFoundError):
                    verify_checkpoint(str(step), quick=True)
            else:
                report = verify_checkpoint(str(step), quick=True)
                named = [problem.path for problem in report.problems]
                assert any(path.name in one for one in named), (path.name, what, named)
            path.write_bytes(body)
        flip(path, len(body) - 1)
        data = path.suffix == ".safetensors"
        assert verify_checkpoint(str(step), quick=True).ok == (data and len(body) > BLOCK)
        path.write_bytes(body)
    assert verify_checkpoint(str(step), quick=True).ok


def test_a_quick_look_reads_no_data(tmp_path: Path) -> None:
    smckpt.save({"w": torch.ones(3 << 18)}, checkpoint_id=tmp_path / "c")
    (data,) = (tmp_path / "c").rglob("data-*.safetensors")
    flip(data, 2 * BLOCK)
    quick, whole = (verify_checkpoint(tmp_path / "c", quick=quick) for quick in (True, False))
    assert quick.ok and not whole.ok
    assert (quick.files, quick.tensors, quick.nbytes) == (whole.files, whole.tensors, whole.nbytes)


def test_a_quick_look_asks_s3_for_the_checksums_that_it_keeps(
    s3_root: str, s3_server: Server, monkeypatch: Any
) -> None:
    smckpt.save(
        {"w": torch.ones(3 << 18)},
        checkpoint_id=s3_root,
        options=smckpt.SaveOptions(queue="verify-s3"),
    )
    with faulty_proxy(s3_server.endpoint) as proxy:
        config = {"endpoint": proxy.endpoint}
        proxy.seen.clear()
        assert verify_checkpoint(s3_root, quick=True, storage=config).ok
        assert any(line.startswith("HEAD") and "data-" in line for line in proxy.seen)
    monkeypatch.setattr(S3Storage, "stored_crc64", lambda *_: 1)  # it keeps that of other bytes
    (problem,) = verify_checkpoint(s3_root, quick=True).problems
    assert "another checksum" in problem.what and "data-" in problem.path


def test_a_flipped_bit_anywhere_in_any_file_is_found_and_its_file_named(step: Path) -> None:
    files = list(files_of(step))
    kinds = {path.name.split("-")[0] + path.suffix for path in files}
    assert kinds == {"data.safetensors", "data.crc", "part.json", "manifest.json", "record.json"}
    for path in files:
        size = path.stat().st_size
        # The first bytes (a header's length), the last, and places all over.
        for offset in sorted({0, 7, 8, size - 1, *range(0, size, max(1, size // 12))}):
            if offset >= size:
                continue
            flip(path, offset)
            report = verify_checkpoint(str(step), threads=1)
            assert not report.ok, f"bit at {offset} of {path.name}"
            named = {problem.path for problem in report.problems}
            assert any(path.name in name for name in named), (path.name, offset, report.problems)
            flip(path, offset)
    assert verify_checkpoint(str(step)).ok


def test_a_block_that_changes_on_its_way_from_s3_is_read_again_before_it_is_called_damaged(
    step: Path, s3_root: str, s3_server: Server
) -> None:
    copy_checkpoint(str(step), s3_root)
    with faulty_proxy(s3_server.endpoint) as proxy:
        config = StoreOptions.from_mapping(
            {"endpoint": proxy.endpoint}, StoreOptions.from_environment()
        )
        proxy.spoil("GET", "wrong answer", 2, path="r00002-0.safetensors")
        assert verify_checkpoint(s3_root, storage=config).ok
        assert proxy.left == 0
        proxy.spoil("GET", "wrong answer", 3, path="r00002-0.safetensors")
        [problem] = verify_checkpoint(s3_root, storage=config).problems
    assert "r00002-0.safetensors" in problem.path
    assert "bytes 0 to" in problem.what


def test_a_missing_file_is_found_and_named(step: Path) -> None:
    for path in files_of(step):
        if path.name.startswith("record-"):
            continue  # without it there is no checkpoint, see below
        saved = path.read_bytes()
        path.unlink()
        report = verify_checkpoint(str(step), threads=1)
        assert not report.ok, path.name
        named = " ".join(problem.path for problem in report.problems)
        assert path.name in named, (path.name, report.problems)
        path.write_bytes(saved)
    assert verify_checkpoint(str(step)).ok


def test_what_a_newer_save_sweeps_meanwhile_is_not_called_damaged(tmp_path: Path) -> None:
    smckpt.save({"a": torch.ones(5 << 20)}, checkpoint_id=tmp_path)  # pieces of 8 MiB: three
    (old,) = tmp_path.glob("data-*.safetensors")
    told: list[int] = []

    def replace(done: int, _: int) -> None:
        if not told:
            smckpt.save({"a": torch.ones(3)}, checkpoint_id=tmp_path)
            until = time.monotonic() + seconds(60)  # the sweep goes on after the save
            while old.exists() and time.monotonic() < until:
                time.sleep(0.01)
        told.append(done)

    with pytest.raises(CheckpointReplacedError, match="a newer save replaced.*verify again"):
        verify_checkpoint(str(tmp_path), threads=1, progress=replace)
    assert verify_checkpoint(str(tmp_path)).ok


def test_without_its_record_there_is_nothing_to_verify(step: Path) -> None:
    next(step.glob("record-*")).unlink()
    with pytest.raises(CheckpointNotFoundError):
        verify_checkpoint(str(step))


def test_a_file_that_was_cut_or_has_grown_is_told_with_both_sizes(step: Path) -> None:
    path = next(step.rglob("data-*.safetensors"))
    whole = path.read_bytes()
    for changed in (whole[:-1], whole + b"\0", b""):
        path.write_bytes(changed)
        what = [p.what for p in verify_checkpoint(str(step)).problems if p.path == str(path)]
        assert f"has {len(changed)} bytes, but {len(whole)} were written" in what


def test_damage_in_several_files_is_all_listed(step: Path) -> None:
    damaged = sorted(step.rglob("data-*.safetensors"))
    for path in damaged:
        flip(path, path.stat().st_size - 1)
    report = verify_checkpoint(str(step))
    assert {p.path for p in report.problems} >= {str(path) for path in damaged}


def test_an_element_that_no_shard_holds_is_counted_and_located(tmp_path: Path) -> None:
    held = {0: [Box((0, 0), (4, 6))], 1: [Box((5, 0), (5, 6))]}  # row 4 is nobody's
    rule = boxes("w", (10, 6), held)
    synthetic.save(tmp_path / "c", (0, 1), synthetic.state([rule], synthetic.whole(SHAPES)))
    (problem,) = verify_checkpoint(str(tmp_path / "c")).problems
    assert "6 elements of 'model.w'" in problem.what and "[4, 0]" in problem.what


def test_a_rank_that_never_saved_its_shard_is_a_hole(tmp_path: Path) -> None:
    rule = on_mesh("w", (10, 6), Mesh(("shard",), (2,), (0, 1)), "S0")
    synthetic.save(tmp_path / "c", (0,), synthetic.state([rule], synthetic.whole(SHAPES)))
    (problem,) = verify_checkpoint(str(tmp_path / "c")).problems
    assert "30 elements" in problem.what


def test_one_group_of_a_step_is_not_blamed_for_what_the_others_hold(step: Path) -> None:
    assert verify_checkpoint(str(step / "part0")).ok


def test_elements_that_are_stored_twice_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas that each wrote all, where their group should have shared it."""

    def alone(entries: Any, *, rank: int, group_ranks: Any) -> Any:
        shared = compile_layout(entries, rank=rank, group_ranks=group_ranks)
        own = compile_layout(entries, rank=rank, group_ranks=(rank,))
        return replace(own, classes=shared.classes)

    monkeypatch.setattr(saves, "compile_layout", alone)
    rule = on_mesh("b", (7,), hybrid((0, 1), 2), "R R")
    synthetic.save(tmp_path / "c", (0, 1), synthetic.state([rule], synthetic.whole(SHAPES)))
    report = verify_checkpoint(str(tmp_path / "c"))
    assert any("twice" in problem.what or "overlap" in problem.what for problem in report.problems)


def test_a_file_that_holds_more_than_the_manifest_knows_is_told(tmp_path: Path) -> None:
    rules = [kept("known"), kept("extra")]
    made = synthetic.state(rules, synthetic.whole({"known": (), "extra": ()}), lambda r, k: b"abcd")
    known = encode_rows([e for e in made(0)[0] if e.key == "model.known"])
    synthetic.save(tmp_path / "c", (0,), made, layout=lambda rank: known)
    (problem,) = verify_checkpoint(str(tmp_path / "c")).problems
    assert "'model.extra'" in problem.what and "data-" in problem.path
