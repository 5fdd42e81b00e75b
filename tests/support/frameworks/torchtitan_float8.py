"""torchtitan's DeepSeek-V3 under FSDP2, filled from a released float8 directory by the manager's
`initial_load_in_hf_quantized`.

Its arguments: the directory, and the folder of the run. Rank 0 writes what the model holds then, by
Hugging Face's names, into `held.safetensors` of that folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._utils
import torch.distributed as dist

torch._utils._get_available_device_type = lambda: "cpu"
# For GPUs, written for a compiler that is not here; nothing below calls them.
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()

from safetensors.torch import save_file  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, build_mla_moe_layers  # noqa: E402
from torchtitan.models.deepseek_v3.state_dict_adapter import (  # noqa: E402
    DeepSeekV3StateDictAdapter,
)

from smckpt.integrations.torchtitan import SmckptCheckpointManager  # noqa: E402


def config_of(hf: dict[str, Any]) -> Any:
    dim, size = hf["hidden_size"], hf["vocab_size"]
    same = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    layers = build_mla_moe_layers(
        **{name: hf[name] for name in same},
        n_layers=hf["num_hidden_layers"], n_dense_layers=hf["first_k_dense_replace"], dim=dim,
        n_heads=hf["num_attention_heads"], mscale=1.0, dense_hidden_dim=hf["intermediate_size"],
        moe_hidden_dim=hf["moe_intermediate_size"], num_experts=hf["n_routed_experts"],
        num_shared_experts=hf["n_shared_experts"], router_top_k=hf["num_experts_per_tok"],
        router_score_func="sigmoid", attn_backend="flex", moe_comm_backend="standard",
        non_blocking_capacity_factor=None, linear_init={}, norm_init={},
        depth_init=lambda _: {}, depth_experts_init=lambda _: {},
        rope=ComplexRoPE.Config(dim=hf["qk_rope_head_dim"], max_seq_len=64, theta=10000.0),
    )  # fmt: skip
    return DeepSeekV3Model.Config(
        dim=dim, vocab_size=size, layers=layers, norm=RMSNorm.Config(normalized_shape=dim),
        tok_embeddings=Embedding.Config(num_embeddings=size, embedding_dim=dim),
        lm_head=Linear.Config(in_features=dim, out_features=size),
    )  # fmt: skip


def main(released: Path, folder: Path) -> None:
    dist.init_process_group("gloo")
    config = config_of(json.loads((released / "config.json").read_text()))
    model = config.build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(7)
    adapter = DeepSeekV3StateDictAdapter(config, None)
    chosen = SmckptCheckpointManager.Config(
        enable=True, initial_load_path=str(released), initial_load_in_hf=True,
        initial_load_in_hf_quantized=True,
    )  # fmt: skip
    manager = SmckptCheckpointManager(
        chosen, dataloader=None, model_parts=[model], optimizers=MagicMock(),
        lr_schedulers=MagicMock(), states={}, sd_adapter=adapter, base_folder=str(folder),
    )  # fmt: skip
    assert manager.load() is True
    whole = {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in model.state_dict().items()
    }
    if dist.get_rank() == 0:
        held = DeepSeekV3StateDictAdapter(config, None).to_hf(whole)
        save_file({k: v.contiguous() for k, v in held.items()}, folder / "held.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
