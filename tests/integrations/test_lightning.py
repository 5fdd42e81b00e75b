"""Lightning's Trainer through smckpt: killed, and resumed to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel

import smckpt
from smckpt.checkpoint.records.format import parse_name
from smckpt.integrations.lightning import SmckptMemory, SmckptTrainer
from smckpt.manager.memory import SERVICE
from tests.support import child
from tests.support.faults.hosts import keeper_service

SCRIPT = Path(__file__).parents[1] / "support" / "frameworks" / "lightning_run.py"


def names(out: Any) -> list[str]:
    return sorted(one.path.rstrip("/").rpartition("/")[2] for one in smckpt.find_checkpoints(out))


def kept(out: Any, told: list[dict[str, Any]]) -> None:
    """What `ModelCheckpoint` names is there, and nothing else but what the run resumed from: a
    directory of disk that Lightning never drops."""
    wanted = {name for name, _ in told[0]["resumed"]["best"]} | {told[0]["resumed"]["last"]}
    assert len(wanted) == 3 and wanted <= set(names(out))
    assert set(names(out)) - wanted <= {"step=2.ckpt", "step=4.ckpt", "last.ckpt"}


def held(told: list[dict[str, Any]], ranks: int = 1) -> None:
    assert len(told) == ranks
    for rank in told:
        resumed, straight = rank["resumed"], rank["straight"]
        ours, losses = resumed.pop("losses"), straight["losses"]
        resumed["last"] = straight["last"]  # after the end of an epoch, its name gets a version
        assert ours == losses[-len(ours) :]
        assert ours[0][0] in (3, 5)  # the save of step 4 was under way when it was killed
        assert {**resumed, "losses": losses} == straight


def test_two_ranks_of_fsdp2_go_on_bit_for_bit_after_a_kill(tmp_path: Path) -> None:
    told = child.killed_and_resumed(SCRIPT, tmp_path / "run", "fsdp2", ("die",), ranks=2)
    assert {rank["resumed"]["sharded"] for rank in told} == {"DTensor"}
    kept(tmp_path / "run", told)
    held(told, 2)


@pytest.mark.long
@pytest.mark.parametrize(("how", "ranks"), [("disk", 1), ("disk", 2), ("fsdp1", 2), ("fsdp2", 2)])
def test_a_run_goes_on_from_the_memory_of_its_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, ranks: int
) -> None:
    with keeper_service() as (name, _):
        monkeypatch.setenv(SERVICE, name)
        told = child.killed_and_resumed(
            SCRIPT, tmp_path / "run", f"{how}-memory", ("die",), ranks=ranks
        )
    assert len(told) == ranks and names(tmp_path / "run") == ["last.ckpt"]  # of the end alone
    for rank in told:
        ours, losses = rank["resumed"].pop("losses"), rank["straight"].pop("losses")
        assert ours == losses[-len(ours) :]
        assert ours[0][0] in (4, 5)  # the save of step 4 may be under way when it is killed
        assert rank["resumed"] == rank["straight"]


class Newest(Callback):  # type: ignore[misc]
    """Notes the newest step in memory, and how many saves it took."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        smckpt.maybe_finalize_async_calls()
        kept = trainer.callbacks[1].begin(trainer)
        self.found = [(one.step, parse_name(one.identity).number) for one in kept.newest_first()]


def test_a_step_of_accumulated_gradients_is_saved_in_memory_once(tmp_path: Path) -> None:
    newest, memory = Newest(), SmckptMemory(smckpt.Memory(1, replicas=0))
    trainer = SmckptTrainer(
        accelerator="cpu", devices=1, max_steps=3, accumulate_grad_batches=4, logger=False,
        callbacks=[newest, memory], enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(BoringModel(), torch.utils.data.DataLoader(torch.ones(64, 32)))
    assert newest.found[:2] == [(3, 2), (2, 1)], "the third save and the second"


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "saved", "loaded"),
    [("fsdp2", 2, 3), ("fsdp2", 3, 2), ("fsdp2", 2, 1), ("fsdp1", 2, 1), ("fsdp1", 2, 3),
     ("s3", 2, 1), ("s3", 1, 2)],
)  # fmt: skip
def test_other_ranks_load_what_was_saved(
    tmp_path: Path, s3_root: str, how: str, saved: int, loaded: int
) -> None:
    run = f"{s3_root if how == 's3' else tmp_path}/run"
    died = child.script(SCRIPT, run, how, "die", ranks=saved)
    assert died.returncode != 0 and "it lives" not in died.stderr, died.stderr
    done = child.script(SCRIPT, run, how, "loaded", ranks=loaded)
    assert done.returncode == 0, done.stderr[-4000:]
    told = [(rank["step"], rank["wrong"]) for rank in child.told(done)]
    assert told in ([(2, [])] * loaded, [(4, [])] * loaded)


@pytest.mark.long
@pytest.mark.parametrize("how", ["disk", "disk-sync", "s3", "s3-wrapped", "epochs"])
def test_one_process_goes_on_bit_for_bit_in_other_ways(
    tmp_path: Path, s3_root: str, how: str
) -> None:
    place = s3_root if how.startswith("s3") else tmp_path
    told = child.killed_and_resumed(SCRIPT, f"{place}/run", how, ("die",))
    kept(f"{place}/run", told)
    held(told)


@pytest.mark.long
@pytest.mark.parametrize("how", ["disk", "fsdp1", "fsdp2"])
@pytest.mark.parametrize("where", ["disk", "s3"])
def test_two_ranks_go_on_bit_for_bit_after_a_kill(
    tmp_path: Path, s3_root: str, how: str, where: str
) -> None:
    place = s3_root if where == "s3" else tmp_path
    told = child.killed_and_resumed(SCRIPT, f"{place}/run", how, ("die",), ranks=2)
    kept(f"{place}/run", told)
    held(told, 2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "ranks", "placements"),
    [
        ("tp", 2, "(_StridedShard(dim=0, sf=2), Shard(dim=0))"),
        ("tp", 4, "(_StridedShard(dim=0, sf=2), Shard(dim=0))"),
        ("hybrid1", 4, "None"),
        ("hybrid2", 4, "(Replicate(), Shard(dim=0))"),
        ("two", 2, "(Shard(dim=0),)"),
    ],
)
def test_other_meshes_and_two_optimizers_go_on_bit_for_bit_after_a_kill(
    tmp_path: Path, how: str, ranks: int, placements: str
) -> None:
    told = child.killed_and_resumed(SCRIPT, tmp_path / "run", how, ("die",), ranks=ranks)
    assert {rank["resumed"]["placements"] for rank in told} == {placements}
    assert len(told[0]["resumed"]["lr"]) == (2 if how == "two" else 1)
    kept(tmp_path / "run", told)
    held(told, ranks)


STOCK = """
import sys
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

class Model(BoringModel):
    def __init__(self, width=2):
        super().__init__()
        self.save_hyperparameters()

saved = ModelCheckpoint(dirpath=sys.argv[1], save_last=True, every_n_train_steps=2)
trainer = Trainer(max_steps=4, accelerator="cpu", callbacks=[saved], logger=False,
                  limit_val_batches=0, enable_progress_bar=False, enable_model_summary=False)
model = Model(width=3)
trainer.fit(model, ckpt_path="last")
again = Model.load_from_checkpoint(saved.best_model_path)
assert again.hparams["width"] == 3
assert all(map(torch.equal, again.parameters(), model.parameters()))
"""


def test_a_script_of_lightning_is_run_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(STOCK)
    done = child.script(
        script, str(tmp_path / "run"), by=("-m", "smckpt.run", "--for", "lightning")
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert names(tmp_path / "run") == ["epoch=0-step=4.ckpt", "last.ckpt"]
    assert "replaced lightning.pytorch.strategies.FSDPStrategy" in done.stderr


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_nemos_page_on_s3_runs_and_resumes(s3_root: str, ranks: int) -> None:
    out, page = f"{s3_root}/run", SCRIPT.with_name("nemo_document.py")
    by = {"ranks": ranks, "by": ("-m", "smckpt.run", "--for", "nemo")}
    died = child.script(page, out, "die", **by)
    assert died.returncode and "it lives" not in died.stderr, died.stderr[-4000:]
    assert names(out) == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
    done = child.script(page, out, "resume", **by)
    assert done.returncode == 0, done.stderr[-4000:]
    held(child.told(done), ranks)
