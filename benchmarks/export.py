"""Measures the time and memory of exports of a sharded checkpoint to a Hugging Face directory.

    python benchmarks/export.py --dir /path/on/the/disk [--family stablelm]

Two ranks save one bf16 model (FSDP2), with smckpt and with torch.distributed.checkpoint. Then the
ways run in turn, and each turn begins with another way (A B C, B C A, …): what the one before left
behind affects all of them. Each makes a loadable directory in a process of its own. The page cache
is emptied before, and the time includes making the output durable. The limit, from the same
run, is a copy of the same bytes on the same disk: the faster of `cp` and of two threads with direct
reads and writes. The time excludes imports; processor time (children's too) and the process's peak
resident memory include them, and the memory mapped pages of files. It prints medians, with minimum
and maximum.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PIECE = 16 << 20
BIN = "pytorch_model.bin"
FAMILIES = {"llama": "LlamaForCausalLM", "stablelm": "StableLmForCausalLM"}


def model_config(options: argparse.Namespace) -> Any:
    from transformers import AutoConfig

    # stablelm is a family without a table: transformers tells its names in released models
    return AutoConfig.for_model(
        options.family, hidden_size=options.hidden, intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 512), vocab_size=32000,
        tie_word_embeddings=False, dtype="bfloat16", architectures=[FAMILIES[options.family]],
    )  # fmt: skip


# -- what is exported ------------------------------------------------------------------------------


def save_sharded(options: argparse.Namespace) -> None:
    """Under torchrun: the model as two ranks hold it, saved in both formats."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    from smckpt import save

    root = Path(options.dir)
    dist.init_process_group("gloo")
    config = model_config(options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    block = torch.randn(1 << 20).mul_(0.02).bfloat16()
    for parameter in model.parameters():  # fast random data that does not compress
        flat = parameter.detach().to_local().view(-1)
        flat.copy_(block.repeat(-(-flat.numel() // block.numel()))[: flat.numel()])
    state = {"model": model.state_dict()}
    save(state, checkpoint_id=str(root / "smckpt"))
    dcp.save(state, checkpoint_id=root / "dcp")
    if dist.get_rank() == 0:
        config.save_pretrained(root / "config")
    dist.destroy_process_group()


# -- the ways --------------------------------------------------------------------------------------


def by_cp(root: Path, out: Path) -> Callable[[], None]:
    def act() -> None:
        out.mkdir()
        for path in sorted((root / "smckpt").glob("data-*")):
            shutil.copyfile(path, out / path.name)

    return act


def by_direct_copy(root: Path, out: Path) -> Callable[[], None]:
    import mmap

    def copy(source: Path) -> None:
        memory = mmap.mmap(-1, PIECE)
        read = os.open(source, os.O_RDONLY | os.O_DIRECT)
        write = os.open(out / source.name, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        size, at = source.stat().st_size, 0
        while at < size:
            count = os.preadv(read, [memory], at)
            padded = -(-count // 4096) * 4096
            os.pwritev(write, [memoryview(memory)[:padded]], at)
            at += count
        os.ftruncate(write, size)
        os.close(read)
        os.close(write)

    def act() -> None:
        out.mkdir()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(copy, sorted((root / "smckpt").glob("data-*.safetensors"))))

    return act


def import_model(root: Path) -> None:
    family = json.loads((root / "config" / "config.json").read_text())["model_type"]
    importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def by_smckpt(root: Path, out: Path, *, against_model: bool = True) -> Callable[[], None]:
    from smckpt import ExportOptions, export_hf

    config, options = root / "config" / "config.json", ExportOptions(against_model=against_model)
    return lambda: print_none(export_hf(root / "smckpt", out, config=config, options=options))


def by_smckpt_alone(root: Path, out: Path) -> Callable[[], None]:
    return by_smckpt(root, out, against_model=False)


def by_smckpt_compared(root: Path, out: Path) -> Callable[[], None]:
    import_model(root)  # else within the time
    return by_smckpt(root, out)


def by_translation(root: Path, out: Path) -> Callable[[], None]:
    from smckpt import ExportOptions, export_hf

    config = root / "config" / "config.json"
    return lambda: print_none(
        export_hf(root / "megatron", out, config=config, options=ExportOptions(against_model=False))
    )


def by_source(name: str) -> Callable[[Path, Path], Callable[[], None]]:
    """From the same model as another system saved it."""
    from smckpt import export_hf

    def way(root: Path, out: Path) -> Callable[[], None]:
        config = root / "config" / "config.json"
        return lambda: print_none(export_hf(root / name, out, config=config))

    return way


def by_accelerate(root: Path, out: Path) -> Callable[[], None]:
    import torch.distributed.checkpoint.format_utils  # noqa: F401  # else within the time
    from accelerate.utils import merge_fsdp_weights

    return lambda: merge_fsdp_weights(str(root / "dcp"), str(out), safe_serialization=True)


def by_torch_save(root: Path, out: Path) -> Callable[[], None]:
    """torch's own tool, then transformers'."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from transformers import AutoConfig, AutoModelForCausalLM

    import_model(root)  # else within the time

    def act() -> None:
        out.mkdir()
        dcp_to_torch_save(root / "dcp", out / BIN)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(root / "config"))
        state = torch.load(out / BIN, mmap=True, weights_only=True)["model"]
        model.load_state_dict(state, assign=True)
        model.save_pretrained(out)
        (out / BIN).unlink()

    return act


WAYS: dict[str, tuple[str, Callable[[Path, Path], Callable[[], None]]]] = {
    "cp": ("copy: cp", by_cp),
    "direct": ("copy: 2 threads, direct", by_direct_copy),
    "export": ("smckpt export", by_smckpt_alone),
    "checked": ("smckpt export, compared with transformers' model", by_smckpt_compared),
    "fresh": ("the same, transformers not yet imported", by_smckpt),
    "translated": ("smckpt export from Megatron's names, tp 2", by_translation),
    "dcp": ("smckpt export from torch DCP", by_source("dcp")),
    "file": ("smckpt export from one file of torch.save", by_source("state.pt")),
    "accelerate": ("accelerate merge_fsdp_weights", by_accelerate),
    "torch": ("dcp_to_torch_save, load, save_pretrained", by_torch_save),
}


def ways_of(options: argparse.Namespace) -> list[str]:
    return [name for name in WAYS if name != "translated" or options.family == "llama"]


def print_none(_: object) -> None:
    """A way's return value is not measured."""


# -- measuring -------------------------------------------------------------------------------------


def sync(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def drop_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def once(name: str, root: Path) -> None:
    """One way, once, in a process of its own."""
    out = root / "out"
    act = WAYS[name][1](root, out)
    began = time.perf_counter()
    act()
    sync(out)
    seconds = time.perf_counter() - began
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    busy = sum(each.ru_utime + each.ru_stime for each in used)
    nbytes = sum(path.stat().st_size for path in out.iterdir())
    status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
    memory = int(status.split()[0]) * 1024
    told = {"seconds": seconds, "bytes": nbytes, "memory": memory, "busy": busy}
    print(json.dumps(told))


def run_once(name: str, options: argparse.Namespace) -> dict[str, float]:
    root = Path(options.dir)
    shutil.rmtree(root / "out", ignore_errors=True)
    drop_cache(root)
    command = [sys.executable, __file__, "--dir", str(root), "--one", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    shutil.rmtree(root / "out", ignore_errors=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def prepare(options: argparse.Namespace) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    from smckpt import export_hf
    from smckpt.translate import Parallel, import_hf

    root = Path(options.dir)
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         __file__, "--save", *sys.argv[1:]], check=True,
    )  # fmt: skip
    export_hf(root / "smckpt", root / "hf", config=root / "config" / "config.json")
    if "translated" in ways_of(options):
        import_hf(root / "hf", root / "megatron", Parallel("mcore_te", tp=2))
    dcp_to_torch_save(root / "dcp", root / "state.pt")
    shutil.rmtree(root / "hf")


def report(found: dict[str, list[dict[str, float]]]) -> None:
    rate = {
        name: [one["bytes"] / one["seconds"] / 1e6 for one in runs] for name, runs in found.items()
    }
    limit = max(statistics.median(rate[name]) for name in ("cp", "direct"))
    print("| way | s | MB/s (min, max) | of the faster copy | processor s | peak memory |")
    print("|---|---|---|---|---|---|")
    for name, runs in found.items():
        seconds = statistics.median(one["seconds"] for one in runs)
        middle = statistics.median(rate[name])
        memory = max(one["memory"] for one in runs)
        print(
            f"| {WAYS[name][0]} | {seconds:.1f} | {middle:.0f} "
            f"({min(rate[name]):.0f}, {max(rate[name]):.0f}) | {middle / limit:.0%} "
            f"| {statistics.median(one['busy'] for one in runs):.1f} | {memory / 1e6:.0f} MB |"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dir", required=True, help="a directory on the disk; five times the size")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--family", choices=FAMILIES, default="llama")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.save:
        save_sharded(options)
    elif options.one:
        once(options.one, Path(options.dir))
    else:
        options.dir = os.path.join(options.dir, "smckpt-benchmark-export")
        sys.argv[1:] = ["--dir", options.dir, "--hidden", str(options.hidden), "--layers",
                        str(options.layers), "--family", options.family]  # fmt: skip
        shutil.rmtree(options.dir, ignore_errors=True)
        os.makedirs(options.dir)
        try:
            prepare(options)
            ways = ways_of(options)
            found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
            for turn in range(options.repeats):
                first = turn * 3 % len(ways)
                for name in [*ways[first:], *ways[:first]]:
                    found[name].append(run_once(name, options))
            report(found)
        finally:
            shutil.rmtree(options.dir, ignore_errors=True)


if __name__ == "__main__":
    main()
