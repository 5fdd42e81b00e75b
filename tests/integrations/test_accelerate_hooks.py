"""accelerate's hooks through smckpt, as diffusers' scripts use them: stock beside ours."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ProjectConfiguration

import smckpt
from smckpt.engine.saving.commit import Committer
from smckpt.errors import CheckpointNotFoundError, SaveFailedError, UsageError
from smckpt.integrations.accelerate import SmckptAccelerator
from tests.support.launch import run_ranks
from tests.support.limits import seconds


class Hooked:
    """Hooks as in diffusers' scripts: the first model is written by the script itself, beside a
    file of its own; to write it draws random numbers."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)]
        both = [weight for model in self.models for weight in model.parameters()]
        self.optimizer = torch.optim.Adam(both, lr=0.1)
        accelerator.prepare(*self.models, self.optimizer)
        accelerator.register_save_state_pre_hook(self.save)
        accelerator.register_load_state_pre_hook(self.load)

    def step(self) -> None:
        drawn = torch.randn(1, 2)
        sum(model(drawn).sum() for model in self.models).backward()  # type: ignore[union-attr]
        self.optimizer.step()

    def save(self, models: list[Any], weights: list[Any], folder: str) -> None:
        (Path(folder) / "own").mkdir(exist_ok=True)
        torch.save(models[0].state_dict(), f"{folder}/own/first.pt")
        Path(folder, "note.txt").write_text("a script's")
        weights.pop(0)
        torch.rand(1)

    def load(self, models: list[Any], folder: str) -> None:
        models.pop(0).load_state_dict(torch.load(f"{folder}/own/first.pt"))
        torch.rand(1)

    def all(self) -> list[bytes]:
        held = [*self.models[0].parameters(), *self.models[1].parameters(), torch.rand(3)]
        states = [v for one in self.optimizer.state.values() for v in one.values()]
        return [torch.as_tensor(each).detach().numpy().tobytes() for each in held + states]


def accelerators(kind: type[Accelerator], root: Path, count: int, **more: Any) -> Iterator[Any]:
    for _ in range(count):
        AcceleratorState._reset_state(reset_partial_state=True)
        named = ProjectConfiguration(str(root), automatic_checkpoint_naming=True, **more)
        yield kind(cpu=True, project_config=named)
        smckpt.maybe_finalize_async_calls()
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("step", [0, 1])
def test_hooks_write_their_files_and_the_rest_goes_on_as_with_accelerates_own(
    tmp_path: Path, step: int
) -> None:
    found = []
    for kind in (Accelerator, SmckptAccelerator):
        torch.manual_seed(1)
        root = tmp_path / kind.__name__
        made = accelerators(kind, root, 2)
        saving = next(made)
        torch.manual_seed(2)
        one = Hooked(saving)
        for _ in range(2):
            one.step()
            saving.save_state()
        one.step()
        loading = next(made)
        torch.manual_seed(3)
        other = Hooked(loading)
        loading.load_state(str(root / "checkpoints" / f"checkpoint_{step}"))
        if step == 0:
            other.step()
        other.step()
        found.append(other.all())
        assert next(made, None) is None
        at = root / "checkpoints" / "checkpoint_1"
        assert (at / "note.txt").exists() and (at / "own" / "first.pt").exists()
    assert found[0] == found[1]
    saved = smckpt.load(checkpoint_id=at)
    assert saved is not None and "model" not in saved and "model_1" in saved


def test_the_limit_removes_what_hooks_wrote_and_no_other_file(tmp_path: Path) -> None:
    for accelerator in accelerators(SmckptAccelerator, tmp_path, 1, total_limit=1):
        one = Hooked(accelerator)
        for step in range(3):
            accelerator.save_state()
            smckpt.maybe_finalize_async_calls()
            if step == 1:
                (tmp_path / "checkpoints" / "checkpoint_1" / "mine.txt").touch()
        one.step()
    left = sorted(str(path.relative_to(tmp_path / "checkpoints")) for path in tmp_path.rglob("*.*"))
    assert [name for name in left if "checkpoint_2" not in name] == ["checkpoint_1/mine.txt"]
    assert not (tmp_path / "checkpoints" / "checkpoint_0").exists()


def test_what_hooks_cannot_do_is_refused_by_name(tmp_path: Path, s3_root: str) -> None:
    for accelerator in accelerators(SmckptAccelerator, tmp_path, 1):
        one = Hooked(accelerator)
        accelerator.project_configuration.automatic_checkpoint_naming = False
        accelerator.save_state(str(tmp_path / "a"))
        smckpt.maybe_finalize_async_calls()
        for place in (tmp_path / "a", f"{s3_root}/a"):  # committed; a URL
            with pytest.raises(UsageError, match="hooks of register_save_state_pre_hook write to"):
                accelerator.save_state(str(place))

        def halves(models: list[Any], weights: list[Any], folder: str) -> None:
            weights[0] = {name: tensor.half() for name, tensor in weights[0].items()}

        def drops(models: list[Any], weights: list[Any], folder: str) -> None:
            weights[0].popitem()

        for hook in (halves, drops):
            handle = accelerator.register_save_state_pre_hook(hook)
            with pytest.raises(UsageError, match="has changed weights, or put others among them"):
                accelerator.save_state(str(tmp_path / hook.__name__))
            handle.remove()
        one.save = lambda *_: 1 / 0  # type: ignore[assignment]
        accelerator._save_model_state_pre_hook.clear()
        accelerator.register_save_state_pre_hook(one.save)
        with pytest.raises(ZeroDivisionError):
            accelerator.save_state(str(tmp_path / "b"))
        with pytest.raises(CheckpointNotFoundError, match=r"load .*/a, the newest whole one"):
            (tmp_path / "c" / "own").mkdir(parents=True)
            (tmp_path / "c" / "part-0123456789ab-00000000-r00000.json").touch()
            accelerator.load_state(str(tmp_path / "c"))


def seen_by_a_hook(out: str, how: str, ours: bool) -> list[list[torch.Tensor]]:
    """What a hook of loads finds in the model before it sets it, and in the scaler; what the load
    leaves."""
    kind = SmckptAccelerator if ours else Accelerator
    os.environ["LOCAL_RANK"] = os.environ["RANK"] = str(dist.get_rank())
    found: list[list[torch.Tensor]] = []
    for loads in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        plugin = None
        if how != "DDP":
            PartialState(cpu=True)
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
            PartialState._shared_state["device"] = torch.device("cpu")
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=int(how[-1]),
                auto_wrap_policy="size_based_wrap",
                min_num_params=10,
                state_dict_type="SHARDED_STATE_DICT",
                sync_module_states=False,
                cpu_ram_efficient_loading=False,
            )
        accelerator = kind(cpu=True, fsdp_plugin=plugin)
        torch.manual_seed(loads)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        if how == "FSDP2":  # accelerate refuses a model without its optimizer
            model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        else:
            model = accelerator.prepare(model)
        # that of fp16, which accelerate makes on a GPU alone
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 if loads else 32.0)
        accelerator.scaler = scaler

        def local(model: Any = model, scaler: Any = scaler) -> list[torch.Tensor]:
            held = [getattr(one, "to_local", lambda one=one: one)() for one in model.parameters()]
            held += [torch.tensor(scaler.get_scale())]
            return [one.detach() for one in held]

        def hook(models: list[Any], folder: str, local: Any = local) -> None:
            found.append([one.clone() for one in local()])
            for one in local():
                one.add_(1)

        if loads:
            accelerator.register_load_state_pre_hook(hook)
            accelerator.load_state(out)
            found.append(local())
        else:
            accelerator.save_state(out)
            smckpt.maybe_finalize_async_calls()
        dist.barrier()
    return found


@pytest.mark.parametrize("how", ["DDP", "FSDP1", "FSDP2"])
def test_hooks_of_loads_find_what_they_find_with_accelerates_own(tmp_path: Path, how: str) -> None:
    (stock, *_), (ours, *_) = (
        run_ranks(seen_by_a_hook, 2, str(tmp_path / str(mine)), how, mine) for mine in (False, True)
    )
    assert len(stock) == len(ours) == 2
    for there, here in zip(stock, ours, strict=True):
        assert all(map(torch.equal, here, there))


def test_hooks_write_over_the_files_of_no_save_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Event()
    decide, finalize = Committer._decide, smckpt.maybe_finalize_async_calls
    monkeypatch.setattr(Committer, "_decide", lambda *of: waits.wait(seconds(30)) and decide(*of))
    monkeypatch.setattr(smckpt, "maybe_finalize_async_calls", lambda: (waits.set(), finalize())[1])
    for accelerator in accelerators(SmckptAccelerator, tmp_path, 1):
        accelerator.project_configuration.automatic_checkpoint_naming = False
        one = Hooked(accelerator)
        accelerator.save_state(tmp_path / "out")
        first = one.models[0].state_dict()["bias"].clone()
        one.step()
        with pytest.raises(UsageError, match="no directory with a whole checkpoint"):
            accelerator.save_state(tmp_path / "out")
    assert torch.equal(torch.load(tmp_path / "out" / "own" / "first.pt")["bias"], first)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin"])
def test_what_a_hook_wrote_for_a_save_that_ended_is_no_checkpoint_of_accelerates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        torch.save(weights.pop(), f"{folder}/{name}")

    def load(models: list[Any], folder: str) -> None:
        models.pop().load_state_dict(torch.load(f"{folder}/{name}"))

    for accelerator in accelerators(SmckptAccelerator, tmp_path, 1):
        model = torch.nn.Linear(2, 2)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)
        accelerator.save_state()
        smckpt.maybe_finalize_async_calls()
        saved = model.weight.detach().clone()
        torch.nn.init.zeros_(model.weight)
        with monkeypatch.context() as fails:
            fails.setattr(Committer, "_decide", lambda *of: 1 / 0)
            accelerator.save_state()
            with pytest.raises(SaveFailedError):
                smckpt.maybe_finalize_async_calls()
        run = tmp_path / "checkpoints"
        with pytest.raises(CheckpointNotFoundError, match=f"load {run}/checkpoint_0, the newest"):
            accelerator.load_state(run / "checkpoint_1")
        accelerator.load_state()
        assert torch.equal(model.weight, saved)


def test_no_hook_writes_over_what_accelerate_itself_saved(tmp_path: Path) -> None:
    for accelerator in accelerators(SmckptAccelerator, tmp_path, 1):
        accelerator.project_configuration.automatic_checkpoint_naming = False
        Hooked(accelerator)
        Accelerator.save_state(accelerator, str(tmp_path / "out"))
        before = (tmp_path / "out" / "note.txt").stat()
        with pytest.raises(UsageError, match="no directory with a whole checkpoint"):
            accelerator.save_state(tmp_path / "out")
        assert (tmp_path / "out" / "note.txt").stat() == before


def written_on_the_main_rank(out: str, ours: bool) -> list[torch.Tensor]:
    """The first model's weights are the hook's, which the script registers on one rank alone."""
    kind = SmckptAccelerator if ours else Accelerator
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = kind(cpu=True)
    torch.manual_seed(0)
    models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)]
    accelerator.prepare(*models)

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        torch.save(weights.pop(0), f"{folder}/first.bin")

    def load(models: list[Any], folder: str) -> None:
        models.pop(0).load_state_dict(torch.load(f"{folder}/first.bin"))

    if accelerator.is_main_process:
        accelerator.register_save_state_pre_hook(save)
    accelerator.save_state(out)
    smckpt.maybe_finalize_async_calls()
    dist.barrier()
    for model in models:
        torch.nn.init.zeros_(model.weight)
    accelerator.register_load_state_pre_hook(load)
    accelerator.load_state(out)
    dist.barrier()
    return [model.weight.detach() for model in models]


def test_a_hook_of_one_rank_takes_a_model_for_all(tmp_path: Path) -> None:
    stock, ours = (
        run_ranks(written_on_the_main_rank, 2, str(tmp_path / str(mine)), mine)
        for mine in (False, True)
    )
    assert len(ours) == 2 and all(weights[0].any() for weights in stock)
    for there, here in zip(stock, ours, strict=True):
        assert all(map(torch.equal, here, there))
    saved = smckpt.load(checkpoint_id=str(tmp_path / "True"))
    assert saved is not None and "model" not in saved and "model_1" in saved
