"""`smckpt export --follow`: each step of a run that goes on becomes a Hugging Face directory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from smckpt import ExportOptions, errors, export_hf
from smckpt.checkpoint.commits.discover import FoundCheckpoint
from smckpt.checkpoint.commits.run_directory import RunDirectory, Template
from smckpt.checkpoint.upkeep.transfer import copy_checkpoint
from smckpt.manager.follow import RECORD, follow
from smckpt.storage import open_storage
from tests.support.limits import seconds
from tests.support.main_job import ROOT
from tests.support.models import shards
from tests.translate.exports.test_export import assert_loads_as, scrambled

CONFIG = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, vocab_size=120,
)  # fmt: skip


def saved(root: Path, step: int) -> Any:
    """Step `step` of a run: each has other weights."""
    model = scrambled(AutoModelForCausalLM.from_config(CONFIG))
    with shards.torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + step)
    state = model.state_dict()
    shards.write(root / str(step), 2, lambda r: shards.fsdp2(state, r, 2), step=step)
    return model


def arguments(root: Path, out: Path, *more: str) -> list[str]:
    (root.parent / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    config = ["--config", str(root.parent / "config.json"), "--no-against-model"]
    code = "from smckpt.cli import main; main()"
    here = [sys.executable, "-c", code, "export", "--follow", str(root), str(out)]
    return [*here, *config, "--json", *more]


def run(root: Path, out: Path, *more: str) -> tuple[int, list[Any]]:
    done = subprocess.run(
        arguments(root, out, *more),
        cwd=ROOT, capture_output=True, text=True, timeout=seconds(90), check=False,
    )  # fmt: skip
    return done.returncode, _told(done.stdout) if done.stdout else [done.stderr]


def _told(printed: str) -> list[Any]:
    return [json.loads(line) for line in printed.splitlines()]


def exporting(found: FoundCheckpoint, directory: str) -> None:
    export_hf(
        found, directory, config=CONFIG, options=ExportOptions(overwrite=True, against_model=False)
    )


def test_each_kth_step_is_exported_as_the_run_goes_on(tmp_path: Path) -> None:
    root, out = tmp_path / "run", tmp_path / "hf"
    models = {10: saved(root, 10)}
    saved(root, 15)
    process = subprocess.Popen(
        arguments(root, out, "--every", "10", "--until", "20", "--interval", "0.2"),
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        _wait_for(out / "10" / RECORD, process)
        follower = psutil.Process(process.pid)  # it yields to the training
        assert follower.nice() == max(10, os.nice(0))
        assert follower.ionice().ioclass == psutil.IOPRIO_CLASS_IDLE
        models[20] = saved(root, 20)  # the run commits while it is followed
        printed, _ = process.communicate(timeout=seconds(90))
    finally:
        process.kill()
    assert process.returncode == 0
    assert [told["step"] for told in _told(printed)] == [10, 20]
    assert sorted(os.listdir(out)) == ["10", "20"]
    for step, model in models.items():
        assert_loads_as(model, out / str(step))
    assert not list(root.rglob("pin-*"))


def test_a_run_in_s3_is_exported_to_s3(tmp_path: Path, s3_root: str) -> None:
    model = saved(tmp_path / "run", 3)
    root, out = f"{s3_root}/run", f"{s3_root}/hf"
    copy_checkpoint(tmp_path / "run" / "3", f"{root}/3")
    assert [each.error for each in follow(root, out, exporting, once=True)] == [None]
    assert list(follow(root, out, exporting, once=True)) == []
    storage = open_storage(f"{out}/3")
    for name in storage.names():
        (tmp_path / name).write_bytes(storage.read(name))
    assert_loads_as(model, tmp_path)
    assert not open_storage(f"{root}/3").names("pin-")


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + seconds(60)
    while not path.exists():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)


def test_what_is_exported_stays_and_what_a_kill_left_is_made_anew(tmp_path: Path) -> None:
    root, out = tmp_path / "run", tmp_path / "hf"
    models = [saved(root, step) for step in range(3)]
    assert [each.error for each in follow(root, out, exporting, once=True)] == [None] * 3
    stands = (out / "0" / "model.safetensors").stat().st_mtime_ns
    (out / "1" / RECORD).unlink()  # killed after the weights had their name
    shutil.rmtree(out / "2")
    (out / "2").mkdir()
    (out / "2" / "model.safetensors.unfinished").write_bytes(b"half")  # and before
    again = list(follow(root, out, exporting, once=True))
    assert [each.checkpoint.step for each in again] == [1, 2]
    assert (out / "0" / "model.safetensors").stat().st_mtime_ns == stands
    for step, model in enumerate(models):
        assert_loads_as(model, out / str(step))
    assert not list(out.rglob("*.unfinished"))


def test_a_step_that_is_saved_anew_replaces_its_export(tmp_path: Path) -> None:
    root, out = tmp_path / "run", tmp_path / "hf"
    saved(root, 5)
    list(follow(root, out, exporting, once=True))
    shutil.rmtree(root / "5")
    (out / "5" / "model.safetensors").write_bytes(b"")  # so that the old bytes cannot pass
    saved(root, 5)
    (again,) = follow(root, out, exporting, once=True)
    assert again.error is None
    assert_loads_as(saved(tmp_path / "other", 5), out / "5")


def test_a_copy_of_a_step_is_exported_too(tmp_path: Path) -> None:
    root, out = tmp_path / "run", tmp_path / "hf"
    saved(root, 5)
    copy_checkpoint(root / "5", root / "best")
    assert [each.error for each in follow(root, out, exporting, once=True)] == [None, None]
    assert (out / "best" / RECORD).exists() and (out / "5" / RECORD).exists()


def test_a_run_does_not_delete_the_step_that_is_read(tmp_path: Path) -> None:
    root, out = tmp_path / "run", tmp_path / "hf"
    saved(root, 1)
    removed: list[bool] = []

    def export(found: FoundCheckpoint, directory: str) -> None:
        removed.append(RunDirectory(open_storage(root), Template("{step}")).remove(found))
        exporting(found, directory)

    (done,) = follow(root, out, export, once=True)
    assert removed == [False] and done.error is None
    assert RunDirectory(open_storage(root), Template("{step}")).remove(
        done.checkpoint
    )  # the pin has ended


def test_a_step_that_goes_first_is_left_out_and_a_bad_one_fails_alone(tmp_path: Path) -> None:
    root, out = tmp_path / "run", tmp_path / "hf"
    for step in (1, 2, 3):
        saved(root, step)
    data = next((root / "2").glob("*.safetensors"))
    whole = bytearray(data.read_bytes())
    whole[-5] ^= 1
    data.write_bytes(whole)
    looked: list[int] = []

    def export(found: FoundCheckpoint, directory: str) -> None:
        looked.append(found.step or 0)
        if found.step == 1:
            shutil.rmtree(root / "3")  # the run deletes it meanwhile
        exporting(found, directory)

    done = list(follow(root, out, export, once=True))
    assert looked == [1, 2]
    assert [(each.checkpoint.step, type(each.error)) for each in done] == [
        (1, type(None)), (2, errors.CorruptCheckpointError),
    ]  # fmt: skip
    assert not (out / "2" / "model.safetensors").exists() and not (out / "3" / RECORD).exists()
    status, told = run(root, out, "--once")
    assert status == 1 and [each["step"] for each in told] == [2]
    assert "differs" in told[0]["error"] or "crc" in told[0]["error"].lower()


def test_a_follower_that_is_killed_keeps_nothing_from_the_next_one(tmp_path: Path) -> None:
    root, out = tmp_path / "run", tmp_path / "hf"
    model = saved(root, 7)
    code = f"""
import os, signal
from smckpt import ExportOptions, export_hf
from smckpt.manager.follow import follow
def export(found, directory):
    stop = lambda done, total: os.kill(os.getpid(), signal.SIGKILL)
    options = ExportOptions(overwrite=True, progress=stop)
    export_hf(found, directory, config={str(tmp_path)!r}, options=options)
list(follow({str(root)!r}, {str(out)!r}, export, once=True))
"""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=seconds(90), check=False)
    assert ended.returncode == -signal.SIGKILL
    assert list((root / "7").glob("pin-*"))  # it ends by itself
    assert not (out / "7" / "model.safetensors").exists()
    (again,) = follow(root, out, exporting, once=True)
    assert again.error is None
    assert_loads_as(model, out / "7")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--once"], "needs --follow"),
        (["--every", "2"], "needs --follow"),
        (["--follow", "--every", "0"], "0 is not in the range"),
    ],
)
def test_an_option_that_means_nothing_is_refused(
    tmp_path: Path, more: list[str], said: str
) -> None:
    code = "from smckpt.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "export", str(tmp_path), str(tmp_path / "out"), *more],
        cwd=ROOT, capture_output=True, text=True, timeout=seconds(60), check=False,
    )  # fmt: skip
    assert done.returncode == 2 and said in done.stderr


def test_a_mistyped_root_does_not_look_like_a_run_that_is_exported(tmp_path: Path) -> None:
    status, told = run(tmp_path / "rnu", tmp_path / "hf", "--once")
    assert status == 2 and "rnu: no such directory" in told[0]
    assert not (tmp_path / "hf").exists()


def test_the_exports_may_not_lie_in_the_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="choose another directory"):
        list(follow(tmp_path, tmp_path, exporting, once=True))
