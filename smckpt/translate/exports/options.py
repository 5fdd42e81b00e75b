"""What an export and an import take beside the model, its config and the ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from smckpt.errors import UsageError
from smckpt.translate.configs.prediction import DROP, check_mtp
from smckpt.translate.models.contents import HUB, MODULE
from smckpt.translate.tables.degrees import check_counts, check_flags

__all__ = ["ExportOptions", "ImportOptions", "WriteOptions"]

_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@dataclass(frozen=True)
class WriteOptions:
    """What options of an export and of an import share. Their docstrings say what each means."""

    overwrite: bool = False
    threads: int | None = None
    progress: Callable[[int, int], None] | None = None
    allow_nonfinite: bool = False
    mtp: str = DROP

    def __post_init__(self) -> None:
        check_flags(overwrite=self.overwrite, allow_nonfinite=self.allow_nonfinite)
        check_counts(threads=self.workers)
        check_mtp(self.mtp)
        if self.progress is not None and not callable(self.progress):
            raise UsageError(f"progress={self.progress!r}", remedy="pass a function")

    @property
    def workers(self) -> int:
        """How many threads there are."""
        return min(8, os.cpu_count() or 1) if self.threads is None else self.threads


@dataclass(frozen=True)
class ExportOptions(WriteOptions):
    """Options of an export. The defaults suit most models; each line says what changes.

    overwrite: replace a model in `out_dir`. The old one is removed first.
    threads: how many threads read and write; by default one for each processor, at most 8.
    progress: called with (bytes written, bytes in total) after each chunk, one call at a time. It
        begins again where released checkpoints turn out to have other names.
    allow_nonfinite: also export weights with NaN or infinity; the report counts them.
    mtp: layers that predict further tokens (multi-token prediction), of families with a table of
        them: "drop" leaves them out, as transformers does, and a note says so; "keep" writes them
        under the names of the release. The config's num_nextn_predict_layers is what is written.
    max_shard_size: how much data one file may have, in bytes or as "5GB", "512MiB".
    against_model: compare names and shapes with the config's model: with the table of a built-in
        family, and, if they do not fit it exactly and transformers is installed, with the model
        that transformers makes on the meta device.
    naming: "hub": the names of released models, as `save_pretrained` writes them. For families
        without a table, transformers gives them; a note says if it cannot. "module": the names in
        the state dict, which not all servers and versions load.
    card: write README.md, a model card: step, checkpoint, sizes, dtype and checksums. One that
        smckpt did not write stays as it is.
    generation_config: the model's own: `model.generation_config`, a directory or file, or a dict.
        By default the file beside `config`, or the token ids in the config.
    gguf: also write `model-<gguf>.gguf`, with llama.cpp's own converter: "f16", "bf16", "f32",
        "q8_0", "auto" or what else that writes. It reads the finished directory, which needs a
        tokenizer, and stays whole if the converter fails.
    gguf_converter: with `gguf`, the script `convert_hf_to_gguf.py`, or a command line that runs it.
        By default that in the variable SMCKPT_GGUF_CONVERTER, or the one on PATH.
    process_group: the processes that call this together, with the same arguments, and share the
        files: a torch process group, or the `ExportGroup` of `export_group_of_environment`. Only
        the first of them calls `progress`. None: this process exports alone.
    timeout: with `process_group`: all give up when one of them has not written a byte for this many
        seconds.
    """

    max_shard_size: int | str = "5GB"
    against_model: bool = True
    naming: str = HUB
    card: bool = True
    generation_config: Any = None
    gguf: str | None = None
    gguf_converter: str | os.PathLike[str] | None = None
    process_group: Any = None
    timeout: float = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(against_model=self.against_model, card=self.card)
        if self.naming not in (HUB, MODULE):
            raise UsageError(f"naming={self.naming!r}", remedy=f"pass {HUB!r} or {MODULE!r}")
        if not isinstance(self.timeout, (int, float)) or self.timeout <= 0:
            raise UsageError(f"timeout={self.timeout!r}", remedy="pass seconds > 0")
        _ = self.limit

    @property
    def limit(self) -> int:
        """`max_shard_size` in bytes."""
        match = re.fullmatch(
            r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", str(self.max_shard_size).upper()
        )
        unit = match.group(2) if match else "?"
        if match is None or unit not in _SIZES or float(match.group(1)) * _SIZES[unit] < 1:
            raise UsageError(
                f"max_shard_size={self.max_shard_size!r}",
                remedy='pass bytes, or a text such as "5GB" or "512MiB"',
            )
        return int(float(match.group(1)) * _SIZES[unit])


@dataclass(frozen=True)
class ImportOptions(WriteOptions):
    """Options of an import.

    overwrite: replace a checkpoint in `out_dir`. The old one stays until the new one is whole.
    threads, progress: as in `ExportOptions`.
    allow_nonfinite: also import weights with NaN or infinity; the report counts them.
    mtp: layers that predict further tokens (DeepSeek's `num_nextn_predict_layers`): "drop" leaves
        them out, and a note says so; "keep" writes them as Megatron-core's `mtp`, and refuses a
        layout that has no such layers, and pipeline stages.
    pad_vocab_to_multiple_of: each rank's rows are padded to this multiple (Megatron's
        make_vocab_size_divisible_by). A note says if a later export will need `padded_vocab_size`.
    """

    pad_vocab_to_multiple_of: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(pad_vocab_to_multiple_of=self.pad_vocab_to_multiple_of)
