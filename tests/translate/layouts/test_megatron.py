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
- mbridge cuts the first layer of Qwen2.5-VL's merger as if it were gated, against its own config of
  that layer; what it then fills computes something else. Here it is cut as that config says.
- mbridge builds vision-language models with Transformer Engine alone, so it fills and exports
  tensors of the shapes that `import_hf` wrote, and no model.
And Megatron-core: its all-to-all dispatcher needs a GPU, so the experts' tokens are gathered; its
local attention takes no values of another width than keys and no ALiBi, so DeepSeek's, Falcon RW's
and BLOOM's is plain torch; it has no attention beside the MLP (GPT-NeoX, Falcon, GPT-J, Cohere), so
the sum of the two is here, over modules that are all its own; its biases are everywhere or nowhere,
so GPT-J's and PhiMoE's attention has a config of its own; its GPTModel has no bias of the output
(GPT-J, PhiMoE), no norm of the embedding (BLOOM) and no norm without a bias (Cohere), so these are
put in; PhiMoE's choice of experts is transformers'; OPT's positions are counted from 2; it refuses
experts with biases (GPT-OSS) that tensor parallelism would cut. Its legacy experts need a GPU's
package for one product, which is here a loop over experts; the model's other names are the local
spec's, renamed as for mbridge.
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

from smckpt.translate import ExportOptions, ImportOptions, Parallel, export_hf, import_hf
from smckpt.translate.config import read_config
from tests.support import interpreters
from tests.support.models import families, megatron_run, next_families, vision
from tests.support.models import references as ref

pytestmark = pytest.mark.early

State = dict[str, torch.Tensor]
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 5e5}
MORE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "deepseek_v3": {"n_group": 1},
    "qwen2_moe": {"mlp_only_layers": []},
    "glm4_moe": {"n_shared_experts": 1},
    "gpt_neox_sequential": {"use_parallel_residual": False},
    "gpt_oss": {"sliding_window": 64, "rope_parameters": PLAIN_ROPE},
    "llama4_text": {"attention_chunk_size": 64},  # Megatron has no attention in chunks
    "cohere2": {"sliding_window": 64},
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
MORE_BY_HAND = ("gptj", "opt", "bloom", "cohere", "cohere2")
# CI runs one dense family at every degree. The others differ from it in biases, norms of heads and
# experts, and run at degrees that cut these.
IN_CI = {
    *(("llama", t, 1) for t in (1, 2, 4, 8)), ("qwen2", 2, 1), ("qwen3", 2, 1),
    ("mixtral", 1, 2), ("mixtral", 2, 2), ("qwen3_moe", 2, 1),
}  # fmt: skip
CASES = [
    *(
        pytest.param(family, t, ep, marks=[] if (family, t, ep) in IN_CI else [pytest.mark.long])
        for family in (*DENSE, *SPARSE) for t in (1, 2, 4, 8)
        for ep in ((1, 2) if family in SPARSE else (1,))
    ),
    *(pytest.param(family, 2, 1) for family in BY_HAND),
    pytest.param("deepseek_v3", 1, 2, marks=pytest.mark.long),
    pytest.param("deepseek_v3", 2, 2),
    *(pytest.param(family, 2, 2) for family in ("qwen2_moe", "glm4_moe")),
    pytest.param("gpt_oss", 1, 2, marks=pytest.mark.long),  # CI has 2×2×1, below
    ("llama4_text", 2, 1), ("qwen3_next", 2, 1),
    *(
        pytest.param(family, 2, 2, marks=pytest.mark.long) for family in next_families.FAMILIES
    ),
    *(
        pytest.param(family, 2, 1, marks=[] if family in ("gptj", "bloom") else [pytest.mark.long])
        for family in MORE_BY_HAND
    ),
    pytest.param("phimoe", 2, 2),
    pytest.param("phimoe", 2, 1, marks=pytest.mark.long),
    *(
        pytest.param(family, t, ep, marks=pytest.mark.long)
        for t, ep, some in ((4, 1, (*BY_HAND, *MORE_BY_HAND, "deepseek_v3")),
                            (1, 8, ("gpt_oss", "deepseek_v3", "phimoe")))
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
            source = next_families if family in next_families.FAMILIES else source
            model = source.model(family.removesuffix("_sequential"), **MORE.get(family, {}))
            known[family] = (model, ref.on_disk(model, folder), folder)
            if family in BRIDGED:
                path = folder / "config.json"
                path.write_text(json.dumps({**json.loads(path.read_text()), **OLD_KEYS}))
        return known[family]

    return get


@pytest.mark.parametrize(("family", "t", "ep"), CASES)
def test_megatron_and_the_tables_agree_both_ways(tmp_path, megatron, hub, judged, family, t, ep):
    agree_both_ways(tmp_path, megatron, hub(family), family, t, ep, t)
    say(judged, family, t, ep)


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
    tmp_path, megatron, hub, judged, family, t, ep, etp
):
    agree_both_ways(tmp_path, megatron, hub(family), family, t, ep, etp)
    say(judged, family, t, ep, etp)


def say(judged: Callable[..., None], family: str, t: int, ep: int, etp: int | None = None) -> None:
    at = f"{t}×{ep}" if ep > 1 else str(t)
    at = at if etp is None else f"{t}×{ep}×{etp}"
    family = family.removesuffix("_sequential")
    for layout in HELD:
        legacy = layout == "mcore_te_legacy"
        judges = ["Megatron-core", *(["mbridge"] if family in BRIDGED and not legacy else [])]
        if family in SPARSE or not legacy:
            judged(family, layout, exports=judges, imports=judges, at=at)
    if math.lcm(t, ep * (t if etp is None else etp)) == 2:
        judged(family, "Megatron torch_dist", exports=["Megatron-core"], at=at)


@pytest.mark.parametrize("what", ["a swapped tensor", "ranks in another order", "a wrong degree"])
def test_megatron_sees_what_is_wrong(tmp_path, megatron, hub, what):
    """It refuses shards of another degree, and writes another model from the others."""
    _, state, folder = hub("llama")
    t = 1 if what == "a wrong degree" else 2
    report = import_hf(folder, tmp_path / "in", Parallel("mcore_local", tp=t),  prefix="",
                       options=ImportOptions(pad_vocab_to_multiple_of=64))  # fmt: skip
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
            Parallel(layout, **degrees),
            prefix="",
            options=ImportOptions(pad_vocab_to_multiple_of=128 // t),
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
        report = export_hf(
            states, tmp_path / f"{layout}-hf", config=model.config, parallel=Parallel(**degrees)
        )
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


@pytest.mark.parametrize("t", [2, *(pytest.param(t, marks=pytest.mark.long) for t in (1, 4))])
@pytest.mark.parametrize("family", megatron_run.TOWERS)
def test_mbridge_fills_and_exports_language_model_and_tower(tmp_path, megatron, judged, family, t):
    model, hub = vision.model(family), tmp_path / "hub"
    state = vision.released(model, hub)
    config = read_config(model.config)
    assert config is not None
    (hub / "config.json").write_text(json.dumps(config.complete(None)))  # for transformers 4 too
    done = {
        degree: import_hf(
            hub, tmp_path / f"tp{degree}", Parallel("mcore_te_tower", tp=degree), prefix=""
        )
        for degree in {1, t}
    }
    megatron({
        "hf": str(hub), "ranks": str(tmp_path / f"tp{t}"), "whole": str(tmp_path / "tp1"),
        "out": str(tmp_path), "world": t, "seconds": 100, "tp": t, "ep": 1, "etp": t,
    })  # fmt: skip
    for rank, file in enumerate(done[t].files):
        found = torch.load(tmp_path / f"filled{rank}.pt")
        assert_same(found, load_file(tmp_path / f"tp{t}" / file))
    assert_same(torch.load(tmp_path / "exported.pt"), state)
    judged(family, "mcore_te_tower", exports=["mbridge"], imports=["mbridge"], at=str(t))


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


@pytest.mark.parametrize(
    ("family", "t", "ep"),
    [
        ("glm4_moe", 2, 1),
        pytest.param("glm4_moe", 2, 2, marks=pytest.mark.long),
        pytest.param("deepseek_v3", 1, 2, marks=pytest.mark.long),
    ],
)
def test_megatron_and_the_tables_agree_on_layers_that_predict_further_tokens(
    tmp_path, monkeypatch, megatron, judged, family, t, ep
):
    """mbridge 0.15.1 maps a further layer of GLM-4-MoE, and of a DeepSeek-V3 with 61 layers. It
    gives the copies of the embedding and the head of the latter only."""
    own = {"n_shared_experts": 1} if family == "glm4_moe" else {"n_group": 1, "n_routed_experts": 4}
    layers = 61 if family == "deepseek_v3" else next_families.LAYERS
    folder, degrees = tmp_path / "release", {"tp": t, "ep": ep, "etp": t}
    state = ref.on_disk(families.model(family, num_hidden_layers=layers, **own), folder)
    monkeypatch.setattr(next_families, "LAYERS", layers)
    more = next_families.further(family, state)
    save_file({**state, **more}, folder / "model.safetensors")
    path = folder / "config.json"
    more_said = {"rope_theta": OLD_KEYS["rope_theta"], "num_nextn_predict_layers": 1}
    path.write_text(json.dumps({**json.loads(path.read_text()), **more_said}))
    options = ImportOptions(mtp="keep", pad_vocab_to_multiple_of=128 // t)
    written = {
        layout: import_hf(
            folder, tmp_path / layout, Parallel(layout, **degrees), prefix="", options=options
        )
        for layout in ("mcore_te", "mcore_local")
    }
    world = t * ep
    megatron({
        "hf": str(folder), "ranks": str(tmp_path / "mcore_local"), "out": str(tmp_path),
        "legacy": None, "world": world, "seconds": 200, **degrees, "mtp": True,
        "dist": str(tmp_path / "dist") if world == 2 else None,
    })  # fmt: skip
    logits = torch.load(tmp_path / "logits.pt")
    wanted = next_families.predicted(folder, monkeypatch)
    assert logits.shape[:2] == (2, 40)  # of its last place, Megatron has no next token
    assert (logits[:, :39, : ref.V] - wanted).abs().max() <= 1e-5
    whole = {**state, **more}
    for layout, done in written.items():
        states = [tmp_path / f"{HELD[layout]}{rank}.pt" for rank in range(world)]
        for path, file in zip(states, done.files, strict=True):
            assert_same(load_file(tmp_path / layout / file), torch.load(path)["model"])
        out = tmp_path / f"{layout}-hf"
        export_hf(
            states,
            out,
            config=folder,
            options=ExportOptions(mtp="keep"),
            parallel=Parallel(**degrees),
        )
        assert_same(load_file(out / "model.safetensors"), whole)
        judged(family, f"{layout}, MTP", exports=["Megatron-core", "logits"],
               imports=["mbridge", "Megatron-core"], at=f"{t}×{ep}")  # fmt: skip
    if world == 2:
        report = export_hf(
            tmp_path / "dist",
            tmp_path / "dist-hf",
            config=folder,
            options=ExportOptions(mtp="keep"),
        )
        assert "torch_dist" in report.source and report.layout == "mcore_te"
        assert_same(load_file(tmp_path / "dist-hf" / "model.safetensors"), whole)
    exported = torch.load(tmp_path / "exported.pt")
    if family == "glm4_moe":
        shared = ("layers.2.embed_tokens.weight", "shared_head.head.weight")
        whole = {name: tensor for name, tensor in whole.items() if not name.endswith(shared)}
    else:  # what it gives under two names keeps its padding
        exported = {name: tensor[: len(whole[name])] for name, tensor in exported.items()}
    assert_same(exported, whole)
