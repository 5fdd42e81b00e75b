"""The public consumer of SMP's checkpoint API behind the door: the HyperPod adapter's own tests of
checkpoints, from a checkout of it, on CPUs (docs/evidence/suites.md says what is changed)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.frameworks.hyperpod import COMMIT, NAMED, TESTS, VARIABLE
from tests.support.launch import ROOT, free_port
from tests.support.limits import seconds

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

END_TO_END = {
    "callback_io_creation": 11,
    "combined_ckpt": 1,
    "data_module": 2,
    "full_ckpt": 8,
    "lr_scheduler": 2,
    "peft_ckpt": 2,
    "resilience_ckpt": 8,
    "sharded_ckpt": 9,
}
NEEDED = {"peft_ckpt": "not qlora_4bit"}  # bitsandbytes wants a GPU

# Without tensor and expert parallelism, for which the adapter needs SMP's layers.
HYBRID = ["test_resilience_hybrid_llama[1-4-4-1-4-8]", *(
    f"test_sharded_hybrid_shard_llama[1-2-{ranks}-1-4-8]" for ranks in (4, 6)
)]  # fmt: skip


@pytest.fixture(scope="module")
def checkout() -> Path:
    named = os.environ.get(VARIABLE)
    if not named:
        pytest.skip(f"{VARIABLE} can name a checkout of {NAMED} at {COMMIT}")
    return Path(named).resolve()


@pytest.fixture(scope="module")
def python() -> str:
    """SMCKPT_HYPERPOD_PYTHON, or this one, with what the adapter's tests import."""
    named = os.environ.get("SMCKPT_HYPERPOD_PYTHON", sys.executable)
    asked = "import hydra, omegaconf, peft, pytest_mock, expecttest, pytorch_lightning"
    command = [named, "-c", asked]
    if subprocess.run(command, capture_output=True, check=False, timeout=seconds(60)).returncode:
        pytest.skip("SMCKPT_HYPERPOD_PYTHON can name a Python with hydra-core, omegaconf, peft, …")
    return named


def outcomes(
    python: str, checkout: Path, folder: Path, *arguments: str, ranks: int = 0
) -> list[dict[str, str]]:
    """What each rank's tests ended with; without ranks, of one process without a launcher."""
    common = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SMCKPT_HYPERPOD_TOLD": str(folder / "told"),
    }
    # As torchrun, but without its store: the tests end the process group, and start it elsewhere.
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    launched |= {"TORCHELASTIC_RUN_ID": "adapter"}
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    children, logs = [], []
    for rank in range(ranks or 1):
        mine = {**launched, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}
        log = folder / f"log.{rank}"
        with log.open("wb") as out:
            children.append(
                subprocess.Popen(
                    [python, "-m", "tests.support.frameworks.hyperpod", str(checkout), *arguments],
                    cwd=ROOT,
                    env={**common, **mine},
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            )
        logs.append(log)
    end = time.monotonic() + seconds(400)
    try:
        for child in children:
            child.wait(max(end - time.monotonic(), 0.1))
    finally:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    told = [folder / f"told.{rank}" for rank in range(ranks or 1)]
    assert all(path.exists() for path in told), logs[0].read_text(errors="replace")[-6000:]
    return [json.loads(path.read_text()) for path in told]


@pytest.mark.parametrize("name", END_TO_END)
def test_the_adapters_end_to_end_tests_of_checkpoints_pass(
    name: str, checkout: Path, python: str, tmp_path: Path
) -> None:
    chosen = [f"{TESTS}/e2e/test_{name}.py", "-k", NEEDED.get(name, "")]
    for told in outcomes(python, checkout, tmp_path, *chosen, ranks=2):
        assert list(told.values()) == ["passed"] * END_TO_END[name], told


def test_the_adapters_unit_tests_of_checkpoints_pass(
    checkout: Path, python: str, tmp_path: Path
) -> None:
    chosen = [
        TESTS,
        "tests/hyperpod_nemo_adapter/collections/parts/test_fsdp_strategy.py",
        f"--ignore={TESTS}/e2e",
    ]
    (told,) = outcomes(python, checkout, tmp_path, *chosen)
    assert list(told.values()) == ["passed"] * 26, told


@pytest.mark.parametrize("name", HYBRID)
def test_the_adapters_hybrid_shards_pass_on_8_ranks(
    name: str, checkout: Path, python: str, tmp_path: Path
) -> None:
    chosen = f"{TESTS}/e2e/test_hybrid_shard_ckpt.py::TestHybridShardCheckpoint::{name}"
    for told in outcomes(python, checkout, tmp_path, chosen, ranks=8):
        assert list(told.values()) == ["passed"], told
