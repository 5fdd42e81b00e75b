"""Servers compute from an export what transformers computes from the model.

Each server reads the export, and beside it what `save_pretrained` writes. An export is at fault
where the server reads the other one rightly. Variables name the servers' interpreters
(`tests/support/models/servers.py`); docs/evidence/families.md says how they are made.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import smckpt
from smckpt import export_hf
from smckpt.translate.config import read_config
from tests.support.models import hub_families, servers
from tests.support.models.rope_forms import NEW, OLD, TINY
from tests.support.models.servers import CONTROL, OURS, SERVERS, Verdict

TOKENS = hub_families.TOKENS.flatten().tolist()
LONGER = [n * 5 % 63 for n in range(100)]  # more than the context before longrope and yarn
ROPES = (*(f"{name}, of 5" for name in NEW), *(f"{name}, of 4" for name in OLD))
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor",
         "rope_local_base_freq", "rotary_pct", "rotary_emb_base")  # fmt: skip
_SEEN: dict[str, Any] = {
    "model_type": "qwen2_5_vl", "image_token_id": 62, "video_token_id": 63,
    "tie_word_embeddings": False,
    "vision_config": {
        "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 14,
        "out_hidden_size": 128, "fullatt_block_indexes": [0],
    },
}  # fmt: skip


def exported(folder: Path, model: Any, config: Any, tokens: list[int]) -> None:
    smckpt.save({"model": model.state_dict()}, checkpoint_id=str(folder / "checkpoint"), step=1)
    export_hf(smckpt.latest_checkpoint(folder / "checkpoint"), folder / OURS, config=config)
    model.save_pretrained(folder / CONTROL)
    servers.made(folder, model, tokens)


def of_rope(folder: Path, form: str) -> None:
    """A model of a rope type, from a config as either version of transformers writes it."""
    import transformers as tf

    name, _, version = form.rpartition(", of ")
    own = {**NEW[name][0], "rope_parameters": NEW[name][1]} if version == "5" else OLD[name]
    values: dict[str, Any] = {**TINY, **own}
    if seen := values["model_type"] == "qwen2_5_vl_text":  # no server has it without the rest
        values = {**_SEEN, "text_config": values}
    settings = read_config(values)
    assert settings is not None
    (folder / "config.json").write_text(json.dumps(settings.complete("float32")))
    auto = tf.AutoModelForImageTextToText if seen else tf.AutoModelForCausalLM
    torch.manual_seed(5)
    model = auto.from_config(tf.AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    whole = {"architectures": [type(model).__name__], "torch_dtype": "float32"}
    values = {**model.config.to_dict(), **whole}
    text = values["text_config"] if seen else values
    for key in _ROPE:  # those of `own` alone
        text.pop(key, None)
    text.update(own)
    exported(folder, model, values, LONGER)
    if version == "4":  # its own config is the control
        (folder / CONTROL / "config.json").write_text(json.dumps(values))


def swapped(ours: Path) -> None:
    """Layers 0 and 1 have each other's queries: names and shapes are right."""
    at = ours / "model.safetensors"
    state = load_file(at)
    one, two = (f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1))
    save_file({**state, one: state[two], two: state[one]}, at, {"format": "pt"})


def turned_otherwise(ours: Path) -> None:
    config = json.loads((ours / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 100.0
    (ours / "config.json").write_text(json.dumps(config))


WRONG: dict[str, Callable[[Path], None]] = {
    "a swapped tensor": swapped, "another base": turned_otherwise
}  # fmt: skip


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> Callable[[str], tuple[str, dict[str, Verdict]]]:
    """Of a server: its version and its verdicts, by one process for all exports."""

    @cache
    def exports() -> Path:
        root: Path = tmp_path_factory.mktemp("served")
        for family in hub_families.FAMILIES:
            model = hub_families.model(family)
            exported(root / family, model, model.config, TOKENS)
        for form in ROPES:
            (root / form).mkdir()
            of_rope(root / form, form)
        for what, spoil in WRONG.items():
            shutil.copytree(root / "llama", root / what)
            spoil(root / what / OURS)
        return root

    @cache
    def judge(server: str) -> tuple[str, dict[str, Verdict]]:
        servers.interpreter(server)
        return servers.judge(server, exports())

    return judge


@pytest.mark.long
@pytest.mark.timeout(servers.LONG)
@pytest.mark.parametrize("server", SERVERS)
def test_a_server_sees_what_is_wrong(verdicts, server):
    _, found = verdicts(server)
    assert [what for what in WRONG if not found[what].fault] == []


@pytest.mark.long
@pytest.mark.timeout(servers.LONG)
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("name", [*hub_families.FAMILIES, *ROPES])
def test_a_server_reads_an_export_as_well_as_what_transformers_writes(
    verdicts, served, name, server
):
    version, found = verdicts(server)
    assert not found[name].fault, str(found[name])
    served("rope type" if name in ROPES else "family", name, f"{server} {version}", found[name])
