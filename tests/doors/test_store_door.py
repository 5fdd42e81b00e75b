"""A store that smckpt does not know comes in through `register_store`, or through an entry point of
an installed package; shelf.py is that package's module. The worker finds it, too."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import smckpt
from smckpt.checkpoint.transfer import copy_checkpoint
from smckpt.storage import Access, open_storage
from tests.doors import shelf
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
    smckpt.export_hf(f"{place}/run/step-1", f"{place}/out", against_model=False)
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
