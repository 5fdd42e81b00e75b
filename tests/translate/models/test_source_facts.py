"""What a source says of its own model is used, compared with the config, or refused by name.

Each test changes one fact in a file that is exported as it is, and sees what happens.
"""

from __future__ import annotations

import argparse
import enum
import json
import re
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

from smckpt import Parallel, convert, errors, export_hf, import_hf
from smckpt.formats.source_facts import SourceFacts
from smckpt.translate.config import read_config
from smckpt.translate.fact_table import FACTS
from smckpt.translate.facts import compare_facts
from smckpt.translate.tables.dims import read_dims
from smckpt.translate.tables.layouts import layouts_of
from tests.support.limits import within
from tests.support.models import families, next_families, references
from tests.support.models.references import each_rank, on_disk

State = dict[str, torch.Tensor]
# Megatron-LM's own names (core_v0.16.1), of the model that `references.model("llama")` is.
LLAMA: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 160, "num_attention_heads": 8,
    "group_query_attention": True, "num_query_groups": 4, "kv_channels": 16,
    "multi_latent_attention": False, "num_experts": None, "moe_router_topk": 2,
    "moe_ffn_hidden_size": None, "moe_shared_expert_intermediate_size": None,
    "untie_embeddings_and_output_weights": True, "swiglu": True, "quick_geglu": False,
    "add_bias_linear": False, "add_qkv_bias": False, "normalization": "RMSNorm",
    "qk_layernorm": False, "position_embedding_type": "rope", "rotary_base": 500000,
    "rotary_percent": 1.0, "rotary_interleaved": False, "use_rope_scaling": False,
    "rope_scaling_factor": 8.0, "rotary_seq_len_interpolation_factor": None,
    "padded_vocab_size": 128, "norm_epsilon": 1e-6, "apply_layernorm_1p": False,
    "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 32,
    "q_lora_rank": None, "world_size": 2, "context_parallel_size": 1,
    "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 2,
    "params_dtype": torch.float32, "transformer_impl": "local", "no_rope_freq": None,
    "squared_relu": False, "apply_residual_connection_post_layernorm": False,
    "softmax_type": "vanilla", "window_size": None, "qk_l2_norm": False, "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None, "rotary_scaling_factor": 1.0, "mscale": 1.0,
    "mscale_all_dim": 0.0, "rope_type": None, "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False, "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None, "moe_router_group_topk": None,
}  # fmt: skip
# One wrong value for each; tensors are the same.
WRONG: dict[str, dict[str, Any]] = {
    "num_layers": {"num_layers": 4},
    "hidden_size": {"hidden_size": 128},
    "ffn_hidden_size": {"ffn_hidden_size": 320},
    "heads of another size": {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 32},
    "num_query_groups": {"num_query_groups": 2},
    "group_query_attention": {"group_query_attention": False, "num_query_groups": 1},
    "kv_channels": {"kv_channels": 8},
    "multi_latent_attention": {"multi_latent_attention": True},
    "num_experts": {"num_experts": 8},
    "untie_embeddings_and_output_weights": {"untie_embeddings_and_output_weights": False},
    "swiglu": {"swiglu": False},
    "quick_geglu": {"swiglu": False, "quick_geglu": True},
    "add_bias_linear": {"add_bias_linear": True},
    "add_qkv_bias": {"add_qkv_bias": True},
    "normalization": {"normalization": "LayerNorm"},
    "qk_layernorm": {"qk_layernorm": True},
    "position_embedding_type": {"position_embedding_type": "learned_absolute"},
    "rotary_base": {"rotary_base": 10000},
    "rotary_percent": {"rotary_percent": 0.5},
    "rotary_interleaved": {"rotary_interleaved": True},
    "use_rope_scaling": {"use_rope_scaling": True},
    "rotary_seq_len_interpolation_factor": {"rotary_seq_len_interpolation_factor": 4},
    "no_rope_freq": {"no_rope_freq": 2},
    "no_rope_freq, a list": {"no_rope_freq": [0, 1]},
    "yarn_rotary_scaling_factor": {
        "yarn_rotary_scaling_factor": 4.0,
        "position_embedding_type": "yarn",
    },
    "glu_linear_offset": {"glu_linear_offset": 1.0},
    "activation_func_clamp_value": {"activation_func_clamp_value": 7.0},
    "softmax_scale": {"softmax_scale": 0.5},
    "attention_chunk_size": {"attention_chunk_size": 8192},
    "query_pre_attn_scalar": {"query_pre_attn_scalar": 256},
    "a list of words": {"normalization": ["LayerNorm"]},
    "fork's names": {"rope_theta": 1e4, "rotary_base": 500000},
    "softmax_type": {"softmax_type": "off-by-one"},
    "qk_l2_norm": {"qk_l2_norm": True},
    "apply_residual_connection_post_layernorm": {"apply_residual_connection_post_layernorm": True},
    "padded_vocab_size": {"padded_vocab_size": 256},
    "tensor_model_parallel_size": {"tensor_model_parallel_size": 4},
    "pipeline_model_parallel_size": {"pipeline_model_parallel_size": 2},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Any, State]:
    model = references.model("llama")
    return model, on_disk(model, tmp_path_factory.mktemp("llama"))


def cuts_of(state: State, change: Callable[[str, torch.Tensor], torch.Tensor] | None = None):
    cut = each_rank(lambda t, e: references.mcore(state, 2, t, local=True), 2)
    if change is not None:
        cut = [{n: change(n, t) for n, t in one.items()} for one in cut]
    return cut


def megatron(folder: Path, cuts: list[State], *more: dict[str, Any], **said: Any) -> Path:
    """more: what each rank's arguments have otherwise."""
    for rank, cut in enumerate(cuts):
        place = folder / "iter_0000010" / f"mp_rank_{rank:02d}"
        place.mkdir(parents=True)
        args = {
            **LLAMA, "tensor_model_parallel_size": len(cuts), "pipeline_model_parallel_size": 1,
            "rank": rank, **said, **(more[rank] if more else {}),
        }  # fmt: skip
        state = {"args": argparse.Namespace(**args), "iteration": 10, "model": cut}
        torch.save(state, place / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("10\n")
    return folder


def assert_same(directory: Path, wanted: State) -> None:
    found = load_file(directory / "model.safetensors")
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def test_the_arguments_of_megatron_that_fit_are_no_obstacle(tmp_path, llama):
    model, state = llama
    report = export_hf(megatron(tmp_path / "m", cuts_of(state)), tmp_path / "hf",
                       config=model.config)  # fmt: skip
    assert_same(tmp_path / "hf", state)
    assert not any("arguments" in note for note in report.notes), report.notes


@pytest.mark.parametrize("fact", WRONG)
def test_a_fact_that_contradicts_the_config_is_refused_by_name(tmp_path, llama, fact):
    model, state = llama
    source = megatron(tmp_path / "m", cuts_of(state), **WRONG[fact])
    name = next(iter(WRONG[fact]))
    with pytest.raises(errors.CheckpointError) as caught:
        export_hf(source, tmp_path / "hf", config=model.config)
    shown = str(caught.value)
    named = {
        "rope_theta": "rotary_base",
        "group_query_attention": "num_query_groups",
        "quick_geglu": "swiglu",
    }
    assert named.get(fact, named.get(name, name)) in shown
    assert "model_optim_rng.pt" in shown
    assert not (tmp_path / "hf").exists()


# What fits a family's config, and values of one fact that do not.
_SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5,
            "moe_router_num_groups": 4, "moe_router_group_topk": 2,
            "moe_router_pre_softmax": True}  # fmt: skip
_V3 = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.7,
         "mscale_all_dim": 0.8, "original_max_position_embeddings": 32}  # fmt: skip
_PLAIN_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
               "original_max_position_embeddings": 32}  # fmt: skip
_DEFAULT_YARN = {**_PLAIN_YARN, "original_max_position_embeddings": 32}
_YARNS = {"position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 4.0,
          "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0,
          "yarn_original_max_position_embeddings": 32}  # fmt: skip
_LLAMA_3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
OF_FAMILIES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("deepseek_v3", _V3, _SIGMOID, {
        "moe_router_score_function": "softmax", "moe_router_topk_scaling_factor": None,
        "moe_router_num_groups": 2, "moe_router_group_topk": 1}),
    ("deepseek_v3", {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
     {"moe_router_num_groups": None, "moe_router_topk_scaling_factor": None},
     {"moe_router_num_groups": 8, "moe_router_topk_scaling_factor": 2.5}),
    ("deepseek_v3", {"rope_parameters": _YARN},
     {"rotary_scaling_factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.8, "rope_type": "yarn"},
     {"rotary_scaling_factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_type": "rope"}),
    ("deepseek_v3", {}, {"rotary_scaling_factor": 1.0, "mscale": 1.0},
     {"rotary_scaling_factor": 40.0}),
    ("deepseek_v3", {}, {
        "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12, "kv_lora_rank": 24,
        "q_lora_rank": 40, "moe_shared_expert_intermediate_size": 96},
     {"qk_head_dim": 8, "qk_pos_emb_head_dim": 16, "v_head_dim": 24, "kv_lora_rank": 12,
      "q_lora_rank": 20, "moe_shared_expert_intermediate_size": 48}),
    ("deepseek_v2", {}, {"moe_router_pre_softmax": True}, {"moe_router_pre_softmax": False}),
    ("glm4_moe", {}, {"moe_router_score_function": "sigmoid"},
     {"moe_router_score_function": "softmax"}),
    ("qwen2_moe", {"norm_topk_prob": False}, {"moe_router_pre_softmax": True},
     {"moe_router_pre_softmax": False}),
    ("olmoe", {"norm_topk_prob": True}, {"moe_router_pre_softmax": False},
     {"moe_router_pre_softmax": True}),
    ("granitemoe", {}, {"moe_router_pre_softmax": False}, {"moe_router_pre_softmax": True}),
    ("nemotron", {}, {"squared_relu": True, "swiglu": False},
     {"squared_relu": False, "activation": "gelu"}),
    ("nemotron", {}, {"activation": "squared-relu"}, {"activation": "fast-gelu"}),
    ("gpt2", {}, {"squared_relu": False}, {"squared_relu": True}),
    ("gpt2", {}, {"activation": "fast-gelu"}, {"activation": "relu"}),
    ("opt", {}, {"activation": "relu"}, {"activation": "swish"}),
    ("mixtral", {}, {"activation": "fast-swiglu"}, {"activation": "reglu"}),
    ("mixtral", {}, {"activation": "swiglu"}, {"activation": "fast-geglu"}),
    ("gemma", {}, {"activation": "fast-geglu"}, {"activation": "fast-swiglu"}),
    ("gemma", {}, {"transformer_block_type": "pre_ln", "normalize_attention_scores": True,
                   "attention_output_gate": False, "gpt_j_residual": False},
     {"transformer_block_type": "post_ln", "normalize_attention_scores": False,
      "attention_output_gate": True, "gpt_j_residual": True}),
    ("gpt_neox", {"use_parallel_residual": True}, {"gpt_j_residual": True},
     {"gpt_j_residual": False}),
    ("gpt_neox", {"use_parallel_residual": False}, {"gpt_j_residual": False},
     {"gpt_j_residual": True}),
    ("bloom", {}, {"position_embedding_type": "alibi"},
     {"position_embedding_type": "learned_absolute"}),
    ("falcon", {"alibi": True}, {"position_embedding_type": "alibi"},
     {"position_embedding_type": "rope"}),
    ("gemma", {}, {"num_experts": (1,)}, {"num_experts": (8,)}),
    ("mixtral", {}, {"moe_router_load_balancing_type": "aux_loss"},
     {"moe_router_load_balancing_type": "sinkhorn"}),
    ("qwen3_next", {}, {"attention_output_gate": True}, {"attention_output_gate": False}),
    ("qwen3_next", {}, {"linear_num_key_heads": 4, "linear_num_value_heads": 8,
                        "linear_key_head_dim": 8, "linear_value_head_dim": 12},
     {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
      "linear_value_head_dim": 24}),
    ("cohere2", {"sliding_window": 8}, {"window_size": (7, 0)}, {"window_size (keys)": (3, 0)}),
    ("gemma2", {"query_pre_attn_scalar": 64}, {"softmax_scale": 0.125}, {"softmax_scale": 0.25}),
    ("granite", {"attention_multiplier": 0.5}, {"softmax_scale": 0.5}, {"softmax_scale": 0.25}),
    ("gpt_oss", {}, {"softmax_type": "learnable", "glu_linear_offset": 1.0,
                     "activation_func_clamp_value": 7.0},
     {"softmax_type": "vanilla", "glu_linear_offset": 0.0, "activation_func_clamp_value": None}),
    ("smollm3", {"no_rope_layers": [1, 0]}, {"no_rope_freq": (0, 1)},
     {"no_rope_freq": None}),
    ("bloom", {"apply_residual_connection_post_layernorm": True},
     {"apply_residual_connection_post_layernorm": True},
     {"apply_residual_connection_post_layernorm": False}),
    ("gemma", {}, {"window_size": None}, {"window_size": (4095, 0)}),
    ("cohere2", {}, {"window_size": (7, 0)}, {"window_size": None}),
    ("cohere2", {"layer_types": ["sliding_attention", "full_attention"]},
     {"window_attn_skip_freq": 2}, {"window_attn_skip_freq": (0, 1)}),
    ("cohere2", {"layer_types": ["full_attention", "sliding_attention"]},
     {"window_attn_skip_freq": (0, 1)}, {"window_attn_skip_freq": 2}),
    ("deepseek_v3", {"rope_parameters": _YARN},
     {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 32},
     {"beta_fast": 16, "beta_slow": 2, "original_max_position_embeddings": 4096}),
    ("deepseek_v3", {"rope_parameters": {**_YARN, "beta_fast": 16.0, "beta_slow": 2.0}},
     {"beta_fast": 16, "beta_slow": 2}, {"beta_fast": 32, "beta_slow": 1}),
    ("deepseek_v3", {}, {"beta_fast": 16, "original_max_position_embeddings": 7}, {}),
    ("gpt_oss", {"rope_parameters": {**_PLAIN_YARN, "truncate": False}},
     {**_YARNS, "yarn_correction_range_round_to_int": False},
     {"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0, "yarn_original_max_position_embeddings": 64,
      "yarn_correction_range_round_to_int": True}),
    ("gemma", {"rope_parameters": _PLAIN_YARN},
     {**_YARNS, "yarn_correction_range_round_to_int": True},
     {"yarn_correction_range_round_to_int": False}),
    ("gemma", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                   "mrope_section": [4, 2, 2]}},
     {"mrope_section": (4, 2, 2)}, {"mrope_section": (2, 2, 4)}),
    ("gemma", {}, {"mrope_section": (4, 2, 2)}, {}),
    ("gemma", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4,
                                   "partial_rotary_factor": 0.25, "factor": 2.0}},
     {"rotary_seq_len_interpolation_factor": 2},
     {"rotary_percent": 0.25, "rotary_seq_len_interpolation_factor": None}),
    ("gemma", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
     {"rotary_percent": 1.0, "rotary_seq_len_interpolation_factor": None},
     {"rotary_percent": 0.5}),
    ("gemma", {"rope_parameters": _LLAMA_3},
     {"use_rope_scaling": True, "rope_scaling_factor": 8.0}, {"rope_scaling_factor": 32.0}),
    ("mixtral", {}, {"moe_apply_probs_on_input": False}, {"moe_apply_probs_on_input": True}),
    # gates and up projections that take turns in blocks of rows, within equal shapes
    ("mixtral", {}, {"moe_mlp_glu_interleave_size": None,
                     "moe_shared_expert_glu_interleave_size": None},
     {"moe_mlp_glu_interleave_size": 32, "moe_shared_expert_glu_interleave_size": 32}),
    ("gemma", {}, {"moe_mlp_glu_interleave_size": 32}, {}),
    ("deepseek_v3", {"n_group": 4, "topk_group": 2}, {"moe_router_topk_limited_devices": 2},
     {"moe_router_topk_limited_devices": 4}),
    ("deepseek_v3", {"rope_parameters": _DEFAULT_YARN},
     {"rotary_scaling_factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.0, "rope_type": "yarn"},
     {"mscale": 0.7, "mscale_all_dim": 1.0}),
    ("deepseek_v3", {"rope_parameters": {**_DEFAULT_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
     {"rotary_scaling_factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7},
     {"mscale_all_dim": 0.0}),
    # as Megatron-core has them since 0.18, without a prefix
    ("gemma", {"rope_parameters": _PLAIN_YARN},
     {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "mscale": 1.0,
      "mscale_all_dim": 0.0},
     {"rotary_scaling_factor": 40.0, "mscale": 0.5, "mscale_all_dim": 1.0}),
    ("gemma", {"rope_parameters": _PLAIN_YARN},
     {**_YARNS, "yarn_mscale": None, "yarn_mscale_all_dim": None},
     {}),
    ("gemma", {"rope_parameters": _PLAIN_YARN},
     {**_YARNS, "yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.0},
     {"yarn_mscale": 0.5, "yarn_mscale_all_dim": 1.0}),
    ("gemma2", {}, {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
                    "query_pre_attn_scalar": 16, "apply_embedding_scaling": True},
     {"attn_logit_softcapping": None, "final_logit_softcapping": 20.0,
      "query_pre_attn_scalar": 256, "apply_embedding_scaling": False}),
    ("nemotron", {}, {"attn_logit_softcapping": None, "apply_embedding_scaling": False},
     {"attn_logit_softcapping": 50.0, "apply_embedding_scaling": True}),
    ("granite", {"embedding_multiplier": 12.0, "logits_scaling": 8.0},
     {"use_mup": True, "mup_embedding_mult": 12.0, "mup_output_mult": 0.125},
     {"mup_embedding_mult": 1.0, "mup_output_mult": 0.5}),
    ("gemma", {}, {"use_mup": True, "mup_embedding_mult": 1.0, "mup_output_mult": 1.0,
                   "mup_base_hidden_size": 64, "hidden_size": 64, "kv_channels": 16,
                   "mup_attn_scale_power": 0.5},
     {"mup_base_hidden_size": 32, "mup_attn_scale_power": 1.0, "mup_attn_temp": 1.0}),
    ("gemma", {}, {"use_mup": False, "mup_embedding_mult": 7.0, "mup_attn_temp": 1.0}, {}),
    # without a word on it, Megatron-LM computes GELU
    ("gpt2", {}, {"openai_gelu": False, "squared_relu": False, "swiglu": False}, {}),
    ("opt", {}, {"swiglu": False, "squared_relu": False}, {"openai_gelu": False}),
    ("nemotron", {}, {"openai_gelu": False, "swiglu": False, "squared_relu": True},
     {"squared_relu": False}),
    ("mixtral", {}, {"gated_linear_unit": True, "activation_func": "silu"},
     {"activation_func": "gelu", "gated_linear_unit": False}),
    ("opt", {}, {"gated_linear_unit": False, "activation_func": "relu"},
     {"activation_func": "gelu"}),
    ("nemotron", {}, {"gated_linear_unit": False, "activation_func": "squared_relu"},
     {"activation_func": "relu"}),
    ("mixtral", {}, {"swiglu": False, "glu_activation": "swiglu"}, {"glu_activation": "geglu"}),
    ("gpt2", {}, {"swiglu": False, "glu_activation": None}, {"glu_activation": "geglu"}),
    ("gpt_neox", {}, {"norm": "layernorm"}, {"norm": "scalenorm"}),
    # its config says SiLU, which transformers does not use there
    ("gpt_oss", {}, {"quick_geglu": True, "swiglu": False}, {"swiglu": True}),
    ("gpt_oss", {}, {"gated_linear_unit": True, "activation_func": "quick_gelu"},
     {"activation_func": "silu"}),
    ("gemma", {}, {"vocab_size": 120}, {"vocab_size": 200}),
    ("gemma", {}, {"vocab_size": -1}, {}),  # in Meta's params.json
    # None is the default, as far as Megatron is concerned: one by the root of the head's size
    ("granite", {"attention_multiplier": 0.25}, {"softmax_scale": None, "kv_channels": 16},
     {"kv_channels": 64}),
    ("gemma2", {"query_pre_attn_scalar": 64},
     {"softmax_scale": None, "query_pre_attn_scalar": 64, "kv_channels": 16},
     {"query_pre_attn_scalar": None}),
    ("granite", {"embedding_multiplier": 1.0, "logits_scaling": 1.0}, {"use_mup": False}, {}),
    ("granite", {"embedding_multiplier": 12.0}, {"mup_embedding_mult": 1.0}, {"use_mup": False}),
    ("granite", {"logits_scaling": 8.0}, {"mup_output_mult": 1.0}, {"use_mup": False}),
    # with sigmoids, Megatron divides by the sum of the chosen ones
    ("deepseek_v3", {"norm_topk_prob": False}, {},
     {"moe_router_score_function (sum of the chosen)": "sigmoid"}),
    ("glm4_moe", {"norm_topk_prob": True}, {"moe_router_score_function": "sigmoid"}, {}),
    ("llama4_text", {"attention_chunk_size": 16}, {"attention_chunk_size": 16},
     {"attention_chunk_size": 8}),
    ("gemma", {}, {"attention_chunk_size": None, "query_pre_attn_scalar": 16},
     {"attention_chunk_size": 8192, "query_pre_attn_scalar": 64}),
    ("gemma", {}, {"checkpoint_version": 2}, {"checkpoint_version": 1.0}),
    ("gemma", {}, {"pipeline_model_parallel_size": 2}, {"schedules_method": "dualpipev"}),
    ("mixtral", {}, {"moe_router_force_load_balancing": False, "moe_expert_capacity_factor": None},
     {"moe_router_force_load_balancing": True, "moe_expert_capacity_factor": 1.25}),
    ("gemma", {}, {"geglu": True, "swiglu": False}, {}),
    ("mixtral", {}, {}, {"geglu": True}),
    ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"]},
     {"interleaved_attn_pattern": (1, 1)}, {"interleaved_attn_pattern": (5, 1)}),
    ("gemma3_text", {}, {"rotary_base": (10000, 1000000), "rope_scaling_factor": 1.0},
     {"rotary_base (of windows, of others)": (10000, 500000),
      "rope_scaling_factor (linear)": 8.0}),
    ("gemma", {"rope_parameters": _LLAMA_3},
     {"rope_scaling_factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "old_context_len": 8192}, {"old_context_len": 4096, "rope_scaling_factor": 32.0}),
    ("gemma", {}, {}, {"old_context_len": 8192}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "more", "fits", "wrong"), OF_FAMILIES)
def test_facts_of_a_family_are_compared(family, more, fits, wrong):
    known = next_families if family in next_families.FAMILIES else families
    known = references if family in ("gpt_neox", "mixtral") else known
    config = known.config(family)
    assert config.model_type == family
    config.update(more)
    settings = read_config(config)
    dims = read_dims(settings.values)
    layout = layouts_of(dims.family)["mcore_te"]

    def compared(values: dict[str, Any]) -> tuple[str, ...]:
        return compare_facts(SourceFacts("file", "they", values), dims, settings, layout, None)

    assert compared({"num_layers": 2, **fits}) == ()
    noted = {fact.name for fact in FACTS if fact.noted}
    for name, value in wrong.items():
        if name in noted:
            notes = compared({"num_layers": 2, **fits, name.partition(" ")[0]: value})
            assert any(name in note for note in notes)
            continue
        with pytest.raises(errors.TensorMismatchError, match="they say"):
            compared({"num_layers": 2, **fits, name.partition(" ")[0]: value})


def test_latent_attention_that_turns_halves_goes_into_no_layout_that_turns_pairs(tmp_path):
    known = next_families if "deepseek_v3" in next_families.FAMILIES else families
    model = known.model("deepseek_v3")
    on_disk(model, tmp_path / "hub")
    halves = {**model.config.to_dict(), "rope_interleave": False}
    for layout in ("mcore_te", "torchtitan"):
        to = Parallel(layout=layout)
        import_hf(tmp_path / "hub", tmp_path / layout, to, config=model.config)
        convert(tmp_path / layout, tmp_path / f"{layout}.pt", to="torch")
        state = torch.load(tmp_path / f"{layout}.pt")
        torch.save({"model": state["model"]}, tmp_path / f"{layout}.pt")  # and no config
        export_hf(tmp_path / f"{layout}.pt", tmp_path / f"hf-{layout}", config=model.config)
        with pytest.raises(errors.UsageError, match="rope_interleave=False, but in layout"):
            export_hf(tmp_path / f"{layout}.pt", tmp_path / "no", config=halves)
        (tmp_path / "hub" / "config.json").write_text(json.dumps(halves))
        with pytest.raises(errors.UsageError, match="rope_interleave=False, but in layout"):
            import_hf(tmp_path / "hub", tmp_path / "no", to, config=halves)
        (tmp_path / "hub" / "config.json").write_text(json.dumps(model.config.to_dict()))


def test_a_factor_that_megatron_does_not_have_is_noted():
    settings = read_config(families.config("granite", residual_multiplier=0.22))
    dims = read_dims(settings.values)
    layout = layouts_of(dims.family)["mcore_te"]
    for more, noted in (({}, True), ({"residual_multiplier": 0.22}, False)):
        facts = SourceFacts("file", "they", {"tensor_model_parallel_size": 1, **more})
        notes = compare_facts(facts, dims, settings, layout, None)
        assert any("say nothing of residual_multiplier=0.22" in note for note in notes) == noted


def test_what_arguments_say_of_a_model_and_nobody_knows_is_noted(tmp_path, llama):
    """A run's own arguments, such as its optimizer's, are none of it. A fork's own name for a
    known fact comes before Megatron's default."""
    model, state = llama
    of_a_run = {
        "lr": 3e-4, "spec": ["local"], "attention_dropout": 0.1, "bias_swiglu_fusion": True,
        "encoder_num_layers": 2, "moe_aux_loss_coeff": 0.01, "seq_length": 4096, "bf16": True,
        "qk_clip": True, "mhc_num_residual_streams": 4, "attention_backend": "flash",
        "rope_theta": 500000.0, "rotary_base": 10000, "use_glm_rope": False,
    }  # fmt: skip
    bare = megatron(tmp_path / "old", cuts_of(state))
    for file in bare.rglob("model_optim_rng.pt"):
        old = torch.load(file, weights_only=False)
        torch.save({**old, "checkpoint_version": 1.0}, file)
    with pytest.raises(errors.TensorMismatchError, match=r"checkpoint_version=1\.0"):
        export_hf(bare, tmp_path / "no", config=model.config)
    unknown = {"scale_emb": 12, "share_kvstates": True, "spec": ["mine.layers", "layer_spec"]}
    for number, (more, noted) in enumerate([({}, False), (unknown, True)]):
        source = megatron(tmp_path / str(number), cuts_of(state), **{**of_a_run, **more})
        report = export_hf(source, tmp_path / f"hf-{number}", config=model.config)
        found = [note for note in report.notes if "which smckpt does not know" in note]
        assert len(found) == noted, report.notes
        assert not noted or all(name in found[0] for name in unknown)


@pytest.mark.parametrize(
    "said", [{"num_attention_heads": "8"}, {"moe_router_num_groups": "2"}, {"hidden_size": (64,)}]
)
def test_values_of_another_kind_are_refused_by_name(llama, said):
    settings = read_config(llama[0].config)
    dims = read_dims(settings.values)
    values = {"num_attention_heads": 8, "hidden_size": 64, **said}
    with pytest.raises(errors.TensorMismatchError, match="they (say|have a value).*"):
        compare_facts(
            SourceFacts("file", "they", values), dims, settings,
            layouts_of(dims.family)["mcore_te"], None,
        )  # fmt: skip


def test_every_fact_of_the_table_is_asked_for():
    asked = {*WRONG, *(name for *_, wrong in OF_FAMILIES for name in wrong)}
    tested_below = {
        "swiglu (SiLU)", "norm_epsilon", "rope_scaling_factor", "num_attention_heads",
        "moe_router_topk", "moe_ffn_hidden_size", "use_rope_scaling (bounds)", "use_mup",
        "mscale (of cosines)", "mscale_all_dim (of scores)", "yarn_mscale (of cosines)",
    }  # fmt: skip
    assert {fact.name for fact in FACTS} <= asked | tested_below


@pytest.mark.parametrize(
    ("fact", "value"), [("moe_router_topk", 1), ("moe_ffn_hidden_size", 320), ("num_experts", 4)]
)
def test_facts_of_experts_are_compared(tmp_path, fact, value):
    model = references.model("mixtral")
    state = on_disk(model, tmp_path / "own")
    cut = each_rank(lambda t, e: references.mcore(state, 2, t, local=True, sequential=True), 2)
    said = {"num_experts": 8, "moe_ffn_hidden_size": 160, "expert_tensor_parallel_size": None}
    good = megatron(tmp_path / "good", cut, **said)
    export_hf(good, tmp_path / "hf", config=model.config)
    assert_same(tmp_path / "hf", state)
    bad = megatron(tmp_path / "bad", cut, **{**said, fact: value})
    with pytest.raises(errors.TensorMismatchError, match=fact):
        export_hf(bad, tmp_path / "no", config=model.config)


def test_scaling_of_llama_3_is_compared(tmp_path, llama):
    _, state = llama
    scaling = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    }  # fmt: skip
    config = references.config("llama", rope_parameters=scaling)
    good = megatron(tmp_path / "good", cuts_of(state), use_rope_scaling=True)
    report = export_hf(good, tmp_path / "hf", config=config)
    assert any("(bounds)=(1, 4, 8192)" in note for note in report.notes)  # and it means 32
    plain, other = {"use_rope_scaling": False}, {"rope_scaling_factor": 32.0}
    for number, said in enumerate((plain, {"use_rope_scaling": True, **other})):
        bad = megatron(tmp_path / f"bad{number}", cuts_of(state), **said)
        with pytest.raises(errors.TensorMismatchError, match="rope_scaling"):
            export_hf(bad, tmp_path / "no", config=config)


def test_norms_that_the_file_says_are_stored_minus_one_are_whole_in_the_export(tmp_path, llama):
    model, state = llama

    def less(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.double() - 1).float() if "layernorm" in name else tensor

    source = megatron(tmp_path / "m", cuts_of(state, less), apply_layernorm_1p=True)
    report = export_hf(source, tmp_path / "hf", config=model.config)
    assert report.layout == "mcore_local_zero_centred"
    found = load_file(tmp_path / "hf" / "model.safetensors")
    for name, tensor in state.items():
        if "norm" in name:
            assert torch.allclose(found[name], tensor, rtol=0, atol=1e-7), name
        else:
            assert torch.equal(found[name], tensor), name
    with pytest.raises(errors.TensorMismatchError, match="apply_layernorm_1p=True"):
        export_hf(
            source, tmp_path / "no", config=model.config, parallel=Parallel(layout="mcore_local")
        )
    plain = megatron(tmp_path / "plain", cuts_of(state))
    with pytest.raises(errors.TensorMismatchError, match="apply_layernorm_1p=False"):
        export_hf(
            plain,
            tmp_path / "no",
            config=model.config,
            parallel=Parallel(layout="mcore_local_zero_centred"),
        )


@pytest.mark.parametrize("minus_one", [True, False])
def test_norms_minus_one_under_a_released_models_names_are_noted(tmp_path, llama, minus_one):
    model, state = llama
    args = argparse.Namespace(apply_layernorm_1p=minus_one, tensor_model_parallel_size=1)
    torch.save({"model": state, "args": args}, tmp_path / "model.pt")
    report = export_hf(tmp_path / "model.pt", tmp_path / "hf", config=model.config)
    assert any("norms were stored minus one" in note for note in report.notes) == minus_one


def test_another_epsilon_is_noted(tmp_path, llama):
    model, state = llama
    source = megatron(tmp_path / "m", cuts_of(state), norm_epsilon=1e-5)
    report = export_hf(source, tmp_path / "hf", config=model.config)
    assert any("norm_epsilon=1e-05" in note for note in report.notes)


def test_swapped_directories_are_refused_by_the_rank_that_is_in_the_files(tmp_path, llama):
    model, state = llama
    source = megatron(tmp_path / "m", cuts_of(state))
    step = source / "iter_0000010"
    (step / "mp_rank_00").rename(step / "x")
    (step / "mp_rank_01").rename(step / "mp_rank_00")
    (step / "x").rename(step / "mp_rank_01")
    with pytest.raises(errors.TopologyError, match="rank 1 wrote it") as caught:
        export_hf(source, tmp_path / "hf", config=model.config)
    assert "mp_rank_00" in str(caught.value)
    files = [step / f"mp_rank_{number:02d}" / "model_optim_rng.pt" for number in (1, 0)]
    for number, file in enumerate(files):  # without numbers in the names
        shutil.copy(file, tmp_path / "ab"[number])
    with pytest.raises(errors.TopologyError, match="rank 1 wrote it"):
        export_hf([tmp_path / "b", tmp_path / "a"], tmp_path / "hf", config=model.config)
    export_hf([tmp_path / "a", tmp_path / "b"], tmp_path / "hf", config=model.config)  # tp is told
    assert_same(tmp_path / "hf", state)


def test_files_of_a_converter_have_one_rank(tmp_path, llama):
    model, state = llama
    source = megatron(tmp_path / "m", cuts_of(state), rank=0)
    export_hf(source, tmp_path / "hf", config=model.config)
    assert_same(tmp_path / "hf", state)


def test_files_of_two_runs_are_refused(tmp_path, llama):
    model, state = llama
    source = megatron(tmp_path / "m", cuts_of(state), {}, {"rotary_base": 10000})
    with pytest.raises(errors.TopologyError, match="rotary_base"):
        export_hf(source, tmp_path / "hf", config=model.config)


NEMO = """\
mcore_gpt: true
micro_batch_size: 4
tensor_model_parallel_size: 1
num_layers: 2
hidden_size: 64
ffn_hidden_size: 160
num_attention_heads: 8
num_query_groups: 4
kv_channels: 16
normalization: rmsnorm
layernorm_epsilon: 1.0e-06
bias: false
activation: fast-swiglu
share_embeddings_and_output_weights: false
position_embedding_type: rope
rotary_percentage: 1.0
rotary_base: 500000.0
seq_len_interpolation_factor: null
tokenizer:
  library: sentencepiece
  num_layers: 17
optim:
  name: fused_adam
"""


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("num_attention_heads: 8", "num_attention_heads: 4", "num_attention_heads"),
        ("num_query_groups: 4", "num_query_groups: null", "num_query_groups"),
        ("fast-swiglu", "geglu", "swiglu"),
        ("normalization: rmsnorm", "normalization: 'layernorm1p'", "normalization"),
        ("weights: false", "weights: true", "untie_embeddings"),
        ("rotary_base: 500000.0", "rotary_base: 10000", "rotary_base"),
        ("rotary_percentage: 1.0", "rotary_percentage: 0.5", "rotary_percent"),
    ],
)
def test_nemos_yaml_is_compared(tmp_path, llama, old, new, named):
    model, state = llama
    folder = tmp_path / "nemo"
    folder.mkdir()
    torch.save(references.mcore(state, 1, 0), folder / "model_weights.ckpt")
    (folder / "model_config.yaml").write_text(NEMO)
    export_hf(folder, tmp_path / "hf", config=model.config)
    assert_same(tmp_path / "hf", state)
    assert old in NEMO
    (folder / "model_config.yaml").write_text(NEMO.replace(old, new))
    with pytest.raises(errors.TensorMismatchError, match=named) as caught:
        export_hf(folder, tmp_path / "no", config=model.config)
    assert "model_config.yaml" in str(caught.value)


NEMO_2 = """\
_target_: nemo.collections.llm.gpt.model.llama.LlamaModel
config:
  _target_: nemo.collections.llm.gpt.model.llama.Llama3Config
  activation_func: &id001
    _target_: torch.nn.functional.silu
    num_layers: 99
  gated_linear_unit: true
  hidden_size: 64
  num_attention_heads: 8
  num_layers: 2
  num_query_groups: 4
  kv_channels: null
  rotary_base: 500000
  layernorm_zero_centered_gamma: false
  normalization: RMSNorm
  rotary_interleaved: false
num_layers: 31
"""


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("groups: 4", "groups: 8", "num_query_groups"),
        ("num_layers: 2\n", "num_layers: 3\n", "num_layers"),
        ("interleaved: false", "interleaved: true", "rotary_interleaved"),
        ("kv_channels: null", "kv_channels: 8", "kv_channels"),
        ("torch.nn.functional.silu", "torch._C._nn.gelu", "swiglu"),
        ("kv_channels: null", "kv_channels: null", "kv_channels=8"),  # 64 / 8, as Megatron has it
        ("interleaved: false", "interleaved: false\n  rope_scaling: true", "use_rope_scaling=True"),
        (
            "interleaved: false",
            "interleaved: false\n  old_context_len: 8192\n  scale_factor: 8.0",
            "use_rope_scaling=True",
        ),
        ("rotary_base: 500000", "rotary_base:\n  - 1e4\n  - 1e6", r"rotary_base=\(10000.0, 1000"),
        ("rotary_base: 500000", "rotary_base: [10, 20]", r"rotary_base=\(10, 20\)"),
    ],
)  # fmt: skip
def test_nemos_context_is_compared(tmp_path, llama, old, new, named):
    model, state = llama
    weights = distributed(tmp_path / "nemo" / "weights", references.mcore(state, 1, 0))
    torch.save({"iteration": 7}, weights / "common.pt")
    (tmp_path / "nemo" / "context").mkdir()
    right = NEMO_2.replace("kv_channels: null", "kv_channels: 16")
    (tmp_path / "nemo" / "context" / "model.yaml").write_text(right)
    export_hf(tmp_path / "nemo", tmp_path / "hf", config=model.config)
    assert_same(tmp_path / "hf", state)
    wrong = NEMO_2.replace(old, new) if "null" in old else right.replace(old, new)
    (tmp_path / "nemo" / "context" / "model.yaml").write_text(wrong)
    with pytest.raises(errors.TensorMismatchError, match=named) as caught:
        export_hf(tmp_path / "nemo", tmp_path / "no", config=model.config)
    assert "context/model.yaml" in str(caught.value)


@pytest.mark.parametrize("nested", ["", "model:", "model: &id001"])
@pytest.mark.parametrize("kind", ["distributed", "ranks"])
def test_the_run_config_of_megatron_bridge_is_compared(tmp_path, llama, kind, nested):
    """It lies among the files of the iteration, and is the only one that says what the model is.
    nested: the values are in `transformer` of the model."""
    model, state = llama
    right = NEMO_2.replace("config:", "model:").replace("kv_channels: null", "kv_channels: 16")
    if nested:
        below = right.partition("model:")[2].partition("\nnum_layers")[0].replace("\n", "\n  ")
        right = f"{nested}\n  vocab_size: 96\n  transformer:{below}\ntrain:\n  num_layers: 99\n"

    def written(name: str, less: float, old: str = "", new: str = "") -> Path:
        cut = {n: (t.double() - less).float() if "norm" in n and n.endswith("weight") else t
               for n, t in references.mcore(state, 1, 0).items()}  # fmt: skip
        folder = tmp_path / name / "iter_0000010"
        if kind == "distributed":
            torch.save({"iteration": 10}, distributed(folder, cut) / "common.pt")
        else:
            (folder / "mp_rank_00").mkdir(parents=True)
            torch.save({"model": cut}, folder / "mp_rank_00" / "model_optim_rng.pt")
        assert old in right
        (folder / "run_config.yaml").write_text(right.replace(old, new) if old else right)
        return folder

    export_hf(written("plain", 0), tmp_path / "hf", config=model.config)
    assert_same(tmp_path / "hf", state)
    centred = written("centred", 1, "gamma: false", "gamma: true")
    report = export_hf(centred, tmp_path / "one", config=model.config)
    assert report.layout == "mcore_te_zero_centred"
    found = load_file(tmp_path / "one" / "model.safetensors")
    for name, tensor in state.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
    heads = written("heads", 0, "num_attention_heads: 8", "num_attention_heads: 4")
    with pytest.raises(errors.TensorMismatchError, match="num_attention_heads") as caught:
        export_hf(heads, tmp_path / "no", config=model.config)
    assert "run_config.yaml" in str(caught.value)


def test_a_line_of_blanks_costs_no_time(tmp_path: Path, llama: Any) -> None:
    """It took time by the square of its length: hours for a megabyte."""
    model, state = llama
    folder = tmp_path / "iter_0000010"
    torch.save({"iteration": 10}, distributed(folder, references.mcore(state, 1, 0)) / "common.pt")
    (folder / "run_config.yaml").write_text("model:\n  name: a" + " " * (1 << 20) + "b\n")
    with within(60):
        export_hf(folder, tmp_path / "hf", config=model.config)


def test_norms_of_transformer_engines_names_are_read_as_the_args_say(
    tmp_path: Path, llama: Any
) -> None:
    model, state = llama
    fused = references.te(state, 1, 0)
    norms = [n for n in fused if n.endswith(("layer_norm_weight", "model.norm.weight"))]
    assert norms
    less = {n: (t.double() - 1).float() if n in norms else t for n, t in fused.items()}
    said = argparse.Namespace(
        **{**LLAMA, "tensor_model_parallel_size": 1, "apply_layernorm_1p": True}
    )
    torch.save({"model": less, "args": said}, tmp_path / "m.pt")
    report = export_hf(tmp_path / "m.pt", tmp_path / "hf", config=model.config)
    assert report.layout == "te_split_zero_centred"
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.allclose(found[n], t, rtol=0, atol=1e-7) for n, t in state.items())
    with pytest.raises(errors.TensorMismatchError, match="apply_layernorm_1p=True"):
        export_hf(
            tmp_path / "m.pt", tmp_path / "no", config=model.config,
            parallel=Parallel(layout="te_split"),
        )  # fmt: skip


def test_layernorm1p_of_nemo_adds_one(tmp_path):
    model = references.model("gpt_neox")
    state = on_disk(model, tmp_path / "own")
    cut = references.mcore(state, 1, 0)
    less = {n: (t.double() - 1).float() if "norm" in n and n.endswith("weight") else t
            for n, t in cut.items()}  # fmt: skip
    (tmp_path / "nemo").mkdir()
    torch.save(less, tmp_path / "nemo" / "model_weights.ckpt")
    said = "normalization: layernorm1p\nbias: true\nnum_layers: 2\n"
    (tmp_path / "nemo" / "model_config.yaml").write_text(said)
    report = export_hf(tmp_path / "nemo", tmp_path / "hf", config=model.config)
    assert report.layout == "mcore_te_zero_centred"
    found = load_file(tmp_path / "hf" / "model.safetensors")
    for name, tensor in state.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-6), name


def distributed(folder: Path, state: State) -> Path:
    dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return folder


@pytest.mark.parametrize("fact", ["heads of another size", "rotary_interleaved", "swiglu"])
def test_the_common_values_of_a_distributed_checkpoint_are_compared(tmp_path, llama, fact):
    model, state = llama
    weights = distributed(tmp_path / "dist", references.mcore(state, 1, 0))
    for more in ({}, WRONG[fact]):
        args = argparse.Namespace(**{**LLAMA, "tensor_model_parallel_size": 2, **more})
        torch.save({"args": args, "iteration": 7}, weights / "common.pt")
        if not more:
            export_hf(weights, tmp_path / "hf", config=model.config)
            assert_same(tmp_path / "hf", state)
            continue
        with pytest.raises(errors.TensorMismatchError, match=next(iter(more))) as caught:
            export_hf(weights, tmp_path / "no", config=model.config)
        assert "common.pt" in str(caught.value)


@pytest.mark.parametrize("place", ["config", "hyper_parameters"])
@pytest.mark.parametrize("as_object", [True, False])
def test_a_config_of_transformers_in_the_file_is_compared(tmp_path, llama, place, as_object):
    model, state = llama
    other = references.config("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    for config, right in ((model.config, True), (other, False)):
        value = config if as_object else config.to_dict()
        beside = {"config": value} if place == "config" else {place: {"model_config": value}}
        torch.save({"state_dict": state, **beside}, tmp_path / "last.ckpt")
        if right:
            export_hf(tmp_path / "last.ckpt", tmp_path / "hf", config=model.config)
            assert_same(tmp_path / "hf", state)
            continue
        with pytest.raises(errors.TensorMismatchError, match=re.escape("num_attention_heads=4")):
            export_hf(tmp_path / "last.ckpt", tmp_path / "no", config=model.config)


def test_the_positions_of_bigscience_are_compared(tmp_path, llama, monkeypatch):
    """Their Megatron has a class of its own for them."""
    module = types.ModuleType("megatron.enums")
    kinds = enum.Enum("PositionEmbeddingType", {"rotary": 1, "absolute": 2, "alibi": 3},
                      module=module.__name__)  # fmt: skip
    module.PositionEmbeddingType = kinds
    monkeypatch.setitem(sys.modules, "megatron", types.ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    model, state = llama
    for number, kind in enumerate((kinds.rotary, kinds.absolute, kinds.alibi)):
        source = megatron(tmp_path / str(number), cuts_of(state), position_embedding_type=kind)
        if kind is kinds.rotary:
            export_hf(source, tmp_path / "hf", config=model.config)
            assert_same(tmp_path / "hf", state)
            continue
        with pytest.raises(errors.TensorMismatchError, match="position_embedding_type"):
            export_hf(source, tmp_path / "no", config=model.config)


def test_deepspeeds_number_of_ranks_is_compared(tmp_path, llama):
    model, state = llama
    for rank, cut in enumerate(cuts_of(state)):
        torch.save({"module": cut, "mp_world_size": 4},
                   tmp_path / f"mp_rank_{rank:02d}_model_states.pt")  # fmt: skip
    with pytest.raises(errors.TopologyError, match="tensor_model_parallel_size=4"):
        export_hf(tmp_path, tmp_path / "hf", config=model.config)
