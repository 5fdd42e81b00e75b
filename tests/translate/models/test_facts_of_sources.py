"""Whatever the source is, what it says of its own model is compared with the config.

The heads of 4 × 16 rows and 2 groups, and those of 8 × 8 and 4, are tensors of the same shapes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

import smckpt
from smckpt import ExportOptions, Parallel, errors, export_hf
from tests.formats.test_deepspeed import zero3
from tests.formats.test_smp import partial, sharded, staged
from tests.formats.test_sources_in_s3 import upload
from tests.support.models import families, references, vision
from tests.support.models.references import on_disk

State = dict[str, torch.Tensor]
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
OTHERS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
MEGATRONS = {"num_attention_heads": 8, "num_query_groups": 4, "kv_channels": 16}
OTHER_MEGATRONS = {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 32}
METAS = {"dim": 64, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "head_dim": 16,
         "rope_theta": 500000.0, "norm_eps": 1e-6, "vocab_size": 128}  # fmt: skip
SIZES = {"num_layers": 2, "hidden_size": 64}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Any, State]:
    model = references.model("llama")
    return model, on_disk(model, tmp_path_factory.mktemp("llama"))


def config_of(right: bool) -> dict[str, Any]:
    return references.config("llama", **(HEADS if right else OTHERS)).to_dict()


def arguments(right: bool, **more: Any) -> argparse.Namespace:
    """Of a run of Megatron-DeepSpeed, whose defaults nothing reads in another model."""
    return argparse.Namespace(
        **SIZES, **(MEGATRONS if right else OTHER_MEGATRONS), tensor_model_parallel_size=1,
        add_bias_linear=True, untie_embeddings_and_output_weights=False, **more,
    )  # fmt: skip


def hub(folder: Path, state: State, right: bool) -> Path:
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(right)))
    return folder


def hub_bin(folder: Path, state: State, right: bool) -> Path:
    hub(folder, {}, right)
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def ours(folder: Path, state: State, right: bool) -> Path:
    smckpt.save({"model": state, "config": config_of(right)}, checkpoint_id=folder)
    return folder


def ours_with_arguments(folder: Path, state: State, right: bool) -> Path:
    smckpt.save({"model": state, "args": vars(arguments(right))}, checkpoint_id=folder)
    return folder


def ours_with_a_file(folder: Path, state: State, right: bool) -> Path:
    smckpt.save({"model": state}, checkpoint_id=folder)
    (folder / "config.json").write_text(json.dumps(config_of(right)))
    return folder


def dcps(folder: Path, state: State, right: bool) -> Path:
    dcp.save({"model": state, "config": config_of(right)}, checkpoint_id=folder, no_dist=True)
    return folder


def lightning(folder: Path, state: State, right: bool) -> Path:
    parameters = {"lr": 0.1, **SIZES, **(HEADS if right else OTHERS)}
    torch.save({"state_dict": state, "hyper_parameters": parameters}, folder.with_suffix(".ckpt"))
    return folder.with_suffix(".ckpt")


def one_file_of_megatron_deepspeed(folder: Path, state: State, right: bool) -> Path:
    folder.mkdir()
    torch.save(
        {"module": state, "args": arguments(right), "mp_world_size": 1},
        folder / "mp_rank_00_model_states.pt",
    )
    return folder


def stage_3(folder: Path, state: State, right: bool) -> Path:
    zero3(folder, state, 2)
    _change(folder / "global_step5", "*model_states.pt", args=arguments(right))
    return folder


def universal(folder: Path, state: State, right: bool) -> Path:
    step = stage_3(folder, state, right) / "global_step5"
    for path in step.glob("*_optim_states.pt"):
        path.unlink()
    for name, tensor in state.items():
        (step / "zero" / name).mkdir(parents=True)
        torch.save(tensor.flatten().clone(), step / "zero" / name / "fp32.pt")
    return step


def smp(folder: Path, state: State, right: bool) -> Path:
    partial(folder, [[part] for part in staged(state, 2)])
    _change(folder / "10_partial", "user_content.pt", model_config=config_of(right))
    return folder


def smp_sharded(folder: Path, state: State, right: bool) -> Path:
    sharded(folder, state, 2)
    _change(folder / "10_partial", "user_content.pt", model_config=config_of(right))
    return folder


def metas(folder: Path, state: State, right: bool) -> Path:
    folder.mkdir()
    torch.save(references.meta(state, 1, 0), folder / "consolidated.00.pth")
    heads = {} if right else {"n_heads": 4, "n_kv_heads": 2, "head_dim": 32}
    (folder / "params.json").write_text(json.dumps({**METAS, **heads}))
    return folder / "consolidated.00.pth"


def transformer_engines(folder: Path, state: State, right: bool) -> Path:
    folder.mkdir()
    cut = references.te(state, 1, 0)
    torch.save({"model": cut, "args": arguments(right)}, folder / "model.pt")
    return folder / "model.pt"


def _change(folder: Path, pattern: str, **more: Any) -> None:
    for path in folder.glob(pattern):
        torch.save({**torch.load(path, weights_only=False), **more}, path)


SOURCES: list[Callable[[Path, State, bool], Path]] = [
    hub, hub_bin, ours, ours_with_arguments, ours_with_a_file, dcps, lightning,
    one_file_of_megatron_deepspeed, stage_3, universal, smp, smp_sharded, metas,
    transformer_engines,
]  # fmt: skip
NAMED = ("num_attention_heads", "num_query_groups", "num_key_value_heads", "kv_channels")


@pytest.mark.parametrize("made", SOURCES)
def test_heads_that_contradict_the_config_are_refused_in_every_source(tmp_path, llama, made):
    model, state = llama
    export_hf(made(tmp_path / "right", state, True), tmp_path / "hf", config=model.config)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == state.keys()
    assert [name for name in state if not torch.equal(found[name], state[name])] == []
    with pytest.raises(errors.TensorMismatchError, match="4") as caught:
        export_hf(made(tmp_path / "wrong", state, False), tmp_path / "no", config=model.config)
    assert any(name in str(caught.value) for name in NAMED)
    assert "wrong" in str(caught.value.path)
    assert not (tmp_path / "no").exists()


_KEPT = {"norm_topk_prob": False, "layer_types": ["full_attention"] * 2, "logits_scaling": 2.0,
         "hidden_act": "silu", "attention_multiplier": 0.5, "clip_qkv": 8.0}  # fmt: skip
_CHANGED = {"norm_topk_prob": True, "layer_types": ["sliding_attention"] * 2, "hidden_act": "gelu",
            "logits_scaling": 1.0, "attention_multiplier": 0.25, "clip_qkv": 4.0}  # fmt: skip


@pytest.mark.parametrize("key", _KEPT)
def test_what_the_config_beside_computes_otherwise_is_refused(tmp_path, llama, key):
    model, state = llama
    source = hub(tmp_path / "run", state, True)
    beside = json.loads((source / "config.json").read_text()) | _KEPT
    (source / "config.json").write_text(json.dumps(beside))
    given = {**model.config.to_dict(), **_KEPT}
    export_hf(source, tmp_path / "hf", config=given)
    with pytest.raises(errors.TensorMismatchError, match=f"beside the model has {key}="):
        export_hf(source, tmp_path / "no", config={**given, key: _CHANGED[key]})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ({"sliding_window": 7}, "sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 2.0}}, "rope_type"),
    ],
)
def test_what_a_run_may_have_changed_is_noted(tmp_path, llama, change, text):
    model, state = llama
    source = hub(tmp_path / "run", state, True)
    beside = model.config.to_dict() | {"rms_norm_eps": 1e-6, "sliding_window": 9}
    (source / "config.json").write_text(json.dumps(beside))
    report = export_hf(source, tmp_path / "hf", config={**beside, **change})
    assert [note for note in report.notes if f"beside the model has {text}=" in note]
    report = export_hf(source, tmp_path / "same", config=beside)
    assert [note for note in report.notes if "beside the model" in note] == []


_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip


@pytest.mark.parametrize(
    ("beside", "given", "key"),
    [
        ({"rope_parameters": _ROPE}, {"rope_parameters": {**_ROPE, "factor": 32.0}},
         "rope_parameters"),
        ({"rope_scaling": _ROPE, "rope_theta": 5e5}, {"rope_parameters": {**_ROPE, "factor": 4.0}},
         "rope_parameters"),
        ({"a_factor_of_a_family": 2.0}, {"a_factor_of_a_family": 3.0}, "a_factor_of_a_family"),
        ({"a_factor_of_a_family": 2.0}, {"a_factor_of_a_family": None}, "a_factor_of_a_family"),
        ({"max_position_embeddings": 64}, {"max_position_embeddings": 128},
         "max_position_embeddings"),
    ],
)  # fmt: skip
def test_what_else_the_config_beside_says_otherwise_is_noted(tmp_path, llama, beside, given, key):
    model, state = llama
    source = hub(tmp_path / "run", state, True)
    plain = model.config.to_dict()
    del plain["rope_parameters"]
    written = {**plain, "rope_theta": 5e5, **beside}
    (source / "config.json").write_text(json.dumps(written))
    report = export_hf(source, tmp_path / "hf", config={**plain, "rope_theta": 5e5, **given})
    assert any(
        f"differs from the config beside the model in {key}:" in note for note in report.notes
    ), report.notes
    more = {"use_cache": False, "attention_dropout": 0.5, "_name_or_path": "elsewhere",
            "eos_token_id": [1, 2]}  # fmt: skip
    report = export_hf(source, tmp_path / "same", config={**written, **more})
    assert not any("beside the model" in note for note in report.notes), report.notes


def test_what_the_config_beside_says_of_a_tower_is_compared(tmp_path):
    """Heads of another size have the same shapes there too."""
    model = vision.model("qwen2_5_vl")
    on_disk(model, tmp_path / "hub")
    right = model.config.to_dict()
    tower = right["vision_config"]
    report = export_hf(tmp_path / "hub", tmp_path / "hf", config=right)
    assert not any("beside the model" in note for note in report.notes), report.notes
    for key, value in (("num_heads", tower["num_heads"] // 2), ("fullatt_block_indexes", [0])):
        wrong = {**right, "vision_config": {**tower, key: value}}
        with pytest.raises(errors.TensorMismatchError, match=f"has vision_config.{key}="):
            export_hf(tmp_path / "hub", tmp_path / "no", config=wrong)
    other = {**right, "image_token_id": right["image_token_id"] + 1}
    report = export_hf(tmp_path / "hub", tmp_path / "noted", config=other)
    assert any("the model in image_token_id:" in note for note in report.notes)


def test_another_vocabulary_beside_the_model_is_noted(tmp_path, llama):
    """Rows that a trainer has padded are cut at that number."""
    model, state = llama
    source = tmp_path / "run"
    to = Parallel("mcore_te", tp=2)
    smckpt.import_hf(hub(tmp_path / "hub", state, True), source, to, config=model.config)
    report = export_hf(
        source, tmp_path / "hf", config={**model.config.to_dict(), "vocab_size": 119}
    )
    assert any("the model in vocab_size:" in note for note in report.notes), report.notes


def test_the_config_beside_may_have_older_keys(tmp_path):
    """GPT-2's heads are under n_head; no tensor's shape shows how many there are."""
    model = families.model("gpt2")
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    config = model.config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    export_hf(tmp_path, tmp_path / "hf", config=config)
    with pytest.raises(errors.TensorMismatchError, match="num_attention_heads="):
        export_hf(tmp_path, tmp_path / "no", config={**config, "n_head": config["n_head"] // 2})


def test_what_mistrals_file_says_of_experts_is_compared(tmp_path):
    """It has them in a section of their own."""
    model = references.model("mixtral")
    references.on_disk(model, tmp_path / "hub")
    params = {**METAS, "moe": {"num_experts": 8, "num_experts_per_tok": 2}}
    (tmp_path / "hub" / "params.json").write_text(json.dumps(params))
    export_hf(tmp_path / "hub", tmp_path / "hf", config=model.config)
    params["moe"]["num_experts_per_tok"] = 4
    (tmp_path / "hub" / "params.json").write_text(json.dumps(params))
    with pytest.raises(errors.TensorMismatchError, match="moe_router_topk=4"):
        export_hf(tmp_path / "hub", tmp_path / "no", config=model.config)


def test_an_import_compares_them_too(tmp_path, llama):
    model, state = llama
    given = {"parallel": Parallel(layout="mcore_te", tp=2), "config": model.config}
    smckpt.import_hf(hub(tmp_path / "right", state, True), tmp_path / "in", **given)
    with pytest.raises(errors.TensorMismatchError, match="num_attention_heads=4"):
        smckpt.import_hf(hub(tmp_path / "wrong", state, False), tmp_path / "no", **given)


def test_a_release_in_a_store_is_compared(tmp_path, llama, s3_root):
    model, state = llama
    upload(hub(tmp_path / "wrong", state, False), f"{s3_root}/wrong")
    with pytest.raises(errors.TensorMismatchError, match="num_attention_heads=4"):
        export_hf(f"{s3_root}/wrong", tmp_path / "no", config=model.config)


def test_defaults_of_arguments_that_nothing_reads_are_notes(tmp_path, llama):
    """Megatron's defaults are biases and tied embeddings, whatever the model is."""
    model, state = llama
    source = one_file_of_megatron_deepspeed(tmp_path / "run", state, True)
    report = export_hf(source, tmp_path / "hf", config=model.config)
    assert any("add_bias_linear=True" in note for note in report.notes)
    assert any("untie_embeddings" in note for note in report.notes)


def test_values_of_another_model_are_notes(tmp_path, llama):
    """A Lightning module may have sizes of a part that is not exported. Shapes show which."""
    model, state = llama
    file = lightning(tmp_path / "run", state, True)
    saved = torch.load(file, weights_only=False)
    saved["hyper_parameters"].update(hidden_size=512, num_attention_heads=2)
    torch.save(saved, file)
    report = export_hf(file, tmp_path / "hf", config=model.config)
    assert any("hidden_size=512" in note for note in report.notes)


def test_flat_parameters_by_the_names_of_transformers_are_compared(tmp_path, llama):
    """A Lightning module has the config's keys among its own, without a model_type."""
    model, state = llama
    file = lightning(tmp_path / "run", state, True)
    saved = torch.load(file, weights_only=False)
    flat = {**model.config.to_dict(), "lr": 0.1}
    del flat["model_type"]
    saved["hyper_parameters"] = flat
    torch.save(saved, file)
    report = export_hf(file, tmp_path / "hf", config=model.config)
    assert not any("hyper_parameters" in note for note in report.notes), report.notes
    for key, value in (("hidden_act", "gelu"), ("tie_word_embeddings", True)):
        torch.save({**saved, "hyper_parameters": {**flat, key: value}}, file)
        with pytest.raises(errors.TensorMismatchError, match=f"hyper_parameters .* have {key}="):
            export_hf(file, tmp_path / "no", config=model.config)
    other = {**flat, "hidden_size": 512, "hidden_act": "gelu"}  # of another part of the module
    torch.save({**saved, "hyper_parameters": other}, file)
    report = export_hf(file, tmp_path / "other", config=model.config)
    assert any("have hidden_act='gelu'" in note for note in report.notes)


@pytest.mark.parametrize("text", ["{", "[1]", '{"model_type": "llama"}', "[" * 100_000])
def test_a_config_that_is_none_is_no_obstacle(tmp_path, llama, text):
    model, state = llama
    (ours_with_a_file(tmp_path / "run", state, True) / "config.json").write_text(text)
    export_hf(tmp_path / "run", tmp_path / "hf", config=model.config)


def test_a_config_of_a_part_of_the_model_says_what_it_says(tmp_path, llama):
    """Of a model with images, its language model's."""
    model, state = llama
    whole = {"model_type": "llama", "text_config": config_of(False)}
    (hub(tmp_path / "run", state, True) / "config.json").write_text(json.dumps(whole))
    with pytest.raises(errors.TensorMismatchError, match="num_attention_heads=4"):
        export_hf(
            tmp_path / "run", tmp_path / "no", config=model.config,
            options=ExportOptions(against_model=False),
        )  # fmt: skip
