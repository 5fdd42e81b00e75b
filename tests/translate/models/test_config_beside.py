"""Without `config=`, the config.json in the checkpoint's own directory is the model's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import smckpt
from smckpt import ExportOptions, export_hf
from tests.formats.test_sources_in_s3 import upload
from tests.support.frameworks.trainer_run import trainer
from tests.support.limits import seconds
from tests.support.models import references

TAKEN = "no config was given: config.json in the checkpoint's directory was taken"


def tokenizer_into(folder: Path) -> None:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(60)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, chat_template="{{ messages }}").save_pretrained(
        folder
    )


def loads(folder: Path, wanted: dict[str, torch.Tensor]) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert all(torch.equal(model.state_dict()[name], wanted[name]) for name in wanted)


def test_a_checkpoint_of_the_trainer_is_exported_with_its_config(tmp_path):
    """By the function and by the command; a tokenizer that stands there comes along."""
    ran = trainer(str(tmp_path / "run"), "plain", [])
    ran.train()
    checkpoint = tmp_path / "run" / "checkpoint-7"
    assert (checkpoint / "config.json").is_file()
    report = export_hf(checkpoint, tmp_path / "hf")
    assert TAKEN in report.notes and report.naming == "hub"
    wanted = {n: t.detach() for n, t in ran.model.state_dict().items()}
    loads(tmp_path / "hf", wanted)
    assert not [*(tmp_path / "hf").glob("token*")]

    tokenizer_into(checkpoint)
    command = [sys.executable, "-m", "smckpt.cli", "export", str(checkpoint), str(tmp_path / "hf2")]
    done = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=seconds(120)
    )
    assert done.returncode == 0, done.stderr
    assert TAKEN in json.loads(done.stdout)["notes"]
    loads(tmp_path / "hf2", wanted)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "hf2" / name).read_bytes() == (checkpoint / name).read_bytes()


def saved(place: str, model: Any) -> str:
    smckpt.save({"model": model.state_dict()}, checkpoint_id=place)
    return place


def test_a_config_in_a_store_is_taken_with_its_tokenizer(tmp_path, s3_root):
    model = references.model("llama")
    checkpoint = Path(saved(str(tmp_path / "100"), model))
    model.config.save_pretrained(checkpoint)
    tokenizer_into(checkpoint)
    (checkpoint / "notes.txt").write_text("not of a tokenizer")
    (checkpoint / "additional_chat_templates").mkdir()
    (checkpoint / "additional_chat_templates" / "tool.jinja").write_text("{{ tools }}")
    upload(checkpoint, f"{s3_root}/100")
    report = export_hf(f"{s3_root}/100", tmp_path / "hf")
    assert TAKEN in report.notes
    loads(tmp_path / "hf", dict(model.state_dict()))
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    folder = tmp_path / "hf" / "additional_chat_templates"
    assert (folder / "tool.jinja").read_text() == "{{ tools }}"
    assert not (tmp_path / "hf" / "notes.txt").exists()


@pytest.mark.parametrize("text", ['{"job": "torchtitan"}', "no JSON"])
def test_a_file_of_that_name_that_is_no_model_s_is_left(tmp_path, text):
    checkpoint = Path(saved(str(tmp_path / "ckpt"), references.model("llama")))
    (checkpoint / "config.json").write_text(text)
    report = export_hf(checkpoint, tmp_path / "hf")
    assert any("was not taken" in note for note in report.notes)
    assert not (tmp_path / "hf" / "config.json").exists()


def test_a_config_that_is_given_is_taken_instead(tmp_path):
    model = references.model("llama")
    checkpoint = Path(saved(str(tmp_path / "ckpt"), model))
    (checkpoint / "config.json").write_text('{"model_type": "gpt2"}')
    report = export_hf(checkpoint, tmp_path / "hf", config=model.config)
    assert not any("taken" in note for note in report.notes)
    loads(tmp_path / "hf", dict(model.state_dict()))
    assert load_file(tmp_path / "hf" / "model.safetensors")


def _exported(tmp_path: Path, values: dict[str, Any], **arguments: Any) -> Path:
    """An export of a checkpoint with this config.json beside it."""
    (tmp_path / "ck" / "config.json").write_text(json.dumps({"model_type": "custom_x", **values}))
    export_hf(
        tmp_path / "ck",
        tmp_path / "out",
        options=ExportOptions(naming="module", against_model=False),
        **arguments,
    )
    return tmp_path / "out"


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A checkpoint, beside a file of this host that nobody may copy."""
    smckpt.save({"model": {"lin.weight": torch.ones(4, 4)}}, checkpoint_id=str(tmp_path / "ck"))
    (tmp_path / "secrets.py").write_text("KEY = 'secret'")
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text("{}")
    (tmp_path / "ck" / "inner").mkdir()
    return tmp_path


@pytest.mark.parametrize("with_tokenizer", [False, True])
@pytest.mark.parametrize(
    "name",
    ["{top}/secrets", "../secrets", "inner/../../secrets", "link/secrets", "a\0b", "x" * 5000,
     "..", "", "/", "..\\secrets"],
)  # fmt: skip
@pytest.mark.parametrize("form", ["text", "list", "tokenizer"])
def test_an_auto_map_copies_nothing_from_outside_the_directory(
    beside: Path, name: str, form: str, with_tokenizer: bool
) -> None:
    (beside / "ck" / "link").symlink_to(beside)
    named: Any = name.replace("{top}", str(beside)) + ".Config"
    values = {"auto_map": {"AutoConfig": [named, None] if form == "list" else named}}
    if form == "tokenizer":
        (beside / "ck" / "tokenizer_config.json").write_text(json.dumps(values))
        values = {}
    out = _exported(beside, values, **({"tokenizer": beside / "tok"} if with_tokenizer else {}))
    assert not [*out.rglob("*.py")]


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "code.py", "generation_config.json", "additional_chat_templates/a.jinja",
     "additional_chat_templates", "config.json"],
)  # fmt: skip
def test_a_link_beside_a_checkpoint_copies_nothing_of_this_host(beside: Path, name: str) -> None:
    (beside / "theirs").mkdir()
    (beside / "theirs" / "a.jinja").write_text("secret")
    (beside / "theirs" / "config.json").write_text('{"model_type": "secret"}')
    link = beside / "ck" / name
    link.parent.mkdir(exist_ok=True)
    (beside / "ck" / "tokenizer.json").unlink(missing_ok=True)
    target = beside / "theirs" if name == "additional_chat_templates" else beside / "secrets.py"
    if name == "config.json":
        link.symlink_to(beside / "theirs" / "config.json")
        export_hf(
            beside / "ck",
            beside / "out",
            options=ExportOptions(naming="module", against_model=False),
        )
    else:
        link.symlink_to(target)
        _exported(beside, {"auto_map": {"AutoConfig": "code.Config"}})
    written = b"".join(p.read_bytes() for p in (beside / "out").rglob("*") if p.is_file())
    assert b"secret" not in written


def test_code_that_lies_beside_the_config_still_comes_along(beside: Path) -> None:
    (beside / "ck" / "code.py").write_text("from .more import x")
    (beside / "ck" / "more.py").write_text("x = 1")
    out = _exported(beside, {"auto_map": {"AutoConfig": "code.Config", "AutoModel": "o--c.M"}})
    assert sorted(path.name for path in out.glob("*.py")) == ["code.py", "more.py"]
