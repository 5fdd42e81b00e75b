"""Sorts a PEFT model's tensors into the adapter's and the base's, and reads the adapter's config.

Names are PEFT's: `base_model.model.<module>.lora_A.<adapter>.weight` beside
`<module>.base_layer.weight`. Modules that are trained whole are under `modules_to_save`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Generic, TypeVar

from smckpt.checkpoint.records.sealed import read_json
from smckpt.errors import TensorMismatchError, UsageError
from smckpt.layout.mesh import Shape

ADAPTER_CONFIG = "adapter_config.json"
PREFIX = "base_model.model."

_LORA = re.compile(
    r"(?P<module>.*)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.(?P<rest>.*))?$"
)
_MAGNITUDE = re.compile(r"(?P<module>.*)\.lora_magnitude_vector(\.(?P<adapter>[^.]+)\.weight)?$")
_SAVED = re.compile(r"(?P<module>.*)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.*)$")
# the rows of an embedding that are trained alone (trainable_token_indices)
_TOKENS = re.compile(
    r"(?P<module>.*\.token_adapter)\.trainable_tokens_delta(\.(?P<adapter>[^.]+))?$"
)
# Options that change the sum of base and product, so they are not merged here.
_UNMERGED = ("lora_bias", "use_qalora", "use_bdlora", "layer_replication",
             "trainable_token_indices", "alora_invocation_tokens",
             "kasa_config", "velora_config", "monteclora_config")  # fmt: skip
# Ways to begin that take the adapter's first values out of the base's weights, and change these.
_OUT_OF_BASE = re.compile(r"pissa(_niter_\d+)?|olora|corda|loftq|lora_ga", re.IGNORECASE)
# All families of transformers with Conv1D, and the names that it has there.
_CONV1D_FAMILIES = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
_CONV1D = ("c_attn", "c_fc", "c_proj", "q_attn")
# PEFT wraps a module once for each of its parameters that has a pair, and for rows of its own.
_WRAPPED = re.compile(r"(\.token_adapter)?(\.base_layer)+(?=\.|$)")

T = TypeVar("T")


@dataclass
class PeftTensors(Generic[T]):
    """A PEFT model's tensors, sorted.

    pairs: module → (A, B); a module with several parameters that have a pair is there several
    times, with `.base_layer` behind its name. magnitudes: module → DoRA's vector. embeddings: the
    modules whose weights are embeddings. saved: tensors that the adapter saves whole, by the
    model's names; originals: what these were, where the state has it. base: the rest, by the
    model's names. adapter: names in the adapter's file → tensor.
    """

    pairs: dict[str, dict[str, T]] = field(default_factory=dict)
    magnitudes: dict[str, T] = field(default_factory=dict)
    embeddings: set[str] = field(default_factory=set)
    saved: dict[str, T] = field(default_factory=dict)
    originals: dict[str, T] = field(default_factory=dict)
    base: dict[str, T] = field(default_factory=dict)
    adapter: dict[str, T] = field(default_factory=dict)


def sort(tensors: Mapping[str, T], wanted: str | None = None) -> PeftTensors[T]:
    """Sort the tensors of a PEFT model.

    Args:
        wanted: the adapter's name; None: there is only one.

    Raises:
        UsageError: it is not a PEFT model with LoRA, has several adapters, or lacks the wanted one.
    """
    strange = [name for name in tensors if not name.startswith(PREFIX)]
    if strange or not any(".lora_" in name for name in tensors):
        raise UsageError(
            "lora= needs a PEFT model with LoRA, but the names are "
            f"{sorted(strange or tensors)[:3]} …",
            remedy="leave adapter= out, or pass prefix= the place of the PEFT model",
        )
    parts: PeftTensors[T] = PeftTensors()
    adapters: set[str] = set()
    others: dict[str, T] = {}
    others_names: set[str] = set()
    for full, tensor in tensors.items():
        name = full[len(PREFIX) :]
        if wanted is not None and (adapter := _adapter_of(name)) not in (None, wanted):
            others_names.add(str(adapter))
            continue
        pair, saved, magnitude = _LORA.match(name), _SAVED.match(name), _MAGNITUDE.match(name)
        if magnitude is not None:
            if magnitude["adapter"]:
                adapters.add(magnitude["adapter"])
            module = magnitude["module"]
            parts.magnitudes[module] = tensor
            parts.adapter[f"{PREFIX}{module}.lora_magnitude_vector"] = tensor
        elif pair is not None:
            _add_pair(parts, adapters, pair, tensor, full)
        elif saved is not None:
            adapters.add(saved["adapter"])
            short = f"{saved['module']}.{saved['rest']}"
            if short in parts.saved:
                raise UsageError(f"modules_to_save has {short} twice", remedy="use PEFT")
            parts.saved[short] = parts.adapter[PREFIX + short] = tensor
        elif (tokens := _TOKENS.match(name)) is not None:
            if tokens["adapter"]:
                adapters.add(tokens["adapter"])
            parts.adapter[f"{PREFIX}{tokens['module']}.trainable_tokens_delta"] = tensor
        elif ".lora_" in name:
            raise UsageError(
                f"{full} is of a kind of LoRA that is not exported",
                remedy="export it with PEFT itself",
            )
        else:
            others[name] = tensor
    if len(adapters) > 1:
        raise UsageError(
            f"the checkpoint has several adapters: {', '.join(sorted(adapters))}",
            remedy='pass lora_adapter= one of them, or with "merge" several',
        )
    if wanted is not None and wanted not in adapters:
        there = ", ".join(sorted(others_names)) or "one without a name"
        raise UsageError(
            f"the checkpoint has no adapter {wanted!r}, but {there}",
            remedy="pass lora_adapter= one of them, or leave it out",
        )
    # in an adapter's own state, which names no adapter, the other tensors are saved whole
    named = bool(adapters)
    for name, tensor in others.items():
        short = _WRAPPED.sub("", name).replace(".original_module.", ".")
        if named or short != name:
            parts.base[short] = tensor
        else:
            parts.saved[short] = parts.adapter[PREFIX + name] = tensor
    parts.originals = {name: parts.base[name] for name in parts.saved.keys() & parts.base.keys()}
    parts.base |= parts.saved
    return parts


def _adapter_of(name: str) -> str | None:
    """The adapter that a tensor names, if it names one."""
    for pattern in (_MAGNITUDE, _SAVED, _TOKENS):
        if found := pattern.match(name):
            return found["adapter"]
    pair = _LORA.match(name)
    return ((pair["rest"] or "").removesuffix("weight").strip(".") or None) if pair else None


def _add_pair(
    parts: PeftTensors[T], adapters: set[str], found: re.Match[str], tensor: T, full: str
) -> None:
    module, side, words = found["module"], found["side"], (found["rest"] or "").split(".")
    weight = [] if found["embedding"] else ["weight"]
    words = [w for w in words if w]
    if words[len(words) - len(weight) :] != weight or len(words) > len(weight) + 1:
        raise UsageError(
            f"{full} is of a kind of LoRA that is not exported", remedy="export it with PEFT itself"
        )
    if len(words) > len(weight):
        adapters.add(words[0])
    parts.pairs.setdefault(module, {})[side] = tensor
    if found["embedding"]:
        parts.embeddings.add(module)
    middle = f"lora_{found['embedding'] or ''}{side}"
    parts.adapter[".".join([PREFIX + module, middle, *weight])] = tensor


# -- the adapter's config --------------------------------------------------------------------------


@dataclass(frozen=True)
class LoraConfig:
    """adapter_config.json as plain values. model_type: the base's, if it is known."""

    values: dict[str, Any]
    model_type: str | None = None

    def check(self, pairs: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that every module has both LoRA matrices, with the rank that the config gives.

        Raises:
            TensorMismatchError: a module lacks one, or has another rank.
        """
        for module, sides in pairs.items():
            if set(sides) != {"A", "B"}:
                raise TensorMismatchError(
                    f"{module} has only {sorted(sides)} of the LoRA pair",
                    remedy="use a checkpoint of the whole adapter",
                )
            rank = self._of(module, "rank_pattern", "r")
            found = ((*sides["A"].shape, 0)[0], (*sides["B"].shape, 0, 0)[1])
            if found != (rank, rank) and not self._of_experts(module, *found):
                raise TensorMismatchError(
                    f"{module} has LoRA matrices of rank {found[0]} and {found[1]}; the config "
                    f"says {rank}",
                    remedy="pass lora_config= of this adapter",
                )

    def check_magnitudes(self, pairs: Iterable[str], magnitudes: Iterable[str]) -> None:
        """
        Raises:
            TensorMismatchError: some modules have DoRA's vector, and others or the config do not.
        """
        wanted = set(pairs) if self.values.get("use_dora") else set()
        if differ := sorted(wanted ^ set(magnitudes)):
            raise TensorMismatchError(
                f"the config has use_dora={bool(wanted)}, but not so the vectors of magnitudes "
                f"(lora_magnitude_vector) of {differ[:8]}",
                remedy="pass lora_config= of this adapter, and a checkpoint of the whole adapter",
            )

    def check_targets(
        self, pairs: Iterable[str], shapes: Mapping[str, Shape], saved: Iterable[str]
    ) -> None:
        """Compare what has a pair, and is saved whole instead, with lists of the config.

        Raises:
            TensorMismatchError: they differ.
        """
        matrices = {n for n, shape in shapes.items() if len(shape) == 2 and ".experts." not in n}
        modules = {n.removesuffix(".weight") for n in matrices - {*saved} if n.endswith(".weight")}
        whole = self.values.get("modules_to_save") or ()
        if lost := sorted(module for module in modules if _ends_with(module, whole)):
            raise TensorMismatchError(
                f"the config has modules_to_save={whole}, but the state has not {lost[:8]}",
                remedy="pass lora_config= of this adapter, and a checkpoint of the whole adapter",
            )
        named: Any = self.values.get("target_modules")
        without = self.values.get("exclude_modules") or []
        if self.values.get("target_parameters") or {type(named), type(without)} != {list}:
            return
        chosen = {m: m in named or self._is_in_layers(m) for m in modules}
        wanted = {m for m in modules if _ends_with(m, named) and not _ends_with(m, without)}
        wanted = {m for m in wanted if chosen[m] is not False}
        paired = modules & {_WRAPPED.sub("", module) for module in pairs}
        further_too = paired if self.values.get("ensure_weight_tying") else set()  # by ties
        if differ := sorted(m for m in (wanted | further_too) ^ paired if chosen[m] is not None):
            further = ("exclude_modules", "layers_to_transform", "layers_pattern")
            more = [f", {k}={v}" for k in further if (v := self.values.get(k)) is not None]
            raise TensorMismatchError(
                f"the config has target_modules={named}{''.join(more)}, but not so the LoRA "
                f"matrices of {differ[:8]}",
                remedy="pass lora_config= of this adapter, and a checkpoint of the whole adapter",
            )

    def _is_in_layers(self, module: str) -> bool | None:
        """Whether `layers_to_transform` has a module's layer; None: PEFT's releases differ."""
        layers, lists = map(self.values.get, ("layers_to_transform", "layers_pattern"))
        if layers is None or layers == []:
            return True
        numbers = [*map(str, layers if isinstance(layers, list) else [layers])]
        lists = [lists] if isinstance(lists, str) else lists or []
        if not all(isinstance(name, str) and re.fullmatch(r"[\w.]+", name) for name in lists):
            return None  # an expression
        words = module.split(".")
        # releases take the first or the last number, and only of a list that is in a module, or not
        found = [
            word in numbers
            for at, word in enumerate(words[:-1])
            if at and word.isdecimal() and (not lists or _ends_with(".".join(words[:at]), lists))
        ]
        if words[1:2] and words[1].isdecimal() and found:
            return None
        return found[0] if len(set(found)) == 1 else (None if found else False)

    def weights(
        self, pairs: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, Shape]
    ) -> dict[str, str]:
        """The weight that each pair changes: the weight's name → the module, a key of `pairs`.

        Args:
            shapes: of the model's tensors, by their names in memory.

        Raises:
            TensorMismatchError: the shapes do not tell which parameter of a module a pair is for.
        """
        beside: dict[str, list[str]] = {}
        for name in shapes:
            beside.setdefault(name.rpartition(".")[0], []).append(name)
        found: dict[str, str] = {}
        for module, sides in pairs.items():
            root = _WRAPPED.sub("", module)
            named = [n for n in beside.get(root, ()) if self.has_parameter(n)]
            weight = f"{root}.weight"
            if not named and module == root and weight in shapes:
                named = [weight]
            fit = [n for n in named if _fits(shapes[n], sides)] if len(named) > 1 else named
            if len(fit) > 1 or (len(named) > 1 and not fit) or not found.keys().isdisjoint(fit):
                raise TensorMismatchError(
                    f"the shapes of the LoRA pair of {module} do not tell for which of {named} it "
                    "is",
                    remedy="pass this adapter's own lora_config= and base, or merge it with PEFT",
                )
            found |= dict.fromkeys(fit, module)
        return found

    def has_parameter(self, name: str) -> bool:
        """Whether `target_parameters` names a parameter."""
        targets = self.values.get("target_parameters") or ()
        return any(name == target or name.endswith(f".{target}") for target in targets)

    def _of_experts(self, module: str, rows: int, columns: int) -> bool:
        """Whether a pair may be that of a parameter of experts, which has the rank once for each
        expert."""
        root = _WRAPPED.sub("", module)
        for target in self.values.get("target_parameters") or ():
            module_path, _, last = target.rpartition(".")
            if not module_path or root == module_path or root.endswith(f".{module_path}"):
                rank = self._of(f"{root}.{last}", "rank_pattern", "r")
                if rows == columns and rows % rank == 0:
                    return True
        return False

    def rank(self, module: str) -> int:
        return int(self._of(module, "rank_pattern", "r"))

    def scaling(self, module: str) -> float:
        alpha, rank = self._of(module, "alpha_pattern", "lora_alpha"), self.rank(module)
        return float(alpha / (math.sqrt(rank) if self.values.get("use_rslora") else rank))

    def transposes(self, module: str) -> bool | None:
        """Whether a module has its weight transposed, as Conv1D has; None: it is not known. PEFT
        finds it out for each; its config has one value for all: the last's, or somebody's."""
        named = _WRAPPED.sub("", module).rpartition(".")[2] in _CONV1D
        if self.model_type is not None:
            return named and self.model_type in _CONV1D_FAMILIES
        return (named or None) if self.values.get("fan_in_fan_out") else False

    def refuse_unmerged(self) -> None:
        """Raise UsageError if merging is more than adding the product."""
        if used := [key for key in _UNMERGED if self.values.get(key)]:
            raise UsageError(
                f"smckpt does not merge an adapter with {', '.join(used)}",
                remedy='export it with lora="adapter" and merge it with PEFT',
            )

    def refuse_other_base(self) -> None:
        """Raise UsageError if the adapter's start has changed the base. The released weights are
        then not those that the adapter was trained on."""
        start = self.values.get("init_lora_weights")
        if isinstance(start, str) and _OUT_OF_BASE.fullmatch(start):
            raise UsageError(
                f"init_lora_weights={start!r} changed the base's weights before the training, so "
                "the adapter does not belong to those of base=",
                remedy="leave base= out, if the checkpoint has the base; merge it with PEFT; or, "
                "if the directory has the changed weights, pass lora_config= with "
                "init_lora_weights=True",
            )

    def refuse_biases(self) -> None:
        """Raise UsageError if the base's biases are trained too. An adapter's file has no place for
        them."""
        if self.values.get("bias", "none") != "none":
            raise UsageError(
                f"the adapter trains biases of the base (bias={self.values['bias']!r})",
                remedy='export it with lora="merge", from a checkpoint that has the base',
            )

    def matching(self, module: str, patterns: str) -> list[Any]:
        """The values of all patterns that match a module; the first one counts."""
        found = (self.values.get(patterns) or {}).items()
        return [value for at, value in found if re.match(rf"(.*\.)?({at})$", module)]

    def _of(self, module: str, patterns: str, default: str) -> Any:
        return [*self.matching(module, patterns), self.values[default]][0]


def _ends_with(module: str, ends: Iterable[str]) -> bool:
    return f".{module}".endswith(tuple(f".{end}" for end in ends))


def _fits(shape: Shape, sides: Mapping[str, Any]) -> bool:
    """Whether a pair's product has the shape of a parameter, of experts or not."""
    experts = shape[0] if len(shape) == 3 else 1
    (rows, into), (out, columns) = sides["A"].shape, sides["B"].shape
    ends = [(out, into), (into, out)] if len(shape) == 3 else [(out, into)]
    return rows == columns and rows % experts == 0 and tuple(shape[-2:]) in ends


def read_lora_configs(source: Any, names: Sequence[str]) -> list[LoraConfig]:
    """The configs of the named adapters, or of the only one, from a directory, a JSON file, a dict,
    PEFT's object, or `model.peft_config`, which has one for each adapter.

    Raises:
        UsageError: it is none of these, not a LoRA config, or lacks that of one of several.
    """
    if len(names) > 1:
        if isinstance(source, (str, os.PathLike)):
            # `save_pretrained` puts `default` at the top, another one in a folder of its name
            top = Path(os.fspath(source))
            config_of = {n: top / n / ADAPTER_CONFIG for n in names}
            if "default" in config_of and not config_of["default"].is_file():
                config_of["default"] = top / ADAPTER_CONFIG
            lost = [n for n in names if not config_of[n].is_file()]
        else:
            lost = [n for n in names if not isinstance(source, Mapping) or n not in source]
        if lost:
            raise UsageError(
                f"lora_config= has no config of the adapter {lost[0]!r}",
                remedy="pass model.peft_config, or the directory of save_pretrained, which has one "
                "for each",
            )
    return [read_lora_config(source, name) for name in names or (None,)]


def read_lora_config(source: Any, adapter: str | None = None) -> LoraConfig:
    """The config of one adapter; of this name, where there are several."""
    if source is None:
        raise UsageError(
            "lora= needs the adapter's config, because no tensor contains lora_alpha, but "
            "lora_config= was not given",
            remedy="pass lora_config= (a directory, an adapter_config.json, or model.peft_config)",
        )
    where: str | None = None
    if isinstance(source, (str, os.PathLike)):
        path = Path(os.fspath(source))
        inside = path.is_dir()
        if adapter is not None and (path / adapter / ADAPTER_CONFIG).exists():
            path = path / adapter
        path = path / ADAPTER_CONFIG if inside else path
        where = str(path)
        try:
            source = read_json(path, given=not inside)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"cannot read the adapter's config: {error}",
                remedy=f"pass a directory with {ADAPTER_CONFIG}, or that file",
                path=where,
            ) from error
    if isinstance(source, Mapping) and adapter in source and "peft_type" not in source:
        source = source[adapter]
    if isinstance(source, Mapping) and "peft_type" not in source and len(source) == 1:
        (source,) = source.values()  # model.peft_config: by the adapter's name
    if hasattr(source, "to_dict"):
        source = source.to_dict()
    values = _plain(source) if isinstance(source, Mapping) else {}
    if (kind := values.get("peft_type")) not in (None, "LORA"):
        raise UsageError(
            f"the adapter is of PEFT's kind {kind}, and smckpt exports LoRA alone",
            remedy="load it with PEFT, and save it from there (save_pretrained, or "
            "merge_and_unload)",
            path=where,
        )
    if kind is None or not {"r", "lora_alpha"} <= values.keys():
        raise UsageError(
            "lora_config= is not the config of a LoRA adapter: it lacks peft_type, r or lora_alpha",
            remedy="pass the adapter's own config",
            path=where,
        )
    for name, patterns in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        of = values.get(patterns) or {}
        numbers = [values[name], *(of.values() if isinstance(of, Mapping) else [None])]
        if not all(_is_number(n) and (name != "r" or n == int(n) > 0) for n in numbers):
            raise UsageError(
                f"{name} or {patterns} of the adapter's config is no number that fits: "
                f"{values[name]!r}, {str(of)[:80]}",
                remedy="pass the adapter's own config",
                path=where,
            )
        for pattern in of:
            if not _is_bounded(pattern):
                raise UsageError(
                    f"{patterns} of the adapter's config has {pattern[:80]!r}, which is no "
                    "expression, or could take for ever to match a name",
                    remedy="name the modules, or write it without repeated groups and with at most "
                    "two of * and +",
                    path=where,
                )
    return LoraConfig({**values, "inference_mode": True})


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_bounded(pattern: str) -> bool:
    """Whether it is an expression that matches a name in a bounded number of steps."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    bare = re.sub(r"\\.", "", pattern)
    return not re.search(r"\)[*+{]", bare) and len(re.findall(r"[*+{]", bare)) <= 2


def _plain(value: Any) -> Any:
    """As PEFT writes it: sets as lists, enumerations as their values."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain, value))
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return [_plain(v) for v in value]
    return value
