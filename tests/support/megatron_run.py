"""One rank of a Megatron-core GPTModel (local spec, CPU, gloo): loads what `import_hf` wrote,
strictly; writes its logits and its state dict. Run by torchrun with RANKS_DIR CONFIG_JSON OUT_DIR.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def transformer_config(hf: dict[str, Any], tp: int) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=hf["num_hidden_layers"], hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"], num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"], kv_channels=hf["head_dim"],
        tensor_model_parallel_size=tp, use_cpu_initialization=True, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False,
        add_qkv_bias=hf["qkv_bias"], qk_layernorm=hf["qk_norm"], normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"], hidden_dropout=0.0, attention_dropout=0.0,
        bias_activation_fusion=False, masked_softmax_fusion=False, bias_dropout_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, apply_rope_fusion=False,
    )  # fmt: skip


def main(ranks: Path, hf: dict[str, Any], out: Path) -> None:
    dist.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from safetensors.torch import load_file

    # Megatron asks for the GPU on its way, also where it computes without one.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    get_cuda_rng_tracker().fork = lambda *_, **__: nullcontext()  # for dropout: there is none
    rank, tp = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    model = GPTModel(
        transformer_config(hf, tp),
        get_gpt_layer_local_spec(qk_layernorm=hf["qk_norm"], normalization="RMSNorm"),
        vocab_size=128, max_sequence_length=64, position_embedding_type="rope",
        rotary_base=hf["rope_theta"], share_embeddings_and_output_weights=False,
        parallel_output=False,
    ).eval()  # fmt: skip
    (own,) = ranks.glob(f"data-*-r{rank:05d}-0.safetensors")
    found = model.load_state_dict(load_file(own), strict=False)
    missing = [name for name in found.missing_keys if "_extra_state" not in name]
    assert not missing and not found.unexpected_keys, (missing, found.unexpected_keys)
    tokens = torch.arange(40).reshape(2, 20) % 120
    places = torch.arange(20)[None].expand(2, -1)
    mask = torch.triu(torch.ones(20, 20, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        logits = model(tokens, places, mask)
    if rank == 0:
        torch.save(logits, out / "logits.pt")
    state = {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    torch.save({"model": state}, out / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
