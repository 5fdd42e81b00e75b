"""A PEFT model's checkpoint: its adapter as PEFT loads it, or merged into the base."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2Model,
    GptOssConfig,
    MambaConfig,
    MambaForCausalLM,
    OPTConfig,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from smckpt import Adapter, ExportOptions, Parallel, errors, export_hf
from smckpt.translate.models import lora as our_lora
from tests.support import child
from tests.support.limits import seconds, within
from tests.support.models import references as ref
from tests.support.models import shards

State = dict[str, torch.Tensor]
TOKENS = torch.arange(40).reshape(2, 20) % ref.V


def peft_model(base: Any, **more: Any) -> Any:
    """With an adapter that does something: a fresh one's B is zero."""
    options: dict[str, Any] = {
        "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"layers.1.mlp.down_proj": 3}, "alpha_pattern": {"q_proj": 10},
        "base_model_name_or_path": "base",
    }  # fmt: skip
    made = get_peft_model(base, LoraConfig(**{**options, **more}))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return made.eval()


def base(**more: Any) -> Any:
    torch.manual_seed(2)
    return ref.model("llama", **more)


def llama(**more: Any) -> Any:
    return peft_model(base(), **more)


def saved(folder: Path, state: State, world: int = 2) -> Path:
    state = {n: t.detach().contiguous() for n, t in state.items()}
    return shards.write(folder / "ckpt", world, lambda r: shards.fsdp2(state, r, world))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def assert_merged(folder: Path, model: Any) -> None:
    wanted = logits(model)
    again, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert (logits(again) - wanted).abs().max() <= 1e-5
    for name, tensor in model.merge_and_unload().state_dict().items():
        assert torch.allclose(again.state_dict()[name], tensor, atol=1e-6), name


# -- the adapter -----------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
def test_the_adapters_directory_loads_in_peft(tmp_path, whole):
    """From the whole model's state, and from what PEFT calls the adapter's."""
    model = llama(modules_to_save=["lm_head"])
    state = model.state_dict() if whole else get_peft_model_state_dict(model)
    report = export_hf(
        saved(tmp_path, state),
        tmp_path / "out",
        adapter=Adapter(lora="adapter", lora_config=model.peft_config),
    )
    assert report.files == ("adapter_model.safetensors",)
    assert sorted(os.listdir(tmp_path / "out")) == [
        "README.md", "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    model.save_pretrained(tmp_path / "peft")
    ours, theirs = (load_file(tmp_path / d / "adapter_model.safetensors") for d in ("out", "peft"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)
    again = PeftModel.from_pretrained(base(), str(tmp_path / "out"))
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("whole", [True, False])
def test_tokens_that_are_trained_alone_go_with_the_adapter(tmp_path, whole, tied):
    """A merge is refused: it would need the sum of other rows of the embedding."""
    own = base(tie_word_embeddings=tied)
    model = peft_model(copy.deepcopy(own), trainable_token_indices=[1, 7])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.add_(1)
    state = model.state_dict() if whole else get_peft_model_state_dict(model)
    given: dict[str, Any] = {"lora_config": model.peft_config}
    checkpoint = saved(tmp_path, state)
    export_hf(checkpoint, tmp_path / "out", adapter=Adapter(lora="adapter", **given))
    model.save_pretrained(tmp_path / "peft")
    ours, theirs = (load_file(tmp_path / d / "adapter_model.safetensors") for d in ("out", "peft"))
    # of a tied model, the head's rows are the embedding's, and PEFT writes them once
    assert {name for name in ours.keys() ^ theirs.keys() if "lm_head" not in name} == set()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    again = PeftModel.from_pretrained(own, str(tmp_path / "out"))
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(errors.UsageError, match="trainable_token_indices"):
        export_hf(
            checkpoint, tmp_path / "no", adapter=Adapter(lora="merge", **given), config=own.config
        )


def test_an_adapter_on_an_embedding_keeps_its_names(tmp_path):
    model = llama(target_modules=["embed_tokens", "v_proj"], rank_pattern={})
    config = model.peft_config["default"]
    export_hf(
        saved(tmp_path, model.state_dict()),
        tmp_path / "out",
        adapter=Adapter(lora="adapter", lora_config=config),
    )
    again = PeftModel.from_pretrained(base(), str(tmp_path / "out"))
    assert torch.equal(logits(again), logits(model))


# -- merged ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"use_rslora": True},
        {"modules_to_save": ["lm_head"]},
        {"use_dora": True},
        {"use_dora": True, "use_rslora": True, "modules_to_save": ["embed_tokens"]},
    ],
)
def test_merged_into_the_base_of_the_checkpoint(tmp_path, more, monkeypatch):
    monkeypatch.setattr("smckpt.translate.stream.CHUNK", 4096)  # weights in many ranges
    monkeypatch.setattr("smckpt.translate.models.merged._AT_ONCE", 256)
    model = llama(**more)
    export_hf(
        saved(tmp_path, model.state_dict()),
        tmp_path / "hf",
        config=model.config,
        adapter=Adapter(lora="merge", lora_config=model.peft_config),
    )
    assert_merged(tmp_path / "hf", model)


def test_an_adapter_with_dora_is_peft_s_own_directory(tmp_path):
    model = llama(use_dora=True)
    checkpoint = saved(tmp_path, model.state_dict())
    export_hf(
        checkpoint, tmp_path / "out", adapter=Adapter(lora="adapter", lora_config=model.peft_config)
    )
    again = PeftModel.from_pretrained(base(), str(tmp_path / "out"))
    assert torch.equal(logits(again), logits(model))
    plain = {**model.peft_config["default"].to_dict(), "use_dora": False}
    for lora in ("adapter", "merge"):
        with pytest.raises(errors.TensorMismatchError, match="use_dora=False, but not so"):
            export_hf(checkpoint, tmp_path / "no", adapter=Adapter(lora=lora, lora_config=plain))
    state = {n: t for n, t in model.state_dict().items() if "magnitude" not in n or ".0." in n}
    with pytest.raises(errors.TensorMismatchError, match=r"use_dora=True.*layers\.1"):
        export_hf(
            saved(tmp_path / "half", state),
            tmp_path / "no",
            adapter=Adapter(lora="merge", lora_config=model.peft_config),
        )


# family, what the adapter changes, dtype of the base. Scalings and values are binary fractions, so
# that no sum depends on its order, and PEFT's result is one only.
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "linear": ("llama", {"target_modules": ["q_proj", "down_proj"]}, "bfloat16"),
    "rsLoRA, saved whole": (
        "llama", {"use_rslora": True, "modules_to_save": ["lm_head"]}, "bfloat16"),
    "DoRA": ("llama", {"use_dora": True}, "bfloat16"),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "v_proj"]}, "bfloat16"),
    "embedding, DoRA": (
        "llama", {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}, "float32"),
    "Conv1D, DoRA": (
        "gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True},
        "bfloat16"),
    "beside experts": ("mixtral", {"target_modules": ["q_proj"]}, "bfloat16"),
    "experts": ("mixtral", {"target_parameters": EXPERTS}, "bfloat16"),
    "experts, rsLoRA, ranks": (
        "qwen3_moe",
        {"target_parameters": ["experts.down_proj", "mlp.gate.weight"], "use_rslora": True,
         "rank_pattern": {"1.mlp.experts.down_proj": 16},
         "alpha_pattern": {"1.mlp.experts.down_proj": 8}},
        "float32"),
    "transposed experts, one square": ("gpt_oss", {"target_parameters": EXPERTS}, "bfloat16"),
}  # fmt: skip


def on_grid(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter.clamp(-2, 2) * 16).round() / 16)
    return model


def tiny(family: str, dtype: str) -> Any:
    torch.manual_seed(1)
    if family == "gpt2":
        made = AutoModelForCausalLM.from_config(
            GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=ref.V, n_positions=64)
        )
    elif family == "gpt_oss":
        config = GptOssConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, num_local_experts=4, vocab_size=ref.V,
        )  # fmt: skip
        made = AutoModelForCausalLM.from_config(config)
    else:
        made = ref.model(family)
    return on_grid(made).to(getattr(torch, dtype))


def changed(kind: str) -> Any:
    family, more, dtype = KINDS[kind]
    plain = {"rank_pattern": {}, "alpha_pattern": {}, "lora_alpha": 6, "target_modules": ["q_proj"]}
    plain |= {"target_modules": []} if "target_parameters" in more else {}
    return on_grid(peft_model(tiny(family, dtype), **{**plain, **more}))


def assert_same_files(ours: Path, theirs: Path) -> None:
    found, wanted = (load_file(next(at.glob("*.safetensors"))) for at in (ours, theirs))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), (name, (found[name] - tensor).abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_bit_for_bit_what_peft_merges_and_saves(tmp_path, kind, monkeypatch, judged):
    """The adapter; merged into the base of the checkpoint, and into the base's directory."""
    monkeypatch.setattr("smckpt.translate.stream.CHUNK", 4096)  # weights in many ranges
    monkeypatch.setattr("smckpt.translate.models.merged.CHUNK", 4096)
    monkeypatch.setattr("smckpt.translate.models.merged._AT_ONCE", 256)
    family, _, dtype = KINDS[kind]
    model = changed(kind)
    given = {"lora_config": model.peft_config}
    checkpoint = saved(tmp_path, model.state_dict())
    export_hf(checkpoint, tmp_path / "adapter", adapter=Adapter(lora="adapter", **given))
    model.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    assert_same_files(tmp_path / "adapter", tmp_path / "peft")
    again = PeftModel.from_pretrained(tiny(family, dtype), str(tmp_path / "adapter"))
    assert torch.equal(logits(again), logits(model))
    export_hf(
        checkpoint, tmp_path / "hf", adapter=Adapter(lora="merge", **given), config=model.config
    )
    tiny(family, dtype).save_pretrained(tmp_path / "base")
    alone = saved(tmp_path / "alone", get_peft_model_state_dict(model, save_embedding_layers=False))
    export_hf(
        alone, tmp_path / "hf2", adapter=Adapter(lora="merge", base=tmp_path / "base", **given)
    )
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert_same_files(tmp_path / "hf", tmp_path / "merged")
    assert_same_files(tmp_path / "hf2", tmp_path / "merged")
    judged(family, "PEFT", exports=["PEFT", "save_pretrained"])


def test_a_merge_keeps_in_float32_what_from_pretrained_does(tmp_path):
    plain: dict[str, Any] = {"rank_pattern": {}, "alpha_pattern": {}, "target_modules": ["q_proj"]}
    model = peft_model(tiny("gpt_oss", "float32"), **plain)
    given: dict[str, Any] = {"lora_config": model.peft_config, "lora": "merge"}
    checkpoint = saved(tmp_path, model.state_dict())
    tiny("gpt_oss", "float32").save_pretrained(tmp_path / "base")
    export_hf(
        checkpoint, tmp_path / "hf", config=model.config, dtype="float16", adapter=Adapter(**given)
    )
    export_hf(
        checkpoint,
        tmp_path / "hf2",
        adapter=Adapter(base=tmp_path / "base", **given),
        dtype="float16",
    )
    for folder in ("hf", "hf2"):
        found = load_file(tmp_path / folder / "model.safetensors")
        kept = {name for name, tensor in found.items() if tensor.dtype == torch.float32}
        assert kept == {name for name in found if "norm" in name} != set()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"rank_pattern": {"(a+)+$": 2}}, "for ever"),
        ({"alpha_pattern": {"(x|x)*y": 2}}, "for ever"),
        ({"rank_pattern": {".*.*.*.*q": 2}}, "for ever"),
        ({"rank_pattern": {"q_proj(": 2}}, "no expression"),
        ({"rank_pattern": ["q_proj"]}, "no number"),
        ({"alpha_pattern": {"q_proj": "two"}}, "no number"),
        ({"lora_alpha": None}, "no number"),
        ({"r": "4"}, "no number"),
        ({"r": 0}, "no number"),
        ({"rank_pattern": {"q_proj": -1}}, "no number"),
    ],
)
def test_a_forged_config_is_refused_by_name(tmp_path, wrong, error):
    model = llama(rank_pattern={}, alpha_pattern={})
    checkpoint = saved(tmp_path, model.state_dict())
    config = {**model.peft_config["default"].to_dict(), **wrong}
    with within(seconds(60)), pytest.raises(errors.UsageError, match=error):
        adapter = Adapter(lora="merge", lora_config=config)
        export_hf(checkpoint, tmp_path / "hf", config=model.config, adapter=adapter)


def test_patterns_as_peft_writes_them_stay(tmp_path):
    ranks = {r"^model\.layers\.(0|1)\.self_attn.q_proj": 3, r".*\.\d+\.mlp\.down_proj": 2}
    model = llama(rank_pattern=ranks, alpha_pattern={"layers.[01].mlp.down_proj": 5})
    checkpoint = saved(tmp_path, model.state_dict())
    adapter = Adapter(lora="merge", lora_config=model.peft_config)
    export_hf(checkpoint, tmp_path / "hf", config=model.config, adapter=adapter)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.allclose(logits(ours), logits(model.merge_and_unload()), atol=1e-6)


@pytest.mark.parametrize("what", ["a swapped tensor", "a wrong rank's scale", "a lost tensor"])
def test_peft_sees_what_is_wrong_in_an_adapter(tmp_path, what):
    """Its own merge of such a directory is another model than ours of the right one."""
    model = changed("linear")
    given = {"lora_config": model.peft_config}
    checkpoint = saved(tmp_path, model.state_dict())
    export_hf(
        checkpoint, tmp_path / "hf", adapter=Adapter(lora="merge", **given), config=model.config
    )
    export_hf(checkpoint, tmp_path / "adapter", adapter=Adapter(lora="adapter", **given))

    def merged() -> Path:
        made = PeftModel.from_pretrained(tiny("llama", "bfloat16"), str(tmp_path / "adapter"))
        made.merge_and_unload().save_pretrained(tmp_path / "merged")
        return tmp_path / "merged"

    assert_same_files(tmp_path / "hf", merged())
    at = tmp_path / "adapter" / "adapter_model.safetensors"
    state = load_file(at)
    one, two = (f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_A.weight" for i in (0, 1))
    config = tmp_path / "adapter" / "adapter_config.json"
    if what == "a wrong rank's scale":
        config.write_text(json.dumps({**json.loads(config.read_text()), "use_rslora": True}))
    elif what == "a lost tensor":
        del state[one]
    else:
        state[one], state[two] = state[two], state[one]
    save_file(state, at, metadata={"format": "pt"})
    with pytest.raises(AssertionError, match=r"_proj\.weight"):
        assert_same_files(tmp_path / "hf", merged())


def test_experts_whose_order_does_not_show_are_refused(tmp_path):
    model = peft_model(
        tiny("gpt_oss", "float32"), target_parameters=["experts.down_proj"], target_modules=[],
        rank_pattern={}, alpha_pattern={},
    )  # fmt: skip
    with pytest.raises(errors.TensorMismatchError, match="square matrices"):
        export_hf(saved(tmp_path, model.state_dict()), tmp_path / "hf", config=model.config,
                  adapter=Adapter(lora="merge", lora_config=model.peft_config))  # fmt: skip


@pytest.mark.parametrize("dora", [False, True])
def test_conv1d_and_linear_layers_of_one_adapter_are_told_apart(tmp_path, dora):
    """PEFT's config has one fan_in_fan_out, that of the last module, and a square weight fits both
    ways."""
    config = GPT2Config(
        n_embd=48, n_layer=2, n_head=4, vocab_size=ref.V, n_positions=64, tie_word_embeddings=False
    )
    own = AutoModelForCausalLM.from_config(config)
    own.save_pretrained(tmp_path / "base")
    model = peft_model(own, target_modules=["attn.c_proj", "c_attn", "lm_head"], rank_pattern={},
                       use_dora=dora)  # fmt: skip
    assert model.peft_config["default"].fan_in_fan_out is False
    given: dict[str, Any] = {"lora": "merge", "lora_config": model.peft_config}
    export_hf(
        saved(tmp_path / "whole", model.state_dict()),
        tmp_path / "hf",
        config=config,
        adapter=Adapter(**given),
    )
    export_hf(saved(tmp_path / "alone", get_peft_model_state_dict(model)), tmp_path / "hf2",
              adapter=Adapter(base=tmp_path / "base", **given))  # fmt: skip
    ours, also = (load_file(tmp_path / d / "model.safetensors") for d in ("hf", "hf2"))
    assert_merged(tmp_path / "hf", model)
    assert all(torch.equal(ours[n], also[n]) for n in ours)


@pytest.mark.parametrize("name", ["default", "second"])
def test_one_of_several_adapters_is_exported_and_merged(tmp_path, name):
    model = llama(use_dora=True, modules_to_save=["lm_head"])
    other = LoraConfig(r=2, lora_alpha=3, target_modules=["v_proj"], init_lora_weights=False,
                       modules_to_save=["lm_head"])  # fmt: skip
    model.add_adapter("second", other)
    # its wrapper stays round the embedding of the others
    tokens = LoraConfig(r=2, target_modules=["v_proj"], trainable_token_indices=[1])
    model.add_adapter("tokens", tokens)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "modules_to_save.second" in key:
                parameter.add_(0.3)
    given = {"lora_config": model.peft_config, "lora_adapter": name}
    checkpoint = saved(tmp_path, model.state_dict())
    model.set_adapter(name)
    export_hf(checkpoint, tmp_path / "out", adapter=Adapter(lora="adapter", **given))
    again = PeftModel.from_pretrained(base(), str(tmp_path / "out"))
    assert torch.equal(logits(again), logits(model))
    export_hf(
        checkpoint, tmp_path / "hf", adapter=Adapter(lora="merge", **given), config=model.config
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert (logits(merged) - logits(model)).abs().max() <= 1e-5
    wanted = again.merge_and_unload().state_dict()
    for key, tensor in merged.state_dict().items():
        assert torch.allclose(tensor, wanted[key], atol=1e-6), key


def test_a_merged_model_replaces_an_adapter(tmp_path):
    """Beside an adapter's config, `from_pretrained` would load the adapter and its base."""
    model = llama()
    checkpoint = saved(tmp_path, model.state_dict())
    given: dict[str, Any] = {"lora_config": model.peft_config}
    export_hf(checkpoint, tmp_path / "out", adapter=Adapter(lora="adapter", **given))
    export_hf(
        checkpoint,
        tmp_path / "out",
        adapter=Adapter(lora="merge", **given),
        config=model.config,
        options=ExportOptions(overwrite=True),
    )
    assert_merged(tmp_path / "out", model)


def test_merged_into_a_base_directory(tmp_path):
    model = llama(modules_to_save=["lm_head"])
    base().save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "peft")
    export_hf(
        saved(tmp_path, get_peft_model_state_dict(model)),
        tmp_path / "hf",
        adapter=Adapter(lora="merge", lora_config=tmp_path / "peft", base=tmp_path / "base"),
    )
    assert_merged(tmp_path / "hf", model)


def test_an_adapter_that_lacks_a_module_of_its_config_is_refused(tmp_path):
    """A module whose pair was lost, or a config of another adapter: another model in silence."""
    model = llama()
    base().save_pretrained(tmp_path / "base")
    state = get_peft_model_state_dict(model)
    config = model.peft_config["default"].to_dict()
    module = next(name for name in state if "q_proj.lora_A" in name).partition(".lora_A")[0]
    lost = {name: tensor for name, tensor in state.items() if not name.startswith(module)}
    fewer = {**config, "target_modules": sorted({*config["target_modules"]} - {"q_proj"})}
    without = {**config, "exclude_modules": ["layers.1.self_attn.q_proj"]}
    whole = {**config, "modules_to_save": ["lm_head"]}
    layer = {**config, "layers_to_transform": [1], "layers_pattern": "layers"}
    cases = (
        (state, config), (lost, config), (state, fewer), (state, without), (state, whole),
        (state, layer),
    )  # fmt: skip
    for number, (tensors, values) in enumerate(cases):
        adapter = Adapter(lora="merge", lora_config=values, base=tmp_path / "base")
        checkpoint = saved(tmp_path / str(number), tensors)
        if not number:
            export_hf(checkpoint, tmp_path / "hf", adapter=adapter)
            continue
        text = "the state has not" if values is whole else "not so the LoRA matrices of"
        with pytest.raises(errors.TensorMismatchError, match=text):
            export_hf(checkpoint, tmp_path / "no", adapter=adapter)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_turned_adapter_of_a_model_without_conv1d_is_merged_as_peft_does(tmp_path, family):
    """PEFT sets fan_in_fan_out aside for a Linear; a square weight got the product turned, of a
    family without a table too."""
    torch.manual_seed(2)
    small = {"vocab_size": ref.V, "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 32}
    opt = OPTConfig(**small, num_attention_heads=4, word_embed_proj_dim=32)
    plain = base() if family == "llama" else AutoModelForCausalLM.from_config(opt)
    plain.save_pretrained(tmp_path / "base")
    model = peft_model(plain, target_modules=["q_proj"], alpha_pattern={"q_proj": 9, "proj": 9})
    config = {**model.peft_config["default"].to_dict(), "fan_in_fan_out": True}
    config["alpha_pattern"] = {"q.*": 7, "q_proj": 9}  # as PEFT's file sorts them
    whole = saved(tmp_path / "whole", model.state_dict())
    report = export_hf(
        saved(tmp_path, get_peft_model_state_dict(model)),
        tmp_path / "hf",
        adapter=Adapter(lora="merge", lora_config=config, base=tmp_path / "base"),
    )
    assert "several of alpha_pattern match" in "".join(report.notes)
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] = 7 / 4
    nameless = Adapter(lora="merge", lora_config=config)
    if family == "opt":  # the other's is no square
        with pytest.raises(errors.TensorMismatchError, match="is square, and the adapter's config"):
            export_hf(whole, tmp_path / "no", adapter=nameless)
    assert_merged(tmp_path / "hf", model)


@pytest.mark.parametrize(
    "layers, module, found",
    [
        ({"layers_to_transform": 1}, "model.layers.1.q", True),
        ({"layers_to_transform": 0}, "model.layers.1.q", False),
        ({"layers_to_transform": [0, 2]}, "model.layers.1.q", False),
        ({"layers_to_transform": [0], "layers_pattern": ["h", "blocks"]}, "t.h.0.q", True),
        ({"layers_to_transform": [0], "layers_pattern": "blocks"}, "t.h.0.q", False),
        ({"layers_to_transform": [1]}, "encoder.block.1.layer.0.k", None),
        ({"layers_to_transform": [1], "layers_pattern": "layers"}, "layers.1.q", None),
        ({"layers_to_transform": [1], "layers_pattern": [3]}, "model.layers.1.q", None),
    ],
)
def test_layers_to_transform_says_what_is_adapted_as_far_as_all_releases_of_peft_agree(
    layers, module, found
):
    """The first number counts, or the last; of a list that stands first, or not."""
    config = our_lora.LoraConfig({"target_modules": ["q", "k"], **layers})
    shapes = {f"{module}.weight": (2, 2)}
    for paired in ([module], []):
        if found is None or bool(paired) == found:
            config.check_targets(paired, shapes, [])
        else:
            with pytest.raises(errors.TensorMismatchError, match="layers_to_transform"):
                config.check_targets(paired, shapes, [])


def test_what_is_no_matrix_is_not_compared_with_the_modules_of_a_config():
    config = our_lora.LoraConfig({"target_modules": ["up", "patch"]})
    shapes = {"up.weight": (2, 2), "patch.weight": (2, 2, 1, 1), "mlp.experts.0.up.weight": (2, 2)}
    config.check_targets(["up", "patch", "mlp.experts.0.up"], shapes, [])
    with pytest.raises(errors.TensorMismatchError, match="up"):
        config.check_targets(["patch"], shapes, [])


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora"])
def test_an_adapter_that_began_with_parts_of_the_base_is_not_added_to_the_release(tmp_path, start):
    """PEFT takes them out of the base's weights: the sum with the release would have them twice."""
    model = llama(init_lora_weights=start, rank_pattern={})
    base().save_pretrained(tmp_path / "base")
    whole = saved(tmp_path / "whole", model.state_dict())
    alone = saved(tmp_path / "alone", get_peft_model_state_dict(model))
    given: dict[str, Any] = {"lora": "merge", "lora_config": model.peft_config}
    for checkpoint in (whole, alone):
        with pytest.raises(errors.UsageError, match=f"init_lora_weights='{start}' changed the"):
            export_hf(checkpoint, tmp_path / "no", adapter=Adapter(base=tmp_path / "base", **given))
    export_hf(whole, tmp_path / "hf", config=model.config, adapter=Adapter(**given))
    copy.deepcopy(model).unload().save_pretrained(tmp_path / "changed")
    assert_merged(tmp_path / "hf", model)
    plain = {**model.peft_config["default"].to_dict(), "init_lora_weights": True}
    export_hf(
        alone,
        tmp_path / "hf2",
        adapter=Adapter(lora="merge", lora_config=plain, base=tmp_path / "changed"),
    )
    assert_same_files(tmp_path / "hf2", tmp_path / "hf")


def test_an_embedding_trained_apart_from_its_tied_head_is_not_written_for_both(tmp_path):
    """A released base with a tied head has the embedding alone, and the head would become it."""
    tied = base(tie_word_embeddings=True)
    tied.save_pretrained(tmp_path / "base")
    for folder, more in (
        (tmp_path / "added", {"target_modules": ["embed_tokens"]}),
        (tmp_path / "whole", {"modules_to_save": ["embed_tokens"]}),
    ):
        model = peft_model(copy.deepcopy(tied), rank_pattern={}, **more)
        given: dict[str, Any] = {"lora": "merge", "lora_config": model.peft_config}
        checkpoint = saved(folder, model.state_dict())
        with pytest.raises(errors.UsageError, match="an embedding or head that the config ties"):
            export_hf(checkpoint, tmp_path / "no", adapter=Adapter(base=tmp_path / "base", **given))
        assert not (tmp_path / "no").exists()
    untied = {**tied.config.to_dict(), "tie_word_embeddings": False}
    export_hf(
        checkpoint, tmp_path / "hf", config=untied, adapter=Adapter(**given)
    )  # what the error advises
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert (logits(again) - logits(model)).abs().max() <= 1e-4
    for more in (
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ):
        model = peft_model(copy.deepcopy(tied), rank_pattern={}, **more)
        folder = tmp_path / str(more)
        export_hf(
            saved(folder, get_peft_model_state_dict(model)),
            folder / "hf",
            adapter=Adapter(lora="merge", lora_config=model.peft_config, base=tmp_path / "base"),
        )
        again = AutoModelForCausalLM.from_pretrained(folder / "hf")
        assert (logits(again) - logits(model)).abs().max() <= 1e-4
        # a server leaves out the head of a model whose config ties it
        head = "lm_head.weight" in load_file(folder / "hf" / "model.safetensors")
        assert again.config.tie_word_embeddings is not head


@pytest.mark.parametrize("more", [{"target_modules": ["q_proj", "proj_out"]},
                                  {"modules_to_save": ["embed_tokens"]}])  # fmt: skip
def test_a_tied_head_is_found_by_its_values_whatever_its_name(tmp_path, more):
    """Whisper's is proj_out; the delta of a tied head was lost, a new embedding became the head."""
    torch.manual_seed(2)
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=ref.V, d_model=32, encoder_layers=1, decoder_layers=1, num_mel_bins=8,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=48,
            decoder_ffn_dim=48, max_source_positions=20, max_target_positions=20, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
            architectures=["WhisperForConditionalGeneration"],
        )
    )  # fmt: skip
    model = peft_model(model, rank_pattern={}, **{"target_modules": ["q_proj"], **more})
    checkpoint = saved(tmp_path, model.state_dict())
    given = Adapter(lora="merge", lora_config=model.peft_config)
    with pytest.raises(errors.UsageError, match="is one tensor with"):
        export_hf(checkpoint, tmp_path / "no", config=model.config, adapter=given)
    untied = {**model.config.to_dict(), "tie_word_embeddings": False}
    export_hf(checkpoint, tmp_path / "hf", config=untied, adapter=given)  # as the error advises


def test_which_tensors_of_a_base_directory_are_one_is_transformers_knowledge(tmp_path):
    """Mamba's head lost its delta, or got the embedding's, since its names are no Llama's. A tied
    head's own delta had no tensor to go to. A model without a head has none to lose."""
    torch.manual_seed(2)
    small = {"vocab_size": ref.V, "hidden_size": 32, "num_hidden_layers": 2}
    gpt2 = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=ref.V, n_positions=64)
    mamba = MambaForCausalLM(MambaConfig(**small, state_size=4))
    moe = ref.model("qwen3_moe", tie_word_embeddings=True)  # other names on disk than in memory
    whole = {"target_modules": ["in_proj"], "modules_to_save": ["embeddings"]}
    both = {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}
    ends = {"target_modules": ["lm_head"], "ensure_weight_tying": True}  # of three embeddings too
    t5 = T5Config(vocab_size=ref.V, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    for number, (model, more, refused) in enumerate([
        (mamba, {"target_modules": ["embeddings"]}, True), (mamba, whole, True),
        (moe, {"target_modules": ["lm_head", "q_proj"]}, True),
        (moe, {"target_modules": ["embed_tokens", "q_proj"]}, True), (moe, both, False),
        (moe, {**both, "alpha_pattern": {"lm_head": 10}}, True),
        (T5ForConditionalGeneration(t5), ends, True),
        (GPT2Model(gpt2), {"target_modules": ["wte", "c_attn"]}, False),
    ]):  # fmt: skip
        folder = tmp_path / str(number)
        model.save_pretrained(folder / "base")
        adapted = peft_model(copy.deepcopy(model), rank_pattern={}, **more)
        state = {n: t.contiguous() for n, t in get_peft_model_state_dict(adapted).items()}
        torch.save(state, folder / "adapter.pt")
        given = Adapter(lora="merge", lora_config=adapted.peft_config, base=folder / "base")
        if refused:
            with pytest.raises(errors.UsageError, match="an embedding or head that the config"):
                export_hf(folder / "adapter.pt", folder / "hf", adapter=given)
            continue
        export_hf(folder / "adapter.pt", folder / "hf", adapter=given)
        again = type(model).from_pretrained(folder / "hf")
        with torch.no_grad():
            wanted, found = (m(TOKENS)[0] for m in (adapted, again))
        assert (found - wanted).abs().max() <= 1e-4


def test_embeddings_and_transposed_layers_are_merged(tmp_path):
    torch.manual_seed(1)
    config = GPT2Config(
        n_embd=48, n_layer=2, n_head=4, vocab_size=ref.V, n_positions=64, tie_word_embeddings=False
    )
    base = AutoModelForCausalLM.from_config(config)
    model = peft_model(base, target_modules=["c_attn", "wte"], rank_pattern={}, fan_in_fan_out=True)
    export_hf(
        saved(tmp_path, model.state_dict()),
        tmp_path / "hf",
        config=config,
        adapter=Adapter(lora="merge", lora_config=model.peft_config),
    )
    assert_merged(tmp_path / "hf", model)


def test_a_bfloat16_merge_is_rounded_once(tmp_path):
    model = llama()
    state = {n: t.bfloat16() for n, t in model.state_dict().items()}
    export_hf(
        saved(tmp_path, state),
        tmp_path / "hf",
        config=model.config,
        adapter=Adapter(lora="merge", lora_config=model.peft_config),
    )
    found = load_file(tmp_path / "hf" / "model.safetensors")
    at = "base_model.model.model.layers.0.self_attn.q_proj."
    a, b = (state[f"{at}lora_{side}.default.weight"].float() for side in "AB")
    wanted = state[at + "base_layer.weight"].float() + 10 / 4 * (b @ a)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert found[name].dtype == torch.bfloat16
    assert torch.equal(found[name], wanted.bfloat16())
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_command_merges(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "peft")
    base().save_pretrained(tmp_path / "base")
    checkpoint = saved(tmp_path, get_peft_model_state_dict(model))
    command = [sys.executable, "-m", "smckpt.cli", "export", str(checkpoint), str(tmp_path / "hf")]
    command += ["--lora", "merge", "--lora-config", str(tmp_path / "peft")]
    command += ["--base", str(tmp_path / "base"), "--no-against-model"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds(120))
    assert done.returncode == 0, done.stderr
    assert_merged(tmp_path / "hf", model)


# -- refused ---------------------------------------------------------------------------------------


def test_what_cannot_be_merged_or_is_not_there_is_refused(tmp_path):
    model = llama()
    whole = saved(tmp_path / "1", model.state_dict())
    alone = saved(tmp_path / "2", get_peft_model_state_dict(model))
    config = model.peft_config["default"].to_dict()
    out = tmp_path / "hf"

    def refused(match: str, checkpoint: Path = whole, **options: Any) -> None:
        plain = {n: options.pop(n) for n in ("parallel", "config") if n in options}
        given = {"lora": "merge", "lora_config": config, **options}
        with pytest.raises(errors.CheckpointError, match=match):
            export_hf(checkpoint, out, **plain, adapter=Adapter(**given))
        assert not out.exists()

    refused("lora='both'", lora="both")
    refused("no tensor contains lora_alpha", lora_config=None)
    refused("of PEFT.s kind IA3, and smckpt exports LoRA alone", lora_config={"peft_type": "IA3"})
    refused("use_dora=True, but not so", lora_config={**config, "use_dora": True})
    refused("lora_bias", lora_config={**config, "lora_bias": True})
    refused("the config says 8", lora_config={**config, "r": 8, "rank_pattern": {}})
    refused("base weights that the adapter changes", alone)
    refused("not for parts of tensor-parallel ranks", parallel=Parallel("te_split"))
    refused("config=", lora="adapter", config=model.config)
    refused("base=", lora="adapter", base=tmp_path)
    refused("lora=None", lora=None)
    plain = saved(tmp_path / "3", base().state_dict())
    refused("needs a PEFT model", plain)
    second = {n.replace("default", "second"): t for n, t in model.state_dict().items()}
    refused("several adapters: default, second",
            saved(tmp_path / "4", {**model.state_dict(), **second}))  # fmt: skip
    refused("no adapter 'third', but default, second", tmp_path / "4" / "ckpt",
            lora_adapter="third")  # fmt: skip
    odd = {**get_peft_model_state_dict(model)}
    odd.pop(next(n for n in odd if "lora_A" in n))
    refused("of the LoRA pair", saved(tmp_path / "5", odd))


def test_a_base_of_another_shape_is_refused(tmp_path):
    model = llama()
    base(intermediate_size=176).save_pretrained(tmp_path / "base")
    checkpoint = saved(tmp_path, get_peft_model_state_dict(model))
    with pytest.raises(errors.TensorMismatchError, match=r"down_proj\.weight has the shape"):
        export_hf(
            checkpoint,
            tmp_path / "hf",
            adapter=Adapter(lora="merge", lora_config=model.peft_config, base=tmp_path / "base"),
        )


def test_an_adapter_that_is_killed_on_the_way_does_not_load(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "peft")
    checkpoint = saved(tmp_path, model.state_dict())
    code = """
    import os, sys
    from smckpt import Adapter, ExportOptions, export_hf
    export_hf(sys.argv[1], sys.argv[2], adapter=Adapter("adapter", sys.argv[3]),
              options=ExportOptions(progress=lambda done, total: os._exit(0)))
    """
    child.run(code, str(checkpoint), str(tmp_path / "out"), str(tmp_path / "peft"))
    assert not [*(tmp_path / "out").glob("[!.]*")]
    with pytest.raises(Exception, match="Can.t find .adapter_config.json"):
        PeftModel.from_pretrained(llama().get_base_model(), str(tmp_path / "out"))
