"""Compares the tensors of an export with the model that its config describes.

Tensors that are exactly those of a built-in family's table fit, because tests compare these tables
with transformers. Other tensors are compared with a model on the meta device. That model also gives
the names in released checkpoints. If torch and transformers are not loaded yet, a child process
builds the model, so that the export itself needs little memory. The child needs seconds to import
them. Meanwhile an export may begin under the names that it has, which those in released checkpoints
mostly are, and begin again if they are not.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from smckpt.decoding import decode
from smckpt.errors import CheckpointError, KeysMismatchError, few
from smckpt.formats.names import places_of_models, prefix_remedy
from smckpt.formats.tensors import TensorKey
from smckpt.layout.mesh import Shape
from smckpt.translate.files import Target, is_quantized
from smckpt.translate.models.meta_model import Fit, compare, main
from smckpt.translate.models.model import HEADED, hub_side
from smckpt.translate.prediction import DROP
from smckpt.translate.tables.dims import read_dims
from smckpt.translate.tables.families import is_built_in
from smckpt.translate.tables.hub import find_ties
from smckpt.translate.tables.pieces import tensors_of

_LIMIT = 600  # seconds that the child may take; hundreds of layers of experts take tens of seconds
_ABSENT = "transformers is not installed"
_CHILD = (  # `python -c` would first look in the current directory
    "import sys; sys.path = [entry for entry in sys.path if entry]; "
    f"from {main.__module__} import main; main()"
)


class OtherNamesError(CheckpointError):
    """An export began under the names that it has, and those in released checkpoints differ."""


class Comparison:
    """Compares names and shapes with the model of `config`. It starts to compare when it is made.

    `names` waits for the released names. `tell` passes the tensors that will be written. `check`
    raises if they are known not to fit. `finish` waits for the result. With `strict` False nothing
    is raised.

    guess: `names` does not wait. It takes the given names for the released ones, and `check` and
        `finish` raise OtherNamesError if they are not. After that, `names` knows.
    """

    def __init__(
        self, config: Mapping[str, Any] | None, *, strict: bool = True, guess: bool = False
    ) -> None:
        self._config = config
        self._strict = strict
        self._guess = guess
        self._guessed = False
        self._found: Fit | str | None = None
        self._child: _Child | None = None
        self._where = ""
        self._names: list[str] = []
        self._passed = False
        self._table: Mapping[str, Shape] | None = None
        self._says_how_quantized = config is None or bool(config.get("quantization_config"))
        if config is None:
            self._found = "no config was given"
        elif importlib.util.find_spec("transformers") is None:
            self._found = _ABSENT
        else:  # the config without quantization; `_tell` checks the tensors for it
            config = {k: v for k, v in config.items() if k != "quantization_config"}
            self._config = config
        if config is not None:
            kinds = config.get("architectures") or ()
            if is_built_in(str(config["model_type"])) and all(k.endswith(HEADED) for k in kinds):
                with contextlib.suppress(CheckpointError):  # then only transformers' model decides
                    side = hub_side(read_dims(config))
                    self._table = {key.name: shape for key, shape in side.shapes.items()}
            if self._table is None and self._found is None:
                self._begin(config)

    def names(
        self, targets: Sequence[Target], where: str, *, memory: bool = False
    ) -> Fit | str | None:
        """How the tensors of a state dict fit the released model, and which of its tensors they
        make.

        Args:
            memory: the tensors may be those of a released model; tell how they are made from those
                in memory.

        Returns:
            None if they are those of a family's table; a text with the reason if it is not known.

        Raises:
            KeysMismatchError: they are not those of the config's model.
        """
        if not memory and self._table is not None:
            shapes = {target.name: target.shape for target in targets}
            tied = {tie.left_out for tie in find_ties(shapes)} - self._table.keys()
            if {name: s for name, s in shapes.items() if name not in tied} == self._table:
                self._passed = True
                return None
        self._tell(targets, where, memory)
        if self._guess and self._child is not None and self._found is None:
            self._guess, self._guessed = False, True
            return Fit("", ())
        self._wait()
        return self._found

    def further(self, shapes: Mapping[str, Shape], count: int, where: str) -> None:
        """Compare the tensors of `count` layers that predict further tokens with the family's
        table. What they share with the model may be missing.

        Raises:
            KeysMismatchError: they do not fit; the message lists the differences.
        """
        if not count or not self._strict or self._config is None:
            return
        dims = read_dims(self._config, where, predicting=count)
        side = hub_side(dims)
        wanted = {
            stored.name: side.shapes[TensorKey(stored.name, 0, 0)]
            for stored in tensors_of(side.layout, dims, 1)
            if stored.layer >= dims.layers
        }
        copies = {key.name for _, key in side.copies}
        lines = [f"{name} is missing" for name in wanted.keys() - shapes.keys() - copies]
        for name, shape in shapes.items():
            if wanted.get(name) != tuple(shape):
                other = f"has the shape {shape}, not {wanted[name]}" if name in wanted else ""
                lines.append(f"{name} {other or 'is unexpected'}")
        if lines:
            raise KeysMismatchError(
                f"these are not layers of a {dims.family.name} model that predict further tokens: "
                f"{'; '.join(sorted(lines)[:8])}",
                remedy=f"pass the model's own config, or mtp={DROP!r}",
                path=where,
            )

    def tell(self, targets: Sequence[Target], where: str) -> None:
        """Pass the tensors that will be written, unless `names` has passed them."""
        if not self._strict or self._passed:
            return
        if {target.name: target.shape for target in targets} != self._table:
            self._tell(targets, where)

    def unnamed_class(self, targets: Sequence[Target], where: str) -> tuple[str | None, str | None]:
        """The class whose tensors these are, where the config names none; this waits for it. And a
        note where it is not known.

        Raises:
            KeysMismatchError, OtherNamesError: as `check`.
        """
        if self._config is None or self._config.get("architectures"):
            return None, None
        if self._strict and self._found is None:
            self._tell(targets, where)
            self._wait()
        if isinstance(self._found, Fit) and self._found.kind and not self._found.lines:
            return self._found.kind, None
        return None, (
            "the config names no class in architectures, without which vLLM and llama.cpp do not "
            "load the model: pass a config that names the class"
        )

    def check(self) -> None:
        """
        Raises:
            KeysMismatchError: they do not fit; the message lists the differences.
            OtherNamesError: a guess was wrong.
        """
        if self._child is not None and self._found is None:
            self._found = self._child.answer
        if self._found is None:
            return
        guessed, self._guessed = self._guessed, False
        if not self._strict or not isinstance(self._found, Fit) or not self._found.lines:
            if guessed and (isinstance(self._found, str) or self._found.hub is not None):
                raise OtherNamesError(
                    "released checkpoints have other names", remedy="begin again", path=self._where
                )
            return
        raise KeysMismatchError(_differing(self._found), remedy=self._remedy, path=self._where)

    def finish(self) -> str | None:
        """
        Returns:
            Why they could not be compared, or None.

        Raises:
            KeysMismatchError: as `check`.
        """
        if not self._passed:
            return None
        self._wait()
        if isinstance(self._found, Fit) and self._found.lines:
            return (
                f"{_differing(self._found)}. from_pretrained would fill what is missing with "
                f"random numbers. What to do: {self._remedy}"
            )
        if not self._strict or not isinstance(self._found, str) or self._found == _ABSENT:
            return None
        return f"names and shapes were not compared: {self._found}"

    @property
    def _remedy(self) -> str:
        """What to do if the names are not the model's."""
        if any(places_of_models(self._names)):
            return prefix_remedy(self._names)
        return (
            "pass the model's own config; or the state of that model alone, under the names that "
            "its own state_dict() gives"
        )

    def close(self) -> None:
        if self._child is not None:
            self._child.close()

    def _tell(self, targets: Sequence[Target], where: str, memory: bool = False) -> None:
        self._where, self._passed = where, True
        self._names = [target.name for target in targets]
        if self._found is None and any(map(is_quantized, targets)):
            self._found = "the weights are quantized"
            if not self._says_how_quantized:
                self._found += (
                    ", and the config has no quantization_config, without which transformers and "
                    "servers do not load them: pass the config= that says how they were"
                )
        if self._found is not None or self._config is None:
            return
        shapes = {target.name: tuple(target.shape) for target in targets}
        self._begin(self._config)
        if self._child is not None:
            self._child.tell(shapes, memory)
        else:
            self._found = compare(self._config, shapes, memory)

    def _begin(self, config: Mapping[str, Any]) -> None:
        if self._child is None and not {"torch", "transformers"} <= sys.modules.keys():
            self._child = _Child(config)

    def _wait(self) -> None:
        if self._child is not None and self._passed:
            self._child.wait()
        self.check()


def _differing(found: Fit) -> str:
    lines = few(found.lines, between="; ")
    return f"this is not the {found.kind} that the config describes: {lines}"


class _Child:
    """A process that imports torch and transformers, builds the model, and then compares."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.answer: Fit | str | None = None
        self._process: subprocess.Popen[str] | None = None
        # It gets this process's import path.
        path = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        path |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._errors = os.fdopen(os.memfd_create("smckpt"), "w+")  # closed by `close`
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
                env={**os.environ, **path},
            )  # fmt: skip
        except OSError as error:
            self.answer = f"no child process: {error}"
            return
        self._send(json.dumps(config))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def tell(self, shapes: Mapping[str, Shape], memory: bool) -> None:
        self._send(json.dumps([shapes, memory]))

    def wait(self) -> None:
        if self._process is None:
            return
        self._reader.join(_LIMIT)
        if self.answer is None:
            self.answer = f"transformers took more than {_LIMIT} s"

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()  # has no effect if the child has ended
            self._process.wait()
            self._reader.join()
            assert self._process.stdin is not None and self._process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.stdout.close()
        self._errors.close()

    def _send(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # the child has died; its output says why
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        lines = self._process.stdout.read().splitlines()
        if self._process.wait() == 0 and lines:
            answer = json.loads(lines[-1])
            self.answer = answer if isinstance(answer, str) else decode(Fit, answer, newer=True)
            return
        self._errors.seek(0)
        errors = self._errors.read().strip().splitlines() or ["no reason"]
        self.answer = f"transformers failed: {errors[-1]}"
