"""A temporary directory that is full, or that cannot be written, is an error with its name."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support import child
from tests.support.limits import seconds
from tests.support.models import references as ref

ACT = """
import sys, torch, smckpt
from smckpt import errors
act, source, out, config = sys.argv[1:]
options = smckpt.ExportOptions(card=False)
acts = {
    "load": lambda: smckpt.load(checkpoint_id=source),
    "export": lambda: smckpt.export_hf(source, out, options=options),
    "import": lambda: smckpt.import_hf(source, out, smckpt.Parallel("mcore_te", tp=2)),
    "compare": lambda: print(*smckpt.export_hf(source, out, config=config, options=options).notes),
}
if act == "compare":
    import transformers  # then no child process compares
try:
    acts[act]()
except errors.StorageError as error:
    print(error)
"""


@pytest.fixture(params=["load", "export", "import", "compare"])
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """An act, and a small file system, which is full as soon as it begins. Python passes over a
    temporary directory that has no room for one file."""
    point = tmp_path / "full"
    point.mkdir()
    room = "size=8k" if request.param == "load" else "nr_inodes=2"
    mount = ["mount", "-t", "tmpfs", "-o", room, "tmpfs", str(point)]
    if os.geteuid() or subprocess.run(mount, check=False, timeout=seconds(30)).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield request.param, point
    subprocess.run(["umount", "-l", str(point)], check=False, timeout=seconds(30))


def test_a_full_temporary_directory_is_named(tmp_path: Path, full: tuple[str, Path]) -> None:
    """A transposed tensor is ordered there: to write through a map would have killed the process
    (SIGBUS). A config beside the weights is copied there, and transformers reads one from there."""
    act, temporary = full
    model = ref.model("qwen2")
    model.save_pretrained(tmp_path / "hub")
    source = tmp_path / "hub"
    if act in ("load", "compare"):
        source = tmp_path / "state.pt"
        state = {n: t.t().contiguous().t() if t.dim() == 2 else t
                 for n, t in model.state_dict().items()}  # fmt: skip
        # a name that no table knows, so that transformers compares
        torch.save({**state, "model.extra": torch.ones(3)} if act == "compare" else state, source)
    text = child.run(
        ACT, act, str(source), str(tmp_path / "out"), str(tmp_path / "hub"), TMPDIR=str(temporary)
    )
    if act == "compare":
        assert "cannot read the config" in text
        return
    assert "in the temporary directory: the disk is full" in text
    assert str(temporary) in text
    assert not (tmp_path / "out").exists()
