"""Megatron-core's GPTModel and the tables agree: on weights bitwise, on logits to 1e-5.

mbridge 0.15.1 reads a Hugging Face directory into megatron-core 0.16.1 (CPU, gloo), under its own
names, fusions and cuts, and writes such a model back; it knows nothing of smckpt. Families that it
has no bridge for are set up by hand: names and shapes are then Megatron's, which loads strictly,
and the logits tell whether rows are in order.

Where mbridge and Hugging Face differ, which the tests go around:
- mbridge is made for the names of Transformer Engine's spec, and the model is of the local spec,
  the only one for CPUs. Between them norms and experts are renamed, no more (`megatron_run.py`).
- mbridge gives Mixtral `moe_router_pre_softmax=True`: softmax over all experts, not over the chosen
  ones, so other logits than Hugging Face's. Here it is False; the weights are the same.
- mbridge does not read `norm_topk_prob`: its Qwen3-MoE has it, as all released ones have.
- mbridge takes no biases of a Llama's output and MLP (`attention_bias`, `mlp_bias`).
- mbridge's DeepSeek-V3 has no groups of experts (`n_group`), nor padding of the vocabulary, and
  reads float8 only; here it reads and pads as for the others.
- mbridge does not export experts cut otherwise than layers where ep is 1 or etp above tp.
And Megatron-core: its all-to-all dispatcher needs a GPU, so the experts' tokens are gathered; its
local attention takes no values of another width than keys and no ALiBi, so DeepSeek's and Falcon
RW's is plain torch; it has no attention beside the MLP (GPT-NeoX, Falcon), so the sum of the two is
here, over modules that are all its own; it refuses experts with biases (GPT-OSS) that tensor
parallelism would cut. Its legacy experts need a GPU's package for one product, which is here a loop
over experts; the model's other names are the local spec's, renamed as for mbridge.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from smckpt.translate import export_hf, import_hf
from tests.support import families, interpreters, megatron_run
from tests.support import references as ref

State = dict[str, torch.Tensor]
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 5e5}
MORE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "deepseek_v3": {"n_group": 1},
    "qwen2_moe": {"mlp_only_layers": []},
    "glm4_moe": {"n_shared_experts": 1},
    "gpt_neox_sequential": {"use_parallel_residual": False},
    "gpt_oss": {"sliding_window": 64, "rope_parameters": PLAIN_ROPE},
}
OLD_KEYS = {"rope_theta": 5e5, "num_experts": 8}  # transformers 4 reads them, 5 does not write them
BRIDGED = (
    "llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3", "qwen2_moe", "glm4_moe",
)  # fmt: skip
DENSE, SPARSE = ("llama", "qwen2", "qwen3"), ("mixtral", "qwen3_moe")
HELD = {"mcore_te": "filled", "mcore_local": "local", "mcore_te_legacy": "legacy"}
BY_HAND = (
    "gpt_neox", "gpt_neox_sequential", "gpt2", "phi3", "starcoder2", "falcon", "falcon_7b",
    "falcon_rw",
)  # fmt: skip
CASES = [
    *(pytest.param(family, t, 1) for family in DENSE for t in (1, 2, 4, 8)),
    *(
        pytest.param(family, t, ep, marks=[pytest.mark.long] if t > 2 else [])
        for family in SPARSE for t in (1, 2, 4, 8) for ep in (1, 2)
    ),
    *(pytest.param(family, 2, 1) for family in BY_HAND),
    *(pytest.param("deepseek_v3", t, 2) for t in (1, 2)),
    *(pytest.param(family, 2, 2) for family in ("qwen2_moe", "glm4_moe")),
    pytest.param("gpt_oss", 1, 2),
    *(
        pytest.param(family, t, ep, marks=pytest.mark.long)
        for t, ep, some in ((4, 1, (*BY_HAND, "deepseek_v3")),
                            (1, 8, ("gpt_oss", "deepseek_v3")))
        for family in some
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def megatron() -> Iterator[Callable[[dict[str, Any]], None]]:
    with interpreters.serving(interpreters.megatron(), megatron_run.__file__) as ask:
        yield ask


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Callable[[str], tuple[Any, State, Path]]:
    known: dict[str, tuple[Any, State, Path]] = {}

    def get(family: str) -> tuple[Any, State, Path]:
        if family not in known:
            folder = tmp_path_factory.mktemp(family)
            source: Any = families if family in families.FAMILIES else ref
            model = source.model(family.removesuffix("_sequential"), **MORE.get(family, {}))
            known[family] = (model, ref.on_disk(model, folder), folder)
            if family in BRIDGED:
                path = folder / "config.json"
                path.write_text(json.dumps({**json.loads(path.read_text()), **OLD_KEYS}))
        return known[family]

    return get


@pytest.mark.parametrize(("family", "t", "ep"), CASES)
def test_megatron_and_the_tables_agree_both_ways(tmp_path, megatron, hub, family, t, ep):
    agree_both_ways(tmp_path, megatron, hub(family), family, t, ep, t)


@pytest.mark.parametrize(
    ("family", "t", "ep", "etp"),
    [
        ("qwen3_moe", 2, 2, 1),
        ("gpt_oss", 2, 2, 1),
        pytest.param("qwen3_moe", 4, 2, 2, marks=pytest.mark.long),
        pytest.param("mixtral", 2, 4, 1, marks=pytest.mark.long),
    ],
)
def test_megatron_agrees_where_experts_are_cut_otherwise_than_layers(
    tmp_path, megatron, hub, family, t, ep, etp
):
    agree_both_ways(tmp_path, megatron, hub(family), family, t, ep, etp)


@pytest.mark.parametrize("what", ["a swapped tensor", "ranks in another order", "a wrong degree"])
def test_megatron_sees_what_is_wrong(tmp_path, megatron, hub, what):
    """It refuses shards of another degree, and writes another model from the others."""
    _, state, folder = hub("llama")
    t = 1 if what == "a wrong degree" else 2
    report = import_hf(folder, tmp_path / "in", "mcore_local", tp=t, prefix="",
                       pad_vocab_to_multiple_of=64)  # fmt: skip
    files = [tmp_path / "in" / name for name in report.files]
    if what == "a swapped tensor":
        one, two = (f"decoder.layers.{i}.self_attention.linear_qkv.weight" for i in (0, 1))
        for path in files:
            held = load_file(path)
            save_file({**held, one: held[two], two: held[one]}, path)
    elif what == "ranks in another order":
        held = load_file(files[0])
        save_file(load_file(files[1]), files[0])
        save_file(held, files[1])
    else:  # both ranks would read the whole model
        shutil.copy(files[0], files[0].with_name("data-000000000000-r00001-0.safetensors"))
    job = {"hf": str(folder), "ranks": str(tmp_path / "in"), "out": str(tmp_path), "legacy": None,
           "world": 2, "seconds": 100, "tp": 2, "ep": 1, "etp": 2, "dist": None}  # fmt: skip
    if what == "a wrong degree":
        with pytest.raises(AssertionError, match="size mismatch"):
            megatron(job)
        return
    megatron(job)
    found = torch.load(tmp_path / "exported.pt")
    assert found.keys() == state.keys()
    differ = {n.split(".")[-2] for n in state if not torch.equal(found[n], state[n])}
    assert differ >= {"q_proj", "k_proj", "v_proj"}
    assert ("o_proj" in differ) == (what == "ranks in another order")


def agree_both_ways(
    tmp_path: Path, megatron: Any, known: Any, family: str, t: int, ep: int, etp: int
) -> None:
    model, state, folder = known
    degrees = {"tp": t, "ep": ep, "etp": etp}
    written = {
        layout: import_hf(
            folder,
            tmp_path / layout,
            layout,
            prefix="",
            pad_vocab_to_multiple_of=128 // t,
            **degrees,
        )
        for layout in HELD
        if family in SPARSE or layout != "mcore_te_legacy"
    }
    world = math.lcm(t, ep * etp)
    megatron({
        "hf": str(folder), "ranks": str(tmp_path / "mcore_local"), "out": str(tmp_path),
        "legacy": str(tmp_path / "mcore_te_legacy") if family in SPARSE else None,
        "world": world, "seconds": 100, **degrees,
        "dist": str(tmp_path / "dist") if world == 2 else None,
    })  # fmt: skip
    # the model that mbridge filled, or loaded import_hf's files, computes what transformers does,
    # and so does the one with legacy experts
    tokens = torch.arange(40).reshape(2, 20) % ref.V
    with torch.no_grad():
        wanted = model(tokens).logits
    for name in ("logits.pt", "legacy-logits.pt")[: len(written) - 1]:
        assert (torch.load(tmp_path / name)[..., : ref.V] - wanted).abs().max() <= 1e-5, name
    # they hold, rank by rank, what import_hf wrote, and their states export to the original
    for layout, done in written.items():
        states = [tmp_path / f"{HELD[layout]}{rank}.pt" for rank in range(world)]
        for path, file in zip(states, done.files, strict=True):
            assert_same(load_file(tmp_path / layout / file), torch.load(path)["model"])
        report = export_hf(states, tmp_path / f"{layout}-hf", config=model.config, **degrees)
        assert report.layout == layout
        assert_same(load_file(tmp_path / f"{layout}-hf" / "model.safetensors"), state)
    if world == 2:  # and from Megatron's own distributed checkpoint, whatever its degrees
        nemo = (tmp_path / "nemo" / "weights") if family in ("llama", "mixtral") else None
        if nemo:
            as_nemo_has_it(tmp_path / "dist", nemo)
        given = nemo.parent if nemo else tmp_path / "dist"
        report = export_hf(given, tmp_path / "dist-hf", config=model.config)
        assert "torch_dist" in report.source and report.layout == "mcore_te"
        assert report.source.startswith("NeMo") == bool(nemo)
        assert_same(load_file(tmp_path / "dist-hf" / "model.safetensors"), state)
    if family in BRIDGED:  # and mbridge writes the original from what import_hf wrote
        assert_same(torch.load(tmp_path / "exported.pt"), state)


def as_nemo_has_it(dist: Path, weights: Path) -> None:
    """NeMo's directory: below `weights`, and with `module.` in front of all names."""
    weights.parent.mkdir()
    dist.rename(weights)
    metadata = pickle.loads((weights / ".metadata").read_bytes())
    named = metadata.state_dict_metadata
    metadata.state_dict_metadata = {f"module.{name}": entry for name, entry in named.items()}
    metadata.storage_data = {
        dataclasses.replace(index, fqn=f"module.{index.fqn}"): place
        for index, place in metadata.storage_data.items()
    }
    (weights / ".metadata").write_bytes(pickle.dumps(metadata))


def assert_same(found: State, wanted: State) -> None:
    assert found.keys() == wanted.keys()
    assert [n for n in wanted if not torch.equal(found[n], wanted[n])] == []
