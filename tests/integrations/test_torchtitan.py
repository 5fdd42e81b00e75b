"""torchtitan's checkpoints through smckpt: its own trainer, killed and resumed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import smckpt
from smckpt.cli.app import app
from smckpt.manager.memory import SERVICE
from smckpt.translate import Parallel, import_hf
from tests.support import child
from tests.support.faults.hosts import keeper_service
from tests.support.faults.swaps import below
from tests.support.interpreters import run, torchtitan
from tests.translate.models.test_released import deepseek

SCRIPT = Path(__file__).parents[1] / "support" / "frameworks" / "torchtitan_train.py"


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beside the runs' folders: the tokenizer and the texts."""
    folder = tmp_path_factory.mktemp("torchtitan")
    done = child.script(SCRIPT, str(folder / "run"), "base=true", python=torchtitan())
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def train(
    out: Path, /, ranks: int = 2, fails: bool = False, **fields: Any
) -> tuple[list[dict[str, Any]], str]:
    """What each rank has told, by rank, and stderr."""
    given = [f"{name}={json.dumps(value)}" for name, value in fields.items()]
    done = child.script(SCRIPT, str(out), *given, python=torchtitan(), ranks=ranks, torchrun=True)
    assert (done.returncode != 0) == fails, done.stderr[-4000:]
    return sorted(child.told(done), key=lambda its: its["rank"]), done.stderr


def steps(folder: Path | str, **arguments: Any) -> list[str]:
    found = smckpt.find_checkpoints(f"{folder}/checkpoint", **arguments)
    return [Path(one.path).name for one in found]


@pytest.fixture(scope="module")
def straight(top: Path) -> list[dict[str, Any]]:
    """A training that nothing ends, and a second trainer that loads its last step."""
    return train(top / "straight", twice=True, keep_latest_k=2)[0]


def test_a_second_trainer_has_all_that_the_first_one_saved(
    straight: list[dict[str, Any]], top: Path
) -> None:
    for its in straight:
        assert its["loaded"] is False and list(its["losses"]) == [str(n) for n in range(1, 7)]
        assert its["again"] is True and its["step again"] == 6
        assert its["digest again"] == its["digest"]
        assert len(its["memory of a new run"]) == 1  # before its first save, and no other one later
        assert its["memory of a new run"] == its["memory after"]
    assert straight[0]["digest"] != straight[1]["digest"]
    assert steps(top / "straight") == ["step-4", "step-6"]  # keep_latest_k


@pytest.mark.long
def test_killed_and_resumed_it_ends_with_the_bits_of_one_that_was_not(
    straight: list[dict[str, Any]], top: Path
) -> None:
    train(top / "killed", fails=True, die=5, keep_latest_k=2)
    assert "step-2" in steps(top / "killed")
    resumed, _ = train(top / "killed", keep_latest_k=2)
    assert_resumed(resumed, straight)
    assert steps(top / "killed") == ["step-4", "step-6"]
    for its in resumed:  # that of the first save was there before it
        assert len(its["memory"]) == 1 and its["memory after"] == its["memory"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [(2, {"tensor": 2}), (4, {"tensor": 2}), (2, {"pipeline": 2})],
    ids=["tensor", "tensor and FSDP2", "pipeline"],
)
def test_tensor_and_pipeline_parallel_runs_end_with_the_bits_of_those_not_killed(
    top: Path, ranks: int, degrees: dict[str, int], request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id
    whole, _ = train(top / f"{name}, straight", ranks, **degrees)
    train(top / f"{name}, killed", ranks, fails=True, die=5, **degrees)
    resumed, _ = train(top / f"{name}, killed", ranks, **degrees)
    assert_resumed(resumed, whole)
    assert len({its["digest"] for its in whole}) == ranks  # each rank has a part of its own


def assert_resumed(resumed: list[dict[str, Any]], straight: list[dict[str, Any]]) -> None:
    for its, whole in zip(resumed, straight, strict=True):
        assert its["began"] in (2, 4)  # the save of step 4 was perhaps under way
        assert its["digest"] == whole["digest"]
        assert its["losses"] == {
            n: its["losses"][n] for n in whole["losses"] if int(n) > its["began"]
        }
        assert all(loss == whole["losses"][n] for n, loss in its["losses"].items())


@pytest.mark.long
@pytest.mark.parametrize("degrees", [{}, {"tensor": 2}], ids=["FSDP2", "tensor"])
def test_torchtitans_own_manager_resumes_what_convert_gives_back(
    straight: list[dict[str, Any]], top: Path, degrees: dict[str, int]
) -> None:
    whole, ours, back = straight, top / "straight", top / f"back {len(degrees)}"
    if degrees:
        whole, ours = train(top / "ours", **degrees)[0], top / "ours"
    smckpt.convert(ours / "checkpoint" / "step-4", back / "checkpoint" / "step-4", to="torchtitan")
    resumed, _ = train(back, stock=True, **degrees)
    assert [its["began"] for its in resumed] == [4, 4]
    assert_resumed(resumed, whole)


@pytest.mark.long
def test_an_unchanged_config_goes_through_the_door_and_resumes_what_torchtitan_saved(
    straight: list[dict[str, Any]], top: Path
) -> None:
    folder = top / "theirs"
    train(folder, fails=True, stock=True, die=5)  # torchtitan's own manager, which waits
    assert (folder / "checkpoint" / "step-4" / ".metadata").exists()
    resumed, said = train(folder, door=True, stock=True)  # as `smckpt run --for torchtitan` does
    assert "CheckpointManager.Config._owner: it builds smckpt's" in said
    assert resumed[0]["began"] == 4
    assert_resumed(resumed, straight)
    assert steps(folder) == ["step-6"]


OTHERS = """
from dataclasses import dataclass
import torch
from torchtitan.components.checkpointer import CheckpointManager
from smckpt.errors import UsageError
from smckpt.run import provide

class Mine(CheckpointManager):
    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

def tell(make, config):
    parts = dict(model_parts=[torch.nn.Linear(1, 1)], optimizers=None, lr_schedulers=None)
    try:
        print(type(make(config, dataloader=None, states={}, sd_adapter=None, **parts)).__name__)
    except UsageError as error:
        print(error)

def direct(config, **parts):
    return CheckpointManager(config, **parts)

def built(config, **parts):
    return config.build(**parts)

with provide(["torchtitan"]):
    tell(built, CheckpointManager.Config(enable=True))
    tell(built, Mine.Config(enable=True))
    tell(direct, CheckpointManager.Config(enable=True))
    tell(built, Mine.Config(enable=False))
tell(built, Mine.Config(enable=True))
"""


def test_a_manager_of_another_class_is_refused_by_name_under_the_door() -> None:
    ours, mine, direct, disabled, undone = run(torchtitan(), "-c", OTHERS).splitlines()
    assert ours == "SmckptCheckpointManager"
    assert "Mine is not honoured: it saves and loads without smckpt" in mine
    assert "CheckpointManager is not honoured" in direct
    assert disabled == undone == "Mine"


@pytest.mark.long
def test_what_a_killed_run_had_not_yet_deleted_is_not_loaded(top: Path) -> None:
    """torchtitan's own checkpoint, in whose directory the run had committed."""
    folder = top / "over theirs"
    train(folder, ranks=1, stock=True, steps=2, interval=1)
    step = folder / "checkpoint" / "step-2"
    theirs = (step / ".metadata").read_bytes()
    train(folder, ranks=1, steps=2, interval=1, load_step=1)
    assert not (step / ".metadata").exists()
    (step / ".metadata").write_bytes(theirs)  # of its data nothing is left
    begun, _ = train(folder, ranks=1, steps=3)
    assert begun[0]["began"] == 2 and list(begun[0]["losses"]) == ["3"]


@pytest.mark.long
def test_it_saves_to_s3_and_resumes_from_there(
    straight: list[dict[str, Any]], top: Path, s3_root: str
) -> None:
    where = f"{s3_root}/run/checkpoint"
    train(top / "s3", fails=True, die=5, folder=where)
    resumed, _ = train(top / "s3", folder=where)
    assert_resumed(resumed, straight)


@pytest.mark.long
def test_a_seed_checkpoint_of_one_rank_begins_two_rank_runs_alike(top: Path) -> None:
    folder = top / "seed"
    train(folder, ranks=1, create_seed_checkpoint=True, last_save_model_only=True)
    assert steps(folder) == ["step-0"]
    shutil.copytree(folder, top / "seed again")
    one, _ = train(folder, steps=2)
    two, _ = train(top / "seed again", steps=2, replicate=2)
    for first, second in zip(one, two, strict=True):
        assert first["loaded"] is True and first["began"] == 0
        assert first["losses"]["1"] == second["losses"]["1"]


@pytest.mark.long
def test_the_last_step_is_a_model_alone_or_hugging_faces_and_another_run_begins_with_it(
    top: Path,
) -> None:
    train(top / "first", steps=2, last_save_model_only=True)
    (last,) = smckpt.find_checkpoints(top / "first" / "checkpoint")
    assert last.path.endswith("step-2")
    begun, _ = train(top / "second", steps=1, initial_load_path=last.path)
    assert begun[0]["loaded"] is True and begun[0]["began"] == 0
    train(top / "third", steps=2, last_save_model_only=True, last_save_in_hf=True)
    files = os.listdir(top / "third" / "checkpoint" / "step-2")
    assert [name for name in files if name.endswith(".safetensors")]
    given = {"initial_load_path": f"{top}/third/checkpoint/step-2", "initial_load_in_hf": True}
    from_hf, _ = train(top / "fourth", steps=1, **given)
    assert from_hf[0]["losses"] == begun[0]["losses"]


@pytest.mark.long
def test_a_run_begins_with_weights_of_another_dtype_as_stock_does(
    top: Path,
) -> None:
    begun = {}
    for stock in (True, False):
        first = top / f"half {stock}"
        last = {"last_save_model_only": True, "export_dtype": "bfloat16"}
        train(first, steps=2, stock=stock, **last)
        path = str(first / "checkpoint" / "step-2")
        begun[stock], _ = train(
            top / f"whole {stock}", steps=1, stock=stock, initial_load_path=path
        )
    for theirs, ours in zip(begun[True], begun[False], strict=True):
        assert ours["loaded"] is theirs["loaded"] is True
        assert (ours["losses"], ours["digest"]) == (theirs["losses"], theirs["digest"])


@pytest.mark.long
def test_what_is_excluded_stays_as_it_was_and_a_step_that_is_absent_is_named(top: Path) -> None:
    folder = top / "excluded"
    train(folder, steps=4)
    begun, _ = train(folder, steps=5, exclude_from_loading=["dataloader"])
    assert begun[0]["began"] == 4
    assert set(begun[0]["losses"]) == {"5"}
    _, said = train(folder, fails=True, load_step=3)
    assert "--checkpoint.load_step=3 is not there" in said


@pytest.mark.long
def test_what_is_behind_a_link_below_the_run_stays_as_it_is(top: Path) -> None:
    """A step that is to be saved is somebody's directory; one that is to go was moved elsewhere."""
    victim, folder = top / "somebody's", top / "links" / "checkpoint"
    victim.mkdir()
    (victim / "notes").write_text("precious")
    folder.mkdir(parents=True)
    (folder / "step-2").symlink_to(victim)
    _, said = train(folder.parent, ranks=1, fails=True, steps=2)
    assert "'step-2' below" in said and "is a symbolic link" in said
    assert os.listdir(victim) == ["notes"]
    (folder / "step-2").unlink()
    train(folder.parent, ranks=1, steps=2)
    moved = (folder / "step-2").rename(top / "moved")
    (folder / "step-2").symlink_to(moved)
    before = below(moved)
    ran, _ = train(folder.parent, ranks=1, steps=7, keep_latest_k=2)
    assert ran[0]["began"] == 2
    assert below(moved) == before


@pytest.mark.long
def test_it_resumes_from_the_memory_of_its_hosts_and_its_folder_by_the_newest_step(
    straight: list[dict[str, Any]], top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = top / "memory"
    with keeper_service() as (name, _):
        monkeypatch.setenv(SERVICE, name)
        train(folder, fails=True, die=5, interval=100, memory=1)
        assert steps(folder) == []
        resumed, _ = train(folder, interval=100, memory=1)
        assert all(its["began"] in (4, 5) for its in resumed)
        assert [its["digest"] for its in resumed] == [its["digest"] for its in straight]
        assert steps(folder) == ["step-6"]  # the last one, which memory does not have
        again, _ = train(folder, interval=100, memory=1, steps=7)
        assert [its["began"] for its in again] == [6, 6]


@pytest.mark.long
def test_torchtitans_own_fields_decide_when_it_saves_and_when_it_waits(top: Path) -> None:
    folder = top / "first and disabled"
    fields = {"enable_first_step_checkpoint": True, "async_mode": "disabled"}
    train(folder, ranks=1, fails=True, die=2, steps=3, **fields)
    assert steps(folder) == ["step-1", "step-2"]  # killed right after `save` had returned
    begun, _ = train(folder, ranks=1, steps=3, load_only=True)
    assert begun[0]["began"] == 2 and list(begun[0]["losses"]) == ["3"]
    assert steps(folder) == ["step-1", "step-2"]
    _, said = train(folder, ranks=1, fails=True, initial_load_in_hf_quantized=True)
    assert "initial_load_in_hf_quantized requires initial_load_in_hf" in said


@pytest.mark.long
def test_a_run_begins_with_a_release_in_float8(tmp_path: Path) -> None:
    released = tmp_path / "released"
    wanted = deepseek(released, (128, 128), hidden_size=192, moe_intermediate_size=136)
    names = dict.fromkeys(load_file(released / "model.safetensors"), "model.safetensors")
    index = {"metadata": {}, "weight_map": names}
    (released / "model.safetensors.index.json").write_text(json.dumps(index))
    script = SCRIPT.parent / "torchtitan_float8.py"
    done = child.script(script, str(released), str(tmp_path), python=torchtitan(), ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    held = load_file(tmp_path / "held.safetensors")
    assert held.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(held[name].to(tensor.dtype), tensor), name


@pytest.mark.long
def test_more_arguments_reach_saves_loads_and_removals(top: Path, s3_root: str) -> None:
    where = f"{s3_root}/run/checkpoint"
    options = {"smckpt_arguments": {"storage": {"chunk_size_MB": 8}}}
    kept = {"ranks": 1, "folder": where, "interval": 1, "keep_latest_k": 2}
    train(top / "more", steps=3, **kept, **options)
    names = [one.path.rpartition("/")[2] for one in smckpt.find_checkpoints(where)]
    assert names == ["step-2", "step-3"]
    again, _ = train(top / "more", steps=4, **kept, **options)
    assert again[0]["began"] == 3
    options["smckpt_arguments"]["storage"] = {"nobody_knows": 1}
    _, said = train(top / "more", fails=True, **kept, **options)
    assert "nobody_knows" in said


@pytest.mark.long
def test_an_argument_of_smckpt_that_no_store_takes_is_refused_before_training(top: Path) -> None:
    folder = top / "refused"
    given = {"storage": {}, "process_group": None, "options": {}}
    told, said = train(folder, ranks=1, fails=True, interval=1, smckpt_arguments=given)
    assert "smckpt_arguments has options, process_group, which is not honoured" in said
    assert not told and not steps(folder)


@pytest.mark.long
def test_torchtitans_own_tests_pass_on_the_door_where_they_concern_behaviour() -> None:
    checkout = os.environ.get("SMCKPT_TORCHTITAN")
    if not checkout:
        pytest.skip("set SMCKPT_TORCHTITAN to a checkout of pytorch/torchtitan of August 2026")
    said = run(
        torchtitan(), "-m", "tests.support.frameworks.torchtitan_suite", checkout, timeout=600
    )
    missing = {line.strip().partition(":")[0] for line in said.splitlines() if line[:1] == " "}
    assert said.splitlines()[-1] == "one way or the other: 30 of 35", (said, missing)


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256,
    "intermediate_size": 768, "num_attention_heads": 16, "tie_word_embeddings": False,
    "num_hidden_layers": 2, "vocab_size": 2048,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 256,
    "intermediate_size": 1024, "moe_intermediate_size": 256, "num_attention_heads": 16,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "tie_word_embeddings": False, "num_hidden_layers": 2, "vocab_size": 2048,
}  # fmt: skip


def exported(step: Path, out: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What `smckpt export STEP OUT --config DIRECTORY` writes."""
    directory = out.with_suffix(".base")
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    done = CliRunner().invoke(app, ["export", str(step), str(out), "--config", str(directory)])
    assert done.exit_code == 0, done.output
    return load_file(out / "model.safetensors")


def test_a_step_exports_by_hugging_faces_names(straight: list[dict[str, Any]], top: Path) -> None:
    step = top / "straight" / "checkpoint" / "step-6"
    found = exported(step, top / "hf", LLAMA)
    held = smckpt.load(checkpoint_id=step)
    for name, part in (("q", "wq"), ("v", "wv")):
        wanted = held[f"layers.1.attention.qkv_linear.{part}.weight"]
        if name == "q":  # from Meta's order
            wanted = wanted.view(16, 8, 2, 256).transpose(1, 2).reshape(256, 256)
        assert torch.equal(found[f"model.layers.1.self_attn.{name}_proj.weight"], wanted)
    assert torch.equal(found["lm_head.weight"], held["lm_head.weight"])
    assert len(found) == 2 * 9 + 3


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "config", "degrees"),
    [(2, LLAMA, {}), (2, LLAMA, {"tensor": 2}), (4, LLAMA, {"tensor": 2}),
     (2, LLAMA, {"pipeline": 2}), (2, DEEPSEEK, {"expert": 2}),
     (4, DEEPSEEK, {"expert": 2, "tensor": 2}), (2, DEEPSEEK, {"expert": 2, "stock": True})],
    ids=["FSDP2", "tensor", "tensor and FSDP2", "pipeline", "expert", "expert and tensor",
         "torchtitan's own"],
)  # fmt: skip
def test_a_step_exports_to_the_files_that_torchtitan_itself_writes(
    top: Path, ranks: int, config: dict[str, Any], degrees: dict[str, Any],
    request: pytest.FixtureRequest, judged: Any,
) -> None:  # fmt: skip
    source = "torchtitan, DCP" if "stock" in degrees else "torchtitan, its trainer"
    judged(config["model_type"], source, exports=["torchtitan"])
    name = request.node.callspec.id
    train(top / f"ours {name}", ranks, steps=2, **degrees)
    found = exported(top / f"ours {name}" / "checkpoint" / "step-2", top / f"hf {name}", config)
    last = {"last_save_model_only": True, "last_save_in_hf": True}
    train(top / f"its {name}", ranks, steps=2, **last, **degrees)
    (file,) = (top / f"its {name}" / "checkpoint" / "step-2").glob("*.safetensors")
    wanted = load_file(file)
    assert found.keys() == wanted.keys()
    assert [n for n in wanted if not torch.equal(found[n], wanted[n])] == []


@pytest.mark.long
def test_a_run_begins_with_an_import_from_hugging_face(
    straight: list[dict[str, Any]], top: Path, judged: Any
) -> None:
    """As one begins that torchtitan reads from the same files itself."""
    judged("llama", "torchtitan, its trainer", imports=["torchtitan"])
    base = top / "to import"
    exported(top / "straight" / "checkpoint" / "step-6", base, LLAMA)
    import_hf(base, top / "imported", Parallel("torchtitan"), prefix="")
    ours, _ = train(top / "from ours", steps=2, initial_load_path=str(top / "imported"))
    given = {"initial_load_path": str(base), "initial_load_in_hf": True}
    theirs, _ = train(top / "from theirs", steps=2, **given)
    assert [its["losses"] for its in ours] == [its["losses"] for its in theirs]
    assert [its["digest"] for its in ours] == [its["digest"] for its in theirs]
    assert ours[0]["loaded"] is True and ours[0]["began"] == 0
