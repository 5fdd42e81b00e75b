"""transformers' own tensor parallelism, live: what a model of `tp_plan="auto"` saves exports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import smckpt
from smckpt import LOCAL, SHARDED, sm_state_dict_type
from smckpt.translate import export_hf
from tests.support import next_families
from tests.support import references as ref
from tests.support.launch import run_ranks

TOKENS = torch.arange(40).reshape(2, 20) % ref.V


def saved_by_a_rank(directory: str, out: str) -> Any:
    """Loads the model in parts, as transformers does it, saves both kinds, and computes."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    model = AutoModelForCausalLM.from_pretrained(
        directory, distributed_config=DistributedConfig(tp_plan="auto"), dtype=torch.float32
    )
    for kind, name in ((LOCAL, "local"), (SHARDED, "sharded")):
        with sm_state_dict_type(model, kind):
            smckpt.save({"model": model.state_dict()}, checkpoint_id=f"{out}/{name}", step=1)
    cut = sorted(n for n, p in model.named_parameters() if hasattr(p, "placements"))
    with torch.no_grad():
        return cut, model(TOKENS).logits


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "mixtral",
        *(pytest.param(f, marks=pytest.mark.long) for f in next_families.FAMILIES),
    ],
)
def test_a_live_models_checkpoints_export_to_the_original(tmp_path, judged, family):
    model = (next_families if family in next_families.FAMILIES else ref).model(family)
    state = ref.on_disk(model, tmp_path / "hf")
    results = run_ranks(saved_by_a_rank, 2, str(tmp_path / "hf"), str(tmp_path))
    with torch.no_grad():
        wanted = model(TOKENS).logits
    for cut, logits in results:
        assert any(n.endswith("q_proj.weight") for n in cut) and "lm_head.weight" in cut
        assert (logits - wanted).abs().max() <= 1e-5
    for kind in ("local", "sharded"):
        checkpoint = smckpt.latest_checkpoint(tmp_path / kind)
        export_hf(checkpoint, tmp_path / f"{kind}-hf", config=model.config)
        found = load_file(tmp_path / f"{kind}-hf" / "model.safetensors")
        assert found.keys() == state.keys()
        assert [n for n in state if not torch.equal(found[n], state[n])] == []
    judged(family, "hf_tp", exports=["transformers 5, live ranks"], at="2")
