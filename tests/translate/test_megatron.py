"""Megatron-core computes with what import_hf wrote, and its own state exports to the original.

Needs megatron-core 0.16: in this environment, or in one whose interpreter SMCKPT_MEGATRON_PYTHON
names.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from smckpt.translate import export_hf, import_hf
from tests.support import interpreters, megatron_run
from tests.support import references as ref


@pytest.mark.parametrize(("family", "t"), [("llama", 1), ("llama", 2), ("qwen2", 4), ("qwen3", 2)])
def test_megatrons_logits_are_transformers_logits_and_its_state_the_original(tmp_path, family, t):
    python = interpreters.megatron()
    model = ref.model(family)
    hub = ref.on_disk(model, tmp_path / "hf")
    import_hf(
        tmp_path / "hf", tmp_path / "in", "mcore_local", tp=t, pad_vocab_to_multiple_of=128 // t
    )
    config = {
        **model.config.to_dict(), "rope_theta": 5e5, "qkv_bias": family == "qwen2",
        "qk_norm": family == "qwen3",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    interpreters.run(
        python, megatron_run.__file__, tmp_path / "in", tmp_path / "config.json", tmp_path, ranks=t
    )
    tokens = torch.arange(40).reshape(2, 20) % ref.V
    with torch.no_grad():
        wanted = model(tokens).logits
    assert (torch.load(tmp_path / "logits.pt")[..., : ref.V] - wanted).abs().max() <= 1e-5
    files = [tmp_path / f"rank{r}.pt" for r in range(t)]
    report = export_hf(files, tmp_path / "out", tp=t, config=model.config)
    assert report.layout == "mcore_local"
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == hub.keys() and all(torch.equal(found[n], hub[n]) for n in hub)
