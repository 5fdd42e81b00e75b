"""The tensors of an export of a PEFT model: its adapter, or its base with the adapter merged."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smckpt.errors import (
    CheckpointError,
    KeysMismatchError,
    TensorMismatchError,
    UsageError,
    errors_at,
)
from smckpt.formats.degrees import refuse_given, refuse_store
from smckpt.formats.names import ADAPTER_WEIGHTS, ADAPTER_WEIGHTS_BIN
from smckpt.formats.readers.rank_files import open_directory
from smckpt.formats.tensors import TensorReader
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Copy
from smckpt.storage import Access
from smckpt.storage.urls import disk_path
from smckpt.translate.cast import CASTABLE
from smckpt.translate.config import ModelConfig
from smckpt.translate.models.comparison import Comparison
from smckpt.translate.models.contents import (
    HUB,
    MODULE,
    ExportContents,
    head_notes,
    kept_of_family,
    renamed,
    whole_tensors,
)
from smckpt.translate.models.lora import ADAPTER_CONFIG, read_lora_configs, sort
from smckpt.translate.models.merged import (
    Adapters,
    Change,
    Merged,
    MergedSource,
    change_of_pair,
    changed_tensor,
    changes_of,
    first_elements,
)
from smckpt.translate.models.meta_model import Fit
from smckpt.translate.models.model_source import Parallel, open_model
from smckpt.translate.models.quantized import dequantized
from smckpt.translate.models.tied import OF_LAYER, named_ties, refuse_tied, refuse_untied
from smckpt.translate.prediction import beyond_model
from smckpt.translate.ranks.pipeline import JoinedTensors
from smckpt.translate.ranks.translated import Translated, TranslatedSource
from smckpt.translate.stream import tied_names
from smckpt.translate.tables.hub import HubTensor
from smckpt.translate.tables.layouts import looks_transformed


@dataclass(frozen=True)
class Adapter:
    """How the checkpoint of a PEFT model is exported.

    lora: "adapter" writes the directory that `PeftModel.from_pretrained` loads, "merge" writes the
        base model with the adapter added.
    lora_config: the adapter's config: a directory or file, a dict, or `model.peft_config`.
    lora_adapter: the name of the adapter, if the checkpoint has several. With "merge" also a list
        of names: they are merged in this order, as PEFT's `merge_and_unload(adapter_names=…)` does.
    base: with "merge", a Hugging Face directory with the base's weights, if the checkpoint has only
        the adapter's.

    Raises:
        UsageError: a field is wrong, or has no effect.
    """

    lora: str
    lora_config: Any = None
    lora_adapter: str | Sequence[str] | None = None
    base: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.lora not in ("adapter", "merge"):
            raise UsageError(f"lora={self.lora!r}", remedy='pass "adapter" or "merge"')
        given, names = self.lora_adapter, self.names
        if not all(isinstance(name, str) and name for name in names) or given in ("", [], ()):
            raise UsageError(f"lora_adapter={given!r}", remedy="pass a name, or a list of names")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UsageError(
                f"lora_adapter= names {', '.join(twice)} twice", remedy="name each adapter once"
            )
        refuse_store(lora_config=self.lora_config, base=self.base)
        if self.lora == "adapter":
            refuse_given('with lora="adapter"', base=self.base)
            if len(names) > 1:
                raise UsageError(
                    f"a directory of an adapter holds one, but lora_adapter= names "
                    f"{', '.join(names)}",
                    remedy="export one at a time, each to a directory of its own",
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters' names, in the order to merge them; none if none is given."""
        given = self.lora_adapter
        return (given,) if isinstance(given, str) else tuple(given or ())


def find_peft_contents(
    access: Access, checkpoint: Any, prefix: str | None, settings: ModelConfig | None,
    ranks: Parallel, asked: Adapter, naming: str, comparison: Comparison,
) -> ExportContents:  # fmt: skip
    """The adapter in a checkpoint of a PEFT model, or the base with adapters merged into it.

    Raises:
        as `export_hf`.
    """
    if any(value is not None for value in ranks.given.values()):
        raise _of_ranks(None)
    checkpoint, lora_config = _weights_and_config(checkpoint, asked.lora_config)
    opened = open_model(access, checkpoint, prefix, settings, Parallel(), peft=True)
    reader, url = opened.reader, opened.reader.url
    if any(len(tensor.shards) > 1 for tensor in reader.held.values()):
        raise _of_ranks(url)
    names = asked.names
    # of a model's own code it is not known which layers are transposed
    known = settings is not None and "auto_map" not in settings.values
    kind = settings.values["model_type"] if known and settings is not None else None
    configs = [replace(c, model_type=kind) for c in read_lora_configs(lora_config, names)]
    with errors_at(url):
        tensors = {target.name: target for target in whole_tensors(reader)}
        adapters = [
            (sort(tensors, each), config)
            for each, config in zip(names or (None,), configs, strict=True)
        ]
        for parts, config in adapters:
            config.check(parts.pairs)
            config.check_magnitudes(parts.pairs, parts.magnitudes)
        if asked.lora == "adapter":
            refuse_given('with lora="adapter"', config=settings)
            ((parts, adapter),) = adapters
            adapter.refuse_biases()
            own = [replace(tensor, name=name) for name, tensor in parts.adapter.items()]
            source = TranslatedSource(reader)
            return ExportContents(
                source, own, naming=MODULE, adapter=adapter, identity=opened.identity,
                source_format=opened.format, step=opened.step,
            )  # fmt: skip
        for config in configs:
            config.refuse_unmerged()
        whole: dict[str, Translated] = {}  # what adapters save whole
        for number, (parts, _) in enumerate(adapters):
            for name in whole.keys() & parts.saved.keys():
                first = next(
                    n for n, (p, _) in zip(names, adapters, strict=False) if name in p.saved
                )
                raise UsageError(
                    f"{first} and {names[number]} both save {name} whole (modules_to_save), and a "
                    "merged model can have only one of them",
                    remedy="export one of them alone, or leave one out of lora_adapter=",
                )
            whole |= parts.saved
        if asked.base is None:
            found = _merged_here(reader, whole, adapters, settings, naming, comparison)
        else:
            with errors_at(os.fspath(asked.base)):
                for config in configs:
                    config.refuse_biases()
                    config.refuse_other_base()
                directory = dequantized(open_directory(Path(asked.base)), settings)
            found = _merged_there(reader, whole, adapters, settings, directory, comparison)
        kept = kept_of_family(settings, found.targets)
        return replace(
            found,
            notes=(*found.notes, *_order_notes(adapters)),
            identity=opened.identity,
            kept=kept,
            source_format=opened.format,
            step=opened.step,
        )


def _order_notes(adapters: Adapters) -> tuple[str, ...]:
    """PEFT takes the first of the patterns that match a module, and writes them in another order:
    sorted."""
    for parts, config in adapters:
        patterns = [*(config.values.get("alpha_pattern") or {})]
        for module in parts.pairs if patterns == sorted(patterns) else ():
            if len({*config.matching(module, "alpha_pattern")}) > 1:
                return (
                    f"several of alpha_pattern match {module}, and the first was taken. PEFT sorts "
                    "them when it saves a config: if they had another order in training, pass "
                    "lora_config=model.peft_config of it",
                )
    return ()


def _weights_and_config(checkpoint: Any, lora_config: Any) -> tuple[Any, Any]:
    """The checkpoint, and the adapter's config: by default that beside the adapter's weights. Of a
    directory that PEFT saved, the weights are the checkpoint.

    Raises:
        UsageError: it is a list of several files.
    """
    if not isinstance(checkpoint, (str, os.PathLike)):
        if len(checkpoint) != 1:
            raise _of_ranks(os.fspath(checkpoint[0]) if checkpoint else None)
        (checkpoint,) = checkpoint
    url = os.fspath(checkpoint)
    if (on_disk := disk_path(url)) is None:
        return checkpoint, lora_config
    path = Path(on_disk)
    if path.is_dir():
        names = (ADAPTER_WEIGHTS, ADAPTER_WEIGHTS_BIN)
        weights = next((path / name for name in names if (path / name).is_file()), None)
        checkpoint = checkpoint if weights is None else weights
    folder = path if path.is_dir() else path.parent
    if lora_config is None and (folder / ADAPTER_CONFIG).is_file():
        lora_config = folder
    return checkpoint, lora_config


def _of_ranks(where: str | None) -> UsageError:
    return UsageError(
        "lora= is for one state of a whole model, not for parts of tensor-parallel ranks",
        remedy="merge the adapter where it was trained, save the ranks, and export them without "
        "lora=; or pass one state of a whole model, without layout and degrees",
        path=where,
    )  # fmt: skip


def _merged_here(
    reader: TensorReader, whole: Mapping[str, Translated], adapters: Adapters,
    settings: ModelConfig | None, naming: str, comparison: Comparison,
) -> ExportContents:  # fmt: skip
    """Adapters merged into the base that is in the checkpoint."""
    url = reader.url
    stored = {**adapters[0][0].base, **whole}
    if looks_transformed(stored):
        raise UsageError(
            "the base's names are not those that Hugging Face has on disk",
            remedy="pass base= the Hugging Face directory of the base model",
        )
    base = {name: replace(tensor, name=name) for name, tensor in stored.items()}
    shapes = {n: t.shape for n, t in base.items()}
    changes = changes_of(adapters, shapes, shapes)
    hub: Sequence[HubTensor] | None = None
    notes: tuple[str, ...] = ()
    if naming == HUB:
        found = comparison.names([*base.values()], url)
        if isinstance(found, str):
            naming, notes = MODULE, (f"the names are those of the state dict: {found}",)
        else:
            hub = found.hub if found is not None else None
    moved = {tensor.name: tensor for tensor in hub or ()}
    merged = [
        changed_tensor(t, *_change_of(moved.get(t.name), t.name, changes))
        for t in (base.values() if hub is None else renamed(hub, [*base.values()]))
    ]
    made = _ToWrite(merged, [*changes], naming, notes)
    _refuse_both(whole, made)
    maybe_merged = _refuse_merged(reader, adapters)
    tied: tuple[str, ...] = ()
    if settings is not None and settings.ties_embeddings:
        plain = [t.base if isinstance(t, Merged) else t for t in made.targets]
        tied = tied_names(TranslatedSource(reader), plain)
    if settings is not None and settings.ties_embeddings is not False:
        refuse_tied(MergedSource(reader), base, adapters, changes)
    notes = (*head_notes([*stored], settings), *(made.notes if settings is not None else ()))
    notes += maybe_merged
    targets = [target for target in made.targets if target.name not in tied]
    return ExportContents(MergedSource(reader), targets, tied, notes, made.naming)


def _refuse_merged(reader: TensorReader, adapters: Adapters) -> tuple[str, ...]:
    """A state that was saved while `merge_adapter` was active has adapters in the base's weights
    already. Compare these with the base that the adapters' config names.

    Returns:
        a note, if that base is not here, or has other weights.

    Raises:
        TensorMismatchError: the weights are those of the base with adapters added.
    """
    name_or_path = adapters[0][1].values.get("base_model_name_or_path")
    directory: TensorReader | None = None
    if isinstance(name_or_path, str) and os.path.isdir(name_or_path):
        with suppress(CheckpointError):
            directory = open_directory(Path(name_or_path))
    unknown = (
        "whether the state was saved while merge_adapter() was active cannot be told without "
        "the base that the adapter's config names; if it was, the adapter is in it twice: pass "
        "base= the directory of the base's weights",
    )
    if directory is None:
        return unknown
    try:
        compared, merged, other = _compared(reader, directory, adapters)
    finally:
        directory.close()
    if merged:
        raise TensorMismatchError(
            f"{merged} is the base's weight with the adapter added: the state was saved while "
            "merge_adapter() was active, and a merge would add it twice",
            remedy="pass base= the directory of the base's weights, or save after "
            "unmerge_adapter()",
        )
    if other:
        return (
            f"{other} has other values than in {name_or_path}: training changed the base, or "
            "another adapter is merged into it; pass base= to take that directory's weights",
        )
    return () if compared else unknown


def _compared(
    reader: TensorReader, directory: TensorReader, adapters: Adapters
) -> tuple[bool, str, str]:
    """Compare the base's weights in a checkpoint, as far as adapters change them, with a directory.

    Returns:
        whether any could be compared; the name of one to which adapters are added already; that of
        another one that differs.
    """
    compared, merged, other = False, "", ""
    if not adapters[0][0].base:
        return compared, merged, other
    there = {target.name: target for target in whole_tensors(directory)}
    source = MergedSource(_both(reader, directory))
    changes: dict[str, list[Change]] = {}
    for parts, config in adapters:
        shared = {n: t.shape for n, t in there.items() if n in parts.base}
        for name, module in config.weights(parts.pairs, shared).items():
            base = there[name]
            if parts.base[name].shape == base.shape and len(base.shape) == 2:
                change = change_of_pair(parts, config, module, name, base.shape)
                if change.magnitude is None or not change.flip:
                    changes.setdefault(name, []).append(change)
    for name, found in changes.items():
        own, base = adapters[0][0].base[name], there[name]
        if {own.dtype, base.dtype} - CASTABLE.keys():
            continue
        compared = True
        have, plain = (first_elements(source, each) for each in (own, base))
        added = (
            first_elements(source, changed_tensor(base, some, None)) for some in _subsets(found)
        )
        if any(4 * abs(have - one).max() < abs(have - plain).max() for one in added):
            merged = merged or name
        elif own.dtype == base.dtype and (have != plain).any():
            other = other or name
    return compared, merged, other


def _subsets(changes: Sequence[Change]) -> Iterator[tuple[Change, ...]]:
    """Which of several adapters may have been active; of more than four, one or all."""
    sizes = range(1, len(changes) + 1) if len(changes) <= 4 else (1, len(changes))
    return (some for size in sizes for some in itertools.combinations(changes, size))


def _merged_there(
    reader: TensorReader, whole: Mapping[str, Translated], adapters: Adapters,
    settings: ModelConfig | None, directory: TensorReader, comparison: Comparison,
) -> ExportContents:  # fmt: skip
    """Adapters merged into the base in a Hugging Face directory."""
    url = reader.url
    # The directory's names may differ from those in memory, which the adapter has; then
    # transformers tells them.
    stored = {target.name: target for target in whole_tensors(directory)}
    shapes = {name: target.shape for name, target in stored.items()}
    further = frozenset(name for name in stored if beyond_model(name, settings))
    own = [target for name, target in stored.items() if name not in further]
    built: Mapping[str, Shape] = {target.name: target.shape for target in own}
    hub: Mapping[str, HubTensor] = {}
    known = whole.keys() <= shapes.keys() and _fit_names(adapters, shapes, built)
    adapted = [f"{n}." for parts, _ in adapters for n in (*parts.pairs, *parts.saved)]
    found = comparison.names(own, url, memory=not known or not all(map(OF_LAYER.search, adapted)))
    ties: Sequence[tuple[str, str]] | None = None
    if isinstance(found, Fit) and found.memory:
        shapes, built, ties = {**shapes, **found.memory}, found.memory, found.ties
        hub = {tensor.name: tensor for tensor in found.hub or ()}
    changes = changes_of(adapters, shapes, built)
    saved = {name: replace(tensor, name=name) for name, tensor in whole.items()}
    moved = [t for t in hub.values() if all(name in saved for name, _ in t.parts)]
    stored |= {t.name: t for t in (renamed(moved, [*saved.values()]) if moved else saved.values())}
    targets = [
        changed_tensor(t, *_change_of(hub.get(name), name, changes)) for name, t in stored.items()
    ]
    made = _ToWrite(targets, [*changes], HUB)
    _refuse_both(whole, made)
    if ties is None and settings is not None and settings.ties_embeddings:
        ties = named_ties([*stored, *changes])
    source = MergedSource(_both(reader, directory))
    refuse_untied(source, ties or (), hub, targets, changes, adapters)
    *_, other = _compared(reader, directory, adapters)
    differs = (
        f"{other} has other values in the checkpoint than in base=, with the adapter and without: "
        "base= was taken; leave it out to take the checkpoint's",
    )
    unadapted = (
        f"{len(further)} tensors of layers that predict further tokens are the base's, which no "
        "adapter changes",
    )
    notes = (
        *head_notes([*directory.held], settings),
        *(made.notes if settings is not None else ()),
        *(differs if other else ()),
        *(unadapted if further else ()),
    )
    return ExportContents(
        source, made.targets, (), notes, made.naming, further=further,
    )  # fmt: skip


def _fit_names(adapters: Adapters, shapes: Mapping[str, Shape], built: Mapping[str, Shape]) -> bool:
    """Whether the adapters' names are those of a directory."""
    try:
        return bool(changes_of(adapters, shapes, built))
    except (KeysMismatchError, TensorMismatchError):
        return False


def _refuse_both(whole: Mapping[str, Translated], made: _ToWrite) -> None:
    if lost := sorted(whole.keys() & {*made.changed}):
        raise UsageError(
            f"one adapter saves {lost[0]} whole (modules_to_save), and another adds to it",
            remedy="export them one at a time, or merge them with PEFT",
        )


@dataclass(frozen=True)
class _ToWrite:
    """The tensors to write. changed: names of the model's weights that the adapter changes."""

    targets: Sequence[Merged | Translated]
    changed: Sequence[str]
    naming: str
    notes: tuple[str, ...] = ()


def _change_of(
    hub: HubTensor | None, name: str, changes: Mapping[str, tuple[Change, ...]]
) -> tuple[tuple[Change, ...], Copy | None]:
    """The changes of the weight in memory that a tensor is a part of, and where it is in there.

    Raises:
        UsageError: it is made of several tensors, and an adapter changes one of them.
    """
    if hub is None:
        return changes.get(name, ()), None
    changed = [part for part, _ in hub.parts if part in changes]
    if not changed:
        return (), None
    if len(hub.parts) > 1:
        raise UsageError(
            f"released models of this family hold {changed[0]} in other tensors ({hub.name}), "
            "which are not merged with an adapter",
            remedy="pass ExportOptions(naming='module'), which transformers 5 loads, or merge it "
            "with PEFT",
        )
    ((part, copy),) = hub.parts
    return changes[part], copy


def _both(checkpoint: TensorReader, directory: TensorReader) -> TensorReader:
    """One reader for a checkpoint's tensors and for a directory's: PEFT's names are no released
    model's."""
    held = {n: (i, n) for i, one in ((1, directory), (0, checkpoint)) for n in one.held}
    return JoinedTensors((checkpoint, directory), held)
