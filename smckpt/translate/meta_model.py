"""The names and shapes that transformers expects of a config: of a model on the meta device.

A `Comparison` holds what an export writes against them. Where torch and transformers are not loaded
yet, a child process builds the model, so that the export itself stays small; importing them takes
it seconds, in which the export goes on.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from smckpt.errors import KeysMismatchError
from smckpt.layout.mesh import Shape
from smckpt.translate.config import CONFIG

__all__ = ["Comparison", "compare"]

_LIMIT = 600  # seconds that the child may take; hundreds of layers of experts take tens
# Tried in this order where the config names no class.
_AUTO = (
    "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel",
    "AutoModelForSequenceClassification", "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering", "AutoModelForMaskedLM", "AutoModelForImageTextToText",
)  # fmt: skip


class Comparison:
    """Names and shapes against the model of `config`, under way as soon as it is made.

    `tell` says what they are, `check` raises if it is known that they do not fit, and `finish`
    waits until that is known.
    """

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        self._config = config
        self._found: tuple[str, list[str]] | str | None = None
        self._child: _Child | None = None
        self._where = ""
        if config is None or importlib.util.find_spec("transformers") is None:
            self._config = None
        elif config.get("quantization_config"):
            self._config, self._found = None, "the config is of a quantized model"
        elif not {"torch", "transformers"} <= sys.modules.keys():
            self._child = _Child(config)

    def tell(self, shapes: Mapping[str, Shape], where: str) -> None:
        self._where = where
        if self._child is not None:
            self._child.tell(shapes)
        elif self._config is not None:
            self._found = compare(self._config, shapes)

    def check(self) -> None:
        """
        Raises:
            KeysMismatchError: they do not fit; lists what differs.
        """
        if self._child is not None and self._found is None:
            self._found = self._child.answer
        if self._found is None or isinstance(self._found, str):
            return
        kind, lines = self._found
        if lines:
            more = f" and {len(lines) - 8} more" if len(lines) > 8 else ""
            raise KeysMismatchError(
                f"this is not the {kind} that the config describes: {'; '.join(lines[:8])}{more}",
                remedy="pass the model's own config; against_model=False leaves this check out",
                path=self._where,
            )

    def finish(self) -> str | None:
        """
        Returns:
            Why they could not be compared; None when they fit.

        Raises:
            KeysMismatchError: as `check`.
        """
        if self._child is not None:
            self._child.wait()
        self.check()
        found = self._found
        return f"names and shapes were not compared: {found}" if isinstance(found, str) else None

    def close(self) -> None:
        if self._child is not None:
            self._child.close()


def compare(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> tuple[str, list[str]] | str:
    """The class that the config means, and what differs from it; of several, the nearest. A text
    where transformers knows none."""
    return _nearest(_models(config), shapes)


def _nearest(
    models: Iterable[Any | str], shapes: Mapping[str, Shape]
) -> tuple[str, list[str]] | str:
    problem = ""
    nearest: tuple[str, list[str]] | None = None
    for made in models:
        if isinstance(made, str):
            problem = made
            continue
        lines = _differences(made, shapes)
        if nearest is None or len(lines) < len(nearest[1]):
            nearest = type(made).__name__, lines
        if not lines:
            break
    return nearest or problem


def _models(config: Mapping[str, Any]) -> Iterator[Any | str]:
    """The models that a config may mean, or why there is none."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, CONFIG).write_text(json.dumps(config))
        try:
            known = transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # whatever a config's class raises on what it does not know
            yield f"transformers does not read the config: {_first_line(error)}"
            return
    wanted = config.get("architectures") or ()
    yield f"transformers knows no class {', '.join(wanted)}"
    for name in wanted or _AUTO:
        kind = getattr(transformers, name, None)
        if kind is None:
            continue
        try:
            yield _on_meta(kind, known)
        except Exception as error:  # not one for this config, or code that meta tensors break
            yield f"{name}: {_first_line(error)}"


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


class _Child:
    """A process that imports torch and transformers, builds the model, and then compares."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.answer: tuple[str, list[str]] | str | None = None
        self._process: subprocess.Popen[str] | None = None
        # It finds modules where this process does, and not first in the directory that this one
        # happens to be in, as `python -c` would.
        path = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        path |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `close`
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
                env={**os.environ, **path}, cwd=os.sep,
            )  # fmt: skip
        except OSError as error:
            self.answer = _first_line(error)
            return
        self._send(json.dumps(config))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def tell(self, shapes: Mapping[str, Shape]) -> None:
        self._send(json.dumps(shapes))

    def wait(self) -> None:
        if self._process is None:
            return
        self._reader.join(_LIMIT)
        if self.answer is None:
            self.answer = f"transformers took more than {_LIMIT} s"

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()  # nothing, if it has ended
            self._process.wait()
            self._reader.join()
            assert self._process.stdin is not None and self._process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.stdout.close()
        self._errors.close()

    def _send(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has died: its answer says why
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        lines = self._process.stdout.read().splitlines()
        if self._process.wait() == 0 and lines:
            self.answer = json.loads(lines[-1])
            return
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines() or ["no reason"]
        self.answer = f"transformers failed: {said[-1]}"


def main() -> None:
    """The child: config and then shapes come in, a line of JSON each; the answer goes out."""
    gc.disable()  # imports make no garbage, and looking for it is a tenth of their time
    models = _models(json.loads(sys.stdin.readline()))
    first = list(itertools.islice(models, 2))  # made while the shapes are not known yet
    shapes = json.loads(sys.stdin.readline())
    shapes = {name: tuple(shape) for name, shape in shapes.items()}
    print(json.dumps(_nearest(itertools.chain(first, models), shapes)), flush=True)
    os._exit(0)  # nothing is left to be done, and taking down torch takes time
