"""Training starts from an import: live models load it, and go back to the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_tensor

import smckpt
from smckpt import (
    LOCAL,
    SHARDED,
    ImportOptions,
    Parallel,
    ParallelState,
    errors,
    export_hf,
    import_hf,
    sm_state_dict_type,
)
from tests.support.launch import run_ranks
from tests.support.models import references as ref
from tests.support.models.parallel_models import Named, own_group, parallel_llama

State = dict[str, torch.Tensor]
TOKENS = torch.arange(24).view(2, 12) * 5 % 120


def zeroed(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def load(model: Any, place: Path, degrees: Any, kind: Any = None) -> Any:
    if kind is None:
        smckpt.load(
            {"model": model.state_dict()},
            checkpoint_id=place,
            options=smckpt.LoadOptions(parallel_state=degrees),
        )
        return model
    with sm_state_dict_type(model, kind):
        state = {"model": model.state_dict()}
    smckpt.load(state, checkpoint_id=place, options=smckpt.LoadOptions(parallel_state=degrees))
    with sm_state_dict_type(model, kind):
        model.load_state_dict(state["model"])
    return model


def save(model: Any, place: Path, degrees: Any, kind: Any = None) -> None:
    state = {"model": model.state_dict()}
    if kind is not None:
        with sm_state_dict_type(model, kind):
            state = {"model": model.state_dict()}
    smckpt.save(state, checkpoint_id=place, options=smckpt.SaveOptions(parallel_state=degrees))


# -- on 4 ranks ------------------------------------------------------------------------------------


def fused_llamas(folder: Path) -> dict[str, torch.Tensor]:
    """TP 2 x FSDP 2 from what two ranks would have saved: logits by wrapper. The tensor-parallel
    ranks are numbered otherwise than there."""
    order = ("fsdp", "cp", "ep", "tp", "rep", "pp")
    degrees = ParallelState(4, tensor_parallel_degree=2, order=order)
    state, config = torch.load(folder / "llama.pt")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "shard"))
    shard_group = own_group(degrees.ranker.get_fsdp_groups())
    out = {}
    for how, kind in (("ddp", None), ("fsdp1", LOCAL), ("fsdp2", LOCAL), ("fsdp2", SHARDED)):
        model = zeroed(parallel_llama(config, state, degrees))
        if how == "fsdp1":
            model = FSDP(
                model, process_group=shard_group, device_id=torch.device("cpu"),
                auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
            )  # fmt: skip
        elif how == "fsdp2":
            for part in (*model.model.layers, model):
                fully_shard(part, mesh=mesh["shard"])
        load(model, folder / "llama", degrees, kind)
        with torch.no_grad():
            out[f"{how} {kind and kind.name}"] = model(TOKENS)
        save(model, folder / f"{how} {kind and kind.name}", degrees, kind)
    return out


def experts(folder: Path) -> list[str]:
    """TP 2 x EP 2: names that are not what the reference cuts for this rank."""
    degrees = ParallelState(4, tensor_parallel_degree=2, expert_parallel_degree=2)
    state, _ = torch.load(folder / "mixtral.pt")
    cut = ref.mcore(state, 2, degrees.tp_rank, 2, degrees.ep_rank, rows=128)
    cut = {n: t for n, t in cut.items() if not n.endswith(("_extra_state", "rope.freqs"))}
    model = load(zeroed(Named(cut)), folder / "mixtral", None)  # as many ranks: each its own
    save(model, folder / "mixtral again", degrees)
    return [
        n for n, t in model.state_dict().items()
        if not torch.equal(t, torch.where(cut[n] == 7.5, 0.0, cut[n]))
    ]  # fmt: skip


def stages(folder: Path) -> list[str]:
    """TP 2 x PP 2: names that are not what the reference cuts for this rank's stage."""
    degrees = ParallelState(4, tensor_parallel_degree=2, pipeline_parallel_degree=2)
    state, _ = torch.load(folder / "llama.pt")
    whole = ref.mcore(state, 2, degrees.tp_rank, rows=128)
    cut = {}
    for name, tensor in whole.items():
        layer = name.split(".")[2] if name.startswith("decoder.layers.") else None
        stage = int("final" in name or "output" in name) if layer is None else int(layer)
        if stage == degrees.pp_rank and not name.endswith(("_extra_state", "rope.freqs")):
            cut[name.replace(f"layers.{layer}.", "layers.0.")] = tensor
    model = load(zeroed(Named(cut)), folder / "stages", degrees)
    return [
        n for n, t in model.state_dict().items()
        if not torch.equal(t, torch.where(cut[n] == 7.5, 0.0, cut[n]))
    ]  # fmt: skip


def distributed(folder: Path) -> list[str]:
    """DTensors over TP 4 from whole tensors: names that differ."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    wanted = load_file(next((folder / "meta").glob("*.safetensors")))
    model = Named({n.removeprefix("model."): t for n, t in wanted.items()})
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.zeros_like(parameter)
            placed = distribute_tensor(empty, mesh, [Shard(parameter.dim() - 1)])
            module.register_parameter(name, torch.nn.Parameter(placed))
    load(model, folder / "meta", ParallelState(4, tensor_parallel_degree=4))
    found = {f"model.{n}": t.full_tensor() for n, t in model.state_dict().items()}
    return [n for n, t in wanted.items() if not torch.equal(t, found[n])]


def on_a_guess(folder: Path) -> str:
    degrees = ParallelState(4, tensor_parallel_degree=2)
    state, config = torch.load(folder / "llama.pt")
    model = zeroed(parallel_llama(config, state, degrees))
    told = []
    for given in (None, ParallelState(4, tensor_parallel_degree=4)):
        with pytest.raises(errors.TopologyError) as caught:
            load(model, folder / "llama", given)
        told.append(str(caught.value))
    assert all(not p.any() for p in model.parameters())
    return " ".join(told)


def all_cases(folder: str) -> tuple[Any, ...]:
    cases = (fused_llamas, experts, distributed, on_a_guess, stages)
    out = []
    for case in cases:
        out.append(case(Path(folder)))
        dist.barrier()
    return tuple(out)


# -- and here --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> tuple[Path, Any, list[tuple[Any, ...]]]:
    folder = tmp_path_factory.mktemp("import")
    models = {family: ref.model(family) for family in ("llama", "mixtral")}
    for family, model in models.items():
        state = ref.on_disk(model, folder / f"{family} hf")
        torch.save((state, model.config.to_dict()), folder / f"{family}.pt")
    padded = ImportOptions(pad_vocab_to_multiple_of=64)
    for source, made, parallel, options in (
        ("llama", "llama", Parallel("te_split", tp=2), padded),
        ("mixtral", "mixtral", Parallel("mcore_te", tp=2, ep=2), padded),
        ("llama", "meta", Parallel("meta"), None),
        ("llama", "stages", Parallel("mcore_te", tp=2, pp=2), padded),
    ):
        import_hf(folder / f"{source} hf", folder / made, parallel, options=options)
    return folder, models, run_ranks(all_cases, 4, str(folder), timeout=200)


WAYS = ("ddp None", "fsdp1 LOCAL", "fsdp2 LOCAL", "fsdp2 SHARDED")


@pytest.mark.parametrize("how", WAYS)
def test_a_fused_model_starts_from_an_import_and_goes_back_to_the_original(done, how):
    folder, models, ranks = done
    with torch.no_grad():
        wanted = models["llama"](TOKENS).logits
    for found in ranks:
        assert (found[0][how] - wanted).abs().max() <= 1e-5
    original(folder / how, folder / "llama hf")


def test_expert_parallel_ranks_start_from_an_import_and_go_back_to_the_original(done):
    folder, _, ranks = done
    assert [found[1] for found in ranks] == [[]] * 4
    original(folder / "mixtral again", folder / "mixtral hf")


def test_each_pipeline_stage_starts_from_an_import(done):
    assert [found[4] for found in done[2]] == [[]] * 4


def test_distributed_tensors_start_from_an_import_of_one_rank(done):
    assert [found[2] for found in done[2]] == [[]] * 4


def test_whose_plain_tensors_are_meant_is_not_guessed(done):
    for found in done[2]:
        assert "parallel_state= was not given" in found[3]
        assert "the checkpoint has tp 2, ep 1, pp 1, but this job has tp 4" in found[3]


def original(checkpoint: Path, hub: Path) -> None:
    out = checkpoint.with_name(f"{checkpoint.name} hf again")
    export_hf(checkpoint, out, config=hub)
    found, wanted = (load_file(path / "model.safetensors") for path in (out, hub))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)
