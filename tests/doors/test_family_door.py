"""A family of models that smckpt does not know comes in through `register_family`, or through an
entry point of an installed package: this file is that package, and uses public names alone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from smckpt import Parallel, errors, export_hf
from smckpt.translate import Family, LayoutRow, import_hf, register_family
from tests.support.limits import seconds

State = dict[str, torch.Tensor]
HEADS, GROUPS, SIZE, LAYERS, VOCABULARY = 8, 4, 16, 2, 96

# StableLM: Llama's names; norms with biases, and queries, keys and values with them on request.
_AT = "model.layers.{i}."
STABLELM = Family(
    "stablelm",
    (
        LayoutRow("model.embed_tokens.weight", ("embed",)),
        LayoutRow("lm_head.weight", ("head",)),
        *(
            row
            for kind, b in (("weight", ""), ("bias", "_b"))
            for row in (
                LayoutRow(f"model.norm.{kind}", (f"final_norm{b}",)),
                LayoutRow(f"{_AT}input_layernorm.{kind}", (f"norm1{b}",)),
                LayoutRow(f"{_AT}post_attention_layernorm.{kind}", (f"norm2{b}",)),
            )
        ),
        *(LayoutRow(f"{_AT}self_attn.{p}_proj.weight", (p,)) for p in "qkvo"),
        *(
            LayoutRow(f"{_AT}self_attn.{p}_proj.bias", (f"{p}_b",), when="use_qkv_bias")
            for p in "qkv"
        ),
        *(LayoutRow(f"{_AT}mlp.{p}_proj.weight", (p,)) for p in ("gate", "up", "down")),
    ),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Any, State, Path]:
    """A model with random weights, its tensors, and its directory."""
    from transformers import AutoModelForCausalLM, StableLmConfig

    config = StableLmConfig(
        hidden_size=HEADS * SIZE, intermediate_size=160, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=GROUPS, vocab_size=VOCABULARY,
        max_position_embeddings=64, use_qkv_bias=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    made = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    folder = tmp_path_factory.mktemp("stablelm")
    made.save_pretrained(folder)
    return made, load_file(folder / "model.safetensors"), folder


def megatron_rank(hub: State, rank: int, of: int) -> State:
    """What a tensor-parallel rank of Megatron-core holds, by its formulas."""
    out: State = {
        "embedding.word_embeddings.weight": hub["model.embed_tokens.weight"].chunk(of)[rank],
        "output_layer.weight": hub["lm_head.weight"].chunk(of)[rank],
        "decoder.final_layernorm.weight": hub["model.norm.weight"],
        "decoder.final_layernorm.bias": hub["model.norm.bias"],
    }
    for i in range(LAYERS):
        own, to = f"model.layers.{i}.", f"decoder.layers.{i}."
        for kind in ("weight", "bias"):
            q, k, v = (hub[f"{own}self_attn.{p}_proj.{kind}"] for p in "qkv")
            rest = q.shape[1:]
            by_group = [part.reshape(GROUPS, -1, *rest) for part in (q, k, v)]
            qkv = torch.cat(by_group, 1).reshape(-1, *rest)
            out[f"{to}self_attention.linear_qkv.{kind}"] = qkv.chunk(of)[rank]
            out[f"{to}self_attention.linear_qkv.layer_norm_{kind}"] = hub[
                f"{own}input_layernorm.{kind}"
            ]
            out[f"{to}mlp.linear_fc1.layer_norm_{kind}"] = hub[
                f"{own}post_attention_layernorm.{kind}"
            ]
        gate, up = (hub[f"{own}mlp.{p}_proj.weight"].chunk(of)[rank] for p in ("gate", "up"))
        out[f"{to}mlp.linear_fc1.weight"] = torch.cat([gate, up])
        for name, theirs in (("self_attention.linear_proj", "self_attn.o_proj"),
                             ("mlp.linear_fc2", "mlp.down_proj")):  # fmt: skip
            out[f"{to}{name}.weight"] = hub[f"{own}{theirs}.weight"].chunk(of, 1)[rank]
    return {name: tensor.contiguous().clone() for name, tensor in out.items()}


def written(folder: Path, hub: State, of: int) -> list[Path]:
    folder.mkdir()
    paths = [folder / f"rank{rank}.safetensors" for rank in range(of)]
    for rank, path in enumerate(paths):
        save_file(megatron_rank(hub, rank, of), path)
    return paths


def same(found: State, wanted: State) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_a_family_that_is_registered_is_exported_and_imported_bitwise(tmp_path, model):
    made, hub, directory = model
    paths = written(tmp_path / "ranks", hub, 4)
    register_family(STABLELM)
    report = export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=4), config=made.config)
    assert report.layout == "mcore_te"
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), hub)
    done = import_hf(directory, tmp_path / "back", Parallel("mcore_te", tp=4), prefix="")
    for rank, name in enumerate(done.files):
        assert same(load_file(tmp_path / "back" / name), megatron_rank(hub, rank, 4))


def test_a_row_that_a_config_denies_is_not_asked_for(tmp_path, model):
    """`when` names a key of the config."""
    made, hub, _ = model
    register_family(STABLELM)
    config = {**made.config.to_dict(), "use_qkv_bias": False}
    with pytest.raises(errors.CheckpointError, match=r"unexpected.*linear_qkv\.bias"):
        export_hf(
            written(tmp_path / "ranks", hub, 2), tmp_path / "hf", config=config,
            parallel=Parallel("mcore_te", tp=2),
        )  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "stablelm"])
def test_a_name_that_is_taken_is_refused(name):
    register_family(STABLELM)
    register_family(STABLELM)  # the same once more
    with pytest.raises(errors.UsageError, match=f"the family of models '{name}' exists already"):
        register_family(Family(name, STABLELM.rows[:3]))


def test_a_family_of_an_installed_package_is_found_by_its_entry_point(tmp_path, model):
    _, hub, directory = model
    site = installed(tmp_path, "smckpt.families", "stablelm = their_family:STABLELM")
    source = Path(__file__).read_text()
    table = source[source.index("_AT = ") : source.index("@pytest.fixture")]
    (site / "their_family.py").write_text(
        f"from smckpt.translate import Family, LayoutRow\n{table}"
    )
    paths = written(tmp_path / "ranks", hub, 2)
    told = export_with(site, *paths, tmp_path / "hf", "--tp", "2", "--config", directory)
    assert told.returncode == 0, told.stderr
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), hub)


@pytest.mark.parametrize(
    ("text", "said"),
    [("raise RuntimeError('broken')", "cannot be imported: broken"),
     ("STABLELM = 3", "is a int")],
)  # fmt: skip
def test_a_package_that_brings_no_family_is_named(tmp_path, model, text, said):
    _, hub, directory = model
    site = installed(tmp_path, "smckpt.families", "stablelm = their_family:STABLELM")
    (site / "their_family.py").write_text(text)
    paths = written(tmp_path / "ranks", hub, 2)
    told = export_with(site, *paths, tmp_path / "hf", "--tp", "2", "--config", directory)
    assert told.returncode
    assert "the family of models 'stablelm'" in " ".join(told.stderr.split())
    assert said in " ".join(told.stderr.split())


def test_a_package_that_brings_a_built_in_family_is_named(tmp_path, model):
    """It would be passed over. A family of another name is not concerned."""
    _, hub, directory = model
    site = installed(tmp_path, "smckpt.families", "llama = their_family:STABLELM")
    (site / "their_family.py").write_text("STABLELM = 3")  # never imported
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    paths = written(tmp_path / "ranks", hub, 2)
    told = export_with(site, *paths, tmp_path / "no", "--tp", "2", "--config", tmp_path)
    assert told.returncode
    said = "the family of models 'llama' is built in, and the package theirs brings another one"
    assert said in " ".join(told.stderr.split())
    assert not (tmp_path / "no").exists()
    told = export_with(site, *paths, tmp_path / "no", "--tp", "2", "--config", directory)
    assert "no table for the model type 'stablelm'" in " ".join(told.stderr.split())


def installed(folder: Path, group: str, point: str) -> Path:
    """A directory of packages with one whose metadata has an entry point."""
    site = folder / "site"
    info = site / "theirs-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{point}\n")
    return site


def export_with(site: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`smckpt export` where a directory of packages is installed."""
    path = os.pathsep.join([str(site), *map(os.path.abspath, sys.path)])
    code = textwrap.dedent("from smckpt.cli import main; main()")
    return subprocess.run(
        [sys.executable, "-c", code, "export", *map(str, arguments), "--no-against-model"],
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "400"}, capture_output=True, text=True,
        timeout=seconds(300),
    )  # fmt: skip
