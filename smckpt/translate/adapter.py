"""The tensors of an export of a PEFT model: its adapter, or its base with the adapter merged."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from smckpt.checkpoint.catalogue import open_catalogue
from smckpt.errors import KeysMismatchError, TensorMismatchError, UsageError
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Box, Copy, row_major_strides
from smckpt.storage import Access
from smckpt.translate.arguments import refuse_given
from smckpt.translate.cast import CASTABLE
from smckpt.translate.comparison import Comparison
from smckpt.translate.compile import Block
from smckpt.translate.config import ModelConfig
from smckpt.translate.contents import (
    HUB,
    MODULE,
    ExportContents,
    head_notes,
    kept_of_family,
    renamed,
    whole_tensors,
)
from smckpt.translate.detect import looks_transformed
from smckpt.translate.logical_tensors import LogicalTensors
from smckpt.translate.lora import LoraConfig, PeftTensors, read_lora_configs, sort
from smckpt.translate.merged import Change, Merged, MergedSource
from smckpt.translate.names import HubTensor, find_ties, model_tensors
from smckpt.translate.pieces import RankTensors
from smckpt.translate.quantized import dequantized
from smckpt.translate.rank_files import TensorReader, open_directory
from smckpt.translate.stream import tied_names
from smckpt.translate.translated import Translated, TranslatedSource

__all__ = ["find_peft_contents"]

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"  # one of each, for `find_ties`

# The adapters to merge, in order.
Adapters: TypeAlias = "Sequence[tuple[PeftTensors[Translated], LoraConfig]]"


def find_peft_contents(
    access: Access, checkpoint: Any, prefix: str | None, settings: ModelConfig | None, lora: str,
    lora_config: Any, base: str | os.PathLike[str] | None, naming: str, comparison: Comparison,
    name: str | Sequence[str] | None = None,
) -> ExportContents:  # fmt: skip
    """The adapter in a checkpoint of a PEFT model, or the base with adapters merged into it.

    Raises:
        as `export_hf`.
    """
    if lora not in ("adapter", "merge"):
        raise UsageError(f"lora={lora!r}", remedy='pass "adapter" or "merge"')
    if not isinstance(checkpoint, (str, os.PathLike)):
        raise UsageError("lora= is for checkpoints, not for files of ranks", remedy="leave it out")
    names = _names(name)
    if lora == "adapter" and len(names) > 1:
        raise UsageError(
            f"a directory of an adapter holds one, but lora_adapter= names {', '.join(names)}",
            remedy="export one at a time, each to a directory of its own",
        )
    kind = None if settings is None else settings.values["model_type"]
    configs = [replace(c, model_type=kind) for c in read_lora_configs(lora_config, names)]
    catalogue = open_catalogue(access.open(checkpoint))
    reader = LogicalTensors(catalogue, model_tensors(catalogue, prefix, peft=True))
    tensors = {target.name: target for target in whole_tensors(reader)}
    adapters = [
        (sort(tensors, catalogue.url, each), config)
        for each, config in zip(names or (None,), configs, strict=True)
    ]
    for parts, config in adapters:
        config.check(parts.pairs, catalogue.url)
        config.check_magnitudes(parts.pairs, parts.magnitudes, catalogue.url)
    if lora == "adapter":
        refuse_given('with lora="adapter"', base=base, config=settings)
        ((parts, adapter),) = adapters
        adapter.refuse_biases(catalogue.url)
        own = [replace(tensor, name=name) for name, tensor in parts.adapter.items()]
        source = TranslatedSource(reader)
        return ExportContents(
            source, own, naming=MODULE, adapter=adapter, identity=catalogue.identity
        )
    for config in configs:
        config.refuse_unmerged(catalogue.url)
    whole = _saved_whole(names, [parts for parts, _ in adapters], catalogue.url)
    if base is None:
        found = _merged_here(reader, whole, adapters, settings, naming, comparison)
    else:
        directory = _open_base(base, configs, settings)
        found = _merged_there(reader, whole, adapters, settings, directory, comparison)
    return replace(found, identity=catalogue.identity, kept=kept_of_family(settings, found.targets))


def _merged_here(
    reader: LogicalTensors, whole: Mapping[str, Translated], adapters: Adapters,
    settings: ModelConfig | None, naming: str, comparison: Comparison,
) -> ExportContents:  # fmt: skip
    """Adapters merged into the base that is in the checkpoint."""
    url = reader.url
    stored = {**adapters[0][0].base, **whole}
    if looks_transformed(stored):
        raise UsageError(
            "the base's names are not those that Hugging Face has on disk",
            remedy="pass base= the Hugging Face directory of the base model",
            path=url,
        )
    made = _into_checkpoint(stored, adapters, naming, comparison, url)
    _refuse_both(whole, made, url)
    tied: tuple[str, ...] = ()
    if settings is not None and settings.ties_embeddings:
        plain = [t.base if isinstance(t, Merged) else t for t in made.targets]
        tied = tied_names(TranslatedSource(reader), plain, url)
    adapters[0][1].refuse_tied(tied, made.changed, url)
    notes = (*head_notes([*stored], settings), *(made.notes if settings is not None else ()))
    targets = [target for target in made.targets if target.name not in tied]
    return ExportContents(MergedSource(reader), targets, tied, notes, made.naming)


def _merged_there(
    reader: LogicalTensors, whole: Mapping[str, Translated], adapters: Adapters,
    settings: ModelConfig | None, directory: TensorReader, comparison: Comparison,
) -> ExportContents:  # fmt: skip
    """Adapters merged into the base in a Hugging Face directory."""
    url = reader.url
    made = _into_directory(whole, adapters, directory, comparison, url)
    _refuse_both(whole, made, url)
    if settings is not None and settings.ties_embeddings:
        _refuse_tied_to_released(made, whole, [config for _, config in adapters], url)
    notes = (
        *head_notes([*directory.held], settings),
        *(made.notes if settings is not None else ()),
    )
    return ExportContents(
        MergedSource(_Both(reader, directory)), made.targets, (), notes, made.naming
    )


def _refuse_both(whole: Mapping[str, Translated], made: _ToWrite, where: str) -> None:
    if lost := sorted(whole.keys() & {*made.changed}):
        raise UsageError(
            f"one adapter saves {lost[0]} whole (modules_to_save), and another adds to it",
            remedy="export them one at a time, or merge them with PEFT",
            path=where,
        )


def _names(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """The adapters' names, in the order to merge them; none if none is given.

    Raises:
        UsageError: they are not names, or one is there twice.
    """
    names = (given,) if isinstance(given, str) else tuple(given or ())
    if not all(isinstance(name, str) and name for name in names) or given in ("", [], ()):
        raise UsageError(f"lora_adapter={given!r}", remedy="pass a name, or a list of names")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(
            f"lora_adapter= names {', '.join(twice)} twice", remedy="name each adapter once"
        )
    return names


def _saved_whole(
    names: Sequence[str], adapters: Sequence[PeftTensors[Translated]], where: str
) -> dict[str, Translated]:
    """The tensors that adapters save whole.

    Raises:
        UsageError: two save the same.
    """
    made: dict[str, Translated] = {}
    for number, parts in enumerate(adapters):
        for name in made.keys() & parts.saved.keys():
            others = [n for n, p in zip(names, adapters[:number], strict=False) if name in p.saved]
            raise UsageError(
                f"{others[0]} and {names[number]} both save {name} whole (modules_to_save), and a "
                "merged model can have only one of them",
                remedy="export one of them alone, or leave one out of lora_adapter=",
                path=where,
            )
        made |= parts.saved
    return made


@dataclass(frozen=True)
class _ToWrite:
    """The tensors to write. changed: names of the model's weights that the adapter changes."""

    targets: Sequence[Merged | Translated]
    changed: Sequence[str]
    naming: str
    notes: tuple[str, ...] = ()


def _into_checkpoint(
    base: Mapping[str, Translated], adapters: Adapters, naming: str, comparison: Comparison,
    where: str,
) -> _ToWrite:  # fmt: skip
    """The base is in the checkpoint, by the names in memory."""
    stored = {name: replace(tensor, name=name) for name, tensor in base.items()}
    changes = _changes(adapters, {n: t.shape for n, t in stored.items()}, where)
    hub: Sequence[HubTensor] | None = None
    notes: tuple[str, ...] = ()
    if naming == HUB:
        found = comparison.names([*stored.values()], where)
        if isinstance(found, str):
            naming, notes = MODULE, (f"the names are those of the state dict: {found}",)
        else:
            hub = found.hub if found is not None else None
    if hub is None:
        made = [_changed(t, changes.get(t.name, ()), None, where) for t in stored.values()]
        return _ToWrite(made, [*changes], naming, notes)
    moved = {tensor.name: tensor for tensor in hub}
    made = [
        _changed(t, *_change_of(moved.get(t.name), t.name, changes), where)
        for t in renamed(hub, [*stored.values()])
    ]
    return _ToWrite(made, [*changes], naming, notes)


def _into_directory(
    whole: Mapping[str, Translated], adapters: Adapters, directory: TensorReader,
    comparison: Comparison, where: str,
) -> _ToWrite:  # fmt: skip
    """The base is in a Hugging Face directory. Its names may differ from those in memory, which the
    adapter has; then transformers tells them."""
    stored = {target.name: target for target in whole_tensors(directory)}
    shapes = {name: target.shape for name, target in stored.items()}
    hub: Mapping[str, HubTensor] = {}
    known = whole.keys() <= shapes.keys() and all(
        len(config.weights(parts.pairs, shapes, where)) == len(parts.pairs)
        for parts, config in adapters
    )
    if not known:
        found = comparison.names([*stored.values()], where, memory=True)
        if not isinstance(found, str) and found is not None and found.memory:
            shapes = {**shapes, **found.memory}
            hub = {tensor.name: tensor for tensor in found.hub or ()}
    else:
        comparison.names([*stored.values()], where)
    changes = _changes(adapters, shapes, where)
    saved = {name: replace(tensor, name=name) for name, tensor in whole.items()}
    moved = [t for t in hub.values() if all(name in saved for name, _ in t.parts)]
    stored |= {t.name: t for t in (renamed(moved, [*saved.values()]) if moved else saved.values())}
    made = [
        _changed(t, *_change_of(hub.get(name), name, changes), where) for name, t in stored.items()
    ]
    return _ToWrite(made, [*changes], HUB)


def _refuse_tied_to_released(
    made: _ToWrite, whole: Mapping[str, Translated], configs: Sequence[LoraConfig], where: str
) -> None:
    """Raise UsageError if an adapter trains the embedding of a model whose directory has no head of
    its own. The trained model's head is the embedding as it was, and that directory has no place
    for both."""
    together = all(config.values.get("ensure_weight_tying") for config in configs)
    headed = find_ties([*(target.name for target in made.targets), _EMBEDDING])
    if not headed and not together and find_ties([*made.changed, *whole, _HEAD]):
        raise UsageError(
            "the adapter trains an embedding that the config ties to the head, and the head was "
            "not trained with it",
            remedy='export it with lora="adapter"; or, if the checkpoint has the base, leave base= '
            "out and pass config= with tie_word_embeddings=False",
            path=where,
        )


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
            remedy="pass naming='module', which transformers 5 loads, or merge it with PEFT",
        )
    ((part, copy),) = hub.parts
    return changes[part], copy


class _Both:
    """One reader for a checkpoint's tensors, which are whole, and for a directory's."""

    def __init__(self, checkpoint: LogicalTensors, directory: TensorReader) -> None:
        self.url = checkpoint.url
        self.held: Mapping[str, RankTensors] = {**directory.held, **checkpoint.held}
        self._checkpoint = checkpoint
        self._directory = directory

    def plan(self, blocks: Sequence[Block]) -> Any:
        own = [block for block in blocks if block.source.tp < 0]
        others = [block for block in blocks if block.source.tp >= 0]
        return self._checkpoint.plan(own), self._directory.plan(others)

    def read(self, plan: Any, buffers: Sequence[memoryview]) -> None:
        self._checkpoint.read(plan[0], buffers)
        self._directory.read(plan[1], buffers)

    def close(self) -> None:
        self._checkpoint.close()
        self._directory.close()


def _changes(
    adapters: Adapters, shapes: Mapping[str, Shape], where: str
) -> dict[str, tuple[Change, ...]]:
    """What the adapters change, by the model's names in memory, whose `shapes` these are; the
    changes of a weight in the adapters' order.

    Raises:
        KeysMismatchError, TensorMismatchError: weights are missing or do not fit the adapter.
        UsageError: DoRA would come after another adapter.
    """
    made: dict[str, tuple[Change, ...]] = {}
    for parts, config in adapters:
        for name, change in _changes_of(parts, config, shapes, where).items():
            if name in made and change.magnitude is not None:
                raise UsageError(
                    f"an adapter with DoRA would be merged into {name} after another adapter. PEFT "
                    "takes the other one out again first, and rounds",
                    remedy="name the adapter with DoRA first, or merge them with PEFT",
                    path=where,
                )
            made[name] = (*made.get(name, ()), change)
    return made


def _changes_of(
    parts: PeftTensors[Translated], config: LoraConfig, shapes: Mapping[str, Shape], where: str
) -> dict[str, Change]:
    weights = config.weights(parts.pairs, shapes, where)
    if lost := sorted(parts.pairs.keys() - set(weights.values())):
        raise KeysMismatchError(
            f"the base weights that the adapter changes are missing: {lost[:8]}",
            remedy="pass base= the Hugging Face directory of the base model, and config= if that "
            "has none",
            path=where,
        )
    made: dict[str, Change] = {}
    for name, module in weights.items():
        made[name] = _change(parts, config, module, name, shapes[name], where)
    return {name: _oriented(change, made, where) for name, change in made.items()}


def _change(
    parts: PeftTensors[Translated], config: LoraConfig, module: str, name: str, shape: Shape,
    where: str,
) -> Change:  # fmt: skip
    a, b = (parts.pairs[module][side] for side in "AB")
    magnitude = parts.magnitudes.get(module)
    parameter = config.has_parameter(name)
    embeds = module in parts.embeddings
    key = name if parameter else module
    flip = embeds or (config.transposes(module) and not parameter)
    experts, rows, columns = shape if len(shape) == 3 else (1, *shape)[:3]
    product = (b.shape[0], a.shape[1])
    if len(shape) == 3:
        flip = product != (rows, columns)
    if len(shape) not in (2, 3) or product != ((columns, rows) if flip else (rows, columns)):
        raise TensorMismatchError(
            f"{name} has the shape {shape}, but the adapter's product has "
            f"{product[::-1] if flip else product}",
            remedy="pass the base that the adapter was trained on, and its own lora_config=",
            path=where,
        )
    if a.shape[0] != config.rank(key) * experts:
        raise TensorMismatchError(
            f"{name} of {experts} experts has LoRA matrices of rank {a.shape[0]}; the config says "
            f"{config.rank(key)} for each",
            remedy="pass lora_config= of this adapter", path=where,
        )  # fmt: skip
    if magnitude is not None and magnitude.shape != ((columns,) if flip else (rows,)):
        raise TensorMismatchError(
            f"{name} has the shape {shape}, and DoRA's vector {magnitude.shape}",
            remedy="pass the base that the adapter was trained on, and its own lora_config=",
            path=where,
        )
    made = Change(
        name, (experts, rows, columns), a, b, config.scaling(key), flip, embeds or parameter,
        magnitude,
    )  # fmt: skip
    if strange := {part.dtype for part in made.adapted} - CASTABLE.keys():
        raise _of_strange_dtype(name, strange, where)
    return made


def _oriented(change: Change, others: Mapping[str, Change], where: str) -> Change:
    """Square matrices of experts do not show whether they are transposed. All parameters of one
    module are alike.

    Raises:
        TensorMismatchError: no other shows it either.
    """
    experts, rows, columns = change.shape
    if rows != columns or experts == 1:
        return change
    place = change.name.rpartition(".")[0]
    for other in others.values():
        if other.name.rpartition(".")[0] == place and other.shape[1] != other.shape[2]:
            return replace(change, flip=other.flip)
    raise TensorMismatchError(
        f"{change.name} has square matrices, and no other parameter of its module has a LoRA pair "
        "that shows their order",
        remedy="merge it with PEFT",
        path=where,
    )


def _changed(
    base: Translated, changes: tuple[Change, ...], copy: Copy | None, where: str
) -> Merged | Translated:
    """A tensor with the changes of the weight of which it is `copy`, or all.

    Raises:
        TensorMismatchError: its dtype cannot be computed with.
        UsageError: it is not a block of the weight.
    """
    if not changes:
        return base
    change = changes[0]  # all are of one shape, and only the first may be DoRA's
    if base.dtype not in CASTABLE:
        raise _of_strange_dtype(base.name, {base.dtype}, where)
    box, turned = Box.whole(change.shape), False
    if copy is not None:
        found = _block(copy, change.shape)
        cut = found is not None and (found[1] or found[0].sizes[2] != change.shape[2])
        if found is None or (change.magnitude is not None and (cut or change.flip)):
            raise UsageError(
                f"released models of this family hold {change.name} in other tensors "
                f"({base.name}), which are not merged with an adapter",
                remedy="pass naming='module', which transformers 5 loads, or merge it with PEFT",
                path=where,
            )
        box, turned = found
    return Merged(base.name, base.dtype, base, changes, box, turned)


def _block(copy: Copy, shape: Shape) -> tuple[Box, bool] | None:
    """The block of a weight that a copy is, and whether it is transposed; None if it is none."""
    sizes, target = copy.sizes, copy.target
    ordered = zip(sizes, target.strides, row_major_strides(sizes), strict=True)
    if target.start or any(size > 1 and stride != unit for size, stride, unit in ordered):
        return None
    steps = copy.source.steps(shape)
    dims = [step.dim for step in steps if step.dim >= 0]
    if any(step.number > 1 and step.step != 1 for step in steps):
        return None
    turned = dims != sorted(dims)
    if turned and sorted((*dims[:-2], *dims[:-3:-1])) != [*dims[:-2], *dims[:-3:-1]]:
        return None
    return Box(tuple(s.at for s in steps), tuple(s.number for s in steps)), turned


def _of_strange_dtype(name: str, dtypes: set[str], where: str) -> TensorMismatchError:
    return TensorMismatchError(
        f"{name}, or its LoRA pair, has dtype {', '.join(sorted(dtypes))}",
        remedy='export it with lora="adapter"; a quantized base is not merged',
        path=where,
    )


def _open_base(
    directory: str | os.PathLike[str], configs: Sequence[LoraConfig], settings: ModelConfig | None
) -> TensorReader:
    """The base's weights in a Hugging Face directory; those that are quantized become numbers."""
    for config in configs:
        config.refuse_biases(os.fspath(directory))
        config.refuse_other_base(os.fspath(directory))
    return dequantized(open_directory(Path(os.fspath(directory))), settings)
