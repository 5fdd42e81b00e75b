"""Llama 4 (text) and Qwen3-Next: each layout that they have comes out as the original, in bytes and
in logits, and an import of the original is what the ranks held."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from smckpt import Parallel, errors, export_hf
from smckpt.translate import import_hf, verify_hf
from smckpt.translate.tables.dims import read_dims
from tests.support.models import next_families as ref
from tests.support.models.references import each_rank, on_disk
from tests.translate.layouts.test_families import (
    State,
    assert_the_original,
    assert_there_and_back,
    same,
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
    report = export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=2), config=model.config)
    assert report.layout == "hf_tp"
    assert_the_original(tmp_path / "hf", model, state)
    judged(family, "hf_tp", exports=["formulas", "logits"], at="2")


# -- controls: what is refused, and what only a comparison sees ------------------------------------

NET = "decoder.layers.0.self_attention."
ATTENTION = "decoder.layers.1.self_attention."


def parts_swapped(state: State, name: str, sizes: list[int], one: int, other: int) -> None:
    """Two parts of one size change places in a fused tensor."""
    parts = list(state[name].split(sizes))
    parts[one], parts[other] = parts[other], parts[one]
    state[name] = torch.cat(parts)


def gates_and_queries(state: State) -> None:
    name, each = f"{ATTENTION}linear_qkv.weight", state[f"{ATTENTION}linear_qkv.weight"]
    groups = each.view(-1, 2 * ref.H // ref.G + 2, ref.D, each.shape[-1])  # q, q, gate, gate, k, v
    state[name] = groups[:, [2, 3, 0, 1, 4, 5]].reshape(each.shape)


KEYS, VALUES = ref.KEYS * ref.KEY // 2, ref.VALUES * ref.VALUE // 2  # of one of two ranks
IN_PROJ = [KEYS, KEYS, VALUES, VALUES, ref.VALUES // 2, ref.VALUES // 2]
SWAPPED: dict[str, tuple[str, Callable[[State], None], set[str]]] = {
    "queries and keys of the net": (
        "qwen3_next", lambda s: parts_swapped(s, f"{NET}in_proj.weight", IN_PROJ, 0, 1),
        {"model.layers.0.linear_attn.in_proj_qkvz.weight"}),
    "values and gates of the net": (
        "qwen3_next", lambda s: parts_swapped(s, f"{NET}in_proj.weight", IN_PROJ, 2, 3),
        {"model.layers.0.linear_attn.in_proj_qkvz.weight"}),
    "the net's two small parts": (
        "qwen3_next", lambda s: parts_swapped(s, f"{NET}in_proj.weight", IN_PROJ, 4, 5),
        {"model.layers.0.linear_attn.in_proj_ba.weight"}),
    "the convolution's queries and keys": (
        "qwen3_next",
        lambda s: parts_swapped(s, f"{NET}conv1d.weight", [KEYS, KEYS, VALUES], 0, 1),
        {"model.layers.0.linear_attn.conv1d.weight"}),
    "queries and their gates": (
        "qwen3_next", gates_and_queries, {"model.layers.1.self_attn.q_proj.weight"}),
    "gate and up of the shared expert": (
        "llama4_text",
        lambda s: parts_swapped(
            s, "decoder.layers.1.mlp.shared_experts.linear_fc1.weight", [24, 24], 0, 1),
        {f"model.layers.1.feed_forward.shared_expert.{part}_proj.weight"
         for part in ("gate", "up")}),
    "two experts": (
        "llama4_text",
        lambda s: s.update({
            f"decoder.layers.1.mlp.experts.linear_fc1.weight{e}":
                s[f"decoder.layers.1.mlp.experts.linear_fc1.weight{1 - e}"] for e in (0, 1)}),
        {"model.layers.1.feed_forward.experts.gate_up_proj"}),
}  # fmt: skip


@pytest.mark.parametrize("fault", SWAPPED)
def test_swapped_parts_make_another_model_which_verification_sees(tmp_path, hub, fault):
    """They have one shape, so nothing else can see it."""
    family, swap, names = SWAPPED[fault]
    model, state, folder = hub(family)
    cuts = cuts_of(family, state, 2, 1, False)
    for cut in cuts:
        swap(cut)
    paths = written(tmp_path / "in", cuts)
    export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=2), config=model.config)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert {name for name in state if not torch.equal(found[name], state[name])} == names
    report = verify_hf(tmp_path / "hf", reference=folder)
    assert report.logits is not None and report.logits > 1e-3
    assert any("logits differ" in problem for problem in report.problems)


def test_the_nets_rows_as_hugging_face_has_them_are_another_model(tmp_path, hub):
    """A trainer that cut the fused tensors without ordering them by heads."""
    model, state, _ = hub("qwen3_next")
    cuts = cuts_of("qwen3_next", state, 2, 1, False)
    at = "model.layers.0.linear_attn."
    whole = torch.cat([state[f"{at}in_proj_qkvz.weight"], state[f"{at}in_proj_ba.weight"]])
    for cut, part in zip(cuts, whole.chunk(2), strict=True):
        cut[f"{NET}in_proj.weight"] = part.contiguous()
    export_hf(
        written(tmp_path / "in", cuts),
        tmp_path / "hf",
        parallel=Parallel(tp=2),
        config=model.config,
    )
    assert not same(load_file(tmp_path / "hf" / "model.safetensors"), state)


def test_ranks_in_the_wrong_order_are_refused_or_another_model(tmp_path, hub):
    model, state, _ = hub("qwen3_next")
    paths = written(tmp_path / "in", cuts_of("qwen3_next", state, 2, 1, False))[::-1]
    with pytest.raises(errors.UsageError, match="do not ascend|order"):
        export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=2), config=model.config)
    without = [path.rename(tmp_path / name) for path, name in zip(paths, "ab", strict=True)]
    export_hf(without, tmp_path / "hf", parallel=Parallel(tp=2), config=model.config)
    assert not same(load_file(tmp_path / "hf" / "model.safetensors"), state)


def test_degrees_that_cut_a_head_of_the_net_are_refused(tmp_path, hub):
    _, state, folder = hub("qwen3_next")  # 4 key heads
    with pytest.raises(errors.TopologyError, match="8 does not divide the 4 heads of .*in_proj"):
        import_hf(folder, tmp_path / "ranks", Parallel("mcore_te", tp=8))
    paths = written(tmp_path / "in", cuts_of("qwen3_next", state, 2, 1, False))
    with pytest.raises(errors.TensorMismatchError, match="64 rows in total"):
        export_hf(paths[:1], tmp_path / "hf", parallel=Parallel(tp=1), config=folder)
    with pytest.raises(errors.UsageError, match="3 value heads .* not a multiple of 2 key heads"):
        read_dims({**json.loads((folder / "config.json").read_text()),
                   "linear_num_value_heads": 3, "linear_num_key_heads": 2})  # fmt: skip


@pytest.mark.parametrize(
    ("family", "key", "value", "text"),
    [
        ("qwen3_next", "layer_types", ["full_attention"] * 2, "no known layout|missing"),
        ("qwen3_next", "linear_num_key_heads", 2, "should be"),
        ("llama4_text", "moe_layers", [0, 1], "no known layout|missing"),
        ("llama4_text", "intermediate_size", 96, "should be"),
    ],
)
def test_another_models_config_is_refused(tmp_path, hub, family, key, value, text):
    model, state, _ = hub(family)
    paths = written(tmp_path / "in", cuts_of(family, state, 2, 1, False))
    with pytest.raises(errors.CheckpointError, match=text):
        export_hf(
            paths,
            tmp_path / "hf",
            parallel=Parallel(tp=2),
            config={**model.config.to_dict(), key: value},
        )


def test_layers_of_the_net_are_found_from_the_interval_that_releases_have(hub):
    values = {**hub("qwen3_next")[0].config.to_dict(), "num_hidden_layers": 8}
    del values["layer_types"]
    dims = read_dims({**values, "full_attention_interval": 4})
    assert [i for i in range(8) if "linear" not in dims.words(i)] == [3, 7]
    llama = {**hub("llama4_text")[0].config.to_dict(), "num_hidden_layers": 4}
    del llama["moe_layers"]
    dims = read_dims({**llama, "interleave_moe_layer_step": 2})
    assert [i for i in range(4) if "sparse" in dims.words(i)] == [1, 3]
