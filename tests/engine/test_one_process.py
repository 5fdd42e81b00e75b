"""Saving and loading in plain Python, without a process group: a world of one."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn

import smckpt
from smckpt import errors
from tests.support.limits import seconds


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A small model after three steps of AdamW with a schedule."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(3):
        train_step(model, optimizer, scheduler)
    return model, optimizer, scheduler


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> float:
    optimizer.zero_grad()
    loss = model(torch.randn(11, 7)).square().mean()
    loss.backward()
    optimizer.step()
    scheduler.step()
    return float(loss.item())


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "step": 3,
    }


def assert_ended(pid: int) -> None:
    """The process ends; one that nobody has reaped yet has ended, too."""
    limit = time.monotonic() + seconds(60)  # it may be writing
    while psutil.pid_exists(pid):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        assert time.monotonic() < limit, f"process {pid} is alive"
        time.sleep(0.05)


def files(folder: Path, prefix: str) -> list[Path]:
    return sorted(folder.glob(f"{prefix}*"))


def test_a_state_of_many_tensors_comes_back_from_its_packed_table(tmp_path: Path) -> None:
    state = {f"layers.{n}.weight": torch.full((2,), float(n)) for n in range(600)}
    smckpt.save({"model": state}, checkpoint_id=tmp_path)
    packed = [path.name for path in tmp_path.glob("*.json") if b'"packed":' in path.read_bytes()]
    assert sorted(name.partition("-")[0] for name in packed) == ["manifest", "part"]
    loaded = smckpt.load(checkpoint_id=tmp_path)
    assert loaded is not None
    assert [*loaded["model"]] == [*state]
    assert all(torch.equal(loaded["model"][name], state[name]) for name in state)
    assert smckpt.verify_checkpoint(tmp_path).ok


def test_a_run_goes_on_bit_for_bit_after_a_load(tmp_path: Path) -> None:
    model, optimizer, scheduler = trained()
    smckpt.save(state_of(model, optimizer, scheduler), checkpoint_id=tmp_path / "c")
    expected = [train_step(model, optimizer, scheduler) for _ in range(3)]

    model, optimizer, scheduler = trained(seed=1)
    state = state_of(model, optimizer, scheduler)
    state["step"] = -1
    smckpt.load(state, checkpoint_id=tmp_path / "c")
    assert state["step"] == 3
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rng"])
    assert [train_step(model, optimizer, scheduler) for _ in range(3)] == expected


def test_a_fresh_optimizer_gets_its_state_and_hyperparameters_without_load_state_dict(
    tmp_path: Path,
) -> None:
    model, optimizer, scheduler = trained()
    with smckpt.sm_state_dict_type(model, smckpt.LOCAL):
        state = state_of(model, optimizer, scheduler)
    smckpt.save(state, checkpoint_id=tmp_path)

    torch.manual_seed(9)
    other = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    fresh = torch.optim.AdamW(other.parameters(), lr=123.0)
    smckpt.init_optim_state(fresh)
    with smckpt.sm_state_dict_type(other, smckpt.LOCAL):
        target = {
            "model": other.state_dict(),
            "optimizer": fresh.state_dict(),
            "scheduler": {},
            "rng": torch.get_rng_state(),
            "step": 0,
        }
    smckpt.load(target, checkpoint_id=tmp_path)
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert fresh.param_groups[0]["initial_lr"] == 1e-2
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for key, value in optimizer.state[theirs].items():
            assert torch.equal(fresh.state[ours][key], value)


def kinds_of_state() -> dict[str, Any]:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "zero_dimensional": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": base.t(),
        "strided": base[:, ::2],
        "views": [base[:2], base[1:]],
        "bf16": torch.randn(5).bfloat16(),
        "fp8": torch.randn(8).to(torch.float8_e4m3fn),
        "e5m2": torch.randn(8).to(torch.float8_e5m2),
        "complex": torch.randn(3, dtype=torch.complex64),
        "complex128": torch.randn(3, dtype=torch.complex128),
        "complex32": torch.randn(3, dtype=torch.complex64).to(torch.complex32),
        "bool": torch.tensor([True, False, True]),
        "int64": torch.tensor([2**62, -1]),
        "numpy": np.arange(6, dtype=np.float16).reshape(2, 3),
        "nested": {
            "tuple": (torch.ones(2), {"deep": torch.zeros(1)}, 5),
            "list": [1, torch.ones(3)],
        },
        "plain": {"ints": {1: "a", 2: ("b", 2.5)}, "none": None, "nan": float("inf"), "text": "é"},
    }


def cleared(value: Any) -> Any:
    """The same structure with other contents."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    if isinstance(value, dict):
        return {k: cleared(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(cleared, value))
    return None


def assert_same(ours: Any, theirs: Any, path: str = "") -> None:
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, path
        left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (ours, theirs))
        assert torch.equal(left, right), path
    elif isinstance(theirs, np.ndarray):
        assert ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes(), path
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), path
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, (list, tuple)):
        assert type(ours) is type(theirs) and len(ours) == len(theirs), path
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(a, b, f"{path}.{index}")
    else:
        assert ours == theirs, path


def test_every_kind_of_tensor_and_value_comes_back_exactly(tmp_path: Path) -> None:
    state = kinds_of_state()
    smckpt.save(state, checkpoint_id=tmp_path)
    target = cleared(state)
    smckpt.load(target, checkpoint_id=tmp_path)
    assert_same(target, state)


def test_the_arena_holds_the_state_of_the_call_whatever_happens_to_it_afterwards(
    tmp_path: Path,
) -> None:
    state = {"w": torch.ones(1 << 20)}
    smckpt.async_save(state, checkpoint_id=tmp_path)
    state["w"].fill_(2)
    assert smckpt.maybe_finalize_async_calls() != []
    target = {"w": torch.zeros(1 << 20)}
    smckpt.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["w"], torch.ones(1 << 20))


def test_a_reused_checkpoint_id_gives_the_newest_and_is_swept(tmp_path: Path) -> None:
    for value in range(4):
        smckpt.save({"w": torch.full((1000,), float(value))}, checkpoint_id=tmp_path)
    target = {"w": torch.zeros(1000)}
    smckpt.load(target, checkpoint_id=tmp_path)
    assert target["w"][0] == 3
    # What the last commit superseded goes after the verdict; the one before it is gone by now.
    assert len(files(tmp_path, "data-")) <= 4


def test_a_key_that_appears_later_is_noticed(tmp_path: Path) -> None:
    smckpt.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    smckpt.save({"w": torch.ones(3), "new": torch.full((2,), 7.0)}, checkpoint_id=tmp_path)
    target = {"w": torch.zeros(3), "new": torch.zeros(2)}
    smckpt.load(target, checkpoint_id=tmp_path)
    assert target["new"].tolist() == [7, 7]


def test_finalizing_before_any_save_does_nothing() -> None:
    code = "import smckpt; assert smckpt.maybe_finalize_async_calls() == []"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=seconds(60))


def test_on_commit_runs_once_after_the_manifest(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def on_commit(handle: smckpt.SaveHandle) -> None:
        seen.append((handle.number, len(files(tmp_path, "manifest-"))))

    smckpt.async_save(
        {"w": torch.ones(2)},
        checkpoint_id=tmp_path,
        options=smckpt.SaveOptions(on_commit=on_commit),
    )
    done = smckpt.maybe_finalize_async_calls()
    assert seen == [(done[-1], 1)]


def test_what_on_commit_does_neither_ends_nor_hangs_the_queue(tmp_path: Path) -> None:
    said: list[Any] = []

    def save() -> Any:
        return smckpt.async_save(
            {"w": torch.ones(2)},
            checkpoint_id=tmp_path,
            options=smckpt.SaveOptions(on_commit=on_commit),
        )

    def on_commit(handle: smckpt.SaveHandle) -> None:
        said.append(handle.wait(seconds(20)))
        with pytest.raises(errors.UsageError, match="on_commit"):
            save()
        said.append("refused")
        sys.exit("not the process, nor its thread")

    handle = save()
    assert smckpt.maybe_finalize_async_calls(timeout=60)[-1:] == [handle.number]
    assert said == [handle.timings, "refused"]
    assert smckpt.save({"w": torch.ones(2)}, checkpoint_id=tmp_path).number == handle.number + 1


def test_missing_and_unexpected_keys_are_listed_before_anything_is_touched(tmp_path: Path) -> None:
    smckpt.save({"a": torch.ones(2), "b": torch.ones(2)}, checkpoint_id=tmp_path)
    target = {"a": torch.zeros(2), "c": torch.zeros(2)}
    with pytest.raises(errors.KeysMismatchError) as caught:
        smckpt.load(target, checkpoint_id=tmp_path)
    assert "'b'" in str(caught.value) and "'c'" in str(caught.value)
    assert target["a"].tolist() == [0, 0]
    smckpt.load(target, checkpoint_id=tmp_path, check_keys_matched=False)
    assert target["a"].tolist() == [1, 1]


@pytest.mark.parametrize("kind", [smckpt.LOCAL, smckpt.SHARDED])
def test_what_a_partial_load_does_not_take_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: smckpt.SMStateDictType
) -> None:
    def state(**more: Any) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        with smckpt.sm_state_dict_type(model, kind):
            return {"model": model.state_dict(), **more}

    smckpt.save(state(old=torch.ones(2), words="old"), checkpoint_id=tmp_path)
    target = state(new=torch.zeros(2), count=1)
    smckpt.load(target, checkpoint_id=tmp_path, check_keys_matched=False)
    lacks = " ".join(record.message for record in caplog.records)
    for name in ("'old'", "'words'"):
        assert re.search(rf"the target lacks [^;]*{name}", lacks)
    for name in ("'new'", "'count'"):
        assert re.search(rf"the checkpoint lacks [^;]*{name}", lacks)


@pytest.mark.timeout(60)
def test_a_checksum_file_that_cannot_be_read_ends_the_load_with_its_path(tmp_path: Path) -> None:
    smckpt.save({"a": torch.ones(1 << 20)}, checkpoint_id=tmp_path)
    (sums,) = tmp_path.glob("*.crc")
    sums.unlink()
    sums.mkdir()
    with pytest.raises(errors.CorruptCheckpointError, match=f"{sums}.*a directory"):
        smckpt.load({"a": torch.zeros(1 << 20)}, checkpoint_id=tmp_path)


def test_a_refused_load_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    model, optimizer, scheduler = trained()
    smckpt.save(state_of(model, optimizer, scheduler), checkpoint_id=tmp_path)
    other, fresh, its = trained(seed=1)
    fresh.state.clear()
    target = {**state_of(other, fresh, its), "optimizer": fresh, "extra": torch.ones(1)}
    with pytest.raises(errors.KeysMismatchError, match="extra"):
        smckpt.load(target, checkpoint_id=tmp_path)
    assert not fresh.state


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_a_shape_or_dtype_that_differs_is_refused(tmp_path: Path, wrong: torch.Tensor) -> None:
    smckpt.save({"a": torch.ones(2)}, checkpoint_id=tmp_path)
    with pytest.raises(errors.TensorMismatchError, match="a"):
        smckpt.load({"a": wrong}, checkpoint_id=tmp_path)


def test_a_changed_byte_is_reported_and_preverify_leaves_the_target_untouched(
    tmp_path: Path,
) -> None:
    smckpt.save({"a": torch.ones(1 << 20)}, checkpoint_id=tmp_path)
    [data] = [f for f in files(tmp_path, "data-") if f.suffix == ".safetensors"]
    with data.open("r+b") as file:
        file.seek(3_000_000)
        file.write(b"\xff")
    target = {"a": torch.zeros(1 << 20)}
    with pytest.raises(errors.CorruptCheckpointError, match=data.name):
        smckpt.load(target, checkpoint_id=tmp_path, options=smckpt.LoadOptions(preverify=True))
    assert not target["a"].any()
    with pytest.raises(errors.CorruptCheckpointError, match=data.name):
        smckpt.load(target, checkpoint_id=tmp_path)


def test_nothing_to_save_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.CheckpointError, match="nothing"):
        smckpt.async_save(None, checkpoint_id=tmp_path)


def test_a_checkpoint_id_left_out_is_refused() -> None:
    with pytest.raises(errors.UsageError, match="checkpoint_id"):
        smckpt.async_save({"a": torch.ones(1)})
    with pytest.raises(errors.UsageError, match="checkpoint_id"):
        smckpt.load({"a": torch.ones(1)})


def test_an_object_that_carries_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.StateError, match="hook"):
        smckpt.save({"a": torch.ones(1), "hook": print}, checkpoint_id=tmp_path)
    smckpt.save({"a": torch.ones(1)}, checkpoint_id=tmp_path)  # and the next save is fine


@pytest.mark.parametrize("what", ["file", "missing", "empty"])
def test_a_place_without_a_checkpoint_is_named(tmp_path: Path, what: str) -> None:
    place = tmp_path / "x"
    if what == "file":
        place.write_text("")
    elif what == "empty":
        place.mkdir()
    with pytest.raises(errors.CheckpointError, match=str(place)):
        smckpt.load({"a": torch.ones(1)}, checkpoint_id=place)


def test_a_path_that_is_a_file_fails_the_save_with_the_cause(tmp_path: Path) -> None:
    place = tmp_path / "x"
    place.write_text("precious")
    with pytest.raises(errors.SaveFailedError, match="file") as caught:
        smckpt.save({"a": torch.ones(1)}, checkpoint_id=place)
    assert isinstance(caught.value.__cause__, errors.StorageError)
    assert place.read_text() == "precious"


def test_a_failed_background_save_is_raised_at_the_next_call_which_saves_all_the_same(
    tmp_path: Path,
) -> None:
    place = tmp_path / "x"
    place.write_text("")
    handle = smckpt.async_save({"a": torch.ones(1)}, checkpoint_id=place)
    with pytest.raises(errors.SaveFailedError, match=f"save {handle.number}"):
        smckpt.async_save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "y")
    smckpt.maybe_finalize_async_calls()
    assert smckpt.latest_checkpoint(tmp_path / "y") is not None


def test_failures_in_a_row_are_logged_up_to_the_number_tolerated_and_raised_beyond_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "x"
    place.write_text("")
    hasty = smckpt.SaveOptions(queue="patient")
    patient = replace(hasty, max_consecutive_failures=1)

    def attempt(directory: Path, options: smckpt.SaveOptions = hasty) -> int:
        handle = smckpt.async_save({"a": torch.ones(1)}, checkpoint_id=directory, options=options)
        assert handle.ended(seconds(60))
        return int(handle.number)

    first = attempt(place, patient)
    assert smckpt.maybe_finalize_async_calls(queue="patient") == []
    assert f"save {first} was not committed" in caplog.text
    fine = attempt(tmp_path / "y", patient)  # which ends the row
    attempt(place, patient)
    second = attempt(place, patient)
    with pytest.raises(errors.SaveFailedError, match=f"save {second}"):
        smckpt.maybe_finalize_async_calls(queue="patient")
    assert smckpt.maybe_finalize_async_calls(queue="patient") == [fine]
    strict = attempt(place)
    with pytest.raises(errors.SaveFailedError, match=f"save {strict}"):
        attempt(tmp_path / "y", patient)  # its own patience is not that of the one before
    assert len(smckpt.maybe_finalize_async_calls(queue="patient")) == 1


def test_a_dead_worker_fails_one_save_and_the_next_gets_a_new_one(tmp_path: Path) -> None:
    smckpt.save(
        {"a": torch.ones(4)}, checkpoint_id=tmp_path, options=smckpt.SaveOptions(queue="mortal")
    )
    from smckpt.engine import api

    [queue] = api._RUNTIME.queues(None, "mortal")
    os.kill(queue._worker.pid, signal.SIGKILL)
    with pytest.raises(errors.SaveFailedError) as caught:
        for _ in range(2):  # the death may be seen before the save starts, and mended at once
            smckpt.save(
                {"a": torch.ones(4)},
                checkpoint_id=tmp_path,
                options=smckpt.SaveOptions(queue="mortal"),
            )
        raise errors.SaveFailedError("the worker was replaced in time")
    assert "worker" in str(caught.value).lower()
    smckpt.save(
        {"a": torch.full((4,), 5.0)},
        checkpoint_id=tmp_path,
        options=smckpt.SaveOptions(queue="mortal"),
    )
    target = {"a": torch.zeros(4)}
    smckpt.load(target, checkpoint_id=tmp_path)
    assert target["a"][0] == 5


def run_script(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=seconds(120),
        check=False,
        env={**os.environ, **environment},
    )


def test_a_normal_exit_drains_the_save_in_flight(tmp_path: Path) -> None:
    done = run_script(
        """
        import sys, torch, smckpt
        smckpt.async_save({"a": torch.ones(4 << 20)}, checkpoint_id=sys.argv[1])
        """,
        str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    target = {"a": torch.zeros(4 << 20)}
    smckpt.load(target, checkpoint_id=tmp_path)
    assert bool(target["a"].all())


def test_who_hears_of_the_last_commit_may_read_it_while_the_interpreter_ends(
    tmp_path: Path,
) -> None:
    done = run_script(
        """
        import sys, threading
        import torch, smckpt
        from smckpt.checkpoint.upkeep.transfer import copy_checkpoint
        first, second = sys.argv[1:]
        def committed(_):
            threading.main_thread().join()  # from now on Python starts no pool of threads
            copy_checkpoint(first, second)
            assert smckpt.verify_checkpoint(second).ok
            print(torch.equal(smckpt.load(checkpoint_id=second)["w"], state["w"]))
        state = {"w": torch.arange(3_000_000.0), "x": [torch.ones(5)] * 3, "step": 1}
        options = smckpt.SaveOptions(on_commit=committed)
        smckpt.async_save(state, checkpoint_id=first, options=options)
        """,
        str(tmp_path / "1"), str(tmp_path / "2"),
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_a_save_in_an_exit_handler_is_waited_for_too(tmp_path: Path) -> None:
    """Python runs no handler that is registered by another one, and torch imports a module whose
    handler ends children and waits for what has asked it to."""
    save = "import smckpt; smckpt.save({'a': torch.ones(2)}, checkpoint_id=sys.argv[1] + '/0')"
    before = [("import torch", ""), ("import torch, smckpt.engine.api", "")]
    for number, (earlier, later) in enumerate(
        [
            *before,
            (f"import torch; {save}", ""),
            ("", "import torch"),
            ("", f"import torch; {save}"),
        ]
    ):
        folder = tmp_path / f"{number}"
        done = run_script(
            f"""
            import atexit, sys
            {earlier}
            def last():
                import smckpt
                smckpt.async_save({{"a": torch.ones(4 << 20)}}, checkpoint_id=sys.argv[1] + "/1")
            atexit.register(last)
            {later}
            """,
            str(folder),
        )
        assert done.returncode == 0, done.stderr
        assert smckpt.latest_checkpoint(folder / "1") is not None, (earlier, later)


@pytest.mark.parametrize("call", ["async_save", "save"])
def test_an_exit_handler_hears_of_its_failed_save_and_saves_elsewhere(
    tmp_path: Path, call: str
) -> None:
    (tmp_path / "file").write_text("")
    done = run_script(
        f"""
        import atexit, sys
        atexit.register(print, "an earlier handler")
        def last():
            import smckpt
            state = {{"a": torch.ones(2)}}
            try:
                smckpt.{call}(state, checkpoint_id=sys.argv[1] + "/file/1").wait()
            except smckpt.SaveFailedError:
                smckpt.{call}(state, checkpoint_id=sys.argv[1] + "/elsewhere")
        atexit.register(last)
        import torch
        """,
        str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert "an earlier handler" in done.stdout
    assert smckpt.latest_checkpoint(tmp_path / "elsewhere") is not None


def test_a_child_of_multiprocessing_drains_the_save_in_flight_too(tmp_path: Path) -> None:
    child = multiprocessing.get_context("forkserver").Process(target=leave_early, args=(tmp_path,))
    child.start()
    child.join(seconds(60))
    assert child.exitcode == 0
    assert smckpt.latest_checkpoint(tmp_path) is not None


def leave_early(folder: Path) -> None:
    smckpt.async_save({"w": torch.ones(1 << 22)}, checkpoint_id=folder)


@pytest.mark.parametrize("streams", ["", "sys.stdout.close()", "sys.stdout = sys.stderr = None"])
def test_a_failure_that_nobody_was_told_of_makes_the_exit_status_non_zero(
    tmp_path: Path, streams: str
) -> None:
    place = tmp_path / "x"
    place.write_text("")
    done = run_script(
        f"""
        import sys, torch, smckpt
        smckpt.async_save({{"a": torch.ones(4)}}, checkpoint_id=sys.argv[1])
        {streams}
        """,
        str(place),
    )
    assert done.returncode == 1
    assert "was not committed" in done.stderr or "stderr" in streams


def test_an_exit_waits_no_longer_than_its_limit_and_names_what_was_not_committed(
    tmp_path: Path,
) -> None:
    done = run_script(
        """
        import os, signal, sys, time, torch, smckpt
        from smckpt.engine import api
        for queue in ("one", "two"):
            where, options = f"{sys.argv[1]}/{queue}", smckpt.SaveOptions(queue=queue)
            smckpt.save({"a": torch.ones(4)}, checkpoint_id=where, options=options)
            [its] = api._RUNTIME.queues(None, queue)
            os.kill(its._worker.pid, signal.SIGSTOP)  # it cannot finish any more
            print(its._worker.pid)
            smckpt.async_save({"a": torch.zeros(4)}, checkpoint_id=where, options=options)
        print(time.monotonic(), flush=True)
        """,
        str(tmp_path),
        SMCKPT_EXIT_TIMEOUT="2",
    )
    *workers, began = done.stdout.split()
    assert time.monotonic() - float(began) < seconds(60)  # not the ten minutes of the default
    assert done.returncode == 1
    for queue in ("one", "two"):
        assert f"save 1 to {tmp_path}/{queue} was not committed" in done.stderr
        target = {"a": torch.zeros(4)}
        smckpt.load(target, checkpoint_id=tmp_path / queue)
        assert target["a"].tolist() == [1.0] * 4
    assert "SMCKPT_EXIT_TIMEOUT" in done.stderr
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def test_a_killed_trainer_leaves_no_process_and_the_old_checkpoint(tmp_path: Path) -> None:
    smckpt.save({"a": torch.ones(64 << 20)}, checkpoint_id=tmp_path)
    code = textwrap.dedent(
        """
        import os, signal, sys, torch, smckpt
        smckpt.save({"b": torch.ones(4)}, checkpoint_id=sys.argv[1] + "-warm")
        from smckpt.engine import api
        [queue] = api._RUNTIME.queues(None, None)
        print(queue._worker.pid, flush=True)
        smckpt.async_save({"a": torch.zeros(64 << 20)}, checkpoint_id=sys.argv[1])
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=seconds(120),
    )
    worker = int(done.stdout.split()[0])
    assert_ended(worker)
    target = {"a": torch.full((64 << 20,), 5.0)}
    smckpt.load(target, checkpoint_id=tmp_path)
    assert target["a"].unique().tolist() in ([1.0], [0.0])


def test_two_saves_in_a_row_wait_for_each_other_and_both_commit(tmp_path: Path) -> None:
    numbers = [
        smckpt.async_save({"a": torch.full((1 << 20,), float(i))}, checkpoint_id=tmp_path / str(i))
        for i in range(3)
    ]
    done = smckpt.maybe_finalize_async_calls()
    assert [handle.number for handle in numbers] == done[-3:]
    for i in range(3):
        target = {"a": torch.zeros(1 << 20)}
        smckpt.load(target, checkpoint_id=tmp_path / str(i))
        assert target["a"][0] == i


def test_loads_in_several_threads_at_once_each_get_their_own(tmp_path: Path) -> None:
    def state(value: int) -> dict[str, Any]:
        # Under one path, tensors of other shapes, so that nothing known of one fits the other.
        return {f"t{i}": torch.full((value + i,), float(value)) for i in range(40)}

    for value in (3, 4, 5):
        smckpt.save(state(value), checkpoint_id=tmp_path / str(value))
    together = threading.Barrier(3, timeout=seconds(60))

    def loaded(value: int) -> list[float]:
        target = {key: torch.zeros_like(t) for key, t in state(value).items()}
        together.wait()
        smckpt.load(target, checkpoint_id=tmp_path / str(value))
        return sorted({x for tensor in target.values() for x in tensor.tolist()})

    with ThreadPoolExecutor(3) as pool:
        for _ in range(5):
            assert list(pool.map(loaded, (3, 4, 5))) == [[3.0], [4.0], [5.0]]


def test_saves_in_several_threads_at_once_take_turns_and_each_saves_its_own(tmp_path: Path) -> None:
    def saved(value: int) -> None:
        for turn in range(5):
            state = {"a": torch.full((50_000,), float(value)), "b": value}
            smckpt.async_save(state, checkpoint_id=tmp_path / f"{value}-{turn}")

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(saved, (3, 4, 5)))
    smckpt.maybe_finalize_async_calls()
    for folder in tmp_path.iterdir():
        target = {"a": torch.zeros(50_000), "b": 0}
        smckpt.load(target, checkpoint_id=folder)
        value = int(folder.name[0])
        assert (target["b"], set(target["a"].tolist())) == (value, {float(value)})


def test_a_save_from_a_signal_handler_in_the_middle_of_a_save_is_refused(tmp_path: Path) -> None:
    class Interrupting(dict[str, Any]):
        def items(self) -> Any:
            signal.raise_signal(signal.SIGUSR1)  # its handler runs within this call of async_save
            return super().items()

    def handler(*_: object) -> None:
        smckpt.async_save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "b")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(errors.UsageError, match="while this thread was in async_save"):
            smckpt.save(Interrupting(a=torch.ones(1)), checkpoint_id=tmp_path / "a")
    finally:
        signal.signal(signal.SIGUSR1, before)
    smckpt.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "a")


def test_timings_say_what_took_how_long(tmp_path: Path) -> None:
    handle = smckpt.save({"a": torch.ones(1 << 18)}, checkpoint_id=tmp_path)
    timings = handle.timings
    assert 0 < timings.staged <= timings.blocked
    assert timings.staged <= timings.written <= timings.committed
    assert timings.nbytes >= 1 << 20


def test_step_and_metadata_are_recorded(tmp_path: Path) -> None:
    metadata = {"who": {"name": "me"}}
    smckpt.async_save(
        {"a": torch.ones(1)},
        checkpoint_id=tmp_path / "c",
        step=np.int64(12),
        options=smckpt.SaveOptions(metadata=metadata),
    )
    metadata["who"]["name"] = "somebody else"
    smckpt.maybe_finalize_async_calls()
    found = smckpt.latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 12
    [manifest] = files(tmp_path / "c", "manifest-")
    assert '"name":"me"' in manifest.read_text()


def test_another_limit_on_files_is_honoured_by_the_next_save(tmp_path: Path) -> None:
    state = {"a": torch.ones(3 << 17), "b": torch.ones(3 << 17)}
    for limits in ({}, {"max_file_bytes": 1 << 20}):
        options = smckpt.SaveOptions(queue="limits", **limits)
        smckpt.save(state, checkpoint_id=tmp_path, options=options)
    manifest = files(tmp_path, "manifest-")[-1]
    assert manifest.read_text().count('"crc_name"') > 1


def test_the_step_of_ten_lines_in_the_readme_works(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    smckpt.save(state, checkpoint_id=tmp_path / "run", step=1)
    weight = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    smckpt.load(state, checkpoint_id=tmp_path / "run")
    assert torch.equal(model.weight, weight)


def test_a_tensor_that_cannot_be_filled_is_refused_before_any_is(tmp_path: Path) -> None:
    smckpt.save({"a": torch.ones(3), "b": torch.arange(4.0)}, checkpoint_id=tmp_path / "c")
    target = {"a": torch.zeros(3), "b": torch.zeros(1).expand(4)}
    with pytest.raises(errors.StateError, match="'b' is an expanded tensor"):
        smckpt.load(target, checkpoint_id=tmp_path / "c")
    assert not target["a"].any()


def test_elements_that_overlap_take_only_the_values_that_they_can_hold(tmp_path: Path) -> None:
    views = torch.arange(5.0).unfold(0, 3, 1)
    smckpt.save({"b": views}, checkpoint_id=tmp_path / "views")
    smckpt.save({"b": torch.arange(9.0).view(3, 3)}, checkpoint_id=tmp_path / "plain")
    target = {"b": torch.zeros(5).unfold(0, 3, 1)}
    smckpt.load(target, checkpoint_id=tmp_path / "views")
    assert torch.equal(target["b"], views)
    with pytest.raises(errors.StateError, match="elements of 'b' share their memory"):
        smckpt.load(target, checkpoint_id=tmp_path / "plain")


def test_a_row_and_a_column_that_begin_at_one_element_are_two_tensors(tmp_path: Path) -> None:
    square, target = torch.arange(9.0).view(3, 3), torch.zeros(3, 3)
    smckpt.save({"row": square[0], "column": square[:, 0]}, checkpoint_id=tmp_path)
    smckpt.load({"row": target[0], "column": target[:, 0]}, checkpoint_id=tmp_path)
    assert torch.equal(target[0], square[0]) and torch.equal(target[:, 0], square[:, 0])


@pytest.mark.parametrize(
    "kind, wrong",
    [
        *[(smckpt.SaveOptions, one) for one in (
            {"queue": ""}, {"metadata": "a note"}, {"parallel_state": 2}, {"on_commit": "print"},
            {"allow_objects": ["Path"]}, {"timeout": 0},
        )],
        *[(smckpt.LoadOptions, one) for one in (
            {"only": "model"}, {"renamed": {"backbone": ""}}, {"preverify": "no"}, {"threads": 0},
            {"timeout": 0}, {"parallel_state": 2},
        )],
    ],
)  # fmt: skip
def test_an_option_of_a_wrong_kind_is_named_when_the_options_are_made(
    kind: Any, wrong: dict[str, Any]
) -> None:
    with pytest.raises(errors.UsageError, match=next(iter(wrong))):
        kind(**wrong)


def test_options_of_another_call_are_refused(tmp_path: Path) -> None:
    state, place = {"a": torch.ones(1)}, tmp_path / "c"
    with pytest.raises(errors.UsageError, match=r"pass smckpt\.SaveOptions"):
        smckpt.save(state, checkpoint_id=place, options=smckpt.LoadOptions())  # type: ignore[arg-type]
    smckpt.save(state, checkpoint_id=place)
    with pytest.raises(errors.UsageError, match=r"pass smckpt\.LoadOptions"):
        smckpt.load(state, checkpoint_id=place, options=smckpt.SaveOptions())  # type: ignore[arg-type]
