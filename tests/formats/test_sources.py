"""What other trainers write is exported: directories of Megatron-LM, and single files."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import shutil
import sys
import tarfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

import smckpt
from smckpt import ExportOptions, Parallel, errors, export_hf
from smckpt.formats.readers import dcp as dcp_reader
from smckpt.formats.readers.foreign_catalogue import verify_foreign
from smckpt.translate import import_hf
from tests.support import child, interpreters
from tests.support.faults.failing import failing
from tests.support.models import families, hub_families, references
from tests.support.models.references import each_rank, on_disk

State = dict[str, torch.Tensor]


def assert_same(directory: Path, wanted: State) -> None:
    found = load_file(directory / "model.safetensors")
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


# -- Megatron-LM's own directories. Its training package is on no index: where SMCKPT_MEGATRON_LM
# -- names a checkout, its `save_checkpoint` writes them. Elsewhere `torch.save` of what that puts
# -- together stands in for it.

MEGATRON_LM = Path(__file__).parents[1] / "support" / "models" / "megatron_lm_run.py"
MIXTRAL = (
    "--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type allgather "
    "--moe-router-load-balancing-type none"
)
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
EP = f"{MIXTRAL} --expert-model-parallel-size"
SAVED = {  # family and arguments → tp, ep, ranks, a directory that it writes
    ("llama", f"{TP} 2"): (2, 1, 2, "mp_rank_01"),
    ("llama", f"{PP} 2"): (1, 1, 2, "mp_rank_00_001"),
    ("llama", f"{PP} 2 --num-layers-per-virtual-pipeline-stage 1"): (1, 1, 2, "mp_rank_00_001"),
    ("llama", f"{TP} 2 {PP} 2"): (2, 1, 4, "mp_rank_01_001"),
    ("mixtral", f"{EP} 2"): (1, 2, 2, "mp_rank_00_001"),
    ("mixtral", f"{EP} 2 {TP} 2"): (2, 2, 4, "mp_rank_01_001"),
    ("mixtral", f"{EP} 2 {PP} 2"): (1, 2, 4, "mp_rank_00_001_001"),
}


@pytest.mark.long
@pytest.mark.skipif(not os.environ.get("SMCKPT_MEGATRON_LM"), reason="no checkout of Megatron-LM")
def test_what_megatron_lm_itself_saves_is_exported(tmp_path, monkeypatch, judged):
    """SMCKPT_MEGATRON_LM: as in PYTHONPATH, the checkout of core_v0.16.1 and a folder with triton,
    for the interpreter of SMCKPT_MEGATRON_PYTHON."""
    made: dict[str, Any] = {}
    jobs = []
    for number, ((family, arguments), (tp, ep, world, _)) in enumerate(SAVED.items()):
        if family not in made:
            model = references.model(family, num_hidden_layers=4)
            made[family] = model, on_disk(model, tmp_path / family)
        weights = tmp_path / f"weights{number}"
        weights.mkdir()
        for rank in range(tp * ep):
            t, e = rank % tp, rank // tp
            cut = references.mcore(
                made[family][1], tp, t, ep, e, local=True, sequential=family == "mixtral"
            )
            torch.save(cut, weights / f"{t}-{e}.pt")
        jobs.append({"arguments": arguments.split(), "world": world, "weights": str(weights),
                     "save": str(tmp_path / f"saved{number}")})  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", os.environ["SMCKPT_MEGATRON_LM"])
    interpreters.run(interpreters.megatron(), MEGATRON_LM, json.dumps(jobs), timeout=400)
    for job, ((family, _), (tp, ep, _, place)) in zip(jobs, SAVED.items(), strict=True):
        model, state = made[family]
        assert (Path(job["save"]) / "iter_0000010" / place).is_dir(), job
        report = export_hf(
            job["save"], tmp_path / "hf", config=model.config, options=ExportOptions(overwrite=True)
        )
        assert (report.source, report.layout) == ("Megatron-LM (mp_rank_XX)", "mcore_local"), job
        assert_same(tmp_path / "hf", state)
        judged(family, "Megatron-LM directory", exports=["Megatron-LM"],
               at=f"{tp}×{ep}" if ep > 1 else str(tp))  # fmt: skip


class Trainer:
    """A class of a trainer that is not installed where the export runs."""

    def __init__(self) -> None:
        self.ran = 0

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("code that a file names was run")


def megatron_directory(folder: Path, cuts: list[State], ep: int, **arguments: int) -> Path:
    """tensor-parallel ranks innermost."""
    tp = len(cuts) // ep
    step = folder / "iter_0000010"
    home = types.ModuleType("a_trainer")
    home.Trainer = Trainer  # type: ignore[attr-defined]
    sys.modules["a_trainer"] = home
    Trainer.__module__ = "a_trainer"
    try:
        for number, cut in enumerate(cuts):
            expert = f"_{number // tp:03d}" if ep > 1 else ""
            place = step / f"mp_rank_{number % tp:02d}{expert}"
            place.mkdir(parents=True)
            given = {"pipeline_model_parallel_size": 1, **arguments}
            state = {
                "args": argparse.Namespace(tensor_model_parallel_size=tp, **given),
                "checkpoint_version": 3.0, "iteration": 10,
                "model": {**cut, "decoder.layers.0.mlp.linear_fc1._extra_state": io.BytesIO(b"x")},
                "rng_state": [{"np_rng_state": np.random.get_state(), "trainer": Trainer()}],
            }  # fmt: skip
            torch.save(state, place / "model_optim_rng.pt")
    finally:
        del sys.modules["a_trainer"]
    (folder / "latest_checkpointed_iteration.txt").write_text("10\n")
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Any, State]:
    model = references.model("llama")
    return model, on_disk(model, tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("above", [True, False])
def test_a_directory_of_megatron_is_exported_and_runs_nothing(tmp_path, llama, above):
    model, state = llama
    cuts = each_rank(lambda r, e: references.mcore(state, 2, r), 2)
    root = megatron_directory(tmp_path / "megatron", cuts, 1)
    where = root if above else root / "iter_0000010"
    report = export_hf(where, tmp_path / "hf", config=model.config)
    assert report.layout == "mcore_te"
    assert_same(tmp_path / "hf", state)


def test_a_missing_rank_is_refused(tmp_path, llama):
    model, state = llama
    cuts = each_rank(lambda r, e: references.mcore(state, 2, r), 2)
    root = megatron_directory(tmp_path / "megatron", cuts, 1)
    os.remove(root / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt")
    with pytest.raises(errors.UsageError, match=r"tensor-parallel rank 0.*missing.*mp_rank_00"):
        export_hf(root, tmp_path / "hf", config=model.config)


def test_two_directories_of_one_rank_are_refused(tmp_path, llama):
    """A run without stages went on in several, or in one whose number is written."""
    model, state = llama
    cuts = each_rank(lambda r, e: references.mcore(state, 2, r), 2)
    step = megatron_directory(tmp_path / "m", cuts, 1) / "iter_0000010"
    again = step / "mp_rank_01_000"
    again.mkdir()
    export_hf(step, tmp_path / "hf", config=model.config)  # there is no model in it
    assert_same(tmp_path / "hf", state)
    (again / "model_optim_rng.pt").write_bytes(b"")
    with pytest.raises(errors.UsageError, match="mp_rank_01 and mp_rank_01_000 are of one rank"):
        export_hf(step, tmp_path / "no", config=model.config)


@pytest.mark.parametrize("ep", [1, 4])
def test_the_file_that_is_missing_is_told_by_its_own_name(tmp_path, llama, ep):
    """Of expert-parallel ranks and, with the same number, of pipeline stages; without its directory
    too."""
    model, state = llama
    root = megatron_directory(tmp_path / "m", [state] * 4, 4, pipeline_model_parallel_size=4 // ep)
    place = root / "iter_0000010" / "mp_rank_00_002"
    for remove in ((place / "model_optim_rng.pt").unlink, place.rmdir):
        remove()
        with pytest.raises(errors.UsageError, match=r"fetch mp_rank_00_002/model_optim_rng.pt"):
            export_hf(root, tmp_path / "hf", config=model.config)


@pytest.mark.parametrize("ep", [1, 4])
def test_a_copy_of_another_ranks_file_is_refused(tmp_path, ep):
    """Of expert-parallel ranks, and of pipeline stages in the middle: names and shapes fit."""
    model = references.model("mixtral" if ep > 1 else "llama", num_hidden_layers=4)
    state = on_disk(model, tmp_path / "hub")
    if ep > 1:
        cuts = each_rank(lambda r, e: references.mcore(state, 1, 0, ep, e), 1, ep)
    else:
        whole = references.mcore(state, 1, 0)
        cuts = [stage_of(whole, number, 4) for number in range(4)]
    root = megatron_directory(tmp_path / "m", cuts, 4, pipeline_model_parallel_size=4 // ep)
    export_hf(root, tmp_path / "hf", config=model.config)
    assert_same(tmp_path / "hf", state)
    first, second = (
        root / "iter_0000010" / f"mp_rank_00_00{n}" / "model_optim_rng.pt" for n in (1, 2)
    )
    second.write_bytes(first.read_bytes())
    with pytest.raises(errors.UsageError, match=r"those of mp_rank_00_001.*copy of another rank's"):
        export_hf(root, tmp_path / "no", config=model.config)


def stage_of(state: State, number: int, pp: int) -> State:
    """A stage with one layer, numbered from 0."""
    out = {}
    for name, tensor in state.items():
        at = name.split(".")
        if at[1] == "layers":
            stage, name = int(at[2]), ".".join(["decoder", "layers", "0", *at[3:]])
        else:
            stage = 0 if name.startswith("embedding") else pp - 1
        if stage == number:
            out[name] = tensor
    return out


def test_a_single_number_behind_the_rank_is_the_experts_where_there_are_no_stages(tmp_path, llama):
    from smckpt.formats.readers.rank_sources import RankFilesFound, open_source

    _, state = llama
    cuts = each_rank(lambda r, e: references.mcore(state, 2, r), 2)
    found = open_source(megatron_directory(tmp_path / "megatron", cuts, 2))
    assert isinstance(found, RankFilesFound) and (found.tp, found.ep) == (1, 2)
    names = [name.partition("/")[0] for name in found.files]
    assert names == ["mp_rank_00_000", "mp_rank_00_001"]


# -- DeepSpeed's directories. `torch.save` of what its engine puts together stands in for it here;
# -- the engine itself writes them in test_deepspeed.py.


def deepspeed_directory(folder: Path, cuts: list[State]) -> Path:
    step = folder / "global_step10"
    step.mkdir(parents=True)
    for rank, cut in enumerate(cuts):
        held = {"module": cut, "global_steps": 10, "ds_version": "0.18", "optimizer": None}
        torch.save(held, step / f"mp_rank_{rank:02d}_model_states.pt")
        torch.save({"zero_stage": 2}, step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (folder / "latest").write_text("global_step10")
    return folder


def test_deepspeeds_weights_are_exported_up_to_stage_2(tmp_path, llama):
    model, state = llama
    root = deepspeed_directory(tmp_path / "whole", [state])
    for given in (root, root / "global_step10"):
        report = export_hf(
            given, tmp_path / "hf", config=model.config, options=ExportOptions(overwrite=True)
        )
        assert report.source == "DeepSpeed"
        assert_same(tmp_path / "hf", state)
    cuts = each_rank(lambda r, e: references.mcore(state, 2, r), 2)
    report = export_hf(
        deepspeed_directory(tmp_path / "ranks", cuts), tmp_path / "tp", config=model.config
    )
    assert (report.source, report.layout) == ("DeepSpeed", "mcore_te")
    assert_same(tmp_path / "tp", state)
    os.remove(tmp_path / "ranks" / "global_step10" / "mp_rank_00_model_states.pt")
    with pytest.raises(errors.UsageError, match=r"mp_rank_00_model_states.pt.*missing"):
        export_hf(tmp_path / "ranks", tmp_path / "no", config=model.config)


def test_a_step_that_deepspeed_names_and_that_is_missing_is_told(tmp_path, llama):
    model, state = llama
    root = deepspeed_directory(tmp_path / "run", [state])
    (root / "latest").write_text("global_step20")
    (root / "latest_universal").write_text("global_step10")  # an older one is not taken instead
    with pytest.raises(errors.UsageError, match=r"latest names 'global_step20', which is missing"):
        export_hf(root, tmp_path / "hf", config=model.config)
    (root / "global_step10").rename(root / "global_step20_universal")
    (root / "latest_universal").write_text("global_step20_universal")
    export_hf(root, tmp_path / "hf", config=model.config)  # the same step in another form
    assert_same(tmp_path / "hf", state)


def test_steps_of_others_without_the_file_that_names_one_are_told(tmp_path, llama):
    model, state = llama
    megatron = megatron_directory(tmp_path / "m", [references.mcore(state, 1, 0)], 1)
    for root, latest, step in (
        (megatron, "latest_checkpointed_iteration.txt", "iter_0000010"),
        (deepspeed_directory(tmp_path / "d", [state]), "latest", "global_step10"),
    ):
        (root / latest).unlink()
        with pytest.raises(errors.CheckpointNotFoundError, match=f"are below, in {step}"):
            export_hf(root, tmp_path / "hf", config=model.config)


def test_other_formats_are_refused_by_name(tmp_path):
    for folder, file, told in (
        ("zarr", "common.pt", "in its format zarr.*torch_dist"),
        ("orbax", "_CHECKPOINT_METADATA", "Orbax"),
        ("step10_partial", "model_0_0_0.pt", r"SMP v1.*partial=False"),
    ):
        place = tmp_path / folder
        place.mkdir()
        (place / file).write_bytes(b"")
        if folder == "zarr":
            (place / "metadata.json").write_text('{"sharded_backend": "zarr"}')
        with pytest.raises(errors.CheckpointError, match=told):
            export_hf(place, tmp_path / "hf")


def test_an_iteration_that_is_named_and_missing_is_told(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    with pytest.raises(errors.UsageError, match=r"names 20, but iter_0000020 is missing"):
        export_hf(tmp_path, tmp_path / "hf")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../x")
    with pytest.raises(errors.CorruptCheckpointError, match=r"no iteration"):
        export_hf(tmp_path, tmp_path / "hf")


# -- single files --------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["pt", "bin", "safetensors"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "model."])
def test_a_single_file_comes_out_with_released_names(tmp_path, suffix, prefix):
    model = hub_families.model("ernie4_5_moe")  # no table: by transformers' own conversion
    model.save_pretrained(tmp_path / "released")
    state = {prefix + name: t.detach().clone() for name, t in model.state_dict().items()}
    path = tmp_path / f"model.{suffix}"
    if suffix == "safetensors":
        save_file(state, path)
    else:
        torch.save({"state_dict": state, "epoch": 3} if prefix == "model." else state, path)
    report = export_hf(path, tmp_path / "hf", config=model.config)
    assert report.naming == "hub" and report.layout is None
    assert_same(tmp_path / "hf", load_file(tmp_path / "released" / "model.safetensors"))


@pytest.mark.parametrize(
    "prefix",
    ["_orig_mod.module.", "module.model.", "model._orig_mod.", "_forward_module.model.",
     "_orig_mod.module._fsdp_wrapped_module.model."],
)  # fmt: skip
def test_wrappers_and_a_trainers_module_are_left_out_in_any_order(tmp_path, llama, prefix):
    """A compiled DDP, DDP of a trainer's module, a module that was compiled in a trainer's,
    Lightning's with DeepSpeed. Without a config nothing but the names tells."""
    _, state = llama
    torch.save({prefix + name: tensor for name, tensor in state.items()}, tmp_path / "c.pt")
    export_hf(tmp_path / "c.pt", tmp_path / "hf")
    assert_same(tmp_path / "hf", state)


def test_the_state_that_torchs_tutorials_save_is_exported(tmp_path, llama):
    model, state = llama
    held = {"epoch": 3, "model_state_dict": state, "optimizer_state_dict": {}}
    torch.save(held, tmp_path / "c.pt")
    export_hf(tmp_path / "c.pt", tmp_path / "hf", config=model.config)
    assert_same(tmp_path / "hf", state)


@pytest.mark.parametrize("named", [True, False])
def test_a_file_without_a_model_is_refused_with_the_keys_that_it_has(tmp_path, llama, named):
    """Nothing else would tell, without a config."""
    model, state = llama
    more = {"config": model.config} if named else {}
    for held, told in (
        ({"ema": state, "best": state, "epoch": 3}, r"could be any of.*prefix=.*'best' or 'ema'"),
        ({"ema": {"w": torch.arange(3)}, "epoch": 3}, r"looks like a model: it has ema"),
        ({"model": model}, r"\['model'\].*not the model"),
        ({}, r"no model in the file"),
    ):
        torch.save(held, tmp_path / "c.pt")
        with pytest.raises(errors.UsageError, match=told):
            export_hf(tmp_path / "c.pt", tmp_path / "hf", **more)
        assert not (tmp_path / "hf").exists()


CUT_SHORT = """
import os, sys
import smckpt
from smckpt import errors
preadv = os.preadv

def late(file, buffers, at):
    if len(buffers[0]) > 1 << 16:
        os.truncate(sys.argv[2], 4096)
    return preadv(file, buffers, at)

os.preadv = late
try:
    smckpt.export_hf(sys.argv[1], sys.argv[3])
except errors.CorruptCheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize("kind", ["pt", "safetensors", "dcp"])
def test_a_file_that_is_written_anew_while_it_is_read_is_an_error(tmp_path, kind):
    """A write cuts it short first. Through a map, that killed the process (SIGBUS)."""
    state = {f"w{i}.weight": torch.full((1 << 20,), float(i)) for i in range(4)}
    path = file = tmp_path / f"model.{kind}"
    if kind == "pt":
        torch.save(state, path)
    elif kind == "safetensors":
        save_file(state, path)
    else:
        dcp.save(state, checkpoint_id=path, no_dist=True)
        file = path / "__0_0.distcp"
    text = child.run(CUT_SHORT, str(path), str(file), str(tmp_path / "hf"))
    assert "the file has 4096 bytes" in text and file.name in text
    assert not (tmp_path / "hf" / "model.safetensors").exists()


def test_each_transposed_tensor_is_verified_though_one_before_it_is_damaged(tmp_path):
    state = {name: torch.arange(6.0).reshape(2, 3).t() + at for at, name in enumerate("abc")}
    torch.save(state, path := tmp_path / "state.pt")
    data = bytearray(path.read_bytes())
    at = data.index(state["a"].t().contiguous().numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    report = verify_foreign(path)
    assert [problem.what.partition(":")[0] for problem in report.problems] == ["a"]


def test_a_damaged_value_of_dcp_is_never_loaded_and_verify_lists_it(tmp_path, monkeypatch):
    """torch reads it without a look at the CRC-32 that torch wrote, and a load gave other numbers.
    The state is 0.1, text and a list; each byte of the first value's archive is changed in turn."""

    def state(number: float) -> dict[str, Any]:
        return {"w": torch.ones(2), "cfg": {"lr": number, "of": {"x": [number]}}}

    dcp.save(state(0.1), checkpoint_id=tmp_path / "d", no_dist=True)
    (file,) = (tmp_path / "d").glob("*.distcp")
    data = file.read_bytes()
    reads: list[str] = []
    own = dcp_reader.read_value
    monkeypatch.setattr(
        dcp_reader, "read_value", lambda *a: [reads.append(a[2]), own(*a)][1]
    )  # fmt: skip
    smckpt.load(target := state(0.0), checkpoint_id=tmp_path / "d")
    assert target["cfg"] == state(0.1)["cfg"] and sorted(reads) == sorted({*reads})
    size = data.index(b"PK\5\6") + 22
    refused = 0
    for at in range(0, size, 7):
        file.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        try:
            smckpt.load(target := state(0.0), checkpoint_id=tmp_path / "d")
        except errors.CorruptCheckpointError:
            refused += 1
            assert not verify_foreign(tmp_path / "d").ok, at
            continue
        assert target["cfg"] == state(0.1)["cfg"], at  # times, versions and padding
        assert verify_foreign(tmp_path / "d").ok, at
    assert refused > 50


def test_a_tensor_whose_path_is_not_its_name_is_refused(tmp_path):
    dcp.save({"model": {"weight": torch.ones(2)}}, checkpoint_id=tmp_path, no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    # the path in the state, which stands behind the name in all else
    at = data.rindex(b"weight")
    (tmp_path / ".metadata").write_bytes(data[:at] + b"height" + data[at + 6 :])
    with pytest.raises(errors.CorruptCheckpointError, match="at another path"):
        verify_foreign(tmp_path)


def test_a_value_that_cannot_be_read_does_not_vanish_from_a_target(tmp_path):
    odd = {"w": torch.ones(2), "cfg": {"lr": 0.1, "deep": {"of": argparse.Namespace(a=1)}}}
    dcp.save(odd, checkpoint_id=tmp_path, no_dist=True)
    target = {"w": torch.zeros(2), "cfg": {"lr": 0.0, "deep": {"of": 1}}}
    with pytest.raises(errors.StateError, match=r"cfg\.deep\.of hold objects"):
        smckpt.load(target, checkpoint_id=tmp_path)
    smckpt.load(only := {"w": torch.zeros(2)}, checkpoint_id=tmp_path)
    assert target["cfg"]["deep"] == {"of": 1} and only["w"].tolist() == [1, 1]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("call", ["open", "preadv"])
@pytest.mark.parametrize(
    "name", ["model.pt", "model.safetensors", "hub", "dcp", "megatron", "deepspeed", "model.tar"]
)
def test_a_file_of_others_that_cannot_be_read_is_named(tmp_path, llama, name, call, code):
    model, state = llama
    path = file = tmp_path / name
    if name == "model.pt":
        torch.save(state, path)
    elif name == "model.safetensors":
        save_file(state, path)
    elif name == "dcp":
        dcp.save(state, checkpoint_id=path, no_dist=True)
        file = path / ".metadata"
    elif name == "model.tar":
        model.save_pretrained(tmp_path / "hf")
        with tarfile.open(path, "w") as archive:
            archive.add(tmp_path / "hf", "hf")
    elif name == "hub":
        model.save_pretrained(path)
        file = path / "model.safetensors"
    else:
        inside = {"megatron": "mp_rank_00/model_optim_rng.pt",
                  "deepspeed": "mp_rank_00_model_states.pt"}  # fmt: skip
        file = path / inside[name]
        file.parent.mkdir(parents=True)
        torch.save({"module": state} if name == "deepspeed" else {"model": state}, file)
    for times in (1, -1):
        with failing(call, code, file, times=times) as met:
            with pytest.raises(errors.CheckpointError, match="cannot (read|open)") as caught:
                export_hf(path, tmp_path / "o", config=model.config)
            assert file.name in str(caught.value) and met
    assert not (tmp_path / "o").exists()


# -- released checkpoints as they are --------------------------------------------------------------


def test_buffers_of_older_releases_hold_no_weights(tmp_path):
    """Pythia's files have `attention.bias` and `masked_bias`."""
    model = references.model("gpt_neox")
    state = on_disk(model, tmp_path / "hf")
    old = dict(state)
    for i in range(2):
        at = f"gpt_neox.layers.{i}.attention"
        old |= {f"{at}.bias": torch.ones(1, 1, 8, 8), f"{at}.masked_bias": torch.tensor(-1e9)}
    save_file(old, tmp_path / "hf" / "model.safetensors")
    import_hf(tmp_path / "hf", tmp_path / "ranks", Parallel("mcore_te", tp=2))
    checkpoint = smckpt.latest_checkpoint(tmp_path / "ranks")
    export_hf(checkpoint, tmp_path / "again", config=model.config)
    assert_same(tmp_path / "again", state)


@pytest.mark.parametrize("kind", ["hub", "pt", "ours"])
def test_buffers_of_older_releases_are_no_obstacle_to_an_export(tmp_path, llama, kind):
    """The released Llama 2 has `rotary_emb.inv_freq`."""
    model, state = llama
    old = {**state, **{f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8)
                       for i in range(2)}}  # fmt: skip
    path = tmp_path / kind
    if kind == "hub":
        model.save_pretrained(path)
        save_file(old, path / "model.safetensors")
    elif kind == "pt":
        torch.save(old, path)
    else:
        smckpt.save({"model": old}, checkpoint_id=path, no_dist=True)
    report = export_hf(path, tmp_path / "out", config=model.config)
    assert_same(tmp_path / "out", state)
    assert any("inv_freq and 1 more hold no weights" in note for note in report.notes)


def test_a_release_without_the_outer_name_is_imported(tmp_path):
    """gpt2's files have `h.0…`, not `transformer.h.0…`."""
    model = families.model("gpt2")
    state = on_disk(model, tmp_path / "hf")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    save_file(bare, tmp_path / "hf" / "model.safetensors")
    import_hf(tmp_path / "hf", tmp_path / "ranks", Parallel("mcore_te", tp=2))
    checkpoint = smckpt.latest_checkpoint(tmp_path / "ranks")
    export_hf(checkpoint, tmp_path / "again", config=model.config)
    assert_same(tmp_path / "again", state)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])  # by a table, by transformers
def test_what_transformers_keeps_in_float32_stays_and_the_config_is_not_quantized(tmp_path, family):
    model = hub_families.model(family)
    state = {"model": model.state_dict()}
    smckpt.save(state, checkpoint_id=str(tmp_path / "checkpoint"), step=1)
    config = {**model.config.to_dict(), "quantization_config": {"quant_method": "fp8"}}
    checkpoint = smckpt.latest_checkpoint(tmp_path / "checkpoint")
    report = export_hf(checkpoint, tmp_path / "hf", config=config, dtype="bfloat16")
    assert report.naming == "hub"
    found = load_file(tmp_path / "hf" / "model.safetensors")
    kept = {name for name, tensor in found.items() if tensor.dtype == torch.float32}
    assert kept == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())


@pytest.mark.parametrize("how", ["replaced", "written again"])
def test_a_file_that_changes_while_it_is_read_is_no_mixture(tmp_path: Path, how: str) -> None:
    source, later = tmp_path / "model.safetensors", tmp_path / "later"
    for path, value in ((source, 1.0), (later, 2.0)):
        state = {f"layers.{n}.weight": torch.full((5 << 20,), value) for n in range(2)}
        save_file(state, path)

    def change(*_: int) -> None:
        if later.exists():
            if how == "written again":
                shutil.copyfile(later, source)
                later.unlink()
            else:
                later.rename(source)

    options = ExportOptions(naming="module", against_model=False, threads=1, progress=change)
    with pytest.raises(errors.CorruptCheckpointError, match="changed since its reading began"):
        export_hf(source, tmp_path / "out", config={"model_type": "llama"}, options=options)
    assert not (tmp_path / "out").exists()
