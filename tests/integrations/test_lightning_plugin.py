"""The plugins of Lightning and NeMo by themselves: what they save, remove, refuse and find."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.core import saving
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn

import smckpt
from smckpt.errors import PeerError, SaveFailedError, StateError, UsageError
from smckpt.integrations.lightning import (
    S3CheckpointIO,
    SmckptCheckpointIO,
    SmckptFSDPStrategy,
    SmckptModelParallelStrategy,
    alone,
)
from smckpt.meeting.group import group_of
from smckpt.meeting.keys import Keys
from smckpt.run import provide
from tests.support.frameworks.lightning_state import checkpoint, same
from tests.support.launch import run_ranks
from tests.support.limits import seconds


@dataclass
class Settings:
    rate: float = 0.1


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    plugin, saved = SmckptCheckpointIO(), checkpoint()
    plugin.save_checkpoint(saved, tmp_path / "one.ckpt")
    found = plugin.load_checkpoint(tmp_path / "one.ckpt")
    assert same(saved, found)
    assert isinstance(found["lr_schedulers"][0]["milestones"], collections.Counter)
    plugin.teardown()
    (one,) = smckpt.find_checkpoints(tmp_path)
    assert one.step == 4


def test_objects_that_need_code_are_loaded_as_weights_only_says(tmp_path: Path) -> None:
    plugin, saved = SmckptCheckpointIO(), checkpoint()
    saved["hyper_parameters"]["settings"] = Settings()
    plugin.save_checkpoint(saved, tmp_path / "one.ckpt")
    with pytest.raises(
        UsageError, match="'hyper_parameters' holds .*, such as .*weights_only=False"
    ):
        plugin.load_checkpoint(tmp_path / "one.ckpt")
    assert same(plugin.load_checkpoint(tmp_path / "one.ckpt", weights_only=False), saved)
    saved["hyper_parameters"]["settings"] = lambda: None
    with pytest.raises(StateError, match="'hyper_parameters' cannot be pickled"):
        plugin.save_checkpoint(saved, tmp_path / "two.ckpt")


@pytest.mark.parametrize(
    "odd",
    [
        Settings(3.0),
        torch.eye(3).to_sparse(),
        np.array(["a", "bc"]),
        nn.Parameter(torch.ones(3)),
        nn.Parameter(torch.ones(3), requires_grad=False),
        nn.Buffer(torch.ones(3)),
        torch.ones(3, requires_grad=True),
    ],
    ids=["own", "sparse", "text", "parameter", "frozen", "buffer", "grad"],
)
def test_a_value_beside_large_tensors_comes_back_and_is_named_once(
    tmp_path: Path, odd: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plugin, saved = SmckptCheckpointIO(), checkpoint()
    saved["averaged"] = {"weight": torch.arange(1 << 19), "with": odd}
    for name in ("before.ckpt", "one.ckpt"):
        plugin.save_checkpoint(saved, tmp_path / name)
    named = caplog.text.count("the checkpoint's 'averaged' is pickled as one (4 MB)")
    assert named == (not isinstance(odd, np.ndarray))  # that is stored as it is
    assert "averaging_state" not in caplog.text  # as large, and tensors alone
    found = plugin.load_checkpoint(tmp_path / "one.ckpt", weights_only=False)["averaged"]
    plugin.teardown()
    assert torch.equal(found["weight"], saved["averaged"]["weight"])
    got = found["with"]
    if isinstance(odd, torch.Tensor):
        assert (got.layout, got.requires_grad) == (odd.layout, odd.requires_grad)
        assert isinstance(got, nn.Buffer) == isinstance(odd, nn.Buffer)
        assert isinstance(got, nn.Parameter) == isinstance(odd, nn.Parameter)
        odd, got = odd.detach().to_dense(), got.detach().to_dense()
    assert type(got) is type(odd) and np.all(np.asarray(got == odd))


@pytest.mark.parametrize("by", [SmckptCheckpointIO, TorchCheckpointIO])
def test_a_module_is_made_from_a_checkpoint_by_its_own_method(tmp_path: Path, by: Any) -> None:
    class Sized(BoringModel):
        def __init__(self, width: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.own = torch.nn.Linear(width, 1)

    class Data(LightningDataModule):
        def __init__(self, rows: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.train_dataloader = BoringModel().train_dataloader

    trainer = Trainer(
        max_steps=1, accelerator="cpu", plugins=[by()], logger=False, default_root_dir=tmp_path,
        limit_val_batches=0, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    model = Sized(width=3)
    trainer.fit(model, datamodule=Data(5))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    smckpt.maybe_finalize_async_calls()
    again = Sized.load_from_checkpoint(tmp_path / "one.ckpt")
    assert again.hparams["width"] == 3 and torch.equal(again.own.weight, model.own.weight)
    assert Data.load_from_checkpoint(tmp_path / "one.ckpt").hparams["rows"] == 5


class BeginsWhenAsked(SmckptCheckpointIO):
    """As on a busy machine, its saves begin when they are already asked for."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        super().__init__()
        self.wait = wait

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.wait()
        super().save_checkpoint(checkpoint, path, storage_options)


def saved_by_one_and_loaded_by_all(folder: str, by_thread: bool) -> list[int]:
    """Rank 0 saves alone, and the ranks meet, as Lightning does it."""
    path, found = f"{folder}/last.ckpt", list[int]()
    store = dist.distributed_c10d._get_default_store()
    for step in range(1, 4):
        plugin: Any = SmckptCheckpointIO()  # the next Trainer's
        if by_thread:
            asked = functools.partial(store.wait, [f"asked/{step}"], timedelta(seconds=60))
            plugin = AsyncCheckpointIO(BeginsWhenAsked(asked))
        if dist.get_rank() == 0:
            plugin.save_checkpoint({**checkpoint(), "global_step": step}, path)
        dist.barrier()
        if dist.get_rank() == 1:
            store.set(f"asked/{step}", "")
        load = plugin.load_checkpoint if step % 2 else saving.pl_load
        found.append(load(path)["global_step"])
        dist.barrier()
    plugin.teardown()
    return found


@pytest.mark.parametrize("by_thread", [False, True], ids=["at once", "AsyncCheckpointIO"])
def test_all_ranks_load_what_one_has_saved_before_they_met(tmp_path: Path, by_thread: bool) -> None:
    found = run_ranks(saved_by_one_and_loaded_by_all, 2, str(tmp_path), by_thread)
    assert found == [[1, 2, 3]] * 2


def test_a_process_loads_what_the_thread_of_its_plugin_has_yet_to_save(tmp_path: Path) -> None:
    asked = threading.Semaphore(0)
    plugin = AsyncCheckpointIO(BeginsWhenAsked(functools.partial(asked.acquire, timeout=60)))
    for step in (1, 2):
        plugin.save_checkpoint({**checkpoint(), "global_step": step}, tmp_path / "last.ckpt")
        asked.release()
        assert plugin.load_checkpoint(tmp_path / "last.ckpt")["global_step"] == step
    plugin.teardown()


def loaded_after_a_killed_save(folder: str) -> list[int]:
    """The job's store outlives a process that was killed while it saved."""
    alone._SAVE_SECONDS = 10.0
    plugin, path = SmckptCheckpointIO(), f"{folder}/last.ckpt"
    if dist.get_rank() == 0:
        plugin.save_checkpoint({**checkpoint(), "global_step": 7}, path)
        plugin.teardown()
        keys = Keys(group_of(None).store, "smckpt/lightning")
        keys.set("saver", [0, ["another", 1, 1], 1, path])
    dist.barrier()
    found = [load(path)["global_step"] for load in (plugin.load_checkpoint, saving.pl_load)]
    dist.barrier()  # rank 0 keeps the store until then: without it, nobody would wait for a save
    return found


def test_a_load_does_not_wait_for_a_save_whose_process_was_killed(tmp_path: Path) -> None:
    assert run_ranks(loaded_after_a_killed_save, 2, str(tmp_path)) == [[7, 7]] * 2


def loaded_while_another_saves(folder: str) -> str:
    """Rank 0 goes on saving, and does not load."""
    path, error = f"{folder}/last.ckpt", ""
    if dist.get_rank() == 0:
        store = group_of(None).store
        Keys(store, "smckpt/lightning").set("saver", [0, ["another", 1, 1], 1, path])
    dist.barrier()
    if dist.get_rank() == 1:
        alone._SAVE_SECONDS = 0.1
        with pytest.raises(PeerError) as caught:
            SmckptCheckpointIO().load_checkpoint(path)
        error = str(caught.value)
    dist.barrier()
    return error


def test_the_wait_for_a_save_ends_and_names_the_rank_and_the_path(tmp_path: Path) -> None:
    _, error = run_ranks(loaded_while_another_saves, 2, str(tmp_path))
    assert "rank 0 has not ended its save of" in error and f"{tmp_path}/last.ckpt" in error


def each_saves_alone(folder: str) -> list[int]:
    """As Trainers of single devices in a job of two ranks."""
    alone._SAVE_SECONDS = 10.0
    plugin, path = SmckptCheckpointIO(), f"{folder}/{dist.get_rank()}.ckpt"
    for step in (1, 2):
        plugin.save_checkpoint({**checkpoint(), "global_step": step}, path)
    dist.barrier()
    found = [plugin.load_checkpoint(f"{folder}/{rank}.ckpt")["global_step"] for rank in (0, 1)]
    dist.barrier()
    plugin.teardown()
    return found


def test_loads_end_where_each_rank_saves_alone(tmp_path: Path) -> None:
    found = run_ranks(each_saves_alone, 2, str(tmp_path))
    assert [one[rank] for rank, one in enumerate(found)] == [2, 2]


def test_a_save_is_announced_while_another_one_still_connects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host of the job's store may be out of reach for half a minute."""
    store, connects, announced = dist.HashStore(), threading.Event(), threading.Event()

    def connected(given: Any) -> Any:
        if not connects.is_set():
            connects.set()
            assert announced.wait(seconds(10))
        return given

    group = SimpleNamespace(world_size=2, rank=0, store=store)
    monkeypatch.setattr(alone, "client_of", connected)
    monkeypatch.setattr(alone, "group_of", lambda _: group)
    announcements = alone.Announcements()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(announcements.begin, "first")
        assert connects.wait(seconds(10))
        announcements.begin("second")()
        announced.set()
        first.result()()
    assert Keys(store, "smckpt/lightning").peek("saver")[2:] == [2, "first"]


def test_what_lightning_itself_wrote_is_loaded_and_removed(tmp_path: Path) -> None:
    saved = checkpoint()
    del saved["hyper_parameters"]["where"]
    TorchCheckpointIO().save_checkpoint(saved, tmp_path / "one.ckpt")
    assert same(SmckptCheckpointIO().load_checkpoint(tmp_path / "one.ckpt"), saved)
    SmckptCheckpointIO().remove_checkpoint(tmp_path / "one.ckpt")
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError, match="one.ckpt"):
        SmckptCheckpointIO().load_checkpoint(tmp_path / "one.ckpt")


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_dropped_checkpoint_goes_when_its_successor_is_committed(
    tmp_path: Path, wrapped: bool, waits: bool
) -> None:
    plugin: Any = SmckptCheckpointIO(async_checkpointing=not waits)
    if wrapped:
        plugin = AsyncCheckpointIO(plugin)
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    for path in (first, second):
        plugin.save_checkpoint(checkpoint(), path)
    plugin.remove_checkpoint(first)
    plugin.teardown()
    if wrapped and not waits:
        plugin.checkpoint_io.teardown()
    assert [one.path for one in smckpt.find_checkpoints(tmp_path)] == [str(second)]
    assert not first.exists()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_dropped_checkpoint_stays_while_no_later_save_is_committed(
    tmp_path: Path, wrapped: bool
) -> None:
    plugin: Any = SmckptCheckpointIO(async_checkpointing=not wrapped)
    outer = AsyncCheckpointIO(plugin) if wrapped else plugin
    (tmp_path / "file").touch()
    first, third = tmp_path / "first.ckpt", tmp_path / "third.ckpt"
    outer.save_checkpoint(checkpoint(), first)
    outer.save_checkpoint(checkpoint(), tmp_path / "file" / "second.ckpt")
    outer.remove_checkpoint(first)
    with pytest.raises(SaveFailedError, match="file"):
        outer.teardown()
    assert [one.path for one in smckpt.find_checkpoints(tmp_path)] == [str(first)]
    plugin.save_checkpoint(checkpoint(), third)
    plugin.teardown()
    assert [one.path for one in smckpt.find_checkpoints(tmp_path)] == [str(third)]


class Breaks(Callback):
    """From the last step on, no save succeeds."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            smckpt.maybe_finalize_async_calls()
            self.place.rename(self.place.with_name("moved"))
            self.place.touch()


def test_a_last_save_that_fails_fails_the_end_of_fit(tmp_path: Path) -> None:
    place = tmp_path / "run"
    saved = ModelCheckpoint(dirpath=place, every_n_train_steps=2)
    trainer = Trainer(
        max_steps=4, accelerator="cpu", callbacks=[saved, Breaks(place)], logger=False,
        plugins=[SmckptCheckpointIO()], limit_val_batches=0, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(SaveFailedError, match="run"):
        trainer.fit(BoringModel())


def test_none_means_the_default_and_a_place_outside_s3_is_refused(tmp_path: Path) -> None:
    plugin = S3CheckpointIO("s3://bucket/run", None, None, None, None)
    asked = (plugin.chunk_size_MB, plugin.max_read_concurrency, plugin.max_write_concurrency)
    assert (*asked, plugin.async_checkpointing) == (64, 15, 10, False)
    with pytest.raises(UsageError, match="not in S3"):
        S3CheckpointIO(str(tmp_path))
    with pytest.raises(UsageError, match="not in S3"):
        S3CheckpointIO(None)
    with pytest.raises(UsageError, match="not in S3"):
        plugin.save_checkpoint(checkpoint(), tmp_path / "one.ckpt")
    with pytest.raises(UsageError, match="chunk_size_MB=1 "):
        S3CheckpointIO("s3://bucket/run", chunk_size_MB=1)
    with pytest.raises(UsageError, match="max_read_concurrency=0 "):
        S3CheckpointIO("s3://bucket/run", max_read_concurrency=0)
    with pytest.raises(UsageError, match="storage_options"):
        plugin.save_checkpoint(checkpoint(), "s3://bucket/run/a", storage_options={"a": 1})


def test_what_a_sharded_strategy_cannot_honour_is_refused() -> None:
    with pytest.raises(UsageError, match="state_dict_type='full'"):
        SmckptFSDPStrategy(state_dict_type="full")
    with pytest.raises(UsageError, match="save_distributed_checkpoint=False"):
        SmckptModelParallelStrategy(save_distributed_checkpoint=False)
    strategy = SmckptFSDPStrategy()
    with pytest.raises(UsageError, match="TorchCheckpointIO is not .*; SmckptFSDPStrategy saves"):
        strategy.checkpoint_io = TorchCheckpointIO()
    with pytest.raises(UsageError, match="storage_options"):
        strategy.save_checkpoint({}, "a", storage_options={"a": 1})
    strategy.checkpoint_io = plugin = S3CheckpointIO("s3://bucket/run", chunk_size_MB=8)
    assert strategy.saves is plugin.saves and not strategy.async_checkpointing


# -- smckpt run --------------------------------------------------------------------------------


def test_lightnings_names_are_replaced_and_taken_back() -> None:
    from lightning.fabric.strategies import strategy as of_fabric
    from lightning.pytorch import strategies
    from lightning.pytorch.strategies import strategy
    from lightning.pytorch.trainer import trainer

    def names() -> list[Any]:
        return [
            strategies.FSDPStrategy, strategies.fsdp.FSDPStrategy, strategies.ModelParallelStrategy,
            strategies.StrategyRegistry["fsdp"]["strategy"], strategy.TorchCheckpointIO,
            trainer._CheckpointConnector, of_fabric.TorchCheckpointIO,
        ]  # fmt: skip

    before = names()
    with provide(["lightning"]) as provided:
        assert all(a is not b for a, b in zip(names(), before, strict=True))
        assert len(provided.lines) == 12
        assert sum("Fabric's sharded strategies stay stock" in line for line in provided.lines) == 1
        assert isinstance(Trainer(accelerator="cpu").strategy.checkpoint_io, SmckptCheckpointIO)
    assert names() == before


def test_fabric_saves_and_loads_through_the_door_what_it_does_by_itself(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[Fabric, dict[str, Any]]:
        fabric = Fabric(accelerator="cpu", devices=1)
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 600), torch.nn.Linear(600, 600))
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
        return fabric, {"model": model, "optimizer": optimizer, "steps": seed, "seen": {(1, 2): 3}}

    def stepped(fabric: Fabric, state: dict[str, Any]) -> list[torch.Tensor]:
        fabric.backward(state["model"](torch.ones(2, 4)).sum())
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        return [one.detach().clone() for one in state["model"].parameters()]

    stock, state = made(1)
    stepped(stock, state)
    stock.save(tmp_path / "stock.ckpt", state)
    with provide(["lightning"]):
        fabric, state = made(1)
        stepped(fabric, state)
        fabric.save(tmp_path / "ours.ckpt", state)
        fabric.save(tmp_path / "weights.ckpt", state["model"].state_dict())
        kept = [one.detach().clone() for one in state["model"].parameters()]
        wanted = stepped(fabric, state)
        for name in ("ours.ckpt", "stock.ckpt"):
            again, target = made(2)
            rest = again.load(tmp_path / name, {k: v for k, v in target.items() if k != "seen"})
            assert rest == {"seen": {(1, 2): 3}}
            target["steps"] = 0
            assert not again.load(tmp_path / name, target) and target["steps"] == 1
            assert all(map(torch.equal, stepped(again, target), wanted))
        raw, target = made(3)
        raw.load_raw(tmp_path / "weights.ckpt", target["model"])
        assert all(map(torch.equal, target["model"].parameters(), kept))
    assert smckpt.verify_checkpoint(tmp_path / "ours.ckpt").ok


def test_nemos_modules_are_provided_where_it_is_absent() -> None:
    with provide(["nemo"]):
        from nemo.utils.callbacks.s3_checkpoint_io import S3CheckpointIO as Named
        from nemo.utils.s3_dirpath_utils import build_s3_url, is_s3_url

        assert Named is S3CheckpointIO and is_s3_url(build_s3_url("b", "k"))
        with pytest.raises(UsageError, match="nemo is installed or provided here already"):
            provide(["nemo"])
    with pytest.raises(ModuleNotFoundError):
        import nemo  # noqa: F401
