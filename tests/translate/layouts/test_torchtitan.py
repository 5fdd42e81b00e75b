"""torchtitan 0.3's adapters and the tables agree, bitwise; so do its models' logits.

The adapter for Llama 3 moves the rotary rows of query and key as Meta's order wants it. Up to 0.2
torchtitan's names were Meta's (`meta`); they are `torchtitan` now, in the same order. Its Qwen 3
and GPT-OSS have Hugging Face's order, and so has DeepSeek, which pairs neighbours in both.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from smckpt.errors import CheckpointError
from smckpt.translate import Parallel, export_hf, import_hf
from tests.support import interpreters
from tests.support.models import families
from tests.support.models import references as ref

SCRIPT = Path(__file__).parents[2] / "support" / "models" / "torchtitan_run.py"
State = dict[str, torch.Tensor]
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (ref, {}),
    "mistral": (ref, {}),  # in torchtitan's Llama 3
    "qwen3": (ref, {}),
    "qwen3_tied": (ref, {"tie_word_embeddings": True}),
    "qwen3_moe": (ref, {"norm_topk_prob": True}),
    "gpt_oss": (families, {}),
    "deepseek_v2": (families, {"topk_method": "greedy"}),  # torchtitan ranks groups as V3 does
    "deepseek_v3": (families, {}),
    "deepseek_v3_plain": (families, {"q_lora_rank": None}),  # one matrix for queries
}


class Titan(NamedTuple):
    """A model of transformers, its state on disk, and the folder where torchtitan was at work."""

    model: Any
    state: State
    folder: Path

    @property
    def family(self) -> str:
        return self.model.config.model_type


@pytest.fixture(scope="module")
def titans(tmp_path_factory) -> dict[str, Titan]:
    python = interpreters.torchtitan()
    out = {}
    for name, (maker, more) in CASES.items():
        folder = tmp_path_factory.mktemp(name)
        model = maker.model(name.removesuffix("_plain").removesuffix("_tied"), **more)
        out[name] = Titan(model, ref.on_disk(model, folder), folder)
        import_hf(folder, folder / "theirs", Parallel("torchtitan"), prefix="")
    interpreters.run(python, str(SCRIPT), *(each.folder for each in out.values()))
    return out


@pytest.fixture(params=CASES)
def titan(request, titans) -> Titan:
    return titans[request.param]


def imported(folder: Path) -> State:
    (file,) = folder.glob("data-*.safetensors")
    return load_file(file)


def assert_same(found: State, wanted: State) -> None:
    assert found.keys() == wanted.keys()
    assert [n for n in wanted if not torch.equal(found[n], wanted[n])] == []


def balancing(state: State) -> set[str]:
    """The biases that balance experts, for which only DeepSeek-V3 has a place."""
    return {name for name in state if name.endswith("moe.expert_bias_E")}


@pytest.mark.parametrize("fused", [0, 1])
def test_what_torchtitan_holds_exports_to_the_original(tmp_path, titan, fused, judged):
    judged(titan.family, "torchtitan", exports=["torchtitan"], at="1")
    with torch.no_grad():
        wanted = titan.model(torch.arange(40).reshape(2, 20) % ref.V).logits
    assert (torch.load(titan.folder / f"logits{fused}.pt") - wanted).abs().max() <= 1e-5
    file = titan.folder / f"titan{fused}.pt"
    report = export_hf([file], tmp_path / "out", config=titan.model.config)
    assert report.layout == "torchtitan"
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), titan.state)
    held = balancing(torch.load(file)["model"])
    placed = any(name.endswith("e_score_correction_bias") for name in titan.state)
    told = [note for note in report.notes if "moe.expert_bias_E" in note]
    assert len(told) == (1 if held and not placed else 0)


def test_its_distributed_checkpoint_exports_to_the_original(tmp_path, titan, judged):
    judged(titan.family, "torchtitan, DCP", exports=["torchtitan"])
    report = export_hf(titan.folder / "dcp", tmp_path / "out", config=titan.model.config)
    assert report.layout == "torchtitan" and "(DCP)" in report.source
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), titan.state)


def test_an_import_is_what_torchtitans_adapter_reads(titan, judged):
    judged(titan.family, "torchtitan", imports=["torchtitan"], at="1")
    theirs = torch.load(titan.folder / "titan0.pt")["model"]
    read = imported(titan.folder / "theirs")
    for name in balancing(theirs) - read.keys():
        assert not theirs.pop(name).any()
    if titan.model.config.tie_word_embeddings:  # torchtitan's state has it twice
        assert torch.equal(theirs.pop("lm_head.weight"), theirs["tok_embeddings.weight"])
    assert_same(read, theirs)
    assert_same(torch.load(titan.folder / "hf.pt"), titan.state)
    with torch.no_grad():
        wanted = titan.model(torch.arange(40).reshape(2, 20) % ref.V).logits
    assert (torch.load(titan.folder / "logits_theirs.pt") - wanted).abs().max() <= 1e-5


def test_metas_names_are_the_same_in_other_words(tmp_path, titans, judged):
    judged("llama", "meta", imports=["torchtitan"], at="1")
    folder = titans["llama"].folder
    report = import_hf(folder, tmp_path / "in", Parallel("meta"), prefix="")
    found = load_file(tmp_path / "in" / report.files[0])
    names = {"output.weight": "lm_head.weight"}
    renamed = {
        names.get(n, n.replace("attention.w", "attention.qkv_linear.w")).replace(
            "qkv_linear.wo", "wo"
        ): t
        for n, t in found.items()
    }
    assert_same(renamed, torch.load(folder / "titan0.pt")["model"])


def cut(name: str, tensor: torch.Tensor, t: int, r: int, ep: int, e: int) -> torch.Tensor:
    """A rank's part: columns of wo and w2, of the latter also where experts are stacked; rows of
    all else but norms, routers, the narrow layers of latent attention and biases of what columns
    are cut from."""
    inner = "inner_experts" in name
    part = tensor.chunk(ep)[e] if inner else tensor
    if re.search(r"norm|router|wq_a|wkv_a|expert_bias|wo\.bias|mlp2_bias", name):
        return part
    columns = re.search(r"wo\.weight|w2\.weight|w2_EDF|mlp2_weight", name)
    return part.chunk(t, int(inner) + (1 if columns else 0))[r]


@pytest.mark.parametrize(
    ("name", "t", "ep"),
    [("llama", 2, 1), ("llama", 4, 1), ("qwen3", 2, 1), ("qwen3_moe", 2, 4), ("gpt_oss", 2, 2),
     ("deepseek_v3", 2, 2)],
)  # fmt: skip
def test_its_parallel_ranks_are_rows_and_columns_of_it(tmp_path, titans, name, t, ep, judged):
    at = f"{t}×{ep}" if ep > 1 else f"{t}"
    judged(name, "torchtitan", exports=["formulas"], imports=["formulas"], at=at)
    _, state, folder = titans[name]
    report = import_hf(folder, tmp_path / "in", Parallel("torchtitan", tp=t, ep=ep), prefix="")
    files = [tmp_path / "in" / each for each in report.files]
    whole = torch.load(folder / "titan0.pt")["model"]
    assert len(files) == t * ep
    for rank, file in enumerate(files):
        for fqn, tensor in load_file(file).items():
            assert torch.equal(tensor, cut(fqn, whole[fqn], t, rank % t, ep, rank // t)), fqn
    export_hf(files, tmp_path / "out", parallel=Parallel(tp=t, ep=ep), config=folder)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), state)


def test_a_state_that_is_not_torchtitans_is_seen(tmp_path, titans):
    """Another order or two swapped tensors give other files; other shapes, and names of another
    family, are refused."""
    for name in ("llama", "qwen3"):
        _, state, folder = titans[name]
        theirs = imported(folder / "theirs")
        q = "layers.0.attention.qkv_linear.wq.weight"
        pairs = theirs[q].view(ref.H, ref.D // 2, 2, -1).transpose(1, 2).reshape(theirs[q].shape)
        first, second = "layers.1.feed_forward.w1.weight", "layers.1.feed_forward.w3.weight"
        for fault, wrong in (
            ("order", {q: pairs}), ("swap", {first: theirs[second], second: theirs[first]})
        ):  # fmt: skip
            save_file({**theirs, **wrong}, tmp_path / f"{name}{fault}.safetensors")
            out = tmp_path / f"{name}{fault}"
            export_hf([tmp_path / f"{name}{fault}.safetensors"], out, config=folder)
            found = load_file(out / "model.safetensors")
            assert len([n for n in state if not torch.equal(found[n], state[n])]) == len(wrong)
    _, _, folder = titans["qwen3_moe"]
    theirs = imported(folder / "theirs")
    inner = "layers.0.moe.routed_experts.inner_experts."
    turned = {inner + "w1_EFD": theirs[inner + "w1_EFD"].mT.contiguous()}
    save_file({**theirs, **turned}, tmp_path / "turned.safetensors")
    with pytest.raises(CheckpointError, match="w1_EFD .* has the shape"):
        export_hf([tmp_path / "turned.safetensors"], tmp_path / "no", config=folder)
    _, _, folder = titans["deepseek_v3"]
    theirs = imported(folder / "theirs")
    lost = {n: t for n, t in theirs.items() if not n.endswith("expert_bias_E")}
    save_file(lost, tmp_path / "lost.safetensors")
    with pytest.raises(CheckpointError, match="expert_bias_E"):
        export_hf([tmp_path / "lost.safetensors"], tmp_path / "no", config=folder)
