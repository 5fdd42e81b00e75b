"""The model under another place in one file: found where there is one, taken by prefix=, or listed
in the error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp
from transformers import AutoModelForCausalLM

from smckpt import ExportOptions, Parallel, errors, export_hf
from tests.support.models import references
from tests.support.models.references import on_disk

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Any, State]:
    model = references.model("llama")
    return model, on_disk(model, tmp_path_factory.mktemp("llama"))


def assert_same(directory: Path, wanted: State) -> None:
    found = load_file(directory / "model.safetensors")
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def below(place: str, state: State) -> State:
    return {f"{place}.{name}": tensor.clone() for name, tensor in state.items()}


def other(state: State) -> State:
    return {name: tensor + 1 for name, tensor in state.items()}


@pytest.mark.parametrize("place", ["net", "module.net", "policy.backbone", "_orig_mod.agent"])
@pytest.mark.parametrize("against", [True, False])
@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
def test_a_model_that_is_an_attribute_is_found(tmp_path, llama, place, against, kind):
    """As Lightning saves `self.net`. The advice to skip the comparison wrote `net.model…`."""
    model, state = llama
    named = below(place, state)
    path = tmp_path / f"last.{kind}"
    save_file(named, path) if kind == "safetensors" else torch.save({"state_dict": named}, path)
    export_hf(
        path, tmp_path / "hf", config=model.config, options=ExportOptions(against_model=against)
    )
    assert_same(tmp_path / "hf", state)
    _, told = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(told.values()), told


@pytest.mark.parametrize("odd", ["a further one", "another place", "another word"])
def test_names_that_the_family_has_not_are_noted_without_the_comparison(tmp_path, llama, odd):
    """They are refused with it."""
    model, state = llama
    if odd == "a further one":
        state = {**state, "foo.weight": torch.ones(3)}
    elif odd == "another place":  # and one beside it, so that it is no place of the model
        state = {**below("x.y", state), "z.weight": torch.ones(3)}
    else:
        state = {name.replace(".layers.", ".blocks."): tensor for name, tensor in state.items()}
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(errors.KeysMismatchError, match="is (unexpected|missing)"):
        export_hf(tmp_path / "model.pt", tmp_path / "no", config=model.config)
    options = ExportOptions(against_model=False)
    report = export_hf(tmp_path / "model.pt", tmp_path / "hf", config=model.config, options=options)
    assert any("is not the LlamaForCausalLM" in note for note in report.notes), report.notes


def test_two_models_are_listed_and_each_is_taken_by_its_prefix(tmp_path, llama):
    model, state = llama
    both = {**below("student", state), **below("teacher.inner", other(state))}
    torch.save({"state_dict": both}, tmp_path / "last.ckpt")
    with pytest.raises(errors.KeysMismatchError, match="'student' or 'teacher.inner'"):
        export_hf(tmp_path / "last.ckpt", tmp_path / "no", config=model.config)
    report = export_hf(
        tmp_path / "last.ckpt",
        tmp_path / "loose",
        config=model.config,
        options=ExportOptions(against_model=False),
    )
    assert any("'student' or 'teacher.inner'" in note for note in report.notes), report.notes
    for prefix, wanted in (("student", state), ("state_dict.student", state),
                           ("teacher.inner", other(state))):  # fmt: skip
        export_hf(tmp_path / "last.ckpt", tmp_path / "hf", config=model.config, prefix=prefix,
                  options=ExportOptions(overwrite=True))  # fmt: skip
        assert_same(tmp_path / "hf", wanted)


@pytest.mark.parametrize("prefix", ["ema_state", "runner.weights", "net"])
def test_other_keys_of_one_file(tmp_path, llama, prefix):
    model, state = llama
    held: Any = other(state)
    for key in reversed(prefix.split(".")):
        held = {key: held}
    torch.save({"state_dict": state, "step": 3, **held}, tmp_path / "last.ckpt")
    export_hf(tmp_path / "last.ckpt", tmp_path / "hf", config=model.config, prefix=prefix)
    assert_same(tmp_path / "hf", other(state))
    export_hf(tmp_path / "last.ckpt", tmp_path / "own", config=model.config)
    assert_same(tmp_path / "own", state)
    torch.save({"step": 3, **held}, tmp_path / "alone.ckpt")  # the one that there is
    export_hf(tmp_path / "alone.ckpt", tmp_path / "alone", config=model.config)
    assert_same(tmp_path / "alone", other(state))
    with pytest.raises(errors.KeysMismatchError, match=f"'{prefix}'"):
        export_hf(tmp_path / "alone.ckpt", tmp_path / "no", config=model.config, prefix="nothing")


def test_two_keys_that_look_like_models_are_listed(tmp_path, llama):
    model, state = llama
    torch.save({"ema_state": state, "live": {"net": other(state)}}, tmp_path / "last.ckpt")
    with pytest.raises(errors.UsageError, match=r"'ema_state' or 'live\.net'"):
        export_hf(tmp_path / "last.ckpt", tmp_path / "no", config=model.config)


def test_a_wrapper_that_is_the_place_of_one_of_two_models_is_listed(tmp_path, llama):
    model, state = llama
    both = {**below("_orig_mod", state), **below("teacher", other(state))}
    torch.save(both, tmp_path / "m.pt")
    with pytest.raises(errors.KeysMismatchError, match="'_orig_mod' or 'teacher'"):
        export_hf(tmp_path / "m.pt", tmp_path / "no", config=model.config)
    for prefix, wanted in (("_orig_mod", state), ("teacher", other(state))):
        export_hf(tmp_path / "m.pt", tmp_path / prefix, config=model.config, prefix=prefix)
        assert_same(tmp_path / prefix, wanted)


@pytest.mark.parametrize("key", ["module", "state_dict"])
def test_a_place_by_the_name_of_the_trainers_own_key_is_found(tmp_path, llama, key):
    """The error advised it, and took the key."""
    model, state = llama
    both = {**below(key, state), **below("teacher", other(state))}
    torch.save({key: both}, tmp_path / "m.pt")
    with pytest.raises(errors.KeysMismatchError, match=f"'{key}' or 'teacher'"):
        export_hf(tmp_path / "m.pt", tmp_path / "no", config=model.config)
    for prefix, wanted in ((key, state), (f"{key}.{key}", state), ("teacher", other(state))):
        export_hf(tmp_path / "m.pt", tmp_path / prefix, config=model.config, prefix=prefix)
        assert_same(tmp_path / prefix, wanted)


def test_of_several_models_in_a_directorys_file_the_advice_leads_to_each(tmp_path, llama):
    model, state = llama
    model.config.save_pretrained(tmp_path / "hub")
    path = tmp_path / "hub" / "pytorch_model.bin"
    torch.save({"live": state, "ema": other(state)}, path)
    with pytest.raises(errors.UsageError, match=r"the file itself, and pass prefix=.*'ema' or"):
        export_hf(tmp_path / "hub", tmp_path / "no")
    export_hf(path, tmp_path / "hf", config=tmp_path / "hub", prefix="ema")
    assert_same(tmp_path / "hf", other(state))


def test_ranks_files_have_a_prefix_too(tmp_path, llama):
    model, state = llama
    files = []
    for rank in range(2):
        cut = references.mcore(state, 2, rank)
        files.append(tmp_path / f"rank{rank}.pt")
        torch.save({"ema": {"net": below("gpt", cut)}, "model": other(cut)}, files[-1])
    export_hf(
        files, tmp_path / "hf", config=model.config, parallel=Parallel(tp=2), prefix="ema.net.gpt"
    )
    assert_same(tmp_path / "hf", state)


def test_a_distributed_checkpoint_finds_an_attribute(tmp_path, llama):
    model, state = llama
    dcp.save({"app": below("net", state)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    export_hf(tmp_path / "dcp", tmp_path / "hf", config=model.config)
    assert_same(tmp_path / "hf", state)
    both = {**below("student", state), **below("teacher", other(state))}
    dcp.save({"app": both}, checkpoint_id=tmp_path / "both", no_dist=True)
    with pytest.raises(errors.KeysMismatchError, match="'student' or 'teacher'"):
        export_hf(tmp_path / "both", tmp_path / "no", config=model.config)
    export_hf(tmp_path / "both", tmp_path / "one", config=model.config, prefix="app.teacher")
    assert_same(tmp_path / "one", other(state))


@pytest.mark.parametrize("outer", ["transformer", "language_model", "thinker"])
def test_outer_names_that_are_a_models_own_stay(tmp_path, outer):
    """ChatGLM's names are Megatron's below `transformer`."""
    inner = "model.embed_tokens" if outer == "thinker" else "embedding.word_embeddings"
    layer = "encoder.layers.0.self_attention.query_key_value.weight"
    if outer == "language_model":  # Megatron's own, before core, are refused
        layer = "decoder.layers.0.input_layernorm.weight"
    state = {f"{outer}.{inner}.weight": torch.ones(8, 4), f"{outer}.{layer}": torch.ones(12, 4)}
    torch.save(state, tmp_path / "model.pt")
    export_hf(tmp_path / "model.pt", tmp_path / "hf")
    assert_same(tmp_path / "hf", state)
