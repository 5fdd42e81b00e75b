"""The Trainer through smckpt does what the stock one does with the same arguments."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Trainer,
    TrainerCallback,
)

import smckpt
from smckpt.engine.api import _RUNTIME
from smckpt.errors import CheckpointError, CorruptCheckpointError, UsageError
from smckpt.integrations.transformers import SmckptTrainer, SmckptTrainerMixin
from tests.engine.test_prewarm import arenas, prewarmed
from tests.support import child
from tests.support.frameworks.small_trainer import (
    DATA,
    Begins,
    Opens,
    arguments,
    flip,
    heard,
    same,
    tiny,
    trainer,
    weights,
)


class Fails(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("a lost link")


class InheritsOnSave(Opens):
    pass


@pytest.mark.parametrize("kind", [Opens, InheritsOnSave])
@pytest.mark.parametrize("stock_first", [False, True])
def test_on_save_finds_the_weights_that_stock_gives_it(
    tmp_path: Path, kind: Any, stock_first: bool
) -> None:
    if stock_first:  # another run's files, at the same steps
        trainer(tmp_path / "run", kind=Trainer, learning_rate=1e-2).train()
    opens = kind()
    trainer(tmp_path / "run", 4, opens).train()
    assert {step: known for step, (_, known) in opens.seen.items()} == {2: True, 4: True}
    stock = {"model.safetensors", "config.json", "generation_config.json"}
    stock |= {"trainer_state.json", "training_args.bin"}
    assert all(stock <= names for names, _ in opens.seen.values())
    assert json.loads((tmp_path / "run/checkpoint-4/trainer_state.json").read_text())[
        "global_step"
    ] == 4  # fmt: skip


def test_wandb_uploads_weights_where_it_is_asked_for_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    from transformers.integrations import WandbCallback

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    for setting, expected in (("checkpoint", True), ("end", False), ("false", False)):
        monkeypatch.setenv("WANDB_LOG_MODEL", setting)
        callback, out = WandbCallback(), tmp_path / setting
        for event in ("setup", "on_train_begin", "on_log", "on_train_end"):  # no run of W&B
            setattr(callback, event, lambda *_, **__: None)
        trainer(out, 2, callback).train()
        assert (out / "checkpoint-2" / "model.safetensors").exists() == expected


def test_a_callback_that_says_that_it_does_not_look_costs_no_wait(tmp_path: Path) -> None:
    class Counts(TrainerCallback):
        smckpt_looks = False

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Nothing."""

    trainer(tmp_path, 2, Counts()).train()
    assert not (tmp_path / "checkpoint-2" / "model.safetensors").exists()


def test_a_resumed_run_has_the_memory_of_its_first_save_before_it(tmp_path: Path) -> None:
    trainer(tmp_path, 2).train()
    _RUNTIME.drop("default", 60)  # as in a new process
    others, before = arenas(), dict[int, int]()

    class Looks(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            before.update(before or prewarmed("default"))

    trainer(tmp_path, 4, Looks()).train(resume_from_checkpoint=True)
    assert len(before) == len(others) + 1
    assert arenas() == before


def test_a_new_run_has_the_memory_of_its_first_save_after_its_first_step(tmp_path: Path) -> None:
    _RUNTIME.drop("default", 60)  # as in a new process
    others, before = arenas(), dict[int, int]()

    class Looks(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                before.update(prewarmed("default"))

    trainer(tmp_path, 4, Looks()).train()
    assert len(before) == len(others) + 1
    assert arenas() == before


@pytest.mark.parametrize("step", [2, 4])
def test_stock_files_do_not_outlive_a_save_over_them(tmp_path: Path, step: int) -> None:
    trainer(tmp_path, kind=Trainer, learning_rate=1e-2).train()
    stock = {*os.listdir(tmp_path / f"checkpoint-{step}")}
    (tmp_path / f"checkpoint-{step}" / "notes.txt").write_text("the user's")
    again = trainer(tmp_path, step)
    again.train()
    left = {*os.listdir(tmp_path / f"checkpoint-{step}")}
    old = {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"}
    assert old <= stock and not old & left and "notes.txt" in left
    assert (
        smckpt.load(
            checkpoint_id=tmp_path / f"checkpoint-{step}",
            options=smckpt.LoadOptions(only=["trainer"]),
        )
        is not None
    )


def test_overridden_methods_are_called_as_stock_calls_them(tmp_path: Path) -> None:
    calls: dict[str, list[tuple[str, str]]] = {}

    def overrides(base: Any, name: str) -> Any:
        seen = calls.setdefault(name, [])

        class Own(base):  # type: ignore[misc]
            def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
                seen.append(("save_model", f"{os.path.basename(output_dir)} {_internal_call}"))
                super().save_model(output_dir, _internal_call)

            def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
                seen.append(("_save", os.path.basename(output_dir)))
                Path(output_dir, "mine.txt").parent.mkdir(parents=True, exist_ok=True)
                Path(output_dir, "mine.txt").write_text(str(self.state.global_step))

            def _save_rng_state(self, output_dir: str) -> None:
                seen.append(("_save_rng_state", os.path.basename(output_dir)))

        return Own

    class Theirs(overrides(Trainer, "mixed in")):  # type: ignore[misc]
        pass

    trainer(tmp_path / "a", kind=overrides(Trainer, "stock")).train()
    trainer(tmp_path / "b", kind=overrides(SmckptTrainer, "ours")).train()
    trainer(tmp_path / "c", kind=type("Mixed", (SmckptTrainerMixin, Theirs), {})).train()
    assert calls["stock"] and calls["ours"] == calls["stock"] == calls["mixed in"]
    for run in "abc":
        assert (tmp_path / run / "checkpoint-4" / "mine.txt").read_text() == "4"
    begins = Begins()
    trainer(tmp_path / "b", 6, begins, kind=overrides(SmckptTrainer, "again")).train(True)
    assert begins.step == 4


def test_an_optimizer_that_trains_more_than_the_model_comes_back_as_in_stock(
    tmp_path: Path,
) -> None:
    def own(base: Any) -> Any:
        class Own(base):  # type: ignore[misc]
            def create_optimizer(self, *model: Any) -> Any:
                made = super().create_optimizer(*model)
                self.more = torch.zeros(3, requires_grad=True)  # as of a loss
                made.add_param_group({"params": [self.more]})
                return made

            def training_step(self, *args: Any) -> Any:
                self.more.grad = torch.full((3,), 1.0 + self.state.global_step)
                return super().training_step(*args)

        return Own

    moments = {}
    for kind in (Trainer, SmckptTrainer):
        out = tmp_path / kind.__name__
        trainer(out, 2, kind=own(kind)).train()
        begins = Begins()
        again = trainer(out, 4, begins, kind=own(kind))
        again.train(True)
        assert begins.step == 2
        slots = again.optimizer.state[again.more]
        moments[kind] = {**weights(again.model), "first": slots["exp_avg"], **slots}
    assert same(moments[Trainer], moments[SmckptTrainer])


@pytest.mark.parametrize("value", [1, {"seen": [0.5]}, print, object()])
def test_what_a_callback_sets_on_the_state_stays_out_as_in_stock(
    tmp_path: Path, value: Any
) -> None:
    class Sets(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            state.of_mine = value

    for kind in (Trainer, SmckptTrainer):
        out = tmp_path / kind.__name__
        trainer(out, 2, Sets(), kind=kind).train()
        begins = Begins()
        trainer(out, 4, begins, Sets(), kind=kind).train(True)
        assert begins.step == 2


def test_a_state_with_what_this_version_lacks_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback's attribute that an earlier smckpt saved, a field of a later transformers."""
    taken = SmckptTrainer._state_to_save

    def with_more(self: Any) -> dict[str, Any]:
        state = taken(self)
        return {**state, "trainer": {**state["trainer"], "of_another_version": 1}}

    with monkeypatch.context() as patch:
        patch.setattr(SmckptTrainer, "_state_to_save", with_more)
        trainer(tmp_path, 2).train()
    begins = Begins()
    trainer(tmp_path, 4, begins).train(True)
    assert begins.step == 2


@pytest.mark.parametrize("asked", [True, "path"])
def test_weights_saved_alone_are_resumed_as_stock_does(tmp_path: Path, asked: Any) -> None:
    begun = {}
    for kind in (Trainer, SmckptTrainer):
        out = tmp_path / kind.__name__
        trainer(out, 2, kind=kind, save_only_model=True).train()
        begins = Begins()
        resumed = trainer(out, 4, begins, kind=kind, save_only_model=True)
        resumed.train(asked if asked is True else str(out / "checkpoint-2"))
        begun[kind] = begins.step, begins.weights, weights(resumed.model)
    stock, ours = begun[Trainer], begun[SmckptTrainer]
    assert stock[0] == ours[0] == 2 and same(stock[1], ours[1])
    assert same(stock[2], ours[2])
    assert not {"optimizer.pt"} & {*os.listdir(tmp_path / "SmckptTrainer" / "checkpoint-4")}


def test_a_link_to_a_checkpoint_is_resumed_from_as_stock_does(tmp_path: Path) -> None:
    found = {}
    for kind in (Trainer, SmckptTrainer):
        out = tmp_path / kind.__name__
        trainer(out, 4, kind=kind).train()
        (out / "good").symlink_to("checkpoint-2")
        (tmp_path / f"{kind.__name__}-good").symlink_to(out / "good")
        # the folder of a link may itself be one: `..` is above what it leads to
        (tmp_path / "deep/links" / kind.__name__).mkdir(parents=True)
        (tmp_path / "deep/links" / kind.__name__ / "best").symlink_to(
            f"../../../{kind.__name__}/good"
        )
        (tmp_path / "home").mkdir(exist_ok=True)
        linked = tmp_path / "home" / f"links-{kind.__name__}"
        linked.symlink_to(tmp_path / "deep/links" / kind.__name__)
        for link in (out / "good", tmp_path / f"{kind.__name__}-good", linked / "best"):
            begins = Begins()
            resumed = trainer(out, 4, begins, kind=kind)
            resumed.train(f"{link}/" if link.parent == out else str(link))
            found[kind, link.name] = begins.step, begins.weights, weights(resumed.model)
    for name in ("good", "best", "-good"):
        stock, ours = (
            found[kind, name if name != "-good" else kind.__name__ + name]
            for kind in (Trainer, SmckptTrainer)
        )
        assert stock[0] == ours[0] == 2 and same(stock[1], ours[1]) and same(stock[2], ours[2])


@pytest.mark.parametrize("fails_at", [3, 5])
def test_a_retry_in_the_same_process_goes_on(tmp_path: Path, fails_at: int) -> None:
    with pytest.raises(RuntimeError, match="a lost link"):
        trainer(tmp_path, 6, Fails(fails_at)).train()
    begins = Begins()
    again = trainer(tmp_path, 6, begins)
    again.train(resume_from_checkpoint=True)
    assert begins.step == fails_at - 1
    straight = trainer(tmp_path / "straight", 6)
    straight.train()
    assert same(weights(again.model), weights(straight.model))


@pytest.mark.parametrize("what", ["model", "optimizer", "part", "manifest"])
@pytest.mark.parametrize("asked", [True, "path"])
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, what: str, asked: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path).train()
    flip(tmp_path / "checkpoint-4", what)
    begins = Begins()
    again = trainer(tmp_path, 6, begins, neftune_noise_alpha=5.0)
    with heard("transformers.smckpt") as lines:
        again.train(asked if asked is True else str(tmp_path / "checkpoint-4"))
    assert begins.step == 2
    assert any("checkpoint-4" in line for line in lines)
    assert len(again.model.get_input_embeddings()._forward_hooks) == 0
    straight = trainer(tmp_path / "straight", 6)
    straight.train()
    assert again.state.global_step == straight.state.global_step


@pytest.mark.long
@pytest.mark.parametrize("how", ["plain", "fsdp", "fsdp1"])
@pytest.mark.parametrize("what", ["model", "optimizer", "manifest"])
def test_all_ranks_go_on_from_the_one_before_a_damaged_one(
    tmp_path: Path, how: str, what: str
) -> None:
    script = Path(__file__).parents[1] / "support" / "frameworks" / "trainer_run.py"
    done = child.script(script, str(tmp_path), how, "whole", ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    flip(tmp_path / "checkpoint-7", what)
    begun = child.script(script, str(tmp_path), how, "begun", ranks=2)
    assert begun.returncode == 0, begun.stderr[-4000:]
    assert child.told(begun) == [{"step": 6}, {"step": 6}]


def test_damage_that_training_meets_later_does_not_begin_it_again(tmp_path: Path) -> None:
    class Reads(TrainerCallback):
        begun = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.begun += 1

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            raise CorruptCheckpointError("of another run", remedy="look there", path="elsewhere")

    trainer(tmp_path, 4).train()
    reads = Reads()
    with pytest.raises(CorruptCheckpointError, match="of another run"):
        trainer(tmp_path, 6, reads).train(True)
    assert reads.begun == 1


def test_a_damaged_checkpoint_that_was_asked_for_by_name_is_not_replaced(tmp_path: Path) -> None:
    trainer(tmp_path, 6).train()
    flip(tmp_path / "checkpoint-4", "model")
    with pytest.raises(CheckpointError, match="checkpoint-4"):
        trainer(tmp_path, 8).train(str(tmp_path / "checkpoint-4"))
    for step in (2, 6):
        flip(tmp_path / f"checkpoint-{step}", "model")
    with pytest.raises(CheckpointError, match="checkpoint-6"):
        trainer(tmp_path, 8).train(True)


def test_stocks_log_lines_are_there_and_a_resume_warns_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines: dict[Any, list[str]] = {}
    for kind in (Trainer, SmckptTrainer):
        out = tmp_path / kind.__name__
        with heard("transformers.trainer") as one, heard("transformers.trainer_utils") as two:
            trainer(out, 6, kind=kind, save_total_limit=1).train()
            trainer(out, 8, kind=kind, save_total_limit=1).train(True)
        texts = (line.replace(str(out), "OUT") for line in (*one, *two))
        lines[kind] = [text for text in texts if "checkpoint" in text]
    assert lines[Trainer] and {*lines[Trainer]} <= {*lines[SmckptTrainer]}
    said = [one for one in caplog.records if one.name.startswith("smckpt")]
    assert [one.getMessage() for one in said if one.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("name", ["push_to_hub", "save_on_each_node", "deepspeed"])
def test_what_is_not_honoured_is_refused_at_the_start(tmp_path: Path, name: str) -> None:
    given = arguments(tmp_path)
    setattr(given, name, True)
    with pytest.raises(UsageError, match=f"{name} of TrainingArguments is not honoured"):
        SmckptTrainer(model=tiny(), args=given, train_dataset=DATA)
    later = trainer(tmp_path, 2)
    setattr(later.args, name, True)
    with pytest.raises(UsageError, match=f"{name} of TrainingArguments is not honoured"):
        later.train()
    assert not [*tmp_path.iterdir()]


def test_an_argument_of_smckpt_that_no_store_takes_is_refused(tmp_path: Path) -> None:
    class Asks(SmckptTrainer):
        smckpt_arguments = {"process_group": None}  # noqa: RUF012

    with pytest.raises(UsageError, match="smckpt_arguments has process_group, which is not"):
        Asks(model=tiny(), args=arguments(tmp_path), train_dataset=DATA)


def test_a_save_that_never_committed_does_not_hide_the_one_before(tmp_path: Path) -> None:
    """An overridden method has written its weights; then the run was killed."""
    trainer(tmp_path).train()
    for name in os.listdir(tmp_path / "checkpoint-4"):
        if name.startswith(("manifest-", "trainer_state")):
            (tmp_path / "checkpoint-4" / name).unlink()
    (tmp_path / "checkpoint-4" / "model.safetensors").write_bytes(b"half")
    begins = Begins()
    trainer(tmp_path, 6, begins).train(True)
    assert begins.step == 2
