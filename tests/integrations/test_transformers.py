"""transformers' Trainer through smckpt: killed, and resumed to the last bit."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

import smckpt
from smckpt import export_hf, verify_checkpoint
from smckpt.errors import UsageError
from smckpt.integrations.transformers import SmckptTrainer
from smckpt.manager.memory import SERVICE
from smckpt.storage import open_storage
from tests.support import child
from tests.support.faults.hosts import keeper_service
from tests.support.interpreters import transformers4
from tests.support.models import hub_families

SCRIPT = Path(__file__).parents[1] / "support" / "frameworks" / "trainer_run.py"


def killed_and_resumed(folder: Path, how: str, **where: Any) -> tuple[Path, list[dict[str, Any]]]:
    """Killed after step 5, when the save of step 4 has just begun or been committed."""
    out = folder / "run"
    return out, child.killed_and_resumed(SCRIPT, out, how, ("die", "5"), **where)


def held(out: Path, told: list[dict[str, Any]]) -> None:
    for rank in told:
        assert rank["resumed"] == rank["straight"]
        assert rank["kept"] == ["checkpoint-6", "checkpoint-7"]
    assert told


def test_one_process_goes_on_bit_for_bit_after_a_kill(tmp_path: Path) -> None:
    held(*killed_and_resumed(tmp_path, "plain"))


@pytest.mark.parametrize(
    ("how", "ranks"), [("plain", 1), pytest.param("fsdp", 2, marks=pytest.mark.long)]
)
def test_it_goes_on_from_a_step_in_memory_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, ranks: int
) -> None:
    monkeypatch.setenv("TRAINER_MEMORY", "1")
    with keeper_service() as (name, _):
        monkeypatch.setenv(SERVICE, name)
        out = tmp_path / "run"
        died = child.script(SCRIPT, str(out), how, "die", "5", ranks=ranks)
        assert died.returncode != 0 and "it lives" not in died.stderr, died.stderr
        begun = child.script(SCRIPT, str(out), how, "begun", ranks=ranks)
        assert begun.returncode == 0, begun.stderr[-4000:]
        assert {rank["step"] for rank in child.told(begun)} <= {3, 4}
        assert len(child.told(begun)) == ranks
        assert not os.listdir(out)  # the file that the Trainer reads first is gone
        done = child.script(SCRIPT, str(out), how, "resume", ranks=ranks)
    assert done.returncode == 0, done.stderr[-4000:]
    told = child.told(done)
    assert len(told) == ranks
    for rank in told:
        assert rank["resumed"] == rank["straight"]
        assert rank["kept"] == ["checkpoint-7"]


def run_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch, python: str) -> None:
    monkeypatch.setenv("TRAINER_STOCK", "1")
    by = ("-m", "smckpt.run", "--for", "transformers")
    held(*killed_and_resumed(folder, "plain", by=by, python=python))


def test_a_script_of_the_trainer_is_run_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_as_it_is(tmp_path, monkeypatch, sys.executable)


def test_a_script_whose_output_dir_is_in_s3_is_run_as_it_is(
    tmp_path: Path, s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_STOCK", "1")
    out, by = f"{s3_root}/run", ("-m", "smckpt.run", "--for", "transformers")
    for machine in ("1", "2"):
        (tmp_path / machine).mkdir()
    monkeypatch.chdir(tmp_path / "1")
    died = child.script(SCRIPT, out, "plain", "die", "5", "between", by=by)
    assert died.returncode != 0 and "it lives" not in died.stderr, died.stderr
    assert [one.step for one in smckpt.find_checkpoints(out)][-1] == 4
    monkeypatch.chdir(tmp_path / "2")
    done = child.script(SCRIPT, out, "plain", "resume", by=by)
    assert done.returncode == 0, done.stderr[-4000:]
    (told,) = child.told(done)
    assert told["resumed"] == told["straight"]
    assert [one.step for one in smckpt.find_checkpoints(out)] == [6, 7]
    assert verify_checkpoint(f"{out}/checkpoint-7").ok
    assert not [*tmp_path.rglob("*.safetensors")]


@pytest.mark.long
def test_a_script_of_transformers_4_is_run_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_as_it_is(tmp_path, monkeypatch, transformers4())


@pytest.mark.long
@pytest.mark.parametrize(("how", "ranks"), [("plain", 1), ("fsdp", 2)])
def test_with_its_checkpoints_in_s3_another_machine_goes_on_bit_for_bit(
    tmp_path: Path, s3_root: str, monkeypatch: pytest.MonkeyPatch, how: str, ranks: int
) -> None:
    monkeypatch.setenv("TRAINER_ROOT", s3_root)
    died = child.script(SCRIPT, str(tmp_path / "run"), how, "die", "5", ranks=ranks)
    assert died.returncode != 0 and "it lives" not in died.stderr, died.stderr
    assert not [*tmp_path.rglob("*.safetensors")]
    (tmp_path / "other").mkdir()
    done = child.script(SCRIPT, str(tmp_path / "other" / "run"), how, "resume", ranks=ranks)
    assert done.returncode == 0, done.stderr[-4000:]
    held(tmp_path, child.told(done))
    assert not [*tmp_path.rglob("*.safetensors")]
    steps = [one.step for one in smckpt.find_checkpoints(f"{s3_root}/run")]
    assert steps[-2:] == [6, 7] and verify_checkpoint(f"{s3_root}/run/checkpoint-7").ok


def test_the_best_model_is_there_at_the_end(tmp_path: Path) -> None:
    done = child.script(SCRIPT, str(tmp_path / "run"), "plain", "best")
    assert done.returncode == 0, done.stderr[-4000:]
    (told,) = child.told(done)
    step, _ = max(told["losses"], key=lambda row: row[1])
    assert told["best"] == f"checkpoint-{step}" and told["ended"] == told["held"]
    assert step != told["losses"][-1][0]


@pytest.mark.parametrize(
    "where", ["s3", *(pytest.param(w, marks=pytest.mark.long) for w in ("output_dir", "a disk"))]
)
def test_an_export_finds_config_and_tokenizer_beside_a_checkpoint(
    tmp_path: Path, request: pytest.FixtureRequest, where: str
) -> None:
    code = """
    import sys
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, TrainingArguments
    from smckpt.integrations.transformers import SmckptTrainer
    from tests.support.models import hub_families
    out, root = sys.argv[1:]
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "[UNK]": 2}, "[UNK]"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[UNK]"
    )
    tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    arguments = TrainingArguments(
        out, max_steps=3, save_steps=1, save_total_limit=1, use_cpu=True, report_to=[],
        disable_tqdm=True,
    )
    tokens = hub_families.TOKENS
    trainer = SmckptTrainer(
        model=hub_families.model("llama"), args=arguments, processing_class=tokenizer,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    )
    trainer.smckpt_root = root or None
    trainer.train()
    torch.save(trainer.model.eval()(tokens).logits, out + "/logits.pt")
    """
    out = tmp_path / "run"
    root = "" if where == "output_dir" else str(tmp_path / "elsewhere")
    if where == "s3":
        root = request.getfixturevalue("s3_root")
    child.run(code, str(out), root, timeout=120)
    root = root or str(out)
    export_hf(f"{root}/checkpoint-3", tmp_path / "hf")
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert torch.equal(served(hub_families.TOKENS).logits, torch.load(out / "logits.pt"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.convert_tokens_to_ids(["b", "c"]) == [1, 2]
    assert set(tokenizer.chat_template) == {"default", "tools"}
    assert (tmp_path / "hf" / "generation_config.json").is_file()
    # nothing is left of the checkpoints that were removed
    for removed in ("checkpoint-1", "checkpoint-2"):
        there = open_storage(root).join(removed)
        assert [*there.names(), *there.join("additional_chat_templates").names()] == []
        assert not (tmp_path / "elsewhere" / removed).exists()
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint-3", "logits.pt"]


@pytest.mark.parametrize("name", ["push_to_hub", "save_on_each_node", "deepspeed"])
def test_what_is_not_honoured_is_refused_by_name(tmp_path: Path, name: str) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    trainer = SmckptTrainer(model=torch.nn.Linear(2, 2), args=arguments)
    if name == "deepspeed":
        trainer.is_deepspeed_enabled = True
    else:
        setattr(arguments, name, True)  # given to the constructor, the Hub would be asked
    with pytest.raises(UsageError, match=f"{name} of TrainingArguments is not honoured"):
        trainer._save_checkpoint(trainer.model, None)
    assert not [*tmp_path.iterdir()]


@pytest.mark.long
def test_fsdp2_goes_on_bit_for_bit_after_a_kill(tmp_path: Path) -> None:
    out, told = killed_and_resumed(tmp_path, "fsdp", ranks=2)
    held(out, told)
    assert {rank["resumed"]["sharded"] for rank in told} == {"DTensor"}


@pytest.mark.long
@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (1, 2)])
def test_other_ranks_load_what_was_saved(tmp_path: Path, saved: int, loaded: int) -> None:
    hows = {1: "plain", 2: "fsdp"}
    died = child.script(SCRIPT, str(tmp_path / "run"), hows[saved], "die", "5", ranks=saved)
    assert died.returncode != 0 and "it lives" not in died.stderr, died.stderr
    done = child.script(SCRIPT, str(tmp_path / "run"), hows[loaded], "loaded", ranks=loaded)
    assert done.returncode == 0, done.stderr[-4000:]
    told = child.told(done)
    assert [(rank["step"], rank["wrong"]) for rank in told] in (
        [(2, [])] * loaded,
        [(4, [])] * loaded,
    )


@pytest.mark.long
def test_ddp_goes_on_bit_for_bit_after_a_kill(tmp_path: Path) -> None:
    held(*killed_and_resumed(tmp_path, "plain", ranks=2))


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "ranks", "sharded"),
    [
        ("plain", 1, "Parameter"),
        ("plain", 2, "Parameter"),
        ("fsdp1", 2, "Parameter"),
        ("fsdp", 2, "DTensor"),
    ],
)
def test_transformers_4_goes_on_bit_for_bit_after_a_kill(
    tmp_path: Path, how: str, ranks: int, sharded: str
) -> None:
    out, told = killed_and_resumed(tmp_path, how, ranks=ranks, python=transformers4())
    held(out, told)
    assert {rank["resumed"]["sharded"] for rank in told} == {sharded}
    # FSDP1 gives each rank a part of its own
    assert len({rank["resumed"]["digest"] for rank in told}) == (1 if how == "plain" else 2)
