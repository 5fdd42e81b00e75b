"""What must not become a model in silence: names and shapes of another one, NaN, mixed dtypes,
shards that are missing or of another step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from smckpt import ExportOptions, ImportOptions, Parallel, errors, export_hf, import_hf, verify_hf
from smckpt.cli.app import app
from smckpt.translate.config import read_config
from smckpt.translate.models.lora import read_lora_config
from smckpt.translate.models.meta_model import compare
from tests.support import child
from tests.support.limits import seconds
from tests.support.models import references as ref
from tests.support.models import shards

State = dict[str, torch.Tensor]


@cache
def _model(family: str = "llama") -> Any:
    return ref.model(family)


def state_of(family: str = "llama") -> State:
    return {name: tensor.clone() for name, tensor in _model(family).state_dict().items()}


def saved(folder: Path, state: State, world: int = 1) -> Path:
    return shards.write(folder / "ckpt", world, lambda r: shards.fsdp2(state, r, world))


# -- another model than the config's ---------------------------------------------------------------


def test_missing_unexpected_and_misshapen_tensors_are_all_listed(tmp_path):
    state = state_of()
    state["model.layers.0.surprise"] = state.pop("model.layers.1.mlp.up_proj.weight")
    state["model.norm.weight"] = torch.ones(32)
    with pytest.raises(errors.KeysMismatchError) as caught:
        export_hf(saved(tmp_path, state), tmp_path / "hf", config=_model().config)
    assert "LlamaForCausalLM" in str(caught.value)
    for text in (
        "model.layers.1.mlp.up_proj.weight is missing",
        "model.layers.0.surprise is unexpected",
        "model.norm.weight has the shape (32,), not (64,)",
    ):
        assert text in str(caught.value)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("field", "value"), [("vocab_size", 128), ("intermediate_size", 176), ("num_hidden_layers", 3)]
)
def test_a_config_that_contradicts_the_shapes_is_refused(tmp_path, field, value):
    checkpoint = saved(tmp_path, state_of())
    config = {**_model().config.to_dict(), field: value}
    with pytest.raises(errors.KeysMismatchError, match=r"not \(|is missing"):
        export_hf(checkpoint, tmp_path / "hf", config=config)
    export_hf(
        checkpoint, tmp_path / "hf", config=config, options=ExportOptions(against_model=False)
    )


def test_experts_one_by_one_and_packed_are_both_the_models_own():
    model = _model("qwen3_moe")
    memory = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    disk = {n: shape for n, shape in memory.items() if ".experts." not in n}
    for i in range(2):
        for e in range(8):
            at = f"model.layers.{i}.mlp.experts.{e}."
            disk |= {f"{at}{part}_proj.weight": (48, 64) for part in ("gate", "up")}
            disk[f"{at}down_proj.weight"] = (64, 48)
    for shapes in (memory, disk):
        found = compare(model.config.to_dict(), shapes)
        assert (found.kind, found.lines) == ("Qwen3MoeForCausalLM", ())
        hub = {tensor.name: tensor.shape for tensor in found.hub or ()}
        assert hub == ({} if shapes is disk else disk)


def test_a_model_that_transformers_does_not_know_is_exported_with_a_note(tmp_path):
    checkpoint = saved(tmp_path, {"w": torch.randn(3, 4)})
    report = export_hf(checkpoint, tmp_path / "hf", config={"model_type": "ours"})
    assert any("not compared" in note and "ours" in note for note in report.notes)


def test_an_export_without_torch_is_compared_by_a_child_and_leaves_nothing(tmp_path):
    """An old model is not touched before it has said what the names are."""
    state = state_of()
    state["model.norm.weight"] = torch.ones(32)
    _model().config.save_pretrained(tmp_path / "config")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "model.safetensors").write_bytes(b"old")
    code = """
    import sys
    from smckpt import ExportOptions, errors, export_hf
    checkpoint, new, old, config = sys.argv[1:]
    moved = []
    for out, overwrite in (new, False), (old, True):
        try:
            options = ExportOptions(overwrite=overwrite, progress=lambda *done: moved.append(out))
            export_hf(checkpoint, out, config=config, options=options)
        except errors.KeysMismatchError as error:
            print("model.norm.weight has the shape (32,)" in str(error), "torch" in sys.modules)
    print(old in moved)
    """
    checkpoint = saved(tmp_path, state)
    arguments = (str(tmp_path / name) for name in ("new", "old", "config"))
    told = child.run(code, str(checkpoint), *arguments, timeout=200)
    assert told.split("\n") == ["True False", "True False", "False"]
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "old" / "model.safetensors").read_bytes() == b"old"


def test_what_the_familys_own_table_says_needs_no_transformers(tmp_path):
    """Its import takes seconds. A fake one, which cannot be imported, is only asked where the table
    does not fit, or is not ours."""
    fake = tmp_path / "site" / "transformers"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("raise RuntimeError('imported')")
    _model().config.save_pretrained(tmp_path / "config")
    less = {n: t for n, t in state_of().items() if n != "model.norm.weight"}
    code = """
    import json, sys
    sys.path.insert(0, sys.argv[1])
    from pathlib import Path
    from smckpt import export_hf
    config = json.loads(Path(sys.argv[2], "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    other = {**config, "architectures": ["LlamaForSequenceClassification"]}
    for number, (checkpoint, config) in enumerate(
        [(sys.argv[3], config), (sys.argv[3], other), (sys.argv[4], config)]
    ):
        print(export_hf(checkpoint, f"{sys.argv[5]}{number}", config=config).notes)
    """
    whole, short = saved(tmp_path / "whole", state_of()), saved(tmp_path / "short", less)
    arguments = (tmp_path / "site", tmp_path / "config", whole, short, tmp_path / "hf")
    told = child.run(code, *map(str, arguments), timeout=200).split("\n")
    assert "generation_config" in told[0] and "transformers failed" not in told[0]
    assert all("transformers failed: RuntimeError: imported" in note for note in told[1:])


# -- NaN and infinity ------------------------------------------------------------------------------


def spoiled() -> State:
    state = {"fine": torch.randn(300), "ids": torch.full((4,), 1 << 62)}
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        tensor = torch.full((200_000,), torch.finfo(dtype).max, dtype=dtype)
        tensor[[1, 150_000]] = torch.tensor([torch.nan, -torch.inf], dtype=dtype)
        state[str(dtype).removeprefix("torch.")] = tensor
    state["e5m2"] = torch.tensor([1.0, torch.inf, -torch.nan]).to(torch.float8_e5m2)
    state["e4m3"] = torch.tensor([448.0, -torch.nan, torch.nan]).to(torch.float8_e4m3fn)
    return state


def test_nan_and_infinity_are_counted_by_name_and_refused(tmp_path):
    checkpoint = saved(tmp_path, spoiled())
    with pytest.raises(errors.UsageError, match="6 tensors have NaN or infinite") as caught:
        export_hf(checkpoint, tmp_path / "hf")
    assert "bfloat16 (2)" in str(caught.value) and "allow_nonfinite=True" in str(caught.value)
    assert list((tmp_path / "hf").glob("*")) == []
    report = export_hf(checkpoint, tmp_path / "hf", options=ExportOptions(allow_nonfinite=True))
    assert report.nonfinite == dict.fromkeys(
        ("bfloat16", "e4m3", "e5m2", "float16", "float32", "float64"), 2
    )
    assert any("NaN" in note for note in report.notes)
    assert load_file(tmp_path / "hf" / "model.safetensors")["float32"][1].isnan()


def test_nan_in_a_translated_model_is_named_as_the_export_names_it(tmp_path):
    model = _model()
    state = ref.on_disk(model, tmp_path)
    shard = ref.mcore(state, 1, 0)
    shard["decoder.layers.1.mlp.linear_fc1.weight"][0, 3] = torch.nan
    save_file(shard, tmp_path / "rank.safetensors")
    with pytest.raises(errors.UsageError, match=r"model\.layers\.1\.mlp\.gate_proj\.weight \(1\)"):
        export_hf([tmp_path / "rank.safetensors"], tmp_path / "hf", config=model.config)


def test_nan_in_a_model_that_is_imported_is_counted_and_refused(tmp_path):
    state = ref.on_disk(_model(), tmp_path / "hub")
    state["model.layers.1.mlp.gate_proj.weight"][[0, 159], 3] = torch.nan  # of both ranks
    state["model.norm.weight"][5] = torch.inf  # of which each has a copy
    save_file(state, tmp_path / "hub" / "model.safetensors")
    fc1, norm = (
        "model.decoder.layers.1.mlp.linear_fc1.weight",
        "model.decoder.final_layernorm.weight",
    )
    with pytest.raises(errors.UsageError, match="2 tensors have NaN or infinite") as caught:
        import_hf(tmp_path / "hub", tmp_path / "ranks", Parallel("mcore_te", tp=2))
    assert f"{fc1} (2)" in str(caught.value) and "allow_nonfinite=True" in str(caught.value)
    assert list((tmp_path / "ranks").glob("*")) == []
    report = import_hf(
        tmp_path / "hub",
        tmp_path / "ranks",
        Parallel("mcore_te", tp=2),
        options=ImportOptions(allow_nonfinite=True),
    )
    assert report.nonfinite == {fc1: 2, norm: 2}
    assert any("NaN" in note for note in report.notes)


def test_the_command_refuses_nan_unless_it_is_told(tmp_path):
    checkpoint = saved(tmp_path, {"w": torch.tensor([1.0, torch.nan])})
    command = [sys.executable, "-m", "smckpt.cli", "export", str(checkpoint), str(tmp_path / "hf")]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=seconds(60))
    assert refused.returncode == 2 and "w (1)" in refused.stderr.replace("\n", " ")
    command += ["--allow-nonfinite", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds(60))
    assert json.loads(done.stdout)["nonfinite"] == {"w": 1}


# -- parts that do not belong together -------------------------------------------------------------


def test_ranks_whose_dtypes_differ_are_refused(tmp_path):
    model = _model()
    cuts = [ref.mcore(ref.on_disk(model, tmp_path), 2, r) for r in range(2)]
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    cuts[1][name] = cuts[1][name].bfloat16()
    paths = write_ranks(tmp_path, cuts)
    with pytest.raises(errors.UsageError, match=rf"{name} is float32 .* bfloat16"):
        export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=2), config=model.config)


def test_files_that_record_different_steps_are_refused(tmp_path):
    state = ref.on_disk(_model(), tmp_path)
    paths = []
    for rank in range(2):
        paths.append(tmp_path / f"rank{rank}.pt")
        torch.save({"model": ref.mcore(state, 2, rank), "iteration": 100 + rank}, paths[-1])
    with pytest.raises(errors.UsageError, match=r"different steps.*100.*101"):
        export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=2), config=_model().config)


def test_files_of_ranks_given_twice_or_out_of_order_are_refused(tmp_path):
    """As a shell sorts them: rank10 before rank2. Shapes do not tell."""
    state = ref.on_disk(_model(), tmp_path)
    paths = []
    for rank, number in enumerate((1, 2, 10, 11)):
        paths.append(tmp_path / f"step7_rank{number}_of16.safetensors")
        save_file(ref.mcore(state, 4, rank), paths[-1])
    copy = tmp_path / "step7_rank12_of16.safetensors"
    copy.symlink_to(paths[2])
    for given, words in (
        ((paths[0], paths[2], paths[3], paths[1]), "order 1, 10, 11, 2.*order of ranks"),
        ((*paths[:3], copy), "passed for two ranks"),
    ):
        with pytest.raises(errors.UsageError, match=words):
            export_hf(given, tmp_path / "hf", parallel=Parallel(tp=4), config=_model().config)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},  # the header for data
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        [1],
    ],
)
def test_a_header_that_lies_about_the_data_is_refused(tmp_path, entry):
    header = json.dumps({"decoder.final_layernorm.weight": entry}).encode()
    path = tmp_path / "rank.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(errors.CorruptCheckpointError, match="as it was written"):
        export_hf([path], tmp_path / "hf", config=_model().config)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_key_value_heads", "two"), ("head_dim", 7.5), ("partial_rotary_factor", "half"),
     ("num_hidden_layers", None)],
)  # fmt: skip
def test_a_config_without_numbers_is_refused_by_name(tmp_path, field, value):
    save_file(ref.mcore(ref.on_disk(_model(), tmp_path), 1, 0), tmp_path / "rank.safetensors")
    config = {**_model().config.to_dict(), field: value}
    with pytest.raises(errors.UsageError, match=f"{field}={value!r}"):
        export_hf([tmp_path / "rank.safetensors"], tmp_path / "hf", config=config)


def test_json_files_that_are_too_long_or_too_deep_are_refused_unread(tmp_path):
    path = tmp_path / "config.json"
    for read in (read_config, read_lora_config):
        path.write_text('{"a":' * 9999)
        with pytest.raises(errors.UsageError, match="nested too deeply"):
            read(path)
        os.truncate(path, 1 << 42)
        with pytest.raises(errors.UsageError, match="more than"):
            read(path)


def test_tensors_without_plain_values_are_refused_by_name(tmp_path):
    state = ref.mcore(ref.on_disk(_model(), tmp_path), 1, 0)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    for change in (torch.Tensor.to_sparse, lambda tensor: tensor.to("meta")):
        torch.save(state | {name: change(state[name])}, tmp_path / "rank.pt")
        with pytest.raises(errors.UsageError, match=f"{name} is a torch"):
            export_hf([tmp_path / "rank.pt"], tmp_path / "hf", config=_model().config)


def test_what_is_no_one_model_is_not_imported(tmp_path):
    """A head that differs from the embedding it is tied to; a tensor in two files; no index."""
    state = ref.on_disk(_model(), tmp_path / "hub")
    config = {**_model().config.to_dict(), "tie_word_embeddings": True}
    (tmp_path / "hub" / "config.json").write_text(json.dumps(config))
    with pytest.raises(errors.TensorMismatchError, match="lm_head.weight and .* differ"):
        import_hf(tmp_path / "hub", tmp_path / "ranks", Parallel("mcore_te"), config=config)
    (tmp_path / "hub" / "model.safetensors").unlink()
    index = tmp_path / "hub" / "model.safetensors.index.json"
    files = {"a.safetensors": dict(list(state.items())[:9]), "b.safetensors": state}
    for name, held in files.items():
        save_file(held, tmp_path / "hub" / name)
    where = {n: name for name, held in reversed(files.items()) for n in held}
    for text, words in (
        (json.dumps({"weight_map": where}), "is in b.safetensors and in another"),
        (json.dumps({"metadata": {}}), "no weight_map"),
        (json.dumps({"weight_map": {"w": 1}}), "no weight_map"),
        (json.dumps({"weight_map": {**where, "w": "../hub/a.safetensors"}}), "not beside it"),
        (
            json.dumps({"weight_map": {**where, "w": str(tmp_path / "hub" / "a.safetensors")}}),
            "not beside it",
        ),
        (json.dumps({"weight_map": {**where, "w": ".."}}), "not beside it"),
        ("{", "no weight_map"),
    ):
        index.write_text(text)
        with pytest.raises(errors.CorruptCheckpointError, match=words):
            import_hf(tmp_path / "hub", tmp_path / "ranks", Parallel("mcore_te"))
    assert not (tmp_path / "ranks").exists()


def test_a_shard_that_is_missing_is_told_and_nothing_is_left(tmp_path):
    checkpoint = saved(tmp_path, state_of(), world=3)
    lost = shards.files(checkpoint)[1]
    lost.unlink()
    with pytest.raises(errors.CheckpointError, match=lost.name):
        export_hf(checkpoint, tmp_path / "hf", config=_model().config)
    assert not list((tmp_path / "hf").glob("*"))


def test_a_shard_of_another_step_is_told_by_its_checksum(tmp_path):
    state = state_of()
    first = saved(tmp_path / "1", state, world=2)
    second = saved(tmp_path / "2", {n: t + 1 for n, t in state.items()}, world=2)
    victim, other = shards.files(first)[1], shards.files(second)[1]
    assert victim.stat().st_size == other.stat().st_size
    os.replace(other, victim)
    with pytest.raises(errors.CorruptCheckpointError, match=victim.name):
        export_hf(first, tmp_path / "hf", config=_model().config)
    assert not list((tmp_path / "hf").glob("*"))


def test_what_git_lfs_has_not_fetched_is_named(tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    for name in ("model.safetensors", "pytorch_model.bin"):
        hub = tmp_path / name.partition(".")[2]
        hub.mkdir()
        (hub / name).write_bytes(pointer)
        _model().config.save_pretrained(hub)
        for act in (
            lambda: import_hf(hub, tmp_path / "c", Parallel("hf_tp")),  # noqa: B023
            lambda: export_hf(hub / name, tmp_path / "hf", config=hub),  # noqa: B023
        ):
            with pytest.raises(errors.UsageError, match="git-lfs's pointer") as caught:
                act()
            assert name in str(caught.value) and "git lfs pull" in str(caught.value)


def test_nothing_is_written_where_the_source_is(tmp_path):
    """Overwriting takes an old model's files away first: here the only ones there are."""
    hub, ranks = tmp_path / "hub", tmp_path / "ranks"
    state = ref.on_disk(_model(), hub)
    ranks.mkdir()
    paths = [ranks / f"model_rank{r}.safetensors" for r in range(2)]
    for r, path in enumerate(paths):
        save_file(ref.mcore(state, 2, r), path)
    link = tmp_path / "link"
    link.symlink_to(ranks)
    one, ours = hub / "model.safetensors", saved(tmp_path, state)
    before = sorted(tmp_path.rglob("*"))
    over = ExportOptions(overwrite=True)
    into: dict[str, Any] = {"parallel": Parallel(tp=2), "options": over}
    whole: dict[str, Any] = {"config": _model().config, "options": over}
    for act in (
        lambda: export_hf(paths, link, config=hub, **into),
        lambda: export_hf(paths, hub, config=hub, **into),
        lambda: export_hf(paths, hub, config=hub / "config.json", **into),
        lambda: import_hf(
            hub, hub, Parallel("mcore_te", tp=2), options=ImportOptions(overwrite=True)
        ),
        lambda: export_hf(one, hub, **whole),  # a file, not a list of one
        lambda: export_hf(one.as_uri(), str(hub), **whole),
        lambda: export_hf(ours, ours, **whole),
        lambda: export_hf("s3://b/m/model.safetensors", "s3://b/m", **whole),
        lambda: export_hf("s3://b/run/100/", "s3://b/run/100", **whole),
    ):
        with pytest.raises(errors.UsageError, match="out_dir is the directory of"):
            act()
    assert sorted(tmp_path.rglob("*")) == before


def test_arguments_of_another_kind_are_refused_by_name(tmp_path):
    state = ref.on_disk(_model(), tmp_path / "hub")
    save_file(ref.mcore(state, 1, 0), tmp_path / "rank.safetensors")
    path, hub = [tmp_path / "rank.safetensors"], tmp_path / "hub"
    config = _model().config.to_dict()
    for field, value in (
        ("tp", True),
        ("vpp", 0),
        ("padded_vocab_size", "9"),
        ("allow_equal_ranks", 1),
    ):
        with pytest.raises(errors.UsageError, match=f"{field}={value!r}"):
            Parallel(**{field: value})
    alone = ["export", str(path[0]), str(tmp_path / "o"), "--base", str(hub)]
    assert "go with --lora" in CliRunner().invoke(app, alone).output
    for given, words in (
        ({"parallel": 2}, "parallel=2"),
        ({"parallel": Parallel(layout=3)}, "layout=3"),  # type: ignore[arg-type]
        ({"options": {"overwrite": True}}, "options is {'overwrite': True}"),
        ({"config": {**config, "intermediate_size": True}}, "intermediate_size=True"),
        ({"config": {**config, "architectures": "LlamaForCausalLM"}}, "architectures='Llama"),
        ({"checkpoint": iter(path)}, "checkpoint="),
        ({"out_dir": None}, "out_dir=None"),
    ):
        with pytest.raises(errors.UsageError, match=words):
            export_hf(**{"checkpoint": path, "out_dir": tmp_path / "o", "config": hub, **given})
    to = Parallel("mcore_te")
    for given, words in (
        ({"source": {"tp": 2}}, "source="),
        ({"prefix": None}, "prefix=None"),
        ({"directory": 3}, "directory=3"),
        ({"parallel": "mcore_te"}, "parallel='mcore_te'"),
        ({"parallel": Parallel(tp=2)}, "names no layout to write"),
        ({"parallel": replace(to, padded_vocab_size=128)}, "padded_vocab_size= has no effect"),
        ({"options": ExportOptions()}, r"pass smckpt.ImportOptions"),
    ):
        with pytest.raises(errors.UsageError, match=words):
            import_hf(**{"directory": hub, "out_dir": tmp_path / "o", "parallel": to, **given})
    for kind, field, value in (
        (ExportOptions, "threads", "2"),
        (ExportOptions, "overwrite", "no"),
        (ExportOptions, "naming", "theirs"),
        (ExportOptions, "max_shard_size", "many"),
        (ImportOptions, "allow_nonfinite", 1),
        (ImportOptions, "pad_vocab_to_multiple_of", 64.5),
        (ImportOptions, "mtp", "both"),
    ):
        with pytest.raises(errors.UsageError, match=f"{field}={value!r}"):
            kind(**{field: value})
    assert not (tmp_path / "o").exists()


def test_what_is_no_weight_and_heads_that_ranks_cut_are_refused(tmp_path):
    state = ref.on_disk(_model(), tmp_path / "hub")
    shard = ref.mcore(state, 1, 0)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    save_file(shard | {name: shard[name].to(torch.int8)}, tmp_path / "rank.safetensors")
    with pytest.raises(errors.UsageError, match=f"{name} is quantized to int8"):
        export_hf([tmp_path / "rank.safetensors"], tmp_path / "o", config=_model().config)
    with pytest.raises(errors.TopologyError, match="16 does not divide the 8 heads"):
        import_hf(tmp_path / "hub", tmp_path / "o", Parallel("mcore_te", tp=16))
    assert not (tmp_path / "o").exists()


def test_a_weight_of_no_numbers_that_a_model_computes_with_is_refused(tmp_path):
    state, name = state_of(), "model.norm.weight"
    turned = torch.complex(state[name], state[name]).conj()
    for number, (wrong, words) in enumerate((
        (state[name] > 0, f"{name} is bool"),
        (turned.resolve_conj(), f"{name} is complex64"),
        # torch.save writes what is in memory, and that it is to be negated
        (torch._neg_view(state[name]), f"{name} is a .* lazy neg, not a dense tensor"),
        (torch.nn.Parameter(turned.imag), f"{name} is a .* lazy neg, not a dense tensor"),
        (turned, f"{name} is a .* lazy conj, not a dense tensor"),
    )):  # fmt: skip
        path = tmp_path / f"{number}.pt"
        torch.save(state | {name: wrong}, path)
        with pytest.raises(errors.UsageError, match=words):
            export_hf(path, tmp_path / "o", config=_model().config)
    assert not (tmp_path / "o").exists()


def test_a_store_is_refused_by_name_where_a_disk_is_read(tmp_path):
    state, url = ref.on_disk(_model(), tmp_path / "hub"), "s3://bucket/run/hf"
    save_file(state, tmp_path / "model.safetensors")
    for call, name in (
        (lambda: verify_hf(url), "directory="),
        (lambda: verify_hf(tmp_path / "hub", reference=url), "reference="),
        (
            lambda: import_hf(tmp_path / "hub", tmp_path / "o", Parallel("mcore_te"), config=url),
            "config=",
        ),
        (lambda: export_hf(tmp_path / "model.safetensors", tmp_path / "o", config=url), "config="),
        (lambda: export_hf(tmp_path / "hub", tmp_path / "o", tokenizer=url), "tokenizer="),
    ):
        with pytest.raises(errors.UsageError, match=f"{name} is in a store.*to a disk"):
            call()


def write_ranks(folder: Path, cuts: list[State]) -> list[Path]:
    paths = [folder / f"rank{number}.safetensors" for number in range(len(cuts))]
    for path, cut in zip(paths, cuts, strict=True):
        save_file(cut, path)
    return paths
