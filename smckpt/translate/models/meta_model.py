"""The names and shapes that transformers expects of a config, from a model on the meta device.

`compare` needs torch and transformers. `main` is the child process that `comparison` starts where
they are not loaded.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from smckpt.formats.names import CONFIG
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Copy, Strided
from smckpt.translate.tables.hub import HubTensor

# Tried in this order if the config names no class.
_AUTO = (
    "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel",
    "AutoModelForSequenceClassification", "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering", "AutoModelForMaskedLM", "AutoModelForImageTextToText",
)  # fmt: skip
# Packages that transformers imports where it finds them, and that a model's names do not need.
_NOT_NEEDED = ("accelerate", "bitsandbytes", "deepspeed", "peft", "pandas", "scipy", "sklearn")


@dataclass(frozen=True)
class Fit:
    """How names and shapes fit a model.

    kind: its class. lines: the differences from its names in memory or on disk, whichever is
        nearer.
    hub: the tensors on disk, if the names are those in memory and differ from those on disk.
    memory: the shapes in memory, if they were asked for. Then `hub` has the tensors on disk if the
        names are those on disk, and differ from those in memory.
    ties: pairs of names in memory that are one tensor: the first is not on disk, and is made from
        the second.
    fp32: the dtypes that weights are loaded in → patterns of names in memory that `from_pretrained`
        then keeps in float32.
    """

    kind: str
    lines: tuple[str, ...]
    hub: tuple[HubTensor, ...] | None = None
    fp32: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    memory: Mapping[str, Shape] = field(default_factory=dict)
    ties: tuple[tuple[str, str], ...] = ()

    def keeps(self, name: str, dtype: str) -> bool:
        """Whether a tensor, by its name in memory, stays in float32 in a model of `dtype`."""
        return any(re.search(pattern, name) for pattern in self.fp32.get(dtype, ()))


def compare(
    config: Mapping[str, Any], shapes: Mapping[str, Shape], memory: bool = False
) -> Fit | str:
    """How names and shapes fit the class that the config means, or the nearest of several. A text
    if transformers knows none. `memory`: tell the shapes in memory too."""
    return _nearest(_models(config), shapes, memory)


def _nearest(models: Iterable[Any | str], shapes: Mapping[str, Shape], memory: bool) -> Fit | str:
    problem = ""
    nearest: Fit | None = None
    for made in models:
        if isinstance(made, str):
            problem = made
            continue
        found = _fit(made, shapes, memory)
        if nearest is None or len(found.lines) < len(nearest.lines):
            nearest = found
        if not found.lines:
            break
    return nearest or problem


def _models(config: Mapping[str, Any]) -> Iterator[Any | str]:
    """The models that a config may mean, or a text that says why there is none."""
    import transformers

    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            Path(folder, CONFIG).write_text(json.dumps(config))
            known = transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # a config's class may raise anything, and so may the directory
        yield f"transformers cannot read the config: {_first_line(error)}"
        return
    wanted = config.get("architectures") or ()
    yield f"transformers knows no class {', '.join(wanted)}"
    for name in wanted or _AUTO:
        kind = getattr(transformers, name, None)
        if kind is None:
            continue
        try:
            import torch

            with torch.device("meta"):
                model = (getattr(kind, "_from_config", None) or kind.from_config)(known)
            model.tie_weights()
            yield model
        except Exception as error:  # a wrong class, or code that fails on meta tensors
            yield f"{name}: {_first_line(error)}"


def hub_shapes(model: Any) -> dict[str, HubTensor] | None:
    """The tensors that `save_pretrained` would write, including tied copies, which it leaves out.
    None in transformers 4, whose models have the same names in memory and on disk."""
    try:
        from smckpt.translate.models.traced import names_on_disk
    except ImportError:
        return None
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return {tensor.name: tensor for tensor in names_on_disk(model, shapes)}


def _fit(model: Any, shapes: Mapping[str, Shape], tell_memory: bool) -> Fit:
    """Compare with the names on disk and with those in memory, and return the nearer fit."""
    # the model's attributes include those of its parts
    always, too = (
        [pattern.replace("*", ".*") for pattern in sorted(getattr(model, name, None) or ())]
        for name in ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules")
    )
    kind, fp32 = type(model).__name__, {"bfloat16": tuple(always), "float16": (*always, *too)}
    state = model.state_dict(keep_vars=True)
    memory = {name: tuple(tensor.shape) for name, tensor in state.items()}
    shared: dict[int, set[str]] = {}
    for name, tensor in state.items():
        shared.setdefault(id(tensor), set()).add(name)
    groups = [group for group in shared.values() if len(group) > 1]
    known = getattr(model, "all_tied_weights_keys", None)  # of transformers 5
    pairs = known.items() if isinstance(known, dict) else []
    ties = tuple(pairs) or tuple(p for group in groups for p in itertools.permutations(group, 2))
    asked = (memory, ties) if tell_memory else ({}, ())
    lines = _of_names(model, memory, shapes, groups)
    disk = hub_shapes(model)
    if disk is None or {name: tensor.shape for name, tensor in disk.items()} == memory:
        return Fit(kind, tuple(lines), None, fp32, *asked)
    named = {t.parts[0][0]: name for name, t in disk.items() if len(t.parts) == 1}
    groups = [{named.get(name, name) for name in group} for group in groups]
    wanted = {name: tensor.shape for name, tensor in disk.items()}
    others = _of_names(model, wanted, shapes, groups)
    if lines and others:
        made = _of_unloaded(model, memory, shapes, disk)
        if made and not _of_names(model, wanted, {t.name: t.shape for t in made}, groups):
            if tell_memory:  # by the names that it has
                made = tuple(replace(disk[t.name], name=t.parts[0][0]) for t in made)
            return Fit(kind, (), made, fp32, *asked)
    if len(others) <= len(lines):
        if tell_memory:
            return Fit(kind, tuple(others), tuple(disk.values()), fp32, *asked)
        return Fit(kind, tuple(others), None, fp32)
    if tell_memory:
        return Fit(kind, tuple(lines), None, fp32, *asked)
    held = {name for name in shapes if name in memory}
    if all(tuple(shapes[name]) == memory[name] for name in held):
        hub = [t for t in disk.values() if all(name in held for name, _ in t.parts)]
    else:
        from smckpt.translate.models.traced import names_on_disk

        hub = names_on_disk(model, {name: tuple(shapes[name]) for name in held})
    return Fit(kind, tuple(lines), tuple(hub), fp32)


def _of_unloaded(
    model: Any, memory: Mapping[str, Shape], shapes: Mapping[str, Shape],
    disk: Mapping[str, HubTensor],
) -> tuple[HubTensor, ...]:  # fmt: skip
    """The tensors on disk, made from those that `save_pretrained` writes of a model that was never
    loaded: without some prefixes of releases. None, if the shapes are not those."""
    from smckpt.translate.models.traced import names_on_disk

    written = names_on_disk(model, memory, released=False)
    known = {t.parts: t.name for t in written if tuple(shapes.get(t.name, ())) == t.shape}
    if shapes.keys() - known.values():
        return ()
    return tuple(
        HubTensor(tensor.name, tensor.shape, ((known[tensor.parts], Copy(whole, whole)),))
        for tensor in disk.values()
        for whole in [Strided.whole(tensor.shape)]
        if tensor.parts in known
    )


def _of_names(
    model: Any, names: Mapping[str, Shape], shapes: Mapping[str, Shape], groups: list[set[str]]
) -> list[str]:
    may_lack = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    may_have = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    lines = []
    for name, shape in names.items():
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


def main() -> None:
    """The child process: it reads the config and then the shapes, a line of JSON each, and writes
    the answer."""
    for package in _NOT_NEEDED:  # None: it counts as not installed
        sys.modules[package] = None  # type: ignore[assignment]
    gc.disable()  # imports make no garbage, and collecting it takes a tenth of their time
    models = _models(json.loads(sys.stdin.readline()))
    first = list(itertools.islice(models, 2))  # built before the shapes are known
    shapes, memory = json.loads(sys.stdin.readline())
    shapes = {name: tuple(shape) for name, shape in shapes.items()}
    found = _nearest(itertools.chain(first, models), shapes, memory)
    print(msgspec.json.encode(found).decode(), flush=True)
    os._exit(0)  # nothing is left to do, and an orderly shutdown of torch takes time
