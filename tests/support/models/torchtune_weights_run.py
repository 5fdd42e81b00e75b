"""torchtune's models and its own checkpointer for Hugging Face's files, on CPU.

Run with folders of Hugging Face models, each with `theirs/data-….safetensors`: the model by
torchtune's names. Writes into each folder the state that torchtune's checkpointer read
(`tune.pt`), `theirs` as the checkpointer saves it (`hf.safetensors`), and the logits of torchtune's
model with the one and the other (`logits.pt`, `logits_theirs.pt`).

Gemma 2 has no logits: in torchtune 0.6.1 it caps the last norm in place of the logits, and its
converter gives the norm before the MLP the weights of the one behind it, and the reverse.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torchtune.models.gemma import gemma
from torchtune.models.gemma2._component_builders import gemma2
from torchtune.models.llama3 import llama3
from torchtune.models.llama3_2._component_builders import llama3_2
from torchtune.models.mistral import mistral
from torchtune.models.phi3._component_builders import phi3
from torchtune.models.qwen2 import qwen2
from torchtune.training import FullModelHFCheckpointer

FAMILIES = {
    "llama": (llama3, "LLAMA3"), "mistral": (mistral, "MISTRAL"), "gemma": (gemma, "GEMMA"),
    "gemma2": (gemma2, "GEMMA2"), "qwen2": (qwen2, "QWEN2"), "phi3": (phi3, "PHI3_MINI"),
}  # fmt: skip


def build(hf: dict[str, Any]) -> Any:
    kind = hf["model_type"]
    builder = FAMILIES[kind][0]
    sizes = {
        "vocab_size": hf["vocab_size"], "num_layers": hf["num_hidden_layers"],
        "num_heads": hf["num_attention_heads"], "num_kv_heads": hf["num_key_value_heads"],
        "embed_dim": hf["hidden_size"], "max_seq_len": 64, "norm_eps": hf["rms_norm_eps"],
        "intermediate_dim": hf["intermediate_size"],
        "rope_base": hf["rope_parameters"]["rope_theta"],
    }  # fmt: skip
    if kind.startswith("gemma"):
        sizes["head_dim"] = hf["head_dim"]
    if kind == "qwen2":
        sizes["tie_word_embeddings"] = hf["tie_word_embeddings"]
    if kind == "llama" and hf["tie_word_embeddings"]:
        builder, sizes["scale_factor"] = llama3_2, 1
    return builder(**sizes).eval()


def logits(model: Any, state: dict[str, torch.Tensor]) -> torch.Tensor:
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        return model(torch.arange(40).reshape(2, 20) % 120)


def main(folder: Path) -> None:
    hf = json.loads((folder / "config.json").read_text())
    name = FAMILIES[hf["model_type"]][1]
    if name == "LLAMA3" and hf["tie_word_embeddings"]:
        name = "LLAMA3_2"
    out = folder.with_name(f"{folder.name}_out")  # torchtune wants it outside
    own = FullModelHFCheckpointer(
        checkpoint_dir=str(folder), checkpoint_files=["model.safetensors"], model_type=name,
        output_dir=str(out),
    )  # fmt: skip
    state = own.load_checkpoint()["model"]
    torch.save(state, folder / "tune.pt")
    (file,) = (folder / "theirs").glob("data-*.safetensors")
    theirs = load_file(file)
    model = build(hf)
    if hf["model_type"] != "gemma2":
        torch.save(logits(model, state), folder / "logits.pt")
        torch.save(logits(model, theirs), folder / "logits_theirs.pt")
    else:
        model.load_state_dict(theirs, strict=True)
    own.save_checkpoint({"model": theirs}, epoch=0)
    (written,) = (out / "epoch_0").glob("model-*.safetensors")
    shutil.copy(written, folder / "hf.safetensors")


if __name__ == "__main__":
    for each in sys.argv[1:]:
        main(Path(each))
