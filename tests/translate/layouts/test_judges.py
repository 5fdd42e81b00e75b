"""The lists of names that servers take and releases have refuse what they should.

`test_names.py` holds the names of its exports against these lists.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from smckpt.translate.models import meta_model
from tests.support.models import hub_families, judges

LISTED = [(server, family) for server in judges.SERVERS for family in judges.read(server)]
# transformers 5 has all experts in one tensor.
OTHER_IN_MEMORY = ("deepseek_v3", "qwen2_moe", "phimoe", "jamba", "granitemoe")


def takes(server: str, family: str) -> judges.Takes:
    found = judges.Takes.of(server, family)
    assert found is not None
    return found


def test_every_list_is_of_families_that_are_exported_and_names_its_source():
    for server in judges.SERVERS:
        assert set(judges.read(server)) <= set(hub_families.FAMILIES)
        assert all(takes(server, family).needed for family in judges.read(server))
    for entry in judges.read("released").values():
        assert entry["repository"] and re.fullmatch(r"[0-9a-f]{40}", entry["commit"])


@pytest.mark.parametrize("server", judges.SERVERS)
def test_names_that_a_server_takes_pass(server):
    for family in judges.read(server):
        assert takes(server, family).problems(takes(server, family).example()) == []


@pytest.mark.parametrize(("server", "family"), LISTED)
def test_a_lost_tensor_is_missed(server, family):
    wanted = takes(server, family)
    for ways in wanted.needed:
        lost = wanted.example() - {name for way in ways for name in way}
        assert any(text.startswith("lacks ") for text in wanted.problems(lost)), ways


@pytest.mark.parametrize(("server", "family"), LISTED)
def test_a_name_without_its_first_part_is_refused(server, family):
    wanted = takes(server, family)
    for name in wanted.example():
        short = name.partition(".")[2]
        assert wanted.problems({*wanted.example(), short}) == [f"refuses {short}"]


@pytest.mark.parametrize(("server", "family"), LISTED)
def test_a_name_of_a_wrapper_or_of_another_system_is_refused(server, family):
    wanted = takes(server, family)
    for name in (
        "model._orig_mod.embed_tokens.weight",
        "module.model.embed_tokens.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
    ):
        assert f"refuses {judges.folded([name]).pop()}" in wanted.problems([name])


@pytest.mark.parametrize("server", judges.SERVERS)
def test_one_half_of_a_pair_is_not_enough(server):
    """Where a server takes q, k and v or the three in one, q and k alone are too few."""
    wanted = takes(server, "llama")
    names = {n for n in wanted.example() if not n.endswith("v_proj.weight")}
    (said,) = wanted.problems(names)
    assert said.startswith("lacks ") and "v_proj.weight" in said


@pytest.mark.parametrize("family", OTHER_IN_MEMORY)
def test_names_in_memory_are_refused(family):
    said = judges.problems(family, hub_families.model(family).state_dict())
    assert said and all(problems for problems in said.values()), said


@pytest.mark.parametrize("family", sorted(judges.read("released")))
def test_names_that_differ_from_a_release_are_named(family):
    names = judges.released(family)
    assert names is not None
    assert judges.released_problems(family, names) == []
    norm = next(name for name in sorted(names) if "norm" in name or "ln_f" in name)
    assert judges.released_problems(family, names - {norm}) == [f"only the release has {norm}"]
    assert judges.released_problems(family, names | {"model.extra"}) == [
        "the release has no model.extra"
    ]


# -- whole releases --------------------------------------------------------------------------------


def names_and_sizes(folder: Path, config: dict[str, Any]) -> dict[str, int]:
    """The names that an export has for a config, each with its number of elements."""
    import transformers

    (folder / "config.json").write_text(json.dumps(config))
    known = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = getattr(transformers, config["architectures"][0])._from_config(known)
    found = meta_model.hub_shapes(model)
    assert found is not None
    return {name: math.prod(tensor.shape) for name, tensor in found.items()}


@pytest.mark.parametrize("family", sorted(judges.read("released")))
def test_a_release_s_own_config_gives_all_its_names_and_its_size(family, tmp_path):
    entry = judges.read("released")[family]
    whole = judges.Whole.of(family)
    assert whole is not None
    assert whole.problems(names_and_sizes(tmp_path, entry["config"])) == []


LAYER_LESS = {"num_hidden_layers": 35, "layer_types": None, "no_rope_layers": None}


@pytest.mark.parametrize(
    ("family", "changed", "said"),
    [
        ("smollm3", LAYER_LESS, "tensors"),
        ("smollm3", {"num_key_value_heads": 8}, "bytes"),
        ("smollm3", {"intermediate_size": 11000}, "bytes"),
        ("smollm3", {"attention_bias": True}, "tensors"),
        ("mixtral", {"num_local_experts": 7}, "tensors"),
        ("mixtral", {"num_key_value_heads": 4}, "bytes"),
    ],
)
def test_a_lost_layer_or_expert_and_another_width_are_seen(family, changed, said, tmp_path):
    whole = judges.Whole.of(family)
    assert whole is not None
    config = {**judges.read("released")[family]["config"], **changed}
    config = {name: value for name, value in config.items() if value is not None}
    problems = whole.problems(names_and_sizes(tmp_path, config))
    assert any(said in problem for problem in problems)


def test_the_right_number_of_wrong_names_is_seen(tmp_path):
    whole = judges.Whole.of("smollm3")
    assert whole is not None
    sizes = names_and_sizes(tmp_path, judges.read("released")["smollm3"]["config"])
    one = "model.layers.7.mlp.up_proj.weight"
    sizes["model.layers.70.mlp.up_proj.weight"] = sizes.pop(one)
    assert whole.problems(sizes) == ["other names than the release"]
