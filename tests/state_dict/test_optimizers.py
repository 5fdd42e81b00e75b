"""A sample of docs/optimizers.md: where torch's own pair of methods resumes, smckpt does."""

from __future__ import annotations

from pathlib import Path

import pytest

import smckpt
from tests.support import trainer_optimizers
from tests.support.launch import run_ranks
from tests.support.optimizer_table import bits, losses, table, trained
from tests.support.optimizers import everyone, step

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
# docs/optimizers.md has the reasons
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
