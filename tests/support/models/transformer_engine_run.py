"""Transformer Engine's own TransformerLayer, on CPU and gloo.

Run with the folder of the package and a file of jobs. A job is a stack of layers of one
tensor-parallel degree: it loads what each rank's file has of it, strictly, and runs. Rank r writes
its output and its own state dict to `<out>-<r>.pt`; at degree 1, and with biases, also the output
of the plain torch code that Transformer Engine has for exports to ONNX.

The package's Python runs as it is. Its compiled part has no build for CPUs: for the calls of a
forward pass there is torch code below, and the rest of it raises when it is called.
"""

from __future__ import annotations

import enum
import json
import multiprocessing
import os
import sys
import types
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Types(enum.IntEnum):  # common/include/transformer_engine/transformer_engine.h
    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


class _Backends(enum.IntEnum):  # common/include/transformer_engine/fused_attn.h
    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


class _Absent:
    """A name of the compiled part: it may be looked up, not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._name}.{name}")

    def __int__(self) -> int:
        return 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError(f"{self._name} is compiled code")


class _Compiled(types.ModuleType):
    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name)


# A forward pass calls these. The product, the norms and the rotation are torch code that
# Transformer Engine has beside its kernels.


def generic_gemm(
    a: Tensor, transa: bool, b: Tensor, transb: bool, out: Any, quantizer: Any, dtype: Any,
    bias: Tensor | None, bias_dtype: Any, gelu: bool, gelu_in: Any, grad: bool, *rest: Any,
    **named: Any,
) -> tuple[Any, ...]:  # fmt: skip
    from transformer_engine.pytorch.onnx_extensions import onnx_gemm

    assert transa and not transb and out is None and quantizer is None and not gelu and not grad
    return onnx_gemm(a, b, bias), None, None, None


def rmsnorm_fwd(x: Tensor, weight: Tensor, eps: float, *rest: Any) -> tuple[Any, ...]:
    return _norm("RMSNorm", x, weight, None, eps, *rest)


def layernorm_fwd(x: Tensor, weight: Tensor, bias: Any, eps: float, *rest: Any) -> tuple[Any, ...]:
    return _norm("LayerNorm", x, weight, bias, eps, *rest)


def _norm(
    kind: str, x: Tensor, weight: Tensor, bias: Any, eps: float,
    out: Any, quantizer: Any, dtype: Any, margin: Any, zero_centred: bool,
) -> tuple[Any, ...]:  # fmt: skip
    from transformer_engine.pytorch.onnx_extensions import onnx_layernorm

    assert out is None and quantizer is None
    args = (x, weight, bias, eps, kind, zero_centred, x.dtype, False, None)
    return onnx_layernorm(*args)[0], None, None


def fused_rope_forward(
    x: Tensor, freqs: Tensor, start: Any, layout: Any, interleaved: bool, *rest: Any
) -> Tensor:
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    return apply_rotary_pos_emb(x, freqs, "bshd", fused=False, interleaved=interleaved)


def swiglu(x: Tensor, quantizer: Any) -> Tensor:
    # common/include/transformer_engine/activation.h: "Act(input[N, :H]) x input[N, H:]"
    half = x.shape[-1] // 2
    return torch.nn.functional.silu(x[..., :half]) * x[..., half:]


def gelu(x: Tensor, quantizer: Any) -> Tensor:
    # common/util/math.h: by tanh
    return torch.nn.functional.gelu(x, approximate="tanh")


def relu(x: Tensor, quantizer: Any) -> Tensor:
    return torch.nn.functional.relu(x)


def get_cudnn_version() -> int:
    return 91200  # the oldest that will do


CALLS = (
    get_cudnn_version,
    generic_gemm,
    rmsnorm_fwd,
    layernorm_fwd,
    fused_rope_forward,
    swiglu,
    gelu,
    relu,
)


class _OnCpu(TorchFunctionMode):
    """What asks for a GPU gets the CPU."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), named: Any = None) -> Any:
        named = named or {}
        if func == torch.Tensor.is_cuda.__get__:
            return True
        if func is torch.Tensor.cuda:
            return args[0]
        if named.get("device") == "cuda":
            named["device"] = "cpu"
        return func(*args, **named)


def transformer_engine() -> Any:
    """`transformer_engine.pytorch`, with the stand-in for what is compiled."""
    os.environ.update(
        NVTE_PROJECT_BUILDING="1",  # no shared libraries
        NVTE_FRAMEWORK="none",  # nor those of torch and JAX, at first
        NVTE_TORCH_COMPILE="0", NVTE_FLASH_ATTN="0", NVTE_FUSED_ATTN="0",
    )  # fmt: skip
    compiled: Any = _Compiled("transformer_engine_torch")
    compiled.DType, compiled.NVTE_Fused_Attn_Backend = _Types, _Backends
    for call in CALLS:
        setattr(compiled, call.__name__, call)
    sys.modules["transformer_engine_torch"] = compiled
    kernels = ("", ".pad", ".permutation", ".cross_entropy", ".grouped_dbias_dscales", ".mhc")
    for name in kernels:  # Triton's
        sys.modules["transformer_engine.pytorch.triton" + name] = _Absent(name)  # type: ignore[assignment]
    for name in ("onnx", "onnxscript", "einops"):  # of exports and of key-value caches
        sys.modules[name] = MagicMock()
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.is_current_stream_capturing = lambda: False
    cuda.current_device = lambda: "cpu"
    cuda.get_device_properties = lambda _: types.SimpleNamespace(major=8, minor=0)
    import transformer_engine

    transformer_engine.common.load_framework_extension = lambda _: None
    import transformer_engine.pytorch as te

    te.cpp_extensions.__getattr__ = _Absent  # the same names again
    return te


def filled(te: Any, job: dict[str, Any], given: dict[str, Tensor]) -> tuple[list[Any], Any]:
    """The layers, which have taken their tensors out of `given`, and their state dict."""
    degree, layers, state = len(job["files"]), [], {}
    group = dist.group.WORLD if degree > 1 else None
    for number in range(job["layers"]):
        layer = te.TransformerLayer(
            **job["layer"], layer_number=number + 1, tp_size=degree, tp_group=group,
            set_parallel_mode=True, hidden_dropout=0.0, attention_dropout=0.0,
            attn_input_format="bshd", device="cpu",
        )  # fmt: skip
        at = job["prefix"].format(i=number)
        own = {n[len(at) :]: given.pop(n) for n in sorted(given) if n.startswith(at)}
        differ = layer.load_state_dict(own, strict=False)
        lacks = [n for n in differ.missing_keys if not n.endswith("._extra_state")]
        assert not lacks and not differ.unexpected_keys, (lacks, differ.unexpected_keys)
        state.update({at + n: t for n, t in layer.state_dict().items()})
        layers.append(layer.eval())
    return layers, state


def run(te: Any, job: dict[str, Any], rank: int) -> None:
    from safetensors.torch import load_file
    from transformer_engine.pytorch.export import onnx_export

    given = load_file(job["files"][rank])
    layers, state = filled(te, job, given)
    x, outputs, alone = torch.load(job["input"]), [], len(job["files"]) == 1
    place: dict[str, Any] = {}
    if job["rotary"]:
        place["rotary_pos_emb"] = te.RotaryPositionEmbedding(**job["rotary"])(x.shape[1])
    if job["slopes"]:
        slopes = torch.tensor(job["slopes"]).chunk(len(job["files"]))[rank]
        place = {"core_attention_bias_type": "alibi", "alibi_slopes": slopes}
    for plain in (False, True) if alone and job["layer"]["bias"] else (False,):
        with torch.no_grad(), onnx_export(enabled=True) if plain else nullcontext():
            y = x
            for layer in layers:
                y = layer(y, self_attn_mask_type="causal", **place)
                if plain and layer.layernorm_mlp.return_bias:  # added by the MLP and by the layer
                    y = y - layer.layernorm_mlp.fc2_bias
        outputs.append(y)
    torch.save({"outputs": outputs, "model": {**given, **state}}, f"{job['out']}-{rank}.pt")


def work(te: Any, jobs: list[dict[str, Any]], store: str, rank: int, degree: int) -> None:
    if degree > 1:  # without a group otherwise
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=degree,
            timeout=timedelta(seconds=60),
        )  # fmt: skip
    with _OnCpu():
        for job in jobs:
            if len(job["files"]) == degree:
                run(te, job, rank)


def main(path: Path) -> None:
    jobs = json.loads(path.read_text())
    te = transformer_engine()
    fork = multiprocessing.get_context("fork")  # for the imports take seconds
    for degree in sorted({len(job["files"]) for job in jobs}, reverse=True):
        store = f"{path}.{degree}"
        started = []
        for rank in range(degree):
            started.append(fork.Process(target=work, args=(te, jobs, store, rank, degree)))
            started[-1].start()
        for process in started:
            process.join()
        assert not any(process.exitcode for process in started), degree


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    main(Path(sys.argv[2]))
