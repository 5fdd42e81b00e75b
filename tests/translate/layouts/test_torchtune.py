"""torchtune 0.6.1's converters and the layout `torchtune` agree, bitwise; so do its models' logits.

Query and key have Meta's order, but for Qwen 2 and Phi-3.
"""

from __future__ import annotations

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

SCRIPT = Path(__file__).parents[2] / "support" / "models" / "torchtune_weights_run.py"
State = dict[str, torch.Tensor]
WIDE = {"hidden_size": 128}  # a head is the hidden size ÷ heads in torchtune, but for Gemma
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (ref, WIDE),
    "llama_tied": (ref, {**WIDE, "tie_word_embeddings": True}),  # Llama 3.2
    "mistral": (ref, WIDE),
    "qwen2": (ref, WIDE),
    "qwen2_tied": (ref, {**WIDE, "tie_word_embeddings": True}),
    "gemma": (families, {}),
    "gemma2": (families, {}),
    "phi3": (families, {}),
}


class Tune(NamedTuple):
    """A model of transformers, its state on disk, and the folder where torchtune was at work."""

    model: Any
    state: State
    folder: Path

    @property
    def family(self) -> str:
        return self.model.config.model_type


@pytest.fixture(scope="module")
def tunes(tmp_path_factory) -> dict[str, Tune]:
    python = interpreters.torchtune()
    out = {}
    for name, (maker, more) in CASES.items():
        folder = tmp_path_factory.mktemp(name)
        model = maker.model(name.removesuffix("_tied"), **more)
        out[name] = Tune(model, ref.on_disk(model, folder), folder)
        import_hf(folder, folder / "theirs", Parallel("torchtune"), prefix="")
    interpreters.run(python, str(SCRIPT), *(each.folder for each in out.values()))
    return out


@pytest.fixture(params=CASES)
def tune(request, tunes) -> Tune:
    return tunes[request.param]


def imported(folder: Path) -> State:
    (file,) = folder.glob("data-*.safetensors")
    return load_file(file)


def differ(found: State, wanted: State) -> list[str]:
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


def assert_logits(tune: Tune, name: str) -> None:
    with torch.no_grad():
        wanted = tune.model(torch.arange(40).reshape(2, 20) % ref.V).logits
    assert (torch.load(tune.folder / name) - wanted).abs().max() <= 1e-5


def test_what_torchtune_holds_exports_to_the_original(tmp_path, tune, judged):
    judged(tune.family, "torchtune", exports=["torchtune"], at="1")
    report = export_hf([tune.folder / "tune.pt"], tmp_path / "out", config=tune.model.config)
    assert report.layout == "torchtune"
    assert differ(load_file(tmp_path / "out" / "model.safetensors"), tune.state) == []
    if tune.family != "gemma2":
        assert_logits(tune, "logits.pt")


def test_an_import_is_what_torchtunes_checkpointer_reads(tune, judged):
    judged(tune.family, "torchtune", imports=["torchtune"], at="1")
    assert differ(imported(tune.folder / "theirs"), torch.load(tune.folder / "tune.pt")) == []
    assert differ(load_file(tune.folder / "hf.safetensors"), tune.state) == []
    if tune.family != "gemma2":
        assert_logits(tune, "logits_theirs.pt")


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_its_tensor_parallel_ranks_are_rows_and_columns_of_it(tmp_path, tunes, name, judged):
    judged(name, "torchtune", exports=["formulas"], imports=["formulas"], at="2")
    _, state, folder = tunes[name]
    report = import_hf(folder, tmp_path / "in", Parallel("torchtune", tp=2), prefix="")
    files = [tmp_path / "in" / each for each in report.files]
    whole = torch.load(folder / "tune.pt")
    for rank, file in enumerate(files):
        for fqn, tensor in load_file(file).items():
            dim = 1 if fqn.endswith(("output_proj.weight", "w2.weight")) else 0
            wanted = whole[fqn] if "norm" in fqn else whole[fqn].chunk(2, dim)[rank]
            assert torch.equal(tensor, wanted), fqn
    export_hf(files, tmp_path / "out", parallel=Parallel(tp=2), config=folder)
    assert differ(load_file(tmp_path / "out" / "model.safetensors"), state) == []


def test_a_state_that_is_not_torchtunes_is_seen(tmp_path, tunes):
    """Another order and two swapped tensors give other files. A tensor that is missing, or an
    adapter's, is refused."""
    _, state, folder = tunes["llama"]
    theirs = imported(folder / "theirs")
    q, first, second = (f"layers.1.{n}.weight" for n in ("attn.q_proj", "mlp.w1", "mlp.w3"))
    halves = {q: state["model.layers.1.self_attn.q_proj.weight"]}  # Hugging Face's order
    for fault, wrong in (
        ("order", halves), ("swap", {first: theirs[second], second: theirs[first]})
    ):  # fmt: skip
        save_file({**theirs, **wrong}, tmp_path / f"{fault}.safetensors")
        export_hf([tmp_path / f"{fault}.safetensors"], tmp_path / fault, config=folder)
        found = load_file(tmp_path / fault / "model.safetensors")
        assert len(differ(found, state)) == len(wrong)
    lora = {"layers.0.attn.q_proj.lora_a.weight": torch.zeros(2, 128)}
    for fault, wrong in (
        (first, {n: t for n, t in theirs.items() if n != first}), ("lora_a", {**theirs, **lora})
    ):  # fmt: skip
        save_file(wrong, tmp_path / "wrong.safetensors")
        with pytest.raises(CheckpointError, match=fault):
            export_hf([tmp_path / "wrong.safetensors"], tmp_path / "no", config=folder)
