"""A sample of docs/optimizers.md: where torch's own pair of methods resumes, smckpt does."""

from __future__ import annotations

import pytest

from tests.support.optimizer_table import losses, table
from tests.support.optimizers import everyone

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


def check(names: list[str], wrapper: str) -> None:
    found = table(names, (wrapper,))
    assert losses(found) == []
    exact = [name for name, row in found[wrapper].items() if row["stock"] == "exact"]
    assert len(exact) >= len(names) - 1, found


@pytest.mark.parametrize("names", [OF_TORCH, OTHERS], ids=["torch", "others"])
def test_one_process_resumes_what_torch_resumes(names: list[str]) -> None:
    check(names, "plain")


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP1", "FSDP2"])
def test_ranks_resume_what_torch_resumes(wrapper: str) -> None:
    check(["torch.optim: AdamW", "torch.optim: SGD momentum"], wrapper)


@pytest.mark.long
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_ranks_resume_all_of_torchs(wrapper: str) -> None:
    assert losses(table(OF_TORCH, (wrapper,))) == []
