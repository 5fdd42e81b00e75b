"""Vision-language models: language model and tower come out of each layout as the original, and an
import of the original is what the ranks held."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from smckpt import errors, export_hf
from smckpt.translate import import_hf
from tests.support import vision
from tests.support.references import each_rank

State = dict[str, torch.Tensor]
Cut = Callable[[int, int], State]
MOE = "qwen3_vl_moe"
PADDED = ("word_embeddings.weight", "output_layer.weight")  # the padding is an import's own
CUT = ("gemma3", "qwen2_5_vl")  # mbridge 0.15.1 has no other


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Callable[[str], tuple[Any, State, Path]]:
    """A family's model, its state dict as a release has it, and where."""

    @cache
    def made(family: str) -> tuple[Any, State, Path]:
        model, folder = vision.model(family), tmp_path_factory.mktemp(family)
        return model, vision.released(model, folder), folder

    return made


def written(folder: Path, states: list[State]) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"rank{number:02d}.safetensors" for number in range(len(states))]
    for path, state in zip(paths, states, strict=True):
        save_file({n: t.contiguous().clone() for n, t in state.items()}, path)
    return paths


def assert_the_original(folder: Path, model: Any, state: State) -> None:
    """Names, bytes, and what is computed of tokens alone and of a picture among them."""
    found = load_file(folder / "model.safetensors")
    assert found.keys() == state.keys()
    assert [name for name in state if not torch.equal(found[name], state[name])] == []
    again, info = AutoModelForImageTextToText.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    picture = vision.picture(model.config.model_type)
    with torch.no_grad():
        for given in ({"input_ids": picture["input_ids"] % 110}, picture):
            apart = again.eval()(**given).logits - model(**given).logits
            assert apart.abs().max() <= 1e-5


def assert_there_and_back(
    folder: Path, hub: tuple[Any, State, Path], layout: str, cuts: list[State], t: int, ep: int = 1
) -> None:
    model, state, directory = hub
    report = export_hf(
        written(folder / "in", cuts), folder / "hf", tp=t, ep=ep, config=model.config
    )
    assert report.layout == layout  # the names are enough
    assert_the_original(folder / "hf", model, state)
    done = import_hf(directory, folder / "back", layout, tp=t, ep=ep, prefix="")
    for name, cut in zip(done.files, cuts, strict=True):
        found = load_file(folder / "back" / name)
        assert found.keys() == cut.keys()
        differ = [n for n in cut if not n.endswith(PADDED) and not torch.equal(found[n], cut[n])]
        assert differ == []


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("family", vision.FAMILIES)
def test_ranks_of_transformers_own_plan(tmp_path, hub, judged, family, t):
    cuts = each_rank(lambda r, e: vision.hf_tp(family, hub(family)[0], t, r), t)
    model, state, _ = hub(family)
    report = export_hf(written(tmp_path / "in", cuts), tmp_path / "hf", tp=t, config=model.config)
    assert report.layout == "hf_tp"
    assert_the_original(tmp_path / "hf", model, state)
    judged(family, "hf_tp", exports=["formulas", "save_pretrained", "logits"], at=str(t))


@pytest.mark.parametrize(
    ("family", "t", "ep"),
    [(f, t, 1) for f in vision.FAMILIES for t in (2, 4)] + [(MOE, 2, 2), (MOE, 1, 8)],
)
def test_megatrons_names_beside_a_whole_tower(tmp_path, hub, judged, family, t, ep):
    cuts = each_rank(lambda r, e: vision.bridge(family, hub(family)[1], t, r, ep, e), t, ep)
    assert_there_and_back(tmp_path, hub(family), "mcore_te", cuts, t, ep)
    at = f"{t}×{ep}" if family == MOE else str(t)
    exports = ["formulas", "save_pretrained", "logits"]
    judged(family, "mcore_te", exports=exports, imports=["formulas"], at=at)


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("family", CUT)
def test_megatrons_names_of_the_tower_too(tmp_path, hub, judged, family, t):
    cuts = each_rank(lambda r, e: vision.mbridge(family, hub(family)[1], t, r), t)
    assert_there_and_back(tmp_path, hub(family), "mcore_te_tower", cuts, t)
    exports = ["formulas", "save_pretrained", "logits"]
    judged(family, "mcore_te_tower", exports=exports, imports=["formulas"], at=str(t))
