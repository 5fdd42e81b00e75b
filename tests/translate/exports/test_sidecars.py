"""What save_pretrained of a model and its tokenizer would write is there, or a note says what is
not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPImageProcessor,
    GenerationConfig,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers import utils as hub

import smckpt
from smckpt import ExportOptions, errors, export_hf
from smckpt.cli.app import app
from tests.support.faults.swaps import NO_FILE, put_no_file
from tests.support.models import references

THREE = {"eos_token_id": [2, 7, 9], "do_sample": True, "temperature": 0.6, "top_p": 0.9}


@pytest.fixture
def model(tmp_path) -> Any:
    made = references.model("llama")
    made.generation_config = GenerationConfig(bos_token_id=1, pad_token_id=0, **THREE)
    made.save_pretrained(tmp_path / "own")
    torch.save(made.state_dict(), tmp_path / "model.pt")
    return made


def generation(directory: Path) -> dict[str, Any]:
    found = json.loads((directory / "generation_config.json").read_text())
    found.pop("transformers_version", None)
    return found


@pytest.mark.parametrize("how", ["the model", "object", "dict", "file", "directory", "command"])
def test_a_models_own_generation_config_is_written(tmp_path, model, how):
    wanted = generation(tmp_path / "own")
    assert wanted["eos_token_id"] == [2, 7, 9] and wanted["do_sample"]
    alone = tmp_path / "alone.json"
    alone.write_text((tmp_path / "own" / "config.json").read_text())
    if how == "command":
        result = CliRunner().invoke(app, [
            "export", str(tmp_path / "model.pt"), str(tmp_path / "hf"), "--config", str(alone),
            "--generation-config", str(tmp_path / "own" / "generation_config.json"),
        ])  # fmt: skip
        assert result.exit_code == 0, result.output
    else:
        given: dict[str, Any] = {
            "the model": {"config": model},
            "object": {"config": model.config, "own": model.generation_config},
            "dict": {"config": model.config, "own": wanted},
            "file": {"config": model.config, "own": tmp_path / "own" / "generation_config.json"},
            "directory": {"config": alone, "own": tmp_path / "own"},
        }[how]
        options = ExportOptions(generation_config=given.pop("own", None))
        report = export_hf(tmp_path / "model.pt", tmp_path / "hf", options=options, **given)
        assert not any("generation_config" in note for note in report.notes)
    assert generation(tmp_path / "hf") == wanted
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.generation_config.eos_token_id == [2, 7, 9]


def test_that_the_models_own_is_not_known_is_noted(tmp_path, model):
    report = export_hf(tmp_path / "model.pt", tmp_path / "hf", config=model.config)
    assert any("generation_config=" in note for note in report.notes), report.notes
    beside = export_hf(tmp_path / "model.pt", tmp_path / "beside", config=tmp_path / "own")
    assert generation(tmp_path / "beside") == generation(tmp_path / "own")
    assert not any("generation_config=" in note for note in beside.notes)


@pytest.mark.parametrize("wrong", [3, {"model_type": "llama"}, "/nowhere/at/all"])
def test_what_is_no_generation_config_is_refused(tmp_path, model, wrong):
    with pytest.raises(errors.UsageError):
        export_hf(
            tmp_path / "model.pt",
            tmp_path / "hf",
            config=model.config,
            options=ExportOptions(generation_config=wrong),
        )
    with pytest.raises(errors.UsageError, match="config="):
        export_hf(
            tmp_path / "model.pt",
            tmp_path / "hf",
            options=ExportOptions(generation_config={"eos_token_id": 1}),
        )
    assert not (tmp_path / "hf").exists()


BESIDE = ("tokenizer.json", "chat_template.jinja", "additional_chat_templates",
          "additional_chat_templates/tool.jinja", "generation_config.json", "code.py")  # fmt: skip


@pytest.mark.parametrize(("given", "name", "what"), [
    (given, name, what) for given in ("config", "tokenizer") for name in BESIDE for what in NO_FILE
    if (given == "config" or name in BESIDE[:4])  # a tokenizer has no others
    and (name, what) != ("additional_chat_templates", "folder")  # it is one
])  # fmt: skip
def test_what_is_no_file_beside_a_config_is_not_left_out_in_silence(
    tmp_path, model, given, name, what
):
    folder = tmp_path / "model"
    model.config.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    if name == "code.py":
        values = json.loads((folder / "config.json").read_text())
        values["auto_map"] = {"AutoConfig": "code.Mine"}
        (folder / "config.json").write_text(json.dumps(values))
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    put_no_file(path, what)
    options = ExportOptions(against_model=False)
    both = (
        {"config": folder} if given == "config" else {"config": model.config, "tokenizer": folder}
    )
    with pytest.raises(errors.UsageError, match="is no file") as caught:
        export_hf(tmp_path / "model.pt", tmp_path / "hf", options=options, **both)
    assert caught.value.path == str(path) and not (tmp_path / "hf").exists()


@pytest.mark.parametrize("given", ["object", "directory"])
def test_a_tokenizer_with_more_ids_than_rows_is_noted(tmp_path, model, given):
    from tokenizers import Tokenizer, models

    for count, noted in ((120, False), (124, True)):
        inner = Tokenizer(models.WordLevel({f"w{n}": n for n in range(count)}, unk_token="w0"))
        tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=inner)
        if given == "directory":
            tokenizer.save_pretrained(tmp_path / f"tokenizer{count}")
            tokenizer = tmp_path / f"tokenizer{count}"
        report = export_hf(
            tmp_path / "model.pt", tmp_path / f"hf{count}", config=model.config, tokenizer=tokenizer
        )
        found = [note for note in report.notes if "the embedding has 120 rows" in note]
        assert bool(found) == noted, report.notes
        assert not noted or "up to 123" in found[0]


@pytest.mark.parametrize("where", ["config", "generation_config"])
def test_a_token_that_the_model_has_no_row_for_is_noted(tmp_path, model, where):
    """It would never end a text there."""
    for ids, noted in (([2, 119], False), ([2, 120], True), (119, False), (4000, True)):
        config, given = model.config.to_dict(), None
        if where == "config":
            config["eos_token_id"] = ids
        else:
            given = {"eos_token_id": ids}
        report = export_hf(
            tmp_path / "model.pt", tmp_path / "hf", config=config,
            options=ExportOptions(generation_config=given, overwrite=True),
        )  # fmt: skip
        found = [note for note in report.notes if f"eos_token_id is {ids}" in note]
        assert bool(found) == noted, report.notes


def test_the_ids_of_a_processors_tokenizer_are_looked_at(tmp_path, model):
    inner = Tokenizer(models.WordLevel({f"w{n}": n for n in range(124)}, unk_token="w0"))
    processor = LlavaProcessor(
        CLIPImageProcessor(), PreTrainedTokenizerFast(tokenizer_object=inner), patch_size=14
    )
    report = export_hf(
        tmp_path / "model.pt", tmp_path / "hf", config=model.config, tokenizer=processor
    )
    assert any("up to 123, but the embedding has 120 rows" in note for note in report.notes)
    processor.save_pretrained(tmp_path / "theirs")
    theirs = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert theirs <= {path.name for path in (tmp_path / "hf").iterdir()}


@pytest.mark.parametrize("what", ["model", "config", "generation config"])
def test_what_saves_the_files_of_a_model_is_no_tokenizer(tmp_path, model, what):
    """Its weights would be loaded in place of those that are exported in several files."""
    given = {"model": model, "config": model.config, "generation config": model.generation_config}
    with pytest.raises(errors.UsageError, match="tokenizer= is a"):
        export_hf(
            tmp_path / "model.pt", tmp_path / "hf", config=model.config, tokenizer=given[what],
            options=ExportOptions(max_shard_size="100KB"),
        )  # fmt: skip
    assert not (tmp_path / "hf").exists()


def test_every_file_that_a_tokenizer_or_processor_of_transformers_has_goes_along(tmp_path, model):
    folder = tmp_path / "beside"
    model.config.save_pretrained(folder)
    names = {
        hub.AUDIO_TOKENIZER_NAME, hub.CHAT_TEMPLATE_FILE, hub.FEATURE_EXTRACTOR_NAME,
        hub.IMAGE_PROCESSOR_NAME, hub.PROCESSOR_NAME, hub.VIDEO_PROCESSOR_NAME,
        "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json",
        "tokenizer.4.0.0.json",
    }  # fmt: skip
    for path in Path(transformers.__path__[0]).glob("models/*/tokenization_*.py"):
        for found in re.findall(r"VOCAB_FILES_NAMES[^=]*=\s*\{([^}]*)\}", path.read_text()):
            names.update(re.findall(r":\s*\"([^\"]+)\"", found))
    assert len(names) > 30
    for name in names:
        (folder / name).write_text("{}")
    export_hf(tmp_path / "model.pt", tmp_path / "hf", config=folder)
    assert names - {path.name for path in (tmp_path / "hf").iterdir()} == set()
    export_hf(  # and none of them stays of an older one
        tmp_path / "model.pt", tmp_path / "hf", config=model.config,
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}))),
        options=ExportOptions(overwrite=True),
    )  # fmt: skip
    left = names & {path.name for path in (tmp_path / "hf").iterdir()}
    assert left <= {"tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize("given", ["config", "beside"])
def test_further_tokenizers_of_a_processor_are_noted(tmp_path, model, given):
    folder = tmp_path / "beside"
    if given == "beside":
        smckpt.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    model.config.save_pretrained(folder)
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0})))
    for place in (folder, folder / "qformer_tokenizer", folder / "checkpoint-5"):
        words.save_pretrained(place)
    model.config.save_pretrained(folder / "checkpoint-5")  # of a run, which is none of it
    source = folder if given == "beside" else tmp_path / "model.pt"
    report = export_hf(source, tmp_path / "hf", config=None if given == "beside" else folder)
    assert any("qformer_tokenizer" in note for note in report.notes), report.notes
    assert not any("checkpoint-5" in note for note in report.notes), report.notes


TOKENIZER = """\
from pathlib import Path
from transformers import PreTrainedTokenizer


class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "own.vocabulary"}

    def __init__(self, vocab_file, **more):
        self.words = Path(vocab_file).read_text().split()
        super().__init__(**more)

    vocab_size = property(lambda self: len(self.words))

    def get_vocab(self):
        return {word: number for number, word in enumerate(self.words)}

    def _tokenize(self, text):
        return text.split()

    def _convert_token_to_id(self, token):
        return self.get_vocab().get(token, 0)

    def _convert_id_to_token(self, number):
        return self.words[number]
"""


@pytest.mark.parametrize("given", ["config", "tokenizer", "beside", "cache", "link"])
def test_the_vocabulary_that_custom_code_names_goes_along(tmp_path, model, given):
    folder = tmp_path / "beside"
    if given in ("beside", "link"):
        smckpt.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    if given == "cache":  # the Hub's own
        folder = tmp_path / "models--own" / "snapshots" / "0123"
        model.save_pretrained(folder)
    model.config.save_pretrained(folder)
    (folder / "tokenization_own.py").write_text(TOKENIZER)
    (folder / "own.vocabulary").write_text(" ".join(f"w{n}" for n in range(60)))
    (folder / "others.vocabulary").write_text("")
    values = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    more: dict[str, Any] = {
        "config": {"config": folder}, "beside": {}, "cache": {}, "link": {},
        "tokenizer": {"config": model.config, "tokenizer": folder},
    }[given]  # fmt: skip
    if given == "cache":
        blobs = folder.parent.parent / "blobs"
        blobs.mkdir()
        for number, path in enumerate([*folder.iterdir()]):
            path.rename(blobs / str(number))
            path.symlink_to(Path("..", "..", "blobs", str(number)))
    if given == "link":  # to a file of the host, which anybody could put there
        (folder / "own.vocabulary").rename(tmp_path / "elsewhere")
        (folder / "own.vocabulary").symlink_to(tmp_path / "elsewhere")
    source = folder if given in ("beside", "cache", "link") else tmp_path / "model.pt"
    report = export_hf(source, tmp_path / "hf", **more)
    if given == "link":
        assert any("beside it, own.vocabulary" in note for note in report.notes), report.notes
        assert not (tmp_path / "hf" / "own.vocabulary").exists()
        return
    loaded = AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    assert loaded("w3 w59").input_ids == [3, 59]
    assert not (tmp_path / "hf" / "others.vocabulary").exists()
    if given == "tokenizer":
        (folder / "tokenization_own.py").unlink()
        report = export_hf(source, tmp_path / "no", **more)
        assert any("auto_map beside the tokenizer" in note for note in report.notes)


@pytest.mark.parametrize("given", ["config", "beside", "dict"])
def test_a_config_that_leads_to_another_by_version_is_refused(tmp_path, model, given):
    folder = tmp_path / "beside"
    if given == "beside":
        smckpt.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    model.config.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    other = {**values, "rms_norm_eps": 0.5}
    (folder / "config.4.0.0.json").write_text(json.dumps(other))
    values["configuration_files"] = ["config.4.0.0.json"]
    (folder / "config.json").write_text(json.dumps(values))
    other["configuration_files"] = values["configuration_files"]  # as transformers writes both
    (folder / "config.4.0.0.json").write_text(json.dumps(other))
    if given == "config":
        with pytest.raises(errors.UsageError, match=r"leads to config\.4\.0\.0\.json"):
            export_hf(tmp_path / "model.pt", tmp_path / "hf", config=folder)
        config: Any = folder / "config.4.0.0.json"
        export_hf(tmp_path / "model.pt", tmp_path / "hf", config=config)
        assert AutoConfig.from_pretrained(tmp_path / "hf").rms_norm_eps == 0.5
    elif given == "beside":
        report = export_hf(folder, tmp_path / "hf")
        assert any("leads to config.4.0.0.json" in note for note in report.notes), report.notes
    else:
        export_hf(tmp_path / "model.pt", tmp_path / "hf", config=values)
        assert AutoConfig.from_pretrained(tmp_path / "hf").rms_norm_eps == values["rms_norm_eps"]


CONFIG = """\
from transformers import LlamaConfig
from .sizes import SIZE


class OwnConfig(LlamaConfig):
    model_type = "own_llama"
    size = SIZE
"""
MODEL = """\
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def custom(folder: Path, model: Any) -> Path:
    """A model with code of its own, as its authors upload it."""
    folder.mkdir()
    (folder / "configuration_own.py").write_text(CONFIG)
    (folder / "sizes.py").write_text("SIZE = 3\n")
    (folder / "modeling_own.py").write_text(MODEL)
    values = model.config.to_dict() | {
        "model_type": "own_llama", "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_own.OwnConfig",
                     "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_custom_code_goes_along_with_a_config_object(tmp_path, model, monkeypatch):
    folder = custom(tmp_path / "custom", model)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert "transformers_modules" in type(config).__module__
    # the model's own class is fetched with it
    AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    report = export_hf(tmp_path / "model.pt", tmp_path / "hf", config=config)
    code = {path.name for path in (tmp_path / "hf").glob("*.py")}
    if code != {"configuration_own.py", "modeling_own.py", "sizes.py"}:
        assert any("auto_map names modeling_own.py" in note for note in report.notes), code
    loaded = AutoConfig.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    assert loaded.size == 3
    assert {"configuration_own.py", "sizes.py"} <= code


def test_that_custom_code_is_not_there_is_noted(tmp_path, model):
    folder = custom(tmp_path / "custom", model)
    values = json.loads((folder / "config.json").read_text())
    for number, given in enumerate((values, folder / "config.json", folder)):
        report = export_hf(tmp_path / "model.pt", tmp_path / f"hf{number}", config=given)
        lost = [note for note in report.notes if "auto_map names configuration_own.py" in note]
        assert bool(lost) == (given is not folder), (given, report.notes)


def test_a_config_that_names_another_file_of_weights_does_not_lead_away_from_these(tmp_path, model):
    values = json.loads((tmp_path / "own" / "config.json").read_text())
    other = references.model("llama")
    with torch.no_grad():
        other.lm_head.weight.zero_()
    other.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "hf" / "ema.safetensors")
    export_hf(
        tmp_path / "model.pt", tmp_path / "hf", options=ExportOptions(overwrite=True),
        config={**values, "transformers_weights": "ema.safetensors"},
    )  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("how", ["object", "model", "dict"])
def test_a_config_that_names_no_class_gets_it(tmp_path, family, how):
    """A model that never was saved has none; vLLM and llama.cpp do not load an export without."""
    made = references.model(family)
    assert not made.config.architectures
    torch.save(made.state_dict(), tmp_path / "model.pt")
    config = {"object": made.config, "model": made, "dict": made.config.to_dict()}[how]
    report = export_hf(tmp_path / "model.pt", tmp_path / "hf", config=config)
    found = json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"]
    assert found == [type(made).__name__]
    assert not any("names no class" in note for note in report.notes)


def test_where_the_class_is_not_known_a_note_says_so(tmp_path):
    made = references.model("llama")
    torch.save(made.state_dict(), tmp_path / "model.pt")
    options = ExportOptions(against_model=False)
    report = export_hf(tmp_path / "model.pt", tmp_path / "hf", config=made.config, options=options)
    assert any("names no class" in note for note in report.notes)


@pytest.mark.parametrize("sharded", [False, True])
def test_an_export_has_all_files_that_save_pretrained_of_model_and_tokenizer_writes(
    tmp_path: Path, sharded: bool
) -> None:
    """And one of its own, the model card. What is no weight is the same, byte for byte or, of the
    config, by each of their keys."""
    model = references.model("llama")
    model.generation_config.update(do_sample=True, temperature=0.7, eos_token_id=[1, 2, 3])
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(60)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w1",
        chat_template={"default": "{{ messages }}", "tool_use": "{{ tools }}"},
    )  # fmt: skip
    size: dict[str, Any] = {"max_shard_size": "100KB"} if sharded else {}
    model.save_pretrained(tmp_path / "theirs", **size)
    tokenizer.save_pretrained(tmp_path / "theirs")
    smckpt.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "ck", no_dist=True)
    export_hf(
        tmp_path / "ck", tmp_path / "ours", config=model, tokenizer=tokenizer,
        options=ExportOptions(**size),
    )  # fmt: skip

    def files(folder: str) -> dict[str, bytes]:
        top = tmp_path / folder
        paths = [path for path in top.rglob("*") if path.is_file()]
        return {path.relative_to(top).as_posix(): path.read_bytes() for path in paths}

    theirs, ours = files("theirs"), files("ours")

    def beside(found: dict[str, bytes]) -> dict[str, bytes]:
        return {n: data for n, data in found.items() if not n.startswith("model")}

    assert beside(ours).keys() - beside(theirs).keys() == {"README.md"}
    assert beside(theirs).keys() - beside(ours).keys() == set()
    index = "model.safetensors.index.json"
    assert (index in ours) == (index in theirs) == sharded
    if not sharded:
        assert "model.safetensors" in ours and "model.safetensors" in theirs
    for name in beside(theirs).keys() - {"config.json"}:
        if name.endswith(".json"):
            assert json.loads(ours[name]) == json.loads(theirs[name]), name
        else:
            assert ours[name] == theirs[name], name
    written, wanted = json.loads(ours["config.json"]), json.loads(theirs["config.json"])
    assert {key: written.get(key) for key in wanted} == wanted
