"""Vision-language models: language model and tower come out of each layout as the original, and an
import of the original is what the ranks held."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from smckpt import Adapter, Parallel, errors, export_hf
from smckpt.translate import import_hf
from smckpt.translate.models.model import hub_side
from smckpt.translate.tables.dims import read_dims
from tests.support import interpreters
from tests.support.models import judges, megatron_bridge_run, vision
from tests.support.models.references import each_rank

pytestmark = pytest.mark.early

State = dict[str, torch.Tensor]
Cut = Callable[[int, int], State]
MOE = "qwen3_vl_moe"
PADDED = ("word_embeddings.weight", "output_layer.weight")  # the padding is an import's own
CUT = ("gemma3", "qwen2_5_vl")  # mbridge 0.15.1 has no other


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Callable[[str], tuple[Any, State, Path]]:
    """A family's model, its state dict as a release has it, and where."""

    @cache
    def made(family: str) -> tuple[Any, State, Path]:
        model, folder = vision.model(family), tmp_path_factory.mktemp(family)
        return model, vision.released(model, folder), folder

    return made


def written(folder: Path, states: list[State]) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"rank{number:02d}.safetensors" for number in range(len(states))]
    for path, state in zip(paths, states, strict=True):
        save_file({n: t.contiguous().clone() for n, t in state.items()}, path)
    return paths


def assert_same(found: State, wanted: State) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def assert_the_original(folder: Path, model: Any, state: State) -> None:
    """Names, bytes, and what is computed of tokens alone and of a picture among them."""
    assert_same(load_file(folder / "model.safetensors"), state)
    again, info = AutoModelForImageTextToText.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    picture = vision.picture(model.config.model_type)
    with torch.no_grad():
        for given in ({"input_ids": picture["input_ids"] % 110}, picture):
            apart = again.eval()(**given).logits - model(**given).logits
            assert apart.abs().max() <= 1e-5


def assert_there_and_back(
    folder: Path, hub: tuple[Any, State, Path], layout: str, cuts: list[State], t: int, ep: int = 1
) -> None:
    model, state, directory = hub
    report = export_hf(
        written(folder / "in", cuts),
        folder / "hf",
        parallel=Parallel(tp=t, ep=ep),
        config=model.config,
    )
    assert report.layout == layout  # the names are enough
    assert_the_original(folder / "hf", model, state)
    done = import_hf(directory, folder / "back", Parallel(layout, tp=t, ep=ep), prefix="")
    for name, cut in zip(done.files, cuts, strict=True):
        found = load_file(folder / "back" / name)
        assert found.keys() == cut.keys()
        differ = [n for n in cut if not n.endswith(PADDED) and not torch.equal(found[n], cut[n])]
        assert differ == []


@pytest.mark.parametrize("t", [2, long(4)])
@pytest.mark.parametrize("family", vision.FAMILIES)
def test_ranks_of_transformers_own_plan(tmp_path, hub, judged, family, t):
    cuts = each_rank(lambda r, e: vision.hf_tp(family, hub(family)[0], t, r), t)
    model, state, _ = hub(family)
    report = export_hf(
        written(tmp_path / "in", cuts),
        tmp_path / "hf",
        parallel=Parallel(tp=t),
        config=model.config,
    )
    assert report.layout == "hf_tp"
    assert_the_original(tmp_path / "hf", model, state)
    judged(family, "hf_tp", exports=["formulas", "save_pretrained", "logits"], at=str(t))


@pytest.mark.parametrize(
    ("family", "t", "ep"),
    [(family, 2, 1) for family in vision.FAMILIES]
    + [(MOE, 2, 2), long(MOE, 1, 8), *(long(family, 4, 1) for family in vision.FAMILIES)],
)
def test_megatrons_names_beside_a_whole_tower(tmp_path, hub, judged, family, t, ep):
    cuts = each_rank(lambda r, e: vision.bridge(family, hub(family)[1], t, r, ep, e), t, ep)
    assert_there_and_back(tmp_path, hub(family), "mcore_te", cuts, t, ep)
    at = f"{t}×{ep}" if family == MOE else str(t)
    exports = ["formulas", "save_pretrained", "logits"]
    judged(family, "mcore_te", exports=exports, imports=["formulas"], at=at)


@pytest.mark.parametrize("t", [long(1), 2, long(4)])
@pytest.mark.parametrize("family", CUT)
def test_megatrons_names_of_the_tower_too(tmp_path, hub, judged, family, t):
    cuts = each_rank(lambda r, e: vision.mbridge(family, hub(family)[1], t, r), t)
    assert_there_and_back(tmp_path, hub(family), "mcore_te_tower", cuts, t)
    exports = ["formulas", "save_pretrained", "logits"]
    judged(family, "mcore_te_tower", exports=exports, imports=["formulas"], at=str(t))


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_the_table_of_a_release_s_own_config_has_all_its_names_and_its_size(family, judged):
    whole = judges.Whole.of(family)
    assert whole is not None
    shapes = hub_side(read_dims(judges.read("released")[family]["config"])).shapes
    assert whole.problems({key.name: math.prod(shape) for key, shape in shapes.items()}) == []
    judged(family, "released names", exports=["release"])


def test_a_release_s_config_may_have_the_language_model_s_keys_at_the_top():
    """As Qwen2.5-VL's releases have them."""
    nested = vision.config("qwen2_5_vl").to_dict()
    flat = {**nested.pop("text_config"), **nested, "model_type": "qwen2_5_vl"}
    nested = vision.config("qwen2_5_vl").to_dict()
    assert "text_config" not in flat
    assert hub_side(read_dims(flat)).shapes == hub_side(read_dims(nested)).shapes


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("t", [1, 2])
def test_megatron_bridge_makes_of_each_tensor_what_the_table_says(tmp_path, hub, judged, t):
    jobs = []
    for family in vision.FAMILIES:
        (out := tmp_path / family).mkdir()
        import_hf(hub(family)[2], out / "ranks", Parallel("mcore_te", tp=t), prefix="")
        jobs.append({"family": family, "hf": str(hub(family)[2]), "ranks": str(out / "ranks"),
                     "tp": t, "out": str(out)})  # fmt: skip
    (tmp_path / "jobs").write_text("\n".join(map(json.dumps, jobs)))
    python, script = interpreters.megatron_bridge(), megatron_bridge_run.__file__
    interpreters.run(python, script, tmp_path / "jobs", timeout=600)
    for family in vision.FAMILIES:
        assert_same(torch.load(tmp_path / family / "hf.pt"), hub(family)[1])
        for rank in range(t):
            (file,) = (tmp_path / family / "ranks").glob(f"data-*-r{rank:05d}-0.safetensors")
            assert_same(load_file(file), torch.load(tmp_path / family / f"made{rank}.pt"))
        exports = ["megatron-bridge"]
        judged(family, "mcore_te", exports=exports, imports=["megatron-bridge"], at=str(t))


def test_a_gemma_with_a_head_of_its_own(tmp_path):
    """No release has one; its name is that of `save_pretrained`."""
    model = vision.model("gemma3", tie_word_embeddings=False)
    state = vision.released(model, tmp_path / "hub")
    assert "language_model.lm_head.weight" in state
    cuts = each_rank(lambda r, e: vision.bridge("gemma3", state, 2, r), 2)
    known = model, state, tmp_path / "hub"
    assert_there_and_back(tmp_path, known, "mcore_te", cuts, 2)
    paths = written(
        tmp_path / "live", each_rank(lambda r, e: vision.hf_tp("gemma3", model, 2, r), 2)
    )
    export_hf(paths, tmp_path / "live-hf", parallel=Parallel(tp=2), config=model.config)
    assert_the_original(tmp_path / "live-hf", model, state)


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_a_checkpoint_of_an_import_exports_to_the_original(tmp_path, hub, judged, family):
    model, state, directory = hub(family)
    ep = 2 if family == MOE else 1
    import_hf(
        directory,
        tmp_path / "in",
        Parallel("mcore_te", tp=2, ep=ep),
    )
    report = export_hf(tmp_path / "in", tmp_path / "hf", config=model.config)
    assert report.layout == "mcore_te"
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), state)
    at = "2×2" if family == MOE else "2"
    judged(family, "mcore_te, checkpoint", exports=["save_pretrained"], at=at)


def test_the_whole_config_says_whether_embeddings_are_tied(tmp_path):
    """As in releases of Qwen2.5-VL and Qwen3-VL, where a section says nothing of it."""
    model = vision.model("qwen3_vl", tie_word_embeddings=True)
    state = vision.released(model, tmp_path / "hub")
    assert "lm_head.weight" not in state
    assert "tie_word_embeddings" not in model.config.to_dict()["text_config"]
    cuts = each_rank(lambda r, e: vision.bridge("qwen3_vl", state, 2, r), 2)
    known = model, state, tmp_path / "hub"
    assert_there_and_back(tmp_path, known, "mcore_te", cuts, 2)


def in_stages(state: State) -> list[State]:
    """Two stages of one layer each, which both number from 0; the tower is in the first."""
    late = (
        "language_model.decoder.layers.1.",
        "language_model.decoder.final",
        "language_model.out",
    )
    stages: list[State] = [{}, {}]
    for name, tensor in state.items():
        stages[name.startswith(late)][name.replace(late[0], late[0].replace("1", "0"))] = tensor
    return stages


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_a_tower_is_in_the_first_pipeline_stage(tmp_path, hub, judged, family):
    model, state, _ = hub(family)
    stages = in_stages(vision.bridge(family, state, 1, 0))
    paths = written(tmp_path / "in", stages)
    export_hf(paths, tmp_path / "hf", parallel=Parallel(pp=2), config=model.config)
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), state)
    judged(family, "mcore_te, pp 2", exports=["formulas"], at="1")


# -- controls --------------------------------------------------------------------------------------


def refused(
    folder: Path, model: Any, cuts: list[State], error: Any, said: str, **given: Any
) -> None:
    with pytest.raises(error, match=said):
        export_hf(
            written(folder / "in", cuts),
            folder / "hf",
            config=model.config,
            parallel=Parallel(**given),
        )
    assert not (folder / "hf").exists()


def test_a_picture_reaches_the_logits(hub):
    """Else no comparison of logits could tell a wrong tower."""
    for family in vision.FAMILIES:
        model, given = hub(family)[0], vision.picture(family)
        with torch.no_grad():
            wanted = model(**given).logits
            other = model(**{**given, "pixel_values": given["pixel_values"].flip(0, -1)}).logits
        assert (wanted - other).abs().max() > 1e-3, family


def test_swapped_tensors_of_a_tower_are_seen_by_bytes_and_logits(tmp_path, hub):
    model, state, _ = hub("qwen2_5_vl")
    cuts = [vision.mbridge("qwen2_5_vl", state, 1, 0)]
    one, two = (
        f"vision_model.decoder.layers.{i}.self_attention.linear_proj.weight" for i in (0, 1)
    )
    cuts[0][one], cuts[0][two] = cuts[0][two], cuts[0][one]
    export_hf(written(tmp_path / "in", cuts), tmp_path / "hf", config=model.config)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    differ = [name for name in state if not torch.equal(found[name], state[name])]
    assert differ == [f"visual.blocks.{i}.attn.proj.weight" for i in (0, 1)]
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    picture = vision.picture("qwen2_5_vl")
    with torch.no_grad():
        assert (again.eval()(**picture).logits - model(**picture).logits).abs().max() > 1e-4


def test_towers_of_two_models_are_refused(tmp_path, hub):
    model, state, _ = hub("qwen3_vl")
    cuts = each_rank(lambda r, e: vision.bridge("qwen3_vl", state, 2, r), 2)
    name = "vision_model.deepstack_merger_list.1.linear_fc2.bias"
    cuts[1][name] = cuts[1][name] + 1
    refused(tmp_path, model, cuts, errors.TensorMismatchError, f"copies differ: {name}", tp=2)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("hidden_size", 64, r"patch_embed.proj.weight .*\(48, 3, 2, 4, 4\).*\(64, 3, 2, 4, 4\)"),
        ("depth", 2, r"unexpected.*vision_model.decoder.layers.2."),
        ("depth", 4, r"missing.*vision_model.decoder.layers.3."),
        ("out_hidden_size", 64, r"linear_fc2.weight .*\(128, 96\).*\(64, 96\)"),
        ("num_heads", 3, "does not divide the 3 heads of vision_model"),
        ("depth", None, "num_hidden_layers=None, which is not a size"),
        (None, None, "the config has no section vision_config"),
    ],
)
def test_a_tower_of_another_model_is_refused(tmp_path, hub, key, value, said):
    _, state, _ = hub("qwen2_5_vl")
    other = vision.model("qwen2_5_vl").config.to_dict()
    other["vision_config"] = key and {**other["vision_config"], key: value}
    paths = each_rank(lambda r, e: vision.mbridge("qwen2_5_vl", state, 2, r), 2)
    with pytest.raises(errors.CheckpointError, match=said):
        export_hf(
            written(tmp_path / "in", paths), tmp_path / "hf", parallel=Parallel(tp=2), config=other
        )
    assert not (tmp_path / "hf").exists()


def test_a_wrong_degree_and_a_wrong_order_are_refused(tmp_path, hub):
    model, state, _ = hub("gemma3")
    cuts = each_rank(lambda r, e: vision.mbridge("gemma3", state, 4, r), 4)
    refused(tmp_path, model, cuts[:2], errors.TensorMismatchError, "has 64 rows in total", tp=2)
    cuts[1], cuts[2] = cuts[2], cuts[1]
    paths = written(tmp_path / "in", cuts)
    paths = [paths[0], paths[2], paths[1], paths[3]]
    with pytest.raises(errors.UsageError, match="in the order 0, 2, 1, 3"):
        export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=4), config=model.config)


def test_a_tower_in_the_last_stage_is_refused(tmp_path, hub):
    model, state, _ = hub("qwen2_5_vl")
    stages = in_stages(vision.mbridge("qwen2_5_vl", state, 1, 0))
    for name in [name for name in stages[0] if name.startswith("vision_model.")]:
        stages[1][name] = stages[0].pop(name)
    said = "stage 1 holds vision_model.*, which the first stage should have"
    refused(tmp_path, model, stages, errors.TopologyError, said, pp=2)


@pytest.mark.parametrize("layout", ["mcore_te_tower", "mcore_local", "te_split"])
def test_a_layout_without_rows_for_a_tower_says_so(tmp_path, hub, layout):
    directory = hub("qwen3_vl")[2]
    with pytest.raises(errors.CheckpointError, match=r"no row for \['deepstack|is not known for"):
        import_hf(directory, tmp_path / "in", Parallel(layout))


def test_experts_whose_order_transformers_cannot_tell_are_noted(tmp_path):
    for size in (32, 48):  # half of the hidden size: as many rows as columns
        config = vision.config(MOE)
        config.text_config.moe_intermediate_size = size
        model = AutoModelForImageTextToText.from_config(config)
        torch.save(model.state_dict(), tmp_path / "model.pt")
        report = export_hf(tmp_path / "model.pt", tmp_path / f"{size}", config=config)
        assert any("gate_up_proj is square" in n for n in report.notes) == (size == 32)
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        torch.save(adapted.state_dict(), tmp_path / "adapted.pt")
        merge = Adapter(lora="merge", lora_config=adapted.peft_config)
        out = tmp_path / f"merged{size}"
        report = export_hf(tmp_path / "adapted.pt", out, config=config, adapter=merge)
        assert any("gate_up_proj is square" in n for n in report.notes) == (size == 32)
