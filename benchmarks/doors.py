"""Measures what a door adds to a save on the training thread, outside of the engine's own call.

    python benchmarks/doors.py --dir DIR [--repeats 30]

One process saves a small model with many tensors through each door. A save's time counts from the
call of the framework until training may go on. What the engine's queue takes for the same state
is taken off, because the plain API takes it too, and is shown beside it. What the framework itself
does for a save, such as collecting states and random numbers, counts as the door's; `plain` shows
what the plain API takes to collect model and optimizer. It prints medians, with the least and the
most, of the training thread's processor time, in which no wait for other programs counts, and of
the clock. `--only torchtitan` and `--only torchtune` want an interpreter that has it.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from smckpt import maybe_finalize_async_calls
from smckpt.engine.saving.queue import SaveQueue

Save = Callable[[int], object]


class Inside:
    """The time that the engine's queue takes, on the clock and of the processor."""

    def __init__(self) -> None:
        self.clock = self.busy = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        stock = SaveQueue.submit

        def submit(*args: Any, **kwargs: Any) -> Any:
            clock, busy = time.perf_counter(), time.thread_time()
            try:
                return stock(*args, **kwargs)
            finally:
                self.clock += time.perf_counter() - clock
                self.busy += time.thread_time() - busy

        SaveQueue.submit = submit  # type: ignore[method-assign]
        try:
            yield
        finally:
            SaveQueue.submit = stock  # type: ignore[method-assign]


def model_of(layers: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    return model, optimizer


def plain(folder: Path, layers: int) -> Save:
    from smckpt import SHARDED, async_save, sm_state_dict_type

    model, optimizer = model_of(layers)

    def save(n: int) -> None:
        with sm_state_dict_type(model, SHARDED):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        async_save(state, checkpoint_id=folder / str(n))

    return save


def dcp(folder: Path, layers: int) -> Save:
    from smckpt.integrations.dcp import calls

    model, optimizer = model_of(layers)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return lambda n: calls.async_save(state, checkpoint_id=folder / str(n))


def smp(folder: Path, layers: int) -> Save:
    import torch.distributed as dist

    from smckpt.integrations import sagemaker
    from smckpt.integrations.sagemaker.distributed.checkpoint.state_dict_saver import async_save

    dist.init_process_group("gloo", init_method=f"file://{folder}.job", rank=0, world_size=1)
    sagemaker.init({"hybrid_shard_degree": 1})
    model, optimizer = model_of(layers)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return lambda n: async_save(state, checkpoint_id=str(folder / str(n)))


def accelerate(folder: Path, layers: int) -> Save:
    from smckpt.integrations.accelerate import SmckptAccelerator

    made = SmckptAccelerator(cpu=True)
    made.prepare(*model_of(layers))
    return lambda n: made.save_state(str(folder / str(n)))


def lightning(folder: Path, layers: int) -> Save:
    from smckpt.integrations.lightning import SmckptCheckpointIO

    model, optimizer = model_of(layers)
    saves = SmckptCheckpointIO()
    state = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    return lambda n: saves.save_checkpoint(state, str(folder / f"{n}.ckpt"))


def trainer(folder: Path, layers: int) -> Save:
    from transformers import TrainingArguments

    from smckpt.integrations.transformers import SmckptTrainer

    model, optimizer = model_of(layers)
    told = TrainingArguments(str(folder), use_cpu=True, report_to=[], save_total_limit=None)
    made = SmckptTrainer(model=model, args=told, optimizers=(optimizer, None))
    made.create_scheduler(100, optimizer)

    def save(n: int) -> None:
        made.state.global_step = n
        made._save_checkpoint(model, None)

    return save


def torchtitan(folder: Path, layers: int) -> Save:
    from torch.utils.data import IterableDataset
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    from smckpt.integrations.torchtitan import SmckptCheckpointManager

    class Nothing(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    class Steps:
        """What torchtitan's trainer has in `train_state`."""

        def state_dict(self) -> dict[str, Any]:
            return {"step": 1, "ntokens_seen": 1}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    model, _ = model_of(layers)
    optimizers = default_adamw().build(model_parts=[model])
    model(torch.ones(1, 64)).sum().backward()
    optimizers.step()
    rates = LRSchedulersContainer.Config().build(optimizers=optimizers, training_steps=100)
    config = SmckptCheckpointManager.Config(enable=True, interval=1, folder="steps")
    manager = config.build(
        dataloader=ParallelAwareDataloader(Nothing(), 0, 1), model_parts=[model],
        optimizers=optimizers, lr_schedulers=rates, states={"train_state": Steps()},
        sd_adapter=None, base_folder=str(folder),
    )  # fmt: skip

    def save(n: int) -> None:
        manager.save(n)
        # These states are torchtitan's work, but the engine asks for them, within its own call. So
        # they are taken once more.
        for name, state in manager.states.items():
            if name != "model":
                state.state_dict()

    return save


def torchtune(folder: Path, layers: int) -> Save:
    from smckpt.integrations.torchtune import DistributedCheckpointer

    model, optimizer = model_of(layers)
    made = DistributedCheckpointer(str(folder), str(folder), keep_last_n_checkpoints=2)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs_run": 1}
    return lambda n: made.save_checkpoint({**state}, epoch=n, save_async=True)


DOORS = {
    one.__name__: one
    for one in (plain, dcp, smp, accelerate, lightning, trainer, torchtitan, torchtune)
}


def show(name: str, what: str, seconds: list[float]) -> None:
    middle, least, most = (f(seconds) * 1e3 for f in (statistics.median, min, max))
    print(f"{name:12} {what:10} {middle:8.2f} ({least:.2f} – {most:.2f}) ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", required=True, type=Path, help="a directory on a disk")
    parser.add_argument("--layers", type=int, default=48, help="two tensors each (default 48)")
    parser.add_argument("--repeats", type=int, default=30, help="saves (default 30)")
    parser.add_argument("--only", nargs="+", choices=DOORS, default=[*DOORS][:-2])
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    logging.getLogger("smckpt").setLevel(logging.ERROR)  # nothing is trained: no alarms of it
    for name in args.only:
        folder = Path(tempfile.mkdtemp(dir=args.dir, prefix=name))
        save = DOORS[name](folder, args.layers)
        rows: list[tuple[float, float, float]] = []
        for n in range(1, args.repeats + 3):
            inside = Inside()
            with inside.measured():
                clock, busy = time.perf_counter(), time.thread_time()
                save(n)
                clock, busy = time.perf_counter() - clock, time.thread_time() - busy
            rows.append((busy - inside.busy, clock - inside.clock, inside.busy))
            maybe_finalize_async_calls(blocking=True)
        busy_, clock_, engine = zip(*rows[2:], strict=True)
        show(name, "processor", list(busy_))
        show(name, "clock", list(clock_))
        show(name, "(engine)", list(engine))
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
