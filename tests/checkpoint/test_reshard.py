"""A checkpoint written anew for another number of shards has the same tensors and values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import smckpt
from smckpt import find_checkpoints, verify_checkpoint
from smckpt.checkpoint.commits import commit
from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.checkpoint.records.format import parse_name
from smckpt.checkpoint.upkeep.compare import compare_checkpoints
from smckpt.checkpoint.upkeep.reshard import reshard_checkpoint
from smckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError, UsageError
from smckpt.layout.mesh import Mesh
from smckpt.storage import open_storage
from tests.support import synthetic
from tests.support.faults.copies import contents, killed_at
from tests.support.saves import hybrid
from tests.support.synthetic import Rule, Step, flat, kept, members, on_mesh


def raising(error: Exception) -> Any:
    def call(*_: Any) -> Any:
        raise error

    return call


SHAPES = {"w": (10, 6), "b": (7,), "s": (), "u": (5, 4), "v": (9,)}
TP = Mesh(("dp", "tp"), (2, 2), (0, 1, 2, 3))
HSDP = hybrid((0, 1, 2, 3), 2)


def rules_of(how: str) -> list[Rule]:
    if how == "hsdp":
        return [on_mesh(n, s, HSDP, "R S0" if s else "R R") for n, s in SHAPES.items()]
    if how == "fsdp+tp":
        return [
            on_mesh("w", SHAPES["w"], TP, "SS0/2 S0"),
            on_mesh("u", SHAPES["u"], TP, "S0 S1"),
            *(on_mesh(n, SHAPES[n], TP, "R R") for n in ("b", "s", "v")),
        ]
    shapes = {n: s for n, s in SHAPES.items() if s}
    one = flat(shapes, HSDP) if how == "flat" else None
    return [one] if one is not None else members(shapes, HSDP)


def saved(at: Path, how: str) -> Path:
    arrays = synthetic.whole(SHAPES)

    def own(rank: int, key: str) -> bytes:
        return bytes([rank, len(key), 0, 0])

    made = synthetic.state([*rules_of(how), kept("rng")], {**arrays, "rng": arrays["s"]}, own)
    groups = {"part0": (0, 2), "part1": (1, 3)} if how == "hsdp" else None
    if groups:
        Step(at, groups, made).save(step=40)
    else:
        synthetic.save(at, (0, 1, 2, 3), made, step=40)
    return at


@pytest.mark.parametrize("shard", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("how", ["hsdp", "fsdp+tp", "flat", "members"])
def test_all_tensors_are_those_of_the_source_at_every_degree(
    tmp_path: Path, how: str, shard: int
) -> None:
    source = saved(tmp_path / "source", how)
    report = reshard_checkpoint(source, tmp_path / "target", shard=shard)
    assert (report.ranks, report.kind) == (shard, "FULL" if shard == 1 else "SHARDED")
    assert verify_checkpoint(tmp_path / "target").ok
    apart = compare_checkpoints(source, tmp_path / "target", ignore=["model.rng"])
    assert [one for one in apart.differences if not one.name.startswith("rank")] == []
    target = open_catalogue(open_storage(str(tmp_path / "target")))
    assert target.step == 40 and target.object_ranks == tuple(range(shard))
    for rank in range(shard):  # rank i of the new follows rank i mod n of the saved
        assert target.objects(rank)["rank"][1] == rank % 4
        (row,) = (r for r in target.rows_by_key["model.rng"] if rank in r.ranks)
        (file, slot), *_ = target.slots(row, (rank,))
        data = file.read(slot.offset, slot.offset + slot.nbytes)
        assert data == bytes([rank % 4, len("model.rng"), 0, 0])


def test_each_rank_has_its_share(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", "hsdp")
    reshard_checkpoint(source, tmp_path / "target", shard=2)
    arrays = synthetic.whole(SHAPES)
    target = open_catalogue(open_storage(str(tmp_path / "target")))
    (row,) = target.rows_by_key["model.w"]
    for rank, half in enumerate(np.split(arrays["w"], 2)):
        (file, slot), *_ = target.slots(row, (rank,))
        data = file.read(slot.offset, slot.offset + slot.nbytes)
        assert bytes(data) == half.tobytes()


@pytest.mark.parametrize("shard", [1, 3])
def test_a_model_and_its_optimizer_load_from_it(tmp_path: Path, shard: int) -> None:
    def made(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(8, 5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer, "step": seed}

    one, other = made(1), made(2)
    smckpt.save(one, checkpoint_id=tmp_path / "source")
    reshard_checkpoint(tmp_path / "source", tmp_path / "target", shard=shard)
    smckpt.load(other, checkpoint_id=tmp_path / "target")
    assert other["step"] == 1
    for a, b in zip(one["model"].parameters(), other["model"].parameters(), strict=True):
        assert torch.equal(a, b)
        mine, its = one["optimizer"].state[a], other["optimizer"].state[b]
        assert all(torch.equal(mine[key], its[key]) for key in mine)
    assert other["optimizer"].param_groups[0]["lr"] == 0.1


def test_from_s3_to_s3(tmp_path: Path, s3_root: str) -> None:
    source = saved(tmp_path / "source", "flat")
    reshard_checkpoint(source, f"{s3_root}/a", shard=3)
    reshard_checkpoint(f"{s3_root}/a", f"{s3_root}/b", shard=2)
    assert verify_checkpoint(f"{s3_root}/b").ok
    apart = compare_checkpoints(source, f"{s3_root}/b", ignore=["model.rng"])
    assert [one for one in apart.differences if not one.name.startswith("rank")] == []


def test_what_cannot_be_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", "hsdp")
    for shard in (0, -1, True, 1.5):
        wrong: Any = shard
        with pytest.raises(UsageError):
            reshard_checkpoint(source, tmp_path / "target", shard=wrong)
    with pytest.raises(UsageError, match="one group of a step"):
        reshard_checkpoint(source / "part0", tmp_path / "target", shard=2)
    with pytest.raises(UsageError, match="not empty"):
        reshard_checkpoint(source, source, shard=2)
    with pytest.raises(CheckpointNotFoundError):
        reshard_checkpoint(tmp_path / "absent", tmp_path / "target", shard=2)
    victim = next(source.rglob("data-*r00003-0.safetensors"))
    synthetic.flip(victim, victim.stat().st_size - 1)
    with pytest.raises(CorruptCheckpointError, match=victim.name):
        reshard_checkpoint(source, tmp_path / "target", shard=2)
    assert contents(tmp_path / "target") == {}


def test_a_try_after_a_kill_at_any_call_completes_and_sweeps(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", "flat")
    for moment in range(1000):
        target = tmp_path / f"target{moment}"
        killed = killed_at(
            moment, lambda at=target: reshard_checkpoint(source, at, shard=2), calls=True
        )
        if not (target.is_dir() and find_checkpoints(target)):
            reshard_checkpoint(source, target, shard=2)
        assert verify_checkpoint(target).ok
        if not killed:
            break
        found = {p.session for n in os.listdir(target) if (p := parse_name(n)) is not None}
        assert len(found - {""}) == 1, sorted(os.listdir(target))  # a lease's name has none
    assert moment > 20


def test_a_try_after_a_failed_commit_completes(tmp_path: Path, monkeypatch: Any) -> None:
    source, target = saved(tmp_path / "source", "flat"), tmp_path / "target"
    refuse = StorageError("no space", remedy="free some", path=str(target))
    with monkeypatch.context() as patched:
        patched.setattr(commit, "publish_manifest", raising(refuse))
        with pytest.raises(StorageError, match="no space"):
            reshard_checkpoint(source, target, shard=2)
    reshard_checkpoint(source, target, shard=2)
    assert verify_checkpoint(target).ok
    with pytest.raises(UsageError, match="not empty"):
        reshard_checkpoint(source, target, shard=2)


def test_files_of_others_beside_what_a_kill_left_are_no_leftovers(tmp_path: Path) -> None:
    source, target = saved(tmp_path / "source", "flat"), tmp_path / "target"
    assert killed_at(12, lambda: reshard_checkpoint(source, target, shard=2), calls=True)
    assert os.listdir(target)
    (target / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        reshard_checkpoint(source, target, shard=2)
    assert (target / "notes.txt").read_text() == "mine"
