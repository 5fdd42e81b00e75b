"""Megatron Bridge's own conversion of each tensor, on CPU and gloo.

Run with a file of jobs: `family`; `hf`, a Hugging Face directory; `ranks`, what `import_hf` made of
it; `tp`; `out`. Rank r writes to `<out>/made<r>.pt` what Megatron Bridge makes of the
release's tensors for it, and rank 0 to `<out>/hf.pt` what it makes of all ranks' files.

The package's mappings and bridges run as they are. What else they import builds and trains models
with Transformer Engine, and is absent here. So modules are not there either, whose class tells the
mappings how a tensor is cut: `CUT` says it, as Megatron-core's classes of these names do.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import re
import sys
import traceback
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

MODELS = "megatron.bridge.models."
BRIDGES = {
    "gemma3": ("gemma_vl.gemma3_vl_bridge", "Gemma3VLBridge"),
    "qwen2_5_vl": ("qwen_vl.qwen25_vl_bridge", "Qwen25VLBridge"),
    "qwen3_vl": ("qwen_vl.qwen3_vl_bridge", "Qwen3VLBridge"),
    "qwen3_vl_moe": ("qwen_vl.qwen3_vl_bridge", "Qwen3VLMoEBridge"),
}
REAL = {
    "megatron.bridge.utils.common_utils",
    *(f"{MODELS}conversion.{name}" for name in ("param_mapping", "mapping_registry", "utils")),
    *(MODELS + module for module, _ in BRIDGES.values()),
}
CUT = {  # the end of a module's name → the class of Megatron-core's module
    "word_embeddings": "VocabParallelEmbedding", "output_layer": "ColumnParallelLinear",
    "linear_proj": "RowParallelLinear", "linear_fc1": "ColumnParallelLinear",
    "linear_fc2": "RowParallelLinear", "linear_qkv": "ColumnParallelLinear",
    "multi_modal_projector.proj": "ColumnParallelLinear",
}  # fmt: skip


class Absent:
    """Finds the package's modules: those in `REAL`, and empty ones in place of the others."""

    def __init__(self, package: Path) -> None:
        self._package = package

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name in REAL:
            file = self._package.joinpath(*name.split(".")[2:]).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        if f"{name}.".startswith("megatron.bridge."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> Any:
        class Empty(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return type(name, (), {"register_bridge": lambda **_: lambda kind: kind})

        module = Empty(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: Any) -> None:
        pass


def module_of(name: str, weight: Any, config: Any) -> Any:
    """What a mapping asks of the module that has the tensor."""
    place, _, last = name.rpartition(".")
    cut = re.fullmatch(r"(weight|bias)\d*", last) is not None  # and not the norm of the layer
    kind = next((k for end, k in CUT.items() if cut and place.endswith(end)), "RMSNorm")
    made = type(kind, (), {})()
    made.config, made.weight, made.weight0, made.bias = config, weight, weight, weight
    return made


def run(job: dict[str, Any], rank: int) -> None:
    from megatron.core import parallel_state
    from safetensors.torch import load_file

    out, tp = Path(job["out"]), job["tp"]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{out}/meeting", rank=rank, world_size=tp)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    scatter = dist.scatter  # gloo sends memory as it lies, also that of a view

    def scattered(out: Any, parts: Any, **more: Any) -> Any:
        return scatter(out, parts and [part.contiguous() for part in parts], **more)

    dist.scatter = scattered
    parallel_state.initialize_model_parallel(tp)
    module, kind = BRIDGES[job["family"]]
    bridge = getattr(importlib.import_module(MODELS + module), kind)()
    registry = bridge.mapping_registry()
    hf, (path,) = load_file(Path(job["hf"]) / "model.safetensors"), Path(job["ranks"]).glob(
        f"data-*-r{rank:05d}-0.safetensors"
    )  # fmt: skip
    text = json.loads((Path(job["hf"]) / "config.json").read_text())["text_config"]
    config = SimpleNamespace(
        num_attention_heads=text["num_attention_heads"], hidden_size=text["hidden_size"],
        num_query_groups=text["num_key_value_heads"], attention_output_gate=False,
        kv_channels=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
        num_moe_experts=text.get("num_experts") or text.get("num_local_experts"),
    )  # fmt: skip
    made, theirs = {}, {}
    for name, tensor in sorted(load_file(path).items()):
        mapping = registry.megatron_to_hf_lookup(name)
        owner = module_of(name, tensor, config)
        wanted = mapping.hf_param
        given = {k: hf[n] for k, n in wanted.items()} if isinstance(wanted, dict) else hf[wanted]
        made[name] = mapping.hf_to_megatron(given, owner)
        for theirs_name, value in mapping.megatron_to_hf(tensor, owner).items():
            theirs.setdefault(theirs_name, []).append((name, value))
    torch.save(made, out / f"made{rank}.pt")
    if rank == 0:
        torch.save({n: joined(parts) for n, parts in theirs.items()}, out / "hf.pt")
    dist.destroy_process_group()


def joined(parts: list[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """One tensor, or the experts of a layer one after the other, gate beside up."""
    if ".experts." not in parts[0][0]:
        ((_, tensor),) = parts
        return tensor.contiguous()
    parts = sorted(parts, key=lambda part: int(part[0].rpartition("weight")[2]))
    stacked = torch.stack([tensor for _, tensor in parts])
    return torch.cat([stacked[:, 0], stacked[:, 1]], -1) if stacked.dim() == 4 else stacked


def rank_main(job: dict[str, Any], rank: int) -> None:
    try:
        run(job, rank)
    except BaseException:
        (Path(job["out"]) / f"error{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)


def main() -> None:
    import limits
    import megatron.core.transformer  # noqa: F401
    import transformers  # noqa: F401

    package = importlib.util.find_spec("megatron.bridge")
    assert package is not None and package.submodule_search_locations
    sys.meta_path.insert(0, Absent(Path(package.submodule_search_locations[0])))  # type: ignore[arg-type]
    for module, _ in BRIDGES.values():  # once, before the ranks are forked
        importlib.import_module(MODELS + module)
    for line in Path(sys.argv[1]).read_text().splitlines():
        job = json.loads(line)
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=rank_main, args=(job, r)) for r in range(job["tp"])]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(limits.seconds(120))
        failed = [process for process in ranks if process.exitcode != 0]
        for process in ranks:
            process.kill()
        told = [path.read_text() for path in sorted(Path(job["out"]).glob("error*.txt"))]
        assert not failed, "\n".join(told) or "a rank died, or the time was over"


if __name__ == "__main__":
    main()
