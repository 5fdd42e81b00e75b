"""Runs torch's own tests of torch.distributed.checkpoint with smckpt in DCP's place, on the CPU.

    python -m tests.support.frameworks.torch_suite CHECKOUT [--way stock calls storage] [--only …]

CHECKOUT is a checkout of pytorch; its files are read there and are not part of this project. Each
file is copied to a temporary directory with gloo in place of nccl and the CPU in place of CUDA, and
its tests run once as they are (`stock`), once with all names that `smckpt run --for dcp` replaces
(`calls`), once with smckpt's reader and writer alone in place of `FileSystemReader` and
`FileSystemWriter` (`storage`), and once with `sm_state_dict_type` in place of
`FSDP.state_dict_type` (`kinds`). Only tests that stock torch passes here count.

It needs the packages expecttest and, for tests of extensions, zstandard. Ranks are forked, so a
test takes seconds.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import tempfile
from pathlib import Path

from tests.support.frameworks.torch_suite_report import outcomes_of
from tests.support.limits import seconds

WAYS = ("stock", "calls", "storage", "kinds")
BELOW = "test/distributed"
# DCP's own tests, and those of FSDP and of composability that save or load by DCP.
FILES = (
    "checkpoint/e2e/test_e2e_save_and_load.py",
    "checkpoint/e2e/test_fine_tuning.py",
    "checkpoint/e2e/test_fsdp_ep.py",
    "checkpoint/fsdp/test_fsdp_dsd.py",
    "checkpoint/test_async_process_executor.py",
    "checkpoint/test_checkpoint.py",
    "checkpoint/test_compatibility.py",
    "checkpoint/test_consolidate_hf_safetensors.py",
    "checkpoint/test_dedup_tensors.py",
    "checkpoint/test_dtensor_checkpoint.py",
    "checkpoint/test_dtensor_resharding.py",
    "checkpoint/test_file_system_checkpoint.py",
    "checkpoint/test_file_system_checkpoint_cpu.py",
    "checkpoint/test_format_utils.py",
    "checkpoint/test_fsdp_model_state.py",
    "checkpoint/test_fsdp_optim_state.py",
    "checkpoint/test_fsdp_tp_checkpoint_conversion.py",
    "checkpoint/test_fsspec.py",
    "checkpoint/test_hf_safetensor_e2e.py",
    "checkpoint/test_hf_storage.py",
    "checkpoint/test_hsdp_checkpoint.py",
    "checkpoint/test_nested_dict.py",
    "checkpoint/test_planner.py",
    "checkpoint/test_quantized_hf_storage.py",
    "checkpoint/test_save_load_api.py",
    "checkpoint/test_state_dict.py",
    "checkpoint/test_state_dict_stager.py",
    "checkpoint/test_state_dict_utils.py",
    "checkpoint/test_tp_checkpoint.py",
    "checkpoint/test_traverse.py",
    "checkpoint/test_utils.py",
    "fsdp/test_distributed_checkpoint.py",
    "_composable/fsdp/test_fully_shard_state_dict.py",
    "_composable/test_composability/test_2d_composability.py",
    "_composable/test_composability/test_pp_composability.py",
)
_CALLED = r"\((?:[^()]|\([^()]*\))*\)"  # with arguments that are calls, too
# On a machine without CUDA. Order matters.
_CPU = (
    (r"@skip_if_lt_x_gpu\(\d+\)", ""),
    (rf"@requires_(nccl|accelerator_dist_backend){_CALLED}", ""),
    (r"@skip_but_pass_in_sandcastle_if\(not TEST_MULTIGPU[^\n]*", ""),
    (r"@with_comms\(init_rpc=False\)", '@with_comms(init_rpc=False, backend="gloo")'),
    (r'"cpu:gloo,cuda:nccl"', '"gloo"'),
    (r'f"cpu:gloo,\{self\.device_type\}:\{curr_backend\}"', '"gloo"'),
    (r'backend="nccl"', 'backend="gloo"'),
    (rf"torch\.cuda\.set_device{_CALLED}", "None"),
    (r"torch\.cuda\.(synchronize|empty_cache)\(\)", "None"),
    (r"torch\.cuda\.device_count\(\)", "8"),
    (r"torch\.cuda\.current_device\(\)", '"cpu"'),
    (r"torch\.cuda\.is_available\(\)", "True"),
    (rf"\.cuda{_CALLED}", '.to("cpu")'),
    (r"\.to\((dist\.get_rank\(\)|self\.rank)\)", '.to("cpu")'),
    (r'f"cuda:\{[^}]*\}"', '"cpu"'),
    (r'f"rank:\{(\w+)\}/cuda:\{[^}]*\}"', r'f"rank:{\1}/cpu"'),
    (r"rank:(\d)/cuda:\d", r"rank:\1/cpu"),
    (r"(rank:(\d|\{[^}]*\})/)\{device_type\}:(\d|\{[^}]*\})", r"\1cpu"),
    (r'f"\{device_type\}:(\d|\{[^}]*\})"', '"cpu"'),
    (r", device=\'cuda:\d\'", ""),
    (r'torch\.device\("cuda", [^)]*\)', 'torch.device("cpu")'),
    (r'"cuda(:\d)?"', '"cpu"'),
    (r"device=(self\.rank\b|dist\.get_rank\(\))", 'device="cpu"'),
    (r"min\(8, (\d)\)", r"\1"),
)
_PRELUDE = """
import tests.support.frameworks.torch_suite as _suite
_suite.prepare()
"""


def on_cpu(source: str) -> str:
    """The text of a test file, for a machine without CUDA."""
    for pattern, text in _CPU:
        source = re.sub(pattern, text, source)
    lines = source.splitlines()
    first = next(i for i, line in enumerate(lines) if re.match(r"(import|from) ", line))
    while lines[first].startswith("from __future__"):
        first += 1
    return "\n".join([*lines[:first], _PRELUDE, *lines[first:]]) + "\n"


def prepare() -> None:
    """Fork ranks, ask for no CUDA, and put smckpt in DCP's place in the way that SMCKPT_TORCH_WAY
    says. Each test file calls this before it imports torch's names."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.testing._internal import common_distributed, common_fsdp
    from torch.testing._internal.distributed._tensor import common_dtensor

    from smckpt.run import provide
    from smckpt.run.doors import Provided, put_storage

    def forked(self) -> None:  # type: ignore[no-untyped-def]
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    common_distributed.MultiProcessTestCase._spawn_processes = forked
    common_dtensor.skip_if_lt_x_gpu = lambda *_, **__: lambda function: function
    common_dtensor.with_comms.__globals__["skip_if_lt_x_gpu"] = common_dtensor.skip_if_lt_x_gpu
    common_fsdp.DISTRIBUTED_BACKEND, common_fsdp.DEVICE_TYPE = "gloo", "cpu"
    common_fsdp.DEVICE_COUNT = 4
    torch.accelerator.device_count = lambda: 4
    torch.accelerator.current_device_index = lambda: torch.device("cpu")
    its_init = FullyShardedDataParallel.__init__

    @functools.wraps(its_init)
    def on_the_cpu(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        kwargs["device_id"] = torch.device("cpu")  # FSDP1 wants to be told
        its_init(self, *args, **kwargs)

    FullyShardedDataParallel.__init__ = on_the_cpu
    begins = dist.init_process_group

    @functools.wraps(begins)
    def without_device(*args, **kwargs):  # type: ignore[no-untyped-def]
        begins(*args, **{k: v for k, v in kwargs.items() if k != "device_id"})

    dist.init_process_group = without_device
    way = os.environ["SMCKPT_TORCH_WAY"]
    if way == "calls":
        provide(["dcp"])
    elif way == "storage":
        put_storage(Provided())


def kind(module, state_dict_type, state_dict_config=None, optim_state_dict_config=None):  # type: ignore[no-untyped-def]
    """`FSDP.state_dict_type`'s arguments by their names."""
    from smckpt import sm_state_dict_type

    return sm_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)


def run_file(checkout: Path, name: str, way: str, only: str | None) -> dict[str, str]:
    """The outcome of each test of a file: "passed", "skipped" or the last line of its error."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, Path(name).name)
        text = on_cpu((checkout / BELOW / name).read_text())
        if way == "kinds":
            text = re.sub(r"\b(FSDP|model)\.state_dict_type\(", "_suite.kind(", text)
        copy.write_text(text)
        environment = {
            "SMCKPT_TORCH_WAY": way,
            "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(seconds(60))),
        }
        return outcomes_of(copy, environment, only, 900)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--way", nargs="+", choices=WAYS, default=WAYS[:3])
    parser.add_argument("--files", nargs="+", default=FILES)
    parser.add_argument("--only")
    parser.add_argument("--out", type=Path, help="a JSON file that keeps the outcomes")
    chosen = parser.parse_args()
    kept = chosen.out if chosen.out is not None else Path(os.devnull)
    outcomes = json.loads(kept.read_text()) if chosen.out and kept.exists() else {}
    for name in chosen.files:
        if not (chosen.checkout / BELOW / name).exists():
            print(f"{name}: not in this checkout")
            continue
        for way in chosen.way:
            seen = run_file(chosen.checkout, name, way, chosen.only)
            outcomes.setdefault(name, {}).setdefault(way, {}).update(seen)
            kept.write_text(json.dumps(outcomes, indent=1))
            _say(name, way, outcomes[name])
    _total(outcomes)


def _say(name: str, way: str, seen: dict[str, dict[str, str]]) -> None:
    stock = seen.get("stock", {})
    counted = [t for t, outcome in stock.items() if outcome == "passed"]
    passed = [t for t in counted if seen[way].get(t) == "passed"]
    print(f"{name} [{way}]: {len(passed)} of {len(counted)}", flush=True)
    for test, outcome in seen[way].items():
        if outcome != "passed" and (way == "stock" or test in counted or test == "(file)"):
            print(f"    {test}: {outcome[:300]}", flush=True)


def _total(outcomes: dict[str, dict[str, dict[str, str]]]) -> None:
    for way in WAYS:
        passed = counted = 0
        for seen in outcomes.values():
            for test, outcome in seen.get("stock", {}).items():
                if outcome == "passed" and way in seen:
                    counted += 1
                    passed += seen[way].get(test) == "passed"
        print(f"{way}: {passed} of {counted}")


if __name__ == "__main__":
    main()
