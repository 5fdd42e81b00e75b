"""A sample of docs/evidence/optimizers.md: where torch's pair of methods resumes, smckpt does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import smckpt
from tests.support.launch import run_ranks
from tests.support.optimizers import trainer as trainer_optimizers
from tests.support.optimizers.people import everyone, step
from tests.support.optimizers.table import bits, losses, main, table, trained

OF_TORCH = [name for name in everyone() if name.startswith("torch.optim")]
OTHERS = [
    name
    for name in (
        "schedulefree: AdamWScheduleFree",
        "pytorch_optimizer: adafactor",
        "pytorch_optimizer: lorarite",
        "pytorch_optimizer: soap",
        "pytorch_optimizer: spam",
        "pytorch_optimizer: splus",
        "pytorch_optimizer: stablespam",
        "pytorch_optimizer: FriendlySAM",
        "pytorch_optimizer: TRAC",
    )
    if name in everyone()
]
SCHEDULE_FREE = any(name.startswith("schedulefree") for name in everyone())


def check(names: list[str], wrapper: str) -> None:
    found = table(names, (wrapper,))
    assert losses(found) == []
    exact = [name for name, row in found[wrapper].items() if row["stock"] == "exact"]
    assert len(exact) >= len(names) - 1, found


@pytest.mark.parametrize("names", [OF_TORCH, OTHERS], ids=["torch", "others"])
def test_one_process_resumes_what_torch_resumes(names: list[str]) -> None:
    check(names, "plain")


# the fewest that show each mechanism; `long` and `./dev optimizers` try more
ON_RANKS = {
    "DDP": (
        "torch.distributed.optim: PostLocalSGDOptimizer",  # a key of its own, in groups too
        "pytorch_optimizer: PCGrad",  # the dict of the optimizer inside under a key
    ),
    "FSDP1": (
        "torch.optim: AdamW",  # flat, and gathered
        "torch.optim: LBFGS",  # each rank another history
        "pytorch_optimizer: dadaptadan",  # a number on one rank, a tensor on the other
    ),
    "FSDP2": (
        "torch.distributed.optim: apply_optimizer_in_backward",  # many optimizers
        "pytorch_optimizer: scion",  # an enum among its options
        "pytorch_optimizer: ScheduleFreeWrapper",  # it asks the optimizer inside
    ),
}
# docs/evidence/optimizers.md has the reasons
REFUSED = ("LBFGS, FSDP1", "dadaptadan, FSDP1, FULL")


@pytest.mark.parametrize("wrapper", ON_RANKS)
def test_ranks_resume_what_torch_resumes(wrapper: str) -> None:
    names = [name for name in ON_RANKS[wrapper] if name in everyone()]
    found = table(names, (wrapper,))
    lost = [loss for loss in losses(found) if not any(name in loss for name in REFUSED)]
    assert lost == []
    assert all("refused: " in loss for loss in losses(found))
    assert all(row["stock"] == row["object"] == "exact" for row in found[wrapper].values()), found


def zero_resumes(folder: str) -> bool:
    name = "torch.distributed.optim: ZeroRedundancyOptimizer"
    wanted = bits(trained(name, "DDP", 0, range(4))[0])
    model, optimizer = trained(name, "DDP", 0, (0, 1))
    smckpt.save({"model": model, "optimizer": optimizer.optim}, checkpoint_id=folder)
    other, fresh = trained(name, "DDP", 1, ())
    smckpt.load({"model": other, "optimizer": fresh.optim}, checkpoint_id=folder)
    for number in (2, 3):
        step(other, fresh, number)
    return bits(other) == wanted


def test_each_rank_resumes_its_part_of_a_zero_redundancy_optimizer(tmp_path: Path) -> None:
    assert run_ranks(zero_resumes, 2, str(tmp_path)) == [True, True]


@pytest.mark.long
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_ranks_resume_all_of_torchs(wrapper: str) -> None:
    assert losses(table(OF_TORCH, (wrapper,))) == []


def check_trainer(names: list[str]) -> dict[str, dict[str, str]]:
    found = trainer_optimizers.rows(names)
    assert losses({"Trainer": found}) == []
    return found


def test_the_trainers_optimizers_resume_through_smckpt() -> None:
    names = ["adafactor", "adagrad"]  # of transformers; of torch, with state before the first step
    found = check_trainer([*names, *(["schedule_free_adamw"] if SCHEDULE_FREE else [])])
    assert all(row["stock"] == "exact" for row in found.values()), found


@pytest.mark.long
def test_all_of_the_trainers_optimizers_resume_through_smckpt() -> None:
    check_trainer(trainer_optimizers.everyone())


class Whole(torch.optim.Optimizer):
    """Keeps the whole moment of a parameter on each rank, as Muon for FSDP2 is often written, and
    tensors that ask for gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            whole = p.grad.full_tensor()
            if not self.state[p]:
                self.state[p] = {
                    "moment": torch.zeros_like(whole),
                    "table": torch.ones(3),
                    "known": nn.Parameter(torch.zeros_like(p).detach()),
                    "rates": [torch.zeros_like(p).detach().requires_grad_()],
                }
            slots = self.state[p]
            slots["moment"].lerp_(whole, 0.5)
            slots["table"].add_(torch.ones(3))
            for kept in (slots["known"], *slots["rates"]):
                kept.add_(p.grad)
            cut = distribute_tensor(slots["moment"], p.device_mesh, p.placements)
            p.sub_(cut * slots["table"].sum().item() + slots["known"], alpha=0.1)


def whole_and_cut(directory: str, kind: str | None) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))

    def run() -> tuple[nn.Module, Whole]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=mesh)
        return model, Whole(model.parameters())

    def train(model: nn.Module, optimizer: Whole) -> None:
        optimizer.zero_grad()
        model(torch.ones(4)).square().sum().backward()
        optimizer.step()

    def put(do: Any, model: nn.Module, optimizer: Whole) -> None:
        if kind is None:
            do({"model": model, "optimizer": optimizer}, checkpoint_id=directory)
            return
        with smckpt.sm_state_dict_type(model, getattr(smckpt, kind)):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            do(state, checkpoint_id=directory)

    def seen(optimizer: Whole) -> list[Any]:
        return [
            (type(t), t.requires_grad, (t.to_local() if isinstance(t, DTensor) else t).tolist())
            for slots in optimizer.state.values()
            for t in (*slots.values(), *slots["rates"])
            if isinstance(t, torch.Tensor)
        ]

    one, two = run(), run()
    train(*one)
    put(smckpt.save, *one)
    put(smckpt.load, *two)
    different = [f"{a} is {b}" for a, b in zip(seen(one[1]), seen(two[1]), strict=True) if a != b]
    train(*one)
    train(*two)
    pairs = zip(one[0].parameters(), two[0].parameters(), strict=True)
    return different + [str(a) for a, b in pairs if not torch.equal(a.to_local(), b.to_local())]


@pytest.mark.parametrize("kind", [None, "LOCAL", "SHARDED", "FULL"])
def test_what_an_optimizer_keeps_whole_stays_whole_beside_what_a_mesh_divides(
    tmp_path: Path, kind: str | None
) -> None:
    """As a DTensor it could not meet the whole gradient in the next step."""
    assert run_ranks(whole_and_cut, 2, str(tmp_path), kind) == [[], []]


def test_the_tables_command_tells_each_row_and_takes_names_in_any_case(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["lbfgs", "plain", "FSDP2"]) == 0
    printed, progress = capfd.readouterr()
    assert "| torch.optim: LBFGS | = = = = = | = = = = = |" in printed
    for how in ("plain", "FSDP2"):
        assert f"{how}: torch.optim: LBFGS: = = = = =\n" in progress
    assert main(["no such name"]) == 2
    assert "no optimizer has no such name in its name" in capfd.readouterr().err
