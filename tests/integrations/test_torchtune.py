"""torchtune's intermediate checkpoints through smckpt: its own recipe, killed and resumed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import smckpt
from smckpt.cli.app import app
from tests.support import child
from tests.support.interpreters import run, torchtune

SCRIPT = Path(__file__).parents[1] / "support" / "frameworks" / "torchtune_run.py"
STOCK = "torchtune.training.FullModelHFCheckpointer"
OURS = "smckpt.integrations.torchtune.DistributedCheckpointer"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torchtune")


@pytest.fixture(scope="module")
def told(folder: Path) -> list[dict[str, Any]]:
    """What two ranks saw that made the calls, in one run: torchtune takes long to import."""
    done = child.script(SCRIPT, "units", str(folder), python=torchtune(), ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = child.told(done)
    assert len(ranks) == 2
    return ranks


def test_the_calls_of_torchtunes_checkpointer(told: list[dict[str, Any]], folder: Path) -> None:
    for its in (rank["calls"] for rank in told):
        assert its["at first"] is None
        assert its["latest"] == str(folder / "calls" / "dist_epoch_1")
        for epoch in (0, 1):
            assert its[f"loaded {epoch}"] == its[f"kept {epoch}"]
            assert its[f"epochs {epoch}"] == epoch + 1


@pytest.mark.parametrize("own", [False, True], ids=["ours", "torchtune's own"])
def test_an_intermediate_checkpoint_exports_to_what_torchtunes_converter_makes(
    told: list[dict[str, Any]], folder: Path, tmp_path: Path, own: bool, judged: Any
) -> None:
    judged("llama", "torchtune, DCP" if own else "torchtune, its door", exports=["torchtune"])
    step, out = folder / "calls" / ("own" if own else ".") / "dist_epoch_1", tmp_path / "out"
    wanted = torch.load(folder / "calls" / "hf-0.pt")
    gate = wanted["model.layers.0.mlp.gate_proj.weight"]
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
        "intermediate_size": len(gate), "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "vocab_size": 300, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = CliRunner().invoke(app, ["export", str(step), str(out), "--config", str(tmp_path)])
    assert done.exit_code == 0, done.output
    found = load_file(out / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def test_older_checkpoints_are_removed_after_the_commit_of_a_newer(
    told: list[dict[str, Any]],
) -> None:
    for its in (rank["retention"] for rank in told):
        assert its["None"] == [f"dist_epoch_{n}" for n in range(4)]
        assert its["0"] is None  # none is saved
        assert its["1"] == ["dist_epoch_3"]
        assert its["2"] == ["dist_epoch_2", "dist_epoch_3"]


def test_a_failed_save_is_told_and_removes_nothing(told: list[dict[str, Any]]) -> None:
    for its in (rank["retention"] for rank in told):
        assert "dist_epoch_4 was not committed" in its["error"]
        assert its["after a failure"] == ["dist_epoch_2", "dist_epoch_3"]
        assert its["later"] == ["dist_epoch_3", "dist_epoch_5"]


def test_what_is_behind_a_link_below_the_run_stays_as_it_is(told: list[dict[str, Any]]) -> None:
    for its in (rank["links"] for rank in told):
        assert "'dist_epoch_0' below" in its["error"] and "is a symbolic link" in its["error"]
        assert (its["victim"], its["moved"]) == (["notes"], True)


def test_adapters_and_steps_have_directories_of_their_own(told: list[dict[str, Any]]) -> None:
    for its in (rank["adapters"] for rank in told):
        assert its["names"] == ["dist_epoch_1", "dist_epoch_1/adapter_model", "dist_step_40"]
        assert its["directories"] == ["dist_epoch_1", "dist_step_40"]
        assert its["adapter_only=False"] == ["/dist_step_40", [7] * 4]
        assert its["adapter_only=True"] == ["/dist_epoch_1/adapter_model", [1] * 4]


def test_the_newest_is_loaded_of_smckpts_and_of_torchtunes_own_checkpointer(
    told: list[dict[str, Any]],
) -> None:
    newest = {"0": 5, "1": 6, "2": 7, "3": 8, "step": 9}
    for rank in told:
        assert rank["theirs"] == {turn: [value] * 4 for turn, value in newest.items()}


def test_rank_0_saves_whole_tensors_and_all_ranks_load_them(told: list[dict[str, Any]]) -> None:
    saved = ["adapter", "epochs_run", "max_steps_per_epoch", "optimizer"]
    for its in (rank["by_rank_0"] for rank in told):
        assert its["True"] == saved
        assert its["False"] == sorted([*saved, "model"])


def test_the_last_checkpoint_has_the_format_of_the_class_that_the_config_names(
    told: list[dict[str, Any]],
) -> None:
    kinds = ["FullModelMetaCheckpointer", "FullModelTorchTuneCheckpointer"]
    for rank in told:
        assert sorted(rank["formats"]) == kinds
        for its in rank["formats"].values():
            assert its == {"base": True, "again": True, "written": True}


def test_torchtunes_own_files_are_resumed_where_the_config_names_them(
    told: list[dict[str, Any]],
) -> None:
    adapter = {"layers.0.attn.q_proj.lora_a.weight": [5.0]}
    for its in (rank["own files"] for rank in told):
        assert its["named"] == {"epochs_run": 3, "lr": 0.25, "adapter": adapter}
        assert its["not named"] == {"epochs_run": 1, "lr": 1.0, "adapter": {}}


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("keep", "keep_last_n_checkpoints is -1"),
        ("argument", "smckpt_arguments has timeout, which is not honoured"),
        ("unknown", "enable_dcp is not honoured"),
        ("prefix", "dir_prefix is 'day'"),
        ("step", "step is None"),
        ("final", "intermediate_checkpoint=False is not honoured"),
        ("adapters", "adapter_only is set, and the state has no adapters"),
        ("no target", "load_checkpoint has no state_dict"),
        ("nothing", "there is no intermediate checkpoint to load"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(
    told: list[dict[str, Any]], what: str, text: str
) -> None:
    for rank in told:
        assert text in rank["refused"][what]


OWN = """
import logging, os, sys
import torch
from torchtune import training
from smckpt.run import provide

logging.basicConfig(format="%(message)s", stream=sys.stdout, force=True)
os.makedirs(f"{sys.argv[1]}/base")
torch.save({"w": torch.ones(2)}, f"{sys.argv[1]}/base/model.pt")
section = {"checkpoint_dir": f"{sys.argv[1]}/base", "checkpoint_files": ["model.pt"]}
made = training.FullModelTorchTuneCheckpointer(
    **section, model_type="LLAMA2", output_dir=f"{sys.argv[1]}/out"
)

def save(what, **more):
    print("then", what)
    made.save_checkpoint({"model": {"w": torch.ones(2)}, "epochs_run": 1}, epoch=0, **more)

with provide(["torchtune"]):
    save("intermediate", intermediate_checkpoint=True)
    save("last", intermediate_checkpoint=False)
save("undone", intermediate_checkpoint=True)
"""


def test_what_the_door_does_not_save_is_named_under_smckpt_run(tmp_path: Path) -> None:
    lines = run(torchtune(), "-c", OWN, tmp_path).splitlines()
    named = [line for line in lines if line.startswith("then ") or "and not smckpt" in line]
    assert named[0] == "then intermediate" and named[2:] == ["then last", "then undone"]
    assert "FullModelTorchTuneCheckpointer saves this intermediate checkpoint" in named[1]
    assert f"For smckpt name {OURS} as the _component_" in named[1]


class Recipe:
    """A recipe of torchtune with its config, changed in the line of the checkpointer or not."""

    def __init__(self, told: list[dict[str, Any]], folder: Path, name: str, config: str) -> None:
        self.path = Path(told[0]["recipes"]) / f"{name}.py"
        self.stock = folder / "made" / config
        self.ours = folder / "made" / f"ours-{config}"
        text = self.stock.read_text()
        assert text.count(STOCK) == 1
        self.ours.write_text(text.replace(STOCK, OURS))

    def run(
        self,
        *first: str,
        config: Path,
        out: Path,
        by: tuple[str, ...] = (),
        ranks: int = 2,
        **more: Any,
    ) -> subprocess.CompletedProcess[str]:
        also = [f"{key}={value}" for key, value in {"output_dir": out, **more}.items()]
        arguments = (str(self.path), *first, "--config", str(config), *also)
        done = child.script(
            SCRIPT, *arguments, python=torchtune(), ranks=ranks, by=by, torchrun=True
        )
        dies = any(one.startswith("die=") for one in first)
        assert (done.returncode == 0) == (not dies), done.stderr[-4000:]
        return done


def losses(out: Path) -> list[str]:
    """Of each step: its number, loss and rate."""
    lines = (out / "logs" / "log.txt").read_text().splitlines()
    return [line.partition(" tokens")[0] for line in lines]


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, (dict, list)):
        assert len(one) == len(other)
        keys = one if isinstance(one, dict) else range(len(one))
        for key in keys:
            assert_same(one[key], other[key])
    else:
        assert one == other


def state_of(place: Path, *keys: str) -> Any:
    return smckpt.load(checkpoint_id=place, options=smckpt.LoadOptions(only=keys))


def names(out: Path) -> list[str]:
    return [Path(one.path).name for one in smckpt.find_checkpoints(out)]


@pytest.mark.timeout(600)
@pytest.mark.long
def test_the_full_recipe_killed_and_resumed_ends_with_the_bits_of_one_that_was_not(
    told: list[dict[str, Any]], folder: Path
) -> None:
    recipe = Recipe(told, folder, "full_finetune_distributed", "full.yaml")
    straight, out = folder / "straight", folder / "out"
    run = ("-m", "smckpt.run", "--for", "torchtune")
    said = recipe.run(config=recipe.stock, out=straight, by=run, keep_last_n_checkpoints=2)
    assert "CheckpointClient._get_dcp_checkpointer: with enable_async" in said.stderr

    keep = {"checkpointer.keep_last_n_checkpoints": 2}
    recipe.run("die=10", config=recipe.ours, out=out, **keep)
    assert set(names(out)) <= {"dist_epoch_0", "dist_epoch_1"}
    recipe.run(config=recipe.ours, out=out, resume_from_checkpoint=True, **keep)

    for its in (straight, out):
        assert names(its) == ["dist_epoch_1", "dist_epoch_2"]
    final = "epoch_3/model-00001-of-00001.safetensors"
    assert (out / final).read_bytes() == (straight / final).read_bytes()
    keys = ("model", "optimizer", "epochs_run", "seed", "total_epochs", "max_steps_per_epoch")
    last = [state_of(its / "dist_epoch_2", *keys) for its in (out, straight)]
    assert {"exp_avg", "exp_avg_sq", "step"} <= set(
        next(iter(last[0]["optimizer"]["state"].values()))
    )
    assert_same(*last)
    died, resumed = losses(out)[:10], losses(out)[10:]
    assert died == losses(straight)[:10]
    assert resumed == losses(straight)[-len(resumed) :]
    assert len(resumed) in (8, 12)  # the save of epoch 1 was under way when it was killed


@pytest.mark.long
@pytest.mark.parametrize("alone", [False, True])
def test_the_lora_recipe_goes_on_bit_for_bit_after_a_kill(
    told: list[dict[str, Any]], folder: Path, alone: bool
) -> None:
    recipe = Recipe(told, folder, "lora_finetune_distributed", "lora.yaml")
    straight, out = folder / f"lora-straight-{alone}", folder / f"lora-{alone}"
    more = {"save_adapter_weights_only": alone}
    recipe.run(config=recipe.ours, out=straight, **more)
    recipe.run("die=10", config=recipe.ours, out=out, **more)
    recipe.run(config=recipe.ours, out=out, resume_from_checkpoint=True, **more)
    final = sorted(path.name for path in (straight / "epoch_3").iterdir())
    assert {"adapter_model.pt", "adapter_model.safetensors", "adapter_config.json"} <= set(final)
    assert ("model-00001-of-00001.safetensors" in final) == (not alone)
    for name in final:
        if name.endswith(".safetensors"):
            ours, theirs = (its / "epoch_3" / name for its in (out, straight))
            assert ours.read_bytes() == theirs.read_bytes()
    last = [state_of(its / "dist_epoch_2", "adapter", "optimizer") for its in (out, straight)]
    assert_same(*last)
    assert losses(out)[10:] == losses(straight)[-len(losses(out)[10:]) :]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("sync", {"enable_async_checkpointing": False}),  # rank 0 saves whole tensors
        ("in_bwd", {"optimizer_in_bwd": True, "clip_grad_norm": None}),
    ],
)
def test_other_ways_to_train_go_on_bit_for_bit_after_a_kill(
    told: list[dict[str, Any]], folder: Path, name: str, more: dict[str, Any]
) -> None:
    recipe = Recipe(told, folder, "full_finetune_distributed", "full.yaml")
    straight, out = folder / f"{name}-straight", folder / name
    more = {**more, "checkpointer": OURS}  # on the command line, as it may be
    recipe.run(config=recipe.stock, out=straight, **more)
    recipe.run("die=10", config=recipe.stock, out=out, **more)
    recipe.run(config=recipe.stock, out=out, resume_from_checkpoint=True, **more)
    final = "epoch_3/model-00001-of-00001.safetensors"
    assert (out / final).read_bytes() == (straight / final).read_bytes()
    assert losses(out)[10:] == losses(straight)[-len(losses(out)[10:]) :]


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "last"), [(2, 18), (4, 10)], ids=["tensor", "and FSDP2"])
def test_a_tensor_parallel_recipe_goes_on_bit_for_bit_after_a_kill(
    told: list[dict[str, Any]], folder: Path, ranks: int, last: int
) -> None:
    recipe = Recipe(told, folder, "full_finetune_distributed", "full.yaml")
    straight, out = folder / f"tp-straight-{ranks}", folder / f"tp-{ranks}"
    plan = "torchtune.models.llama3.base_llama_tp_plan"
    more = {
        "tensor_parallel_dim": 2,
        "tensor_parallel_plan._component_": plan,
        "clip_grad_norm": "null",  # torch has no norm over parameters of several meshes
        "optimizer.foreach": False,  # nor an update
    }
    recipe.run(config=recipe.ours, out=straight, ranks=ranks, **more)
    recipe.run(f"die={last}", config=recipe.ours, out=out, ranks=ranks, **more)
    recipe.run(config=recipe.ours, out=out, ranks=ranks, resume_from_checkpoint=True, **more)
    final = "epoch_3/model-00001-of-00001.safetensors"
    assert (out / final).read_bytes() == (straight / final).read_bytes()
    assert_same(*(smckpt.load(checkpoint_id=its / "dist_epoch_2") for its in (out, straight)))
    resumed = losses(out)[last:]
    assert resumed == losses(straight)[-len(resumed) :]
    assert len(resumed) < len(losses(straight))


@pytest.mark.timeout(600)
@pytest.mark.long
@pytest.mark.parametrize("saves", ["async", "sync"])  # by all ranks, by rank 0
def test_a_recipe_of_two_ranks_is_resumed_on_one_and_on_four(
    told: list[dict[str, Any]], folder: Path, saves: str
) -> None:
    recipe = Recipe(told, folder, "full_finetune_distributed", "full.yaml")
    out = folder / f"two-{saves}"
    more = {"enable_async_checkpointing": saves == "async"}
    recipe.run("die=10", config=recipe.ours, out=out, **more)
    assert "dist_epoch_0" in names(out)
    for ranks in (1, 4):
        its = folder / f"{ranks}-{saves}"
        shutil.copytree(out, its)
        more["resume_from_checkpoint"] = True
        done = recipe.run(f"look={its}", config=recipe.ours, out=its, ranks=ranks, **more)
        if saves == "async":
            seen = child.told(done)
            assert len(seen) == ranks
            for one in seen:
                assert one["wrong"] == [] and one["epochs"][0] == one["epochs"][1] > 0
        assert not losses(its)[10].startswith("Step 1 ")  # it went on
        assert "dist_epoch_2" in names(its)
        assert (its / "epoch_3" / "model-00001-of-00001.safetensors").exists()


@pytest.mark.long
def test_the_full_recipe_resumes_from_s3(
    told: list[dict[str, Any]], folder: Path, s3_root: str
) -> None:
    recipe = Recipe(told, folder, "full_finetune_distributed", "full.yaml")
    straight, out = folder / "s3-straight", folder / "s3"
    recipe.run(config=recipe.ours, out=straight)
    more = {"checkpointer.keep_last_n_checkpoints": 1, "checkpointer.smckpt_root": s3_root}
    recipe.run("die=10", config=recipe.ours, out=out, **more)
    recipe.run(config=recipe.ours, out=out, resume_from_checkpoint=True, **more)
    assert [one.path.split("/")[-1] for one in smckpt.find_checkpoints(s3_root)] == ["dist_epoch_2"]
    final = "epoch_3/model-00001-of-00001.safetensors"
    assert (out / final).read_bytes() == (straight / final).read_bytes()
    assert_same(*(smckpt.load(checkpoint_id=f"{its}/dist_epoch_2") for its in (s3_root, straight)))
