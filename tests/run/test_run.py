"""`smckpt run`: scripts of other systems behind our doors, and everything taken back."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullStateDictConfig
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from smckpt.errors import UsageError
from smckpt.integrations import TESTED
from smckpt.run import provide, run_script
from smckpt.run.doors import DOORS
from tests.support.frameworks import door_names
from tests.support.interpreters import run, torchtitan, torchtune
from tests.support.launch import ROOT
from tests.support.limits import seconds

SCRIPT = """
import multiprocessing
import sys
import torch, torch.distributed as dist
import torch.sagemaker as tsm
from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save

def doubled(n):
    import torch.sagemaker
    return 2 * n

if __name__ == "__main__":
    dist.init_process_group("gloo")
    tsm.init({"hybrid_shard_degree": 2})
    state = {"a": torch.full((4,), float(dist.get_rank())), "note": sys.argv[2]}
    async_save(state, checkpoint_id=sys.argv[1])
    tsm.distributed.checkpoint.state_dict_saver.maybe_finalize_async_calls()
    state = {"a": torch.zeros(4), "note": ""}
    load(state, checkpoint_id=sys.argv[1])
    assert state["a"].eq(dist.get_rank()).all()
    if dist.get_rank() == 0:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print("spawned", pool.apply(doubled, (21,)))
        print("loaded", state["note"], tsm.state.fsdp_size)
    dist.barrier()
    dist.destroy_process_group()
"""


def started(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=seconds(180),
        env=env,
        check=False,
    )


def test_torchrun_runs_a_script_of_smp_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = ("-m", "smckpt.run", "--for", "sagemaker")
    done = started(*torchrun, *run, str(script), str(tmp_path / "out"), "--and so on")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split("\n")[:2] == ["spawned 42", "loaded --and so on 2"]
    lines = [line for line in done.stderr.splitlines() if line.startswith("smckpt run: ")]
    assert len(lines) == len(set(lines)), "only rank 0 says it"
    provided = [line for line in lines if line.startswith("smckpt run: provided ")]
    assert provided == ["smckpt run: provided torch.sagemaker"], "with all that is below it"
    replaced = "torch.distributed.checkpoint.optimizer.load_sharded_optimizer_state_dict"
    assert f"smckpt run: replaced {replaced}: takes process_group=" in lines


def test_what_a_script_raises_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text("import torch.sagemaker\nraise KeyError('of the script')\n")
    done = started("-m", "smckpt", "run", str(script))
    assert done.returncode == 1
    assert "KeyError: 'of the script'" in done.stderr and "Traceback" in done.stderr


def test_a_script_sets_up_its_own_log(tmp_path: Path) -> None:
    script = tmp_path / "logs.py"
    script.write_text(
        "import logging\n"
        "logging.basicConfig(level=logging.INFO, format='mine: %(message)s')\n"
        "logging.getLogger('a').info('heard')\n"
    )
    done = started("-m", "smckpt", "run", str(script))
    assert done.returncode == 0 and done.stderr.endswith("mine: heard\n"), done.stderr


def test_what_cannot_be_run_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    with pytest.raises(UsageError, match="there is no such script"):
        run_script(str(script))
    script.write_text("raise SystemExit('it ran')")
    with pytest.raises(UsageError, match="'sagemakers' is not a door"):
        run_script(str(script), doors=["sagemakers"])


@pytest.mark.parametrize("door", ["torchtune", "lightning"])
def test_a_framework_that_is_absent_is_named_and_nothing_is_changed(
    monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    before = names()
    monkeypatch.setitem(sys.modules, door, None)  # so it cannot be imported
    with pytest.raises(UsageError, match=f"the door to {door} needs {door}, which is not"):
        provide(["sagemaker", door])
    assert names() == before


def names() -> dict[str, Any]:
    """What the door to SMP replaces, as it is now."""
    optimizer = importlib.import_module("torch.distributed.checkpoint.optimizer")
    checkpoint = importlib.import_module("torch.distributed.checkpoint")
    return {
        "modules": sorted(name for name in sys.modules if name.startswith("torch.sagemaker")),
        "attribute": getattr(torch, "sagemaker", None),
        "optimizer": optimizer.load_sharded_optimizer_state_dict,
        "checkpoint": checkpoint.load_sharded_optimizer_state_dict,
        "to_load": FSDP.optim_state_dict_to_load,
        "type": FSDP.state_dict_type,
        "init": FSDP.__init__,
        "fields": sorted(FullStateDictConfig.__dataclass_fields__),
    }


def test_everything_is_taken_back() -> None:
    before = names()
    with provide(["sagemaker"]) as provided:
        inside = names()
        assert "torch.sagemaker.distributed.checkpoint.state_dict_saver" in inside["modules"]
        assert all(inside[name] != before[name] for name in before)
        assert FullStateDictConfig(translate_on_save=False)  # type: ignore[call-arg]
        with pytest.raises(UsageError, match="installed or provided here already"):
            provide()
    assert names() == before
    provided.undo()
    assert names() == before
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("torch.sagemaker")


def test_a_real_torch_sagemaker_is_not_shadowed_unless_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sagemaker.py").write_text("real = True\n")
    monkeypatch.setattr(torch, "__path__", [*torch.__path__, str(tmp_path)])
    before = names()
    with pytest.raises(UsageError, match="--shadow"):
        provide(["sagemaker"])
    assert names() == before
    with provide(["sagemaker"], shadow=True):
        assert not hasattr(importlib.import_module("torch.sagemaker"), "real")
    real = importlib.import_module("torch.sagemaker")
    assert isinstance(real, ModuleType) and real.real
    del sys.modules["torch.sagemaker"], torch.sagemaker


@pytest.mark.parametrize(
    ("door", "real"), [("nvrx", "nvidia_resiliency_ext.checkpointing"), ("nemo", "nemo.utils")]
)
def test_real_packages_of_other_doors_are_not_shadowed_unless_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, door: str, real: str
) -> None:
    (tmp_path / real.replace(".", "/")).mkdir(parents=True)
    for folder in (tmp_path / real.replace(".", "/"), tmp_path / real.partition(".")[0]):
        (folder / "__init__.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="--shadow"):
        provide([door])
    with provide([door], shadow=True):
        assert not hasattr(importlib.import_module(real), "real")
    assert importlib.import_module(real).real
    for name in [name for name in sys.modules if name.partition(".")[0] == real.partition(".")[0]]:
        del sys.modules[name]


def test_another_torch_is_refused_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TESTED, "torch", ("2.1",))
    before = names()
    with pytest.raises(UsageError, match=r"torch 2\.13.* was not tested.*--force"):
        provide(["sagemaker"])
    assert names() == before
    with provide(["sagemaker"], force=True):
        pass


def test_a_package_that_is_absent_is_named_and_one_that_fails_tells_why_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (
        ("of_absent", "import absent"),
        ("failing", 'raise ModuleNotFoundError("a part")'),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setitem(DOORS, name, (name, DOORS["sagemaker"][1]))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="needs absent, which is not installed"):
        provide(["of_absent"])
    with pytest.raises(ModuleNotFoundError, match="a part"):
        provide(["failing"])


def test_names_that_are_there_are_replaced_where_asked_for_and_taken_back() -> None:
    import accelerate

    from smckpt.integrations.transformers import SmckptTrainer, SmckptTrainerMixin

    transformers = sys.modules["transformers"]
    kind = accelerate.Accelerator
    before = (transformers.Trainer, transformers.Seq2SeqTrainer, kind.save_state, kind.load_state)
    with provide(["transformers", "accelerate"]) as provided:
        assert transformers.Trainer is SmckptTrainer
        assert issubclass(transformers.Seq2SeqTrainer, SmckptTrainerMixin)
        assert kind.save_state is not before[2]
        assert len(provided.lines) == 12
    after = (transformers.Trainer, transformers.Seq2SeqTrainer, kind.save_state, kind.load_state)
    assert after == before


@pytest.mark.parametrize(
    "door", [name for name in DOORS if name not in ("torchtune", "torchtitan")]
)
def test_a_door_refuses_versions_tells_each_name_and_takes_all_back(door: str) -> None:
    door_names.check(door)


@pytest.mark.long
@pytest.mark.parametrize(("door", "python"), [("torchtune", torchtune), ("torchtitan", torchtitan)])
def test_so_do_the_doors_of_other_environments(door: str, python: Callable[[], str]) -> None:
    run(python(), "-m", "tests.support.frameworks.door_names", door)
