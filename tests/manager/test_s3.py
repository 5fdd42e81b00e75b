"""`CheckpointManager` on S3 while one request in ten fails: saves, retention and a resume."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from smckpt import CheckpointManager, verify_checkpoint
from smckpt.checkpoint.upkeep.compare import compare_checkpoints
from tests.support.faults.copies import contents
from tests.support.faults.proxy import faulty_proxy
from tests.support.launch import run_ranks
from tests.support.s3 import Server

STEPS, KEPT = 4, 2


def train(root: str, last: int) -> tuple[int, list[int | None]]:
    """Go on to step `last`, saving each; the step it began at, and the steps that are there."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = torch.nn.Linear(64, 64)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "seen": 0}
    torch.manual_seed(dist.get_rank())
    with CheckpointManager(root, interval=1, keep_last_n=KEPT) as manager:
        step = began = manager.restore(into=state)
        while step < last:
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state["seen"] += 4
            step += 1
            manager.save(step, state).wait()
    with CheckpointManager(root, interval=1, keep_last_n=KEPT) as manager:
        return began, [one.step for one in manager.all()]


@pytest.mark.long  # tests/engine/test_s3_survival.py has a short one
def test_one_request_in_ten_fails_and_nothing_is_lost(
    s3_root: str, s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound, faulty = f"{s3_root}/sound", f"{s3_root}/faulty"
    assert run_ranks(train, 2, sound, STEPS) == [(0, [STEPS - 1, STEPS])] * 2
    with faulty_proxy(s3_server.endpoint) as proxy, monkeypatch.context() as patch:
        patch.setenv("SMCKPT_S3_ENDPOINT", proxy.endpoint)
        proxy.spoil_at_random(0.1)
        assert run_ranks(train, 2, faulty, STEPS // 2) == [(0, [1, 2])] * 2
        assert run_ranks(train, 2, faulty, STEPS) == [(STEPS // 2, [STEPS - 1, STEPS])] * 2
        assert proxy.spoiled >= len(proxy.seen) // 20 > 0
    assert {name.split("/")[0] for name in contents(faulty)} == {"3", "4"}
    for step in (STEPS - 1, STEPS):
        assert verify_checkpoint(f"{faulty}/{step}").ok
        found = compare_checkpoints(
            f"{sound}/{step}", f"{faulty}/{step}",
            ignore=["manager.random.numpy.*", "manager.random.python.*"],
        )  # fmt: skip
        assert found.equal, found.differences[:3]


@pytest.mark.parametrize("fault", ["403 AccessDenied", "500"])
@pytest.mark.parametrize("what", ["manifest-", "part-"])
def test_one_step_that_s3_does_not_give_costs_itself(
    s3_root: str, s3_server: Server, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, fault: str, what: str,
) -> None:  # fmt: skip
    """A restore takes the older one, retention goes on, and both say so."""

    def state(value: float = 0.0) -> dict[str, Any]:
        return {"w": torch.full((5,), value)}

    options: dict[str, Any] = {"random": False, "signals": ()}
    with CheckpointManager(s3_root, **options) as manager:
        for step in (1, 2):
            manager.save(step, state(float(step))).wait()
    with faulty_proxy(s3_server.endpoint) as proxy, monkeypatch.context() as patch:
        patch.setenv("SMCKPT_S3_ENDPOINT", proxy.endpoint)
        proxy.spoil("GET", fault, times=10_000, path=f"/2/{what}")
        into = state()
        with (
            caplog.at_level(logging.WARNING, "smckpt"),
            CheckpointManager(s3_root, keep_last_n=1, storage={"retries": 1}, **options) as manager,
        ):
            assert manager.restore(into) == 1
            assert into["w"].tolist() == [1.0] * 5
            assert "2" in caplog.text and f"2/{what}" in caplog.text
            caplog.clear()
            for step in (3, 4, 5):
                manager.save(step, state(float(step))).wait()
            manager.close()
        if what == "manifest-":
            assert "step 2" in caplog.text and "passed over" in caplog.text
    assert {name.split("/")[0] for name in contents(s3_root)} - {"2"} == {"5"}
    with CheckpointManager(s3_root, **options) as manager:
        assert manager.restore(state()) == 5
