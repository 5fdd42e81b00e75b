"""The rotary parameters of an export are those of the config in transformers 4 and 5, whichever
version wrote it: the frequencies of both are compared."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from smckpt.translate.config import read_config
from tests.support import interpreters
from tests.support.limits import seconds

TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FACTORS = {"short_factor": [1.0 + n / 8 for n in range(8)],
           "long_factor": [2.0 + n for n in range(8)]}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
BASE = {"rope_theta": 5e5}
NEOX = {k: v for k, v in TINY.items() if k not in ("head_dim", "num_key_value_heads")}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3]}
GEMMA = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 32}
# model type and more → version 5's rope_parameters
NEW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({"model_type": "llama"}, {"rope_type": "default", **BASE}),
    "linear": ({"model_type": "llama"}, {"rope_type": "linear", "factor": 4.0, **BASE}),
    "dynamic": ({"model_type": "llama"}, {"rope_type": "dynamic", "factor": 4.0, **BASE}),
    "llama3": ({"model_type": "llama"}, {"rope_type": "llama3", **LLAMA3, **BASE}),
    "yarn": ({"model_type": "qwen2"}, {"rope_type": "yarn", **YARN, **BASE}),
    "yarn, qwen3": ({"model_type": "qwen3"}, {"rope_type": "yarn", **YARN, **BASE}),
    "longrope, phi3": (
        {"model_type": "phi3", "original_max_position_embeddings": 64},
        {"rope_type": "longrope", **FACTORS, **BASE, "original_max_position_embeddings": 64,
         "partial_rotary_factor": 1.0},
    ),
    "plain, phi3": ({"model_type": "phi3"}, {"rope_type": "default", **BASE}),
    "longrope, phimoe": (
        {"model_type": "phimoe", "num_local_experts": 4, "original_max_position_embeddings": 64},
        {"rope_type": "longrope", **FACTORS, **BASE, "original_max_position_embeddings": 64,
         "factor": 4.0, "short_mscale": 1.0, "long_mscale": 1.0},
    ),
    "longrope, llama": (
        {"model_type": "llama"},
        {"rope_type": "longrope", **FACTORS, **BASE, "original_max_position_embeddings": 64,
         "factor": 4.0},
    ),
    "gpt_neox": (
        {**NEOX, "model_type": "gpt_neox"},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4, "partial_rotary_factor": 0.5},
    ),
    "gemma3_text": (
        {"model_type": "gemma3_text", **GEMMA},
        {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
         "sliding_attention": {"rope_type": "default", "rope_theta": 5e3}},
    ),
    "mrope, qwen2_5_vl_text": ({"model_type": "qwen2_5_vl_text"}, {**MROPE, **BASE}),
}  # fmt: skip
OLD: dict[str, dict[str, Any]] = {
    "linear": {"model_type": "llama", **BASE, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"model_type": "llama", **BASE, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "su": {"model_type": "phi3", **BASE, "original_max_position_embeddings": 64,
           "rope_scaling": {"type": "su", **FACTORS}},
    "longrope": {"model_type": "phi3", **BASE, "original_max_position_embeddings": 64,
                 "rope_scaling": {"type": "longrope", **FACTORS}},
    "yarn of phi3": {"model_type": "phi3", **BASE, "original_max_position_embeddings": 64,
                     "rope_scaling": {"type": "yarn", **FACTORS}},
    "dynamic": {"model_type": "llama", **BASE, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "yarn": {"model_type": "qwen2", **BASE, "rope_scaling": {"type": "yarn", **YARN}},
    "mrope": {"model_type": "qwen2_5_vl_text", **BASE,
              "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    "gemma3_text": {"model_type": "gemma3_text", **GEMMA, "rope_theta": 1e6,
                    "rope_local_base_freq": 5e3,
                    "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gpt_neox": {**NEOX, "model_type": "gpt_neox", "rotary_emb_base": 50000, "rotary_pct": 0.5},
}  # fmt: skip
FREQUENCIES = """
import json, sys
from pathlib import Path
import transformers
from transformers import AutoConfig, AutoModel
def buffers(folder):
    config = AutoConfig.from_pretrained(folder)
    kinds = {}
    if config.model_type == "qwen2_5_vl_text":
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel as kind
        model = kind._from_config(config)
        scaling = getattr(config, "rope_parameters", None) or config.rope_scaling
        kinds["sections"] = scaling["mrope_section"]
    else:
        model = AutoModel.from_config(config)
    found = [(n, b) for n, b in model.named_buffers() if n.endswith("inv_freq")
             and "original" not in n]
    values = {tuple(round(float(x), 9) for x in b.flatten()) for _, b in found}
    return {"freq": sorted(map(list, values)), **kinds}
found = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    try:
        found[folder.name] = buffers(folder)
    except Exception as error:
        found[folder.name] = {"error": repr(error)}
print(json.dumps(found))
"""


def frequencies(python: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [python, "-c", FREQUENCIES, str(folder)],
        capture_output=True,
        text=True,
        timeout=seconds(600),
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """As each version reads what is written, and as the version that wrote it reads its own."""
    import sys

    older = interpreters.transformers4()
    own5, own4, written = (tmp_path_factory.mktemp(name) for name in ("own5", "own4", "written"))
    cases = [(f"new {n}", {**TINY, **own, "rope_parameters": rope}, own5)
             for n, (own, rope) in NEW.items()]  # fmt: skip
    cases += [(f"old {n}", {**TINY, **own}, own4) for n, own in OLD.items()]
    for name, values, own in cases:
        for folder, made in ((own, values), (written, None)):
            if made is None:
                settings = read_config(values)
                assert settings is not None
                made = settings.complete("float32")
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(made))
    owners = {**frequencies(sys.executable, own5), **frequencies(older, own4)}
    return owners, frequencies(sys.executable, written), frequencies(older, written)


@pytest.mark.parametrize("name", [*(f"new {n}" for n in NEW), *(f"old {n}" for n in OLD)])
def test_both_versions_turn_by_the_same_angles(found, name):
    owners, five, four = (versions[name] for versions in found)
    assert "error" not in owners, owners
    assert five == owners
    if name == "new longrope, phimoe":  # version 4 computes them in `forward`
        assert four == {"freq": []}
    else:
        assert four == owners


@pytest.mark.parametrize("name", NEW)
def test_what_servers_read_names_the_type(name):
    """mlx-lm and remote code look for `type`, others for `rope_type`."""
    own, rope = NEW[name]
    settings = read_config({**TINY, **own, "rope_parameters": rope})
    assert settings is not None
    scaling = settings.complete(None)["rope_scaling"]
    flat = rope.get("full_attention", rope)
    if flat["rope_type"] == "default" and "mrope_section" not in flat:
        assert scaling is None
    else:
        assert scaling["type"] == ("mrope" if "mrope_section" in flat else flat["rope_type"])
