"""The names and shapes that transformers expects of a config: of a model on the meta device.

`hold_against` compares them with what an export is about to write. Where torch and transformers
are not loaded yet, a child process builds the model, so that the export itself stays small.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from smckpt.errors import KeysMismatchError
from smckpt.layout.geometry import Shape
from smckpt.translate.config import CONFIG

__all__ = ["compare", "hold_against"]

_LIMIT = 600  # seconds that the child may take; hundreds of layers of experts take tens
# Tried in this order where the config names no class.
_AUTO = (
    "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel",
    "AutoModelForSequenceClassification", "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering", "AutoModelForMaskedLM", "AutoModelForImageTextToText",
)  # fmt: skip


def hold_against(config: Mapping[str, Any], shapes: Mapping[str, Shape], where: str) -> str | None:
    """Compare names and shapes with the model of `config`.

    Returns:
        Why they could not be compared; None when they fit.

    Raises:
        KeysMismatchError: they do not fit; lists what differs.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    if config.get("quantization_config"):
        return "names and shapes were not compared: the config is of a quantized model"
    both = {"torch", "transformers"} <= sys.modules.keys()
    found = (compare if both else _in_a_child)(config, shapes)
    if isinstance(found, str):
        return f"names and shapes were not compared: {found}"
    kind, lines = found
    if not lines:
        return None
    more = f" and {len(lines) - 8} more" if len(lines) > 8 else ""
    raise KeysMismatchError(
        f"this is not the {kind} that the config describes: {'; '.join(lines[:8])}{more}",
        remedy="pass the model's own config, or against_model=False to leave this check out",
        path=where,
    )


def compare(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> tuple[str, list[str]] | str:
    """The class that the config means, and what differs from it; of several, the nearest. A text
    where transformers knows none."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, CONFIG).write_text(json.dumps(config))
        try:
            known = transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # whatever a config's class raises on what it does not know
            return f"transformers does not read the config: {_first_line(error)}"
    wanted = config.get("architectures") or ()
    problem = f"transformers knows no class {', '.join(wanted)}"
    nearest: tuple[str, list[str]] | None = None
    for name in wanted or _AUTO:
        kind = getattr(transformers, name, None)
        if kind is None:
            continue
        try:
            made = _on_meta(kind, known)
        except Exception as error:  # not one for this config, or code that meta tensors break
            problem = f"{name}: {_first_line(error)}"
            continue
        lines = _differences(made, shapes)
        if nearest is None or len(lines) < len(nearest[1]):
            nearest = type(made).__name__, lines
        if not lines:
            break
    return nearest or problem


def _on_meta(kind: Any, config: Any) -> Any:
    import torch

    with torch.device("meta"):
        model = (getattr(kind, "_from_config", None) or kind.from_config)(config)
    model.tie_weights()
    return model


def _differences(model: Any, shapes: Mapping[str, Shape]) -> list[str]:
    """Against the nearer of the names on disk and those in memory, which load as well."""
    state = model.state_dict(keep_vars=True)
    variants = [state]
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4: in memory as on disk
        pass
    else:
        variants.insert(0, revert_weight_conversion(model, dict(model.state_dict())))
    shared: dict[int, set[str]] = {}
    for name, tensor in state.items():
        shared.setdefault(id(tensor), set()).add(name)
    groups = [group for group in shared.values() if len(group) > 1]
    return min((_of_names(model, names, shapes, groups) for names in variants), key=len)


def _of_names(
    model: Any, names: Mapping[str, Any], shapes: Mapping[str, Shape], groups: list[set[str]]
) -> list[str]:
    may_lack = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    may_have = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    lines = []
    for name, tensor in names.items():
        shape = tuple(tensor.shape)
        if name in shapes:
            if shape != tuple(shapes[name]):
                lines.append(f"{name} has the shape {shapes[name]}, not {shape}")
        elif not any(name in group and group & shapes.keys() for group in groups) and not _matches(
            may_lack, name
        ):
            lines.append(f"{name} is missing")
    strange = (n for n in shapes if n not in names and not _matches(may_have, n))
    return lines + [f"{name} is unexpected" for name in strange]


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


def _in_a_child(
    config: Mapping[str, Any], shapes: Mapping[str, Shape]
) -> tuple[str, list[str]] | str:
    command = [sys.executable, "-c", f"from {__name__} import main; main()"]
    # `python -c` finds modules where this process does
    path = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            command, input=json.dumps([config, shapes]), capture_output=True, text=True,
            timeout=_LIMIT, env={**os.environ, **path},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return _first_line(error)
    if done.returncode:
        return f"transformers failed: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}"
    found: tuple[str, list[str]] | str = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """The child: config and shapes come in as JSON, the differences go out as such."""
    config, shapes = json.load(sys.stdin)
    print(json.dumps(compare(config, {name: tuple(shape) for name, shape in shapes.items()})))
