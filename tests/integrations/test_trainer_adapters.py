"""With an adapter of PEFT alone trained, a checkpoint holds the adapter, as the Trainer's does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import smckpt
from smckpt.integrations.transformers import SmckptTrainer
from tests.support.frameworks.small_trainer import Begins, same, tiny, trainer, weights

peft = pytest.importorskip("peft")


def lora(**more: Any) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, **more)
    return peft.get_peft_model(tiny(), config)


def two_adapters() -> Any:
    model = lora()
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["k_proj"]))
    for name, parameter in model.named_parameters():  # as a user who trains both
        if "lora_" in name:
            parameter.requires_grad_(True)
    return model


def prompts() -> Any:
    torch.manual_seed(1)
    kind = peft.TaskType.CAUSAL_LM
    return peft.get_peft_model(
        tiny(), peft.PromptTuningConfig(num_virtual_tokens=3, task_type=kind)
    )


def injected() -> Any:
    torch.manual_seed(1)
    model = tiny()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return model


def unfrozen() -> Any:
    """A norm of the base is trained beside the adapter."""
    model = lora()
    model.base_model.model.model.norm.weight.requires_grad_(True)
    return model


class Counted(torch.nn.Module):
    """A frozen linear layer whose weight has buffers beside it, as quantized layers have."""

    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__()
        scale = inner.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (inner.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.qweight.to(x.dtype) * self.scale)


def quantized() -> Any:
    model = lora()
    for layer in model.base_model.model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, Counted(getattr(layer.mlp, name)))
    return model


MADE = {
    "lora": lora,
    "modules_to_save": lambda: lora(modules_to_save=["lm_head"]),
    "dora": lambda: lora(use_dora=True),
    "two adapters": two_adapters,
    "prompts": prompts,
    "injected": injected,
    "unfrozen": unfrozen,
    "quantized": quantized,
}


@pytest.mark.parametrize("name", MADE)
def test_the_adapter_alone_is_saved_and_the_run_goes_on_exactly(tmp_path: Path, name: str) -> None:
    one = trainer(tmp_path / "run", 2, model=MADE[name](), lr_scheduler_type="constant")
    base = sum(each.nbytes for each in one.model.state_dict().values())
    one.train()
    (found,) = smckpt.find_checkpoints(tmp_path / "run")
    saved = smckpt.load(checkpoint_id=found, options=smckpt.LoadOptions(only=["model"]))
    assert saved is not None
    nbytes = sum(each.nbytes for each in saved["model"].values())
    assert nbytes < base / 2, f"{nbytes} of {base}"
    trained = {key for key, each in one.model.named_parameters() if each.requires_grad}
    assert trained <= {*saved["model"]}
    begins = Begins()
    again = trainer(
        tmp_path / "run", 4, begins, model=MADE[name](), lr_scheduler_type="constant"
    )  # fmt: skip
    again.train(resume_from_checkpoint=True)
    assert begins.step == 2 and same(begins.weights, weights(one.model))
    straight = trainer(tmp_path / "b", 4, model=MADE[name](), lr_scheduler_type="constant")
    straight.train()
    assert same(weights(again.model), weights(straight.model))


def test_a_checkpoint_that_holds_the_base_too_still_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from smckpt.integrations.transformers import trainer as module

    with monkeypatch.context() as older:
        older.setattr(module, "adapter_only", lambda model, state: state)
        one = trainer(tmp_path, 2, model=lora())
        one.train()
    begins = Begins()
    trainer(tmp_path, 4, begins, model=lora()).train(True)
    assert begins.step == 2 and same(begins.weights, weights(one.model))


def test_on_save_finds_an_adapter_that_peft_opens(tmp_path: Path) -> None:
    class Loads(Begins):
        def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            directory = f"{args.output_dir}/checkpoint-{state.global_step}"
            opened = peft.PeftModel.from_pretrained(tiny(), directory)
            self.known = same(weights(opened), weights(others["model"]))
            self.names = {*os.listdir(directory)}

    loads = Loads()
    trainer(tmp_path, 2, loads, model=lora()).train()
    assert loads.known and "adapter_model.safetensors" in loads.names
    assert "model.safetensors" not in loads.names


def test_the_best_adapter_is_there_at_the_end(tmp_path: Path) -> None:
    made = trainer(
        tmp_path, 6, model=lora(), eval_strategy="steps", eval_steps=2, greater_is_better=True,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", learning_rate=1e-2,
        eval_dataset=[{"input_ids": torch.arange(8), "labels": torch.arange(8)}],
    )  # fmt: skip
    made.train()
    best = made.state.best_model_checkpoint
    held = smckpt.load(checkpoint_id=best, options=smckpt.LoadOptions(only=["model"]))
    assert held is not None and isinstance(made, SmckptTrainer)
    ended = weights(made.model)
    assert all(torch.equal(ended[key], each) for key, each in held["model"].items())
