"""Runs the HyperPod adapter's own tests of checkpoints behind our door, on CPUs.

`python -m torch.distributed.run … -m tests.support.frameworks.hyperpod CHECKOUT FILES…` on each
rank. What is changed of the adapter's surroundings, and why, stands at each function; none of its
checkpoint code is. The adapter's code is not ours, and is read from a checkout.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import _init_utils

from smckpt.run import provide
from tests.support.frameworks import hyperpod_stand_ins

COMMIT = "0f91fdd5839e26cf310665eb23e8224a3de6a267"  # release 1.4.0
TESTS = "tests/hyperpod_nemo_adapter/utils/callbacks"
VARIABLE = "SMCKPT_HYPERPOD_ADAPTER"
NAMED = "aws/sagemaker-hyperpod-training-adapter-for-nemo"


def on_cpus() -> None:
    """The adapter asks for the current CUDA device; on a machine without one that is the CPU."""
    if torch.cuda.is_available():
        return
    torch.cuda.current_device = lambda: torch.device("cpu")
    # FSDP wants parameters on a GPU before it sends rank 0's to all; gloo sends them as they are.
    _init_utils._check_module_states_for_sync_module_states = lambda _: None
    stock = FSDP.summon_full_params

    def summon_full_params(*args: Any, offload_to_cpu: bool = False, **kwargs: Any) -> Any:
        """On CPUs torch's offloading reads memory that it has freed."""
        return stock(*args, **kwargs)

    FSDP.summon_full_params = staticmethod(summon_full_params)
    from pytorch_lightning.accelerators import CPUAccelerator

    parse = CPUAccelerator.parse_devices

    def parse_devices(devices: Any) -> int:
        """Lightning counts CPUs, where it lists GPUs."""
        return parse(devices if isinstance(devices, (int, str)) else len(devices))

    CPUAccelerator.parse_devices = staticmethod(parse_devices)
    import transformers.utils.import_utils as imports
    from transformers import AutoModelForCausalLM

    loads = AutoModelForCausalLM.from_pretrained

    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        """flash_attn is a package for GPUs."""
        if kwargs.get("attn_implementation") == "flash_attention_2":
            del kwargs["attn_implementation"]
        return loads(*args, **kwargs)

    AutoModelForCausalLM.from_pretrained = from_pretrained

    # transformers 5 lacks it; the adapter's DeepSeek model, which no test here builds, imports it
    if not hasattr(imports, "is_torch_fx_available"):
        imports.is_torch_fx_available = lambda: False


def prepared(checkout: Path) -> None:
    """Make the adapter importable, with the door and the stand-ins."""
    hyperpod_stand_ins.put()
    on_cpus()
    provide(["sagemaker"])
    sys.path[:0] = [str(checkout / "src"), str(checkout)]
    sys.modules.pop("tests")  # the adapter has a package of this name, too


class _Counted:
    """`os`, whose `scandir` leaves out the record and the lease of a step of several groups."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def scandir(self, path: Any) -> list[Any]:
        ours = ("record-", "epoch-")
        return [entry for entry in os.scandir(path) if not entry.name.startswith(ours)]


class Fewer:
    """A plugin for the adapter's end-to-end tests, which want 8 GPUs and SMP's layers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: dict[str, str] = {}

    def pytest_sessionstart(self) -> None:
        if "WORLD_SIZE" not in os.environ:  # not under torchrun: its unit tests
            return
        sys.path.insert(0, str(self.folder))
        import test_utils

        world = int(os.environ.get("WORLD_SIZE", "1"))
        theirs = test_utils.setup_test_cfg

        def config(cfg: Any) -> Any:
            cfg.trainer.devices, cfg.trainer.num_nodes = world, 1
            cfg.model.shard_degree = world
            if "expert_model_parallel_degree" in cfg.model:
                cfg.model.expert_model_parallel_degree = 1
            cfg = theirs(cfg)
            cfg.use_smp_model = False  # Hugging Face's model: smckpt has no layers of SMP
            cfg.model.use_flash_attention = False  # a package for GPUs
            cfg.model.delayed_param = False  # the adapter's param_init_fn is for CUDA
            cfg.trainer.devices = cfg.model.shard_degree = world
            cfg.distributed_backend = "gloo"
            cfg.model.precision = 32
            if cfg.model.model_type == "mistral":  # newer transformers want it
                cfg.model.rope_scaling.rope_type = "default"
            return cfg

        test_utils.setup_test_cfg = config
        test_utils._WORLD_SIZE = world
        test_utils.skip_if_lt_x_gpu = lambda _: lambda test: test
        test_utils.TestCheckpoint.cuda_available = pytest.fixture(lambda self: True)

        kind, told = test_utils.TestCheckpoint, ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
        reset, fit = kind.reset_state_and_groups, kind.create_and_fit

        def launch(ranks: int) -> None:
            os.environ.update(dict.fromkeys(told, str(ranks)))

        def reset_state_and_groups(self: Any, port: Any) -> None:
            launch(world)
            reset(self, port)

        def create_and_fit(self: Any, config: Any, **rest: Any) -> Any:
            """A run on some of the ranks: its launcher tells Lightning of no others."""
            devices = config.trainer.devices
            launch(devices if isinstance(devices, int) else len(devices))
            return fit(self, config, **rest)

        kind.reset_state_and_groups, kind.create_and_fit = reset_state_and_groups, create_and_fit

    def pytest_runtest_setup(self, item: Any) -> None:
        """Unit tests want a process group, but those that pass a mock in its place: none."""
        if "WORLD_SIZE" in os.environ:
            return
        if item.name == "test_save_checkpoint":
            if dist.is_initialized():
                dist.destroy_process_group()
        elif not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def pytest_collection_finish(self, session: Any) -> None:
        """The tests count the entries of a step's directory, where our record and lease lie."""
        for module in {item.module for item in session.items if hasattr(item.module, "os")}:
            module.os = _Counted()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.told[report.nodeid] = report.outcome
        if report.failed:  # told at once: the other ranks may wait for this one for ever
            print(report.nodeid, report.longreprtext, file=sys.__stderr__, flush=True)


def main(checkout: str, *arguments: str) -> int:
    prepared(Path(checkout))
    os.chdir(checkout)
    plugin = Fewer(Path(checkout) / TESTS / "e2e")
    told = os.environ.get("SMCKPT_HYPERPOD_TOLD")
    status = pytest.main(
        [
            "-c",
            os.devnull,
            "--rootdir",
            checkout,
            "-p",
            "no:cacheprovider",
            "-q",
            "-W",
            "ignore",
            *arguments,
        ],
        [plugin],
    )
    if told:
        Path(f"{told}.{os.environ.get('RANK', '0')}").write_text(json.dumps(plugin.told))
    return int(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
