"""Alarms: a save tells of a state that does not change, replicas that differ, NaN and infinity."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import smckpt
from smckpt import Alarms, SaveOptions
from smckpt.engine.saving.alarms import Observed, Shared, judge
from smckpt.errors import SaveFailedError, StateError, UsageError
from smckpt.staging.copies import copy_all
from tests.support.launch import run_ranks


class Net(nn.Module):
    """Weights of more than a block, small ones, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Linear(700, 500)
        self.small = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.register_buffer("seen", torch.zeros(3))


class Training:
    """A model and an optimizer, which step on request; and what its saves warned of."""

    def __init__(
        self,
        mesh: Any = None,
        kind: Any = smckpt.LOCAL,
        fsdp1: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Net().to(dtype)
        self.kind = kind
        if fsdp1:
            self.model = FullyShardedDataParallel(self.model, device_id=torch.device("cpu"))
        elif mesh is not None:
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        smckpt.init_optim_state(self.optimizer)
        self.step = 0

    def train(self) -> None:
        self.step += 1
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        next(self.model.buffers()).add_(1)

    def idle(self) -> None:
        """A step in which the optimizer does not step."""
        self.step += 1
        next(self.model.buffers()).add_(1)

    def state(self) -> dict[str, Any]:
        with smckpt.sm_state_dict_type(self.model, self.kind):
            return {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "rng": torch.get_rng_state(),
                "step": self.step,
            }

    def save(self, place: Path, alarms: Alarms | None = None, **more: Any) -> tuple[str, ...]:
        """What the save warned of."""
        alarms = alarms or Alarms()
        options = SaveOptions(alarms=alarms, sweep=False, queue=str(place), **more)
        handle = smckpt.save(self.state(), checkpoint_id=place, options=options)
        assert handle is not None
        return handle.alarms


# -- an unchanged state ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [smckpt.LOCAL, smckpt.SHARDED, smckpt.FULL])
def test_an_optimizer_that_does_not_step_is_told_by_name(
    tmp_path: Path, caplog: Any, kind: Any
) -> None:
    training = Training(kind=kind)
    training.train()
    assert training.save(tmp_path) == ()
    training.train()
    assert training.save(tmp_path) == ()
    assert training.save(tmp_path) == ()  # the same step once more, as after a signal
    assert "bit for bit" not in caplog.text
    training.idle()
    (told,) = training.save(tmp_path)
    assert told.startswith("step 3: all parameters (1,402,192 bytes: model.big.")
    assert told.endswith("are bit for bit those of step 2")
    (line,) = [r for r in caplog.records if "bit for bit" in r.getMessage()]
    assert line.levelno == logging.WARNING and "whether the optimizer steps" in line.getMessage()
    training.train()
    assert training.save(tmp_path) == ()


def test_a_run_that_begins_again_at_an_earlier_step_is_not_told(tmp_path: Path) -> None:
    training = Training()
    training.train()
    training.train()
    assert training.save(tmp_path) == ()
    training.step = 1
    assert training.save(tmp_path) == ()
    training.step = 3
    assert len(training.save(tmp_path)) == 1


def test_a_cached_model_beside_an_optimizer_that_steps_is_told(tmp_path: Path) -> None:
    training = Training()
    cached = training.state()["model"]
    kept = {name: tensor.clone() for name, tensor in cached.items()}
    for step in (1, 2):
        training.train()
        with torch.no_grad():  # what is saved is what it was
            now = {name: tensor.clone() for name, tensor in cached.items()}
            for name, tensor in cached.items():
                tensor.copy_(kept[name])
        told = training.save(tmp_path)
        for name, tensor in cached.items():
            tensor.copy_(now[name])
        assert ("bit for bit those of step 1" in "".join(told)) == (step == 2)


def test_one_changed_element_of_one_parameter_is_a_change(tmp_path: Path) -> None:
    training = Training()
    training.save(tmp_path)
    training.idle()
    with torch.no_grad():
        training.model.get_parameter("small.2.bias")[1] += 1
    assert training.save(tmp_path) == ()


def test_it_is_an_error_or_silent_on_request(tmp_path: Path) -> None:
    training = Training()
    training.save(tmp_path)
    training.idle()
    with pytest.raises(SaveFailedError, match="bit for bit those of step 0") as failed:
        training.save(tmp_path, Alarms(unchanged="error"))
    assert isinstance(failed.value.__cause__, StateError)
    assert committed(tmp_path) == 0
    assert training.save(tmp_path, Alarms(unchanged="off")) == ()
    assert committed(tmp_path) == 1
    training.train()
    assert training.save(tmp_path, Alarms(unchanged="error")) == ()


def test_a_failed_save_is_not_what_the_next_is_compared_with(tmp_path: Path) -> None:
    training = Training()
    training.save(tmp_path)
    training.train()
    poisoned(training.model)
    with pytest.raises(SaveFailedError):
        training.save(tmp_path, Alarms(nonfinite="error"))
    training.idle()  # unchanged since the save that failed
    assert training.save(tmp_path) == ()


def committed(place: Path) -> int | None:
    found = smckpt.latest_checkpoint(place)
    return found.step if found is not None else None


# -- NaN and infinity ------------------------------------------------------------------------------


def poisoned(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("big.weight").view(-1)[5:8] = torch.tensor(
            [float("nan"), float("inf"), -float("inf")]
        )
        model.get_parameter("small.1.weight")[2, 2] = float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_nan_and_infinity_are_counted_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    training = Training(dtype=dtype)
    training.train()
    largest = torch.finfo(dtype).max
    with torch.no_grad():
        training.model.get_parameter("big.bias")[:2] = torch.tensor(
            [largest, -largest], dtype=dtype
        )
    assert training.save(tmp_path, Alarms(nonfinite="error")) == ()
    poisoned(training.model)
    training.step += 1
    (told,) = training.save(tmp_path, Alarms(nonfinite="warn"))
    assert told == (
        "step 2: 2 tensors have NaN or infinite elements: model.big.weight (3, on rank 0), "
        "model.small.1.weight (1, on rank 0)"
    )
    training.train()
    assert training.save(tmp_path) == ()  # nobody asked
    with pytest.raises(SaveFailedError, match=r"model\.big\.weight"):
        training.save(tmp_path, Alarms(nonfinite="error"))
    spared = Alarms(nonfinite="error", ignore=("model.big.*", "*small.1*", "optimizer.*"))
    assert training.save(tmp_path, spared) == ()


# -- the files -------------------------------------------------------------------------------------


def test_what_is_watched_changes_no_byte_of_a_checkpoint(tmp_path: Path) -> None:
    training = Training()
    training.train()
    alarms = Alarms(unchanged="warn", replicas="warn", nonfinite="warn")
    off, some = Alarms(unchanged="off"), Alarms(ignore=("*small.1*", "model.big.bias"))
    for name, chosen in (("watched", alarms), ("some", some), ("plain", off)):
        training.save(tmp_path / name, chosen, max_file_bytes=1 << 20)
        assert smckpt.verify_checkpoint(tmp_path / name).ok
    watched, some_of, plain = (
        [path.read_bytes() for path in sorted((tmp_path / name).rglob("data-*"))]
        for name in ("watched", "some", "plain")
    )
    assert watched == some_of == plain and len(plain) > 4


# -- several ranks ---------------------------------------------------------------------------------


def flipping(copies: Any) -> None:
    """A stager on a host with bad memory."""
    copy_all(copies)
    largest = max((target for target, _ in copies), key=torch.Tensor.numel)
    largest.view(-1)[:1].view(torch.uint8)[0] ^= 64


def hsdp(folder: str) -> dict[str, Any]:
    """Two replicas of one shard."""
    root, rank = Path(folder), dist.get_rank()
    told: dict[str, Any] = {}
    logging.getLogger("smckpt").addHandler(heard := Heard())
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    on, error = Alarms(replicas="warn"), Alarms(replicas="error")
    training = Training(mesh)
    training.train()
    every = Alarms(replicas="error", nonfinite="error")
    told["healthy"] = training.save(root / "a", every)
    told["split"] = training.save(root / "split", every, max_file_bytes=1 << 20)
    training.train()
    if rank == 1:  # one bit of an optimizer's state on one replica
        weight = training.model.get_parameter("small.2.weight")
        training.optimizer.state[weight]["exp_avg"].to_local().view(torch.int32)[1, 1] ^= 1
    told["unasked"] = training.save(root / "a")
    told["drifted"] = training.save(root / "a", on)
    told["warnings"] = [line for line in heard.lines if "replicas differ" in line]
    told["every"] = [
        bool(training.save(root / "every", Alarms(replicas="warn", replicas_every=2)))
        for _ in range(4)
    ]
    told["error"] = raised(lambda: training.save(root / "a", error))
    told["newest"] = committed(root / "a")
    smckpt.load(training.state(), checkpoint_id=root / "a")  # both have what was saved
    told["resumed"] = training.save(root / "a", error)
    stager = flipping if rank == 1 else None
    told["memory"] = training.save(root / "a", on, stager=stager)
    chosen = on if rank else Alarms()
    told["unequal"] = raised(lambda: training.save(root / "a", chosen))
    return told


def raised(act: Any) -> Any:
    try:
        return act()
    except smckpt.CheckpointError as error:
        return f"{type(error).__name__} of {type(error.__cause__).__name__}: {error}"


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_a_replica_that_has_drifted_is_told_with_rank_host_and_name(tmp_path: Path) -> None:
    import socket

    host = socket.gethostname()
    first, second = run_ranks(hsdp, 2, str(tmp_path))
    both = f"rank 0 (host {host}) and rank 1 (host {host}) hold different values"
    for told in (first, second):
        assert told["healthy"] == told["split"] == told["unasked"] == told["resumed"] == ()
        (text,) = told["drifted"]
        assert text.startswith(f"step 2: replicas differ. {both}")
        assert text.endswith(": optimizer.state.small.2.weight.exp_avg")
        assert told["every"] == [True, False, True, False]
        assert told["error"].startswith("SaveFailedError of StateError") and both in told["error"]
        assert told["newest"] == 2  # committed with a warning
        (text,) = told["memory"]
        assert f"rank 1 (host {host}) wrote other bytes than it held: " in text
        assert "hold different" not in text
        assert "UsageError" in told["unequal"] and "different alarms" in told["unequal"]
    assert len(first["warnings"]) == 1 and second["warnings"] == []  # the coordinator's


def sharded(folder: str, fsdp1: bool) -> dict[str, Any]:
    """Two shards, which are two groups."""
    root, rank = Path(folder), dist.get_rank()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    training = Training(mesh, fsdp1=fsdp1)
    told: dict[str, Any] = {}

    def save(alarms: Alarms | None = None) -> Any:
        handle = smckpt.save(
            training.state(),
            checkpoint_id=root / f"step_{training.step}" / str(rank),
            process_group=mesh["replicate"].get_group(),
            options=SaveOptions(alarms=alarms or Alarms(), groups=[[0], [1]]),
        )
        assert handle is not None
        return handle.alarms

    training.train()
    told["first"] = save()
    training.train()
    told["trained"] = save()
    training.idle()
    told["idle"] = save()
    training.idle()
    told["error"] = raised(lambda: save(Alarms(unchanged="error")))
    training.train()
    if rank == 1:
        next(iter(local_parameters(training.model))).view(-1)[0] = float("nan")
    told["nan"] = save(Alarms(nonfinite="warn"))
    told["nan error"] = raised(lambda: save(Alarms(nonfinite="error")))
    told["newest"] = committed(root)
    return told


def local_parameters(model: nn.Module) -> Any:
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        yield local.detach()


@pytest.mark.parametrize("fsdp1", [False, True])
def test_each_group_of_a_step_is_told_and_an_error_fails_them_all(
    tmp_path: Path, fsdp1: bool
) -> None:
    first, second = run_ranks(sharded, 2, str(tmp_path), fsdp1)
    for told in (first, second):
        assert told["first"] == told["trained"] == ()
        assert "step 3: all parameters" in "".join(told["idle"])
        assert "those of step 2" in "".join(told["idle"])
        assert "those of step 3" in told["error"] and "SaveFailedError" in told["error"]
        assert "NaN or infinite elements" in told["nan error"] and "rank 1" in told["nan error"]
        assert told["newest"] == 5
    assert first["nan"] == () and "on rank 1" in "".join(second["nan"])


# -- the judge -------------------------------------------------------------------------------------


def test_of_three_replicas_the_odd_one_is_named(tmp_path: Path) -> None:
    ranks, parts = (0, 3, 7), ["a", "b", "c", "d"]
    sums = {name: f"{number:016x}" for number, name in enumerate(parts)}

    def brought(rank: int, **held: str) -> tuple[str, Observed]:
        mine = {**sums, **held}
        own = {0: ["a"], 3: ["b", "c"], 7: ["d"]}[rank]
        shared = Shared(
            ranks, (1, 2, 1), "".join(mine.values()), "".join(mine[n] for n in own),
            tuple(parts) if rank == 0 else (),
        )  # fmt: skip
        return f"host{rank}", Observed("", shared=(shared,))

    options = Alarms(replicas="warn")
    healthy = {rank: brought(rank) for rank in ranks}
    assert judge(options, "step 1", healthy, "") == ()
    (told,) = judge(options, "step 1", {**healthy, 3: brought(3, b="f" * 16, d="f" * 16)}, "")
    assert "rank 3 (host host3) holds other values than ranks 0, 7: b, d" in told
    with pytest.raises(StateError) as failed:
        judge(Alarms(replicas="error"), "step 1", {**healthy, 7: brought(7, c="f" * 16)}, "/p")
    assert (failed.value.rank, failed.value.host, failed.value.path) == (7, "host7", "/p")


@pytest.mark.parametrize(
    "wrong",
    [{"unchanged": "loud"}, {"nonfinite": True}, {"replicas_every": 0}, {"ignore": "model.*"}],
)
def test_what_is_no_alarm_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Alarms(**wrong)
    with pytest.raises(UsageError, match="alarms"):
        SaveOptions(alarms="error")  # type: ignore[arg-type]


def test_the_manager_passes_alarms_on(tmp_path: Path) -> None:
    training = Training()
    state = {"model": training.model, "optimizer": training.optimizer}
    options = SaveOptions(alarms=Alarms(unchanged="error"))
    counts = Counter[str]()
    with smckpt.CheckpointManager(tmp_path, options=options, signals=()) as manager:
        for step in (1, 2, 3):
            if step < 3:
                training.train()
            try:
                manager.save(step, state).wait()
                counts["committed"] += 1
            except SaveFailedError as error:
                assert "bit for bit those of step 2" in str(error)
                counts["failed"] += 1
    assert counts == {"committed": 2, "failed": 1}
