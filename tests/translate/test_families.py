"""Families beyond the first ones: each layout that they have comes out as the original, in bytes
and in logits, and an import of the original is what the ranks held."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from smckpt import errors, export_hf
from smckpt.translate import import_hf
from tests.support import families as ref
from tests.support.references import V, each_rank, on_disk

State = dict[str, torch.Tensor]
# of the vocabulary, whose padding is an import's own
PADDED = ("wte.weight", "word_embeddings.weight", "output_layer.weight", "lm_head.weight",
          "embed_tokens.weight")  # fmt: skip


@cache
def _model(family: str) -> Any:
    return ref.model(family)


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Callable[[str], tuple[Any, State, Path]]:
    """A family's model, its state dict as transformers writes it, and where."""

    @cache
    def made(family: str) -> tuple[Any, State, Path]:
        model, folder = _model(family), tmp_path_factory.mktemp(family)
        return model, on_disk(model, folder), folder

    return made


def same(found: State, wanted: State) -> bool:
    """Names and bytes."""
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def written(folder: Path, states: list[State]) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"rank{number:02d}.safetensors" for number in range(len(states))]
    for path, state in zip(paths, states, strict=True):
        save_file({n: t.contiguous().clone() for n, t in state.items()}, path)
    return paths


def assert_the_original(folder: Path, model: Any, state: State) -> None:
    assert same(load_file(folder / "model.safetensors"), state)
    again, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    tokens = torch.arange(40).reshape(2, 20) % V
    with torch.no_grad():
        difference = (again.eval()(tokens).logits - model(tokens).logits).abs().max()
    assert difference <= 1e-5


def assert_there_and_back(
    folder: Path, hub: tuple[Any, State, Path], layout: str, cuts: list[State], t: int, ep: int = 1
) -> None:
    model, state, directory = hub
    given = {} if layout == "mcore_te" else {"layout": layout}  # the names of one are enough
    report = export_hf(
        written(folder / "in", cuts), folder / "hf", tp=t, ep=ep, config=model.config, **given
    )
    assert report.layout == layout
    assert_the_original(folder / "hf", model, state)
    done = import_hf(directory, folder / "back", layout, tp=t, ep=ep, prefix="")
    for name, cut in zip(done.files, cuts, strict=True):
        found = load_file(folder / "back" / name)
        assert found.keys() == cut.keys()
        for key, tensor in cut.items():
            if not key.endswith(PADDED):
                assert torch.equal(found[key], tensor), key


DENSE = tuple(f for f in ref.FAMILIES if f not in (*ref.SPARSE, *ref.WIDE_NORMS))
SPARSE = tuple(f for f in ref.SPARSE if f not in ref.WIDE_NORMS)
TE = (
    "phi3", "falcon", "falcon_rw", "gpt2", "gemma", "granite", "nemotron", "smollm3", "starcoder2",
)  # fmt: skip
LOCAL = tuple(f for f in DENSE if f not in ("gemma2", "gemma3_text", "glm4"))  # no norms after
OWN = ("gemma", "gemma2", "gemma3_text", "glm4", "granite", "nemotron", "olmo2", "phi3", "smollm3",
       "starcoder2", "deepseek_v2", "deepseek_v3", "glm4_moe", "olmoe", "qwen2_moe")  # fmt: skip


@pytest.mark.parametrize("family", DENSE)
def test_megatrons_names_of_a_dense_model(tmp_path, hub, family):
    cuts = each_rank(lambda r, e: ref.mcore(family, hub(family)[1], 4, r), 4)
    assert_there_and_back(tmp_path, hub(family), "mcore_te", cuts, 4)


@pytest.mark.parametrize("family", LOCAL)
def test_the_local_specs_names_of_a_dense_model(tmp_path, hub, family):
    cuts = each_rank(lambda r, e: ref.mcore(family, hub(family)[1], 2, r, local=True), 2)
    assert_there_and_back(tmp_path, hub(family), "mcore_local", cuts, 2)


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(("t", "ep"), [(2, 1), (2, 2), (1, 8)])
def test_megatrons_names_of_a_sparse_model(tmp_path, hub, family, local, t, ep):
    state = hub(family)[1]
    cuts = each_rank(lambda r, e: ref.mcore(family, state, t, r, ep, e, local=local), t, ep)
    layout = "mcore_local" if local else "mcore_te"
    assert_there_and_back(tmp_path, hub(family), layout, cuts, t, ep)


@pytest.mark.parametrize("family", TE)
def test_transformer_engines_names(tmp_path, hub, family):
    cuts = each_rank(lambda r, e: ref.te(family, hub(family)[1], 4, r), 4)
    assert_there_and_back(tmp_path, hub(family), "te_split", cuts, 4)


@pytest.mark.parametrize("family", OWN)
def test_ranks_of_transformers_own_plan(tmp_path, hub, family):
    model, state, _ = hub(family)
    paths = written(tmp_path / "in", each_rank(lambda r, e: ref.hf_tp(family, model, 2, r), 2))
    export_hf(paths, tmp_path / "hf", tp=2, config=model.config)
    assert_the_original(tmp_path / "hf", model, state)


@pytest.mark.parametrize(
    ("family", "layout"), [("gemma2", "te_split"), ("gpt2", "meta"), ("olmo2", "mcore_te")]
)
def test_a_layout_without_rows_for_a_family_says_what_it_lacks(tmp_path, hub, family, layout):
    model, state, _ = hub(family)
    paths = written(tmp_path / "in", [ref.mcore(family, state, 1, 0)])
    with pytest.raises(errors.KeysMismatchError, match=f"{layout} has no row for"):
        export_hf(paths, tmp_path / "hf", config=model.config, layout=layout)


def test_gemmas_norms_are_moved_and_not_shifted_wherever_they_lie(tmp_path, hub):
    """Both sides hold them less one: a shift there would double or lose it."""
    _, state, directory = hub("gemma2")
    done = import_hf(directory, tmp_path / "in", "mcore_te", prefix="")
    found = load_file(tmp_path / "in" / done.files[0])
    assert torch.equal(found["decoder.final_layernorm.weight"], state["model.norm.weight"])
