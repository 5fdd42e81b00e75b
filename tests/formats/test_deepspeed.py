"""DeepSpeed's checkpoints: of its ZeRO stages, and universal ones.

Its own engine writes them where SMCKPT_DEEPSPEED names a folder with the package. Without it,
`torch.save` of what the engine's `save_checkpoint` puts together stands in for it.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from smckpt import ExportOptions, Parallel, errors, export_hf
from smckpt.cli.app import app
from tests.support.launch import run_ranks
from tests.support.limits import seconds
from tests.support.models import hub_families, references
from tests.support.models.references import on_disk

State = dict[str, torch.Tensor]
SCRIPT = Path(__file__).parents[1] / "support" / "models" / "deepspeed_run.py"


def assert_same(directory: Path, wanted: State) -> None:
    found = load_file(directory / "model.safetensors")
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


# -- the engine itself -----------------------------------------------------------------------------


def ranks(model: str, out: str) -> None:
    command = [sys.executable, str(SCRIPT), model, out]
    subprocess.run(
        command,
        env=with_deepspeed(),
        check=True,
        capture_output=True,
        timeout=seconds(240),
    )


def with_deepspeed() -> dict[str, str]:
    places = [os.environ["SMCKPT_DEEPSPEED"], os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), "DS_ACCELERATOR": "cpu"}


@pytest.mark.long
@pytest.mark.skipif(not os.environ.get("SMCKPT_DEEPSPEED"), reason="no folder with deepspeed")
def test_what_deepspeed_writes_is_exported(tmp_path, judged):
    model = references.model("llama")
    for parameter in model.parameters():  # so that the float32 masters are the weights
        parameter.data.copy_(parameter.bfloat16())
    state = on_disk(model, tmp_path / "hub")
    run_ranks(launched, 2, str(tmp_path / "hub"), str(tmp_path), timeout=400)
    frozen = "model.embed_tokens.weight"
    report = export_hf(tmp_path / "llama", tmp_path / "hf", config=model.config)
    assert report.source == "DeepSpeed, ZeRO stage 3"
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == state.keys()
    assert [n for n, t in found.items() if not torch.equal(t.float(), state[n])] == []
    assert {n for n, t in found.items() if t.dtype != torch.float32} == {frozen}
    for stage in range(3):  # whose weights are whole, in bfloat16
        report = export_hf(tmp_path / f"stage{stage}", tmp_path / f"hf{stage}", config=model.config)
        assert report.source == "DeepSpeed"
        assert_same(tmp_path / f"hf{stage}", {n: t.bfloat16() for n, t in state.items()})
        judged("llama", f"DeepSpeed ZeRO-{stage}", exports=["DeepSpeed"])
    export_hf(tmp_path / "odd", tmp_path / "odd-hf")
    assert_same(tmp_path / "odd-hf", torch.load(tmp_path / "odd.pt"))
    judged("llama", "DeepSpeed ZeRO-3", exports=["DeepSpeed"])
    universal = tmp_path / "universal" / "global_step1_universal"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(tmp_path / "odd" / "global_step1"), "--output_folder"]
    command += [str(universal), "--num_extract_workers", "1", "--num_merge_workers", "1"]
    subprocess.run(
        command,
        env=with_deepspeed(),
        check=True,
        capture_output=True,
        timeout=seconds(240),
    )
    for given in (universal, universal.parent):
        report = export_hf(given, tmp_path / "u", options=ExportOptions(overwrite=True))
        assert report.source == "DeepSpeed, universal checkpoint"
        assert_same(tmp_path / "u", torch.load(tmp_path / "odd.pt"))
    judged("llama", "DeepSpeed universal", exports=["DeepSpeed"])


def launched(model: str, out: str) -> None:
    import torch.distributed as dist

    dist.destroy_process_group()  # the script makes its own
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    ranks(model, out)


# -- a stand-in ------------------------------------------------------------------------------------


def zero3(
    folder: Path, state: State, world: int, frozen: tuple[str, ...] = (),
    change: Callable[[dict[str, Any], dict[str, Any]], object] = lambda model, optimizer: None,
) -> Path:  # fmt: skip
    """change: what is different in the files of the last rank."""
    step = folder / "global_step5"
    step.mkdir(parents=True)
    parts: list[State] = [{} for _ in range(world)]
    for name, tensor in state.items():
        count = math.ceil(tensor.numel() / world)
        flat = torch.nn.functional.pad(tensor.flatten(), (0, count * world - tensor.numel()))
        for rank, part in enumerate(flat.split(count)):
            parts[rank][name] = part.clone()
    shapes = {name: tensor.shape for name, tensor in state.items()}
    trained = [name for name in state if name not in frozen]
    half = len(trained) // 2  # of two groups of parameters
    for rank, own in enumerate(parts):
        groups = [trained[:half], trained[half:]]
        model = {
            "module": {n: torch.empty(0, dtype=torch.bfloat16) for n in state}, "buffer_names": [],
            "param_shapes": [{n: shapes[n] for n in group} for group in groups],
            "frozen_param_shapes": {n: shapes[n] for n in frozen}, "shared_params": {},
            "frozen_param_fragments": {n: own[n] for n in frozen}, "ds_version": "0.19.8",
        }  # fmt: skip
        flat_groups = [torch.cat([own[n] for n in group]) for group in groups]
        optimizer = {
            "zero_stage": 3, "partition_count": world, "fp32_flat_groups": flat_groups,
        }  # fmt: skip
        if rank == world - 1:
            change(model, optimizer)
        torch.save(model, step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        torch.save({"optimizer_state_dict": optimizer, "ds_version": "0.19.8"},
                   step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")  # fmt: skip
    (folder / "latest").write_text("global_step5")
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> tuple[Any, State, State]:
    """In memory its experts are one tensor. The config, that state, and what is released."""
    folder = tmp_path_factory.mktemp("qwen2_moe")
    model = hub_families.model("qwen2_moe")
    model.save_pretrained(folder)
    return model.config, dict(model.state_dict()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("world", [1, 3, 12])
def test_parts_of_stage_3_are_joined(tmp_path, qwen, judged, world):
    """Three and twelve ranks divide no size, so parts begin in the middle of rows."""
    config, state, released = qwen
    root = zero3(tmp_path / "run", state, world, frozen=("model.embed_tokens.weight",))
    for given in (root, root / "global_step5"):
        report = export_hf(
            given, tmp_path / "hf", config=config, options=ExportOptions(overwrite=True)
        )
        assert report.source == "DeepSpeed, ZeRO stage 3"
        assert_same(tmp_path / "hf", released)
    judged("qwen2_moe", "DeepSpeed ZeRO-3", exports=["save_pretrained"])


def test_a_universal_checkpoint_is_exported(tmp_path, qwen, judged, capsys):
    config, state, released = qwen
    for name, tensor in state.items():
        place = tmp_path / "run" / "global_step5_universal" / "zero" / name
        place.mkdir(parents=True)
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            torch.save({"param": tensor if kind == "fp32" else tensor * 0}, place / f"{kind}.pt")
    (tmp_path / "run" / "latest_universal").write_text("global_step5_universal")
    report = export_hf(tmp_path / "run", tmp_path / "hf", config=config)
    assert report.source == "DeepSpeed, universal checkpoint"
    assert_same(tmp_path / "hf", released)
    judged("qwen2_moe", "DeepSpeed universal", exports=["save_pretrained"])
    app(["show", str(tmp_path / "run")], standalone_mode=False)
    assert "universal" in capsys.readouterr().out


def test_a_universal_checkpoint_of_stage_3_has_flat_files(tmp_path):
    """Their shapes are in the copies of the ranks' model_states beside them."""
    state = {"w": torch.arange(35.0).reshape(7, 5), "b": torch.arange(3.0), "f": torch.ones(5, 3)}
    step = zero3(tmp_path / "run", state, 2, frozen=("f",)) / "global_step5"
    for path in step.glob("*_optim_states.pt"):
        path.unlink()
    for name in ("w", "b"):
        (step / "zero" / name).mkdir(parents=True)
        torch.save(state[name].flatten().clone(), step / "zero" / name / "fp32.pt")
    export_hf(step, tmp_path / "hf")
    assert_same(tmp_path / "hf", state)
    torch.save(torch.zeros(36), step / "zero" / "w" / "fp32.pt")
    with pytest.raises(errors.CorruptCheckpointError, match=r"w has \(7, 5\)"):
        export_hf(step, tmp_path / "no")


# -- what is damaged or of other ranks is refused --------------------------------------------------


def lies_about_a_shape(model: dict[str, Any], optimizer: dict[str, Any]) -> None:
    model["param_shapes"][0]["w"] = torch.Size([9, 5])


def names_another(model: dict[str, Any], optimizer: dict[str, Any]) -> None:
    model["param_shapes"][0] = {"other": model["param_shapes"][0]["w"]}


def shorter(model: dict[str, Any], optimizer: dict[str, Any]) -> None:
    optimizer["fp32_flat_groups"][0] = optimizer["fp32_flat_groups"][0][:-1].clone()


def of_more_ranks(model: dict[str, Any], optimizer: dict[str, Any]) -> None:
    optimizer["partition_count"] = 4


def of_another_dtype(model: dict[str, Any], optimizer: dict[str, Any]) -> None:
    optimizer["fp32_flat_groups"][0] = optimizer["fp32_flat_groups"][0].double()


def of_another_step(model: dict[str, Any], optimizer: dict[str, Any]) -> None:
    model["global_steps"] = 7


def after_more_steps(model: dict[str, Any], optimizer: dict[str, Any]) -> None:
    optimizer["optimizer_state_dict"] = {"state": {0: {"step": torch.tensor(7.0)}}}


def without_groups(model: dict[str, Any], optimizer: dict[str, Any]) -> None:
    del optimizer["fp32_flat_groups"]


@pytest.mark.parametrize(
    ("change", "world", "told"),
    [
        (lies_about_a_shape, 1, "elements of each rank, but the groups"),
        (lies_about_a_shape, 2, "different parameters or shapes"),
        (names_another, 2, "different parameters or shapes"),
        (shorter, 2, "elements of each rank, but the groups"),
        (of_more_ranks, 2, "of 4 ranks, but there are files of 2"),
        (of_another_dtype, 2, "w has the dtypes"),
        (of_another_step, 2, "rank_1_.* is of another step than .*rank_0_"),
        (after_more_steps, 2, "rank_1_.* is of another step than .*rank_0_"),
        (without_groups, 2, "no fp32_flat_groups"),
    ],
)
def test_files_that_lie_are_refused(tmp_path, change, world, told):
    state = {"w": torch.arange(35.0).reshape(7, 5), "b": torch.arange(3.0)}
    root = zero3(tmp_path / "run", state, world, change=change)
    with pytest.raises(errors.CheckpointError, match=told):
        export_hf(root, tmp_path / "hf")


def test_two_files_of_one_rank_are_refused(tmp_path):
    """Of a run that went on in another dtype, say."""
    state = {"w": torch.arange(35.0), "b": torch.arange(3.0)}
    step = zero3(tmp_path / "run", state, 2) / "global_step5"
    one, two = (f"{kind}zero_pp_rank_0_mp_rank_00_optim_states.pt" for kind in ("bf16_", ""))
    shutil.copy(step / one, step / two)
    with pytest.raises(errors.UsageError, match=f"{one} and {two} are of one rank"):
        export_hf(step, tmp_path / "hf")


def test_missing_ranks_further_cuts_and_stages_are_refused(tmp_path):
    state = {"w": torch.arange(35.0).reshape(7, 5), "b": torch.arange(3.0)}
    for name in ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
                 "zero_pp_rank_0_mp_rank_00_model_states.pt"):  # fmt: skip
        root = zero3(tmp_path / name, state, 2)
        (root / "global_step5" / name).unlink()
        with pytest.raises(errors.UsageError, match=r"of the ranks \[[01]\].*missing"):
            export_hf(root, tmp_path / "hf")
    root = zero3(tmp_path / "tp", state, 2)
    (root / "global_step5" / "zero_pp_rank_0_mp_rank_01_model_states.pt").write_bytes(b"")
    with pytest.raises(errors.UsageError, match=r"tensor-parallel ranks.*ds_to_universal"):
        export_hf(root, tmp_path / "hf")
    root = zero3(tmp_path / "half", state, 1, change=lambda model, _: model.update(mp_world_size=2))
    with pytest.raises(errors.UsageError, match=r"=2, but there are files of one tensor-parallel"):
        export_hf(root, tmp_path / "hf")
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "layer_00-model_states.pt").write_bytes(b"")
    with pytest.raises(errors.UsageError, match=r"pipeline stages.*ds_to_universal"):
        export_hf(tmp_path / "stages", tmp_path / "hf")


@pytest.mark.parametrize("world", [2, 3])
def test_a_copy_of_another_ranks_part_is_refused(tmp_path, qwen, world):
    config, state, _ = qwen
    step = zero3(tmp_path / "run", state, world) / "global_step5"
    first, second = (
        step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)
    )
    shutil.copy(first, second)
    with pytest.raises(errors.UsageError, match=f"byte for byte .*{first.name}") as caught:
        export_hf(step, tmp_path / "hf", config=config)
    assert caught.value.path == str(second) and not (tmp_path / "hf").exists()
    report = export_hf(
        step, tmp_path / "hf", config=config, parallel=Parallel(allow_equal_ranks=True)
    )
    assert report.source == "DeepSpeed, ZeRO stage 3"


def test_parts_of_nothing_but_one_number_are_no_copies(tmp_path):
    state = {"a.weight": torch.zeros(4, 6), "b.bias": torch.full((8,), 0.5)}
    export_hf(zero3(tmp_path / "run", state, 2), tmp_path / "hf")
    assert_same(tmp_path / "hf", state)


def test_a_changed_byte_of_a_part_is_told(tmp_path):
    root = zero3(tmp_path / "run", {"w": torch.arange(4096.0), "b": torch.arange(3.0)}, 2)
    path = root / "global_step5" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(3000.0, 3010).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(errors.CorruptCheckpointError, match="differ from the CRC-32"):
        export_hf(root, tmp_path / "hf")
