"""Whether a Hugging Face directory is a model that serves: `verify_hf`.

Three questions, the later ones on request: does `from_pretrained` find every tensor and no other;
are the weights, bit for bit, those of a checkpoint; does it compute what a reference computes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from smckpt.checkpoint.catalogue import open_catalogue
from smckpt.checkpoint.headers import read_header
from smckpt.errors import CheckpointError, CorruptCheckpointError, StorageError, UsageError
from smckpt.layout.entries import DTYPES
from smckpt.translate.arguments import check_paths
from smckpt.translate.cast import CASTABLE, cast, stored_type
from smckpt.translate.checkpoint_store import CheckpointStore, degrees_of
from smckpt.translate.config import CONFIG, read_config
from smckpt.translate.detect import looks_transformed
from smckpt.translate.files import aligned
from smckpt.translate.model import to_hub
from smckpt.translate.names import find_ties, model_tensors
from smckpt.translate.source import Source
from smckpt.translate.stores import weight_map
from smckpt.translate.table import Layout
from smckpt.translate.targets import Chunk, Range, Same, Target
from smckpt.translate.translated import TranslatedSource

__all__ = ["HFReport", "verify_hf"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CHUNK = 16 << 20  # bytes compared at once
LOGITS_TOLERANCE = 1e-5  # of fp32 logits, absolute: sums in another order, no more
_CODES = {d.code: name for name, d in DTYPES.items() if d.code}


@dataclass(frozen=True)
class HFReport:
    """What was looked at, and what is wrong with it.

    tensors: in the files. compared: of them, bit for bit with the checkpoint. logits: the greatest
    difference from the reference's, or None.
    """

    directory: str
    tensors: int
    compared: int
    logits: float | None
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file of the directory."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def verify_hf(
    directory: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    reference: str | os.PathLike[str] | None = None,
    prefix: str | None = None,
    layout: str | Layout | None = None,
    tp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    padded_vocab_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> HFReport:
    """Check an exported model. Needs transformers; nothing is fetched, no code of the model runs
    that is not transformers' own.

    Args:
        directory: with config.json and safetensors files.
        against: a checkpoint; every tensor must equal its own, after the cast where the directory
            has another floating dtype. Sizes are those of the directory's config.
        reference: a directory of the same model; logits in float32 are compared, on fixed tokens.
        prefix, layout, tp, ep, etp, padded_vocab_size: of the checkpoint, as for `export_hf`.
        progress: called with (bytes compared, bytes in all).

    Returns:
        A report; what is wrong with the model is listed there, not raised.

    Raises:
        UsageError: it is no directory of a model, or transformers is not installed.
        CheckpointError: the checkpoint cannot be read.
    """
    others = {"against": against, "reference": reference}
    check_paths(directory=directory, **{n: path for n, path in others.items() if path is not None})
    folder = Path(os.fspath(directory))
    given = {
        "prefix": prefix, "layout": layout, "tp": tp, "ep": ep, "etp": etp,
        "padded_vocab_size": padded_vocab_size,
    }  # fmt: skip
    if against is None and (named := [f"{n}=" for n, value in given.items() if value is not None]):
        raise UsageError(
            f"{', '.join(named)} has no meaning without against=", remedy="leave it out"
        )
    stored = _stored(folder)
    problems: list[str] = []
    if against is not None:
        theirs = _of_checkpoint(
            os.fspath(against), prefix, folder, layout, (tp, ep, etp), padded_vocab_size
        )
        problems += _differences(stored, *theirs, folder, progress)
    model, found = _loaded(folder)
    problems += found
    logits = None
    if reference is not None and model is not None:
        other, found = _loaded(Path(os.fspath(reference)))
        problems += [f"reference: {text}" for text in found]
        if other is not None:
            logits = _logits_apart(model, other)
            if not logits <= LOGITS_TOLERANCE:  # NaN is a difference too
                problems.append(f"logits differ from the reference's by up to {logits:g}")
    compared = 0 if against is None else len(stored)
    return HFReport(str(folder), len(stored), compared, logits, tuple(problems))


# -- the files -----------------------------------------------------------------------------------


def _stored(folder: Path) -> dict[str, _Stored]:
    """Every tensor of the directory, from the headers alone."""
    index = folder / INDEX
    if index.is_file():
        named: Mapping[str, str] = weight_map(index)
        files = sorted(set(named.values()))
    elif (folder / SINGLE).is_file():
        named, files = {}, [SINGLE]
    else:
        raise UsageError(
            f"neither {SINGLE} nor {INDEX} is there",
            remedy="give the directory that export_hf or save_pretrained wrote",
            path=str(folder),
        )
    out: dict[str, _Stored] = {}
    for name in files:
        for key, tensor in _header(folder / name):
            if named and named.get(key) != name:
                raise CorruptCheckpointError(
                    f"{key} is in {name}, the index says {named.get(key)}",
                    remedy="export it again",
                    path=str(index),
                )
            out[key] = tensor
    if lost := sorted(named.keys() - out.keys()):
        raise CorruptCheckpointError(
            f"the index names {lost[:8]}, which are in no file",
            remedy="export it again",
            path=str(index),
        )
    return out


def _header(path: Path) -> Iterator[tuple[str, _Stored]]:
    try:
        with path.open("rb") as file:

            def read(start: int, stop: int) -> bytes:
                file.seek(start)
                return file.read(stop - start)

            header = read_header(read, path.stat().st_size, str(path))
    except OSError as error:
        raise StorageError(f"{error.strerror}", remedy="export again", path=str(path)) from error
    for key, entry in header.entries.items():
        yield key, _Stored(path, _CODES[entry.code], entry.shape, entry.offset)


# -- against a checkpoint ------------------------------------------------------------------------


def _differences(
    stored: Mapping[str, _Stored],
    theirs: Mapping[str, Target],
    source: Source | TranslatedSource,
    folder: Path,
    progress: Callable[[int, int], None] | None,
) -> list[str]:
    left_out = {n: kept for n, kept in _tied_names(folder, theirs).items() if n not in stored}
    problems = [f"{name} is in the checkpoint only" for name in theirs
                if name not in stored and name not in left_out]  # fmt: skip
    problems += [f"{name} is not in the checkpoint" for name in stored if name not in theirs]
    total, done = sum(_nbytes(t) for t in stored.values()), 0
    with closing(source):
        for name, kept in left_out.items():
            problem = _difference(source, theirs[name], stored[kept]) if kept in stored else None
            problems += [f"{name}, which is tied to {kept}: {problem}"] if problem else []
        for name, ours in stored.items():
            if name in theirs:
                problem = _difference(source, theirs[name], ours)
                problems += [f"{name}: {problem}"] if problem else []
            done += _nbytes(ours)
            if progress is not None:
                progress(done, total)
    return problems


def _of_checkpoint(
    checkpoint: str,
    prefix: str | None,
    folder: Path,
    layout: str | Layout | None,
    given: tuple[int | None, int | None, int | None],
    padded: int | None,
) -> tuple[Mapping[str, Target], Source | TranslatedSource]:
    """The checkpoint's tensors by Hugging Face's names, and what reads them. Where they are made of
    those of a tensor-parallel layout, each element of either side stands for one of the other: that
    is proven. So what is equal here makes the inverse, bit for bit, the checkpoint."""
    catalogue = open_catalogue(checkpoint)
    tensors = model_tensors(catalogue, prefix)
    config = read_config(folder) if (folder / CONFIG).is_file() else None
    family = config.values["model_type"] if config is not None else None
    if layout is not None or looks_transformed(tensors, family):
        degrees = degrees_of(catalogue, *given)
        store = CheckpointStore(catalogue, tensors, degrees)
        made = to_hub(store, config, layout, degrees, padded)
        return {target.name: target for target in made.targets}, made.source
    if any(value is not None for value in (*given, padded)):
        raise UsageError(
            "tp=, ep=, etp= or padded_vocab_size= are given, but the names are Hugging Face's own",
            remedy="leave them out, or pass layout=",
            path=catalogue.url,
        )
    own = {
        name: Same(t.name, t.dtype, tuple(t.shape), t.name, t.dtype) for name, t in tensors.items()
    }
    return own, Source(catalogue)


def _tied_names(folder: Path, tensors: Mapping[str, Target]) -> dict[str, str]:
    """Name that the directory may lack → name of the tensor that it is."""
    config = json.loads((folder / CONFIG).read_text()) if (folder / CONFIG).is_file() else {}
    text = config.get("text_config", config)
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    return {tie.left_out: tie.kept for tie in find_ties(tensors)} if tied else {}


def _nbytes(tensor: _Stored) -> int:
    return math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize


def _difference(source: Source | TranslatedSource, theirs: Target, ours: _Stored) -> str | None:
    """What tells a tensor of the directory from the checkpoint's, or None."""
    if tuple(theirs.shape) != ours.shape:
        return f"shape {list(ours.shape)}, the checkpoint has {list(theirs.shape)}"
    casts = theirs.dtype != ours.dtype
    if casts and not {theirs.dtype, ours.dtype} <= set(CASTABLE):
        return f"dtype {ours.dtype}, the checkpoint has {theirs.dtype}"
    itemsize, wide = DTYPES[ours.dtype].itemsize, DTYPES[theirs.dtype].itemsize
    numel, step = math.prod(ours.shape), CHUNK // max(itemsize, wide)
    memory = aligned(step * wide)
    with ours.path.open("rb") as file:
        for start in range(0, numel, step):
            stop = min(numel, start + step)
            view = memory[: (stop - start) * wide]
            chunk = Chunk(0, (stop - start) * wide, (Range(theirs, start, stop, 0),))
            (plan,) = source.plans_of([chunk])
            source.read(plan, [view])
            wanted = bytes(view)
            if casts:
                elements = np.frombuffer(wanted, stored_type(theirs.dtype))
                wanted = cast(elements, theirs.dtype, ours.dtype).tobytes()
            file.seek(ours.offset + start * itemsize)
            if file.read((stop - start) * itemsize) != wanted:
                return f"differs from the checkpoint within elements {start} to {stop}"
    return None


# -- in transformers -----------------------------------------------------------------------------


def _loaded(folder: Path) -> tuple[Any, list[str]]:
    """The model as transformers loads it in float32, and what it had to say."""
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "transformers is not installed", remedy='pip install "smckpt[hf]"'
        ) from error
    import torch

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        kind = getattr(transformers, (config.architectures or ["AutoModelForCausalLM"])[0], None)
        if kind is None:
            return None, [f"transformers does not know the architecture {config.architectures}"]
        model, info = kind.from_pretrained(
            folder, local_files_only=True, output_loading_info=True, dtype=torch.float32
        )
    except CheckpointError:
        raise
    except Exception as error:  # whatever a model's code raises on files that do not fit
        return None, [f"from_pretrained: {type(error).__name__}: {error}"]
    problems = [f"from_pretrained: {what}: {sorted(map(str, names))[:8]}"
                for what, names in info.items() if names]  # fmt: skip
    return model.eval(), problems


def _logits_apart(model: Any, other: Any) -> float:
    """The greatest difference of two models' logits on fixed tokens."""
    import torch

    vocabulary = min(int(m.get_input_embeddings().weight.shape[0]) for m in (model, other))
    tokens = (torch.arange(64).reshape(2, 32) * 31 + 7) % vocabulary
    inputs = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens[:, :8]
    with torch.no_grad():
        a, b = (m(**inputs).logits for m in (model, other))
    if a.shape != b.shape:
        return math.inf
    return float((a - b).abs().max())
