"""torchtitan's Llama 3 and its own adapter for Hugging Face's names, on CPU.

Run with the folder of a Hugging Face model and a file of torchtitan's names. Writes into the folder
the state of the model that the adapter filled and its logits, with query, key and value in one
module (`titan1.pt`, `logits1.pt`) and in three (`…0.pt`); and the file by Hugging Face's names, as
the adapter has them (`hf.pt`), and beside each further file the same of it; and `dcp`, which torchtitan's checkpointer would have written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

# For GPUs, written for a compiler that is not here; nothing below calls them.
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()


def config_of(hf: dict[str, Any], fused: bool) -> Any:
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

    dim, theta = hf["hidden_size"], hf["rope_parameters"]["rope_theta"]
    norm = RMSNorm.Config(normalized_shape=dim, eps=hf["rms_norm_eps"])
    layer = Llama3TransformerBlock.Config(
        attention_norm=norm, ffn_norm=norm,
        attention=make_gqa_config(
            dim=dim, n_heads=hf["num_attention_heads"], n_kv_heads=hf["num_key_value_heads"],
            head_dim=hf["head_dim"], wqkv_param_init={}, wo_param_init={},
            inner_attention=ScaledDotProductAttention.Config(), fuse_qkv=fused,
            rope=ComplexRoPE.Config(
                dim=hf["head_dim"], max_seq_len=hf["max_position_embeddings"], theta=theta
            ),
        ),
        feed_forward=make_ffn_config(
            dim=dim, hidden_dim=hf["intermediate_size"], w1_param_init={}, w2w3_param_init={}
        ),
    )  # fmt: skip
    size = hf["vocab_size"]
    return Llama3Model.Config(
        dim=dim, vocab_size=size, norm=norm, layers=[layer] * hf["num_hidden_layers"],
        tok_embeddings=Embedding.Config(num_embeddings=size, embedding_dim=dim),
        lm_head=Linear.Config(in_features=dim, out_features=size),
    )  # fmt: skip


def save_as_trainer(model: Any, folder: Path) -> None:
    """As `_flattened_model_states_sd` puts it together: weights at the top, beside the rest."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
    )
    from torchtitan.components.checkpointer.base import ModelWrapper

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(torch.arange(8).reshape(1, 8)).sum().backward()
    optimizer.step()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    others = {
        "optimizer": get_optimizer_state_dict(model, optimizer, options=flat),
        "train_state": {"step": torch.tensor(7)}, "lr_scheduler": {"last_epoch": 7},
    }  # fmt: skip
    dcp.save({**others, **ModelWrapper(model).state_dict()}, checkpoint_id=folder)


def main(folder: Path, theirs: Path, *others: Path) -> None:
    from safetensors.torch import load_file
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    hf = json.loads((folder / "config.json").read_text())
    for fused in (True, False):
        config = config_of(hf, fused)
        model = config.build().eval()
        adapter = Llama3StateDictAdapter(model.config, None)
        model.load_state_dict(adapter.from_hf(load_file(folder / "model.safetensors")), strict=True)
        with torch.no_grad():
            logits = model(torch.arange(40).reshape(2, 20) % 120)
        torch.save(logits, folder / f"logits{int(fused)}.pt")
        torch.save({"model": model.state_dict()}, folder / f"titan{int(fused)}.pt")
    save_as_trainer(model, folder / "dcp")
    torch.save(adapter.to_hf(load_file(theirs)), folder / "hf.pt")
    for path in others:
        torch.save(adapter.to_hf(load_file(path)), path.with_suffix(".pt"))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
