"""A store that smckpt does not know comes in through `register_store`, or through an entry point of
an installed package; shelf.py is that package's module. The worker finds it, too."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

import smckpt
from smckpt.checkpoint.upkeep.transfer import copy_checkpoint
from smckpt.storage import Access, open_storage
from tests.doors import broken_shelf, shelf
from tests.doors.test_family_door import installed
from tests.support import child


def holds_checkpoints(place: str, folder: str) -> None:
    for step in (1, 2):
        state = {"model": {"w": torch.full((1000, 3), float(step))}, "step": step}
        smckpt.save(state, checkpoint_id=f"{place}/run/step-{step}", step=step)
    target = {"model": {"w": torch.zeros(1000, 3)}, "step": 0}
    newest = smckpt.latest_checkpoint(f"{place}/run")
    assert newest is not None
    smckpt.load(target, checkpoint_id=newest)
    assert target["step"] == 2
    assert torch.equal(target["model"]["w"], torch.full((1000, 3), 2.0))  # type: ignore[index]
    assert [found.step for found in smckpt.find_checkpoints(place)] == [1, 2]
    assert smckpt.verify_checkpoint(f"{place}/run/step-1").ok
    smckpt.export_hf(
        f"{place}/run/step-1", f"{place}/out", options=smckpt.ExportOptions(against_model=False)
    )
    assert "model.safetensors" in {info.name for info in open_storage(f"{place}/out").list()}
    copied = copy_checkpoint(f"{place}/run/step-2", f"{folder}/copy")
    assert smckpt.verify_checkpoint(copied.target).ok


def test_a_registered_store_holds_checkpoints(tmp_path: Path) -> None:
    smckpt.register_store("shelf", shelf.ShelfStorage)
    holds_checkpoints(f"shelf://{tmp_path}/shelf.sqlite", str(tmp_path))


def test_the_store_of_an_installed_package_holds_checkpoints(tmp_path: Path) -> None:
    site = installed(tmp_path, "smckpt.stores", "bookcase = tests.doors.shelf:ShelfStorage")
    child.run(
        """
        import sys
        from tests.doors.test_store_door import holds_checkpoints
        holds_checkpoints(*sys.argv[1:])
        """,
        f"bookcase://{tmp_path}/shelf.sqlite",
        str(tmp_path),
        timeout=300,
        PYTHONPATH=os.pathsep.join([str(site), *map(os.path.abspath, sys.path)]),
    )


def test_a_store_that_the_worker_could_not_import_is_refused() -> None:
    class Inner(shelf.ShelfStorage):
        """It has no name in a module."""

    with pytest.raises(smckpt.UsageError, match="cannot import"):
        smckpt.register_store("inner", Inner)
    with pytest.raises(smckpt.UsageError, match="the store 's3' exists already"):
        smckpt.register_store("s3", shelf.ShelfStorage)
    smckpt.register_store("lost", "no_such_module:Store")
    with pytest.raises(smckpt.UsageError, match="cannot import no_such_module:Store"):
        Access().open("lost://x")


SAVES = ("making", "create_file", "write_at", "finish", "put_exclusive", "list")
LOADS = ("making", "read_into", "size", "list")


@pytest.mark.parametrize(
    "kind", ["OddError", "KeyError", "ValueError", "FileNotFoundError", "PanicError", "MuteError"]
)
@pytest.mark.parametrize("verb", SAVES)
def test_what_a_store_of_others_raises_in_a_save_is_told_as_its_own(
    tmp_path: Path, verb: str, kind: str
) -> None:
    smckpt.register_store("broken", broken_shelf.BrokenStorage)
    base = f"{tmp_path}/shelf.sqlite"
    state = {"model": {"w": torch.arange(100.0)}}
    smckpt.save(state, checkpoint_id=f"broken://{base}/one")
    broken_shelf.break_in(base, verb, kind)
    with pytest.raises(smckpt.CheckpointError) as caught:
        smckpt.save(state, checkpoint_id=f"broken://{base}/two")
    told_as_theirs(str(caught.value), verb, kind)


@pytest.mark.parametrize(
    "kind", ["OddError", "TypeError", "AttributeError", "OSError", "PanicError", "MuteError"]
)
@pytest.mark.parametrize("verb", LOADS)
def test_what_a_store_of_others_raises_in_a_read_is_told_as_its_own(
    tmp_path: Path, verb: str, kind: str
) -> None:
    smckpt.register_store("broken", broken_shelf.BrokenStorage)
    base = f"{tmp_path}/shelf.sqlite"
    state = {"model": {"w": torch.arange(100.0)}}
    place = f"broken://{base}/one"
    smckpt.save(state, checkpoint_id=place)
    broken_shelf.break_in(base, verb, kind)
    for read in (
        lambda: smckpt.load({"model": {"w": torch.zeros(100)}}, checkpoint_id=place),
        lambda: smckpt.latest_checkpoint(place),
        lambda: smckpt.verify_checkpoint(place),
    ):
        with pytest.raises(smckpt.StorageError) as caught:
            read()
        told_as_theirs(str(caught.value), verb, kind)


@pytest.mark.parametrize(
    ("verb", "kind"),
    [("put_exclusive", "None"), ("size", "None"), ("size", "negative"),
     *(("list", kind) for kind in ("None", "text", "numbers", "bytes"))],
)  # fmt: skip
def test_what_a_store_of_others_returns_of_a_wrong_type_is_told_as_its_own(
    tmp_path: Path, verb: str, kind: str
) -> None:
    smckpt.register_store("broken", broken_shelf.BrokenStorage)
    base = f"{tmp_path}/shelf.sqlite"
    state = {"model": {"w": torch.arange(100.0)}}
    place = f"broken://{base}/one"
    smckpt.save(state, checkpoint_id=place)
    broken_shelf.break_in(base, verb, kind)
    wrong = re.escape(f"returned {str(broken_shelf.WRONG[kind])!r} from {verb}")
    with pytest.raises(smckpt.CheckpointError, match=wrong) as caught:
        if verb == "put_exclusive":
            smckpt.save(state, checkpoint_id=f"broken://{base}/two")
        else:
            smckpt.load({"model": {"w": torch.zeros(100)}}, checkpoint_id=place)
    assert "report it" not in str(caught.value)


@pytest.mark.parametrize(("verb", "kind"), [("list", "lazy"), ("list", "mute"), ("size", "mute")])
def test_what_a_store_of_others_returns_and_cannot_be_looked_at_is_told_as_its_own(
    tmp_path: Path, verb: str, kind: str
) -> None:
    smckpt.register_store("broken", broken_shelf.BrokenStorage)
    base = f"{tmp_path}/shelf.sqlite"
    smckpt.save({"w": torch.arange(100.0)}, checkpoint_id=f"broken://{base}/one")
    broken_shelf.break_in(base, verb, kind)
    with pytest.raises(smckpt.StorageError) as caught:
        smckpt.load({"w": torch.zeros(100)}, checkpoint_id=f"broken://{base}/one")
    told_as_theirs(str(caught.value), verb, "OddError")


def test_a_store_of_others_may_count_with_numpy(tmp_path: Path) -> None:
    smckpt.register_store("numpy", broken_shelf.NumpyStorage)
    there = f"numpy://{tmp_path}/shelf.sqlite/one"
    smckpt.save({"w": torch.arange(100.0)}, checkpoint_id=there)
    target = {"w": torch.zeros(100)}
    smckpt.load(target, checkpoint_id=there)
    assert torch.equal(target["w"], torch.arange(100.0))


def test_a_function_that_makes_no_store_is_refused(tmp_path: Path) -> None:
    smckpt.register_store("nostore", broken_shelf.makes_none)
    with pytest.raises(smckpt.UsageError, match="makes_none.*which is no Storage"):
        open_storage(f"nostore://{tmp_path}/x")


@pytest.mark.parametrize("kind", ["None", "text", "numbers", "bytes", "PanicError"])
def test_a_step_that_a_store_of_others_does_not_list_costs_itself(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The manager goes on to save, and its thread of retention to delete."""
    smckpt.register_store("broken", broken_shelf.BrokenStorage)
    base = f"{tmp_path}/shelf.sqlite"
    with smckpt.CheckpointManager(f"broken://{base}/run", keep_last_n=1, random=False) as run:
        run.save(1, {"w": torch.ones(2)}).wait()
        broken_shelf.break_in(base, "list", kind)
        with pytest.raises(smckpt.CheckpointError):
            run.save(2, {"w": torch.ones(2)}).wait()
        Path(f"{base}.broken").unlink()
        run.save(3, {"w": torch.ones(2)}).wait()
        run.save(4, {"w": torch.ones(2)}).wait()
    assert [found.step for found in smckpt.find_checkpoints(f"broken://{base}/run")][-1] == 4


def told_as_theirs(text: str, verb: str, kind: str) -> None:
    assert "report it" not in text and "fault of smckpt" not in text, text
    assert f"{kind} in " in text and ("is broken" in text or "its text raises" in text), text
    assert "tests.doors.broken_shelf." in text and "error of that store" in text, text
    assert "/one" in text or "/two" in text or "shelf.sqlite" in text, text
