"""The main job: train a small Llama, save in the background, get killed, resume bit for bit.

    python examples/train.py                         # starts itself under torchrun, 4 processes
    torchrun --standalone --nproc-per-node 4 --max-restarts 1 examples/train.py

Training saves a LOCAL checkpoint every few steps, in the background. A SIGKILL hits one rank at a
random moment; torchrun starts all ranks again; they resume from the newest complete checkpoint and
finish. The last checkpoint is exported as a Hugging Face directory, which then generates some text.
The same training runs once more, uninterrupted and without any save, and every loss must be equal
bit for bit. A table and a figure end the run. `main` has this order.

With --checkpoint-dir s3://bucket/prefix checkpoints go to S3. Where no AWS credentials and no
endpoint are configured, it starts an S3 server on this machine for the run, and says so.

It uses GPUs if there is one for each process, otherwise CPUs with gloo.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smckpt.run import ending  # noqa: F401 (first, so that signals are handled from now on)

# isort: split
import numpy as np
import report
import torch
import torch.distributed as dist
from accident import Accident, Log
from corpus import VOCABULARY, Batches, read_text
from launch import (
    arguments,
    checkpoints_of,
    join,
    leave,
    look_command,
    refuse_other_runs,
    say,
    start_torchrun,
    under_torchrun,
)
from sharding import build, llama_config
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils.logging import disable_progress_bar

from smckpt import (
    LOCAL,
    SHARDED,
    ExportOptions,
    ParallelState,
    SaveOptions,
    async_save,
    export_hf,
    init_optim_state,
    latest_checkpoint,
    load,
    maybe_finalize_async_calls,
    prewarm,
    sm_state_dict_type,
)


def main() -> None:
    args = arguments(__doc__)
    if not under_torchrun():
        start_torchrun(args)
    run = Run(args, join())
    refuse_other_runs(args)
    with Accident(args.kill_at, args.steps, run.log) as accident:
        train(run, run.checkpoints, accident)
    export_and_generate(run)
    if not args.no_reference:
        train(run, None, None)
    equal = dist.get_rank() != 0 or report.publish(run.directory, run.log, look_command(args))
    leave()
    sys.exit(0 if equal else 1)


# --- Training ------------------------------------------------------------------------------------


@dataclass
class Job:
    """Everything that training changes, and so everything that a checkpoint holds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    batches: Batches
    step: int = 0


def train(run: Run, checkpoints: str | None, accident: Accident | None) -> None:
    """Train to the last step, starting from the newest checkpoint if there is one.

    Args:
        checkpoints: directory of the checkpoints; None for the reference run, which saves nothing.
    """
    args, phase = run.args, "run" if checkpoints else "reference"
    job = new_job(run)
    if checkpoints:
        resume(run, job, checkpoints)
        # else the first save would wait for its worker to start, and the second one for the first
        prewarm(process_group=run.group)
    attempt = len(run.log.events("start"))
    dist.barrier()  # all ranks have read the log
    say(f"{phase}: steps {job.step} to {args.steps}")
    if dist.get_rank() == 0:
        run.log.append("start", phase=phase, attempt=attempt, step=job.step)
    under_way: list[Save] = []
    while job.step < args.steps:
        if accident:
            accident.step_begins(job.step + 1)
        began = time.perf_counter()
        losses = training_step(job, run.device)
        seconds = time.perf_counter() - began
        job.step += 1
        if dist.get_rank() == 0:
            values = {"losses": [loss.hex() for loss in losses], "seconds": seconds}
            run.log.append("step", phase=phase, attempt=attempt, step=job.step, **values)
        if job.step % 10 == 0:
            say(f"  step {job.step}: loss {sum(losses) / len(losses):.4f}, {seconds * 1e3:.0f} ms")
        if checkpoints and (job.step % args.save_every == 0 or job.step == args.steps):
            under_way.append(save(run, job, checkpoints, accident))
        under_way = log_finished(run, under_way, attempt)
    if checkpoints:
        maybe_finalize_async_calls(blocking=True)  # raises a failed save
        log_finished(run, under_way, attempt)


def training_step(job: Job, device: torch.device) -> list[float]:
    """One step; the losses of all ranks."""
    tokens = job.batches.next().to(device)
    loss = job.model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    job.optimizer.step()
    job.scheduler.step()
    job.optimizer.zero_grad()
    losses = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss.detach())
    return [float(loss) for loss in losses]


def new_job(run: Run) -> Job:
    """A job at step 0, the same at every start."""
    args = run.args
    model = build(run.config, args.parallel, run.degrees, run.device, args.seed)
    model.train()
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95))
    warmup = max(1, args.steps // 10)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.05 + 0.475 * (1 + math.cos(math.pi * (step - warmup) / (args.steps - warmup)))

    # ranks of one tensor-parallel group read the same batches
    share = {"rank": dist.get_rank() // args.tp, "ranks": dist.get_world_size() // args.tp}
    batches = Batches(run.text, length=args.length, batch=args.batch, seed=args.seed, **share)
    seed = args.seed * 1000 + share["rank"]
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    return Job(model, optimizer, LambdaLR(optimizer, factor), batches)


# --- Saving and resuming -------------------------------------------------------------------------


def state_of(run: Run, job: Job) -> dict[str, Any]:
    """The state that a save takes, and that a load fills."""
    with sm_state_dict_type(job.model, run.kind):
        return {
            "model": job.model.state_dict(),
            "optimizer": job.optimizer.state_dict(),
            "scheduler": job.scheduler.state_dict(),
            "batches": job.batches.state_dict(),
            "random": random_state(run.device),
            "step": job.step,
        }


def save(run: Run, job: Job, checkpoints: str, accident: Accident | None) -> Save:
    """Save in the background. Returns when the state is copied to other memory."""

    def committed(handle: Any) -> None:  # on one rank of each group
        if dist.get_rank() == 0:
            say(f"  step {handle.step}: checkpoint committed")
            if accident:
                accident.first_commit()

    handle = async_save(
        state_of(run, job),
        checkpoint_id=run.directory_of_group(f"{checkpoints}/step_{job.step}"),
        process_group=run.group,
        options=SaveOptions(
            parallel_state=run.degrees if run.kind is LOCAL else None, on_commit=committed
        ),
        step=job.step,
    )
    return Save(handle, time.time())


def resume(run: Run, job: Job, checkpoints: str) -> None:
    """Load the newest complete checkpoint, if there is one."""
    found = latest_checkpoint(checkpoints)  # one rank looks and tells the others
    if found is None:
        return
    init_optim_state(job.optimizer)  # AdamW has no state before its first step
    state = state_of(run, job)
    load(state, checkpoint_id=run.directory_of_group(found), process_group=run.group)
    # the load filled the tensors and the optimizer's groups; the rest is in `state`
    job.scheduler.load_state_dict(state["scheduler"])
    job.batches.load_state_dict(state["batches"])
    job.step = state["step"]
    set_random_state(state["random"], run.device)
    say(f"resumed from the checkpoint of step {job.step}")


def random_state(device: torch.device) -> dict[str, Any]:
    """The random generators of this rank. Dropout uses torch's, batches use NumPy's."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    state["numpy"] = np.random.get_state(legacy=False)
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


@dataclass
class Save:
    """A save in flight, and when it began."""

    handle: Any
    time: float


def log_finished(run: Run, saves: list[Save], attempt: int) -> list[Save]:
    """Log the cost of each finished save on this rank. Returns the saves still in flight."""
    for save in saves:
        if save.handle.done() and not save.handle.error:
            cost = save.handle.timings
            # from the call; `Timings` counts from the end of the wait for the save before
            run.log.append(
                "save",
                attempt=attempt,
                step=save.handle.step,
                rank=dist.get_rank(),
                began=save.time,
                blocked=cost.blocked,
                staged=cost.waited + cost.staged,
                written=cost.waited + cost.written,
                committed=cost.waited + cost.committed,
                bytes=cost.nbytes,
            )
    return [save for save in saves if not save.handle.done()]


# --- Afterwards ----------------------------------------------------------------------------------


def export_and_generate(run: Run) -> None:
    """The newest checkpoint as a Hugging Face directory, and some text from it; on rank 0."""
    found = latest_checkpoint(run.checkpoints)
    if dist.get_rank() == 0:
        assert found is not None
        exported = run.directory / "exported"
        export_hf(found, exported, config=run.config, options=ExportOptions(overwrite=True))
        disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(exported)
        prompt = "def "
        tokens = torch.tensor([list(prompt.encode())])
        torch.manual_seed(run.args.seed)
        text = model.generate(tokens, max_new_tokens=160, do_sample=True, temperature=0.6)
        run.log.append("text", text=bytes(text[0].tolist()).decode(errors="replace"))
        say(f"exported to {exported}")
    dist.barrier()


# --- Processes -----------------------------------------------------------------------------------


class Run:
    """The constants of a run: device, degrees, groups and directories."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        args.out = args.out or Path("runs") / os.environ["TORCHELASTIC_RUN_ID"][:8]
        self.directory: Path = args.out
        self.directory.mkdir(parents=True, exist_ok=True)
        self.checkpoints = checkpoints_of(args)
        self.log = Log(self.directory / "log.jsonl")
        self.text = read_text(args.data)
        self.config: LlamaConfig = llama_config(
            VOCABULARY, hidden=args.hidden, layers=args.layers, length=args.length
        )
        self.kind = {"local": LOCAL, "sharded": SHARDED}[args.state_dict]
        self.degrees = ParallelState(
            dist.get_world_size(),
            tensor_parallel_degree=args.tp,
            hybrid_shard_degree=1 if args.parallel == "ddp" else args.shard,
        )
        self.group = self._replication_group() if self.kind is LOCAL else None

    def directory_of_group(self, step: str) -> str:
        """The directory to which this rank's group saves a step. Each of several groups has one
        below the step's."""
        if self.group is None or self.group.size() == dist.get_world_size():
            return step
        return f"{step.rstrip('/')}/tp{self.degrees.tp_rank}_fsdp{self.degrees.fsdp_rank}"

    def _replication_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same shard as this one: they share the writing."""
        for ranks in self.degrees.ranker.get_rep_groups():
            group = dist.new_group(ranks)  # every rank makes every group
            if dist.get_rank() in ranks:
                mine = group
        return mine


if __name__ == "__main__":
    main()
