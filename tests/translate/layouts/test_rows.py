"""What a row can say beside where things lie: copies that are averaged or summed, norms stored
less one, experts folded into one matrix, heads of which a part is rotary."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from smckpt import Parallel, errors, export_hf
from smckpt.layout.geometry import MeshGeometry, PerRankGeometry
from smckpt.layout.mesh import Mesh
from smckpt.layout.mesh import Placement as P
from smckpt.topology import ParallelState
from smckpt.translate import LayoutRow, TensorLayout, get_layout, import_hf
from tests.support.models import references as ref
from tests.support.models import shards
from tests.translate.layouts.test_layout_checkpoints import one

State = dict[str, torch.Tensor]
NORM = "decoder.final_layernorm.weight"


@cache
def _model(family: str) -> Any:
    return ref.model(family)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Any:
    @cache
    def made(family: str) -> tuple[Path, State]:
        folder = tmp_path_factory.mktemp(family)
        return folder, ref.on_disk(_model(family), folder)

    return made


def written(folder: Path, states: list[State]) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"rank{number}.safetensors" for number in range(len(states))]
    for path, state in zip(paths, states, strict=True):
        save_file({n: t.contiguous() for n, t in state.items()}, path)
    return paths


def same(folder: Path, wanted: State) -> bool:
    found = load_file(folder / "model.safetensors")
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def with_copies(how: str, name: str = NORM) -> TensorLayout:
    """Megatron's local layout in which one row's copies are averaged or summed."""
    layout = get_layout("mcore_local", "llama")
    rows = tuple(replace(row, copies=how) if row.name == name else row for row in layout.rows)
    return replace(layout, name="ours", rows=rows)


# -- copies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["mean", "sum"])
def test_copies_that_drifted_apart_are_averaged_or_summed(tmp_path, directory, how, dtype):
    state = {n: t.to(dtype) for n, t in directory("llama")[1].items()}
    cuts = [ref.mcore(state, 4, r, local=True) for r in range(4)]
    torch.manual_seed(5)
    for cut in cuts:
        cut[NORM] = torch.randn(64).to(dtype)
    paths = written(tmp_path / "in", cuts)
    with pytest.raises(errors.TensorMismatchError, match="copies differ"):
        export_hf(paths, tmp_path / "no", parallel=Parallel(tp=4), config=_model("llama").config)
    config = _model("llama").config
    export_hf(
        paths, tmp_path / "hf", parallel=Parallel(tp=4, layout=with_copies(how)), config=config
    )
    total = torch.stack([cut[NORM].double() for cut in cuts]).sum(0)
    total = total / 4 if how == "mean" else total
    assert same(tmp_path / "hf", {**state, "model.norm.weight": total.to(dtype)})
    export_hf(paths, tmp_path / "cast", parallel=Parallel(with_copies(how), tp=4), config=config,
              dtype="float32")  # fmt: skip
    found = load_file(tmp_path / "cast" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(found, total.to(dtype).float())


@pytest.mark.parametrize("how", ["mean", "sum"])
def test_an_import_gives_copies_whose_mean_or_sum_is_the_original(tmp_path, directory, how):
    folder, state = directory("llama")
    done = import_hf(folder, tmp_path / "in", Parallel(with_copies(how), tp=2), prefix="")
    paths = [tmp_path / "in" / name for name in done.files]
    second = load_file(paths[1])[NORM]
    assert torch.equal(second, state["model.norm.weight"] if how == "mean" else torch.zeros(64))
    config = _model("llama").config
    export_hf(
        paths, tmp_path / "hf", parallel=Parallel(tp=2, layout=with_copies(how)), config=config
    )
    assert same(tmp_path / "hf", state)


def test_ranks_of_other_experts_must_still_hold_the_same_copies(tmp_path, directory):
    model, (_, state) = _model("mixtral"), directory("mixtral")
    layout = get_layout("mcore_te", "mixtral")
    rows = tuple(replace(r, copies="sum") if r.name == NORM else r for r in layout.rows)
    layout = replace(layout, rows=rows)
    cuts = ref.each_rank(lambda r, e: ref.mcore(state, 2, r, 2, e), 2, 2)
    for number, cut in enumerate(cuts):
        cut[NORM] = state["model.norm.weight"] * (0.25 if number % 2 == 0 else 0.75)
    paths = written(tmp_path / "in", cuts)
    export_hf(
        paths, tmp_path / "hf", parallel=Parallel(tp=2, ep=2, layout=layout), config=model.config
    )
    halves = sum(cuts[r][NORM].double() for r in range(2)).float()  # type: ignore[union-attr]
    assert same(tmp_path / "hf", {**state, "model.norm.weight": halves})
    cuts[2][NORM] = cuts[2][NORM] + 1
    paths = written(tmp_path / "bad", cuts)
    with pytest.raises(errors.TensorMismatchError, match="copies differ"):
        export_hf(
            paths,
            tmp_path / "no",
            parallel=Parallel(tp=2, ep=2, layout=layout),
            config=model.config,
        )


def test_parts_of_a_fused_tensor_must_be_computed_alike(tmp_path, directory):
    """NeoX fuses q, k and v on disk: a summed q beside a plain k has no place there."""
    state = directory("gpt_neox")[1]
    layout = get_layout("smp_v1", "gpt_neox")
    rows = tuple(
        replace(r, tp=None, copies="sum") if r.roles == ("q_b",) else r for r in layout.rows
    )
    cuts = [ref.smp_v1(state, 2, r) for r in range(2)]
    for cut in cuts:
        for i in range(2):
            cut[f"transformer.seq_layers.{i}.attention.query.bias"] = torch.randn(128)
    with pytest.raises(errors.TensorMismatchError, match="different shift= or copies="):
        export_hf(
            written(tmp_path / "in", cuts), tmp_path / "hf",
            parallel=Parallel(tp=2, layout=replace(layout, name="ours", rows=rows)),
            config=_model("gpt_neox").config,
        )  # fmt: skip


def test_a_row_that_says_two_things_at_once_is_refused():
    with pytest.raises(errors.UsageError, match="copies='sum'"):
        LayoutRow("w", ("q",), tp=0, copies="sum")
    with pytest.raises(errors.UsageError, match="copies='most'"):
        LayoutRow("w", ("norm1",), copies="most")
    with pytest.raises(errors.UsageError, match="folded='up'"):
        LayoutRow("w", ("e_up",), stacked=True, folded="up")
    for wrong, words in (
        ({"how": "interlaved"}, "how='interlaved'"),
        ({"how": "interleaved"}, "it takes 3 or 4 of"),
        ({"roles": ("query",)}, "roles=.'query'"),
        ({"roles": ()}, "roles=..,"),
        ({"tp": 2}, "tp=2"),
    ):
        with pytest.raises(errors.UsageError, match=words):
            LayoutRow(**{"name": "w", "roles": ("q",), **wrong})
    with pytest.raises(errors.UsageError, match=r"drop='\('"):
        TensorLayout("ours", (), drop=("(",))


# -- zero-centred norms ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["mcore_te", "mcore_local", "te_split"])
def test_norms_stored_less_one_get_it_back(tmp_path, directory, layout):
    model, (folder, state) = _model("qwen3"), directory("qwen3")
    less = {n: t - 1 if "norm" in n else t for n, t in state.items()}
    cut = {
        "mcore_te": lambda r: ref.mcore(less, 2, r),
        "mcore_local": lambda r: ref.mcore(less, 2, r, local=True),
        "te_split": lambda r: ref.te(less, 2, r),
    }[layout]
    paths = written(tmp_path / "in", [cut(r) for r in range(2)])
    name = f"{layout}_zero_centred"
    report = export_hf(
        paths, tmp_path / "hf", parallel=Parallel(tp=2, layout=name), config=model.config
    )
    assert report.layout == name
    wanted = {n: (t.double() + 1).float() if "norm" in n else t for n, t in less.items()}
    assert same(tmp_path / "hf", wanted)
    for n, tensor in wanted.items():
        assert torch.allclose(tensor, state[n], atol=1e-6)
    done = import_hf(folder, tmp_path / "back", Parallel(name, tp=2), prefix="")
    found, own = load_file(tmp_path / "back" / done.files[1]), cut(1)
    norms = [n for n in own if "norm" in n and not n.endswith("_weight_scale")]
    assert norms and all(torch.equal(found[n], own[n]) for n in norms if own[n].dim() == 1)


# -- Megatron's legacy experts ---------------------------------------------------------------------


def legacy(state: State, family: str, t: int, r: int, ep: int, er: int) -> State:
    """`weight1.view(E, hidden, -1)` and `weight2.view(E, -1, hidden)` of a rank's own experts."""
    out = ref.mcore(state, t, r, ep, er)
    for i in range(2):
        at = f"decoder.layers.{i}.mlp.experts."
        count = 8 // ep
        fc1 = [out.pop(f"{at}linear_fc1.weight{e}") for e in range(count)]
        fc2 = [out.pop(f"{at}linear_fc2.weight{e}") for e in range(count)]
        hidden = fc1[0].shape[1]
        out[at + "weight1"] = torch.stack([w.T for w in fc1]).contiguous().reshape(hidden, -1)
        out[at + "weight2"] = torch.stack([w.T for w in fc2]).contiguous().reshape(-1, hidden)
    return out


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(("t", "ep"), [(1, 1), (2, 2), (1, 4)])
def test_legacy_grouped_experts_are_unfolded(tmp_path, directory, judged, family, t, ep):
    model, (folder, state) = _model(family), directory(family)
    cuts = ref.each_rank(lambda r, e: legacy(state, family, t, r, ep, e), t, ep)
    paths = written(tmp_path / "in", cuts)
    report = export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=t, ep=ep), config=model.config)
    assert report.layout == "mcore_te_legacy"
    assert same(tmp_path / "hf", state)
    done = import_hf(folder, tmp_path / "back", Parallel("mcore_te_legacy", tp=t, ep=ep), prefix="")
    for name, cut in zip(done.files, cuts, strict=True):
        found = load_file(tmp_path / "back" / name)
        for key in (f"decoder.layers.{i}.mlp.experts.weight{n}" for i in range(2) for n in (1, 2)):
            assert torch.equal(found[key], cut[key])
    at = f"{t}×{ep}" if ep > 1 else str(t)
    judged(family, "mcore_te_legacy", exports=["formulas"], imports=["formulas"], at=at)


def test_legacy_experts_in_a_checkpoint_of_plain_tensors(tmp_path, directory):
    state = directory("mixtral")[1]
    cuts = ref.each_rank(lambda r, e: legacy(state, "mixtral", 2, r, 2, e), 2, 2)

    def held(rank: int) -> shards.Held:
        return [one(n, PerRankGeometry((n,), tuple(t.shape), (rank,)), rank, t)
                for n, t in cuts[rank].items()]  # fmt: skip

    topology = ParallelState(4, tensor_parallel_degree=2, expert_parallel_degree=2).to_json()
    path = shards.write(tmp_path / "c", 4, held, topology=topology)
    export_hf(path, tmp_path / "hf", config=_model("mixtral").config)
    assert same(tmp_path / "hf", state)


def test_legacy_experts_that_fsdp_divided_are_refused(tmp_path, directory):
    cut = legacy(directory("mixtral")[1], "mixtral", 1, 0, 1, 0)
    mesh = Mesh(("shard",), (2,), (0, 1))

    def held(rank: int) -> shards.Held:
        return [
            shards._held(("model",), n, n, MeshGeometry(n, tuple(t.shape), mesh, (P("shard", 0),)),
                         rank, cut, t.dtype)
            for n, t in cut.items()
        ]  # fmt: skip

    path = shards.write(tmp_path / "c", 2, held, topology=ParallelState(2).to_json())
    with pytest.raises(errors.TopologyError, match=r"experts\.weight"):
        export_hf(path, tmp_path / "hf", config=_model("mixtral").config)


# -- partial rotary --------------------------------------------------------------------------------


def test_metas_order_of_heads_of_which_half_is_rotary(tmp_path, directory):
    """Only the first rows of each head are in pairs; the rest stays."""
    folder, state = directory("llama")
    values = _model("llama").config.to_dict()
    config = {**values, "rope_parameters": {**values["rope_parameters"],
                                            "partial_rotary_factor": 0.5}}  # fmt: skip
    cut = ref.meta(state, 1, 0, permuted=False)
    for name, tensor in cut.items():
        if ".wq." in name or ".wk." in name:
            heads = tensor.view(-1, ref.D, *tensor.shape[1:]).clone()
            rotary, half = ref.D // 2, ref.D // 4
            first = heads[:, :rotary].view(len(heads), 2, half, *tensor.shape[1:])
            heads[:, :rotary] = first.transpose(1, 2).reshape(len(heads), rotary, *tensor.shape[1:])
            cut[name] = heads.reshape(tensor.shape)
    export_hf(written(tmp_path / "in", [cut]), tmp_path / "hf", config=config)
    assert same(tmp_path / "hf", state)
    done = import_hf(folder, tmp_path / "back", Parallel("meta"), config=config, prefix="")
    found = load_file(tmp_path / "back" / done.files[0])
    assert all(torch.equal(found[n], cut[n]) for n in found)


def test_the_rotary_part_of_a_neox_is_no_permutation(tmp_path, directory):
    """Its rows lie as on disk whatever `rotary_pct` is."""
    _, state = directory("gpt_neox")
    values = _model("gpt_neox").config.to_dict()
    for pct in (0.25, 1.0):
        rope = {**values["rope_parameters"], "partial_rotary_factor": pct}
        config = {
            **values,
            "rotary_pct": pct,
            "partial_rotary_factor": pct,
            "rope_parameters": rope,
        }
        paths = written(tmp_path / f"in{pct}", [ref.mcore(state, 2, r) for r in range(2)])
        export_hf(paths, tmp_path / f"hf{pct}", parallel=Parallel(tp=2), config=config)
        assert same(tmp_path / f"hf{pct}", state)
