"""Partial checkpoints of SMP v1 (Amazon's SageMaker model parallel), sharded or not.

The library installs nowhere but on SageMaker. `torch.save` of what its `save_checkpoint` puts
together stands in for it: names and keys of version 1.12.1 (tkazusa/smdistributed_modelparallel,
commit b5e06a8), and what Amazon's training scripts save beside (aws/amazon-sagemaker-examples,
commit c2ad9da).
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import smckpt
from smckpt import ExportOptions, Parallel, errors, export_hf
from smckpt.cli.app import app
from tests.support.models import families, hub_families
from tests.support.models import references as ref

State = dict[str, torch.Tensor]


def assert_same(directory: Path, wanted: State) -> None:
    found = load_file(directory / "model.safetensors")
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def beside(step: Path, **config: int) -> None:
    """What rank 0 writes beside the ranks' files."""
    degrees = {"tensor_parallel_degree": 1, "pipeline_parallel_degree": 1, **config}
    torch.save({**degrees, "smp_version": "1.12.1"}, step / "smp_config.pt")
    (step.parent / "newest").write_text(f"5_partial\n{step.name}\n")


# -- stages and tensor-parallel ranks --------------------------------------------------------------


def partial(folder: Path, stages: list[list[State]]) -> Path:
    """stages: of each stage, the tensors of each tensor-parallel rank."""
    step = folder / "10_partial"
    step.mkdir(parents=True)
    told = {"tensor_parallel_degree": len(stages[0]), "pipeline_parallel_degree": len(stages)}
    for p, ranks in enumerate(stages):
        for t, state in enumerate(ranks):
            info = {**told, "partition_info": {"main": (0, ["main"])}}
            held = {**state, "_smp_is_partial": True, "_smp_load_info": info}
            torch.save(held, step / f"model_{p}_{t}.pt")
            torch.save({"_smp_is_partial": True}, step / f"optimizer_states_{p}_{t}.pt")
    torch.save({"cli_args": argparse.Namespace(lr=0.1)}, step / "user_content.pt")
    beside(step, **told)
    return folder


def staged(state: State, pp: int) -> list[State]:
    """Layer i is in stage i + 1, and the module at the top, with the last norm, in the first."""
    out: list[State] = [{} for _ in range(pp)]
    for name, tensor in state.items():
        layer = re.search(r"\.(\d+)\.", name)
        out[(int(layer[1]) + 1) % pp if layer else 0][name] = tensor
    return out


@pytest.fixture(scope="module")
def neox(tmp_path_factory) -> tuple[Any, State]:
    model = ref.model("gpt_neox")
    return model, ref.on_disk(model, tmp_path_factory.mktemp("gpt_neox"))


def neox_stages(state: State, tp: int, pp: int) -> list[list[State]]:
    """The embedding and the head are not cut, and biases that are added once are rank 0's."""
    ranks = []
    for rank in range(tp):
        held = ref.smp_v1(state, tp, rank)
        held["word_embedding.weight"] = state["gpt_neox.embed_in.weight"]
        held["lm_head.weight"] = state["embed_out.weight"]
        held["transformer.seq_layers.0.attention.rotary_emb.inv_freq"] = torch.ones(4)
        once = [n for n in held if n.endswith((".dense.bias", ".dense2.bias"))]
        assert once
        if rank:
            held = {name: tensor for name, tensor in held.items() if name not in once}
        ranks.append(staged(held, pp))
    return [[rank[p] for rank in ranks] for p in range(pp)]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)])
def test_ranks_and_stages_are_joined(tmp_path, neox, judged, tp, pp):
    model, state = neox
    root = partial(tmp_path / "run", neox_stages(state, tp, pp))
    for given in (root, root / "10_partial"):
        report = export_hf(
            given, tmp_path / "hf", config=model.config, options=ExportOptions(overwrite=True)
        )
        assert (report.source, report.layout) == ("SMP v1, partial", "smp_v1")
        assert_same(tmp_path / "hf", state)
    judged("gpt_neox", "SMP v1 partial", exports=["formulas"], at=str(tp))


@pytest.mark.parametrize("family", ["gpt2", "qwen2_moe"])
def test_stages_of_a_model_with_its_own_names_are_joined(tmp_path, judged, capsys, family):
    model = families.model("gpt2") if family == "gpt2" else hub_families.model(family)
    model.save_pretrained(tmp_path / "wanted")
    stages = [[stage] for stage in staged(dict(model.state_dict()), 2)]
    root = partial(tmp_path / "run", stages)
    export_hf(root, tmp_path / "hf", config=model.config)
    assert_same(tmp_path / "hf", load_file(tmp_path / "wanted" / "model.safetensors"))
    judged(family, "SMP v1 partial", exports=["save_pretrained"])
    app(["show", str(root)], standalone_mode=False)
    assert "SMP v1, partial" in capsys.readouterr().out
    with pytest.raises(errors.UsageError, match=r"SMP v1, partial.*smckpt export"):
        smckpt.load({"model": model.state_dict()}, checkpoint_id=str(root))


def lose_a_stage(step: Path) -> None:
    for rank in range(2):
        (step / f"model_1_{rank}.pt").unlink()


def lose_the_first(step: Path) -> None:
    (step / "model_0_0.pt").unlink()


def add_a_rank(step: Path) -> None:
    (step / "model_2_0.pt").write_bytes((step / "model_1_0.pt").read_bytes())


def lose_the_step(step: Path) -> None:
    step.rename(step.parent / "9_partial")


def changed(step: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    held = torch.load(step / name, weights_only=False)
    change(held)
    torch.save(held, step / name)


def degree(value: object, files: str = "model_*.pt") -> Callable[[Path], None]:
    def change(step: Path) -> None:
        info = {"tensor_parallel_degree": value}
        for path in step.glob(files):
            changed(step, path.name, lambda held: held["_smp_load_info"].update(info))

    return change


def lose_a_cut(step: Path) -> None:
    name = "transformer.seq_layers.1.attention.query.bias"
    changed(step, "model_0_1.pt", lambda held: held.pop(name))


def differ(step: Path) -> None:
    for rank in range(2):
        more = {"layernorm.bias": torch.full((64,), 3.0)}
        changed(step, f"model_1_{rank}.pt", lambda held, more=more: held.update(more))


def cut_for_memory(step: Path) -> None:
    """SMP's optimize="memory" cuts the other axis of these."""

    def turn(held: dict[str, Any]) -> None:
        for name, tensor in held.items():
            if re.search(r"(query|key|value|dense1)\.weight", name):
                held[name] = tensor.reshape(tensor.shape[0] * 2, -1)

    for path in sorted(step.glob("model_*.pt")):
        changed(step, path.name, turn)


def unmark(step: Path) -> None:
    changed(step, "model_1_1.pt", lambda held: held.pop("_smp_is_partial"))


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lose_a_stage, r"model_1_0\.pt is missing"),
        (lose_the_first, r"model_0_0\.pt is missing"),
        (add_a_rank, "of several runs"),
        (lose_the_step, "newest names '10_partial', which is missing"),
        (degree(4, "model_1_1.pt"), "of several runs"),
        (degree(1), "of several runs"),
        (degree(10**18), r"model_0_2\.pt is missing"),
        (degree("2"), "tells the degrees 2 and '2'"),
        (degree(0), "tells the degrees 2 and 0"),
        (lose_a_cut, r"different names.*query\.bias"),
        (differ, r"layernorm\.bias.*stage 1 differ"),
        (cut_for_memory, r"(query|key|value|dense1)\.weight"),
        (unmark, r"SMP v1.*smckpt export.*partial=False"),
    ],
)
def test_files_that_are_missing_or_lie_are_refused(tmp_path, neox, harm, told):
    model, state = neox
    root = partial(tmp_path / "run", neox_stages(state, 2, 2))
    harm(root / "10_partial")
    given = root if harm is lose_the_step else root / "10_partial"
    with pytest.raises(errors.CheckpointError, match=told):
        export_hf(given, tmp_path / "hf", config=model.config)


def test_degrees_that_contradict_and_chunks_are_refused(tmp_path, neox):
    model, state = neox
    root = partial(tmp_path / "run", neox_stages(state, 1, 2))
    for more, told in (
        ({"pp": 3}, "2 pipeline stages"),
        ({"vpp": 2}, "leave vpp= out"),
        ({"tp": 2}, "2 files were passed"),
    ):
        with pytest.raises(errors.UsageError, match=told):
            export_hf(root, tmp_path / "hf", config=model.config, parallel=Parallel(**more))


def test_heads_that_the_degree_does_not_divide_are_refused(tmp_path, neox):
    """SMP gives the first ranks a head more."""
    model, state = neox
    (eight,) = neox_stages(state, 8, 1)
    ranks = []
    for first, last in ((0, 3), (3, 6), (6, 8)):
        held = dict(eight[first])
        for name in held:
            if re.search(r"(query|key|value|dense1)\.|dense2?\.weight", name):
                axis = 1 if re.search(r"dense2?\.weight", name) else 0
                held[name] = torch.cat([eight[r][name] for r in range(first, last)], axis)
        ranks.append(held)
    with pytest.raises(errors.CheckpointError, match="3 tensor-parallel ranks do not divide"):
        export_hf(partial(tmp_path / "run", [ranks]), tmp_path / "hf", config=model.config)


def test_files_of_these_names_elsewhere_are_not_taken_for_smps(tmp_path):
    for name in ("model_0.pt", "model_0_0.pt"):
        (tmp_path / name).write_bytes(b"of another program")
    (tmp_path / "newest").write_text("model_0.pt\n")
    with pytest.raises(errors.CheckpointNotFoundError):
        export_hf(tmp_path, tmp_path / "hf")


# -- sharded data parallelism ----------------------------------------------------------------------


def sharded(
    folder: Path, state: State, world: int, buffers: State | None = None, listed: bool = False
) -> Path:
    """Two groups of parameters. The model's file has placeholders for them, and the buffers."""
    step, buffers = folder / "10_partial", buffers or {}
    step.mkdir(parents=True)
    names = list(state)
    groups = [names[: len(names) // 2], names[len(names) // 2 :]]
    for rank in range(world):
        flat = []
        for group in groups:
            parts = []
            for name in group:
                count = math.ceil(state[name].numel() / world)
                part = state[name].flatten()[rank * count : (rank + 1) * count]
                parts.append(torch.nn.functional.pad(part, (0, count - part.numel()), value=9.0))
            flat.append(torch.cat(parts))
        module = {name: torch.zeros(1, dtype=torch.bfloat16) for name in state} | buffers
        model = {"module": module, "shard_size": world, "_smp_zero2d": True}
        torch.save(model, step / f"model_{rank}.pt")
        count = [world] * 2 if listed else world
        optimizer = {"partition_count": count, "fp32_flat_groups": flat, "_smp_zero2d": True}
        torch.save(optimizer, step / f"optimizer_{rank}.pt")
    user = {
        "cli_args": argparse.Namespace(lr=0.1), "buffer_names": list(buffers),
        "param_shapes": [{name: state[name].shape for name in group} for group in groups],
    }  # fmt: skip
    torch.save(user, step / "user_content.pt")
    beside(step, sharded_data_parallel_degree=world)
    return folder


@pytest.mark.parametrize("world", [2, 3])
def test_parts_of_sharded_data_parallelism_are_joined(tmp_path, judged, world):
    model = hub_families.model("qwen2_moe")
    model.save_pretrained(tmp_path / "wanted")
    root = sharded(tmp_path / "run", dict(model.state_dict()), world)
    for given in (root, root / "10_partial"):
        report = export_hf(
            given, tmp_path / "hf", config=model.config, options=ExportOptions(overwrite=True)
        )
        assert report.source == "SMP v1, sharded data parallelism"
        assert_same(tmp_path / "hf", load_file(tmp_path / "wanted" / "model.safetensors"))
    judged("qwen2_moe", "SMP v1 sharded", exports=["save_pretrained"])


def test_a_copy_of_another_ranks_part_is_refused(tmp_path, neox):
    model, state = neox
    root = sharded(tmp_path / "run", ref.smp_v1(state, 1, 0), 2)
    first, second = (root / "10_partial" / f"optimizer_{rank}.pt" for rank in range(2))
    shutil.copy(first, second)
    with pytest.raises(errors.UsageError, match=f"byte for byte .*{first.name}") as caught:
        export_hf(root, tmp_path / "hf", config=model.config)
    assert caught.value.path == str(second)


def test_parts_of_smps_own_transformer_are_joined(tmp_path, neox, judged):
    model, state = neox
    root = sharded(tmp_path / "run", ref.smp_v1(state, 1, 0), 3)
    report = export_hf(root, tmp_path / "hf", config=model.config)
    assert report.layout == "smp_v1"
    assert_same(tmp_path / "hf", state)
    judged("gpt_neox", "SMP v1 sharded", exports=["formulas"])


SMALL = {"w": torch.arange(35.0).reshape(7, 5), "b": torch.arange(3.0), "c": torch.ones(2)}


def test_buffers_are_exported_and_the_state_loads(tmp_path):
    held = {"seen": torch.tensor([4, 5])}
    wrapped = {f"module.{name}": tensor for name, tensor in SMALL.items()}
    root = sharded(tmp_path / "run", wrapped, 2, {"module.seen": held["seen"]}, listed=True)
    export_hf(root, tmp_path / "hf")
    assert_same(tmp_path / "hf", SMALL | held)
    root = sharded(tmp_path / "bare", SMALL, 2, held)
    target = {name: torch.zeros_like(tensor) for name, tensor in (SMALL | held).items()}
    smckpt.load(target, checkpoint_id=str(root))
    assert [name for name in target if not torch.equal(target[name], (SMALL | held)[name])] == []


def lose(name: str) -> Callable[[Path], None]:
    return lambda step: (step / name).unlink()


def of_user(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda step: changed(step, name, change)


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lose("optimizer_1.pt"), r"of the ranks \[1\].*missing"),
        (lose("smp_config.pt"), r"smp_config\.pt is missing"),
        (lose("user_content.pt"), r"user_content\.pt is missing"),
        (of_user("user_content.pt", lambda u: u.pop("param_shapes")),
         r"no \['param_shapes'\].*get_param_shapes"),
        (of_user("user_content.pt", lambda u: u["param_shapes"][0].update(w=torch.Size([9, 5]))),
         "elements of each rank, but the groups"),
        (of_user("user_content.pt", lambda u: u.update(buffer_names=7)), "lacks what belongs"),
        (of_user("user_content.pt", lambda u: u.update(param_shapes=[3])), "lacks what belongs"),
        (of_user("smp_config.pt", lambda c: c.update(tensor_parallel_degree=2)),
         r"cut by sharded.*tensor_parallel_degree.*not public"),
        (of_user("smp_config.pt", lambda c: c.pop("pipeline_parallel_degree")), "not public"),
        (of_user("optimizer_1.pt", lambda o: o.update(partition_count=4)), "of 4 ranks"),
        (of_user("optimizer_1.pt", lambda o: o.update(partition_count=[2, 1])), "of .2, 1. ranks"),
        (of_user("optimizer_1.pt", lambda o: o.update(partition_count=[])), r"of \[\] ranks"),
        (of_user("optimizer_0.pt", lambda o: o.pop("fp32_flat_groups")), "no fp32_flat_groups"),
        (of_user("model_0.pt", lambda m: m.pop("_smp_zero2d")), r"SMP v1.*partial=False"),
    ],
)  # fmt: skip
def test_parts_that_are_missing_or_lie_are_refused(tmp_path, harm, told):
    root = sharded(tmp_path / "run", SMALL, 2, {"seen": torch.tensor([4])})
    harm(root / "10_partial")
    with pytest.raises(errors.CheckpointError, match=told):
        export_hf(root / "10_partial", tmp_path / "hf")


def test_fewer_ranks_than_were_trained_are_refused(tmp_path):
    root = sharded(tmp_path / "run", SMALL, 3)
    for name in ("model_2.pt", "optimizer_2.pt"):
        (root / "10_partial" / name).unlink()
    with pytest.raises(errors.UsageError, match="of 3 ranks, but there are files of 2"):
        export_hf(root, tmp_path / "hf")
