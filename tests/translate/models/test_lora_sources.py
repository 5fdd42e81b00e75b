"""lora= works on every source that an export reads, and a state that was saved merged is not merged
again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    GPTNeoXConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from smckpt import Adapter, Parallel, errors, export_hf
from smckpt.cli.app import app
from tests.support.models import references as ref
from tests.translate.models.test_lora import State, assert_merged, base, llama, logits, saved

KINDS = ("ours", "pt", "model key", "lightning", "safetensors", "dcp", "peft", "peft.bin",
         "peft file", "deepspeed", "other key", "one rank")  # fmt: skip


def plain(state: State) -> State:
    return {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}


def source(folder: Path, kind: str, model: Any, *, whole: bool) -> Path:
    state = plain(model.state_dict() if whole else get_peft_model_state_dict(model))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "state.pt"
    if kind == "ours":
        return saved(folder, state)
    if kind.startswith("peft"):
        model.save_pretrained(folder / "peft", safe_serialization=kind != "peft.bin")
        if kind == "peft.bin":
            torch.save(state, folder / "peft" / "adapter_model.bin")
            (folder / "peft" / "adapter_model.safetensors").unlink(missing_ok=True)
        return folder / "peft" / ("adapter_model.safetensors" if kind == "peft file" else "")
    if kind == "deepspeed":  # one tensor-parallel rank's file
        path = folder / "global_step3" / "mp_rank_00_model_states.pt"
        path.parent.mkdir()
        torch.save({"module": state, "mp_world_size": 1}, path)
        (folder / "latest").write_text("global_step3")
        return folder
    if kind == "one rank":
        torch.save({"model": state}, folder / "rank0.pt")
        return folder / "rank0.pt"
    if kind == "dcp":
        dcp.save({"model": state}, checkpoint_id=folder / "dcp", no_dist=True)
        return folder / "dcp"
    if kind == "safetensors":
        path = folder / "state.safetensors"
        save_file(state, path)
    else:
        named = {"pt": state, "model key": {"model": state, "step": 3},
                 "lightning": {"state_dict": state, "epoch": 1},
                 "other key": {"policy": {"net": state}, "step": 3}}  # fmt: skip
        torch.save(named[kind], path)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_every_source_goes_out_and_into_its_base(tmp_path, kind):
    model = llama()
    base().save_pretrained(tmp_path / "base")
    path = source(tmp_path / "source", kind, model, whole=False)
    given = {} if kind.startswith("peft") else {"lora_config": model.peft_config}
    export_hf(path, tmp_path / "adapter", adapter=Adapter(lora="adapter", **given))
    loaded = PeftModel.from_pretrained(base(), tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(model))
    export_hf(path, tmp_path / "hf", adapter=Adapter(lora="merge", base=tmp_path / "base", **given))
    assert_merged(tmp_path / "hf", model)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("peft")])
def test_a_whole_state_of_every_source_is_merged(tmp_path, kind):
    model = llama()
    path = source(tmp_path / "source", kind, model, whole=True)
    given = {"lora_config": model.peft_config}
    report = export_hf(
        path, tmp_path / "hf", config=model.config, adapter=Adapter(lora="merge", **given)
    )
    assert any("merge_adapter()" in note for note in report.notes), report.notes
    assert_merged(tmp_path / "hf", model)


@pytest.mark.parametrize("kind", ["pt", "safetensors", "dcp"])
def test_without_lora_the_error_says_what_to_pass(tmp_path, kind):
    model = llama()
    path = source(tmp_path / "source", kind, model, whole=False)
    with pytest.raises(errors.UsageError, match='lora="adapter" or lora="merge"'):
        export_hf(path, tmp_path / "no", config=model.config)


@pytest.mark.parametrize("given", ["files", "files and degrees", "directory", "a file and degrees"])
@pytest.mark.parametrize("with_config", [True, False])
def test_of_ranks_parts_one_refusal_says_what_to_do(tmp_path, given, with_config):
    """It was "leave tp= out", then "pass the adapter's config", and then that these are parts."""
    model = llama()
    state = plain(get_peft_model_state_dict(model))
    cuts = [{n: t.chunk(2, dim=t.ndim - 1)[r].clone() for n, t in state.items()} for r in range(2)]
    folder = tmp_path / "run" / "iter_0000003"
    paths = [folder / f"mp_rank_0{r}" / "model_optim_rng.pt" for r in range(2)]
    for path, cut in zip(paths, cuts, strict=True):
        path.parent.mkdir(parents=True)
        torch.save({"model": cut, "iteration": 3}, path)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("3")
    sources = {"directory": tmp_path / "run", "a file and degrees": paths[0]}
    parallel = Parallel(tp=2) if given.endswith("degrees") else None
    asked = Adapter(lora="adapter", lora_config=model.peft_config if with_config else None)
    with pytest.raises(errors.UsageError, match="not for parts of tensor-parallel ranks") as caught:
        export_hf(sources.get(given, paths), tmp_path / "no", adapter=asked, parallel=parallel)
    assert "merge the adapter where it was trained" in str(caught.value)


def test_the_command_takes_one_file(tmp_path):
    model = llama()
    base().save_pretrained(tmp_path / "base")
    path = source(tmp_path / "source", "peft file", model, whole=False)
    result = CliRunner().invoke(app, [
        "export", str(path), str(tmp_path / "hf"), "--lora", "merge", "--base",
        str(tmp_path / "base"),
    ])  # fmt: skip
    assert result.exit_code == 0, result.output
    assert_merged(tmp_path / "hf", model)


def several(*names: str) -> Any:
    model = llama()
    for name in names:
        model.add_adapter(name, LoraConfig(r=4, target_modules=["q_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape))
    return model


@pytest.mark.parametrize("merged", [["b"], ["default", "b"], ["other"]])
def test_of_several_adapters_each_that_was_merged_is_seen(tmp_path, merged):
    base().save_pretrained(tmp_path / "base")
    model = several("b", "other")
    for config in model.peft_config.values():
        config.base_model_name_or_path = str(tmp_path / "base")
    model.base_model.merge_adapter(merged)
    path = source(tmp_path / "merged", "ours", model, whole=True)
    given = Adapter(lora="merge", lora_config=model.peft_config, lora_adapter=("default", "b"))
    if merged != ["other"]:
        with pytest.raises(errors.TensorMismatchError, match=r"merge_adapter\(\) was active"):
            export_hf(path, tmp_path / "no", config=model.config, adapter=given)
        return
    report = export_hf(path, tmp_path / "hf", config=model.config, adapter=given)
    assert any("another adapter is merged into it" in note for note in report.notes), report.notes


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", ["ours", "pt"])
def test_a_state_that_was_saved_merged_is_not_merged_again(tmp_path, kind, dora):
    base().save_pretrained(tmp_path / "base")
    model = llama(use_dora=dora)
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    given = {"lora": "merge", "lora_config": model.peft_config}
    report = export_hf(
        source(tmp_path / "apart", kind, model, whole=True),
        tmp_path / "hf",
        config=model.config,
        adapter=Adapter(**given),
    )
    assert not any("merge_adapter()" in note for note in report.notes), report.notes
    assert_merged(tmp_path / "hf", copy.deepcopy(model))
    model.merge_adapter()
    path = source(tmp_path / "merged", kind, model, whole=True)
    with pytest.raises(errors.TensorMismatchError, match=r"merge_adapter\(\) was active"):
        export_hf(path, tmp_path / "no", config=model.config, adapter=Adapter(**given))
    assert not (tmp_path / "no").exists()
    export_hf(
        path,
        tmp_path / "from base",
        config=model.config,
        adapter=Adapter(base=tmp_path / "base", **given),
    )
    model.unmerge_adapter()
    assert_merged(tmp_path / "from base", model)
    assert load_file(tmp_path / "from base" / "model.safetensors").keys()


@pytest.mark.parametrize("merged", [False, True])
def test_a_base_that_is_not_the_checkpoints_is_noted(tmp_path, merged):
    """Its weights are taken, because the caller says so; the tensors have the same shapes."""
    model = llama()
    base().save_pretrained(tmp_path / "base")
    other = base()
    with torch.no_grad():
        other.model.layers[1].self_attn.q_proj.weight.add_(0.3)
        other.model.layers[0].self_attn.q_proj.weight.add_(0.3)
    other.save_pretrained(tmp_path / "other")
    if merged:
        model.merge_adapter()
    path = source(tmp_path / "saved", "pt", model, whole=True)
    for name, noted in (("base", False), ("other", True)):
        given = Adapter(lora="merge", lora_config=model.peft_config, base=tmp_path / name)
        report = export_hf(path, tmp_path / f"hf {name}", config=model.config, adapter=given)
        assert any("base= was taken" in note for note in report.notes) == noted, report.notes


def test_an_adapter_of_another_kind_is_named_at_once_with_its_config_and_without(
    tmp_path: Path,
) -> None:
    kind = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    model = get_peft_model(base(), kind)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    for adapter in (None, Adapter(lora="merge", lora_config=model.peft_config)):
        with pytest.raises(errors.UsageError, match="IA3, and smckpt exports LoRA alone"):
            export_hf(
                tmp_path / "model.pt", tmp_path / "out", config=base().config, adapter=adapter
            )


def test_a_base_under_other_names_than_those_in_memory_is_merged(tmp_path: Path) -> None:
    """The adapter has names in memory, the directory those of the release, or those that
    save_pretrained writes of a model that was never loaded. What PEFT adapts it finds by the names
    in memory, where NeoX has no embed_out. A convolution's pair is two matrices."""
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "vocab_size": 64}
    vision = {**small, "image_size": 16, "patch_size": 4}
    llava = LlavaConfig(text_config=LlamaConfig(**small), vision_config=CLIPVisionConfig(**vision))
    neox = AutoModelForCausalLM.from_config(GPTNeoXConfig(**small))
    moe = ref.model("qwen3_moe")
    for model, names, dora in [
        (qwen2_vl(), ["q_proj", "proj"], True), (moe, ["embed_tokens", "q_proj"], True),
        (LlavaForConditionalGeneration(llava), ["q_proj"], False),
        (neox, ["query_key_value", "embed_out"], False),
    ]:  # fmt: skip
        folder = tmp_path / type(model).__name__
        model.save_pretrained(folder / "base")
        assert {*load_file(folder / "base/model.safetensors")} != {*model.state_dict()}
        options = {"r": 2, "target_modules": names, "use_dora": dora}
        adapted = get_peft_model(model, LoraConfig(**options, init_lora_weights=False))
        for whole in (False, True):
            state = adapted.state_dict() if whole else get_peft_model_state_dict(adapted)
            torch.save(plain(state), folder / "state.pt")
            given = {} if whole else {"base": folder / "base"}
            export_hf(
                folder / "state.pt",
                folder / f"hf{whole}",
                config=model.config if whole else None,
                adapter=Adapter(lora="merge", lora_config=adapted.peft_config, **given),
            )
        wanted = adapted.merge_and_unload().state_dict()
        for whole in (False, True):
            merged = type(model).from_pretrained(folder / f"hf{whole}").state_dict()
            for name in wanted:
                assert torch.allclose(merged[name], wanted[name], atol=1e-5), (whole, name)


def qwen2_vl() -> Any:
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
    }  # fmt: skip
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=60)
    return Qwen2VLForConditionalGeneration(config)


def test_modules_of_a_config_are_those_of_a_base_under_other_names(tmp_path: Path) -> None:
    model = qwen2_vl()
    model.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(
        model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    given = Adapter(lora="merge", base=tmp_path / "base")
    export_hf(tmp_path / "adapter", tmp_path / "hf", adapter=given)
    config_of = tmp_path / "adapter/adapter_config.json"
    config_of.write_text(config_of.read_text().replace('"v_proj"', '"o_proj"'))
    with pytest.raises(errors.TensorMismatchError, match="target_modules"):
        export_hf(tmp_path / "adapter", tmp_path / "other", adapter=given)
