"""Every layout and family of the table comes out as the very bytes and logits of the original."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from smckpt import Parallel, errors, export_hf
from tests.support.models import references as ref

State = dict[str, torch.Tensor]


@cache
def _model(family: str) -> Any:
    return ref.model(family)


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Callable[[str], tuple[Any, State]]:
    """A family's model and its state dict as transformers writes it."""

    @cache
    def made(family: str) -> tuple[Any, State]:
        model = _model(family)
        return model, ref.on_disk(model, tmp_path_factory.mktemp(family))

    return made


def written(folder: Path, states: list[State], how: str = "safetensors") -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = []
    for number, state in enumerate(states):
        path = folder / f"rank{number:02d}.{how}"
        if how == "pt":
            torch.save({"model": state, "step": 3}, path)
        else:
            save_file(state, path)
        paths.append(path)
    return paths


def exported(folder: Path) -> State:
    out: State = {}
    for path in folder.glob("*.safetensors"):
        out |= load_file(path)
    return out


def same(found: State, wanted: State) -> bool:
    """Names and bytes."""
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def logits_differ(model: Any, folder: Path) -> float:
    again, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    tokens = torch.arange(40).reshape(2, 20) % ref.V
    with torch.no_grad():
        return (again.eval()(tokens).logits - model(tokens).logits).abs().max().item()


DENSE = ("llama", "llama_biased", "mistral", "qwen2", "qwen3", "gpt_neox")
SPARSE = ("mixtral", "qwen3_moe")
JUDGES = ["formulas", "logits"]


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("layout", ["mcore_te", "mcore_local", "te_split"])
def test_a_dense_model_of_four_ranks_is_the_original(tmp_path, hub, family, layout, judged):
    model, state = hub(family)
    cuts = {
        "mcore_te": lambda r, e: ref.mcore(state, 4, r),
        "mcore_local": lambda r, e: ref.mcore(state, 4, r, local=True),
        "te_split": lambda r, e: ref.te(state, 4, r),
    }
    paths = written(tmp_path / "in", ref.each_rank(cuts[layout], 4))
    report = export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=4), config=model.config)
    assert report.layout == layout
    assert same(exported(tmp_path / "hf"), state)
    assert logits_differ(model, tmp_path / "hf") <= 1e-5
    judged(family, layout, exports=JUDGES, at="4")


@pytest.mark.parametrize("t", [1, 2, 8])
def test_megatrons_qkv_is_split_at_every_degree_beyond_the_groups_too(tmp_path, hub, t, judged):
    model, state = hub("llama_biased")
    paths = written(tmp_path / "in", ref.each_rank(lambda r, e: ref.mcore(state, t, r), t))
    export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=t), config=model.config)
    assert same(exported(tmp_path / "hf"), state)
    assert logits_differ(model, tmp_path / "hf") <= 1e-5
    judged("llama_biased", "mcore_te", exports=JUDGES, at=f"{t}")


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("kind", ["grouped", "sequential", "local"])
@pytest.mark.parametrize(("t", "ep"), [(1, 2), (2, 1), (2, 2), (1, 8)])
def test_experts_of_all_ranks_come_together(tmp_path, hub, family, kind, t, ep, judged):
    model, state = hub(family)

    def cut(r: int, e: int) -> State:
        return ref.mcore(state, t, r, ep, e, local=kind == "local", sequential=kind != "grouped")

    paths = written(tmp_path / "in", ref.each_rank(cut, t, ep))
    export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=t, ep=ep), config=model.config)
    assert same(exported(tmp_path / "hf"), state)
    assert logits_differ(model, tmp_path / "hf") <= 1e-5
    layouts = {"grouped": "mcore_te", "sequential": "mcore_te_sequential", "local": "mcore_local"}
    judged(family, layouts[kind], exports=JUDGES, at=f"{t}×{ep}" if ep > 1 else f"{t}")


@pytest.mark.parametrize("fused", ["per_rank", "interleaved"])
@pytest.mark.parametrize("family", ["llama_biased", "gpt_neox", "qwen2"])
def test_fused_transformer_engine_is_refused_until_its_order_is_said(
    tmp_path, hub, family, fused, judged
):
    model, state = hub(family)
    cut = lambda r, e: ref.te(state, 2, r, fused=fused)  # noqa: E731
    paths = written(tmp_path / "in", ref.each_rank(cut, 2))
    with pytest.raises(errors.UsageError, match=r"te_fused, te_fused_interleaved"):
        export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=2), config=model.config)
    layout = "te_fused" if fused == "per_rank" else "te_fused_interleaved"
    export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=2, layout=layout), config=model.config)
    assert same(exported(tmp_path / "hf"), state)
    assert logits_differ(model, tmp_path / "hf") <= 1e-5
    other = "te_fused" if fused != "per_rank" else "te_fused_interleaved"
    for name, directory in ((layout, "again"), (other, "no")):  # only the caller knows
        report = export_hf(
            paths,
            tmp_path / directory,
            parallel=Parallel(tp=2, layout=name),
            config=model.config,
        )
        assert any(f"says that they are in {name}" in note for note in report.notes), report.notes
    assert not same(exported(tmp_path / "no"), state)
    judged(family, layout, exports=JUDGES, at="2")


@pytest.mark.parametrize("t", [1, 2, 4])
def test_metas_rotary_order_is_undone(tmp_path, hub, t, judged):
    model, state = hub("llama")
    paths = written(tmp_path / "in", ref.each_rank(lambda r, e: ref.meta(state, t, r), t))
    export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=t), config=model.config)
    assert same(exported(tmp_path / "hf"), state)
    assert logits_differ(model, tmp_path / "hf") <= 1e-5
    judged("llama", "meta", exports=JUDGES, at=f"{t}")


@pytest.mark.parametrize(("t", "embedded"), [(1, "cut"), (2, "whole"), (8, "cut")])
def test_smp_v1_names_of_a_neox(tmp_path, hub, t, embedded, judged):
    model, state = hub("gpt_neox")
    ranks = ref.each_rank(lambda r, e: ref.smp_v1(state, t, r), t)
    for held in ranks:
        if embedded == "whole":  # as SMP has it for GPT-NeoX, beside a buffer
            held["word_embedding.weight"] = state["gpt_neox.embed_in.weight"]
            held["lm_head.weight"] = state["embed_out.weight"]
            held["transformer.seq_layers.0.attention.rotary_emb.inv_freq"] = torch.ones(4)
    paths = written(tmp_path / "in", ranks)
    export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=t), config=model.config)
    assert same(exported(tmp_path / "hf"), state)
    assert logits_differ(model, tmp_path / "hf") <= 1e-5
    judged("gpt_neox", "smp_v1", exports=JUDGES, at=f"{t}")


@pytest.mark.parametrize("family", ["llama", "qwen2", *SPARSE])
@pytest.mark.parametrize("t", [1, 2, 4])
def test_ranks_of_transformers_own_tensor_parallelism(tmp_path, hub, family, t, judged):
    model, state = hub(family)
    paths = written(tmp_path / "in", ref.each_rank(lambda r, e: ref.hf_tp(model, t, r), t))
    export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=t), config=model.config)
    assert same(exported(tmp_path / "hf"), state)
    assert logits_differ(model, tmp_path / "hf") <= 1e-5
    judged(family, "hf_tp", exports=JUDGES, at=f"{t}")


def test_files_of_torch_save_are_read_like_safetensors(tmp_path, hub):
    model, state = hub("qwen2")
    paths = written(tmp_path / "in", ref.each_rank(lambda r, e: ref.mcore(state, 2, r), 2), "pt")
    export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=2), config=model.config)
    assert same(exported(tmp_path / "hf"), state)


# -- what must not come out the same ---------------------------------------------------------------


@pytest.mark.parametrize("fault", ["no permutation", "naive fc1", "unsplit bias"])
def test_a_source_cut_wrongly_does_not_pass_for_the_original(tmp_path, hub, fault):
    model, state = hub("llama_biased")
    cut = lambda r, e: ref.mcore(state, 2, r, fault=fault)  # noqa: E731
    paths = written(tmp_path / "in", ref.each_rank(cut, 2))
    export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=2), config=model.config)
    assert not same(exported(tmp_path / "hf"), state)
    assert logits_differ(model, tmp_path / "hf") > 1e-3


def test_meta_weights_taken_unpermuted_would_show(tmp_path, hub):
    model, state = hub("llama")
    cut = lambda r, e: ref.meta(state, 1, r, permuted=False)  # noqa: E731
    paths = written(tmp_path / "in", ref.each_rank(cut, 1))
    export_hf(paths, tmp_path / "hf", config=model.config)
    assert logits_differ(model, tmp_path / "hf") > 1e-3


def test_padding_is_cut_off_and_never_read_as_vocabulary(tmp_path, hub):
    model, state = hub("llama")
    paths = written(tmp_path / "in", ref.each_rank(lambda r, e: ref.mcore(state, 2, r), 2))
    export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=2), config=model.config)
    found = exported(tmp_path / "hf")["model.embed_tokens.weight"]
    assert found.shape == (ref.V, 64) and not (found == 7.5).any()


# -- refused ---------------------------------------------------------------------------------------


def test_a_missing_tensor_and_a_strange_one_are_listed(tmp_path, hub):
    model, state = hub("llama")
    shard = ref.mcore(state, 1, 0)
    shard["decoder.layers.1.mlp.surprise"] = shard.pop("decoder.layers.1.mlp.linear_fc2.weight")
    (path,) = written(tmp_path / "in", [shard])
    with pytest.raises(errors.UsageError, match=r"mcore_te.*linear_fc2.*surprise"):
        export_hf([path], tmp_path / "hf", config=model.config)
    assert not (tmp_path / "hf").exists()


def test_a_bias_that_the_config_denies_is_refused(tmp_path, hub):
    _, state = hub("llama_biased")
    paths = written(tmp_path / "in", [ref.mcore(state, 1, 0)])
    with pytest.raises(errors.UsageError, match=r"linear_qkv\.bias"):
        export_hf(paths, tmp_path / "hf", config=_model("llama").config)


def test_too_few_rows_of_vocabulary_are_refused(tmp_path, hub):
    model, state = hub("llama")
    shard = ref.mcore(state, 1, 0)
    name = "embedding.word_embeddings.weight"
    shard[name] = shard[name][:112].contiguous()
    with pytest.raises(errors.TensorMismatchError, match="112 rows.*vocab_size=120"):
        export_hf(written(tmp_path / "in", [shard]), tmp_path / "hf", config=model.config)


def test_the_wrong_degree_is_refused(tmp_path, hub):
    model, state = hub("llama")
    paths = written(tmp_path / "in", ref.each_rank(lambda r, e: ref.mcore(state, 4, r), 4))
    with pytest.raises(errors.TensorMismatchError, match="64 rows.*files of all ranks"):
        export_hf(paths[:2], tmp_path / "hf", parallel=Parallel(tp=2), config=model.config)
    with pytest.raises(errors.UsageError, match="4 files.*tp=2"):
        export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=2), config=model.config)


def test_a_degree_that_divides_nothing_is_refused(tmp_path, hub):
    model, state = hub("llama")
    ranks = [{k: v + r for k, v in ref.mcore(state, 1, 0).items()} for r in range(3)]
    paths = written(tmp_path / "in", ranks)
    with pytest.raises((errors.TopologyError, errors.TensorMismatchError), match="3"):
        export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=3), config=model.config)


def test_norms_that_ranks_hold_differently_are_refused(tmp_path, hub):
    model, state = hub("llama")
    shards = ref.each_rank(lambda r, e: ref.mcore(state, 2, r), 2)
    name = "decoder.final_layernorm.weight"
    shards[1][name] = shards[1][name] + 1e-3
    with pytest.raises(errors.TensorMismatchError, match="copies differ.*final_layernorm"):
        export_hf(
            written(tmp_path / "in", shards),
            tmp_path / "hf",
            parallel=Parallel(tp=2),
            config=model.config,
        )


def test_a_tied_head_is_left_out_and_refused_where_it_differs(tmp_path):
    model = ref.model("qwen2", tie_word_embeddings=True)
    state = ref.on_disk(model, tmp_path)
    plain = ref.each_rank(lambda r, e: ref.mcore(state, 2, r), 2)
    export_hf(
        written(tmp_path / "a", plain),
        tmp_path / "hf",
        parallel=Parallel(tp=2),
        config=model.config,
    )
    assert same(exported(tmp_path / "hf"), state)
    both = {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}
    shards = ref.each_rank(lambda r, e: ref.mcore(both, 2, r), 2)
    report = export_hf(
        written(tmp_path / "b", shards),
        tmp_path / "h2",
        parallel=Parallel(tp=2),
        config=model.config,
    )
    assert report.left_out == ("lm_head.weight",)
    assert same(exported(tmp_path / "h2"), state)
    shards[1]["output_layer.weight"][3] += 1e-3
    with pytest.raises(errors.TensorMismatchError, match=r"lm_head\.weight.*differ"):
        export_hf(
            written(tmp_path / "c", shards),
            tmp_path / "h3",
            parallel=Parallel(tp=2),
            config=model.config,
        )


def test_a_transformed_model_without_a_config_or_of_an_unknown_family_is_refused(tmp_path, hub):
    _, state = hub("llama")
    paths = written(tmp_path / "in", [ref.mcore(state, 1, 0)])
    with pytest.raises(errors.UsageError, match="no config was given"):
        export_hf(paths, tmp_path / "hf")
    with pytest.raises(errors.UsageError, match="'xglm'.*gpt_neox"):
        export_hf(paths, tmp_path / "hf", config={"model_type": "xglm"})


def test_a_file_that_is_cut_short_is_refused(tmp_path, hub):
    model, state = hub("llama")
    (path,) = written(tmp_path / "in", [ref.mcore(state, 1, 0)])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        errors.CorruptCheckpointError, match="damaged: the arrays end.*as it was written"
    ):
        export_hf([path], tmp_path / "hf", config=model.config)
