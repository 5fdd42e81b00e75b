"""One export by several processes: the same files, and nothing that loads where one fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from smckpt import ExportOptions, errors, export_hf
from smckpt.translate.exports.options import ExportGroup, export_group_of, shares
from tests.support.launch import ROOT, run_ranks
from tests.support.limits import seconds
from tests.support.models import references as ref
from tests.support.models import shards

SMALL = ExportOptions(max_shard_size="100KB", against_model=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """One checkpoint that is whole, and one that has a NaN in its last tensor."""
    folder = tmp_path_factory.mktemp("saved")
    model = ref.model("llama")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.config.save_pretrained(folder / "config")
    for name in ("whole", "nan"):
        shards.write(folder / name, 2, lambda r: shards.fsdp2(state, r, 2))
        state["lm_head.weight"][7, 7] = float("nan")
    export_hf(folder / "whole", folder / "hf", config=folder / "config", options=SMALL)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def raised(act: Any) -> str:
    try:
        act()
    except errors.CheckpointError as error:
        return f"{type(error).__name__} {error}"
    return ""


# -- on three ranks --------------------------------------------------------------------------------


def all_cases(saved: Path, folder: Path) -> dict[str, Any]:
    rank, told = dist.get_rank(), {}
    options = replace(SMALL, process_group=dist.group.WORLD)
    common: dict[str, Any] = {"config": saved / "config", "options": options}
    seen: list[tuple[int, int]] = []
    noted = replace(options, progress=lambda done, all_: seen.append((done, all_)))
    report = export_hf(saved / "whole", folder / "hf", config=saved / "config", options=noted)
    told["report"] = (report.files, report.nbytes, report.notes)
    told["seen"] = seen[-1:]
    told["not empty"] = raised(lambda: export_hf(saved / "whole", folder / "hf", **common))
    told["nan"] = raised(lambda: export_hf(saved / "nan", folder / "nan", **common))
    allows = replace(options, allow_nonfinite=True)
    allowed = export_hf(saved / "nan", folder / "allowed", **{**common, "options": allows})
    told["counts"] = allowed.nonfinite
    dtype = "bfloat16" if rank == 1 else None
    told["other"] = raised(
        lambda: export_hf(saved / "whole", folder / "other", dtype=dtype, **common)
    )
    missing = saved / ("none" if rank == 2 else "whole")
    told["missing"] = raised(lambda: export_hf(missing, folder / "missing", **common))
    for who in (0, 2):  # before they meet
        config = saved / ("none" if rank == who else "config")
        began = time.monotonic()
        told["config", who] = raised(
            lambda: export_hf(saved / "whole", folder / "x", **{**common, "config": config})  # noqa: B023
        )
        told["in time", who] = time.monotonic() - began < seconds(15)
    began = time.monotonic()
    told["interrupted"] = raised(lambda: interrupted(saved, folder / "interrupted", common))
    told["in time", 1] = time.monotonic() - began < seconds(15)
    alone = dist.new_group([0])
    told["no member"] = ""
    if rank:
        told["no member"] = raised(
            lambda: export_hf(
                saved / "whole", folder / "x", options=ExportOptions(process_group=alone)
            )
        )
    return told


def interrupted(saved: Path, out: Path, common: dict[str, Any]) -> None:
    """One is interrupted when it writes."""
    crew = export_group_of(dist.group.WORLD, timeout=100)
    crew.__class__ = Interrupted if dist.get_rank() == 1 else ExportGroup
    try:
        options = replace(SMALL, process_group=crew)
        export_hf(saved / "whole", out, **{**common, "options": options})
    except KeyboardInterrupt as error:
        raise errors.StateError("Ctrl-C") from error


class Interrupted(ExportGroup):
    def beat(self, done: int) -> None:
        raise KeyboardInterrupt("Ctrl-C")


def test_several_processes_write_what_one_writes_and_fail_together(tmp_path, saved):
    ranks = run_ranks(all_cases, 3, saved, tmp_path, timeout=100)
    wanted = contents(saved / "hf")
    assert contents(tmp_path / "hf") == wanted
    total = sum(len(data) for name, data in wanted.items() if name.endswith(".safetensors"))
    for told in ranks:
        files, nbytes, notes = told["report"]
        assert len(files) > 3 and 0 < nbytes < total
        assert all("names no class" in note for note in notes)
        assert "the directory is not empty" in told["not empty"]
        assert "lm_head.weight (1)" in told["nan"]
        assert told["counts"] == {"lm_head.weight": 1}
        assert "have different plans" in told["other"]
        for who in (0, 2):
            assert "UsageError" in told["config", who] and f"rank {who}," in told["config", who]
        assert "Ctrl-C" in told["interrupted"]
        assert all(told["in time", who] for who in range(3))
        assert "CheckpointNotFoundError" in told["missing"] and "rank 2" in told["missing"]
    assert ranks[0]["seen"] == [(nbytes, nbytes)] and not ranks[1]["seen"]
    assert "not a member" in ranks[1]["no member"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["allowed", "hf"]


SILENT = seconds(2)


class Dies(ExportGroup):
    """Is killed when it has written something."""

    def beat(self, done: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def one_is_killed(saved: Path, folder: Path) -> str:
    crew = export_group_of(dist.group.WORLD, timeout=SILENT)
    if dist.get_rank() == 1:
        crew.__class__ = Dies
    return raised(
        lambda: export_hf(
            saved / "whole",
            folder / "hf",
            config=saved / "config",
            options=replace(SMALL, process_group=crew),
        )
    )


@pytest.mark.long
def test_where_one_process_is_killed_the_others_say_so_and_nothing_loads(tmp_path, saved):
    ranks = run_ranks(one_is_killed, 3, saved, tmp_path, timeout=60, killed=(1,))
    for told in (ranks[0], ranks[2]):
        assert (
            told.startswith("PeerError")
            and f"rank 1 gave no sign of life for {SILENT:.0f} s" in told
        )
    assert not (tmp_path / "hf").exists()
    export_hf(saved / "whole", tmp_path / "hf", config=saved / "config", options=SMALL)
    assert contents(tmp_path / "hf") == contents(saved / "hf")


# -- by the command --------------------------------------------------------------------------------


def test_torchrun_spreads_the_command_over_its_processes(tmp_path, saved):
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr",
            "127.0.0.1", "--nproc-per-node", "2", "-m", "smckpt.cli", "export",
            str(saved / "whole"), str(tmp_path / "hf"), "--config", str(saved / "config"),
            "--max-shard-size", "100KB", "--no-against-model", "--json",
        ],
        capture_output=True, text=True, timeout=seconds(120),
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["directory"] == str(tmp_path / "hf")  # one of them reports
    assert contents(tmp_path / "hf") == contents(saved / "hf")


def test_files_are_shared_by_their_bytes():
    assert shares([5, 9, 3, 3, 1], 2) == [[1, 4], [0, 2, 3]]
    assert shares([4], 3) == [[0], [], []]
