"""What a source says of its model, compared with the config and the layout (`fact_table.py`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from smckpt.errors import TensorMismatchError, TopologyError, UsageError, few
from smckpt.formats.degrees import Degrees
from smckpt.formats.source_facts import (
    EP,
    ETP,
    PP,
    TP,
    ZERO_CENTRED_NORMS,
    SourceFacts,
    text_values,
)
from smckpt.translate.config import ModelConfig, complete_rope
from smckpt.translate.fact_table import FACTS, Fact, MeantModel, equal_values
from smckpt.translate.tables.dims import Dims
from smckpt.translate.tables.families import find_family
from smckpt.translate.tables.table import NORMS, TensorLayout

_DECISIVE = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "tie_word_embeddings", "rope_theta", "hidden_act",
    "num_experts_per_tok", "partial_rotary_factor", "hidden_activation", "activation_function",
    "activation", "rotary_dim", "use_parallel_residual", "parallel_attn", "alibi", "no_rope_layers",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank", "n_group",
    "topk_group", "norm_topk_prob", "routed_scaling_factor", "scoring_func",
    "first_k_dense_replace", "moe_intermediate_size", "query_pre_attn_scalar",
    "attn_logit_softcapping", "final_logit_softcapping", "attention_multiplier",
    "embedding_multiplier", "logits_scaling",
    "residual_multiplier", "logit_scale", "rope_interleave", "linear_num_key_heads",
    "linear_num_value_heads", "layer_types", "swiglu_limit", "clip_qkv", "use_qk_norm",
    "topk_method", "rope_local_base_freq", "attention_chunk_size", "attn_temperature_tuning",
)  # fmt: skip
# what shapes do not show of a tower
_OF_TOWERS = tuple(
    f"vision_config.{key}"
    for key in (
        "num_heads", "num_attention_heads", "hidden_act", "spatial_merge_size", "window_size",
        "fullatt_block_indexes", "patch_size", "temporal_patch_size", "deepstack_visual_indexes",
        "image_size",
    )
)  # fmt: skip
_ON_OR_OFF = ("attn_temperature_tuning",)  # Llama 4's first configs have a number there
# what a run may change between two trainings of the same weights
_CHANGEABLE = (
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "sliding_window",
    "rope_type",
)
# what changes no number that a model computes, or is shown by shapes
_UNREAD = frozenset({
    "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version",
    "use_cache", "initializer_range", "pretraining_tp", "id2label", "label2id", "problem_type",
    "router_aux_loss_coef", "router_z_loss_coef", "router_jitter_noise", "quantization_config",
    "transformers_weights", "return_dict", "chunk_size_feed_forward", "text_config",
    "vision_config", "model_type", "rope_type", "rope_theta", "rope_scaling", "torchscript",
})  # fmt: skip
_UNREAD_ENDS = ("dropout", "pdrop", "dropout_rate", "_implementation")
_UNREAD_IDS = tuple(f"{kind}_token_id" for kind in ("bos", "eos", "pad", "sep", "decoder_start"))
_FLAT_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size")
_SHOWN = ("num_layers", "hidden_size", "ffn_hidden_size", "num_experts")
_OF_ONE_RUN = ("seed", "consumed_train_samples")  # all ranks have one, at each step


def compare_configs(facts: SourceFacts, settings: ModelConfig) -> tuple[str, ...]:
    """Notes on what differs, and what a run may have changed.

    Raises:
        TensorMismatchError: the config beside the model says something else than the caller's.
    """
    if facts.config is None:
        return ()
    own = {**text_values(facts.config), **_tower_values(facts.config)}
    # of a model with towers, the whole config says whether the embeddings are tied
    one, two = (
        {
            **_by_llamas_keys(values),
            **text_values(values),
            **_tower_values(values),
            **({_TIED: values[_TIED]} if _TIED in values else {}),
        }
        for values in (facts.config, settings.values)
    )
    family = find_family(str(own.get("model_type")))
    renamed = {} if family is None else family.keys
    notes = []
    # Of flat parameters, sizes that differ show that they are of another part of a module.
    beside, others = "config that lies beside the model has", False
    if "model_type" not in facts.config:
        beside = f"{facts.of.removeprefix('the ')} have"
        others = any(one.get(key, two.get(key)) != two.get(key) for key in _FLAT_SIZES)
    for key in (*_DECISIVE, *_OF_TOWERS, *_CHANGEABLE):
        a, b = one.get(key), two.get(key)
        if key in _ON_OR_OFF and None not in (a, b):
            a, b = bool(a), bool(b)
        # a value that is no number is refused by its name where it is used
        odd = type(a) is int and type(b) is not int
        stated = {key, renamed.get(key)} & own.keys() or key == "rope_type"
        if not stated or None in (a, b) or odd or equal_values(a, b):
            continue
        differs = f"the {beside} {key}={a!r}, but that of config= {b!r}"
        if key in _CHANGEABLE or others:
            notes.append(f"{differs}; the latter is written")
            continue
        raise TensorMismatchError(
            differs,
            remedy="pass the config= of this very model; if the one beside it is wrong, "
            "correct it there", path=facts.where,
        )  # fmt: skip
    further = [
        key
        for key in sorted(one.keys() & two.keys() & {*own, "rope_parameters"})
        for name in [key.rpartition(".")[2]]
        if key not in _DECISIVE + _OF_TOWERS + _CHANGEABLE
        and name not in _UNREAD
        and not name.startswith(("output_", "gradient_"))
        and not name.endswith(_UNREAD_ENDS)
        and name not in _UNREAD_IDS
        and _given(one[key]) != _given(two[key])
    ]
    if further:
        notes.append(
            f"config= differs from the config beside the model in {', '.join(further)}: the values "
            "of config= are written"
        )
    return tuple(notes)


def compare_facts(
    facts: SourceFacts,
    dims: Dims,
    settings: ModelConfig,
    layout: TensorLayout | None,
    rows: int | None,
) -> tuple[str, ...]:
    """Notes on what differs and changes no tensor.

    Args:
        layout: None: the tensors have the names of a released model.
        rows: how many rows of the vocabulary are stored, if the layout pads.

    Raises:
        TensorMismatchError: it says something else than the config; the message names both.
    """
    megatrons = layout is not None and layout.name.startswith("mcore_")
    model = MeantModel(dims, dims.family.config(settings.values), rows if megatrons else None)
    differ = [
        (fact, given, meant)
        for fact in FACTS
        for given, meant in [(_stated(fact, facts), fact.meant(model))]
        if given is not None and meant is not None and not equal_values(given, meant)
    ]
    # Shapes show these. Where they differ, something else than this model is meant.
    others = not megatrons and any(fact.name in _SHOWN for fact, _, _ in differ)
    notes = [
        f"{facts.of} say nothing of {key}={model.config[key]!r}, which Megatron-core does not "
        "have: the config is written as it is"
        for key in _UNKNOWN_TO_MEGATRON
        if megatrons and TP in facts.values and key not in facts.values
        and model.config.get(key) not in (None, False, 0, 1)
    ]  # fmt: skip
    notes += _unknown(facts) if megatrons and TP in facts.values else []
    shifted = facts.values.get(ZERO_CENTRED_NORMS) is True and not dims.family.zero_centred
    if layout is None and shifted:
        notes.append(
            f"{facts.of} say {ZERO_CENTRED_NORMS}=True, so norms were stored minus one; under a "
            "released model's names they are written as they are"
        )
    for fact, given, meant in differ:
        if fact.noted or others or not (megatrons or fact.anywhere):
            notes.append(
                f"{facts.of} say {fact.name}={given!r}, but the config means {meant!r}; the "
                "config is written as it is"
            )
            continue
        raise TensorMismatchError(
            f"{facts.of} say {fact.name}={given!r}, but the config means {meant!r} "
            f"({fact.key or fact.name}): names and shapes would not show what is wrong then",
            remedy="pass the config= of this very model"
            if fact.key else "export it from a checkpoint that was trained so, or convert it "
            "with the trainer's own tools",
            path=facts.where,
        )  # fmt: skip
    return tuple(notes)


# Words of what a model computes with, and of what a run does, or tensors show, beside it.
_OF_A_MODEL = re.compile(
    r"(?:^|_)(?:\w*norm|norms|ropes?|rotary|alibi|heads?|qkv?|kv|mla|attn|attention|embeds?|emb"
    r"|embeddings?|scale|scaling|multiplier|mup|soft\w+|mscale|factor|window|sliding|interleaved?"
    r"|router|routed|topk|experts?|moe|\w*g[el]lu|residual|logits?|bias|offset|layers?|share|groups?"
    r"|activation|freq|theta|hc|spec|sparse|tied?|kvstates)(?=_|$)"
)
_OF_A_RUN = re.compile(
    r"dropout|fus(?:ed|ion)|overlap|dtype|b?f?[fp]\d+|recompute|loss|lr|coeff|backend|dispatch|deepep"
    r"|hybrid|permute|capacity|graph|offload|init|comm|decay|_rate|_num_sms|parallel|pipeline|grad"
    r"|log|inference|^rl_|^grpo|ckpt|checkpoint|load|save|_iters?$|interval|^ds_|_steps?$|teacher"
    r"|freeze|(?<!q_)(?<!kv_)lora|drop|pad|gemm|deterministic|kernel|zero_|cpu|memory|seq|_path|tensorboard|adam"
    r"|optim|ddp|fsdp|^kd_|bert|ict_|dino|vision|retr|precision|rerun|data|eval|train|timing|cache"
    r"|prefix|upcycl|clip|decode|swap|rng|triton|flash|muon|min_|max_|ft_|mamba|mtp|^reset_|mask"
    r"|^add_position_embedding$|^clone_|^use_te_|layer_wise|^position_embedding|create_|_span_"
    r"|relative_attention|persist|stash|microbatch|full_layer_spec|layer_freq|linear_attention"
    r"|dsa_|index_|grouped|enable_expert_bias|shared_expert_gate|apply_query_key_layer_scaling|hbm"
    r"|tile|jitter|^mhc|^hc_|sampling|heterogeneous|num_layer_list|virtual|transformer_layer_spec|stage"
    r"|scattered|synchronize|_wd_|_process_group|cp_window|_repeat_|_probs$|_keys$|mla_(?:fa|mm)_"
    r"|gtp_|slice|skip_bias|replay|switch|encoder_num_layers|absorb|kitchen|num_position|dump_"
)
_READ = {fact.name for fact in FACTS} | {
    "gated_linear_unit", "quick_geglu", "geglu", "glu_activation", "group_query_attention", "norm",
    "share_embeddings_and_output_weights", "openai_gelu", "activation_func", "low_freq_factor",
    "high_freq_factor", "mscale", "mscale_all_dim", "yarn_mscale", "yarn_mscale_all_dim", "use_mup",
    "mup_base_hidden_size", "mup_base_head_dim", "mup_width_mult", "use_rotary_position_embeddings",
    "layernorm_epsilon", "rope_type", "experimental_attention_variant", ZERO_CENTRED_NORMS,
}  # fmt: skip


def _unknown(facts: SourceFacts) -> list[str]:
    """A note on arguments that speak of a model's parts, in trainers that smckpt does not know."""
    found = [
        f"{name}={value!r}"
        for name, value in facts.values.items()
        if _OF_A_MODEL.search(name) and not _OF_A_RUN.search(name) and name not in _READ
        and (value is True or value not in (None, 0, 1, "", "none", ()))
        and not (name == "spec" and str(value).startswith(("local", "megatron.")))
    ]  # fmt: skip
    what = f"{facts.of} say {few(found)}, which smckpt does not know"
    return [f"{what}: compare the export's logits with the trainer's"] if found else []


_UNKNOWN_TO_MEGATRON = ("residual_multiplier", "logit_scale", "clip_qkv", "attn_temperature_tuning")
_TIED = "tie_word_embeddings"
_TRAINED = ("mcore_", "te_")  # how the layouts of trainers that store such norms are called


def refuse_halves(settings: ModelConfig, layout: TensorLayout) -> None:
    """Raise UsageError for latent attention whose rows are turned as halves: Megatron-core and
    torchtitan turn rows side by side there, and would compute another model."""
    halves = text_values(settings.values).get("rope_interleave") is False
    if halves and layout.name.startswith(("mcore_", "torchtitan")):
        raise UsageError(
            f"the config says rope_interleave=False, but in layout={layout.name!r} latent "
            "attention turns rows side by side",
            remedy="put the rows of the rotary parts in the other order first, with "
            "rope_interleave=True in the config",
        )


def layout_of_facts(
    facts: SourceFacts, chosen: TensorLayout, zero_centred: bool, *, given: bool
) -> TensorLayout:
    """The layout with norms as the source says that they are stored. zero_centred: whether the
    family's are stored minus one everywhere. given: the caller named the layout.

    Raises:
        TensorMismatchError: it contradicts the caller's layout, or what the family is.
    """
    stored = facts.values.get(ZERO_CENTRED_NORMS)
    if not isinstance(stored, bool) or not chosen.name.startswith(_TRAINED):
        return chosen
    shifted = any(row.shift and NORMS.issuperset(row.roles) for row in chosen.rows)
    if zero_centred and not stored:
        raise TensorMismatchError(
            f"{facts.of} say {ZERO_CENTRED_NORMS}=False, but such a model's norms are stored minus "
            "one",
            remedy="pass the config= of this very model, or a layout of your own",
            path=facts.where,
        )
    if zero_centred or stored == shifted:
        return chosen
    if given:
        raise TensorMismatchError(
            f"{facts.of} say {ZERO_CENTRED_NORMS}={stored}, but in layout={chosen.name!r} norms "
            f"are stored {'minus one' if shifted else 'as they are'}",
            remedy="leave layout= out", path=facts.where,
        )  # fmt: skip
    return chosen.zero_centred()


def _tower_values(config: Mapping[str, Any]) -> dict[str, Any]:
    found = config.get("vision_config")
    return (
        {f"vision_config.{key}": value for key, value in found.items()}
        if isinstance(found, Mapping)
        else {}
    )


def _stated(fact: Fact, facts: SourceFacts) -> Any:
    """What a source says of a fact.

    Raises:
        TensorMismatchError: a value is of another kind than a trainer's.
    """
    try:
        return fact.given(facts.values)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise TensorMismatchError(
            f"{facts.of} have a value that none for {fact.name} can be made of: {error}",
            remedy="correct it there", path=facts.where,
        ) from error  # fmt: skip


def _given(value: Any) -> Any:
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def _by_llamas_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    family = find_family(str(config.get("model_type")))
    values = dict(config if family is None else family.config(config))
    with suppress(UsageError):  # it is refused where it is written
        complete_rope(values)
    rope = values.get("rope_parameters")
    return values | {"rope_type": rope.get("rope_type") if isinstance(rope, dict) else None}


def refuse_other_ranks(
    found: Sequence[tuple[str, SourceFacts | None]], degrees: Degrees, pp: int
) -> None:
    """
    Args:
        found: each rank's file and what it says, tensor-parallel ranks innermost and pipeline
            stages outermost.

    Raises:
        TopologyError: a file says that it is another rank's, of another run or of other degrees.
    """
    known = [(file, facts) for file, facts in found if facts is not None]
    if not known:
        return
    first = known[0]
    for file, facts in known:
        for name, have in ((TP, degrees.tp), (PP, pp), (EP, degrees.ep), (ETP, degrees.etp)):
            stated = facts.degree(name)
            if (
                stated is not None
                and stated != have
                and (name != ETP or degrees.ep > 1 or have > 1)
            ):
                raise TopologyError(
                    f"{facts.of} say {name}={stated}, but it is read with {have}",
                    remedy="pass the files of all ranks of the run, and tp=, pp=, ep= and etp= as "
                    "it was trained, or leave them out",
                    path=file,
                )
        of_both = [(fact.name, _stated(fact, first[1]), _stated(fact, facts)) for fact in FACTS]
        for name in _OF_ONE_RUN:
            of_both.append((name, first[1].values.get(name), facts.values.get(name)))
        for name, one, two in of_both:
            if one != two:
                raise TopologyError(
                    f"{facts.of} say {name}={two!r}, but those in {first[0]} {one!r}",
                    remedy="pass the files of one run and step", path=file,
                )  # fmt: skip
    _refuse_swapped(found, degrees)


def _refuse_swapped(found: Sequence[tuple[str, SourceFacts | None]], degrees: Degrees) -> None:
    """Compare each file's rank with its position. One number in all files is that of a converter,
    which wrote them alone."""
    ranks = [None if facts is None else facts.values.get("rank") for _, facts in found]
    if len(set(ranks)) == 1:
        return
    in_order = sorted(rank for rank in ranks if type(rank) is int)
    turns = {rank: at for at, rank in reversed([*enumerate(in_order)])}  # the first of equal ones
    for number, ((file, facts), rank) in enumerate(zip(found, ranks, strict=True)):
        if facts is None or type(rank) is not int:
            continue
        stage, inner = divmod(number, degrees.ranks)
        tp, column = inner % degrees.tp, inner // degrees.tp
        part, expert = degrees.of_expert(tp, column)
        # older versions count the ranks of context parallelism inside those of experts
        context = facts.degree("context_parallel_size") or 1
        experts = {rank // inside % degrees.ep for inside in (degrees.etp, degrees.etp * context)}
        wanted = {
            "tensor": (tp, {rank % degrees.tp}),
            "expert-tensor": (part, {rank % degrees.etp}),
            "expert": (expert, experts),
        }
        if len(in_order) == len(ranks):  # stages are outermost among the ranks that write
            wanted["pipeline"] = (stage, {turns[rank] // degrees.ranks})
        for kind, (have, stated) in wanted.items():
            if have not in stated:
                raise TopologyError(
                    f"{facts.of} say that rank {rank} wrote it, so {kind}-parallel rank "
                    f"{min(stated)}, but it is read as that of {have}",
                    remedy="give each rank's file its own name, or pass the files in the order of "
                    "ranks",
                    path=file,
                )
