"""DeepSpeed's own engine on two ranks of gloo, on CPU: trains models under ZeRO and saves them.

`deepspeed_run.py MODEL OUT`. MODEL is a Hugging Face directory. OUT/llama and OUT/odd are what
`save_checkpoint` writes in stage 3, of that model in bfloat16 with its embedding frozen, and of one
with sizes that two ranks do not divide, a tied weight and a buffer. OUT/stage0 to OUT/stage2 are of
the first in the other stages. The rate is 0, so the weights stay. OUT/odd.pt is the state of the
second before.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

# an optional kernel, which would be compiled
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


class Odd(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)
        self.last = torch.nn.Linear(7, 3)
        self.last.weight = self.two.weight
        self.register_buffer("seen", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x)) + self.last(self.one(x))


def train(model: torch.nn.Module, out: Path, bf16: bool, loss: Any, stage: int = 3) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0)
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    engine.backward(loss(engine))
    engine.step()
    engine.save_checkpoint(str(out))


def main(model: str, out: Path) -> None:
    dist.init_process_group("gloo")
    tokens = torch.arange(16).reshape(2, 8)
    for stage in range(4):
        llama = AutoModelForCausalLM.from_pretrained(model)
        llama.get_input_embeddings().weight.requires_grad_(False)
        train(
            llama, out / ("llama" if stage == 3 else f"stage{stage}"), True,
            lambda engine: engine(input_ids=tokens, labels=tokens).loss.float(), stage,
        )  # fmt: skip
    torch.manual_seed(0)
    odd = Odd()
    if dist.get_rank() == 0:
        torch.save(odd.state_dict(), out / "odd.pt")
    train(odd, out / "odd", False, lambda engine: engine(torch.ones(2, 5)).square().mean())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
