"""The Trainer of several ranks through smckpt does what the stock one does."""

from __future__ import annotations

import hashlib
import os
import random
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

import smckpt
from smckpt.integrations.transformers import SmckptTrainer
from smckpt.storage import open_storage
from tests.support.frameworks.small_trainer import flip, heard, tiny, trainer, weights
from tests.support.frameworks.trainer_run import sharded
from tests.support.launch import run_ranks

RATE = {"lr_scheduler_type": "constant"}


def local(model: Any) -> list[torch.Tensor]:
    """This rank's parts of the parameters."""
    parts = (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters())
    return [part.detach().clone() for part in parts]


def equal(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


class Starts(TrainerCallback):
    """Notes where a run begins, and this rank's part of the weights there."""

    smckpt_looks = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.step = state.global_step
        self.parts = local(others["model"])


class Fails(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("a lost link")


class Opens(TrainerCallback):
    """Opens each checkpoint in `on_save`, as an upload does."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        directory = f"{args.output_dir}/checkpoint-{state.global_step}"
        loaded = AutoModelForCausalLM.from_pretrained(directory)
        saved = smckpt.load(
            checkpoint_id=directory, options=smckpt.LoadOptions(only=["model"]), no_dist=True
        )
        known = weights(loaded)
        self.seen.append(
            (state.global_step, all(torch.equal(known[k], v) for k, v in saved["model"].items()))
        )


def kinds(how: str) -> dict[str, Any]:
    return {**sharded(how, "FULL_STATE_DICT"), **RATE}


def weights_alone(out: Path, url: str, how: str) -> None:
    begun = {}  # under FSDP stock cannot resume them
    for kind in (Trainer, SmckptTrainer) if how == "plain" else (SmckptTrainer,):
        run, more = out / kind.__name__, {"save_only_model": True, **kinds(how)}
        first = trainer(run, 2, kind=kind, **more)
        first.train()
        starts = Starts()
        resumed = trainer(run, 4, starts, kind=kind, **more)
        resumed.train(True)
        assert starts.step == 2 and equal(starts.parts, local(first.model)), kind
        begun[kind] = local(resumed.model)
    assert all(equal(each, begun[SmckptTrainer]) for each in begun.values())


def in_s3(out: Path, url: str, how: str) -> None:
    """output_dir is a URL; each life of the run is on another machine."""
    started = []
    for machine, steps in (("1", 4), ("2", 8)):
        (out / machine).mkdir(exist_ok=True, parents=True)
        os.chdir(out / machine)
        starts = Starts()
        one = trainer(url, steps, starts, save_total_limit=1, **kinds(how))
        one.train(resume_from_checkpoint=machine != "1")
        started.append(starts.step)
        dist.barrier()
        assert [each.step for each in smckpt.find_checkpoints(url)] == [steps]
        assert {"config.json", "trainer_state.json"} <= {
            *open_storage(url).join(f"checkpoint-{steps}").names()
        }
        assert not [*(out / machine).rglob("*.safetensors")]
        dist.barrier()
    assert started == [0, 4]
    straight = trainer(out / "straight", 8, **kinds(how))
    straight.train()
    assert equal(local(one.model), local(straight.model))


def looked_at(out: Path, url: str, how: str) -> None:
    opens = Opens()
    trainer(out / "all", 4, opens, **kinds(how)).train()
    assert opens.seen == [(2, True), (4, True)]
    opens = Opens()  # one rank's callback alone looks
    trainer(out / "one", 2, *([opens] if dist.get_rank() else []), **kinds(how)).train()
    assert opens.seen == ([(2, True)] if dist.get_rank() else [])


def retried(out: Path, url: str, how: str) -> None:
    for at in (3, 5):
        run = out / str(at)
        with pytest.raises(RuntimeError, match="a lost link"):
            trainer(run, 6, Fails(at), **kinds(how)).train()
        starts = Starts()
        again = trainer(run, 6, starts, **kinds(how))
        again.train(True)
        assert starts.step == at - 1
    straight = trainer(out / "straight", 6, **kinds(how))
    straight.train()
    assert equal(local(again.model), local(straight.model))


def over_stock(out: Path, url: str, how: str) -> None:
    trainer(out, kind=Trainer, learning_rate=1e-2, **kinds(how)).train()
    stock = {*os.listdir(out / "checkpoint-4")}
    starts = Starts()
    dist.barrier()
    again = trainer(out, 4, starts, learning_rate=1e-3, **kinds(how))
    again.train(str(out / "checkpoint-2"))
    assert starts.step == 2, "stock's own"
    dist.barrier()
    left = {*os.listdir(out / "checkpoint-4")}
    known = ("model", "optimizer", "rng_state", "pytorch_model")
    old = {name for name in stock if name.startswith(known)}
    assert old and not old & left, (old, left)
    starts = Starts()
    trainer(out, 6, starts, **kinds(how)).train(True)
    assert starts.step == 4 and equal(starts.parts, local(again.model))


def overridden(out: Path, url: str, how: str) -> None:
    calls: dict[str, list[Any]] = {}

    def overrides(base: Any, name: str) -> Any:
        seen = calls.setdefault(name, [])

        class Own(base):  # type: ignore[misc]
            def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
                seen.append(("save_model", os.path.basename(output_dir), _internal_call))
                super().save_model(output_dir, _internal_call)

            def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
                seen.append(("_save", os.path.basename(output_dir)))
                os.makedirs(output_dir, exist_ok=True)
                Path(output_dir, f"mine-{dist.get_rank()}").write_text(str(self.state.global_step))

            def _save_rng_state(self, output_dir: str) -> None:
                seen.append(("_save_rng_state", os.path.basename(output_dir)))

        return Own

    for kind in (Trainer, SmckptTrainer):
        trainer(out / kind.__name__, kind=overrides(kind, kind.__name__), **kinds(how)).train()
    dist.barrier()
    assert calls["Trainer"] and calls["SmckptTrainer"] == calls["Trainer"]
    mine = [sorted(p.name for p in (out / k / "checkpoint-4").glob("mine-*")) for k in calls]
    assert mine[0] == mine[1] and mine[0]
    starts = Starts()
    again = overrides(SmckptTrainer, "again")
    trainer(out / "SmckptTrainer", 6, starts, kind=again, **kinds(how)).train(True)
    assert starts.step == 4


def damaged(out: Path, url: str, how: str) -> None:
    for what, rank in (("model", 0), ("optimizer", 1), ("manifest", 0)):
        run = out / f"{what}{rank}"
        trainer(run, **kinds(how)).train()
        dist.barrier()
        if dist.get_rank() == 0:
            flip(run / "checkpoint-4", what, rank)
        dist.barrier()
        starts = Starts()
        again = trainer(run, 4, starts, **kinds(how))
        again.train(True)
        assert starts.step == 2, (what, rank, starts.step)


def adapters(out: Path, url: str, how: str) -> None:
    """Of PEFT: the adapters alone are saved, and the run goes on exactly, as stock's does."""

    def made(name: str) -> Any:
        torch.manual_seed(1)
        options = {"modules_to_save": ["lm_head"]} if name == "with a head" else {}
        given = {"r": 2, "target_modules": ["q_proj", "v_proj"], "use_dora": name == "dora"}
        model = peft.get_peft_model(tiny(), peft.LoraConfig(**given, **options))
        if name == "two":
            model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["k_proj"]))
            model.set_adapter("other")
        return model

    for name in ("lora", "with a head", "dora", "two"):
        ended = {}
        for kind in (Trainer, SmckptTrainer):
            run = out / name / kind.__name__
            first = trainer(run, 2, kind=kind, model=made(name), **kinds(how))
            first.train()
            starts = Starts()
            dist.barrier()
            again = trainer(run, 4, starts, kind=kind, model=made(name), **kinds(how))
            again.train(True)
            assert starts.step == 2 and equal(starts.parts, local(first.model)), (name, kind)
            ended[kind] = local(again.model)
        assert equal(ended[Trainer], ended[SmckptTrainer]), name
        straight = trainer(out / name / "straight", 4, model=made(name), **kinds(how))
        straight.train()
        assert equal(ended[SmckptTrainer], local(straight.model)), name
        saved = smckpt.load(
            checkpoint_id=run / "checkpoint-4",
            options=smckpt.LoadOptions(only=["model"]),
            no_dist=True,
        )
        marks = ("lora_", "modules_to_save")
        assert all(any(mark in key for mark in marks) for key in saved["model"]), [*saved["model"]]


PATHS: dict[str, Callable[[Path, str, str], None]] = {
    each.__name__: each
    for each in (
        looked_at,
        retried,
        adapters,
        damaged,
        weights_alone,
        in_s3,
        over_stock,
        overridden,
    )
}
QUICK = (*PATHS,)[:3]


def ranks(out: str, url: str, how: str, names: tuple[str, ...]) -> dict[str, str]:
    """What failed, by name."""
    failed = {}
    home = os.getcwd()
    for name in names:
        folder = Path(out, name)
        folder.mkdir(exist_ok=True)
        try:
            PATHS[name](folder, f"{url}/{name}", how)
        except Exception:
            failed[name] = traceback.format_exc()
        os.chdir(home)
        dist.barrier()
    return failed


@pytest.mark.parametrize(
    ("how", "names"),
    [
        pytest.param("plain", QUICK, id="quick"),
        *(
            pytest.param(how, (*PATHS,), id=how, marks=pytest.mark.long)
            for how in ("plain", "fsdp", "fsdp1")
        ),
    ],
)
def test_two_ranks_do_what_stock_does(
    tmp_path: Path, s3_root: str, how: str, names: tuple[str, ...]
) -> None:
    failures = run_ranks(ranks, 2, str(tmp_path), s3_root, how, names, timeout=240)
    for failed in failures:
        assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())


class Draws(TrainerCallback):
    """Each rank of the run that saves has numbers of its own; notes the last ones."""

    smckpt_looks = False

    def __init__(self, seed: int | None) -> None:
        self.seed = seed

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.seed is not None:
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(self.seed + dist.get_rank())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        numbers = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
        self.drawn = hashlib.sha256(repr([*map(str, numbers[:2]), *numbers[2].tolist()]).encode())


def drawn(out: str, resumes: bool) -> dict[str, tuple[str, list[str]]]:
    """By who saved and resumed: this rank's random numbers at the end, and what was warned of."""
    found = {}
    for kind in (Trainer, SmckptTrainer):
        draws = Draws(None if resumes else 7)
        with heard("transformers.smckpt") as lines:
            # as many steps as an epoch has on three ranks: the next one draws an order
            made = trainer(f"{out}/{kind.__name__}", 3 if resumes else 2, draws, kind=kind)
            made.train(resumes or None)
        found[kind.__name__] = draws.drawn.hexdigest(), [one for one in lines if "random" in one]
        dist.barrier()
    return found


@pytest.mark.parametrize(
    ("saved", "resumed"), [(1, 2), (2, 1), (2, 2), pytest.param(2, 3, marks=pytest.mark.long)]
)
def test_another_number_of_ranks_takes_the_random_numbers_that_stock_takes(
    tmp_path: Path, saved: int, resumed: int
) -> None:
    before = run_ranks(drawn, saved, str(tmp_path), False)
    after = run_ranks(drawn, resumed, str(tmp_path), True)
    for rank, found in enumerate(after):
        assert found["SmckptTrainer"][0] == found["Trainer"][0]
        goes_on = rank < saved and (saved == 1) == (resumed == 1)
        assert goes_on == (found["SmckptTrainer"][0] == before[rank % saved]["SmckptTrainer"][0])
        warnings = found["SmckptTrainer"][1]
        assert len(warnings) == (rank == 0 and saved != resumed), warnings
