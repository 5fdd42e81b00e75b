"""The model card: what an export holds, from which step of which checkpoint, and its checksums."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from huggingface_hub import ModelCard

import smckpt
from smckpt import Adapter, ExportOptions, Parallel, export_hf, import_hf
from smckpt.checkpoint.records.crc import crc64, hex64
from smckpt.cli.app import app
from tests.support.models import references as ref
from tests.translate.models.test_lora import base, llama


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Any, str]:
    model = ref.model("llama")
    model.config.architectures = ["LlamaForCausalLM"]
    place = str(tmp_path_factory.mktemp("c"))
    smckpt.save({"model": model.state_dict()}, checkpoint_id=place, step=7)
    return model, place


def rows(folder: Path) -> dict[str, str]:
    lines = (folder / "README.md").read_text().splitlines()
    found = [re.fullmatch(r"\| (.+?) \| (.+) \|", line) for line in lines]
    return {match[1]: match[2].replace("\\", "") for match in found if match}


def test_the_card_says_step_checkpoint_dtype_and_checksums(tmp_path, saved):
    model, place = saved
    export_hf(
        place,
        tmp_path / "hf",
        config=model.config,
        dtype="bfloat16",
        options=ExportOptions(max_shard_size="90KB"),
    )
    found = rows(tmp_path / "hf")
    facts = {
        "model": "LlamaForCausalLM, llama", "step": "7", "dtype": "bfloat16",
        "checkpoint": place, "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "made from": "smckpt", "written by": f"smckpt {smckpt.__version__}",
    }  # fmt: skip
    assert facts.items() <= found.items()
    assert found["commit"].startswith("manifest-")
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 1
    for path in files:
        data = path.read_bytes()
        assert found[path.name] == f"{len(data)} | {hex64(crc64(data))}"
    card = ModelCard.load(tmp_path / "hf" / "README.md")
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"


def test_the_source_and_its_layout_are_named_and_an_adapter_has_its_base(tmp_path, saved):
    model, _ = saved
    ref.on_disk(model, tmp_path / "hub")
    import_hf(tmp_path / "hub", tmp_path / "in", Parallel("mcore_te", tp=2))
    export_hf(tmp_path / "in", tmp_path / "a", config=tmp_path / "hub")
    assert rows(tmp_path / "a")["made from"] == "smckpt, layout mcore_te"
    torch.save({"model": model.state_dict(), "iteration": 31}, tmp_path / "model.pt")
    export_hf(tmp_path / "model.pt", tmp_path / "b")
    assert {"made from": "one file", "step": "31"}.items() <= rows(tmp_path / "b").items()
    tuned = llama()
    tuned.peft_config["default"].base_model_name_or_path = "some/base"
    torch.save(tuned.state_dict(), tmp_path / "peft.pt")
    export_hf(
        tmp_path / "peft.pt",
        tmp_path / "c",
        adapter=Adapter(lora="adapter", lora_config=tuned.peft_config),
    )
    found, card = rows(tmp_path / "c"), ModelCard.load(tmp_path / "c" / "README.md")
    assert found["adapter"] == "LORA" and found["base"] == "some/base"
    assert card.data.base_model == "some/base" and card.data.library_name == "peft"
    assert "adapter_model.safetensors" in found
    assert base().config.model_type == "llama"


def test_a_card_of_the_users_own_stays_and_none_is_written_on_request(tmp_path, saved):
    model, place = saved
    out, card = tmp_path / "hf", tmp_path / "hf" / "README.md"
    given: dict[str, Any] = {
        "config": model.config, "options": ExportOptions(overwrite=True)
    }  # fmt: skip
    for kept in ("mine", "", "lin|k"):
        out.mkdir(exist_ok=True)
        card.unlink(missing_ok=True)
        if kept == "lin|k":
            (tmp_path / "elsewhere").write_text(kept)
            card.symlink_to(tmp_path / "elsewhere")
        else:
            card.write_text(kept)
        report = export_hf(place, out, **given)
        assert any("README.md was left" in note for note in report.notes), report.notes
        assert card.read_text() == kept
    card.unlink()
    export_hf(place, out, **given)
    first = card.read_text()
    report = export_hf(place, out, dtype="float16", **given)  # smckpt's own is replaced
    assert not any("README.md" in note for note in report.notes)
    assert card.read_text() != first and rows(out)["dtype"] == "float16"
    (tmp_path / "config.json").write_text(model.config.to_json_string(use_diff=False))
    run = CliRunner().invoke(app, [
        "export", place, str(tmp_path / "plain"), "--config", str(tmp_path / "config.json"),
        "--no-card",
    ])  # fmt: skip
    assert run.exit_code == 0, run.output
    assert not (tmp_path / "plain" / "README.md").exists()


def test_nothing_of_a_name_is_markup(tmp_path, saved):
    model, place = saved
    config = {**model.config.to_dict(), "architectures": ["A|B<img src=x>\n# No"]}
    export_hf(place, tmp_path / "hf", config=config, options=ExportOptions(against_model=False))
    text = (tmp_path / "hf" / "README.md").read_text()
    assert "A\\|B\\<img src=x\\> # No" in text and "\n# No" not in text
