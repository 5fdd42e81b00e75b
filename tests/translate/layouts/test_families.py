"""Families beyond the first ones: each layout that they have comes out as the original, in bytes
and in logits, and an import of the original is what the ranks held."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from smckpt import Parallel, errors, export_hf
from smckpt.translate import import_hf
from tests.support.models import families as ref
from tests.support.models.references import V, each_rank, on_disk

State = dict[str, torch.Tensor]
# of the vocabulary, whose padding is an import's own
PADDED = ("wte.weight", "word_embeddings.weight", "output_layer.weight", "lm_head.weight",
          "embed_tokens.weight", "output_layer.bias")  # fmt: skip


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


BOTH_WAYS = {"exports": ["formulas", "logits"], "imports": ["formulas"]}


def assert_there_and_back(
    folder: Path, hub: tuple[Any, State, Path], layout: str, cuts: list[State], t: int, ep: int = 1
) -> None:
    model, state, directory = hub
    given = None if layout == "mcore_te" else layout  # the names of one are enough
    report = export_hf(
        written(folder / "in", cuts),
        folder / "hf",
        parallel=Parallel(given, tp=t, ep=ep),
        config=model.config,
    )
    assert report.layout == layout
    assert_the_original(folder / "hf", model, state)
    done = import_hf(directory, folder / "back", Parallel(layout, tp=t, ep=ep), prefix="")
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
    "opt", "bloom",
)  # fmt: skip
LOCAL = tuple(f for f in DENSE if f not in ("gemma2", "gemma3_text", "glm4"))  # no norms after
ADDED = ("phimoe", "gptj", "opt", "bloom", "cohere", "cohere2")
OWN = ("gemma", "gemma2", "gemma3_text", "glm4", "granite", "nemotron", "olmo2", "phi3", "smollm3",
       "starcoder2", "deepseek_v2", "deepseek_v3", "glm4_moe", "olmoe", "qwen2_moe", "granitemoe",
       "phimoe", "cohere", "cohere_normed", "cohere2")  # fmt: skip


@pytest.mark.parametrize("family", DENSE)
def test_megatrons_names_of_a_dense_model(tmp_path, hub, family, judged):
    cuts = each_rank(lambda r, e: ref.mcore(family, hub(family)[1], 4, r), 4)
    assert_there_and_back(tmp_path, hub(family), "mcore_te", cuts, 4)
    judged(family, "mcore_te", **BOTH_WAYS, at="4")


@pytest.mark.parametrize("family", LOCAL)
def test_the_local_specs_names_of_a_dense_model(tmp_path, hub, family, judged):
    cuts = each_rank(lambda r, e: ref.mcore(family, hub(family)[1], 2, r, local=True), 2)
    assert_there_and_back(tmp_path, hub(family), "mcore_local", cuts, 2)
    judged(family, "mcore_local", **BOTH_WAYS, at="2")


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(("t", "ep"), [(2, 1), (2, 2), (1, 8)])
def test_megatrons_names_of_a_sparse_model(tmp_path, hub, family, local, t, ep, judged):
    state = hub(family)[1]
    cuts = each_rank(lambda r, e: ref.mcore(family, state, t, r, ep, e, local=local), t, ep)
    layout = "mcore_local" if local else "mcore_te"
    assert_there_and_back(tmp_path, hub(family), layout, cuts, t, ep)
    judged(family, layout, **BOTH_WAYS, at=f"{t}×{ep}" if ep > 1 else f"{t}")


@pytest.mark.parametrize("family", TE)
def test_transformer_engines_names(tmp_path, hub, family, judged):
    cuts = each_rank(lambda r, e: ref.te(family, hub(family)[1], 4, r), 4)
    assert_there_and_back(tmp_path, hub(family), "te_split", cuts, 4)
    judged(family, "te_split", **BOTH_WAYS, at="4")


@pytest.mark.parametrize("family", OWN)
def test_ranks_of_transformers_own_plan(tmp_path, hub, family, judged):
    cuts = each_rank(lambda r, e: ref.hf_tp(family, hub(family)[0], 2, r), 2)
    assert_transformers_ranks(tmp_path, hub(family), cuts, tp=2)
    judged(family, "hf_tp", **BOTH_WAYS, at="2")


@pytest.mark.parametrize("family", ["gpt_oss", "granitemoe", "phimoe", "qwen2_moe"])
@pytest.mark.parametrize("n", [2, 8])
def test_ranks_of_transformers_own_expert_parallelism(tmp_path, hub, family, n, judged):
    """The ranks that share the layers, where the plan cuts any, have experts of their own."""
    cut = lambda r, e: ref.hf_tp(family, hub(family)[0], n, r, experts=True)  # noqa: E731
    assert_transformers_ranks(tmp_path, hub(family), each_rank(cut, n), tp=n, ep=n, etp=1)
    judged(family, "hf_tp", **BOTH_WAYS, at=f"{n}×{n}")


def assert_transformers_ranks(
    folder: Path, hub: tuple[Any, State, Path], cuts: list[State], **degrees: int
) -> None:
    model, state, directory = hub
    paths = written(folder / "in", cuts)
    report = export_hf(paths, folder / "hf", config=model.config, parallel=Parallel(**degrees))
    assert report.layout == "hf_tp"
    assert_the_original(folder / "hf", model, state)
    done = import_hf(directory, folder / "back", Parallel("hf_tp", **degrees), prefix="")
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    for name, cut in zip(done.files, cuts, strict=True):
        assert same(
            load_file(folder / "back" / name), {n: t for n, t in cut.items() if n not in tied}
        )


# -- what must not come out the same, or not at all ------------------------------------------------


def _swapped(cuts: list[State]) -> list[State]:
    """Output projections of two layers have changed places."""
    names = [f"decoder.layers.{i}.self_attention.linear_proj.weight" for i in range(2)]
    return [{**cut, names[0]: cut[names[1]], names[1]: cut[names[0]]} for cut in cuts]


def _not_grouped(cuts: list[State]) -> list[State]:
    """All queries lie first, then all keys: not each group's together."""
    out = []
    for cut in cuts:
        name = "decoder.layers.0.self_attention.linear_qkv.weight"
        out.append({**cut, name: torch.cat([cut[name][::2], cut[name][1::2]])})
    return out


@pytest.mark.parametrize("family", ADDED)
@pytest.mark.parametrize("fault", [lambda cuts: cuts[::-1], _swapped, _not_grouped])
def test_ranks_or_tensors_in_another_order_do_not_pass_for_the_original(
    tmp_path, hub, family, fault
):
    model, state, _ = hub(family)
    cuts = each_rank(lambda r, e: ref.mcore(family, state, 2, r), 2)
    export_hf(
        written(tmp_path / "in", fault(cuts)),
        tmp_path / "hf",
        parallel=Parallel(tp=2),
        config=model.config,
    )
    with pytest.raises(AssertionError):
        assert_the_original(tmp_path / "hf", model, state)
    tokens = torch.arange(40).reshape(2, 20) % V
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    with torch.no_grad():
        assert (again(tokens).logits - model(tokens).logits).abs().max() > 1e-3


@pytest.mark.parametrize("family", ADDED)
def test_another_degree_than_the_ranks_had_is_refused(tmp_path, hub, family):
    model, state, _ = hub(family)
    paths = written(tmp_path / "in", each_rank(lambda r, e: ref.mcore(family, state, 4, r), 4))
    with pytest.raises(errors.TensorMismatchError, match="rows.*files of all ranks"):
        export_hf(paths[:2], tmp_path / "hf", parallel=Parallel(tp=2), config=model.config)


@pytest.mark.parametrize("family", ["gpt_oss", "granitemoe", "phimoe"])
def test_transformers_experts_in_another_order_are_seen_and_degrees_refused(tmp_path, hub, family):
    model, state, _ = hub(family)
    ranks = [ref.hf_tp(family, model, 2, r, experts=True) for r in range(2)]
    experts = {n for n in ranks[0] if ".experts." in n}
    other = [{**ranks[r], **{n: ranks[1 - r][n] for n in experts}} for r in range(2)]
    degrees: dict[str, int] = {"tp": 2, "ep": 2, "etp": 1}
    export_hf(
        written(tmp_path / "in", other),
        tmp_path / "hf",
        config=model.config,
        parallel=Parallel(**degrees),
    )
    with pytest.raises(AssertionError):
        assert_the_original(tmp_path / "hf", model, state)
    with pytest.raises(errors.TensorMismatchError, match=r"experts.*should be"):
        export_hf(
            written(tmp_path / "in", ranks),
            tmp_path / "no",
            parallel=Parallel(tp=2),
            config=model.config,
        )


def test_an_opt_with_norms_after_or_a_narrow_embedding_is_refused(tmp_path):
    """As the release of 350M: Megatron's layers have their norms before."""
    for more in ({"do_layer_norm_before": False}, {"word_embed_proj_dim": 64}):
        on_disk(ref.model("opt", **more), tmp_path / "hub")
        with pytest.raises(errors.KeysMismatchError, match="not a whole opt model"):
            import_hf(tmp_path / "hub", tmp_path / "in", Parallel("mcore_te"))


def test_blooms_release_has_older_keys_and_no_outer_name(tmp_path, hub):
    model, state, directory = hub("bloom")
    (tmp_path / "hub").mkdir()
    short = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    save_file(short, tmp_path / "hub" / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["n_embed"], config["num_attention_heads"] = config.pop("hidden_size"), config["n_head"]
    (tmp_path / "hub" / "config.json").write_text(json.dumps(config))
    done = import_hf(tmp_path / "hub", tmp_path / "in", Parallel("mcore_te", tp=2), prefix="")
    paths = [tmp_path / "in" / name for name in done.files]
    export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=2), config=model.config)
    assert_the_original(tmp_path / "hf", model, state)


def test_coheres_rotated_pairs_stay_side_by_side_under_metas_names(tmp_path, hub):
    _, state, directory = hub("cohere")
    done = import_hf(directory, tmp_path / "in", Parallel("meta"), prefix="")
    found = load_file(tmp_path / "in" / done.files[0])
    for part in "qk":
        wanted = state[f"model.layers.0.self_attn.{part}_proj.weight"]
        assert torch.equal(found[f"layers.0.attention.w{part}.weight"], wanted)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("gemma2", "te_split"),
        ("gpt2", "meta"),
        ("olmo2", "mcore_te"),
        ("cohere_normed", "mcore_te"),
    ],
)
def test_a_layout_without_rows_for_a_family_says_what_it_lacks(tmp_path, hub, family, layout):
    model, state, _ = hub(family)
    paths = written(tmp_path / "in", [ref.mcore(family, state, 1, 0)])
    with pytest.raises(errors.KeysMismatchError, match=f"{layout} has no row for"):
        export_hf(paths, tmp_path / "hf", config=model.config, parallel=Parallel(layout=layout))


def test_gemmas_norms_are_moved_and_not_shifted_wherever_they_lie(tmp_path, hub):
    """Both sides hold them less one: a shift there would double or lose it."""
    _, state, directory = hub("gemma2")
    done = import_hf(directory, tmp_path / "in", Parallel("mcore_te"), prefix="")
    found = load_file(tmp_path / "in" / done.files[0])
    assert torch.equal(found["decoder.final_layernorm.weight"], state["model.norm.weight"])
