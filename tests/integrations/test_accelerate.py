"""accelerate's save_state and load_state through smckpt: killed, and resumed to the last bit."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, ProjectConfiguration
from safetensors.torch import load_file

import smckpt
from smckpt.engine.api import _RUNTIME
from smckpt.errors import CheckpointNotFoundError, UsageError
from smckpt.integrations.accelerate import SmckptAccelerator, merge_fsdp_weights
from smckpt.run import provide
from tests.engine.test_prewarm import arenas, prewarmed
from tests.support import child

SCRIPT = Path(__file__).parents[1] / "support" / "frameworks" / "accelerate_run.py"


def names(out: Path | str) -> list[str]:
    return sorted(one.path.rpartition("/")[2] for one in smckpt.find_checkpoints(out))


def killed_and_resumed(
    folder: Path, how: str, ranks: int = 1, torchrun: bool = False
) -> list[dict[str, Any]]:
    out = folder / "run"
    told = child.killed_and_resumed(SCRIPT, out, how, ("die",), ranks=ranks, torchrun=torchrun)
    assert names(out) == ["checkpoint_1", "checkpoint_2"]  # total_limit
    assert len(told) == ranks
    for rank in told:
        losses, ours = rank["straight"]["losses"], rank["resumed"].pop("losses")
        assert ours == losses[-len(ours) :]
        assert ours[0][0] in (3, 5)  # the save of step 4 was under way when it was killed
        assert {**rank["resumed"], "losses": losses} == rank["straight"]
        assert ("stock" in rank) == (how in ("plain", "fsdp2"))
        if "stock" in rank:  # gone on from what accelerate's own class saved
            assert rank["stock"].pop("losses") == losses[4:]
            assert {**rank["stock"], "losses": losses} == rank["straight"]
    return told


def test_one_process_goes_on_bit_for_bit_after_a_kill_and_from_accelerates_own(
    tmp_path: Path,
) -> None:
    killed_and_resumed(tmp_path, "plain")


@pytest.mark.long
@pytest.mark.parametrize(("how", "ranks"), [("plain", 1), ("fsdp2", 2)])
def test_with_its_checkpoints_in_s3_it_goes_on_bit_for_bit(
    tmp_path: Path, s3_root: str, monkeypatch: pytest.MonkeyPatch, how: str, ranks: int
) -> None:
    monkeypatch.setenv("ACCELERATE_ROOT", s3_root)
    all_told = child.killed_and_resumed(SCRIPT, tmp_path / "run", how, ("die",), ranks=ranks)
    assert len(all_told) == ranks
    for told in all_told:
        ours, losses = told["resumed"].pop("losses"), told["straight"]["losses"]
        assert ours == losses[-len(ours) :] and len(ours) < len(losses)
        assert {**told["resumed"], "losses": losses} == told["straight"]
    assert names(f"{s3_root}/run") == ["checkpoint_1", "checkpoint_2"]
    assert not [*tmp_path.rglob("*.safetensors")]


@pytest.mark.long
@pytest.mark.parametrize("how", ["fsdp2", "fsdp1", "plain"])
def test_ranks_go_on_bit_for_bit_after_a_kill(tmp_path: Path, how: str) -> None:
    told = killed_and_resumed(tmp_path, how, ranks=2)
    kind = "DTensor" if how == "fsdp2" else "Parameter"
    assert {rank["resumed"]["sharded"] for rank in told} == {kind}


@pytest.mark.long
@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (1, 2)])
def test_other_ranks_load_what_was_saved(tmp_path: Path, saved: int, loaded: int) -> None:
    hows = {1: "plain", 2: "fsdp2"}
    died = child.script(SCRIPT, str(tmp_path / "run"), hows[saved], "die", ranks=saved)
    assert died.returncode != 0 and "it lives" not in died.stderr, died.stderr
    done = child.script(SCRIPT, str(tmp_path / "run"), hows[loaded], "loaded", ranks=loaded)
    assert done.returncode == 0, done.stderr[-4000:]
    told = child.told(done)
    assert [(rank["step"], rank["wrong"]) for rank in told] in (
        [(2, [])] * loaded,
        [(4, [])] * loaded,
    )


def test_a_script_of_accelerate_is_run_as_it_is(tmp_path: Path) -> None:
    run = ("-m", "smckpt.run", "--for", "accelerate")
    done = child.script(SCRIPT, str(tmp_path / "run"), "plain", "stock", by=run)
    assert done.returncode == 0, done.stderr[-4000:]
    assert names(tmp_path / "run") == ["checkpoint_0", "checkpoint_1"]
    assert "replaced accelerate.accelerator.Accelerator.save_state" in done.stderr


@pytest.fixture
def accelerator(tmp_path: Path) -> Iterator[SmckptAccelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)
    named = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    made = SmckptAccelerator(cpu=True, project_config=named)
    made.prepare(torch.nn.Linear(2, 2))
    yield made
    made.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)


def test_what_is_not_honoured_is_refused_by_name(accelerator: SmckptAccelerator) -> None:
    with pytest.raises(UsageError, match="save_state does not honour 'exclude_frozen'"):
        accelerator.save_state(exclude_frozen=True)
    accelerator.smckpt_arguments = {"step": 3}
    with pytest.raises(UsageError, match="smckpt_arguments has step, which is not honoured"):
        accelerator.save_state()
    accelerator.smckpt_arguments = {}
    accelerator.save_state()
    with pytest.raises(UsageError, match="load_state does not honour 'strict'"):
        accelerator.load_state(strict=True)


def test_what_no_save_honours_is_refused_before_training(
    tmp_path: Path, accelerator: SmckptAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = ProjectConfiguration(project_dir=str(tmp_path), save_on_each_node=True)
    with pytest.raises(UsageError, match="SmckptAccelerator does not honour 'save_on_each_node'"):
        SmckptAccelerator(cpu=True, project_config=each)
    accelerator.project_configuration.save_on_each_node = True
    with pytest.raises(UsageError, match="save_state does not honour 'save_on_each_node'"):
        accelerator.save_state()
    monkeypatch.setattr(SmckptAccelerator, "distributed_type", DistributedType.MULTI_XPU)
    with pytest.raises(UsageError, match="MULTI_XPU is not honoured by smckpt's SmckptAccelerator"):
        SmckptAccelerator(cpu=True)


@pytest.mark.parametrize("name", ["DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_other_kinds_of_jobs_are_refused_by_name(
    accelerator: SmckptAccelerator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(AcceleratorState(), "distributed_type", DistributedType[name])
    for call in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(UsageError, match=f"{name} is not honoured"):
            call()


def test_an_iteration_is_saved_once(accelerator: SmckptAccelerator) -> None:
    accelerator.save_state()
    smckpt.maybe_finalize_async_calls()
    accelerator.project_configuration.iteration = 0
    with pytest.raises(ValueError, match="already exists"):
        accelerator.save_state()


def test_what_was_never_committed_is_passed_over(
    accelerator: SmckptAccelerator, tmp_path: Path
) -> None:
    accelerator.save_state()
    smckpt.maybe_finalize_async_calls()
    (weight,) = (p for p in accelerator._models[0].parameters() if p.dim() == 2)
    saved = weight.detach().clone()
    (tmp_path / "checkpoints" / "checkpoint_9").mkdir()
    (tmp_path / "checkpoints" / "checkpoint_9" / "part").touch()
    torch.nn.init.zeros_(weight)
    accelerator.load_state()
    assert torch.equal(weight, saved)


def test_two_models_with_an_optimizer_each_are_saved_and_loaded(tmp_path: Path) -> None:
    def prepared(seed: int) -> tuple[SmckptAccelerator, list[Any]]:
        AcceleratorState._reset_state(reset_partial_state=True)
        made = SmckptAccelerator(cpu=True)
        torch.manual_seed(seed)
        models = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
        optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
        return made, list(made.prepare(*models, *optimizers))

    def everything(parts: list[Any]) -> list[torch.Tensor]:
        one, two, *optimizers = parts
        moments = [v for o in optimizers for slots in o.state.values() for v in slots.values()]
        return [*one.state_dict().values(), *two.state_dict().values(), *moments]

    accelerator, (one, two, *optimizers) = prepared(0)
    accelerator.backward(two(one(torch.ones(2, 4))).sum())
    for optimizer in optimizers:
        optimizer.step()
    accelerator.save_state(str(tmp_path))
    accelerator.end_training()
    wanted = everything([one, two, *optimizers])
    accelerator, parts = prepared(1)
    accelerator.load_state(str(tmp_path))
    accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert len(wanted) == 16
    assert all(map(torch.equal, everything(parts), wanted))


@pytest.mark.parametrize("kind", [Accelerator, SmckptAccelerator])  # who has saved it
def test_what_is_loaded_has_the_memory_of_its_first_save_before_it(
    tmp_path: Path, kind: Any
) -> None:
    def prepared(kind: Any) -> tuple[Any, Any]:
        AcceleratorState._reset_state(reset_partial_state=True)
        made = kind(cpu=True)
        model, optimizer = made.prepare(
            model := torch.nn.Linear(4, 4), torch.optim.AdamW(model.parameters())
        )
        made.backward(model(torch.ones(2, 4)).sum())
        return made, optimizer

    accelerator, optimizer = prepared(kind)
    optimizer.step()
    accelerator.save_state(str(tmp_path / "one"))
    accelerator.end_training()
    _RUNTIME.drop("default", 60)  # as in a new process
    others = arenas()
    accelerator, _ = prepared(SmckptAccelerator)
    accelerator.load_state(str(tmp_path / "one"))
    before = prewarmed("default")
    accelerator.save_state(str(tmp_path / "two"))
    accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert len(before) == len(others) + 1
    assert arenas() == before


@pytest.mark.parametrize("by", ["import", "smckpt run"])
def test_a_new_run_has_the_memory_of_its_first_save_after_its_first_steps(
    tmp_path: Path, by: str
) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    _RUNTIME.drop("default", 60)  # as in a new process
    others = arenas()
    with ExitStack() as stack:
        if by != "import":
            stack.enter_context(provide(["accelerate"]))
        kind = SmckptAccelerator if by == "import" else Accelerator
        accelerator = kind(cpu=True, gradient_accumulation_steps=2)
        dropped = accelerator.prepare_optimizer(torch.optim.SGD(torch.nn.Linear(4, 4).parameters()))
        weight = weakref.ref(dropped.param_groups[0]["params"][0])
        del dropped
        accelerator.free_memory()  # a script that tries sizes of batches begins anew
        assert weight() is None
        models = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
        optimizers = [torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for one in models]
        both = accelerator.prepare(*models, *optimizers)
        calls: list[Any] = []  # hooks that come after ours are called too
        optimizers[0].register_step_post_hook(lambda optimizer, *_: calls.append(optimizer))

        def step(at: int) -> None:
            for _ in range(2):
                with accelerator.accumulate(both[at]):
                    accelerator.backward(both[at](torch.ones(2, 4)).sum())
                    both[2 + at].step()
                    both[2 + at].zero_grad()

        step(0)
        assert arenas() == others and not optimizers[1].state  # it has not stepped
        step(0)
        step(1)
        before = prewarmed("default")
        assert len(before) == len(others) + 1
        step(1)
        assert calls == optimizers[:1] * 2
        accelerator.save_state(str(tmp_path / "one"))
        accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert arenas() == before


@pytest.mark.parametrize("of", ["two models", "none", "a model and none", "a part of a model"])
def test_an_optimizer_comes_back_whatever_tensors_it_trains(tmp_path: Path, of: str) -> None:
    def run(kind: Any, out: Path, *, resumed: bool) -> list[torch.Tensor]:
        AcceleratorState._reset_state(reset_partial_state=True)
        made = kind(cpu=True)
        torch.manual_seed(int(resumed))
        one, two, free = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1), torch.ones(4)
        free.requires_grad_()
        trained = {
            "two models": [*two.parameters(), *one.parameters()],
            "none": [free],
            "a model and none": [free, *two.parameters()],
            "a part of a model": [two.bias],
        }
        optimizer = torch.optim.AdamW(trained[of], 0.1)
        one, two, optimizer = made.prepare(one, two, optimizer)
        if resumed:
            made.load_state(str(out))
        else:
            made.backward(two(one(torch.ones(2, 4) * free)).sum())
            optimizer.step()
            made.save_state(str(out))
        made.end_training()
        values = [*one.state_dict().values(), *two.state_dict().values()]
        for parameter in trained[of]:  # in order: stock may keep another
            values += optimizer.state[parameter].values()
        return [each.detach().clone() for each in values]

    for kind in (Accelerator, SmckptAccelerator):
        out = tmp_path / kind.__name__
        wanted = run(kind, out, resumed=False)
        got = run(kind, out, resumed=True)
        assert len(wanted) > 4 and all(map(torch.equal, got, wanted)), kind
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def plain() -> Iterator[SmckptAccelerator]:
    """Without automatic names, of one model and its optimizer."""
    AcceleratorState._reset_state(reset_partial_state=True)
    made = SmckptAccelerator(cpu=True)
    model = torch.nn.Linear(4, 4)
    made.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    yield made
    made.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("others", [["step_2"], ["step_2", "step_3"], []])
@pytest.mark.parametrize("left", ["parts", "nothing"])
def test_an_unfinished_directory_is_refused_with_the_newest_whole_one(
    plain: SmckptAccelerator, tmp_path: Path, others: list[str], left: str
) -> None:
    for name in [*others, "step_4"]:
        plain.save_state(tmp_path / name)
        smckpt.maybe_finalize_async_calls()
    for path in (tmp_path / "step_4").iterdir():
        if left == "nothing" or path.name.startswith("manifest-"):
            path.unlink()
    newest = f"load {tmp_path / others[-1]}, the newest whole one" if others else "begin anew"
    with pytest.raises(CheckpointNotFoundError, match=newest):
        plain.load_state(tmp_path / "step_4")
    if others:
        plain.load_state(tmp_path / others[-1])


def test_files_of_accelerates_own_do_not_outlive_a_save_over_them(
    plain: SmckptAccelerator, tmp_path: Path
) -> None:
    stock = Accelerator.save_state
    stock(plain, tmp_path / "last")
    (tmp_path / "last" / "notes.txt").write_text("the user's")
    before = {path.name for path in (tmp_path / "last").iterdir()}
    assert {"model.safetensors", "optimizer.bin", "random_states_0.pkl"} <= before
    plain.save_state(tmp_path / "last")
    smckpt.maybe_finalize_async_calls()
    left = {path.name for path in (tmp_path / "last").iterdir()} & before
    assert left == {"notes.txt"}
    plain.load_state(tmp_path / "last")


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("below", ["", "/pytorch_model_fsdp_0"])
def test_weights_are_merged(
    plain: SmckptAccelerator, tmp_path: Path, safe: bool, below: str
) -> None:
    plain.save_state(tmp_path / "step_2")
    smckpt.maybe_finalize_async_calls()
    merge_fsdp_weights(f"{tmp_path}/step_2{below}", tmp_path / "out", safe)
    (made,) = (tmp_path / "out").iterdir()
    assert made.name == ("model.safetensors" if safe else "pytorch_model.bin")
    merged = load_file(made) if safe else torch.load(made, weights_only=True)
    state = plain._models[0].state_dict()
    assert merged.keys() == state.keys()
    assert all(torch.equal(merged[name], state[name]) for name in state)
    with pytest.raises(UsageError, match="no 'model_3'"):
        merge_fsdp_weights(f"{tmp_path}/step_2/pytorch_model_fsdp_3", tmp_path / "out")


@pytest.mark.parametrize("of", ["smckpt", "accelerate"])
def test_the_command_merges_weights_under_smckpt_run(
    plain: SmckptAccelerator, tmp_path: Path, of: str
) -> None:
    saved, out = tmp_path / "step_2", tmp_path / "out"
    state = plain._models[0].state_dict()
    if of == "smckpt":
        plain.save_state(saved)
        smckpt.maybe_finalize_async_calls()
    else:  # as accelerate saves an FSDP model
        dcp.save({"model": state}, checkpoint_id=saved, no_dist=True)
    line = "-m smckpt.run --for accelerate -m accelerate.commands.accelerate_cli merge-weights"
    done = child.script(out, by=(*line.split(), str(saved)))
    assert done.returncode == 0, done.stderr[-4000:]
    merged = load_file(out / "model.safetensors")
    assert merged.keys() == state.keys()
    assert all(torch.equal(merged[name], state[name]) for name in state)


def test_a_directory_below_the_home_is_found_there(
    plain: SmckptAccelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    saved = plain.save_state("~/out")
    smckpt.maybe_finalize_async_calls()
    assert saved == str(tmp_path / "home" / "out")
    assert len(smckpt.find_checkpoints(saved)) == 1
    plain.load_state("~/out")
    Accelerator.save_state(plain, str(tmp_path / "home" / "stock"))
    plain.load_state("~/stock")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
