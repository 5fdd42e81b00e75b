"""A framework without smckpt resumes from what `smckpt convert` makes of a checkpoint of ours."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

import smckpt
from smckpt.cli.models import convert as command
from smckpt.errors import CorruptCheckpointError, StateError, UsageError
from smckpt.formats.conversion.convert import FORMATS
from tests.cli.test_cli import run as cli
from tests.integrations.test_trainer_adapters import MADE, lora
from tests.support import child
from tests.support.frameworks.small_trainer import DATA, same, weights
from tests.support.frameworks.small_trainer import trainer as small_trainer
from tests.support.launch import run_ranks

SUPPORT = Path(__file__).parents[1] / "support" / "frameworks"


def told(script: str, *arguments: str | Path, ranks: int = 1) -> list[dict[str, Any]]:
    done = child.script(SUPPORT / script, *map(str, arguments), ranks=ranks)
    assert done.returncode == 0, done.stderr[-4000:]
    return child.told(done)


def converted(source: Path, target: Path, to: str) -> dict[str, Any]:
    """What `smckpt convert` reports."""
    found: dict[str, Any] = json.loads(cli("convert", source, target, "--to", to, "--json"))
    assert (found["format"], Path(found["target"])) == (to, target)
    return found


def newest(run: Path) -> Path:
    found = smckpt.latest_checkpoint(run)
    assert found is not None
    return Path(found.path)


# -- the Trainer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "ranks"),
    [("plain", 1), *(pytest.param(how, 2, marks=pytest.mark.long) for how in ("plain", "fsdp"))],
)
def test_the_stock_trainer_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, ranks: int
) -> None:
    died = child.script(
        SUPPORT / "trainer_run.py", str(tmp_path / "run"), how, "die", "5", "between", ranks=ranks
    )
    assert died.returncode != 0 and "it lives" not in died.stderr, died.stderr
    source = newest(tmp_path / "run")
    target = tmp_path / "stock" / source.name
    report = converted(source, target, "trainer")
    assert (report["format"], report["ranks"]) == ("trainer", ranks)
    assert [*target.parent.iterdir()] == [target]
    names = sorted(os.listdir(target))
    moments = torch.load(target / "optimizer.pt", weights_only=True) if how == "plain" else None
    monkeypatch.setenv("TRAINER_STOCK", "1")
    each = told("trainer_run.py", tmp_path / "stock", how, "resume", target, ranks=ranks)
    assert len(each) == ranks
    for rank in each:
        assert rank["resumed"] == rank["straight"]
    own = tmp_path / "stock-straight" / "checkpoint-6"  # what the Trainer itself writes
    wanted_names = set(os.listdir(own))
    beside = {"config.json", "generation_config.json", "training_args.bin"}  # under FSDP ours alone
    assert set(names) - wanted_names <= (beside if how == "fsdp" else set())
    assert wanted_names <= set(names)
    if moments is not None:
        wanted = torch.load(own / "optimizer.pt", weights_only=True)
        assert [*moments["state"]] == [*wanted["state"]]
        assert [g["params"] for g in moments["param_groups"]] == [
            g["params"] for g in wanted["param_groups"]
        ]


@pytest.mark.parametrize("to", ["trainer", "accelerate"])
def test_whole_state_dicts_of_fsdp_go_back_into_one_file_each(tmp_path: Path, to: str) -> None:
    packed = io.BytesIO()
    zipfile.ZipFile(packed, "w").close()
    models = {"model": {"w": torch.ones(3)}, "model_1": {"v": torch.ones(2)}}
    moments = {"optimizer": {"w": {"exp_avg": torch.full((3,), 2.0)}}, "optimizer_1": {}}
    state: dict[str, Any] = {**models, "trainer": {"global_step": 1}}
    for key, (name,) in (("optimizer", models["model"]), ("optimizer_1", models["model_1"])):
        groups = [{"lr": 0.5, "params": [name]}]
        state[key] = {"state": moments[key], "param_groups": groups}
    state |= dict.fromkeys(("files", "own_files"), packed.getvalue())
    form = {"fsdp": {"version": 2, "state_dict_type": "FULL_STATE_DICT"}}
    options = smckpt.SaveOptions(metadata=form)
    smckpt.save(state, checkpoint_id=str(tmp_path / "a"), options=options)
    converted(tmp_path / "a", tmp_path / "b", to)
    for number in ("", "_1") if to == "accelerate" else ("",):
        model, optimizer = (
            torch.load(tmp_path / "b" / f"{name}{number}.bin", weights_only=True)
            for name in ("pytorch_model_fsdp", "optimizer")
        )
        assert same(model, models["model" + number])
        assert optimizer["param_groups"] == state["optimizer" + number]["param_groups"]
        assert optimizer["state"].keys() == moments["optimizer" + number].keys()


@pytest.mark.parametrize("relative", [False, True])  # where True, the best one is converted too
def test_the_best_checkpoint_is_the_one_beside_the_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: bool
) -> None:
    """At the source's path it finds smckpt's, loads nothing from there, and removes its own."""
    monkeypatch.chdir(tmp_path)
    run, back, alone = (Path("" if relative else tmp_path) / one for one in ("run", "back", "own"))
    best: dict[str, Any] = {
        "eval_dataset": DATA, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 5.0,
        "load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True,
    }  # fmt: skip
    one = small_trainer(run, 8, StopsAt(6), save_total_limit=2, **best)
    one.train()
    for step in (4, 6) if relative else (6,):
        smckpt.convert(run / f"checkpoint-{step}", back / f"checkpoint-{step}", to="trainer")
    again = small_trainer(back, 8, kind=Trainer, save_total_limit=1, **best)
    again.train(resume_from_checkpoint=str(back / "checkpoint-6"))
    if not relative:
        assert again.state.best_model_checkpoint is None and os.listdir(back) == ["checkpoint-8"]
        return
    own = small_trainer(alone, 8, kind=Trainer, save_total_limit=1, **best)
    own.train()
    assert own.state.best_model_checkpoint == str(alone / "checkpoint-4"), "an earlier one is best"
    assert again.state.best_model_checkpoint == str(back / "checkpoint-4")
    assert same(weights(again.model), weights(own.model))
    assert [*os.listdir(back)] == [*os.listdir(alone)] == ["checkpoint-4"]


class StopsAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self.step


ADAPTERS = {
    "lora": lora,
    "modules_to_save": lambda: lora(modules_to_save=["lm_head"]),
    "dora, tokens": lambda: lora(use_dora=True, trainable_token_indices=[1, 2]),
    "two": lambda: two_of_lora(),
}


def two_of_lora() -> Any:
    model = lora()
    model.add_adapter("other", LoraConfig(r=3, target_modules=["k_proj"]))
    return model


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_stock_trainer_goes_on_with_an_adapter(tmp_path: Path, name: str) -> None:
    more = {"lr_scheduler_type": "linear", "learning_rate": 1e-2}
    one = small_trainer(tmp_path / "run", 4, model=ADAPTERS[name](), **more)
    one.add_callback(StopsAt(2))
    one.train()
    target = tmp_path / "back" / "checkpoint-2"
    converted(tmp_path / "run" / "checkpoint-2", target, "trainer")
    straight = small_trainer(
        tmp_path / "own", 4, kind=Trainer, model=ADAPTERS[name](), **more
    )  # fmt: skip
    straight.train()
    own = tmp_path / "own" / "checkpoint-2"
    files = [file.relative_to(own) for file in own.rglob("adapter_model.safetensors")]
    assert len(files) == (2 if name == "two" else 1)
    for file in files:
        assert same(load_file(target / file), load_file(own / file))
    again = small_trainer(tmp_path / "again", 4, kind=Trainer, model=ADAPTERS[name](), **more)
    again.train(resume_from_checkpoint=str(target))
    assert again.state.global_step == 4
    assert same(weights(again.model), weights(straight.model))


@pytest.mark.parametrize("version", [1, 2])
def test_an_adapter_under_fsdp_has_the_names_that_accelerate_reads(
    tmp_path: Path, version: int
) -> None:
    """Under FSDP2 with whole state dicts those of the model, else PEFT's."""
    ours, theirs = "a.lora_A.default.weight", "a.lora_A.weight"
    state = {"model": {ours: torch.ones(3)}, "trainer": {}, "adapters": {"default": {theirs: ours}}}
    for kind, name in (("SHARDED", theirs), ("FULL", theirs if version == 1 else ours)):
        form = {"fsdp": {"version": version, "state_dict_type": f"{kind}_STATE_DICT"}}
        source, target = tmp_path / kind, tmp_path / f"{kind}-back"
        options = smckpt.SaveOptions(metadata=form)
        smckpt.save(state, checkpoint_id=str(source), options=options)
        (source / "adapter_config.json").write_text("{}")
        converted(source, target, "trainer")
        if kind == "FULL":
            found = torch.load(target / "pytorch_model_fsdp.bin", weights_only=True)
        else:
            found = {name: torch.zeros(3)}
            dcp.load({"model": found}, checkpoint_id=target / "pytorch_model_fsdp_0", no_dist=True)
        assert found.keys() == {name} and torch.equal(found[name], torch.ones(3))


@pytest.mark.parametrize("name", ["prompts", "injected", "unfrozen"])
def test_another_adapter_is_refused_by_name(tmp_path: Path, name: str) -> None:
    small_trainer(tmp_path / "run", 2, model=MADE[name]()).train()
    with pytest.raises(StateError, match="PEFT itself writes no tensor"):
        smckpt.convert(tmp_path / "run" / "checkpoint-2", tmp_path / "out", to="trainer")
    assert not (tmp_path / "out").exists()


# -- accelerate ------------------------------------------------------------------------------------

TWO = """
import json, sys
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
import smckpt
from smckpt.integrations.accelerate import SmckptAccelerator

class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.norm = torch.nn.BatchNorm1d(6)

    def forward(self, x):
        return torch.dropout(self.norm(self.two(self.one(x))), 0.2, self.training)

class Seen:
    steps = 0
    def state_dict(self):
        return {"steps": self.steps}
    def load_state_dict(self, state):
        self.steps = state["steps"]

def train(kind, folder, resume, last):
    torch.manual_seed(0)
    named = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    accelerator = kind(cpu=True, project_config=named)
    models = [Tied(), Tied()]
    held = [models[0].norm.weight, models[0].norm.bias]  # the last of the model, in the first group
    rest = [p for p in models[0].parameters() if all(p is not h for h in held)]
    groups = [{"params": held, "weight_decay": 0.5}, {"params": rest}]
    kinds = [torch.optim.AdamW(groups, lr=0.1), torch.optim.SGD(models[1].parameters(), 0.1, 0.9)]
    paces = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in kinds]
    prepared = accelerator.prepare(*models, *kinds, *paces)
    models, kinds, paces = prepared[:2], prepared[2:4], prepared[4:]
    seen = Seen()
    accelerator.register_for_checkpointing(seen)
    if resume:
        accelerator.load_state()
    losses = []
    for step in range(seen.steps + 1, last + 1):
        loss = sum(model(torch.randn(4, 6)).square().mean() for model in models)
        accelerator.backward(loss)
        for one in (*kinds, *paces):
            one.step()
        for one in kinds:
            one.zero_grad()
        seen.steps = step
        losses.append(loss.item())
        if step == 3 and not resume:
            accelerator.save_state()
    smckpt.maybe_finalize_async_calls()
    weights = [v.tolist() for model in models for v in model.state_dict().values()]
    return {"losses": losses, "weights": weights, "lr": [p.get_last_lr() for p in paces],
            "moments": [v.tolist() for k in kinds for s in k.state_dict()["state"].values()
                        for v in s.values() if v is not None]}

folder, what = sys.argv[1:]
if what == "ours":
    train(SmckptAccelerator, folder, False, 3)
elif what == "back":
    print(json.dumps(train(Accelerator, folder, True, 6)))
else:
    print(json.dumps(train(Accelerator, folder, False, 6)))
"""


def test_stock_accelerate_goes_on_with_two_models_and_two_optimizers(tmp_path: Path) -> None:
    child.run(TWO, str(tmp_path / "run"), "ours", timeout=200)
    source, target = (tmp_path / one / "checkpoints" / "checkpoint_0" for one in ("run", "back"))
    converted(source, target, "accelerate")
    back = json.loads(child.run(TWO, str(tmp_path / "back"), "back", timeout=200).splitlines()[-1])
    alone = json.loads(child.run(TWO, str(tmp_path / "own"), "alone", timeout=200).splitlines()[-1])
    assert back.pop("losses") == alone.pop("losses")[3:]
    assert back == alone
    own = sorted(os.listdir(tmp_path / "own" / "checkpoints" / "checkpoint_0"))
    renamed = {
        "model.safetensors": "pytorch_model.bin",
        "model_1.safetensors": "pytorch_model_1.bin",
    }
    assert sorted(os.listdir(target)) == sorted(renamed.get(name, name) for name in own)


@pytest.mark.long
@pytest.mark.parametrize("how", ["plain", "fsdp2", "fsdp2full"])
def test_ranks_of_stock_accelerate_go_on_bit_for_bit(tmp_path: Path, how: str) -> None:
    died = child.script(SUPPORT / "accelerate_run.py", str(tmp_path / "run"), how, "die", ranks=2)
    assert died.returncode != 0 and "it lives" not in died.stderr, died.stderr
    source = newest(tmp_path / "run")
    converted(source, tmp_path / "back" / "checkpoints" / source.name, "accelerate")
    each = told("accelerate_run.py", tmp_path / "back", how, "back", ranks=2)
    assert len(each) == 2
    for rank in each:
        losses, back = rank["straight"].pop("losses"), rank["resumed"].pop("losses")
        assert back == losses[-len(back) :] and len(back) < len(losses)
        assert rank["resumed"] == rank["straight"]


# -- Lightning -------------------------------------------------------------------------------------

LIGHT = """
import json, sys
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from smckpt.integrations.lightning import SmckptCheckpointIO
from tests.support.frameworks.lightning_run import Batches

class Model(LightningModule):
    def __init__(self, width=16):
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 16))
        self.losses = []

    def training_step(self, batch, index):
        loss = (self.layers(batch) - batch).square().mean()
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        first, last = self.layers[0], self.layers[1]
        groups = [{"params": last.parameters(), "lr": 0.02}, {"params": first.parameters()}]
        made = torch.optim.AdamW(groups, lr=0.01)
        return [made], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(made, 0.9),
                         "interval": "step"}]

folder, what = sys.argv[1:]
torch.manual_seed(0)
saved = ModelCheckpoint(dirpath=folder, filename="{step}", monitor="loss", save_top_k=-1,
                        every_n_train_steps=2)
plugins = [SmckptCheckpointIO(async_checkpointing=False)] if what == "ours" else None
trainer = Trainer(accelerator="cpu", max_steps=6 if what == "ours" else 9, callbacks=[saved],
                  logger=False, enable_progress_bar=False, enable_model_summary=False,
                  log_every_n_steps=1, plugins=plugins, default_root_dir=folder)
model = Model()
trainer.fit(model, Batches(), ckpt_path=what if what.endswith(".ckpt") else None)
(optimizer,) = trainer.optimizers
print(json.dumps({
    "losses": model.losses[-3:],
    "weights": [p.tolist() for p in model.parameters()],
    "moments": [v.tolist() for s in optimizer.state_dict()["state"].values() for v in s.values()],
    "lr": [g["lr"] for g in optimizer.param_groups],
    "step": trainer.global_step, "epoch": trainer.current_epoch,
}))
"""


def test_stock_lightning_goes_on_from_one_file(tmp_path: Path) -> None:
    child.run(LIGHT, str(tmp_path / "run"), "ours", timeout=200)
    source, target = tmp_path / "run" / "step=6.ckpt", tmp_path / "back" / "step=6.ckpt"
    converted(source, target, "lightning")
    assert target.is_file()
    back = child.run(LIGHT, str(tmp_path / "back"), str(target), timeout=200)
    alone = child.run(LIGHT, str(tmp_path / "own"), "alone", timeout=200)
    assert json.loads(back.splitlines()[-1]) == json.loads(alone.splitlines()[-1])
    found = torch.load(target, weights_only=True)
    own = torch.load(tmp_path / "own" / "step=6.ckpt", weights_only=True)
    assert found.keys() == own.keys()
    for key in ("pytorch-lightning_version", "epoch", "global_step", "hyper_parameters", "loops"):
        assert found[key] == own[key]
    callbacks = repr(found["callbacks"]).replace(f"{tmp_path}/run", f"{tmp_path}/own")
    assert "best_model_score" in callbacks and callbacks == repr(own["callbacks"])


SHARDED = """
import json, sys
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from tests.support.frameworks import lightning_run

# without random numbers, which Lightning itself does not bring back
torch.nn.Dropout = lambda rate: torch.nn.Identity()
torch.randn_like = torch.zeros_like
folder, what = sys.argv[1:]
if what != "ours":
    lightning_run.ours.SmckptTrainer = Trainer
    lightning_run.ours.SmckptModelParallelStrategy = ModelParallelStrategy
lightning_run.seed_everything(0, verbose=False)
trainer, model = lightning_run.trainer(folder, "fsdp2", 0), lightning_run.Model()
if what == "ours":
    trainer.fit_loop.epoch_loop.max_steps = 4
path = what if what.endswith(".ckpt") else None
trainer.fit(model, lightning_run.Batches(), ckpt_path=path)
ended = lightning_run.ended(trainer, model)
chosen = {key: ended[key] for key in ("digest", "losses", "lr", "seen", "epoch", "sharded")}
print(f"told {json.dumps(chosen)}", flush=True)
"""


@pytest.mark.long
def test_stock_lightning_shards_what_one_file_has(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SHARDED)
    told(str(script), tmp_path / "run", "ours", ranks=2)
    target = tmp_path / "back" / "step=4.ckpt"
    converted(tmp_path / "run" / "step=4.ckpt", target, "lightning")
    back = told(str(script), tmp_path / "back", target, ranks=2)
    alone = told(str(script), tmp_path / "own", "alone", ranks=2)
    for rank in (*back, *alone):
        assert rank["sharded"] == "DTensor"
        rank["losses"] = rank["losses"][-5:]
    assert len(back) == 2
    assert sorted(back, key=lambda one: one["digest"]) == sorted(
        alone, key=lambda one: one["digest"]
    )


class Width:
    """A hyper-parameter that only code can make."""

    def __init__(self, width: int) -> None:
        self.width = width


def test_what_only_code_can_make_is_refused_until_its_type_is_named(tmp_path: Path) -> None:
    from smckpt.integrations.lightning import SmckptCheckpointIO

    checkpoint = {
        "state_dict": {"w": torch.ones(2)}, "global_step": 3, "hyper_parameters": {"a": Width(4)},
    }  # fmt: skip
    SmckptCheckpointIO(async_checkpointing=False).save_checkpoint(checkpoint, tmp_path / "a")
    with pytest.raises(UsageError, match=r"hyper_parameters.*Width.*add_safe_globals"):
        smckpt.convert(tmp_path / "a", tmp_path / "b.ckpt", to="lightning")
    assert not (tmp_path / "b.ckpt").exists()
    with torch.serialization.safe_globals([Width]):
        smckpt.convert(tmp_path / "a", tmp_path / "b.ckpt", to="lightning")
    found = torch.load(tmp_path / "b.ckpt", weights_only=False)
    assert found.keys() == checkpoint.keys() and found["global_step"] == 3
    assert found["hyper_parameters"]["a"].width == 4
    assert torch.equal(found["state_dict"]["w"], torch.ones(2))


# -- torchtitan ------------------------------------------------------------------------------------


def titan(rank: int) -> dict[str, Any]:
    """A state as torchtitan's manager has it: names of the model at the top, the optimizer's
    flat, and the position of each rank's data under the rank's name."""
    torch.manual_seed(1)
    model = {"layers.0.weight": torch.randn(4, 3), "norm.weight": torch.randn(3)}
    flat = {f"state.{name}.exp_avg": value + 1 for name, value in model.items()}
    groups = {f"param_groups.{name}.lr": 0.5 for name in model}
    return {
        **model,
        "optimizer": {**flat, **groups},
        "lr_scheduler": {"last_epoch": 3, "_last_lr": [0.25], "lr_lambdas": [None]},
        "dataloader": {"world_size": 2, f"dp_rank_{rank}": bytes([rank]) * 5},
        "train_state": {"step": torch.tensor(3), "ntokens_seen": torch.tensor(7)},
    }


def save_titan(folder: str) -> None:
    smckpt.save(titan(dist.get_rank()), checkpoint_id=folder)


def load_titan(folder: str) -> list[str]:
    """Stock DCP fills the state of each of two ranks. Gives the names that differ."""
    wanted = titan(dist.get_rank())
    state = titan(dist.get_rank())
    for value in (*state.values(), *state["optimizer"].values(), *state["train_state"].values()):
        if isinstance(value, torch.Tensor):
            value.zero_()
    state["dataloader"] = {"world_size": 0, f"dp_rank_{dist.get_rank()}": b""}
    state["lr_scheduler"] = {"last_epoch": 0, "_last_lr": [0.0], "lr_lambdas": [0]}
    dcp.load(state, checkpoint_id=folder)
    return [name for name in wanted if repr(state[name]) != repr(wanted[name])]


def test_stock_dcp_fills_the_state_of_torchtitan_on_each_rank(tmp_path: Path) -> None:
    run_ranks(save_titan, 2, str(tmp_path / "step-3"))
    converted(tmp_path / "step-3", tmp_path / "back" / "step-3", "torchtitan")
    assert run_ranks(load_titan, 2, str(tmp_path / "back" / "step-3")) == [[], []]


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["trainer", "accelerate", "lightning", "torchtitan"])
@pytest.mark.parametrize("by", ["hand", "another door", "torch"])
def test_what_another_saved_is_refused_by_name(tmp_path: Path, to: str, by: str) -> None:
    state = {"model": {"w": torch.ones(3)}}
    if by == "another door":
        state |= {"train_state": {"step": 1}, "optimizer": {}}
        if to == "torchtitan":
            state = {"model": {"w": torch.ones(3)}, "trainer": {"global_step": 1}}
    if by == "torch":
        torch.save(state, tmp_path / "source")
    else:
        smckpt.save(state, checkpoint_id=str(tmp_path / "source"))
    with pytest.raises(StateError, match=f"{to} cannot resume .* has no ") as caught:
        smckpt.convert(tmp_path / "source", tmp_path / "out" / "a", to=to)
    other = "torchtitan" if to != "torchtitan" else "trainer"
    assert (f"--to {other}" in str(caught.value)) == (by == "another door")
    assert not [*(tmp_path / "out").glob("*")]


def test_the_command_knows_every_format() -> None:
    (option,) = (one for one in command.params if one.name == "to")
    assert tuple(option.type.choices) == FORMATS


@pytest.mark.parametrize("to", ["trainer", "accelerate", "lightning", "torchtitan"])
def test_the_command_refuses_by_name_and_writes_nothing(tmp_path: Path, to: str) -> None:
    smckpt.save({"model": {"w": torch.ones(2)}}, checkpoint_id=str(tmp_path / "a"))
    text = cli("convert", tmp_path / "a", tmp_path / "b", "--to", to, status=2)
    assert f"{to} cannot resume" in text and " — " in text and "Traceback" not in text
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("more", [{"shard": 2}, {"rank": 0}])
def test_arguments_of_other_formats_are_refused_by_name(
    tmp_path: Path, more: dict[str, int]
) -> None:
    smckpt.save({"trainer": {}, "model": {"w": torch.ones(2)}}, checkpoint_id=str(tmp_path / "a"))
    with pytest.raises(UsageError, match=next(iter(more))):
        smckpt.convert(tmp_path / "a", tmp_path / "b", to="trainer", **more)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("to", ["trainer", "torchtitan"])
def test_nothing_is_left_where_it_fails_in_the_middle(tmp_path: Path, to: str) -> None:
    state = {"trainer": {}, "model": {"w": torch.ones(2)}, "train_state": {}, "optimizer": {}}
    state["optimizer"] = {"state": {0: {"m": torch.ones(1 << 18)}}}
    smckpt.save(state, checkpoint_id=str(tmp_path / "a"))
    (data,) = (tmp_path / "a").glob("data-*.safetensors")
    with open(data, "r+b") as file:
        file.seek(-9, os.SEEK_END)
        file.write(b"other")
    with pytest.raises(CorruptCheckpointError):
        smckpt.convert(tmp_path / "a", tmp_path / "out" / "b", to=to)
    assert not [*(tmp_path / "out").iterdir()]
