"""msc://profile/path wherever a checkpoint is named, against a real S3 server that only the profile
knows, and against a directory."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration
from click.testing import CliRunner
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import TorchCheckpointIO
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

import smckpt
from smckpt.checkpoint.upkeep.transfer import copy_checkpoint
from smckpt.cli.app import app
from smckpt.errors import StorageError
from smckpt.integrations.accelerate import SmckptAccelerator
from smckpt.integrations.lightning import S3CheckpointIO, SmckptCheckpointIO, SmckptTrainer
from smckpt.integrations.transformers import SmckptTrainer as HuggingFaceTrainer
from smckpt.run import provide
from smckpt.storage import Storage, open_storage
from smckpt.storage.preflight import refuse_save
from tests.support import child
from tests.support.faults.proxy import FaultyProxy, faulty_proxy
from tests.support.interpreters import torchtitan, torchtune
from tests.support.limits import seconds
from tests.support.msc import configured, on_disk, on_s3
from tests.support.s3 import Server

LOOPS = Path(__file__).parents[1] / "support" / "frameworks" / "door_loops.py"
TITAN = LOOPS.with_name("torchtitan_train.py")


def state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((1000, 3), value)}, "step": int(value)}


def value_of(found: Any) -> float:
    weights = found["model"]["w"]
    assert torch.equal(weights, torch.full((1000, 3), float(weights[0, 0])))
    return float(weights[0, 0])


@pytest.fixture(params=["s3", "disk"])
def root(request: pytest.FixtureRequest, msc_root: str, tmp_path: Path) -> str:
    """A place in a profile of each kind."""
    return msc_root if request.param == "s3" else f"{configured(on_disk(tmp_path))}/deep/run"


def test_calls_take_it_for_the_name_of_a_checkpoint(root: str, tmp_path: Path) -> None:
    smckpt.save(state(1.0), checkpoint_id=f"{root}/steps/1")
    handle = smckpt.async_save(state(2.0), checkpoint_id=f"{root}/steps/2")
    assert handle is not None
    handle.wait()
    assert handle.checkpoint_id.rstrip("/") == f"{root}/steps/2"
    target = state(0.0)
    smckpt.load(target, checkpoint_id=f"{root}/steps/2")
    assert (value_of(target), target["step"]) == (2.0, 2)
    assert value_of(smckpt.load(checkpoint_id=f"{root}/steps/1")) == 1.0
    found = smckpt.find_checkpoints(f"{root}/steps")
    assert {(one.path, one.step) for one in found} == {(f"{root}/steps/{n}", n) for n in (1, 2)}
    assert smckpt.latest_checkpoint(f"{root}/steps") == f"{root}/steps/2"
    assert smckpt.verify_checkpoint(f"{root}/steps/2").ok
    copy_checkpoint(f"{root}/steps/2", tmp_path / "here")
    assert value_of(smckpt.load(checkpoint_id=tmp_path / "here")) == 2.0
    smckpt.remove(f"{root}/steps/2")
    assert smckpt.latest_checkpoint(f"{root}/steps") == f"{root}/steps/1"


def test_the_manager_keeps_its_steps_there_and_goes_on_from_them(root: str) -> None:
    told = {"keep_last_n": 2, "signals": ()}
    with smckpt.CheckpointManager(root, **told) as manager:
        assert manager.restore(state(0.0)) == 0
        for step in (1, 2, 3):
            manager.save(step, state(float(step)), metrics={"loss": -step})
    with smckpt.CheckpointManager(root, **told) as manager:
        into = state(0.0)
        assert manager.restore(into) == 3 and value_of(into) == 3.0
        assert [one.step for one in manager.all()] == [2, 3]


def test_a_model_goes_there_is_exported_there_and_comes_back(root: str, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    smckpt.save({"model": model.state_dict()}, checkpoint_id=f"{root}/3")
    smckpt.export_hf(f"{root}/3", f"{root}/out", config=config)
    out = open_storage(f"{root}/out")
    assert {"config.json", "model.safetensors"} <= set(out.names())
    for name in out.names():
        (tmp_path / name).write_bytes(out.read(name))
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    smckpt.import_hf(tmp_path, f"{root}/imported", smckpt.Parallel("mcore_te", tp=2))
    assert all(smckpt.verify_checkpoint(one.path).ok for one in smckpt.find_checkpoints(root))
    smckpt.convert(f"{root}/3", tmp_path / "dcp", to="dcp")
    smckpt.convert(tmp_path / "dcp", f"{root}/4", to="smckpt")
    again.load_state_dict(smckpt.load(checkpoint_id=f"{root}/4")["model"])


def test_commands_take_it(root: str, tmp_path: Path) -> None:
    def told(*words: str, status: int = 0) -> str:
        done = CliRunner().invoke(app, [*words])
        assert done.exit_code == status, (done.output, done.exception)
        return done.output

    for step in (6, 7):
        smckpt.save(state(float(step)), checkpoint_id=f"{root}/run/{step}")
    place = f"{root}/run/7"
    listed = json.loads(told("ls", "--json", f"{root}/run"))
    assert [one["step"] for one in listed] == [7, 6]
    assert "model.w" in told("show", place)
    assert told("verify", place).startswith("ok: 1 tensor")
    assert "3000 of 3000 elements differ" in told("diff", f"{root}/run/6", place, status=1)
    assert told("cp", place, str(tmp_path / "here")).startswith("4 files")
    assert told("cp", str(tmp_path / "here"), f"{root}/copy").startswith("4 files")
    assert "equal: " in told("diff", place, f"{root}/copy")
    assert "1 tensor" in told("export", place, f"{root}/out")
    assert "the newest is" in told("status", root)
    assert "restorable: 7" in told("doctor", f"{root}/run")
    assert "1 step" in told("prune", f"{root}/run", "--keep-last", "1", "--yes")
    assert "removed 4 files" in told("rm", f"{root}/copy", "--yes")
    assert "all: " in told("publish", f"{root}/out", f"{root}/published")
    told("apply", f"{root}/published", str(tmp_path / "served"))
    assert (tmp_path / "served" / "latest" / "model.safetensors").exists()
    told("reshard", place, f"{root}/resharded", "--shard", "2")
    assert "equal: " in told("diff", place, f"{root}/resharded")


def test_of_many_that_create_one_name_one_succeeds(root: str) -> None:
    store = open_storage(root)
    assert store.exclusive and not store.one_process
    refuse_save(store, 8)
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda n: store.put_exclusive("one", b"%d" % n), range(24)))
    assert won.count(True) == 1
    assert store.read("one") == b"%d" % won.index(True)


@pytest.fixture
def wire(s3_server: Server, msc_root: str) -> Any:
    with faulty_proxy(s3_server.endpoint) as proxy:
        yield proxy


def large(proxy: FaultyProxy) -> str:
    """A place to which a file of 24 MiB goes in parts. No request is sent twice."""
    once = {"total_max_attempts": 1, "mode": "standard"}
    profile = on_s3(proxy.endpoint, retries=once, multipart_threshold=6 << 20)
    profile["retry"] = {"attempts": 1, "delay": 0.1}
    return f"{configured(profile)}/{secrets.token_hex(6)}"


def written(store: Storage, mib: int) -> None:
    writer = store.create_file("data", mib << 20)
    writer.write_at(0, memoryview(bytes(mib << 20)))
    try:
        writer.finish()
    except StorageError:
        writer.abort()
        raise


@pytest.mark.parametrize("mib", [1, 24])
def test_a_write_that_breaks_off_publishes_nothing(
    wire: FaultyProxy, s3_server: Server, mib: int
) -> None:
    store = open_storage(large(wire))
    wire.spoil("PUT", "before")
    with pytest.raises(StorageError, match="cannot write"):
        written(store, mib)
    assert store.list() == []
    assert wire.left == 0
    written(store, mib)
    assert [info.size for info in store.list()] == [mib << 20]


def test_a_writer_that_is_killed_publishes_nothing(wire: FaultyProxy) -> None:
    place = large(wire)
    code = """
        import sys
        from smckpt.storage import open_storage
        writer = open_storage(sys.argv[1]).create_file("data", 24 << 20)
        writer.write_at(0, memoryview(bytes(24 << 20)))
        writer.finish()
    """
    for number in (2, 3, 4):  # of its requests: begun is the upload, and parts of it are sent
        ready = threading.Event()
        wire.end_at(number, ready.set)
        with subprocess.Popen(child.command(code, place)) as process:
            assert ready.wait(seconds(60))
            process.kill()
            assert process.wait() == -signal.SIGKILL
        wire.end_at(1 << 30, ready.set)
        assert open_storage(place).list() == []


def test_a_cache_and_replicas_do_not_hide_what_others_wrote(
    s3_server: Server, msc_root: str, tmp_path: Path
) -> None:
    other = configured(on_disk(tmp_path / "copy"))
    copies = [{"replica_profile": other.removeprefix("msc://"), "read_priority": 1}]
    cache = {
        "size": "1G", "check_source_version": False,
        "cache_backend": {"cache_path": str(tmp_path / "cache")},
    }  # fmt: skip
    profile = {**on_s3(s3_server.endpoint), "caching_enabled": True, "replicas": copies}
    name = f"run{secrets.token_hex(6)}"
    place = f"{configured(profile, cache=cache)}/{name}"
    source = f"{msc_root.rpartition('/')[0]}/{name}"  # the same without them
    for value in (1.0, 2.0):
        smckpt.save(state(value), checkpoint_id=source)
        assert value_of(smckpt.load(checkpoint_id=place)) == value
    open_storage(f"{other}/{name}").put("one", b"stale")
    for text in (b"first", b"other"):
        writer = open_storage(source).create_file("one", 5, replace=True)
        writer.write_at(0, memoryview(text))
        writer.finish()
        assert open_storage(place).read("one") == text


def test_profiles_that_cannot_hold_checkpoints_are_refused(
    s3_server: Server, msc_root: str
) -> None:
    listed = {"type": "manifest", "options": {"manifest_path": ".msc_manifests"}}
    listing = configured({**on_s3(s3_server.endpoint), "metadata_provider": listed})
    with pytest.raises(smckpt.UsageError, match=r"has a metadata_provider.*without it"):
        smckpt.save(state(1.0), checkpoint_id=f"{listing}/run")
    with pytest.raises(smckpt.UsageError, match=r'"nobody" not found.*MSC_CONFIG'):
        open_storage("msc://nobody/run")
    with pytest.raises(smckpt.UsageError, match=r"storage="):
        smckpt.save(state(1.0), checkpoint_id=f"{msc_root}/run", storage={"region": "us-east-1"})


# -- other doors -------------------------------------------------------------------------------


def alike(one: Any, other: Any) -> bool:
    """Whether two models, and the moments of two optimizers, have the same bits."""
    (model, optimizer), (its, theirs) = one, other
    for mine, yours in zip(model.parameters(), its.parameters(), strict=True):
        slots, others = optimizer.state[mine], theirs.state[yours]
        assert slots and slots.keys() == others.keys()
        if not torch.equal(mine, yours) or not all(torch.equal(slots[n], others[n]) for n in slots):
            return False
    return True


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((4,), index), "labels": torch.full((4,), index)}


class Resumed(TrainerCallback):
    """Compares a run that has just resumed with the one that had saved."""

    def __init__(self, *saved: Any) -> None:
        self.saved = saved

    def on_train_begin(self, args: Any, state: Any, control: Any, **its: Any) -> None:
        self.at = state.global_step
        self.alike = alike(self.saved, (its["model"], its["optimizer"]))


def test_the_trainer_saves_there_and_resumes(msc_root: str, tmp_path: Path) -> None:
    def trainer(folder: str, *callbacks: Any) -> HuggingFaceTrainer:
        config = LlamaConfig(
            vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1,
        )  # fmt: skip
        arguments = TrainingArguments(
            output_dir=str(tmp_path / folder), max_steps=3, save_steps=1, save_total_limit=2,
            report_to=[], use_cpu=True, disable_tqdm=True, per_device_train_batch_size=2,
            lr_scheduler_type="constant",
        )  # fmt: skip
        made = HuggingFaceTrainer(
            model=LlamaForCausalLM(config), args=arguments, train_dataset=Rows(),
            callbacks=list(callbacks),
        )  # fmt: skip
        made.smckpt_root = msc_root
        return made

    first = trainer("here")
    first.train()
    assert [one.step for one in smckpt.find_checkpoints(msc_root)] == [2, 3]
    resumed = Resumed(first.model, first.optimizer)
    trainer("there", resumed).train(resume_from_checkpoint=True)  # on another machine
    assert resumed.at == 3 and resumed.alike


def test_accelerate_saves_there_and_resumes(root: str, tmp_path: Path) -> None:
    def accelerator(folder: str) -> tuple[SmckptAccelerator, Any, Any]:
        AcceleratorState._reset_state(reset_partial_state=True)
        named = ProjectConfiguration(
            project_dir=str(tmp_path / folder), automatic_checkpoint_naming=True, total_limit=2
        )
        made = SmckptAccelerator(cpu=True, project_config=named)
        made.smckpt_root = root
        model = torch.nn.Linear(3, 2)
        return made, *made.prepare(model, torch.optim.AdamW(model.parameters()))

    first, model, optimizer = accelerator("here")
    for _ in range(3):
        first.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
        first.save_state()
    again, other, its = accelerator("there")
    again.load_state()
    assert alike((model, optimizer), (other, its))
    assert [one.step for one in smckpt.find_checkpoints(f"{root}/checkpoints")] == [1, 2]
    AcceleratorState._reset_state(reset_partial_state=True)


def test_lightning_saves_there_and_resumes(root: str, tmp_path: Path) -> None:
    def trained(steps: int, resume: str | None) -> tuple[ModelCheckpoint, Any, Any]:
        saved = ModelCheckpoint(
            dirpath=f"{root}/run", filename="{step}", save_last=True, every_n_train_steps=1,
            monitor="step", mode="max", save_top_k=2,
        )  # fmt: skip
        runs = SmckptTrainer(
            max_steps=steps, accelerator="cpu", callbacks=[saved], logger=False,
            plugins=[SmckptCheckpointIO()], limit_val_batches=0, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        model = Adam()
        runs.fit(model, ckpt_path=resume)
        return saved, model, runs.optimizers[0]

    saved, model, optimizer = trained(3, None)
    found = [one.path.rpartition("/")[2] for one in smckpt.find_checkpoints(f"{root}/run")]
    assert sorted(found) == ["last.ckpt", "step=2.ckpt", "step=3.ckpt"]
    _, again, its = trained(3, "last")
    assert alike((model, optimizer), (again, its))
    with provide(["lightning"]):  # load_from_checkpoint
        loaded = Adam.load_from_checkpoint(saved.best_model_path)
    assert all(map(torch.equal, loaded.parameters(), model.parameters()))
    own = f"{root}/own/last.ckpt"  # what Lightning's own plugin writes
    made = {"state_dict": model.state_dict(), "pytorch-lightning_version": "2.6.0"}
    TorchCheckpointIO().save_checkpoint(made, own)
    with provide(["lightning"]):
        loaded = Adam.load_from_checkpoint(own)
    assert all(map(torch.equal, loaded.parameters(), model.parameters()))
    plugin = SmckptCheckpointIO()
    assert plugin.load_checkpoint(own)["state_dict"].keys() == model.state_dict().keys()
    plugin.remove_checkpoint(own)
    with pytest.raises(FileNotFoundError, match="own/last"):
        plugin.load_checkpoint(own)
    with pytest.raises(smckpt.UsageError, match=r"not in S3.*or use SmckptCheckpointIO"):
        S3CheckpointIO(root)


class Adam(BoringModel):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


@pytest.mark.long
def test_torchtitan_saves_there_and_resumes(msc_root: str, tmp_path: Path) -> None:
    def told(name: str, **fields: Any) -> dict[str, Any]:
        fields = {"folder": f"{msc_root}/run", "interval": 1, "keep_latest_k": 2, **fields}
        given = [f"{key}={json.dumps(value)}" for key, value in fields.items()]
        done = child.script(TITAN, str(tmp_path / name), *given, python=torchtitan(), torchrun=True)
        assert done.returncode == 0, done.stderr[-4000:]
        (its,) = child.told(done)
        return its

    made = child.script(TITAN, str(tmp_path / "run"), "base=true", python=torchtitan())
    assert made.returncode == 0, made.stderr[-4000:]
    first = told("run", steps=3, twice=True)
    assert first["loaded"] is False and first["again"] is True and first["step again"] == 3
    assert first["digest again"] == first["digest"]
    assert [one.step for one in smckpt.find_checkpoints(f"{msc_root}/run")] == [2, 3]
    theirs = told("theirs", steps=2, stock=True, folder=f"{msc_root}/other")  # through fsspec
    assert open_storage(f"{msc_root}/other/step-2").size(".metadata") and not theirs["loaded"]
    again = told("again", steps=3, folder=f"{msc_root}/other")
    assert again["began"] == 2 and again["losses"] == {"3": first["losses"]["3"]}
    assert again["digest"] == first["digest"]


TUNE = """
import json, sys
import torch
import smckpt
from smckpt.integrations.torchtune import DistributedCheckpointer

place, out = sys.argv[1:]

def made(value):
    torch.manual_seed(value)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs_run": value}

where = {"checkpoint_dir": out, "output_dir": out, "smckpt_root": place}
first = DistributedCheckpointer(**where, keep_last_n_checkpoints=2)
assert first.get_latest_intermediate_checkpoint() is None
for epoch in range(3):
    first.save_checkpoint(made(epoch), epoch, save_async=True)
smckpt.maybe_finalize_async_calls()
again = DistributedCheckpointer(**where)
latest, target = again.get_latest_intermediate_checkpoint(), made(9)
again.load_checkpoint(target)
wanted = made(2)
same = all(torch.equal(target["model"][name], wanted["model"][name]) for name in wanted["model"])
moments = target["optimizer"]["state"][0], wanted["optimizer"]["state"][0]
same &= all(torch.equal(moments[0][name], moments[1][name]) for name in moments[1])
told = {"latest": latest, "same": same, "epochs": target["epochs_run"]}
print("told", json.dumps(told))
"""


@pytest.mark.long
def test_torchtunes_checkpointer_saves_there_and_loads(msc_root: str, tmp_path: Path) -> None:
    (tmp_path / "tune.py").write_text(TUNE)
    done = child.script(tmp_path / "tune.py", msc_root, str(tmp_path / "out"), python=torchtune())
    assert done.returncode == 0, done.stderr[-4000:]
    (told,) = child.told(done)
    assert told == {"latest": f"{msc_root}/dist_epoch_2", "same": True, "epochs": 2}
    names = [one.path.rpartition("/")[2] for one in smckpt.find_checkpoints(msc_root)]
    assert names == ["dist_epoch_1", "dist_epoch_2"]


@pytest.mark.long
@pytest.mark.parametrize("loop", ["manager", "smp"])
def test_two_ranks_save_what_they_save_on_disk(msc_root: str, tmp_path: Path, loop: str) -> None:
    found = []
    for place in (msc_root, str(tmp_path)):
        door = ("-m", "smckpt.run", "--for", "sagemaker") if loop == "smp" else ()
        done = child.script(LOOPS, place, loop, ranks=2, by=door)
        assert done.returncode == 0, done.stderr[-4000:]
        newest = smckpt.latest_checkpoint(place)
        assert newest is not None
        found.append(newest)
    done = CliRunner().invoke(app, ["diff", *found])
    assert done.exit_code == 0 and done.output.startswith("equal: "), done.output
    if loop == "manager":  # the shards of two ranks, whole in this process
        there, here = (smckpt.load(checkpoint_id=place) for place in found)
        assert there is not None and here is not None
        for name, tensor in here["model"].items():
            assert tensor.shape[0] in (24, 32) and torch.equal(there["model"][name], tensor)
