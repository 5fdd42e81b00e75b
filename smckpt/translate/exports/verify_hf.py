"""Check that a Hugging Face directory is a working model: `verify_hf`.

It checks that `from_pretrained` finds every tensor and no other. On request it also checks that the
weights are bit for bit those of a checkpoint, and that the model computes what a reference
computes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from smckpt.calls import alone
from smckpt.errors import CheckpointError, TensorMismatchError, UsageError
from smckpt.formats.degrees import check_paths, refuse_given, refuse_store
from smckpt.formats.names import CONFIG
from smckpt.formats.readers.rank_files import open_directory
from smckpt.formats.tensors import TensorReader
from smckpt.storage import access_to
from smckpt.translate.beside import is_beside_config
from smckpt.translate.cast import CASTABLE, cast, stored_type
from smckpt.translate.config import ModelConfig, read_config
from smckpt.translate.exports.sidecars import MOST
from smckpt.translate.files import Target, is_quantized, nbytes_of
from smckpt.translate.models.comparison import Comparison
from smckpt.translate.models.contents import HUB, ExportContents, find_contents, whole_tensors
from smckpt.translate.models.meta_model import compare
from smckpt.translate.models.model_source import Parallel
from smckpt.translate.models.quantized import weights_of
from smckpt.translate.prediction import DROP, PREDICTION_LAYERS, further_layers
from smckpt.translate.ranks.translated import Translated, TranslatedSource
from smckpt.translate.stream import ChunkSource, side_by_side, tied_names
from smckpt.translate.tables.families import find_family
from smckpt.translate.tables.hub import find_ties
from smckpt.translate.tables.table import Family

_WHOLE = (".json", ".jinja", ".txt")  # files beside weights that transformers reads whole

LOGITS_TOLERANCE = 1e-5  # absolute difference of fp32 logits; it allows only another order of sums


@dataclass(frozen=True)
class HFReport:
    """What was checked, and what is wrong.

    tensors: how many the files have. compared: how many were compared bit for bit with the
        checkpoint. logits: the largest difference from the reference's logits, or None.
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


@alone()
def verify_hf(
    directory: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    reference: str | os.PathLike[str] | None = None,
    prefix: str | None = None,
    parallel: Parallel | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> HFReport:
    """Check an exported model. It needs transformers. It downloads nothing and runs only
    transformers' own code.

    Args:
        directory: has config.json and safetensors files.
        against: a checkpoint. Every tensor must equal the checkpoint's, after a cast if the
            directory has another floating dtype. The directory's config gives the sizes. Weights
            that only the directory has quantized are compared as `import_hf` reads them.
        reference: a directory of the same model. Logits in float32 on fixed tokens are compared.
        prefix: of the checkpoint, as in `export_hf`.
        parallel: of the checkpoint, as in `export_hf`.
        progress: called with (bytes compared, bytes in total).

    Returns:
        A report. It lists faults of the model, which are not raised.

    Raises:
        UsageError: it is not the directory of a model, or transformers is not installed.
        CheckpointError: the checkpoint cannot be read.
    """
    others = {"against": against, "reference": reference}
    check_paths(directory=directory, **{n: path for n, path in others.items() if path is not None})
    refuse_store(directory=directory, reference=reference)
    folder = Path(os.fspath(directory))
    ranks = Parallel.of(parallel)
    if against is None:
        refuse_given("without against=", prefix=prefix, **ranks.given)
    files = open_directory(folder, exact=True)
    stored = _tensors(files)
    settings = read_config(folder) if (folder / CONFIG).is_file() else None
    kind, problems = _in_memory(settings, stored)
    # transformers 4 and servers put the embedding in the place of a head that the config ties;
    # transformers 5 does not
    if settings is not None and settings.ties_embeddings:
        try:
            tied_names(TranslatedSource(files), stored.values())
        except TensorMismatchError as error:
            problems.append(error.message)
    family = None if settings is None else find_family(settings.values["model_type"])
    further = further_layers(stored, family, settings)
    compared = 0
    if against is not None:
        # layers that predict further tokens are compared if both sides have them
        mtp = None if further else DROP
        ranks = replace(ranks, allow_equal_ranks=True)
        try:
            model_config = None if settings is None else settings.complete(None)
            with closing(Comparison(model_config, strict=False)) as comparison:
                theirs = find_contents(
                    access_to(against), against, prefix, settings, ranks, HUB, mtp, comparison
                )
        except TensorMismatchError as error:  # tied tensors, or copies of ranks, differ
            problems.append(f"the checkpoint is not such a model: {error}")
        else:
            reader: TensorReader = files
            if settings is not None and not any(map(is_quantized, theirs.targets)):
                reader, *_ = weights_of(files, settings, family, None if theirs.further else DROP)
            own = _tensors(reader)
            problems += _differences(own, TranslatedSource(reader), theirs, settings, progress)
            compared = len(own)
    configured = None if settings is None else settings.values.get(PREDICTION_LAYERS)
    true = configured == len(set(further.values()))  # then transformers leaves them out by right
    model, found = _loaded(folder, kind, (family, settings) if true else (None, None))
    problems += found
    logits = None
    if reference is not None and model is not None:
        other, found = _loaded(Path(os.fspath(reference)), kind, (family, settings))
        problems += [f"reference: {text}" for text in found]
        if other is not None:
            logits = _logits_apart(model, other)
            if not logits <= LOGITS_TOLERANCE:  # NaN is a difference too
                problems.append(f"logits differ from the reference's by up to {logits:g}")
    return HFReport(str(folder), len(stored), compared, logits, tuple(problems))


def _tensors(reader: TensorReader) -> dict[str, Translated]:
    return {target.name: target for target in whole_tensors(reader)}


# -- against a checkpoint ------------------------------------------------------------------------


def _differences(
    stored: Mapping[str, Translated],
    files: TranslatedSource,
    theirs: ExportContents,
    settings: ModelConfig | None,
    progress: Callable[[int, int], None] | None,
) -> list[str]:
    """The differences between the directory and the checkpoint. For a translated checkpoint, the
    proof shows that each element of one side belongs to one element of the other. So if nothing
    differs, the inverse translation gives the checkpoint bit for bit."""
    wanted = {target.name: target for target in theirs.targets}
    tied = settings is not None and settings.ties_embeddings
    copies = {tie.left_out: tie.kept for tie in find_ties(stored)} if tied else {}
    problems = [f"only the checkpoint has {name}" for name in wanted if name not in stored]
    total, done = sum(nbytes_of(t) for t in stored.values()), 0
    with closing(theirs.source), closing(files):
        for name, ours in stored.items():
            target = wanted.get(name, wanted.get(copies.get(name, "")))
            if target is None:
                problems.append(f"the checkpoint lacks {name}")
            elif problem := _difference(theirs.source, target, files, ours):
                problems.append(f"{name}: {problem}")
            done += nbytes_of(ours)
            if progress is not None:
                progress(done, total)
    return problems


def _difference(
    source: ChunkSource, theirs: Target, files: TranslatedSource, ours: Translated
) -> str | None:
    """How a tensor of the directory differs from the checkpoint's, or None."""
    if tuple(theirs.shape) != ours.shape:
        return f"shape {list(ours.shape)}, but the checkpoint has {list(theirs.shape)}"
    casts = theirs.dtype != ours.dtype
    if casts and not {theirs.dtype, ours.dtype} <= set(CASTABLE):
        return f"dtype {ours.dtype}, but the checkpoint has {theirs.dtype}"
    for start, stop, wanted, found in side_by_side((source, theirs), (files, ours)):
        if casts:
            values = wanted.view(stored_type(theirs.dtype))
            wanted = cast(values, theirs.dtype, ours.dtype).view(np.uint8)
        if not np.array_equal(wanted, found):
            return f"differs from the checkpoint within elements {start} to {stop}"
    return None


# -- in transformers -----------------------------------------------------------------------------


def _in_memory(settings: ModelConfig | None, stored: Mapping[str, Target]) -> tuple[str, list[str]]:
    """The class whose names and shapes these are; and a problem for names that only transformers'
    memory form has, although transformers 5 loads them."""
    nothing: tuple[str, list[str]] = "AutoModelForCausalLM", []
    if settings is None or settings.values.get("quantization_config"):
        return nothing
    try:
        found = compare(settings.complete(None), {n: tuple(t.shape) for n, t in stored.items()})
    except ImportError:  # `_loaded` reports it
        return nothing
    if isinstance(found, str):
        return nothing
    if found.hub is None:
        return found.kind, []
    released = {tensor.name for tensor in found.hub}
    others = sorted(name for name in stored if name not in released)
    import transformers

    return found.kind, [
        f"{len(others)} names are not those of released models, but those that transformers "
        f"{transformers.__version__} has in memory, which other versions and servers do not load: "
        f"{others[:8]}"
    ]


def _loaded(
    folder: Path, nearest: str, further: tuple[Family | None, ModelConfig | None]
) -> tuple[Any, list[str]]:
    """The model as transformers loads it in float32, and the problems that it reports. `nearest`:
    its class, if the config names none. `further`: whose layers that predict further tokens it may
    leave out."""
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "transformers is not installed", remedy='pip install "smckpt[hf]"'
        ) from error
    import torch

    # transformers would open a pipe or device, and might wait without end. It reads files beside
    # weights whole. What leads nowhere it passes over, as servers do.
    here = [path for path in sorted(folder.iterdir()) if not path.is_dir()]
    beside = [path for path in here if is_beside_config(path.name)]
    strange = [
        *(f"{p.name} is a pipe or device, not a file" for p in here
          if p.exists() and not p.is_file()),
        *(f"{p.name} is a link that leads nowhere" for p in beside if not p.exists()),
        *(f"{p.name} has {p.stat().st_size} bytes; a file beside a config has at most {MOST}"
          for p in beside if p.suffix in _WHOLE and p.is_file() and p.stat().st_size > MOST),
    ]  # fmt: skip
    if strange:
        return None, strange
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        kind = getattr(transformers, (config.architectures or [nearest])[0], None)
        if kind is None:
            return None, [f"transformers does not know the architecture {config.architectures}"]
        with _quiet(transformers):
            model, info = kind.from_pretrained(
                folder, local_files_only=True, output_loading_info=True, dtype=torch.float32
            )
    except CheckpointError:
        raise
    except Exception as error:  # a model's code may raise anything on files that do not fit
        return None, [f"from_pretrained: {type(error).__name__}: {error}"]
    reported = {what: set(map(str, names)) for what, names in info.items()}
    unexpected = reported.get("unexpected_keys", set())
    unexpected.difference_update(further_layers(unexpected, *further))
    problems = [f"from_pretrained: {what}: {sorted(names)[:8]}"
                for what, names in reported.items() if names]  # fmt: skip
    return model.eval(), problems


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Hide transformers' own progress bar."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _logits_apart(model: Any, other: Any) -> float:
    """The largest difference of two models' logits on fixed tokens."""
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
