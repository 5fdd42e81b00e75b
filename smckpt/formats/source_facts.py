"""What a source says of the model that it holds, and of its own layout.

Two models may have tensors of the same names and shapes and compute different things: 4 key/value
heads of 16 rows, or 2 of 32. What the trainer's own arguments say is compared with the config,
used, or refused by name (`translate/facts.py`); docs/layouts.md has it in words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from smckpt.errors import CheckpointError
from smckpt.formats.names import CONFIG
from smckpt.formats.pickled import Inert
from smckpt.formats.source_files import Folder
from smckpt.layout.entries import Path

# The degrees, by Megatron's names.
TP, PP, EP, ETP, VPP = (
    f"{kind}_parallel_size"
    for kind in (
        "tensor_model", "pipeline_model", "expert_model", "expert_tensor", "virtual_pipeline_model",
    )
)  # fmt: skip
ZERO_CENTRED_NORMS = "apply_layernorm_1p"
# Megatron's names of what GPT-NeoX, Megatron-DeepSpeed, NeMo and Megatron-core's own config call
# otherwise.
_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "rotary_pct": "rotary_percent", "rotary_percentage": "rotary_percent",
        "rotary_emb_base": "rotary_base", "model_parallel_size": TP, "pipe_parallel_size": PP,
        "num_key_value_heads": "num_query_groups", "num_kv_heads": "num_query_groups",
        "num_moe_experts": "num_experts",
        "layernorm_epsilon": "norm_epsilon", "layernorm_zero_centered_gamma": ZERO_CENTRED_NORMS,
        "bias": "add_bias_linear", "qkv_bias": "add_qkv_bias",
        "scale_positional_embedding": "use_rope_scaling",
        "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
        # of transformers, and of Meta's and Mistral's params.json
        "num_hidden_layers": "num_layers", "intermediate_size": "ffn_hidden_size",
        "head_dim": "kv_channels", "num_experts_per_tok": "moe_router_topk",
        "rms_norm_eps": "norm_epsilon", "rope_theta": "rotary_base", "dim": "hidden_size",
        "n_layers": "num_layers", "n_heads": "num_attention_heads",
        "n_kv_heads": "num_query_groups", "hidden_dim": "ffn_hidden_size",
        "norm_eps": "norm_epsilon", "use_scaled_rope": "use_rope_scaling",
        # of NeMo 2 and of Megatron Bridge
        "rope_scaling": "use_rope_scaling", "scale_factor": "rope_scaling_factor",
        "nope_layer_interval": "no_rope_freq",
        # of MindSpeed-LLM
        "multi_head_latent_attention": "multi_latent_attention", "qk_nope_head_dim": "qk_head_dim",
        "qk_rope_head_dim": "qk_pos_emb_head_dim", "moe_intermediate_size": "moe_ffn_hidden_size",
        "routed_scaling_factor": "moe_router_topk_scaling_factor",
        "n_group": "moe_router_num_groups", "topk_group": "moe_router_group_topk",
        "partial_rotary_factor": "rotary_percent", "use_glm_rope": "rotary_interleaved",
        "output_logit_softcapping": "final_logit_softcapping",
        "input_embeds_norm": "apply_embedding_scaling", "add_rmsnorm_offset": ZERO_CENTRED_NORMS,
    }
)  # fmt: skip
# Of NeMo 1 and 2, and of Megatron Bridge: the section of the model in each.
_YAML_SECTIONS: Mapping[str, str] = MappingProxyType(
    {"model_config.yaml": "", "context/model.yaml": "config", "run_config.yaml": "model"}
)
_YAML = 16 << 20  # bytes
_LONGEST = 1024  # entries of a list that is read
_PARAMS = "params.json"
_CONFIGS = ("config", "model_config", "hf_config")  # the names of a config beside a model
_BESIDE = {(name,) for name in (*_CONFIGS, "args", "hyper_parameters")}
_DEEPEST = 8
_POSITIONS = MappingProxyType({1: "rope", 2: "learned_absolute", 3: "alibi"})
_HEADS = {"num_attention_heads", "n_head"}
_SIZES = {"num_layers", "hidden_size", "num_attention_heads"}
_PLAIN: TypeAlias = "str | int | float | bool | tuple[int | float, ...] | None"


@dataclass(frozen=True)
class SourceFacts:
    """Plain values by Megatron's names. where: the file; of: what in it says so, in the plural.
    config: the config of transformers that lies beside the model."""

    where: str
    of: str
    values: Mapping[str, _PLAIN]
    config: Mapping[str, Any] | None = None

    def degree(self, name: str) -> int | None:
        found = self.values.get(name)
        return found if type(found) is int and found > 0 else None


# -- where they come from --------------------------------------------------------------------------


def facts_of_state(root: Any, where: str) -> tuple[SourceFacts, ...]:
    """What the state in a file says, if it says anything: Megatron's `args`, those of GPT-NeoX and
    Megatron-DeepSpeed, the model's config in NeMo's `hyper_parameters`, or Lightning's own."""
    if not isinstance(root, Mapping):
        return ()
    parameters = root.get("hyper_parameters")
    parameters = parameters if isinstance(parameters, Mapping) else {}
    config = _config_in({**parameters, **root})
    for of, found in (
        ("the arguments of Megatron in the file", _plain_of(root.get("args"))),
        ("NeMo's hyper_parameters in the file", _plain_of(parameters.get("cfg"))),
    ):
        if TP in found:
            if isinstance(version := root.get("checkpoint_version"), (int, float)):
                found["checkpoint_version"] = min(version, 2)  # before it, qkv had other orders
            return (SourceFacts(where, of, found, config),)
    if (found := _aliased(parameters)).keys() >= _SIZES:
        flat = parameters if "num_hidden_layers" in parameters else None  # by transformers' names
        flat = None if flat is None else {str(key): value for key, value in flat.items()}
        return (SourceFacts(where, "the hyper_parameters in the file", found, config or flat),)
    if type(ranks := root.get("mp_world_size")) is int:  # DeepSpeed's
        return (SourceFacts(where, "the values of DeepSpeed in the file", {TP: ranks}, config),)
    return () if config is None else (SourceFacts(where, "the values in the file", {}, config),)


def facts_of_values(
    values: Mapping[Path, Callable[[], Any]], where: str
) -> tuple[SourceFacts, ...]:
    """As `facts_of_state`, of the values beside the tensors of a checkpoint. values: path in the
    state → what reads it."""
    root: dict[Any, Any] = {}
    for path, read in values.items():
        if path[:1] in _BESIDE and len(path) <= _DEEPEST:
            inner = root
            for key in path[:-1]:
                inner = below if isinstance(below := inner.setdefault(key, {}), dict) else {}
            with suppress(CheckpointError):  # of a class that is not plain
                inner[path[-1]] = read()
    return facts_of_state(root, where)


def config_beside(folder: Folder) -> tuple[SourceFacts, ...]:
    """What config.json of transformers', or params.json of Meta's and Mistral's, says in the
    directory of a source."""
    found = []
    for name in (CONFIG, _PARAMS):
        if (record := folder.files.get(name)) is None or record.nbytes > _YAML:
            continue
        with suppress(ValueError, RecursionError):  # it is no model's
            values = json.loads(folder.source.read(record))
            where = f"{folder.url.rstrip('/')}/{name}"
            if (config := _config_in({"config": values})) is not None:
                found.append(SourceFacts(where, f"the values in {name}", {}, config))
            elif isinstance(values, dict) and (plain := _params(values)).keys() >= _SIZES:
                found.append(SourceFacts(where, f"the values in {name}", plain))
    return tuple(found)


def _config_in(root: Mapping[Any, Any]) -> Mapping[str, Any] | None:
    """The config of transformers that lies beside a model: as a dict, or as an object."""
    for name in _CONFIGS:
        found = root.get(name)
        if isinstance(found, Inert) and str(found.of).startswith("transformers."):
            found = found.state
        elif not isinstance(found, Mapping) or not isinstance(found.get("model_type"), str):
            continue
        if isinstance(found, Mapping) and _HEADS & text_values(found).keys():
            return {str(key): value for key, value in found.items()}
    return None


def _params(values: Mapping[str, Any]) -> dict[str, _PLAIN]:
    """What Meta's and Mistral's file says; of experts, in a section of their own."""
    experts = values.get("moe")
    return _aliased({**(experts if isinstance(experts, Mapping) else {}), **values})


def text_values(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config says of its language model."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, Mapping) else config


def yaml_beside(folder: Folder) -> tuple[SourceFacts, ...]:
    """What the file of the model that NeMo or Megatron Bridge writes in a directory or archive
    says."""
    for path, section in _YAML_SECTIONS.items():
        above = path.rpartition("/")[0]
        if above and above not in folder.folders:
            continue
        if (record := folder.find(path)) is not None and record.nbytes <= _YAML:
            text = folder.source.read(record).decode(errors="replace")
            found = _facts_of_yaml(text, f"{folder.url.rstrip('/')}/{path}", section)
            return () if found is None else (found,)
    return ()


def _facts_of_yaml(text: str, where: str, section: str) -> SourceFacts | None:
    """What a section says, or the top without a name. Only plain values are read, by their
    lines. A model of Bridge's may have its own values in `transformer` below the section."""
    found: dict[str, _PLAIN] = {}
    # The indents of what stands below the section's name, and below `transformer` in it; "" before
    # the first line of it.
    inside: str | None = None
    deeper: str | None = None
    opened = ""  # what stands above this line
    for line in text.splitlines():
        match = re.fullmatch(r"( *)([A-Za-z_]\w*):(?:\s+(.*))?", line.rstrip())
        if match is None:
            item = re.fullmatch(r" *- ([\d.e+-]+)", line.rstrip())
            above = found.get(opened, ())
            if item is not None and opened and isinstance(above, tuple) and len(above) < _LONGEST:
                found[opened] = (*above, _scalar(item[1]))  # type: ignore[arg-type]
            continue
        indent, name, value = match.groups()
        opens = not value or value[0] in "&!"  # an anchor or a class, and what follows
        if not indent:
            inside, deeper = "" if opens and name == section else None, None
        elif inside == "":
            inside = indent
        elif deeper == "" and len(indent) > len(inside or ""):
            deeper = indent
        if section and indent == inside:
            deeper = "" if opens and name == "transformer" else None
        here = indent in (inside, deeper) if section else not indent
        if here:
            opened = name if opens else ""
        elif name == "_target_" and value and opened == "activation_func":
            found[opened] = str(_scalar(value)).rpartition(".")[2]
        if here and value and not value.startswith(("&", "*", "!", "{", "|", ">")):
            found[name] = _scalar(value)
    known = _aliased(found)
    return SourceFacts(where, f"the lines of {where.rpartition('/')[2]}", known) if known else None


def _scalar(text: str) -> _PLAIN:
    text = text.split(" #")[0].strip()
    if text[:1] == "[" and text[-1:] == "]":
        return tuple(_scalar(one) for one in text[1:-1].split(",") if one.strip())  # type: ignore[misc]
    if text[:1] in "'\"" and text[-1:] == text[:1] and len(text) > 1:
        return text[1:-1]
    words: dict[str, _PLAIN] = {"true": True, "false": False, "null": None, "~": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _plain_of(found: Any) -> dict[str, _PLAIN]:
    values = found.state if isinstance(found, Inert) else found
    return _aliased(values) if isinstance(values, Mapping) else {}


def _aliased(values: Mapping[Any, Any]) -> dict[str, _PLAIN]:
    """Plain values by Megatron's names. A fork's own name for one comes before Megatron's, which
    may be there with its default, unless the fork's is not set."""
    out: dict[str, _PLAIN] = {}
    for name, value in values.items():
        if isinstance(value, Inert) and str(value.of).endswith("PositionEmbeddingType"):
            number = value.args[0] if len(value.args) == 1 else None  # BigScience's enum
            value = _POSITIONS.get(number) if type(number) is int else None
        if isinstance(value, (list, tuple)) and value and all(isinstance(v, str) for v in value):
            value = " ".join(value)
        elif isinstance(value, (list, tuple)):
            value = tuple(one for one in value if isinstance(one, (int, float)))
        if isinstance(name, str) and isinstance(value, (str, int, float, bool, tuple, type(None))):
            own = _ALIASES.get(name, name)
            if own == name:
                out.setdefault(name, value)
            elif value not in (None, False) or own not in values:
                out[own] = value
    if out.get("multi_query") is True and not out.get("new_decoder_architecture"):
        out["num_query_groups"] = 1  # Falcon's, whatever number of groups it has beside that
    if str(out.get("normalization")).lower().endswith("1p"):  # NeMo's word for both
        out[ZERO_CENTRED_NORMS] = True
    return out
