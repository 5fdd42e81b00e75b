"""`gguf=` runs llama.cpp's own converter on the finished directory, and tells its last lines
when it fails."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import smckpt
from smckpt import Adapter, ExportOptions, errors, export_hf
from smckpt.cli.app import app
from smckpt.translate.exports.sidecars import CONVERTER
from tests.support import interpreters
from tests.support.limits import seconds
from tests.support.models import references as ref

# As the converter is called. It fails where the directory says so.
STAND_IN = """
import sys
from pathlib import Path
place, (*_, out, _, kind) = Path(sys.argv[1]), sys.argv[2:]
assert sys.argv[2::2] == ["--outfile", "--outtype"]
if (place / "added_tokens.json").exists():
    Path(out).write_bytes(b"GGUF, half")
    print("one\\n" * 40 + "the model is not supported", flush=True)
    sys.exit("NotImplementedError: Architecture LlamaForCausalLM")
if kind != "tq1_0":
    Path(out).write_bytes(b"GGUF" + kind.encode() + (place / "model.safetensors").read_bytes())
"""
LLAMA = """
import sys, llama_cpp
model = llama_cpp.Llama(sys.argv[1], n_ctx=64, n_threads=1, logits_all=True, verbose=False,
                        flash_attn=False, type_k=0, type_v=0)
tokens = list(map(int, sys.argv[2].split(",")))
for _ in range(12):
    model.reset()
    model.eval(tokens)
    tokens.append(int(model.scores[len(tokens) - 1].argmax()))
print(*tokens)
"""
SENTENCES = """
import random, sys, sentencepiece
random.seed(1)
words = ["".join(random.choices("abcdefghijklmnop", k=4)) for _ in range(300)]
open(sys.argv[1] + "/text", "w").write("\\n".join(" ".join(random.choices(words, k=9))
                                                  for _ in range(400)))
sentencepiece.SentencePieceTrainer.train(
    input=sys.argv[1] + "/text", model_prefix=sys.argv[1] + "/tokenizer", vocab_size=110,
    model_type="bpe", minloglevel=2)
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Any, str]:
    model = ref.model("llama")
    model.config.architectures = ["LlamaForCausalLM"]
    place = str(tmp_path_factory.mktemp("c"))
    smckpt.save({"model": model.state_dict()}, checkpoint_id=place, step=7)
    return model, place


@pytest.fixture
def script(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv(CONVERTER, raising=False)
    path = tmp_path / "bin" / "convert_hf_to_gguf.py"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\n{STAND_IN}")
    return path


def test_the_converter_is_found_and_its_file_appears_whole(tmp_path, saved, script, monkeypatch):
    model, place = saved
    out = tmp_path / "hf"
    for number, found in enumerate(("argument", "command", "variable", "path", "command line")):
        given: dict[str, Any] = {}
        if found == "argument":
            given["gguf_converter"] = script  # not executable: this Python runs it
        elif found == "command":
            given["gguf_converter"] = shlex.join([sys.executable, str(script)])
        elif found == "variable":
            monkeypatch.setenv(CONVERTER, str(script))
        elif found == "path":
            monkeypatch.delenv(CONVERTER)
            script.chmod(0o755)
            monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
        kind = ("f16", "q8_0")[number % 2]
        if found == "command line":
            (tmp_path / "config.json").write_text(model.config.to_json_string(use_diff=False))
            run = CliRunner().invoke(app, [
                "export", place, str(out), "--config", str(tmp_path / "config.json"),
                "--overwrite", "--gguf", kind,
            ])  # fmt: skip
            assert run.exit_code == 0 and f"model-{kind}.gguf" in run.output, run.output
        else:
            report = export_hf(
                place,
                out,
                config=model.config,
                options=ExportOptions(overwrite=True, gguf=kind, **given),
            )
            assert report.gguf == str(out / f"model-{kind}.gguf")
        whole = (out / "model.safetensors").read_bytes()
        assert (out / f"model-{kind}.gguf").read_bytes() == b"GGUF" + kind.encode() + whole
        # that of the model before is gone, and nothing is half there
        assert [path.name for path in out.glob("*.gguf*")] == [f"model-{kind}.gguf"]


def test_what_a_kill_within_the_converter_leaves_goes_with_the_next_export(tmp_path, saved, script):
    """It was half a GGUF file in a hidden directory, for ever; and the converter ran on."""
    model, place = saved
    model.config.save_pretrained(tmp_path / "model")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reads = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    script.write_text(
        f"import os, signal\n{STAND_IN}\nheld = open({str(pipe)!r}, 'w')\n"
        "os.kill(os.getppid(), 9)\nsignal.pause()\n"
    )
    export = (
        "import sys; from smckpt import ExportOptions, export_hf; c, o, m, s = sys.argv[1:]; "
        "export_hf(c, o, config=m, options=ExportOptions(gguf='f16', gguf_converter=s))"
    )
    out = tmp_path / "hf"
    given = [place, str(out), str(tmp_path / "model"), str(script)]
    killed = subprocess.run([sys.executable, "-c", export, *given], timeout=seconds(120))
    assert killed.returncode == -9
    ended = select.poll()
    ended.register(reads, 0)
    assert ended.poll(1000 * seconds(30)), "the converter runs on"
    os.close(reads)
    assert [name for name in os.listdir(out) if name.startswith(".")]
    assert load_file(out / "model.safetensors").keys() == model.state_dict().keys()
    script.write_text(STAND_IN)
    options = ExportOptions(gguf="f16", gguf_converter=script, overwrite=True)
    export_hf(place, out, config=model.config, options=options)
    assert not [name for name in os.listdir(out) if name.startswith(".")]
    assert (out / "model-f16.gguf").read_bytes().startswith(b"GGUF")


def test_the_converter_writes_through_no_link(tmp_path, saved, script):
    """Under names that it or its output have, and in the place of the folder that is made for it,
    while it runs."""
    model, place = saved
    out, victim = tmp_path / "hf", tmp_path / "victim"
    out.mkdir()
    victim.mkdir()
    (victim / "file").write_bytes(b"precious")
    (out / "model-f16.gguf").symlink_to(victim / "file")
    swap = (
        "import os, pathlib\n"
        f"os.symlink({str(victim / 'file')!r}, {str(out / 'model-f16.gguf.unfinished')!r})\n"
        f"for made in pathlib.Path({str(out)!r}).glob('.gguf.*'):\n"
        "    made.rename(made.parent / 'aside')\n"
        f"    made.symlink_to({str(victim)!r})\n"
    )
    script.write_text(f"{swap}{script.read_text()}")
    with contextlib.suppress(errors.CheckpointError):
        options = ExportOptions(gguf="f16", gguf_converter=script, overwrite=True)
        export_hf(place, out, config=model.config, options=options)
    assert [p.name for p in victim.iterdir()] == ["file"]
    assert (victim / "file").read_bytes() == b"precious"
    assert (out / "model-f16.gguf").read_bytes().startswith(b"GGUF")
    assert not (out / "model-f16.gguf").is_symlink()


def test_what_the_converter_says_last_is_told_and_the_directory_stays(tmp_path, saved, script):
    model, place = saved
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "added_tokens.json").write_text("{}")
    given: dict[str, Any] = {"config": model.config}
    with pytest.raises(errors.UsageError, match=r"ended with 1: one; .*not supported; Not.*whole"):
        options = ExportOptions(gguf="f16", gguf_converter=script)
        export_hf(place, tmp_path / "a", tokenizer=tokenizer, options=options, **given)
    with pytest.raises(errors.UsageError, match=r"ended with 0: it wrote nothing"):
        options = ExportOptions(gguf="tq1_0", gguf_converter=script)
        export_hf(place, tmp_path / "b", options=options, **given)
    for name in "ab":
        assert load_file(tmp_path / name / "model.safetensors").keys()
        assert not [*(tmp_path / name).glob("*.gguf*")]


def test_what_cannot_be_converted_is_refused_before_anything_is_written(
    tmp_path, saved, script, monkeypatch
):
    model, place = saved
    monkeypatch.setenv("PATH", str(tmp_path))
    adapter = Adapter("adapter", {"peft_type": "LORA"})
    out, here = tmp_path / "hf", {"gguf": "f16", "gguf_converter": script}
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (out, {"gguf": "f16"}, rf"convert_hf_to_gguf.py is not here.*{CONVERTER}"),
        (
            out,
            {"gguf": "f16", "gguf_converter": "nothing --here"},
            "'nothing --here' cannot be run",
        ),
        (out, {"gguf_converter": script}, "gguf_converter= has no effect without gguf="),
        (out, {**here, "gguf": "int4"}, "gguf='int4'.*q8_0"),
        ("s3://bucket/hf", here, "reads and writes disks only"),
        (out, here, "convert_lora_to_gguf"),
    ]
    for where, given, text in cases:
        with pytest.raises(errors.UsageError, match=text):
            export_hf(
                place, where, config=model.config, options=ExportOptions(**given),
                adapter=adapter if "lora" in text else None,
            )  # fmt: skip
    assert not out.exists()


@pytest.mark.long
def test_llama_cpp_runs_what_its_converter_made_with_transformers_tokens(tmp_path, saved):
    if not os.environ.get(CONVERTER) or not os.environ.get("SMCKPT_LLAMA_CPP_PYTHON"):
        pytest.skip(f"{CONVERTER} and SMCKPT_LLAMA_CPP_PYTHON (with llama_cpp) are not set")
    model, place = saved
    interpreters.run(interpreters.transformers4(), "-c", SENTENCES, tmp_path)
    report = export_hf(
        place,
        tmp_path / "hf",
        config=model.config,
        tokenizer=tmp_path,
        options=ExportOptions(gguf="f32"),
    )
    wanted = model.generate(torch.tensor([[3, 17, 5, 9]]), max_new_tokens=12, do_sample=False)
    found = interpreters.run(
        os.environ["SMCKPT_LLAMA_CPP_PYTHON"], "-c", LLAMA, str(report.gguf), "3,17,5,9"
    )
    assert found.split() == list(map(str, wanted[0].tolist()))
