"""A GGUF file beside an export, made by llama.cpp's own converter: `convert_hf_to_gguf.py`.

The converter runs as a process of its own. Nothing of it is imported or rewritten here, so a family
and a type are known where it knows them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from smckpt.errors import UsageError
from smckpt.storage.disk.directory import Directory
from smckpt.storage.urls import is_local, local_path

__all__ = ["CONVERTER", "GgufConverter"]

CONVERTER = "SMCKPT_GGUF_CONVERTER"  # the variable
_SCRIPT = "convert_hf_to_gguf.py"
_TYPES = ("auto", "f32", "f16", "bf16", "q8_0", "tq1_0", "tq2_0")  # that it writes
_LINES = 12  # of the last that it prints
_UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class GgufConverter:
    """The command of the converter, and the type of file that it is to write."""

    command: tuple[str, ...]
    kind: str

    @staticmethod
    def find(kind: str, command: str | os.PathLike[str] | None, out_dir: str) -> GgufConverter:
        """
        Args:
            command: the script, or a command line that runs it; None: the variable
                SMCKPT_GGUF_CONVERTER, or else the script on PATH.

        Raises:
            UsageError: the type is unknown, there is no converter, or `out_dir` is in a store.
        """
        if kind not in _TYPES:
            raise UsageError(f"gguf={kind!r}", remedy=f"pass one of {', '.join(_TYPES)}")
        if not is_local(out_dir):
            raise UsageError(
                "llama.cpp's converter reads and writes disks only",
                remedy="export to a disk, and copy the GGUF file from there", path=out_dir,
            )  # fmt: skip
        given = command or os.environ.get(CONVERTER) or shutil.which(_SCRIPT)
        text = os.fspath(given or "")
        words = (text,) if os.path.isfile(text) else tuple(shlex.split(text))
        if len(words) == 1 and os.path.isfile(words[0]) and not os.access(words[0], os.X_OK):
            words = (sys.executable, *words)
        if not words or shutil.which(words[0]) is None:
            what = f"{text!r} cannot be run" if given else f"{_SCRIPT} is not here"
            raise UsageError(
                f"{what}, which makes GGUF files of a Hugging Face directory",
                remedy=f"get llama.cpp's source, install its requirements, and put {_SCRIPT} on "
                f"PATH, or into the variable {CONVERTER} (a path, or a command line)",
            )
        return GgufConverter(words, kind)

    def convert(self, directory: str) -> str:
        """Make the file of an export, which appears whole. Returns the path.

        Raises:
            UsageError: the converter failed; the message has the last lines that it wrote.
        """
        at = os.path.abspath(local_path(directory))
        name = f"model-{self.kind}.gguf"
        begun = os.path.join(at, f"{name}{_UNFINISHED}")
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        with tempfile.TemporaryFile() as output, Directory.open(at) as above:
            try:
                done = subprocess.run(
                    [*self.command, at, "--outfile", begun, "--outtype", self.kind],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    env=environment, check=False,
                )  # fmt: skip
                if done.returncode or above.status(os.path.basename(begun)) is None:
                    size = output.seek(0, os.SEEK_END)
                    output.seek(max(0, size - (64 << 10)))
                    lines = output.read().decode(errors="replace").splitlines()
                    lines = [line for line in lines if line.strip()][-_LINES:]
                    text = "; ".join(lines) or "it wrote nothing"
                    raise UsageError(
                        f"llama.cpp's converter ended with {done.returncode}: {text}",
                        remedy="the Hugging Face directory is whole: look at these lines, and run "
                        f"the converter on it again ({shlex.join(self.command)})",
                        path=at,
                    )
                above.rename(os.path.basename(begun), name)
                above.sync()
            finally:
                above.remove_all(os.path.basename(begun))
        return os.path.join(at, name)
