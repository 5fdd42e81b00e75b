"""What a source says of the model that it holds, and of its own layout.

Two models may have tensors of the same names and shapes and compute different things: 4 key/value
heads of 16 rows, or 2 of 32. What the trainer's own arguments say is compared with the config,
used, or refused by name. `fact_table.py` has the table; docs/layouts.md has it in words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from smckpt.errors import CheckpointError, TensorMismatchError, TopologyError
from smckpt.layout.entries import Path
from smckpt.translate.config import CONFIG, ModelConfig
from smckpt.translate.fact_table import FACTS, MeantModel, equal_values
from smckpt.translate.pickled import Inert
from smckpt.translate.source_files import Folder
from smckpt.translate.tables.degrees import Degrees
from smckpt.translate.tables.dims import Dims
from smckpt.translate.tables.families import find_family
from smckpt.translate.tables.table import NORMS, TensorLayout

__all__ = [
    "EP",
    "ETP",
    "PP",
    "TP",
    "SourceFacts",
    "config_beside",
    "facts_of_state",
    "facts_of_values",
    "facts_of_yaml",
    "refuse_other_ranks",
    "yaml_beside",
]

# The degrees, by Megatron's names.
TP, PP, EP, ETP = (
    f"{kind}_parallel_size"
    for kind in ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
)
_ZERO_CENTRED = "apply_layernorm_1p"
# Megatron's names of what GPT-NeoX, Megatron-DeepSpeed, NeMo and Megatron-core's own config call
# otherwise.
_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "rotary_pct": "rotary_percent", "rotary_percentage": "rotary_percent",
        "rotary_emb_base": "rotary_base", "model_parallel_size": TP, "pipe_parallel_size": PP,
        "num_key_value_heads": "num_query_groups", "num_moe_experts": "num_experts",
        "layernorm_epsilon": "norm_epsilon", "layernorm_zero_centered_gamma": _ZERO_CENTRED,
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
    }
)  # fmt: skip
_NEMO_YAML = ("model_config.yaml", "context/model.yaml")  # of NeMo 1 and 2
_YAML = 16 << 20  # bytes
_PARAMS = "params.json"
_CONFIGS = ("config", "model_config", "hf_config")  # the names of a config beside a model
_BESIDE = {(name,) for name in (*_CONFIGS, "args", "hyper_parameters")}
_DEEPEST = 8
_DECISIVE = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "tie_word_embeddings", "rope_theta", "hidden_act",
    "num_experts_per_tok", "partial_rotary_factor",
)  # fmt: skip
_SIZES = {"num_layers", "hidden_size", "num_attention_heads"}
_SHOWN = ("num_layers", "hidden_size", "ffn_hidden_size", "num_experts")
_PLAIN: TypeAlias = "str | int | float | bool | tuple[int, ...] | None"


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

    def compare_config(self, settings: ModelConfig) -> None:
        """
        Raises:
            TensorMismatchError: the config beside the model says something else than the caller's.
        """
        if self.config is None:
            return
        own = _text_of(self.config)
        one, two = {**own, **_by_llamas_keys(self.config)}, _by_llamas_keys(settings.values)
        for key in _DECISIVE:
            a, b = one.get(key), two.get(key)
            # a value that is no number is refused by its name where it is used
            odd = type(a) is int and type(b) is not int
            if key not in own or None in (a, b) or odd or equal_values(a, b):
                continue
            raise TensorMismatchError(
                f"the config that lies beside the model has {key}={a!r}, but that of config= {b!r}",
                remedy="pass the config= of this very model; if the one beside it is wrong, "
                "correct it there", path=self.where,
            )  # fmt: skip

    def compare(
        self, dims: Dims, settings: ModelConfig, layout: TensorLayout | None, rows: int | None
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
            for given, meant in [(fact.given(self.values), fact.meant(model))]
            if given is not None and meant is not None and not equal_values(given, meant)
        ]
        # Shapes show these. Where they differ, something else than this model is meant.
        others = not megatrons and any(fact.name in _SHOWN for fact, _, _ in differ)
        notes = []
        for fact, given, meant in differ:
            if fact.noted or others or not (megatrons or fact.anywhere):
                notes.append(
                    f"{self.of} say {fact.name}={given!r}, but the config means {meant!r}; the "
                    "config is written as it is"
                )
                continue
            raise TensorMismatchError(
                f"{self.of} say {fact.name}={given!r}, but the config means {meant!r} "
                f"({fact.key or fact.name}): names and shapes would not show what is wrong then",
                remedy="pass the config= of this very model"
                if fact.key else "export it from a checkpoint that was trained so, or convert it "
                "with the trainer's own tools",
                path=self.where,
            )  # fmt: skip
        return tuple(notes)

    def layout(self, chosen: TensorLayout, zero_centred: bool, *, given: bool) -> TensorLayout:
        """The layout with norms as the source says that they are stored. zero_centred: whether the
        family's are stored minus one everywhere. given: the caller named the layout.

        Raises:
            TensorMismatchError: it contradicts the caller's layout, or what the family is.
        """
        stored = self.values.get(_ZERO_CENTRED)
        if not isinstance(stored, bool) or not chosen.name.startswith("mcore_"):
            return chosen
        shifted = any(row.shift and NORMS.issuperset(row.roles) for row in chosen.rows)
        if zero_centred and not stored:
            raise TensorMismatchError(
                f"{self.of} say {_ZERO_CENTRED}=False, but such a model's norms are stored minus "
                "one",
                remedy="pass the config= of this very model, or a layout of your own",
                path=self.where,
            )
        if zero_centred or stored == shifted:
            return chosen
        if given:
            raise TensorMismatchError(
                f"{self.of} say {_ZERO_CENTRED}={stored}, but in layout={chosen.name!r} norms are "
                f"stored {'minus one' if shifted else 'as they are'}",
                remedy="leave layout= out", path=self.where,
            )  # fmt: skip
        return chosen.zero_centred()


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
            return (SourceFacts(where, of, found, config),)
    if (found := _aliased(parameters)).keys() >= _SIZES:
        return (SourceFacts(where, "the hyper_parameters in the file", found, config),)
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
            elif isinstance(values, dict) and (plain := _aliased(values)).keys() >= _SIZES:
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
        if isinstance(found, Mapping) and "num_attention_heads" in _text_of(found):
            return {str(key): value for key, value in found.items()}
    return None


def _by_llamas_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    family = find_family(str(config.get("model_type")))
    return config if family is None else family.config(config)


def _text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config says of its language model."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, Mapping) else config


def yaml_beside(folder: Folder) -> tuple[SourceFacts, ...]:
    """What NeMo's file of the model, in a directory or archive of NeMo's, says."""
    for path in _NEMO_YAML:
        above = path.rpartition("/")[0]
        if above and above not in folder.folders:
            continue
        if (record := folder.find(path)) is not None and record.nbytes <= _YAML:
            text = folder.source.read(record).decode(errors="replace")
            found = facts_of_yaml(text, f"{folder.url.rstrip('/')}/{path}")
            return () if found is None else (found,)
    return ()


def facts_of_yaml(text: str, where: str) -> SourceFacts | None:
    """What NeMo's `model_config.yaml`, or the `config` in its `context/model.yaml`, says. Only
    plain values are read, by their lines."""
    found: dict[str, _PLAIN] = {}
    inside: str | None = None  # the indent of what stands below `config:`
    top = not re.search(r"^config:\s*$", text, re.MULTILINE)
    for line in text.splitlines():
        match = re.fullmatch(r"( *)([A-Za-z_]\w*):(?:\s+(.*?))?\s*", line)
        if match is None:
            continue
        indent, name, value = match.groups()
        if not indent:
            inside = None if name != "config" or value else ""
        elif inside == "":
            inside = indent
        here = top if not indent else indent == inside
        if here and value and not value.startswith(("&", "*", "!", "{", "[", "|", ">")):
            found[name] = _scalar(value)
    known = _aliased(found)
    return SourceFacts(where, f"the lines of {where.rpartition('/')[2]}", known) if known else None


def _scalar(text: str) -> _PLAIN:
    text = text.split(" #")[0].strip()
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
    """Plain values by Megatron's names."""
    out: dict[str, _PLAIN] = {}
    for name, value in values.items():
        if isinstance(value, (list, tuple)):
            value = tuple(one for one in value if isinstance(one, int))
        if isinstance(name, str) and isinstance(value, (str, int, float, bool, tuple, type(None))):
            out[_ALIASES.get(name, name)] = value
    if str(out.get("normalization")).lower().endswith("1p"):  # NeMo's word for both
        out[_ZERO_CENTRED] = True
    return out


# -- the ranks -------------------------------------------------------------------------------------


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
        for fact in FACTS:
            if (one := fact.given(first[1].values)) != (two := fact.given(facts.values)):
                raise TopologyError(
                    f"{facts.of} say {fact.name}={two!r}, but those in {first[0]} {one!r}",
                    remedy="pass the files of one run", path=file,
                )  # fmt: skip
    _refuse_swapped(found, degrees, pp)


def _refuse_swapped(
    found: Sequence[tuple[str, SourceFacts | None]], degrees: Degrees, pp: int
) -> None:
    """Compare each file's rank with its position. One number in all files is that of a converter,
    which wrote them alone."""
    ranks = [None if facts is None else facts.values.get("rank") for _, facts in found]
    if len(set(ranks)) == 1:
        return
    in_order = sorted(rank for rank in ranks if type(rank) is int)
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
            wanted["pipeline"] = (stage, {in_order.index(rank) // degrees.ranks})
        for kind, (have, stated) in wanted.items():
            if have not in stated:
                raise TopologyError(
                    f"{facts.of} say that rank {rank} wrote it, so {kind}-parallel rank "
                    f"{min(stated)}, but it is read as that of {have}",
                    remedy="give each rank's file its own name, or pass the files in the order of "
                    "ranks",
                    path=file,
                )
