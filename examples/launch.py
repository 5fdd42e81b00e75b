"""Options, processes and devices of the main job."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import loopback_s3
import torch
import torch.distributed as dist
from accident import Log
from corpus import read_text

from smckpt import CheckpointError, find_checkpoints, is_s3_url, parse_s3_url
from smckpt.run import ending


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parallel", choices=("fsdp2", "fsdp1", "ddp"), default="fsdp2")
    add("--state-dict", choices=("local", "sharded"), default="local")
    add("--shard", type=int, default=2, help="ranks that share a copy of the model (default 2)")
    add("--tp", type=int, default=1, help="tensor-parallel degree, FSDP2 only (default 1)")
    add("--world", type=int, default=4, help="processes to start without torchrun (default 4)")
    add("--steps", type=int, default=100)
    add("--save-every", type=int, default=10, help="steps (default 10)")
    add("--kill-at", default="auto", help="auto, never, or a step (default auto)")
    add("--no-reference", action="store_true", help="do not train a second time for comparison")
    add("--data", type=Path, nargs="+", default=[], help="text files or directories of them")
    add(
        "--out",
        type=Path,
        help="directory of the run (default runs/<id>); a run that is there is resumed",
    )
    add(
        "--checkpoint-dir", help="directory or s3://bucket/prefix (default: in the run's directory)"
    )
    add("--seed", type=int, default=1)
    add("--batch", type=int, default=4, help="windows per rank and step (default 4)")
    add("--length", type=int, default=64, help="bytes in a window (default 64)")
    add("--hidden", type=int, default=128)
    add("--layers", type=int, default=2)
    add("--learning-rate", type=float, default=1e-2)
    args = parser.parse_args()
    for name in ("world", "tp", "steps", "save_every", "batch", "length", "hidden", "layers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} is not positive")
    for path in args.data:
        if not path.exists():
            parser.error(f"--data {path} is not there")
    if args.tp > 1 and args.parallel != "fsdp2":
        parser.error("--tp needs --parallel fsdp2")
    if args.kill_at not in ("auto", "never") and not args.kill_at.isdigit():
        parser.error("--kill-at is auto, never, or a step")
    if args.kill_at.isdigit() and not 1 <= int(args.kill_at) <= args.steps:
        parser.error(f"--kill-at {args.kill_at} is none of the {args.steps} steps")
    world = int(os.environ.get("WORLD_SIZE", args.world))
    shard = 1 if args.parallel == "ddp" else args.shard
    if shard < 1 or world % (shard * args.tp):
        parser.error(f"--shard {shard} times --tp {args.tp} does not divide {world} processes")
    needed = (args.batch * (world // args.tp) + 1) * args.length
    given = len(read_text(args.data))
    if given < needed:
        parser.error(f"--data has {given} bytes of text; these options need {needed} or more")
    return args


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def torchrun_command(world: int) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return [*command, "--nproc-per-node", str(world), *sys.argv]


def run_torchrun(command: list[str]) -> int:
    """Run torchrun and return its exit status. No process of it and no file in /tmp is left."""
    with tempfile.TemporaryDirectory(prefix="smckpt-run-") as scratch:
        return ending.run(command, environment={**os.environ, "TMPDIR": scratch})


def start_torchrun(args: argparse.Namespace) -> NoReturn:
    """Start this script `--world` times with torchrun, which restarts all ranks if one dies.

    Wrong arguments are refused here, because torchrun would try each failure again.
    """
    ending.watch()
    command = torchrun_command(args.world)
    if args.out is None:
        earlier = len(list(Path("runs").glob("????????")))
        if earlier:
            print(
                f"{earlier} earlier runs are in runs/; ./dev clean offers to remove them",
                flush=True,
            )
        args.out = Path("runs") / secrets.token_hex(4)
        command += ["--out", str(args.out)]
    try:
        with reachable(args):
            refuse_other_runs(args)
            args.out.mkdir(parents=True, exist_ok=True)
            status = run_torchrun(command)
    except ending.Ended as ended:
        if Log(args.out / "log.jsonl").events("start"):
            ended.line += f" To go on from its last commit, add --out {args.out}"
        raise
    except (CheckpointError, OSError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
    sys.exit(status)


def checkpoints_of(args: argparse.Namespace) -> str:
    """The directory of the run's checkpoints."""
    return args.checkpoint_dir or str(args.out / "checkpoints")


def refuse_other_runs(args: argparse.Namespace) -> None:
    """Refuse checkpoints of another run, which this run would resume from."""
    place = checkpoints_of(args)
    if Log(args.out / "log.jsonl").events("start"):
        return
    if is_s3_url(place) or Path(place).exists():
        found = find_checkpoints(place)
        if found:
            raise SystemExit(
                f"{found[-1]} is of another run: pass its --out, or another --checkpoint-dir"
            )


def look_command(args: argparse.Namespace) -> str:
    """The command that lists the run's checkpoints, for pasting into this shell."""
    program = Path(sys.executable).parent / "smckpt"
    smckpt = shlex.quote(_short(program)) if program.exists() else f"{_python()} -m smckpt.cli"
    place = checkpoints_of(args)
    if is_s3_url(place) and os.environ.get("AWS_ACCESS_KEY_ID") == loopback_s3.KEY:
        bucket, _ = parse_s3_url(place)
        smckpt = f"{_python()} {_serve(args, bucket)} {smckpt}"
    return f"{smckpt} ls {shlex.quote(place)}"


def _serve(args: argparse.Namespace, bucket: str) -> str:
    script = _short(Path(loopback_s3.__file__))
    return shlex.join([script, bucket, str(args.out / "s3")])


def _python() -> str:
    return shlex.quote(_short(Path(sys.executable)))


def _short(path: Path) -> str:
    """A path, shortened for this directory."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def s3_is_configured() -> str:
    """The settings by which S3 is reached here; "" if there are none."""
    for name in ("SMCKPT_S3_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if os.environ.get(name):
            return f"{name}={os.environ[name]}"
    import boto3

    found = boto3.Session(profile_name=os.environ.get("SMCKPT_S3_PROFILE")).get_credentials()
    return f"AWS credentials ({found.method})" if found else ""


@contextlib.contextmanager
def reachable(args: argparse.Namespace) -> Iterator[None]:
    """Make the checkpoints' directory reachable for this process and its children during the block.

    If it is in S3 and no S3 is configured, this starts an S3 server for the block.
    """
    if not is_s3_url(args.checkpoint_dir or ""):
        yield
        return
    how = s3_is_configured()
    if how:
        print(f"checkpoints go to {args.checkpoint_dir}, reached by {how}", flush=True)
        yield
        return
    if loopback_s3.server_program() is None:
        sys.exit(
            "No AWS credentials and no endpoint (SMCKPT_S3_ENDPOINT) are configured. "
            "To try it without AWS, install a server: pip install 'smckpt[s3-test]'"
        )
    data = args.out / "s3"
    data.mkdir(parents=True, exist_ok=True)
    bucket, _ = parse_s3_url(args.checkpoint_dir)
    before = dict(os.environ)
    with loopback_s3.serve(bucket, data) as server:
        print(
            "No AWS credentials and no endpoint (SMCKPT_S3_ENDPOINT) are configured: started an S3 "
            f"server\nfor this run, at {server.endpoint}; it keeps what it gets in {data}.",
            flush=True,
        )
        os.environ.update(server.environment)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def join() -> torch.device:
    """Join the other ranks. Returns this rank's device."""
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    # torchrun's store keeps the keys of an attempt after a restart. They would confuse the next
    # attempt, so each attempt has a prefix of its own.
    store, rank, world = next(dist.rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt-{attempt}", store)
    backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    # equal bits need additions in equal order
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    return device


def leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)
