"""Several adapters of one checkpoint, merged one after another as PEFT merges them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from smckpt import Adapter, errors, export_hf
from tests.support.limits import seconds
from tests.translate.models.test_lora import (
    EXPERTS,
    assert_same_files,
    base,
    on_grid,
    peft_model,
    saved,
    tiny,
)

# family, what the first and the second adapter change, dtype of the base. As in `test_lora.KINDS`,
# no sum depends on its order; but a bfloat16 base is rounded after each adapter.
PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "linear": (
        "llama", {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "r": 2, "lora_alpha": 4}, "bfloat16"),
    "linear, float32, rsLoRA": (
        "llama", {"target_modules": ["q_proj"], "use_rslora": True},
        {"target_modules": ["q_proj", "up_proj"]}, "float32"),
    "embedding": (
        "llama", {"target_modules": ["embed_tokens", "v_proj"]},
        {"target_modules": ["embed_tokens", "q_proj"]}, "bfloat16"),
    "DoRA, then linear; one saves a module": (
        "llama", {"target_modules": ["q_proj", "v_proj"], "use_dora": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "bfloat16"),
    "Conv1D, DoRA, then linear": (
        "gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True},
        {"target_modules": ["c_attn"], "fan_in_fan_out": True}, "bfloat16"),
    "experts": (
        "mixtral", {"target_parameters": EXPERTS, "target_modules": []},
        {"target_parameters": EXPERTS, "target_modules": [], "r": 2, "lora_alpha": 2}, "bfloat16"),
}  # fmt: skip
PLAIN: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
NAMES = ["default", "second"]


def with_two(base: Any, first: dict[str, Any], second: dict[str, Any]) -> Any:
    model = peft_model(base, **{"rank_pattern": {}, "alpha_pattern": {}, **PLAIN, **first})
    model.add_adapter("second", LoraConfig(**{**PLAIN, **second}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # large enough that bfloat16 rounds; DoRA's lengths need exact squares
            if ".second" in name or ("lora_" in name and not first.get("use_dora")):
                parameter.add_(torch.randn(parameter.shape))
    return on_grid(model).eval()


def merged_by_peft(model: Any, names: list[str], folder: Path) -> Path:
    model.base_model.set_adapter(names)  # whose modules_to_save are taken
    model.merge_and_unload(adapter_names=names).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", PAIRS)
def test_bit_for_bit_what_peft_merges_one_after_another(tmp_path, kind, monkeypatch, judged):
    """Into the base of the checkpoint, and into the base's directory."""
    monkeypatch.setattr("smckpt.translate.stream.CHUNK", 4096)  # weights in many ranges
    monkeypatch.setattr("smckpt.translate.models.merged.CHUNK", 4096)
    monkeypatch.setattr("smckpt.translate.models.merged._AT_ONCE", 256)
    family, first, second, dtype = PAIRS[kind]
    model = with_two(tiny(family, dtype), first, second)
    given: dict[str, Any] = {
        "lora": "merge", "lora_config": model.peft_config, "lora_adapter": NAMES,
    }  # fmt: skip
    checkpoint = saved(tmp_path, model.state_dict())
    export_hf(checkpoint, tmp_path / "hf", config=model.config, adapter=Adapter(**given))
    tiny(family, dtype).save_pretrained(tmp_path / "base")
    export_hf(checkpoint, tmp_path / "hf2", adapter=Adapter(base=tmp_path / "base", **given))
    theirs = merged_by_peft(model, NAMES, tmp_path / "merged")
    assert_same_files(tmp_path / "hf", theirs)
    assert_same_files(tmp_path / "hf2", theirs)
    judged(family, "PEFT", exports=["PEFT", "save_pretrained"])


def test_the_order_is_that_of_the_names(tmp_path):
    """After each adapter a bfloat16 weight is rounded, so the order shows."""
    _, first, second, dtype = PAIRS["linear"]
    given: dict[str, Any] = {"lora": "merge"}
    for at, names in (("one", NAMES), ("two", NAMES[::-1])):
        model = with_two(tiny("llama", dtype), first, second)
        checkpoint = saved(tmp_path / at, model.state_dict())
        export_hf(
            checkpoint,
            tmp_path / at / "hf",
            config=model.config,
            adapter=Adapter(lora_adapter=names, lora_config=model.peft_config, **given),
        )
        assert_same_files(
            tmp_path / at / "hf", merged_by_peft(model, names, tmp_path / at / "peft")
        )
    one, two = (load_file(tmp_path / at / "hf" / "model.safetensors") for at in ("one", "two"))
    assert {n for n in one if not torch.equal(one[n], two[n])} == {
        f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)
    }


def test_the_command_merges_several_with_the_configs_of_peft_s_directory(tmp_path):
    _, first, second, dtype = PAIRS["linear"]
    model = with_two(tiny("llama", dtype), first, second)
    model.save_pretrained(tmp_path / "peft")  # the second one's config lies in a folder
    model.config.save_pretrained(tmp_path / "config")
    checkpoint = saved(tmp_path, model.state_dict())
    command = [sys.executable, "-m", "smckpt.cli", "export", str(checkpoint), str(tmp_path / "hf")]
    command += ["--lora", "merge", "--lora-config", str(tmp_path / "peft"), "--no-against-model"]
    command += ["--config", str(tmp_path / "config")]
    command += ["--lora-adapter", "second", "--lora-adapter", "default"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds(120))
    assert done.returncode == 0, done.stderr
    assert_same_files(tmp_path / "hf", merged_by_peft(model, NAMES[::-1], tmp_path / "merged"))


def test_the_config_of_a_named_adapter_is_found_in_peft_s_directory(tmp_path):
    _, first, second, dtype = PAIRS["linear"]
    model = with_two(tiny("llama", dtype), first, second)
    model.save_pretrained(tmp_path / "peft")
    export_hf(
        saved(tmp_path, model.state_dict()),
        tmp_path / "out",
        adapter=Adapter(lora="adapter", lora_config=tmp_path / "peft", lora_adapter="second"),
    )
    assert_same_files(tmp_path / "out", tmp_path / "peft" / "second")


def test_what_cannot_be_merged_together_is_refused(tmp_path):
    def refused(match: str, first: dict[str, Any], second: dict[str, Any], **more: Any) -> None:
        model = with_two(base(), first, second)
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        options = {"lora": "merge", "lora_config": model.peft_config, "lora_adapter": NAMES, **more}
        with pytest.raises(errors.UsageError, match=match):
            export_hf(saved(folder, model.state_dict()), folder / "hf", adapter=Adapter(**options))
        assert not (folder / "hf").exists()

    head = {"modules_to_save": ["lm_head"]}
    refused(r"default and second both save lm_head\.weight whole", head, head)
    model = with_two(base(), head, head)
    with pytest.raises(ValueError, match="Only one adapter can be set at a time"):
        model.base_model.set_adapter(NAMES)  # PEFT refuses it too
    dora = {"use_dora": True}
    refused(r"DoRA would be merged into .*q_proj\.weight after another", {}, dora)
    refused("DoRA would be merged into", dora, dora)
    refused("export one at a time", {}, {}, lora="adapter")
    refused("default twice", {}, {}, lora_adapter=["default", "second", "default"])
    refused("no config of the adapter 'default'", {}, {}, lora_config=LoraConfig(**PLAIN))
    one = with_two(base(), {}, {})
    one.save_pretrained(tmp_path / "alone", selected_adapters=["default"])
    refused("no config of the adapter 'second'", {}, {}, lora_config=tmp_path / "alone")
    refused("no adapter 'third'", {}, {}, lora_adapter=["default", "third"],
            lora_config={"default": one.peft_config["default"],
                         "third": one.peft_config["default"]})  # fmt: skip
    refused(r"lora_adapter=\[\]", {}, {}, lora_adapter=[])


def test_a_module_that_one_saves_whole_and_another_adds_to_is_refused(tmp_path):
    """PEFT makes no such model, so the state is made by hand."""
    model = with_two(base(), {"target_modules": ["lm_head", "q_proj"]}, {})
    name = "base_model.model.lm_head.modules_to_save.second.weight"
    state = {
        **model.state_dict(),
        name: model.state_dict()["base_model.model.lm_head.base_layer.weight"],
    }
    with pytest.raises(errors.UsageError, match=r"saves lm_head\.weight whole .* another adds"):
        export_hf(
            saved(tmp_path, state),
            tmp_path / "hf",
            adapter=Adapter(lora="merge", lora_adapter=NAMES, lora_config=model.peft_config),
        )
