"""Llama 4 (text) and Qwen3-Next: each layout that they have comes out as the original, in bytes and
in logits, and an import of the original is what the ranks held."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from smckpt import export_hf
from tests.support import next_families as ref
from tests.support.references import each_rank, on_disk
from tests.translate.test_families import (
    State,
    assert_the_original,
    assert_there_and_back,
    written,
)

Hub = Callable[[str], tuple[Any, State, Path]]


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Hub:
    """A family's model, its state dict as transformers writes it, and where."""

    @cache
    def made(family: str) -> tuple[Any, State, Path]:
        model, folder = ref.model(family), tmp_path_factory.mktemp(family)
        return model, on_disk(model, folder), folder

    return made


def cuts_of(family: str, state: State, t: int, ep: int, local: bool) -> list[State]:
    return each_rank(lambda r, e: ref.mcore(family, state, t, r, ep, e, local=local), t, ep)


@pytest.mark.parametrize("family", ref.FAMILIES)
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(("t", "ep"), [(2, 1), (2, 2), (1, 8)])
def test_megatrons_names(tmp_path, hub, judged, family, local, t, ep):
    layout = "mcore_local" if local else "mcore_te"
    cuts = cuts_of(family, hub(family)[1], t, ep, local)
    assert_there_and_back(tmp_path, hub(family), layout, cuts, t, ep)
    judged(family, layout, exports=["formulas", "logits"], imports=["formulas"], at=f"{t}×{ep}")


@pytest.mark.parametrize("family", ref.FAMILIES)
def test_ranks_of_transformers_own_plan(tmp_path, hub, judged, family):
    model, state, _ = hub(family)
    paths = written(tmp_path / "in", each_rank(lambda r, e: ref.hf_tp(family, model, 2, r), 2))
    report = export_hf(paths, tmp_path / "hf", tp=2, config=model.config)
    assert report.layout == "hf_tp"
    assert_the_original(tmp_path / "hf", model, state)
    judged(family, "hf_tp", exports=["formulas", "logits"], at="2")
