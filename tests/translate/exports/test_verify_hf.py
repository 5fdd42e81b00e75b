"""`verify --hf`: an exported model that would not serve is found out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from smckpt import ExportOptions, Parallel, ParallelState, errors, export_hf, verify_hf
from tests.support.limits import seconds, within
from tests.support.models import hub_families, references, shards


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def checkpoint(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = model.state_dict()
    folder = tmp_path_factory.mktemp("verify") / "ckpt"
    return shards.write(folder, 2, lambda rank: shards.fsdp2(state, rank, 2))


@pytest.fixture
def exported(model: Any, checkpoint: Path, tmp_path: Path) -> Path:
    export_hf(
        checkpoint,
        tmp_path / "hf",
        config=model.config,
        options=ExportOptions(max_shard_size="40KB"),
    )
    return tmp_path / "hf"


def alter(folder: Path, change: Any) -> None:
    """Rewrite the file that holds layer 1's gate with a change."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path = folder / index["weight_map"]["model.layers.1.mlp.gate_proj.weight"]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_good_export_passes_all_three_questions(exported, checkpoint, model, tmp_path):
    model.save_pretrained(tmp_path / "reference")
    report = verify_hf(exported, against=checkpoint, reference=tmp_path / "reference")
    assert report.problems == ()
    assert report.compared == report.tensors == len(model.state_dict())
    assert report.logits == 0.0


def test_a_tensor_parallel_checkpoint_is_held_against_what_its_layout_makes(model, tmp_path):
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    state["lm_head.weight"] = state["lm_head.weight"].clone()
    cuts = [references.te(state, 2, rank, rows=96) for rank in range(2)]
    topology = ParallelState(2, tensor_parallel_degree=2).to_json()
    path = shards.write(
        tmp_path / "c", 2, lambda rank: shards.own(cuts[rank], rank), topology=topology
    )
    model.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    report = verify_hf(tmp_path / "hf", against=path)
    assert report.problems == () and report.compared == len(state)
    alter(tmp_path / "hf", lambda t: t["model.layers.1.mlp.gate_proj.weight"][3, 2:3].add_(1))
    (problem,) = verify_hf(tmp_path / "hf", against=path).problems
    assert problem.startswith("model.layers.1.mlp.gate_proj.weight: differs")


def test_a_layout_that_names_do_not_tell_can_be_said(model, tmp_path):
    """Of three that names do not tell apart, and of degrees that were not recorded."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    state["lm_head.weight"] = state["lm_head.weight"].clone()
    cuts = [references.te(state, 1, 0, rows=96, fused="per_rank")]
    path = shards.write(tmp_path / "c", 1, lambda rank: shards.own(cuts[rank], rank))
    model.save_pretrained(tmp_path / "hf")
    with pytest.raises(errors.UsageError, match="te_fused, te_fused_interleaved"):
        verify_hf(tmp_path / "hf", against=path)
    assert (
        verify_hf(
            tmp_path / "hf", against=path, parallel=Parallel(layout="te_fused", tp=1)
        ).problems
        == ()
    )
    wrong = verify_hf(
        tmp_path / "hf", against=path, parallel=Parallel(layout="te_fused_interleaved")
    ).problems
    assert any("q_proj.weight: differs" in problem for problem in wrong)
    with pytest.raises(errors.UsageError, match="layout= has no effect without against="):
        verify_hf(tmp_path / "hf", parallel=Parallel(layout="te_fused"))


def test_a_tied_head_that_the_directory_lacks_is_compared_too(tmp_path):
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        vocab_size=96, tie_word_embeddings=True,
    )  # fmt: skip
    tied = AutoModelForCausalLM.from_config(config)
    tied.save_pretrained(tmp_path / "hf")
    state = {name: tensor.detach().clone() for name, tensor in tied.state_dict().items()}
    for number in range(2):
        state["lm_head.weight"][5] += number
        path = shards.write(tmp_path / f"c{number}", 1, lambda r: shards.fsdp2(state, r, 1))
        problems = verify_hf(tmp_path / "hf", against=path).problems
        assert len(problems) == number
    assert "lm_head.weight and model.embed_tokens.weight differ" in problems[0]


def test_a_cast_export_equals_the_checkpoint_after_the_cast(checkpoint, model, tmp_path):
    export_hf(checkpoint, tmp_path / "hf", config=model.config, dtype="bfloat16")
    assert verify_hf(tmp_path / "hf", against=checkpoint).ok


def test_one_changed_bit_is_named(exported, checkpoint):
    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.gate_proj.weight"].view(torch.int32)[3, 5] ^= 1

    alter(exported, flip)
    assert verify_hf(exported).ok  # it loads all the same
    report = verify_hf(exported, against=checkpoint)
    assert len(report.problems) == 1
    assert report.problems[0].startswith("model.layers.1.mlp.gate_proj.weight: differs")


def test_two_swapped_tensors_are_named_and_show_in_the_logits(
    exported, checkpoint, model, tmp_path
):
    model.save_pretrained(tmp_path / "reference")
    for path in (*exported.glob("*.safetensors"), exported / "model.safetensors.index.json"):
        path.unlink()
    state = model.state_dict()
    gate, up = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))
    state[gate], state[up] = state[up], state[gate]
    save_file(state, exported / "model.safetensors", metadata={"format": "pt"})
    report = verify_hf(exported, against=checkpoint, reference=tmp_path / "reference")
    assert [p.split(": ")[0].split(" by up to")[0] for p in report.problems] == [
        "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight",
        "logits differ from the reference's",
    ]  # fmt: skip


def test_a_wrong_config_field_shows_in_the_logits_alone(exported, checkpoint, model, tmp_path):
    model.save_pretrained(tmp_path / "reference")
    config = json.loads((exported / "config.json").read_text())
    config["rope_theta"] = 1e6
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    (exported / "config.json").write_text(json.dumps(config))
    assert verify_hf(exported, against=checkpoint).ok
    report = verify_hf(exported, reference=tmp_path / "reference")
    assert [p.split(" by up to")[0] for p in report.problems] == [
        "logits differ from the reference's"
    ]


def test_a_head_that_the_config_ties_and_that_differs_is_a_problem(exported):
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    (told,) = verify_hf(exported).problems
    assert "lm_head.weight and model.embed_tokens.weight differ" in told


def test_a_lost_tensor_is_missing_in_the_index_and_in_transformers(exported):
    alter(exported, lambda tensors: tensors.pop("model.layers.1.mlp.gate_proj.weight"))
    with pytest.raises(errors.CorruptCheckpointError, match="but no file has them"):
        verify_hf(exported)
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.layers.1.mlp.gate_proj.weight"]
    (exported / "model.safetensors.index.json").write_text(json.dumps(index))
    (problem,) = verify_hf(exported).problems
    assert "missing_keys: ['model.layers.1.mlp.gate_proj.weight']" in problem


@pytest.mark.parametrize("family", ["mixtral", "minimax"])
def test_names_that_only_transformers_5_has_in_memory_are_a_problem(tmp_path, family):
    """Of a family with a table, and of one without. transformers 5 itself loads them."""
    model = references.model(family) if family == "mixtral" else hub_families.model(family)
    model.save_pretrained(tmp_path / "hub")
    assert verify_hf(tmp_path / "hub").ok
    model.save_pretrained(tmp_path / "memory", save_original_format=False)
    (problem,) = verify_hf(tmp_path / "memory", reference=tmp_path / "hub").problems
    assert "names are not those of released models" in problem and "gate_up_proj" in problem


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(errors.UsageError, match=r"none of model.safetensors"):
        verify_hf(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_pipe_in_the_directory_is_told_and_not_read(exported, name):
    (exported / name).unlink(missing_ok=True)
    os.mkfifo(exported / name)
    with within(seconds(60)):
        assert verify_hf(exported).problems == (f"{name} is a pipe or device, not a file",)


@pytest.mark.parametrize(
    ("name", "said"), [("generation_config.json", "bytes; a file beside"),
                       ("tokenizer.json", "leads nowhere"), ("config.json", "leads nowhere")]
)  # fmt: skip
def test_what_is_too_large_or_leads_nowhere_is_told_and_not_read(exported, name, said):
    path = exported / name
    path.unlink(missing_ok=True)
    if said == "leads nowhere":
        path.symlink_to("nowhere")
    else:
        path.touch()
        os.truncate(path, 1 << 33)
    with within(seconds(60)):
        (problem,) = verify_hf(exported).problems
    assert name in problem and said in problem


def test_the_command_exits_with_1_when_the_model_is_bad(exported, checkpoint):
    command = [sys.executable, "-m", "smckpt.cli", "verify", "--hf", str(exported)]
    command += ["--against", str(checkpoint), "--json"]
    good = subprocess.run(command, capture_output=True, text=True, timeout=seconds(120))
    assert good.returncode == 0, good.stderr
    assert "Loading" not in good.stderr  # transformers' own progress bar
    assert json.loads(good.stdout)["ok"]
    alter(exported, lambda t: t["model.layers.1.mlp.gate_proj.weight"].zero_())
    bad = subprocess.run(command, capture_output=True, text=True, timeout=seconds(120))
    assert bad.returncode == 1
    assert len(json.loads(bad.stdout)["problems"]) == 1
