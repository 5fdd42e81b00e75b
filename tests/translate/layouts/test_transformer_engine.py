"""Transformer Engine's own TransformerLayer holds what the `te_*` tables say, and computes with it
what transformers' layers do.

Its Python is the released one; its kernels have no build for CPUs, and torch code is in their place
(`tests/support/models/transformer_engine_run.py`). Each rank's layers load strictly what
`import_hf` wrote for it, so names and shapes are Transformer Engine's; which rows are whose shows
in the output.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from smckpt.translate import Parallel, export_hf, import_hf
from tests.support import interpreters
from tests.support.models import families, transformer_engine_run
from tests.support.models import references as ref

State = dict[str, torch.Tensor]
OWN: dict[str, dict[str, bool]] = {
    "te_split": {},
    "te_split_zero_centred": {"zero_centered_gamma": True},
    "te_fused": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
    "te_fused_interleaved": {"fuse_qkv_params": True, "qkv_weight_interleaved": True},
}
CASES = [
    *(("llama_biased", "te_split", t) for t in (1, 2, 4)),
    *((family, layout, 2) for family in ("llama_biased", "gpt_neox")
      for layout in ("te_fused", "te_fused_interleaved", "te_split_zero_centred")),
    *((family, "te_split", t) for family in ("gpt_neox", "falcon", "gpt2") for t in (1, 2)),
    *((family, "te_split", 2) for family in ("qwen3", "phi3", "falcon_rw", "opt", "bloom")),
]  # fmt: skip
BIASED = ("llama_biased", "gpt_neox", "falcon", "falcon_rw", "gpt2", "opt", "bloom")
# Transformer Engine's GELU is the one by tanh; gpt2's is so already
BY_TANH = {"gpt_neox": {"hidden_act": "gelu_pytorch_tanh"},
           "falcon": {"activation": "gelu_pytorch_tanh"},
           "falcon_rw": {"activation": "gelu_pytorch_tanh"}}  # fmt: skip
LAYERS = {"gpt_neox": "gpt_neox.layers", "falcon": "transformer.h", "falcon_rw": "transformer.h",
          "gpt2": "transformer.h", "opt": "model.decoder.layers",
          "bloom": "transformer.h"}  # fmt: skip
# transformers adds Falcon's ALiBi before it divides by the square root of the heads' size
SLOPES = {"falcon_rw": [2.0**-n / ref.D**0.5 for n in range(1, ref.H + 1)],
          "bloom": [2.0**-n for n in range(1, ref.H + 1)]}  # fmt: skip
WIDTHS = {"gpt2": "n_inner", "opt": "ffn_dim"}


def layer_of(family: str, config: Any) -> dict[str, Any]:
    """The arguments of TransformerLayer."""
    rms = family in ("llama_biased", "qwen3", "phi3")
    falcon = family.startswith("falcon")
    wide = "ffn_hidden_size" if falcon else WIDTHS.get(family, "intermediate_size")
    eps = "layer_norm_eps" if family == "gpt_neox" else "layer_norm_epsilon"
    return {
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": getattr(config, wide, 4 * config.hidden_size),
        "num_attention_heads": ref.H, "kv_channels": ref.D,
        "num_gqa_groups": ref.G if rms or family == "falcon" else ref.H,
        "layernorm_epsilon": getattr(config, "rms_norm_eps" if rms else eps, 1e-5),
        "normalization": "RMSNorm" if rms else "LayerNorm",
        "activation": "swiglu" if rms else "relu" if family == "opt" else "gelu",
        "bias": family in BIASED,
        "parallel_attention_mlp": family in ("gpt_neox", "falcon"),
        **({"qk_norm_type": "RMSNorm", "qk_norm_before_rope": True} if family == "qwen3" else {}),
    }  # fmt: skip


def inside(model: Any, layers: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What goes into the first layer and comes out of the last."""
    seen: list[torch.Tensor] = []
    stack = model.get_submodule(layers)

    def first(_: Any, args: Any, named: Any) -> None:
        seen.append(args[0] if args else named["hidden_states"])

    def last(_: Any, __: Any, out: Any) -> None:
        seen.append(out if isinstance(out, torch.Tensor) else out[0])

    hooks = [stack[0].register_forward_pre_hook(first, with_kwargs=True),
             stack[-1].register_forward_hook(last)]  # fmt: skip
    with torch.no_grad():
        model(torch.arange(40).reshape(2, 20) % ref.V)
    for hook in hooks:
        hook.remove()
    return seen[0], seen[1]


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> tuple[dict[str, Any], Path]:
    """Each family's folder, state and output, and where Transformer Engine has been at work."""
    package = interpreters.transformer_engine()
    at, jobs, hub = tmp_path_factory.mktemp("engine"), [], {}
    for family, layout, t in CASES:
        layers = LAYERS.get(family, "model.layers")
        if family not in hub:
            torch.manual_seed(0)
            source: Any = families if family in families.FAMILIES else ref
            model = source.model(family, **BY_TANH.get(family, {}))
            folder = at / family
            state = ref.on_disk(model, folder)
            x, y = inside(model, layers)
            torch.save(x, folder / "input.pt")
            hub[family] = (folder, state, y, model.config)
        folder, _, _, config = hub[family]
        ranks = at / f"{family}-{layout}-{t}"
        report = import_hf(folder, ranks, Parallel(layout, tp=t), prefix="")
        theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000)
        rotary = {"dim": ref.D, "rotary_base": theta,
                  "rotary_percent": 0.5 if family == "gpt_neox" else 1.0}  # fmt: skip
        jobs.append({
            "prefix": layers + ".{i}.", "layers": config.num_hidden_layers,
            "files": [str(ranks / name) for name in report.files], "out": str(ranks),
            "input": str(folder / "input.pt"), "slopes": SLOPES.get(family),
            "rotary": None if family in ("gpt2", "opt", *SLOPES) else rotary,
            "layer": {**layer_of(family, config), **OWN[layout]},
        })  # fmt: skip
    (at / "jobs").write_text(json.dumps(jobs))
    interpreters.run(sys.executable, transformer_engine_run.__file__, package, at / "jobs")
    return hub, at


@pytest.mark.parametrize(("family", "layout", "t"), CASES)
def test_its_layers_load_an_import_and_compute_what_transformers_do(
    tmp_path, engine, judged, family, layout, t
):
    hub, at = engine
    folder, state, wanted, _ = hub[family]
    files = [at / f"{family}-{layout}-{t}-{rank}.pt" for rank in range(t)]
    for file in files:
        found = torch.load(file)["outputs"]
        # with torch in its kernels' place, and where there are two by torch code of its own alone
        assert len(found) == (2 if t == 1 and family in BIASED else 1)
        for output in found:
            assert (output - wanted).abs().max() <= 1e-5
    export_hf(files, tmp_path / "out", parallel=Parallel(tp=t, layout=layout), config=folder)
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert out.keys() == state.keys()
    assert [n for n in state if not torch.equal(out[n], state[n])] == []
    family, judge = family.removesuffix("_biased"), ["Transformer Engine"]
    judged(family, layout, exports=judge, imports=judge, at=str(t))
