"""Pipeline stages are merged: the export is that of the model that was not cut."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from smckpt import ExportOptions, Parallel, errors, export_hf
from smckpt.cli.show import describe_foreign
from smckpt.formats.readers.rank_sources import open_source
from smckpt.layout.entries import Entry
from smckpt.layout.geometry import PerRankGeometry
from smckpt.topology import ParallelState
from smckpt.translate import verify_hf
from tests.support import interpreters
from tests.support.models import families, shards
from tests.support.models import references as ref

State = dict[str, torch.Tensor]
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VPP = "virtual_pipeline_model_parallel_size"
LAYER = re.compile(r"layers\.(\d+)\.")
L = 4  # layers
FIRST, LAST = ("embed", "wte", "wpe"), ("final", "ln_f", "model.norm", "output_layer", "lm_head")


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Any, State]:
    model = ref.model("llama", num_hidden_layers=L)
    return model, ref.on_disk(model, tmp_path_factory.mktemp("hub"))


def stages_of(
    state: State, at: str, pp: int, vpp: int = 1, own: bool = True, head: bool = False
) -> list[list[State]]:
    """A model's state, cut as Megatron-core cuts it: chunk v of stage p has layers (v*pp + p)*n and
    the n - 1 that follow. own: each numbers its layers from 0. head: the model is tied, and the
    last stage has a head of its own."""
    n = L // pp // vpp
    out: list[list[State]] = [[{} for _ in range(vpp)] for _ in range(pp)]
    for name, tensor in state.items():
        if not name.startswith(at):
            first = any(word in name for word in FIRST)
            assert first != any(word in name for word in LAST), name
            out[0 if first else -1][0 if first else -1][name] = tensor
            continue
        number, rest = name[len(at) :].split(".", 1)
        layer = int(number)
        v, p = divmod(layer // n, pp)
        out[p][v][f"{at}{layer % n if own else layer}.{rest}"] = tensor
    if head:
        out[-1][-1]["output_layer.weight"] = state["embedding.word_embeddings.weight"]
    return out


def flat(stage: list[State]) -> State:
    """All chunks of a stage, as one list of layers."""
    out: State = {}
    for chunk, state in enumerate(stage):
        layers = {int(n.split(".")[2]) for n in state if n.startswith("decoder.layers.")}
        for name, tensor in state.items():
            parts = name.split(".")
            if name.startswith("decoder.layers."):
                parts[2] = str(int(parts[2]) + chunk * len(layers))
            out[".".join(parts)] = tensor
    return out


def one(path: tuple[str | int, ...], rank: int, tensor: torch.Tensor) -> Any:
    name = str(path[-1])
    geometry = PerRankGeometry((name,), tuple(tensor.shape), (rank,))
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Entry(path, dtype, geometry, path[:-1], (), (rank,)), tensor.contiguous()


def checkpoint(
    folder: Path, ranks: list[list[State]], *, listed: bool = True, **degrees: int
) -> str:
    """Of ranks in the order of the topology, each with the chunks of its stage: under `model`, as a
    list where there are several, or under model0, model1, …"""

    def held(rank: int) -> Iterator[Any]:
        for number, chunk in enumerate(ranks[rank]):
            for name, tensor in chunk.items():
                path: tuple[str | int, ...] = ("model", name)
                if len(ranks[rank]) > 1:
                    path = ("model", number, name) if listed else (f"model{number}", name)
                yield one(path, rank, tensor)

    topology = ParallelState(len(ranks), **degrees).to_json()
    return shards.write(folder, len(ranks), lambda r: list(held(r)), topology=topology)


def assert_same(folder: Path, wanted: State) -> None:
    found = load_file(folder / "model.safetensors")
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def of_megatron(state: State, pp: int, vpp: int = 1, t: int = 1, **how: Any) -> list[list[State]]:
    """The chunks of each rank: tensor-parallel ranks innermost, stages outermost."""
    cuts = [stages_of(ref.mcore(state, t, r), "decoder.layers.", pp, vpp, **how) for r in range(t)]
    return [cuts[r][p] for p in range(pp) for r in range(t)]


@pytest.mark.parametrize(
    ("pp", "vpp", "t"), [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2)]
)
@pytest.mark.parametrize("own", [True, False], ids=["own numbers", "the model's numbers"])
def test_stages_of_megatron_are_exported_as_the_whole_model(
    tmp_path, llama, judged, pp, vpp, t, own
):
    model, state = llama
    ranks = of_megatron(state, pp, vpp, t, own=own)
    path = checkpoint(tmp_path / "c", ranks, tensor_parallel_degree=t, pipeline_parallel_degree=pp)
    report = export_hf(path, tmp_path / "hf", config=model.config)
    assert report.layout == "mcore_te"
    assert_same(tmp_path / "hf", state)
    judged("llama", "pipeline stages", exports=["formulas"], at=str(t))


def test_chunks_under_keys_of_their_own_and_those_that_only_the_caller_knows(tmp_path, llama):
    model, state = llama
    ranks = of_megatron(state, 2, 2)
    degrees = {"pipeline_parallel_degree": 2}
    path = checkpoint(tmp_path / "keys", ranks, listed=False, **degrees)
    export_hf(path, tmp_path / "1", config=model.config, parallel=Parallel(pp=2, vpp=2))
    assert_same(tmp_path / "1", state)
    assert verify_hf(tmp_path / "1", against=path).ok

    path = checkpoint(tmp_path / "flat", [[flat(rank)] for rank in ranks], **degrees)
    export_hf(path, tmp_path / "2", config=model.config, parallel=Parallel(vpp=2))
    assert_same(tmp_path / "2", state)
    # without vpp= it is another model, which shapes do not show
    export_hf(path, tmp_path / "3", config=model.config)
    with pytest.raises(AssertionError):
        assert_same(tmp_path / "3", state)
    report = verify_hf(tmp_path / "3", against=path, parallel=Parallel(vpp=2))
    assert any("differs from the checkpoint" in problem for problem in report.problems)


@pytest.mark.parametrize("pp", [2, 4])
def test_stages_with_hugging_faces_names_need_no_layout(tmp_path, llama, judged, pp):
    model, state = llama
    ranks = stages_of(state, "model.layers.", pp)
    path = checkpoint(tmp_path / "c", ranks, pipeline_parallel_degree=pp)
    assert export_hf(path, tmp_path / "hf", config=model.config).layout is None
    assert_same(tmp_path / "hf", state)
    judged("llama", "pipeline stages", exports=["save_pretrained"])


def gpt2() -> Any:
    """Of L layers, random in all of its parameters."""
    config = families.config("gpt2")
    config.n_layer = L
    torch.manual_seed(13)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize(
    "head", ["none", "output_layer.weight", "embedding.word_embeddings.weight"]
)
def test_the_last_stages_copy_of_a_tied_embedding_is_compared(tmp_path, judged, head, vpp):
    model = gpt2()
    state = ref.on_disk(model, tmp_path / "hub")
    layers = {n.split(".")[2] for n in state if n.startswith("transformer.h.")}
    assert len(layers) == L
    whole = families.mcore("gpt2", state, 1, 0)
    for layer in range(2, L):  # that code knows two layers
        more = {n.replace(f"h.{layer}.", "h.0."): w for n, w in state.items() if f"h.{layer}." in n}
        made = families.mcore("gpt2", {**state, **more}, 1, 0)
        at = "decoder.layers.0."
        whole |= {n.replace(at, f"decoder.layers.{layer}."): w for n, w in made.items() if at in n}
    ranks = stages_of(whole, "decoder.layers.", 2, vpp)
    embedding = whole["embedding.word_embeddings.weight"]
    if head != "none":
        ranks[-1][-1][head] = embedding.clone()
    degrees = {"pipeline_parallel_degree": 2}
    path = checkpoint(tmp_path / "c", ranks, **degrees)
    export_hf(path, tmp_path / "hf", config=model.config)
    assert_same(tmp_path / "hf", state)
    if head != "none":
        ranks[-1][-1][head] = embedding + 1
        path = checkpoint(tmp_path / "other", ranks, **degrees)
        with pytest.raises(errors.TensorMismatchError, match="differ"):
            export_hf(path, tmp_path / "no", config=model.config)
    judged("gpt2", "pipeline stages", exports=["formulas"])


def test_wrong_stages_are_refused_by_name(tmp_path, llama):
    model, state = llama
    ranks = of_megatron(state, 4)
    degrees = {"pipeline_parallel_degree": 4}

    def refused(name: str, ranks: list[list[State]], text: str, kind: Any = errors.TopologyError,
                degrees: Any = degrees, **given: Any) -> None:  # fmt: skip
        path = checkpoint(tmp_path / name, ranks, **degrees)
        with pytest.raises(kind, match=text):
            export_hf(path, tmp_path / "hf", config=model.config, parallel=Parallel(**given))

    gone = [ranks[0], ranks[1], ranks[3]]
    refused("gone", gone, r"3 stages hold 3 layers.*config says 4",
            degrees={"pipeline_parallel_degree": 3})  # fmt: skip
    gone = of_megatron(state, 4, own=False)
    refused("gap", [gone[0], gone[1], gone[3]], r"stage 1 has layers \[1\]",
            degrees={"pipeline_parallel_degree": 3})  # fmt: skip
    refused("turned", ranks[::-1], "stage 0 holds .*last stage should have")
    refused("last", [*ranks[:2], ranks[3], ranks[2]], "stage 2 holds .*last stage should have")
    refused("pp", ranks, r"pp=2, but the checkpoint was saved with pp=4", errors.UsageError, pp=2)
    refused("vpp", ranks, "which vpp=3 does not divide", vpp=3)
    two = of_megatron(state, 2, 2)
    half = {"pipeline_parallel_degree": 2}
    refused("chunks", two, "vpp=4, but each stage has 2 chunks", errors.UsageError, half, vpp=4)
    refused("lost", [two[0], two[1][:1]], "different numbers of chunks", degrees=half)
    refused("global", of_megatron(state, 2, own=False), "have the model's numbers",
            errors.UsageError, half, vpp=2)  # fmt: skip
    whole = checkpoint(tmp_path / "whole", [[ref.mcore(state, 1, 0)]])
    with pytest.raises(errors.UsageError, match="not in pipeline stages"):
        export_hf(whole, tmp_path / "hf", config=model.config, parallel=Parallel(vpp=2))


# -- files of ranks --------------------------------------------------------------------------------


def test_files_of_ranks_in_stages_are_exported(tmp_path, llama):
    model, state = llama
    paths = [tmp_path / f"rank{number}.safetensors" for number in range(4)]
    for path, (chunk,) in zip(paths, of_megatron(state, 2, t=2), strict=True):
        save_file({n: t.contiguous() for n, t in chunk.items()}, path)
    export_hf(paths, tmp_path / "hf", config=model.config, parallel=Parallel(tp=2, pp=2))
    assert_same(tmp_path / "hf", state)
    for given, text in (({"tp": 4}, "pass the files of all ranks.* pp="), ({"tp": 2}, "4 files"),
                        ({"tp": 1, "pp": 2}, "4 files"), ({"tp": 1, "pp": 4}, "")):  # fmt: skip
        with pytest.raises(errors.CheckpointError, match=text):
            export_hf(paths, tmp_path / "no", config=model.config, parallel=Parallel(**given))


@pytest.mark.parametrize("prefix", ["net.", "model.module."])
def test_files_of_stages_leave_out_what_a_trainer_adds_to_all_names(tmp_path, llama, prefix):
    """A stage without the embedding does not look like a model."""
    model, state = llama
    paths = [tmp_path / f"rank{number}.safetensors" for number in range(2)]
    for path, (chunk,) in zip(paths, of_megatron(state, 2), strict=True):
        save_file({f"{prefix}{n}": t.contiguous() for n, t in chunk.items()}, path)
    export_hf(paths, tmp_path / "hf", config=model.config, parallel=Parallel(pp=2))
    assert_same(tmp_path / "hf", state)


def megatron_lm(folder: Path, ranks: list[list[State]], t: int, pp: int, **said: Any) -> Path:
    """`torch.save` of what Megatron-LM's `save_checkpoint` puts together."""
    for number, chunks in enumerate(ranks):
        place = folder / "iter_0000010" / f"mp_rank_{number % t:02d}_{number // t:03d}"
        place.mkdir(parents=True)
        models = {f"model{v}": chunk for v, chunk in enumerate(chunks)}
        args = argparse.Namespace(pipeline_model_parallel_size=pp, **said)
        held = models if len(chunks) > 1 else {"model": chunks[0]}
        torch.save({"args": args, "iteration": 10, **held}, place / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("10\n")
    return folder


@pytest.mark.parametrize(("pp", "vpp", "t"), [(2, 1, 2), (2, 2, 1)])
def test_a_directory_of_megatron_in_stages_is_exported(tmp_path, llama, judged, pp, vpp, t):
    model, state = llama
    root = megatron_lm(tmp_path / "m", of_megatron(state, pp, vpp, t), t, pp)
    export_hf(root, tmp_path / "hf", config=model.config)
    assert_same(tmp_path / "hf", state)
    with pytest.raises(errors.UsageError, match="pp=4, but there are 2"):
        export_hf(root, tmp_path / "no", config=model.config, parallel=Parallel(pp=4))
    place = root / "iter_0000010" / f"mp_rank_{t - 1:02d}_001" / "model_optim_rng.pt"
    place.unlink()
    with pytest.raises(errors.UsageError, match=r"file of stage 1, tensor-parallel rank.*missing"):
        export_hf(root, tmp_path / "no", config=model.config)
    judged("llama", "Megatron-LM directory, stages", exports=["formulas"], at=str(t))


@pytest.mark.parametrize(("vpp", "stated"), [(2, 4), (1, 2), (2, 1)])
def test_chunks_that_are_not_those_that_the_files_say_are_refused(tmp_path, llama, vpp, stated):
    model, state = llama
    ranks = of_megatron(state, 2, vpp)
    out, config = tmp_path / "hf", model.config
    for said in (None, vpp, stated):
        root = megatron_lm(tmp_path / str(said), ranks, 1, 2, **{TP: 1, VPP: said})
        if said != stated:
            export_hf(root, out, config=config, options=ExportOptions(overwrite=True))
            assert_same(out, state)
            continue
        with pytest.raises(errors.TopologyError, match=f"each stage has {stated} chunks.*{vpp}"):
            export_hf(root, tmp_path / "no", config=config)
        shown = describe_foreign(open_source(root), None)  # what may be of any model is shown
        assert len(shown["tensors"]) > 4
        export_hf(root, tmp_path / "told", config=config, parallel=Parallel(vpp=vpp))
        assert_same(tmp_path / "told", state)


def test_stages_of_two_steps_or_of_two_runs_are_refused(tmp_path, llama):
    model, state = llama
    ranks = of_megatron(state, 2)
    root = megatron_lm(tmp_path / "m", ranks, 1, 2, **{TP: 1, "seed": 1})
    file = root / "iter_0000010" / "mp_rank_00_001" / "model_optim_rng.pt"
    held = torch.load(file, weights_only=False)
    torch.save({**held, "iteration": 20}, file)
    with pytest.raises(errors.UsageError, match=r"different steps.*10.*20"):
        export_hf(root, tmp_path / "hf", config=model.config)
    for name, value in (("seed", 2), ("consumed_train_samples", 64)):
        args = argparse.Namespace(**{**vars(held["args"]), name: value})
        torch.save({**held, "args": args}, file)
        with pytest.raises(errors.TopologyError, match=rf"{name}={value}.*one run and step"):
            export_hf(root, tmp_path / "hf", config=model.config)
    torch.save(held, file)
    export_hf(root, tmp_path / "hf", config=model.config)
    assert_same(tmp_path / "hf", state)


def test_names_with_the_model_s_layers_need_no_chunks(tmp_path, llama):
    model, state = llama
    stages = of_megatron(state, 2, 1)
    layers = [{int(m[1]) for n in stage[0] if (m := LAYER.search(n))} for stage in stages]
    own = {LAYER.sub(lambda m: f"layers.{int(m[1]) + len(layers[0])}.", n): v
           for n, v in stages[1][0].items()}  # fmt: skip
    root = megatron_lm(tmp_path / "m", [stages[0], [own]], 1, 2, **{TP: 1, VPP: 2})
    export_hf(root, tmp_path / "hf", config=model.config)
    assert_same(tmp_path / "hf", state)


# -- stages that Megatron-core cuts ----------------------------------------------------------------

STAGES = Path(__file__).parents[2] / "support" / "models" / "megatron_stages.py"
JOBS = (
    {PP: 2, "num_layers": 8}, {PP: 4, "num_layers": 8},
    {PP: 2, VPP: 2, "num_layers": 8}, {PP: 2, VPP: 4, "num_layers": 8},
    {PP: 4, VPP: 2, "num_layers": 8},
    {PP: 2, "num_layers": 8, "num_layers_in_first_pipeline_stage": 3},
    {PP: 3, "num_layers": 8, "num_layers_in_last_pipeline_stage": 2},
    {PP: 2, VPP: 2, "num_layers": 8, "num_layers_in_first_pipeline_stage": 2},
)  # fmt: skip


@pytest.mark.long
def test_stages_that_megatron_core_itself_cuts_are_exported_as_the_whole_model(tmp_path, judged):
    model = ref.model("llama", num_hidden_layers=8)
    state = ref.on_disk(model, tmp_path / "hub")
    whole = {n: t.contiguous() for n, t in ref.mcore(state, 1, 0, local=True).items()}
    save_file(whole, tmp_path / "whole.safetensors")
    told = json.dumps(JOBS)
    interpreters.run(
        interpreters.megatron(), STAGES, tmp_path / "whole.safetensors", tmp_path, told
    )
    for number, job in enumerate(JOBS):
        out = tmp_path / f"hf{number}"
        report = export_hf(tmp_path / str(number), out, config=model.config)
        assert report.layout == "mcore_local", job
        assert_same(out, state)
    judged("llama", "pipeline stages", exports=["Megatron-core"])
