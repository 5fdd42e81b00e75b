"""transformers' own tensor and expert parallelism, live: what such a model saves exports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed as dist

import smckpt
from smckpt import LOCAL, SHARDED, sm_state_dict_type
from smckpt.translate import Parallel, export_hf
from tests.support.launch import run_ranks
from tests.support.models import families, hub_families, next_families, vision
from tests.support.models import references as ref
from tests.translate.exports.test_names import released

Q_PROJ = "model.language_model.layers.0.self_attn.q_proj.weight"
TOKENS = torch.arange(40).reshape(2, 20) % ref.V


def saved_by_a_rank(
    directory: str, out: str, experts: bool = False, auto: str = "AutoModelForCausalLM"
) -> Any:  # fmt: skip
    """Loads the model in parts, as transformers does it, saves both kinds and what this rank holds,
    and computes."""
    import transformers
    from transformers.distributed import DistributedConfig

    degrees: dict[str, Any] = {"tp_size": 2, "ep_size": 2} if experts else {"tp_plan": "auto"}
    model = getattr(transformers, auto).from_pretrained(
        directory, distributed_config=DistributedConfig(**degrees), dtype=torch.float32
    )
    for kind, name in ((LOCAL, "local"), (SHARDED, "sharded")):
        with sm_state_dict_type(model, kind):
            smckpt.save({"model": model.state_dict()}, checkpoint_id=f"{out}/{name}", step=1)
    cut = sorted(n for n, p in model.named_parameters() if hasattr(p, "placements"))
    held = {
        name: (p.to_local() if hasattr(p, "placements") else p).clone().contiguous()
        for name, p in model.state_dict().items()
    }
    save_file(held, f"{out}/rank{dist.get_rank()}.safetensors")
    with torch.no_grad():
        return cut, model(TOKENS).logits


@pytest.mark.parametrize(
    ("family", "experts"),
    [
        ("llama", False),
        ("mixtral", False),
        *(
            pytest.param(family, experts, marks=pytest.mark.long)
            for family, experts in (
                ("cohere", False), ("cohere2", False), ("phimoe", False), ("gpt_oss", False),
                ("gpt_oss", True), ("granitemoe", False), ("granitemoe", True), ("phimoe", True),
                ("mixtral", True), *((family, False) for family in next_families.FAMILIES),
            )
        ),
    ],
)  # fmt: skip
def test_a_live_models_checkpoints_export_to_the_original(tmp_path, family, experts, judged):
    sources: tuple[Any, ...] = (families, next_families)
    model = next((s for s in sources if family in s.FAMILIES), ref).model(family)
    state = ref.on_disk(model, tmp_path / "hf")
    results = run_ranks(saved_by_a_rank, 2, str(tmp_path / "hf"), str(tmp_path), experts)
    with torch.no_grad():
        wanted = model(TOKENS).logits
    for cut, logits in results:
        assert ("model.embed_tokens.weight" if model.config.tie_word_embeddings else
                "lm_head.weight") in cut  # fmt: skip
        assert any(".experts." in n for n in cut) or not experts
        assert (logits - wanted).abs().max() <= 1e-5
    for kind in ("local", "sharded"):
        checkpoint = smckpt.latest_checkpoint(tmp_path / kind)
        export_hf(checkpoint, tmp_path / f"{kind}-hf", config=model.config)
        found = load_file(tmp_path / f"{kind}-hf" / "model.safetensors")
        assert found.keys() == state.keys()
        assert [n for n in state if not torch.equal(found[n], state[n])] == []
    degrees: dict[str, int] = {"tp": 2, "ep": 2, "etp": 1} if experts else {"tp": 2}
    paths = [tmp_path / f"rank{r}.safetensors" for r in range(2)]
    report = export_hf(
        paths, tmp_path / "ranks-hf", config=model.config, parallel=Parallel(**degrees)
    )
    assert report.layout == "hf_tp"
    found = load_file(tmp_path / "ranks-hf" / "model.safetensors")
    assert found.keys() == state.keys()
    assert [n for n in state if not torch.equal(found[n], state[n])] == []
    judged(
        family,
        "hf_tp",
        exports=["save_pretrained", "transformers 5, live ranks"],
        at="2×2" if experts else "2",
    )


@pytest.mark.long
# transformers 5.23 cannot load the experts of Qwen3-VL-MoE in parts, in either order
@pytest.mark.parametrize("family", [f for f in vision.FAMILIES if f != "qwen3_vl_moe"])
def test_a_live_vision_language_model_exports_to_the_original(tmp_path, judged, family):
    model = vision.model(family)
    state = vision.released(model, tmp_path / "hf")
    auto = "AutoModelForImageTextToText"
    results = run_ranks(saved_by_a_rank, 2, str(tmp_path / "hf"), str(tmp_path), False, auto)
    with torch.no_grad():
        wanted = model(TOKENS).logits
    planned = {"lm_head.weight"} if family == "qwen3_vl" else {Q_PROJ}
    for cut, logits in results:
        assert planned <= set(cut) and not any("vis" in name for name in cut)
        assert (logits - wanted).abs().max() <= 1e-5
    for kind in ("local", "sharded"):
        checkpoint = smckpt.latest_checkpoint(tmp_path / kind)
        export_hf(checkpoint, tmp_path / f"{kind}-hf", config=model.config)
        found = load_file(tmp_path / f"{kind}-hf" / "model.safetensors")
        assert found.keys() == state.keys()
        assert [n for n in state if not torch.equal(found[n], state[n])] == []
    judged(family, "hf_tp", exports=["transformers 5, live ranks"], at="2")


@pytest.mark.long
@pytest.mark.parametrize("family", ["ernie4_5_moe", "jamba", "llava", "minimax"])  # without a table
def test_a_live_model_of_a_family_without_a_table_has_released_names(tmp_path, judged, family):
    model = hub_families.model(family)
    wanted = released(model, tmp_path / "hf")
    auto = "AutoModelForImageTextToText" if family == "llava" else "AutoModelForCausalLM"
    results = run_ranks(saved_by_a_rank, 2, str(tmp_path / "hf"), str(tmp_path), False, auto)
    assert all(cut for cut, _ in results)
    for kind in ("local", "sharded"):
        checkpoint = smckpt.latest_checkpoint(tmp_path / kind)
        report = export_hf(checkpoint, tmp_path / f"{kind}-hf", config=model.config)
        assert report.naming == "hub"
        found = load_file(tmp_path / f"{kind}-hf" / "model.safetensors")
        assert found.keys() == wanted.keys()
        assert [n for n in wanted if not torch.equal(found[n], wanted[n])] == []
    judged(family, "its own names: live tensor parallel", exports=["save_pretrained"], at="2")
