"""A Hugging Face directory as a source, and what is not read, named for what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import smckpt
from smckpt import ExportOptions, Parallel, errors, export_hf, import_hf, verify_hf
from smckpt.cli.app import app
from tests.support.models import references
from tests.support.models.references import on_disk
from tests.translate.models.test_lora import llama as peft_llama

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Any, State]:
    model = references.model("llama")
    return model, on_disk(model, tmp_path_factory.mktemp("llama"))


def loaded(directory: Path) -> State:
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same(directory: Path, wanted: State) -> None:
    found = loaded(directory)
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def directory_of(folder: Path, model: Any, state: State, kind: str) -> Path:
    size = "100KB" if kind.startswith("sharded") else "5GB"
    model.save_pretrained(folder, max_shard_size=size)
    if kind.endswith("bin"):
        for file in folder.glob("*.safetensors"):
            name = file.name.replace("model", "pytorch_model", 1).replace(".safetensors", ".bin")
            torch.save(load_file(file), folder / name)
            file.unlink()
        for index in folder.glob("*.index.json"):
            body = json.loads(index.read_text())
            body["weight_map"] = {
                n: f.replace("model", "pytorch_model", 1).replace(".safetensors", ".bin")
                for n, f in body["weight_map"].items()
            }
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps(body))
            index.unlink()
    return folder


@pytest.mark.parametrize("kind", ["safetensors", "sharded", "bin", "sharded bin"])
def test_a_directory_is_cast_and_sharded_anew(tmp_path, llama, kind):
    model, state = llama
    source = directory_of(tmp_path / "own", model, state, kind)
    report = export_hf(source, tmp_path / "hf", options=ExportOptions(max_shard_size="50KB"))
    assert report.source == "a Hugging Face directory" and len(report.files) > 3
    assert_same(tmp_path / "hf", state)
    export_hf(source, tmp_path / "half", dtype="bfloat16")
    assert_same(tmp_path / "half", {n: t.bfloat16() for n, t in state.items()})
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_names_in_memory_become_released_ones(tmp_path):
    """Experts packed, as transformers 5 has them, in a directory that somebody wrote by hand."""
    model = references.model("mixtral")
    state = on_disk(model, tmp_path / "released")
    (tmp_path / "own").mkdir()
    memory = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert memory.keys() != state.keys()
    save_file(memory, tmp_path / "own" / "model.safetensors")
    (tmp_path / "own" / "config.json").write_text(
        (tmp_path / "released" / "config.json").read_text()
    )
    export_hf(tmp_path / "own", tmp_path / "hf")
    assert_same(tmp_path / "hf", state)


def test_a_missing_file_of_the_index_is_told(tmp_path, llama):
    model, state = llama
    source = directory_of(tmp_path / "own", model, state, "sharded")
    next(source.glob("*.safetensors")).unlink()
    with pytest.raises(errors.CheckpointError, match="is missing"):
        export_hf(source, tmp_path / "hf")
    with pytest.raises(errors.UsageError, match="out_dir is the directory of"):
        export_hf(source, source, options=ExportOptions(overwrite=True))


def named_by_config(folder: Path, llama: tuple[Any, State], name: str) -> tuple[Path, State]:
    """A directory with two models, of which transformers loads the one that the config names."""
    model, state = llama
    model.save_pretrained(folder)
    wanted = {key: tensor + 1 for key, tensor in state.items()}
    if name.endswith("index.json"):
        halves = (sorted(wanted)[::2], sorted(wanted)[1::2])
        for number, keys in enumerate(halves):
            part = {key: wanted[key] for key in keys}
            save_file(part, folder / f"b{number}.safetensors", {"format": "pt"})
        where = {
            key: f"b{number}.safetensors" for number, keys in enumerate(halves) for key in keys
        }
        (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    elif name.endswith(".safetensors"):
        save_file(wanted, folder / name, {"format": "pt"})
    else:
        torch.save(wanted, folder / name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "transformers_weights": name, "unused": float("inf")})
    )
    return folder, wanted


@pytest.mark.parametrize("name", ["b.safetensors", "b.safetensors.index.json", "adapter_model.bin"])
def test_the_weights_that_the_config_names_are_read(tmp_path, llama, name):
    source, wanted = named_by_config(tmp_path / "own", llama, name)
    theirs = AutoModelForCausalLM.from_pretrained(source).state_dict()
    assert [key for key in wanted if not torch.equal(theirs[key], wanted[key])] == []
    export_hf(source, tmp_path / "hf")
    assert_same(tmp_path / "hf", wanted)
    import_hf(source, tmp_path / "in", Parallel("mcore_te", tp=2))
    export_hf(tmp_path / "in", tmp_path / "again")
    assert_same(tmp_path / "again", wanted)
    assert verify_hf(source, against=tmp_path / "in").ok
    (source / "b0.safetensors" if name.endswith("json") else source / name).unlink()
    with pytest.raises(errors.CorruptCheckpointError, match="is missing, which"):
        export_hf(source, tmp_path / "none")


@pytest.mark.parametrize("name", ["b.bin", "../b.safetensors", "sub/b.safetensors", "", 3])
def test_weights_that_the_config_cannot_name_are_refused(tmp_path, llama, name):
    source, _ = named_by_config(tmp_path / "own", llama, "b.safetensors")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "transformers_weights": name}))
    with pytest.raises(errors.CorruptCheckpointError, match="transformers_weights"):
        export_hf(source, tmp_path / "hf")


@pytest.mark.parametrize("form", ["byte order mark", "UTF-16", "cut short"])
def test_a_config_that_cannot_be_read_may_name_weights(tmp_path, llama, form):
    """model.safetensors was taken in place of what it names. transformers refuses the file too."""
    source, _ = named_by_config(tmp_path / "own", llama, "b.safetensors")
    config = source / "config.json"
    text = config.read_text()
    forms = {"byte order mark": b"\xef\xbb\xbf" + text.encode(), "UTF-16": text.encode("utf-16")}
    config.write_bytes(forms.get(form, text[:-3].encode()))
    with pytest.raises(OSError, match="config"):
        AutoModelForCausalLM.from_pretrained(source)
    with pytest.raises(errors.CorruptCheckpointError, match="cannot be read, and it may name"):
        export_hf(source, tmp_path / "hf")
    config.unlink()
    assert export_hf(source, tmp_path / "hf").tensors


def test_an_adapter_beside_the_weights_is_noted(tmp_path, llama):
    """transformers adds it to the model that it loads."""
    model, state = llama
    model.save_pretrained(tmp_path / "own")
    peft_llama().save_pretrained(tmp_path / "own")
    report = export_hf(tmp_path / "own", tmp_path / "hf")
    assert any("adapter_model.safetensors beside the weights" in note for note in report.notes)
    assert_same(tmp_path / "hf", state)


OTHERS = {  # the name of a file, how it begins, what it is called
    "model.gguf": (b"GGUF\3\0\0\0", "GGUF"), "ggml-model-q4_0.bin": (b"tjgg", "before GGUF"),
    "w.npz": (None, r"\.npz"), "w.npy": (b"\x93NUMPY\1\0", "NumPy"),
    "tf_model.h5": (b"\x89HDF\r\n\x1a\n", "HDF5"),
    "m.keras": (b"PK\3\4" + bytes(26) + b"metadata.json", "HDF5"),
    "flax_model.msgpack": (b"\x82\xa5", "Flax"),
    "model.onnx": (b"\x08\x07", "ONNX"), "rank0.engine": (b"ptrt", "TensorRT"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("alone", [True, False])
def test_other_formats_are_named(tmp_path, name, alone):
    """As a file, and as a directory with it."""
    (tmp_path / "model").mkdir()
    path, (begins, named) = tmp_path / "model" / name, OTHERS[name]
    if begins is None:
        np.savez(path, **{"w": np.zeros((3, 4))})
    else:
        path.write_bytes(begins + bytes(64))
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    readers = [lambda at: export_hf(at, tmp_path / "hf")]
    if alone:
        readers += [lambda at: smckpt.load(None, checkpoint_id=str(at), no_dist=True),
                    lambda at: smckpt.convert(at, tmp_path / "out", to="dcp")]  # fmt: skip
    for read in readers:
        with pytest.raises(errors.CheckpointError, match=f"{named}.* does not read. What to do: "):
            read(path if alone else path.parent)


@pytest.mark.parametrize("nested", [True, False])
def test_megatrons_names_before_core_are_named(tmp_path, nested):
    own = {"layers.0.self_attention.query_key_value.weight": torch.zeros(24, 8),
           "layers.0.mlp.dense_h_to_4h.weight": torch.zeros(32, 8)}  # fmt: skip
    words = {"word_embeddings": {"weight": torch.zeros(16, 8)}}
    model: Any = {"language_model": {"embedding": words, "encoder": own}}
    if not nested:
        model = {f"language_model.encoder.{n}": t for n, t in own.items()}
        model["language_model.embedding.word_embeddings.weight"] = words["word_embeddings"][
            "weight"
        ]
    torch.save({"model": model, "iteration": 5}, tmp_path / "model_optim_rng.pt")
    with pytest.raises(errors.UsageError, match="before Megatron-core"):
        export_hf(tmp_path / "model_optim_rng.pt", tmp_path / "hf")


def test_programs_and_whole_modules_are_named(tmp_path, llama):
    model, _ = llama
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "program.pt")
    torch.save(model, tmp_path / "module.pt")
    for name, text in (("program", "TorchScript"), ("module", "LlamaForCausalLM.*state_dict()")):
        with pytest.raises(errors.UsageError, match=text):
            export_hf(tmp_path / f"{name}.pt", tmp_path / "hf")


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int32, torch.int64],
)
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_quantized_weights_without_scales_are_named(tmp_path, llama, dtype, suffix):
    model, state = llama
    odd = {n: t.to(dtype) if "q_proj" in n else t for n, t in state.items()}
    path = tmp_path / f"model.{suffix}"
    torch.save(odd, path) if suffix == "pt" else save_file(odd, path)
    with pytest.raises(errors.CheckpointError, match=r"q_proj.*no scales"):
        export_hf(path, tmp_path / "hf", config=model.config)


@pytest.mark.parametrize("scale", ["", "_scale_inv", "_scale"])
def test_experts_in_one_tensor_need_scales_too(tmp_path, scale):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    state = {name: torch.ones(2, 8, 4).to(torch.float8_e4m3fn), "model.norm.weight": torch.ones(4)}
    save_file({**state, **({name + scale: torch.ones(2, 1, 1)} if scale else {})},
              tmp_path / "model.safetensors")  # fmt: skip
    if scale:
        report = export_hf(tmp_path / "model.safetensors", tmp_path / "hf")
        assert report.tensors == 3
        return
    with pytest.raises(errors.UsageError, match=r"experts.gate_up_proj.*no scales"):
        export_hf(tmp_path / "model.safetensors", tmp_path / "hf")


def test_half_precision_of_two_kinds_is_noted(tmp_path, llama):
    """A header that says F16 of BF16 gives other numbers, of the same size."""
    model, state = llama
    state = {name: tensor.bfloat16() for name, tensor in state.items()}
    for name, noted in (("one", False), ("two", True)):
        (tmp_path / name).mkdir()
        last = {"lm_head.weight": state["lm_head.weight"].view(torch.float16)} if noted else {}
        save_file({**state, **last}, tmp_path / name / "model.safetensors")
        report = export_hf(tmp_path / name, tmp_path / f"{name}-hf", config=model.config)
        assert ("lm_head.weight in float16" in "".join(report.notes)) is noted


def test_a_dtype_of_safetensors_that_is_not_read_is_named(tmp_path, llama):
    """As the factors of some releases have it. Publishing reads no values."""
    model, state = llama
    folder = tmp_path / "release"
    model.config.save_pretrained(folder)
    factors = {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(2, 2)}
    odd = {name: factor.to(torch.float8_e8m0fnu) for name, factor in factors.items()}
    save_file({**state, **odd}, folder / "model.safetensors")
    with pytest.raises(errors.UsageError, match=r"has the dtype F8_E8M0.*to do: pass the model in"):
        export_hf(folder, tmp_path / "hf")
    report = smckpt.publish(folder, tmp_path / "published")
    assert report.number == 0


def test_quantized_weights_without_their_settings_are_noted(tmp_path, llama):
    """As bitsandbytes keeps four bits."""
    model, state = llama
    found = dict(state)
    for name in [name for name in state if "q_proj" in name]:
        found[name] = torch.zeros(state[name].numel() // 2, 1, dtype=torch.uint8)
        found[f"{name}.absmax"], found[f"{name}.quant_map"] = torch.ones(8), torch.ones(16)
    torch.save(found, tmp_path / "model.pt")
    report = export_hf(tmp_path / "model.pt", tmp_path / "hf", config=model.config)
    assert any("no quantization_config" in note for note in report.notes)
    config = {**model.config.to_dict(), "quantization_config": {"quant_method": "bitsandbytes"}}
    report = export_hf(tmp_path / "model.pt", tmp_path / "with", config=config)
    assert not any("no quantization_config" in note for note in report.notes)


def test_scales_of_another_kind_are_named(tmp_path, llama):
    """As compressed-tensors and ModelOpt write float8."""
    model, state = llama
    odd = {n: t.to(torch.float8_e4m3fn) if "q_proj" in n else t for n, t in state.items()}
    scales = {f"{n}_scale": torch.ones(1) for n in odd if "q_proj" in n}
    save_file({**odd, **scales}, tmp_path / "model.safetensors")
    model.config.save_pretrained(tmp_path)
    for act in (lambda: export_hf(tmp_path, tmp_path / "hf"),
                lambda: import_hf(tmp_path, tmp_path / "in", Parallel("mcore_te"))):  # fmt: skip
        with pytest.raises(errors.UsageError, match=r"q_proj.weight_scale.*compressed-tensors"):
            act()
    torch.save({**odd, "input_scale": torch.ones(1)}, tmp_path / "model.pt")  # of nothing here
    with pytest.raises(errors.UsageError, match=r"q_proj.*no scales"):
        export_hf(tmp_path / "model.pt", tmp_path / "no", config=model.config)


HEADS = (
    ("v_head.summary.weight", "v_head.summary.bias"), ("value_head.0.weight",),
    ("critic_head.weight",), ("score.weight",), ("critic.weight",),
    ("value.0.weight", "value.0.bias"),
    ("rm_head.weight",), ("reward.out_proj.weight",),
)  # fmt: skip


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head[0])
def test_a_value_head_is_left_out_with_a_note(tmp_path, llama, head):
    """As TRL's AutoModelForCausalLMWithValueHead names it, with and without its attribute, and
    others; beside Megatron's names too."""
    model, state = llama
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    more = dict.fromkeys(head, torch.ones(1, 64))
    below = {f"pretrained_model.{name}": tensor for name, tensor in state.items()}
    for number, held in enumerate((state, below, {"model": references.mcore(state, 1, 0)})):
        inner = held.get("model", held)
        path, out = tmp_path / f"{number}.bin", tmp_path / f"hf{number}"
        torch.save({"model": {**inner, **more}}, path)
        report = export_hf(path, out, config=config)
        assert any("value head" in note for note in report.notes)
        assert set(more) <= set(report.left_out)
        assert_same(out, state)
    classifier = {**config, "architectures": ["LlamaForSequenceClassification"]}
    if head[0].partition(".")[0] in ("score", "critic", "value", "rm_head", "reward"):  # its own
        kept = {**{n: t for n, t in state.items() if n != "lm_head.weight"}, **more}
        torch.save(kept, tmp_path / "c.bin")
        export_hf(
            tmp_path / "c.bin",
            tmp_path / "c",
            config=classifier,
            options=ExportOptions(against_model=False),
        )
        assert_same(tmp_path / "c", kept)


@pytest.mark.parametrize("head", ["score.weight", "v_head.summary.weight"])
@pytest.mark.parametrize("against", [True, False])
def test_a_reward_model_under_the_config_of_a_language_model_is_named(
    tmp_path, llama, head, against
):
    model, state = llama
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    held = {n: t for n, t in state.items() if n != "lm_head.weight"} | {head: torch.ones(1, 64)}
    torch.save(held, tmp_path / "m.pt")
    options = ExportOptions(against_model=against)
    with pytest.raises(errors.UsageError, match=f"{head} are the head of a reward model"):
        export_hf(tmp_path / "m.pt", tmp_path / "hf", config=config, options=options)
    assert not (tmp_path / "hf").exists()


def test_a_snapshot_in_the_hubs_cache_is_a_source_with_its_config(tmp_path, llama):
    """Its files are links to blobs; links to elsewhere are not followed."""
    model, state = llama
    model.save_pretrained(tmp_path / "own")
    blobs, place = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b/snapshots/rev"
    blobs.mkdir(parents=True)
    place.mkdir(parents=True)
    for number, file in enumerate(sorted((tmp_path / "own").iterdir())):
        (blobs / f"{number}").write_bytes(file.read_bytes())
        (place / file.name).symlink_to(Path("..", "..", "blobs", f"{number}"))
    export_hf(place, tmp_path / "hf", dtype="bfloat16")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "llama"
    import_hf(place, tmp_path / "in", Parallel("mcore_te", tp=2))
    export_hf(tmp_path / "in", tmp_path / "again")
    assert_same(tmp_path / "again", state)
    (place / "config.json").unlink()
    (place / "config.json").symlink_to(tmp_path / "own" / "config.json")
    report = export_hf(place, tmp_path / "none")
    assert any("no config was given" in note for note in report.notes)
    assert not (tmp_path / "none" / "config.json").exists()


def test_every_command_says_what_a_directory_is(tmp_path, llama):
    model, state = llama
    on_disk(model, tmp_path / "hub")
    tuned = peft_llama()
    tuned.save_pretrained(tmp_path / "peft")
    for name, format, count in (("hub", "a Hugging Face directory", len(state)),
                                ("peft", "a directory of PEFT", 8)):  # fmt: skip
        shown = CliRunner().invoke(app, ["show", str(tmp_path / name), "--json"])
        facts = json.loads(shown.output)
        assert facts["format"] == format and len(facts["tensors"]) == count
        checked = CliRunner().invoke(app, ["verify", str(tmp_path / name)])
        assert checked.exit_code == 0 and f"{count} tensors" in checked.output, checked.output
        out = tmp_path / f"{name}.pt"
        made = CliRunner().invoke(app, ["convert", str(tmp_path / name), str(out), "--to", "torch"])
        assert made.exit_code == 0 and len(torch.load(out)) == count, made.output
