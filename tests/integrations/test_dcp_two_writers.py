"""A directory to which both torch's own DCP and smckpt have saved: every reader sees the newest
checkpoint, or refuses by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

import smckpt
from smckpt.checkpoint.commits import commit
from smckpt.cli.app import app
from smckpt.errors import CheckpointError, UsageError
from smckpt.integrations.dcp import calls
from smckpt.meeting.group import group_at
from smckpt.run import provide
from smckpt.storage import open_storage
from tests.support.launch import run_ranks

REFUSAL = "two checkpoints are in this directory"


class Planner(DefaultLoadPlanner):
    pass


def state(value: float) -> dict[str, Any]:
    return {"a": torch.full((4,), value)}


def by_stock(place: str, value: float) -> None:
    dcp.save(state(value), checkpoint_id=place, no_dist=True)


def by_stock_each_rank_alone(place: str, value: float) -> None:
    dcp.save(state(value), checkpoint_id=place, no_dist=True)
    (Path(place) / ".metadata").rename(Path(place) / "__0.metadata")


def by_smckpt(place: str, value: float) -> None:
    smckpt.save(state(value), checkpoint_id=place)


def by_our_planner(place: str, value: float) -> None:
    smckpt.save(state(value), checkpoint_id=place, planner=DefaultSavePlanner())


def by_door(place: str, value: float) -> None:
    calls.save(state(value), checkpoint_id=place)


def by_door_in_background(place: str, value: float) -> None:
    calls.async_save(state(value), checkpoint_id=place).result()


def by_doors_writer(place: str, value: float) -> None:
    dcp.save(state(value), storage_writer=calls.FileSystemWriter(place), no_dist=True)


OURS = [by_smckpt, by_our_planner, by_door, by_door_in_background, by_doors_writer]


def loaded(load: Callable[[dict[str, Any]], Any]) -> Any:
    target = state(0.0)
    try:
        load(target)
    except (CheckpointError, dcp.api.CheckpointException) as error:
        assert REFUSAL in str(error), error
        return REFUSAL
    return target["a"][0].item()


def shown(command: str, *args: str) -> Any:
    done = CliRunner().invoke(app, [command, *args])
    text = " ".join((done.output + repr(done.exception)).split())
    return REFUSAL if REFUSAL in text else done.exit_code


def readers(place: str) -> dict[str, Any]:
    return {
        "dcp.load": loaded(lambda t: calls.load(t, checkpoint_id=place)),
        "reader": loaded(lambda t: calls.load(t, storage_reader=calls.FileSystemReader(place))),
        "planner": loaded(lambda t: calls.load(t, checkpoint_id=place, planner=Planner())),
        "stock load": loaded(
            lambda t: dcp.load(t, storage_reader=calls.FileSystemReader(place), no_dist=True)
        ),
        "smckpt.load": loaded(lambda t: smckpt.load(t, checkpoint_id=place)),
        "its planner": loaded(lambda t: smckpt.load(t, checkpoint_id=place, planner=Planner())),
        "no target": loaded(
            lambda t: t.update(smckpt.load(checkpoint_id=place))  # type: ignore[arg-type]
        ),
    }


@pytest.mark.parametrize("save", OURS)
@pytest.mark.parametrize("stock", [by_stock, by_stock_each_rank_alone])
def test_a_save_of_ours_replaces_what_dcp_wrote(
    tmp_path: Path, save: Callable[[str, float], None], stock: Callable[[str, float], None]
) -> None:
    place = str(tmp_path)
    stock(place, 1.0)
    save(place, 2.0)
    assert set(readers(place).values()) == {2.0}
    left = [path.name for path in tmp_path.iterdir()]
    assert not [name for name in left if name.endswith((".metadata", ".distcp"))]
    assert shown("show", place) == shown("verify", place) == 0


@pytest.mark.parametrize("save", [by_smckpt, by_our_planner])
def test_a_save_of_dcp_over_ours_is_refused_by_every_reader_until_one_saves_again(
    tmp_path: Path, save: Callable[[str, float], None]
) -> None:
    place = str(tmp_path)
    save(place, 2.0)
    by_stock(place, 3.0)
    assert set(readers(place).values()) == {REFUSAL}
    for command in ("show", "verify"):
        assert shown(command, place) == REFUSAL
    assert shown("export", place, str(tmp_path / "hub")) == REFUSAL
    assert shown("convert", place, str(tmp_path / "other"), "--to", "torch") == REFUSAL
    save(place, 4.0)
    assert set(readers(place).values()) == {4.0}
    by_stock(place, 5.0)
    smckpt.remove(place)  # the remedy that the message names
    assert set(readers(place).values()) == {5.0}


@pytest.mark.parametrize("save", OURS)
def test_a_kill_at_the_commit_leaves_one_checkpoint_that_reads(
    tmp_path: Path, save: Callable[[str, float], None]
) -> None:
    place, kept = str(tmp_path / "c"), tmp_path / "kept"
    by_stock(place, 1.0)
    shutil.copytree(place, kept)
    save(place, 2.0)
    # before the deletion: both are whole, and the commit names the other one
    shutil.copytree(kept, place, dirs_exist_ok=True)
    assert set(readers(place).values()) == {2.0}
    # before the commit: only files of a save that nobody committed are there
    for path in Path(place).glob("manifest-*"):
        path.unlink()
    assert set(readers(place).values()) == {1.0}
    assert shown("show", place) == 0
    save(place, 3.0)
    assert set(readers(place).values()) == {3.0}
    assert not list(Path(place).glob("*.distcp"))


def test_a_commit_stands_where_the_other_checkpoint_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_stock(str(tmp_path), 1.0)
    monkeypatch.setattr(commit, "delete_dcp", lambda *_: None)
    by_our_planner(str(tmp_path), 2.0)
    assert (tmp_path / ".metadata").exists()
    assert set(readers(str(tmp_path)).values()) == {2.0}


def test_overwrite_false_refuses_what_dcp_wrote(tmp_path: Path) -> None:
    by_stock(str(tmp_path), 1.0)
    writer = smckpt.DistributedFileSystemWriter(tmp_path, overwrite=False)
    with pytest.raises(UsageError, match="already exists"):
        smckpt.save(state(2.0), storage_writer=writer)
    assert set(readers(str(tmp_path)).values()) == {1.0}


def test_it_is_so_in_a_store(s3_root: str, tmp_path: Path) -> None:
    store = open_storage(s3_root)

    def put(value: float) -> None:
        by_stock(str(tmp_path / str(value)), value)
        for path in (tmp_path / str(value)).iterdir():
            store.delete(path.name)
            store.put(path.name, path.read_bytes())

    def read() -> Any:
        found = {
            loaded(lambda t: calls.load(t, checkpoint_id=s3_root)),
            loaded(lambda t: smckpt.load(t, checkpoint_id=s3_root)),
            loaded(lambda t: smckpt.load(t, checkpoint_id=s3_root, planner=Planner())),
        }
        return found.pop() if len(found) == 1 else found

    put(1.0)
    smckpt.save(
        state(2.0), checkpoint_id=s3_root, options=smckpt.SaveOptions(queue="store")
    )  # a worker with credentials
    assert read() == 2.0 and not store.names(".metadata", "__")
    put(3.0)
    assert read() == REFUSAL
    by_our_planner(s3_root, 4.0)
    assert read() == 4.0 and not store.names(".metadata", "__")


def in_groups(root: str) -> list[Any]:
    rank, world = dist.get_rank(), [[0], [1]]
    for place in (root, f"{root}/g{rank}"):
        if rank == 0 or place != root:
            by_stock(place, 1.0)
    dist.barrier()
    own: dict[str, Any] = {
        "checkpoint_id": f"{root}/g{rank}",
        "process_group": group_at([rank]),
    }
    smckpt.save(state(2.0), **own, options=smckpt.SaveOptions(groups=world))
    own["options"] = smckpt.LoadOptions(groups=world, timeout=20)
    dist.barrier()
    seen = [loaded(lambda t: smckpt.load(t, **own))]
    seen.append(sorted(p.name for p in Path(root).rglob("*") if "metadata" in p.name))
    dist.barrier()
    if rank == 1:
        by_stock(f"{root}/g1", 3.0)
    dist.barrier()
    seen.append(loaded(lambda t: smckpt.load(t, **own)))
    return seen


def test_the_groups_of_a_step_replace_it_in_their_directories_and_above(tmp_path: Path) -> None:
    assert run_ranks(in_groups, 2, str(tmp_path)) == [[2.0, [], REFUSAL]] * 2


def test_under_the_door_a_program_reads_what_it_wrote_last(tmp_path: Path) -> None:
    by_stock(str(tmp_path), 1.0)
    with provide(["dcp"]):
        dcp.save(state(2.0), checkpoint_id=tmp_path)
        for given in (
            {"checkpoint_id": tmp_path},
            {"storage_reader": dcp.FileSystemReader(tmp_path)},
        ):
            dcp.load(target := state(0.0), **given)
            assert target["a"][0] == 2.0
