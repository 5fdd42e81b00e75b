"""config.json carries what transformers 4 and 5 each look for."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import pytest
from transformers import AutoConfig, GPTNeoXConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.auto import modeling_auto

from smckpt import export_hf, save
from smckpt.errors import UsageError
from smckpt.translate.beside import tokenizer_files
from smckpt.translate.config import read_config
from smckpt.translate.config_values import class_of_others, refuse_impossible
from smckpt.translate.models.lora import read_lora_config
from smckpt.translate.tables.families import built_in_names
from smckpt.translate.tables.vocabulary import check_tokenizer
from tests.support.limits import seconds, within


def _complete(values: dict, dtype: str | None = None) -> dict:
    config = read_config(values)
    assert config is not None
    return config.complete(dtype)


def test_rope_of_transformers_5_is_written_in_the_older_keys_too():
    rope = {"rope_theta": 5e5, "rope_type": "yarn", "factor": 8.0}
    out = _complete({"model_type": "llama", "rope_parameters": rope})
    assert out["rope_parameters"] == rope
    assert out["rope_theta"] == 5e5
    assert out["rope_scaling"] == {"rope_type": "yarn", "type": "yarn", "factor": 8.0}


def test_rope_of_transformers_4_is_written_in_the_newer_key_too():
    scaling = {"type": "linear", "factor": 2.0}
    out = _complete({"model_type": "llama", "rope_theta": 5e5, "rope_scaling": scaling})
    assert out["rope_scaling"] == {**scaling, "rope_type": "linear"}
    assert out["rope_parameters"] == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}


def test_plain_rope_has_no_scaling_in_the_older_keys():
    out = _complete(LlamaConfig(rope_theta=5e5).to_dict())
    assert (out["rope_theta"], out["rope_scaling"]) == (5e5, None)


def test_neox_has_its_own_older_names():
    out = _complete(GPTNeoXConfig().to_dict())
    assert (out["rotary_pct"], out["rotary_emb_base"]) == (0.25, 10000.0)


def test_generations_that_contradict_each_other_are_refused():
    values = {"model_type": "llama", "rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}
    with pytest.raises(UsageError, match="rope_theta"):
        _complete(values)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "default"}, "rope_type"),
        ({"rope_type": "yarn", "factor": 8.0}, {"rope_type": "yarn", "factor": 4.0}, "factor"),
        ({"rope_type": "yarn", "factor": 8.0},
         {"rope_type": "dynamic", "factor": 8.0}, "rope_type"),
        ({"type": "mrope", "mrope_section": [2, 3, 3]},
         {"rope_type": "default", "mrope_section": [3, 3, 2]}, "mrope_section"),
        ({"type": "linear", "factor": 8.0},
         {"full_attention": {"rope_type": "linear", "factor": 2.0}}, "factor"),
        ({"type": "su", "short_factor": [1.0], "long_factor": [2.0]},
         {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, ""),
        ({"type": "mrope", "mrope_section": [2, 3, 3]},
         {"rope_type": "default", "mrope_section": [2, 3, 3]}, ""),
    ],
)  # fmt: skip
def test_scaling_that_the_generations_say_differently_is_refused(old, new, key):
    values = {"model_type": "llama", "rope_scaling": old, "rope_parameters": new}
    if not key:
        _complete(values)
        return
    with pytest.raises(UsageError, match=f"{key} in rope_scaling"):
        _complete(values)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_the_number_of_experts_has_both_names(key):
    other = "num_local_experts" if key == "num_experts" else "num_experts"
    out = _complete({"model_type": "qwen3_moe", key: 8})
    assert (out[key], out[other]) == (8, 8)
    with pytest.raises(UsageError, match="num_local_experts=4"):
        _complete({"model_type": "m", "num_experts": 8, "num_local_experts": 4})


def test_layers_of_two_kinds_keep_both_thetas():
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    out = _complete({"model_type": "gemma3_text", "rope_parameters": rope})
    assert (out["rope_theta"], out["rope_local_base_freq"]) == (1e6, 1e4)


GEMMA = {"rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
OLMO = {"rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}}


@pytest.mark.parametrize(
    ("family", "more", "local"),
    [
        ("gemma3_text", GEMMA, 5e3), ("gemma3_text", {**GEMMA, "rope_scaling": None}, 5e3),
        ("gemma3_text", {"rope_scaling": GEMMA["rope_scaling"]}, 1e4), ("olmo3", OLMO, 2e6),
    ],
)  # fmt: skip
def test_one_set_of_rotary_parameters_of_transformers_4_becomes_one_for_each_type_of_layer(
    tmp_path: Path, family: str, more: dict, local: float
):
    """As transformers 4 saves a fine-tuned Gemma 3 or OLMo 3. transformers 5 does not read one flat
    set of such a model."""
    values = {"model_type": family, "rope_theta": 2e6, "num_hidden_layers": 8, **more}
    (tmp_path / "config.json").write_text(json.dumps(_complete(values)))
    rope = AutoConfig.from_pretrained(tmp_path).rope_parameters
    scaled = more["rope_scaling"] or {"factor": None}
    full, sliding = rope["full_attention"], rope["sliding_attention"]
    assert (full["rope_theta"], full.get("factor")) == (2e6, scaled["factor"])
    assert (sliding["rope_theta"], sliding["rope_type"]) == (local, "default")


def test_the_dtype_is_that_of_the_weights_in_both_generations_keys_and_inside():
    inner = {"model_type": "llama", "dtype": "float32"}
    out = _complete({"model_type": "llava", "dtype": "float32", "text_config": inner}, "bfloat16")
    assert (out["dtype"], out["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert out["text_config"]["dtype"] == "bfloat16"


def test_what_was_written_reads_back_as_the_same_config(tmp_path: Path):
    config = LlamaConfig(rope_theta=5e5, hidden_size=64, num_attention_heads=8)
    (tmp_path / "config.json").write_text(json.dumps(_complete(config.to_dict(), "float32")))
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.rope_parameters == config.rope_parameters
    assert again.hidden_size == 64


def test_the_given_config_is_not_changed():
    values = {"model_type": "llama", "rope_theta": 5e5}
    _complete(values, "bfloat16")
    assert values == {"model_type": "llama", "rope_theta": 5e5}


def test_a_directory_a_file_a_dict_and_an_object_are_all_taken(tmp_path: Path):
    config = LlamaConfig(hidden_size=64, num_attention_heads=8)
    config.save_pretrained(tmp_path)
    sources = (tmp_path, str(tmp_path / "config.json"), config.to_dict(), config)
    for source in sources:
        found = read_config(source)
        assert found is not None and found.values["hidden_size"] == 64
    assert read_config(None) is None


@pytest.mark.parametrize(
    "source", [{}, {"hidden_size": 3}, "/nowhere/at/all", 7, {"model_type": ["llama"]}]
)
def test_what_is_no_config_is_refused(source):
    with pytest.raises(UsageError):
        read_config(source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "bogus"}, "hidden_act='bogus', which is no activation"),
        ({"hidden_act": None}, "hidden_act=None"),
        ({"vision_config": {"hidden_act": 3}}, "vision_config.hidden_act=3"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5', not above zero"),
        ({"rms_norm_eps": -1e-5}, "not above zero"),
        ({"rope_scaling": {"type": "linear", "factor": math.inf}}, "rope_scaling.factor=inf"),
        ({"rope_theta": 0}, "rope_theta=0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000, more than any model has"),
        ({"vision_config": {"depth": 1e9}}, "vision_config.depth"),
        ({"model_type": "custom", "n_routed_experts": 1 << 62}, "n_routed_experts"),
        ({"tie_word_embeddings": "false"}, "a text, which counts as true"),
        ({"layer_types": ["full_attention"]}, "not one known type for each layer"),
        ({"layer_types": ["full_attention", "other"]}, "not one known type for each layer"),
        ({"architectures": ["MistralForCausalLM"]}, "the class of mistral"),
        ({"model_type": "qwen2"}, "the class of llama, but model_type='qwen2'"),
    ],
)
def test_a_value_that_no_such_model_has_is_refused_by_name(change, message):
    values = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}
    assert read_config(values) is not None
    with pytest.raises(UsageError, match=re.escape(message)):
        read_config({**values, **change})


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rotary_parameters_of_two_types_are_refused(key):
    """transformers read `rope_type`, and mlx-lm read `type`."""
    for one, two in (("linear", "linear"), ("default", "linear"), ("mrope", "default")):
        rope = {"type": one, "rope_type": two, "factor": 2.0, "rope_theta": 1e4}
        _complete({"model_type": "llama", key: rope, "rope_theta": 1e4}, "bfloat16")
    rope = {"type": "linear", "rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(UsageError, match="of two types, dynamic and linear"):
        _complete({"model_type": "llama", key: rope, "rope_theta": 1e4}, "bfloat16")


@pytest.mark.parametrize("rope", [{"rope_type": "bogus"}, {"rope_type": "llama3", "factor": 2.0}])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rotary_parameters_that_transformers_does_not_take_are_refused(rope, key):
    values = {"model_type": "llama", key: {**rope, "rope_theta": 1e4}}
    with pytest.raises(UsageError, match=re.escape(repr(rope["rope_type"]))):
        _complete(values, "bfloat16")
    with pytest.raises(UsageError, match="rotary parameters of the type 'linear'"):
        _complete({"model_type": "any", key: "linear"}, "bfloat16")


def test_a_type_without_a_table_may_have_values_of_another_kind():
    """Mamba 2 has an infinite limit; a class of the user's own has an activation of its own."""
    found = read_config({"model_type": "mamba2", "time_step_limit": [0.0, math.inf]})
    assert found is not None and found.values["time_step_limit"][1] == math.inf
    own = {"model_type": "llama", "hidden_act": "own", "auto_map": {"AutoModel": "own.Own"}}
    assert read_config(own) is not None


@pytest.mark.parametrize("name", sorted(built_in_names()))
def test_the_classes_of_a_family_are_its_own(name):
    kinds = {
        kind for table in (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
                           modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
        if isinstance(kind := table.get(name), str)
    }  # fmt: skip
    assert kinds, name
    for kind in kinds:
        values = {"model_type": name, "architectures": [kind]}
        refuse_impossible(values, None)
        assert class_of_others(values) is None
    assert class_of_others({"model_type": name, "architectures": ["OwnForCausalLM"]}) is not None


def test_a_long_key_holds_no_export_up():
    with within(10):
        refuse_impossible({"model_type": "own", "num_" * 100_000: 1 << 20}, None)


def test_generation_settings_come_from_the_config():
    config = read_config({"model_type": "gpt2", "eos_token_id": 7, "pad_token_id": None})
    assert config is not None
    assert config.generation() == {"_from_model_config": True, "eos_token_id": 7}


def test_only_tokenizer_files_are_listed(tmp_path: Path):
    for name in ("tokenizer.json", "merges.txt", "config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    assert [p.name for p in tokenizer_files(tmp_path)] == ["merges.txt", "tokenizer.json"]


def test_what_stands_beside_a_released_model_goes_along(tmp_path: Path):
    """Processors, templates, tokenizers of other kinds, and the code that `auto_map` names."""
    release = tmp_path / "release"
    (release / "additional_chat_templates").mkdir(parents=True)
    config = LlamaConfig(
        hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16,
        vocab_size=8,
    )  # fmt: skip
    code = {"AutoConfig": "configuration_own.OwnConfig",
            "AutoModel": "another/repository--modeling_far.FarModel"}  # fmt: skip
    (release / "config.json").write_text(json.dumps({**config.to_dict(), "auto_map": code}))
    beside = {
        "chat_template.jinja": "{{ messages }}", "additional_chat_templates/tool.jinja": "{{ 1 }}",
        "tekken.json": "{}", "source.spm": "s", "qwen.tiktoken": "t", "spm.model": "m",
        "preprocessor_config.json": "{}", "video_preprocessor_config.json": "{}",
        "tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["tokenization_own.Own", null]}}',
        "configuration_own.py": "from .layers_own import width\n", "layers_own.py": "width = 1\n",
        "tokenization_own.py": "import torch\n",
    }  # fmt: skip
    others = {"unnamed.py": "1", "notes.md": "1", "modeling_far.py": "1",
              "additional_chat_templates/notes.md": "1"}  # fmt: skip
    for name, text in {**beside, **others}.items():
        (release / name).write_text(text)
    model = LlamaForCausalLM(config)
    save({"model": model.state_dict()}, checkpoint_id=str(tmp_path / "saved"))
    export_hf(tmp_path / "saved", tmp_path / "hf", config=release)
    found = {str(path.relative_to(tmp_path / "hf")) for path in (tmp_path / "hf").rglob("*.*")}
    made = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert found - made == beside.keys()
    assert all((tmp_path / "hf" / name).read_text() == text for name, text in beside.items())


# -- what is no file -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_a_pipe_found_in_a_directory_is_refused_at_once(tmp_path: Path, name: str):
    os.mkfifo(tmp_path / name)
    read = read_config if name == "config.json" else read_lora_config
    with within(seconds(30)), pytest.raises(UsageError, match="pipe or device") as caught:
        read(tmp_path)
    assert str(caught.value.path) == str(tmp_path / name)


def test_a_pipe_that_the_user_names_is_read(tmp_path: Path):
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as end:
        end.write('{"model_type": "llama"}')
    try:
        found = read_config(f"/dev/fd/{reading}")
    finally:
        os.close(reading)
    assert found is not None and found.values == {"model_type": "llama"}


def test_a_pipe_beside_a_tokenizer_is_not_read(tmp_path: Path):
    os.mkfifo(tmp_path / "tokenizer.json")
    with within(seconds(30)):
        check_tokenizer(tmp_path, 8, 16)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"model_type": "gpt2", "n_positions": 64}, {"n_ctx": 64}),
        ({"model_type": "gpt2", "n_positions": 64, "n_ctx": 32}, {"n_ctx": 32}),
        ({"model_type": "gpt2"}, {"n_ctx": None}),
        ({"model_type": "deepseek_v3"}, {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}),
        ({"model_type": "cohere2"}, {"rotary_pct": 1.0}),
        ({"model_type": "qwen3_next", "layer_types": 2 * ["linear_attention", "full_attention"]},
         {"full_attention_interval": 2}),
        ({"model_type": "qwen3_next", "layer_types": ["full_attention", "linear_attention"]},
         {"full_attention_interval": None}),
    ],
)  # fmt: skip
def test_keys_that_servers_read_are_written(values, wanted):
    """Which servers need them: the table of servers in docs/evidence/families.md."""
    found = _complete(values)
    assert {key: found.get(key) for key in wanted} == wanted


@pytest.mark.parametrize("text", [{}, {"tie_word_embeddings": True}])
def test_the_section_of_the_language_model_says_whether_embeddings_are_tied(text):
    sections = {"text_config": {"model_type": "qwen3_vl_moe_text", **text}}
    found = _complete({"model_type": "qwen3_vl_moe", "tie_word_embeddings": False, **sections})
    assert found["text_config"]["tie_word_embeddings"] is bool(text)
    assert found["text_config"]["norm_topk_prob"] is True
