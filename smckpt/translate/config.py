"""config.json and the files beside it, with the keys of both transformers 4 and 5."""

from __future__ import annotations

import copy
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smckpt.checkpoint.strict_json import read_json
from smckpt.errors import UsageError
from smckpt.storage.urls import is_plain_name
from smckpt.translate.families import find_family

__all__ = [
    "CONFIG",
    "GENERATION_CONFIG",
    "TEMPLATES",
    "ModelConfig",
    "code_files",
    "is_beside_config",
    "is_of_tokenizer",
    "read_config",
    "tokenizer_files",
]

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"

# Files that tokenizers and processors save beside a model.
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
)
_TOKENIZER_ENDINGS = (".model", ".spm", ".tiktoken")
TEMPLATES = "additional_chat_templates"  # a directory of *.jinja
# Files whose `auto_map` names classes in Python files beside them.
_WITH_CODE = (CONFIG, "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
_IMPORTED = re.compile(r"^\s*(?:from\s+\.(\w+)\s+import|import\s+\.(\w+))", re.MULTILINE)
# Models of which transformers 5 takes one set of rotary parameters for each type of layer only.
_BY_LAYER = ("gemma3", "olmo3")
# Generation settings that a model's config may carry and `generate` needs.
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


@dataclass(frozen=True)
class ModelConfig:
    """A model's config as plain values; `directory` where it was read from one."""

    values: dict[str, Any]
    directory: Path | None

    @property
    def ties_embeddings(self) -> bool | None:
        """The value of `tie_word_embeddings`; where it is not set, the family's default. None: the
        family has no table, or no default."""
        for values in (self.values, *_nested(self.values)):
            if "tie_word_embeddings" in values:
                return bool(values["tie_word_embeddings"])
        family = find_family(self.values["model_type"])
        default = None if family is None else family.defaults.get("tie_word_embeddings")
        return None if default is None else bool(default)

    def complete(self, dtype: str | None) -> dict[str, Any]:
        """The config to write: both generations' keys, and `dtype` of the weights that are written.

        Without the older keys, transformers 4 silently uses a theta of 10,000.

        Raises:
            UsageError: the two generations' keys contradict each other.
        """
        out = copy.deepcopy(self.values)
        for values in (out, *_nested(out)):
            _complete_rope(values)
            _complete_experts(values)
            if dtype is not None and (
                values is out or "dtype" in values or "torch_dtype" in values
            ):
                values["dtype"] = values["torch_dtype"] = dtype
        return out

    def generation(self) -> dict[str, Any] | None:
        """A generation_config.json with the config's token ids; None if it has none."""
        ids = {key: self.values[key] for key in _TOKEN_IDS if self.values.get(key) is not None}
        return {"_from_model_config": True, **ids} if ids else None


def read_config(source: Any) -> ModelConfig | None:
    """A config from a directory, a JSON file, a dict, or an object with `to_dict`.

    Raises:
        UsageError: it is none of these, is not a JSON object, or does not name its `model_type`.
    """
    if source is None:
        return None
    directory: Path | None = None
    where: str | None = None
    if isinstance(source, (str, os.PathLike)):
        path = Path(os.fspath(source))
        if path.is_dir():
            directory, path = path, path / CONFIG
        where = str(path)
        values = _read_json(path, given=directory is None)
    elif isinstance(source, dict):
        values = copy.deepcopy(source)
    elif hasattr(source, "to_dict"):
        values = source.to_dict()
    elif hasattr(source, "to_json_string"):
        values = json.loads(source.to_json_string())
    else:
        raise UsageError(
            f"config= is a {type(source).__name__}",
            remedy="pass a directory, a JSON file, a dict, or a transformers config",
        )
    if not isinstance(values, dict) or not values.get("model_type"):
        raise UsageError(
            "the config has no model_type, so from_pretrained could not tell the model",
            remedy="pass the model's own config (model.config)",
            path=where,
        )
    named = values.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise UsageError(
            f"the config has architectures={named!r}, which is not a list of names",
            remedy="pass the model's own config (model.config)",
            path=where,
        )
    _check_json(values, where)
    return ModelConfig(values, directory)


def is_beside_config(name: str) -> bool:
    """Whether a file of this name belongs to a model's config: of a tokenizer, or code."""
    return name in (CONFIG, GENERATION_CONFIG) or is_of_tokenizer(name) or name.endswith(".py")


def is_of_tokenizer(name: str) -> bool:
    """Whether a file of this name belongs to a tokenizer or processor."""
    return name in _TOKENIZER_FILES or name.endswith(_TOKENIZER_ENDINGS)


def tokenizer_files(directory: Path) -> list[Path]:
    """The files of a tokenizer or processor in `directory`, with its further chat templates."""
    names = {path.name for path in directory.glob("*") if path.suffix in _TOKENIZER_ENDINGS}
    found = [directory / name for name in sorted(names.union(_TOKENIZER_FILES))]
    return [
        path for path in (*found, *sorted(directory.glob(f"{TEMPLATES}/*.jinja"))) if path.is_file()
    ]


def code_files(directory: Path) -> list[Path]:
    """The Python files in `directory` that an `auto_map` there names, and those that they import
    from beside them. `trust_remote_code=True` runs them; an export copies them as they are. A name
    that leads out of `directory` is none of them."""
    found: dict[str, Path] = {}
    wanted = [name for file in _WITH_CODE for name in _modules_of(directory / file)]
    while wanted:
        name = wanted.pop()
        path = directory / f"{name}.py"
        if name in found or not is_plain_name(name) or not _is_file(path):
            continue
        found[name] = path
        text = path.read_text(errors="replace")
        wanted += [a or b for a, b in _IMPORTED.findall(text)]
    return [found[name] for name in sorted(found)]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # its name is too long
        return False


def _modules_of(file: Path) -> list[str]:
    """The modules that the `auto_map` of a file names, except those in another repository."""
    try:
        said = read_json(file, given=False) if file.is_file() else {}
    except (OSError, ValueError):
        return []
    named = said.get("auto_map") if isinstance(said, dict) else None
    values = named.values() if isinstance(named, dict) else [named]
    each = [c for value in values for c in (value if isinstance(value, list) else [value])]
    return [c.split(".")[0] for c in each if isinstance(c, str) and "--" not in c]


def _read_json(path: Path, given: bool) -> Any:
    try:
        return read_json(path, given=given)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read the config: {error}",
            remedy="pass a directory that has a config.json, or that file",
            path=str(path),
        ) from error


def _check_json(values: dict[str, Any], where: str | None) -> None:
    try:
        json.dumps(values)
    except TypeError as error:
        raise UsageError(
            f"the config has a value that JSON cannot hold: {error}",
            remedy="pass config.to_dict(), or a dict of plain values",
            path=where,
        ) from error


def _nested(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The configs inside a config: `text_config`, `vision_config`, `decoder`, …"""
    return [v for v in values.values() if isinstance(v, dict) and "model_type" in v]


def _complete_rope(values: dict[str, Any]) -> None:
    new = values.get("rope_parameters")
    if isinstance(new, dict) and new:
        if any(isinstance(v, dict) for v in new.values()):
            _older_keys_by_layer(values, new)
        else:
            _older_keys(values, new)
    elif "rope_theta" in values or "rotary_emb_base" in values:
        _newer_keys(values)


def _older_keys(values: dict[str, Any], new: dict[str, Any]) -> None:
    scaling = {k: v for k, v in new.items() if k not in ("rope_theta", "partial_rotary_factor")}
    default = scaling in ({}, {"rope_type": "default"})
    if "rope_theta" in new:
        _agree(values, "rope_theta", new["rope_theta"])
        _agree_if_neox(values, "rotary_emb_base", new["rope_theta"])
    if "partial_rotary_factor" in new:
        _agree(values, "partial_rotary_factor", new["partial_rotary_factor"])
        _agree_if_neox(values, "rotary_pct", new["partial_rotary_factor"])
    values.setdefault("rope_scaling", None if default else scaling)


def _older_keys_by_layer(values: dict[str, Any], new: dict[str, Any]) -> None:
    """As in Gemma 3: one set of parameters for each type of attention layer."""
    full, sliding = new.get("full_attention"), new.get("sliding_attention")
    if isinstance(full, dict):
        _older_keys(values, full)
    if isinstance(sliding, dict) and "rope_theta" in sliding:
        _agree(values, "rope_local_base_freq", sliding["rope_theta"])


def _newer_keys(values: dict[str, Any]) -> None:
    scaling = values.get("rope_scaling") or {}
    new: dict[str, Any] = {"rope_type": scaling.get("type", "default"), **scaling}
    new.pop("type", None)
    new["rope_theta"] = values.get("rope_theta", values.get("rotary_emb_base"))
    partial = values.get("partial_rotary_factor", values.get("rotary_pct"))
    if partial is not None:
        new["partial_rotary_factor"] = partial
    local = "rope_local_base_freq" in values
    if local or str(values.get("model_type")).startswith(_BY_LAYER):
        new = {"full_attention": new}  # layers of the other type are never scaled
        if local or values["model_type"] == "olmo3":  # transformers has a default for Gemma
            theta = values["rope_local_base_freq" if local else "rope_theta"]
            new["sliding_attention"] = {"rope_type": "default", "rope_theta": theta}
    values["rope_parameters"] = new


def _complete_experts(values: dict[str, Any]) -> None:
    """Set both keys of Qwen's mixtures. Transformers 4 reads one of them (or takes its default),
    transformers 5 writes the other."""
    keys = ("num_experts", "num_local_experts")
    found = [values[key] for key in keys if values.get(key) is not None]
    for key in keys if found else ():
        _agree(values, key, found[0])


def _agree_if_neox(values: dict[str, Any], key: str, value: Any) -> None:
    if str(values.get("model_type", "")).startswith("gpt_neox"):
        _agree(values, key, value)


def _agree(values: dict[str, Any], key: str, value: Any) -> None:
    """Set `key`, or refuse if it has another value: the model would compute something else under
    the other version of transformers."""
    if values.get(key, value) not in (value, None):
        raise UsageError(
            f"the config says {key}={values[key]}, but {value} under the name of the other "
            "transformers version",
            remedy="give both the same value, or leave one of them out",
        )
    values[key] = value
