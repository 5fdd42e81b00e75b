"""A translation: the layout that a source's names fit, its proof on shapes, and the targets that
are made from stored tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from smckpt.errors import KeysMismatchError, TensorMismatchError, UsageError
from smckpt.formats.degrees import Degrees
from smckpt.formats.source_facts import SourceFacts
from smckpt.formats.tensors import Block, Holder, RankTensors, TensorKey, TensorReader
from smckpt.translate.cast import CASTABLE
from smckpt.translate.config import ModelConfig
from smckpt.translate.facts import compare_facts, layout_of_facts, refuse_halves
from smckpt.translate.prediction import DROP, KEEP, further_layers, kept_layers, left_out_note
from smckpt.translate.ranks.copied import refuse_equal_layers
from smckpt.translate.ranks.pipeline import some
from smckpt.translate.ranks.translated import Translated, TranslatedSource, whole
from smckpt.translate.stream import equal
from smckpt.translate.tables.dims import Dims, read_dims
from smckpt.translate.tables.families import find_family
from smckpt.translate.tables.layouts import get_layout, layouts_of
from smckpt.translate.tables.pieces import (
    LayoutTensor,
    Side,
    compile_blocks,
    dropped,
    folded,
    tensors_of,
)
from smckpt.translate.tables.table import TensorLayout
from smckpt.translate.tables.vocabulary import check_rows, padded_rows

# endings of the classes of the models that tables are of
HEADED = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
# Experts as transformers 5 packs them in memory; some families have other names on disk.
_PACKED = re.compile(r"\.mlp\.experts\.gate_up_proj$")


def looks_packed(names: Collection[str], model_type: str | None) -> bool:
    """Whether experts are packed as in memory, although the family's released models have them one
    by one."""
    family = find_family(model_type) if model_type else None
    return family is not None and family.packs_experts and any(map(_PACKED.search, names))


def choose_layout(
    names: Collection[str], dims: Dims, layout: str | TensorLayout | None, ep: int
) -> TensorLayout:
    """The requested layout, or the only one that the names fit.

    Raises:
        UsageError: no layout fits, or several do; the message names them.
        KeysMismatchError: the requested layout does not fit; the message lists the names.
    """
    if layout is not None:
        chosen = get_layout(layout, dims.family)
        missing, unexpected = unmatched(names, chosen, dims, ep)
        if missing or unexpected:
            raise KeysMismatchError(
                f"the names do not fit the layout {chosen.name} of a {dims.family.name} model: "
                f"missing {_some(missing)}; unexpected {_some(unexpected)}",
                remedy="check layout=, config=, ep= and etp=, or add rows to a layout of your own",
            )
        return chosen
    fits, nearest = _fitting(names, dims, ep)
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise UsageError(
            f"the names fit several layouts: {', '.join(sorted(f.name for f in fits))}",
            remedy="pass layout= the one that the model was trained with",
        )
    _, name, missing, unexpected = min(nearest)
    raise UsageError(
        f"the names fit no known layout of {dims.family.name}; the nearest is {name}, with missing "
        f"{_some(missing)}; unexpected {_some(unexpected)}",
        remedy="check config=, ep= and etp=, pass layout=, or register a layout of your own",
    )


def _fitting(
    names: Collection[str], dims: Dims, ep: int
) -> tuple[list[TensorLayout], list[tuple[int, str, list[str], list[str]]]]:
    """The layouts that the names fit; and of each layout, how many names do not, its name, and the
    names that are missing and unexpected."""
    fits: dict[frozenset[LayoutTensor], TensorLayout] = {}
    nearest: list[tuple[int, str, list[str], list[str]]] = []
    for name, candidate in layouts_of(dims.family).items():
        with suppress(KeysMismatchError):  # it has no rows for such a model
            missing, unexpected = unmatched(names, candidate, dims, ep)
            nearest.append((len(missing) + len(unexpected), name, missing, unexpected))
            if not missing and not unexpected:
                # of two that are the same for this model, one counts: experts alone may differ
                fits.setdefault(frozenset(tensors_of(candidate, dims, ep)), candidate)
    return [*fits.values()], nearest


def unmatched(
    names: Collection[str], layout: TensorLayout, dims: Dims, ep: int
) -> tuple[list[str], list[str]]:
    """The names that the layout needs and the source lacks, and the names of the source that the
    layout does not have.

    A head that the config ties to the embedding may be there.
    """
    wanted = {stored.name for stored in tensors_of(layout, dims, ep)}
    heads = {row.name for row in layout.rows if row.roles == ("head",)} if dims.tied else set()
    unexpected = [n for n in sorted(set(names) - wanted - heads) if not dropped(layout, n)]
    return sorted(wanted - set(names)), unexpected


def dropped_names(names: Collection[str], layout: TensorLayout, dims: Dims) -> list[str]:
    """The names of the source that the layout drops from this family, and has in others."""
    wanted = {stored.name for stored in tensors_of(layout, dims, 1)}
    known = [re.escape(row.name).replace(r"\{i\}", r"\d+") for row in layout.rows]
    return [
        name
        for name in sorted(set(names) - wanted)
        if dropped(layout, name) and any(re.fullmatch(pattern, name) for pattern in known)
    ]


def _some(names: list[str]) -> str:
    return f"{names[:8]}" + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def model_dims(config: ModelConfig | None, where: str, predicting: int = 0) -> Dims:
    """The sizes that a translation needs, with so many layers that predict further tokens.

    Raises:
        UsageError: there is no config, or its family has no table.
    """
    if config is None:
        raise UsageError(
            "the translation of a tensor-parallel layout needs the sizes in the model's "
            "config, but no config was given",
            remedy="pass config= (a directory, a config.json, or model.config)",
            path=where,
        )
    return read_dims(config.values, where, predicting=predicting)


@dataclass(frozen=True)
class Proof:
    """A translation to Hugging Face that was proven on shapes. `tied_head`: the source has a head
    that the config ties to the embedding. `rows`: how many rows of the vocabulary are stored."""

    layout: TensorLayout
    side: Side
    hub: Side
    blocks: dict[TensorKey, list[Block]]
    tied_head: bool
    rows: int
    notes: tuple[str, ...] = ()


def prove(
    reader: Holder, config: ModelConfig | None, layout: str | TensorLayout | None, degrees: Degrees,
    padded_vocab_size: int | None = None, *, trims: bool = True, predicting: int = 0,
    facts: Sequence[SourceFacts] = (),
) -> Proof:  # fmt: skip
    """Prove that a reader's tensors make Hugging Face's tensors, with so many layers that predict
    further tokens. Nothing is read. Padding is checked if it is cut off (`trims`).

    Args:
        padded_vocab_size: how many rows of the vocabulary are stored; None: see `check_rows`.
        facts: what the source says of the model.

    Raises:
        UsageError, KeysMismatchError: the names fit no layout, or several; the message lists them.
        TensorMismatchError, TopologyError: shapes, degrees or dtypes do not fit.
    """
    side, tied_head, notes, rows = _source_side(
        reader, config, layout, degrees, padded_vocab_size, trims=trims, predicting=predicting,
        facts=facts, keep_tied=True,
    )  # fmt: skip
    hub = hub_side(side.dims)
    return Proof(side.layout, side, hub, compile_blocks(side, hub), tied_head, rows, notes)


def _source_side(
    reader: Holder, config: ModelConfig | None, layout: str | TensorLayout | None, degrees: Degrees,
    padded_vocab_size: int | None, *, trims: bool, predicting: int, facts: Sequence[SourceFacts],
    keep_tied: bool,
) -> tuple[Side, bool, tuple[str, ...], int]:  # fmt: skip
    """The tensors of a reader as a side; whether they have a head that the config ties to the
    embedding; notes; and how many rows of the vocabulary are stored. keep_tied: such a head is
    among the roles."""
    dims = model_dims(config, reader.url, predicting)
    chosen = choose_layout(reader.held, dims, layout, degrees.ep)
    assert config is not None
    refuse_halves(config, chosen)
    for one in facts:
        chosen = layout_of_facts(one, chosen, dims.family.zero_centred, given=layout is not None)
    tied_head = dims.tied and _head_of(chosen) in reader.held
    if tied_head and keep_tied:
        dims = replace(dims, once=dims.once | {"head"})
    side = side_of_reader(reader, chosen, dims, degrees)
    rows = size = dims.sizes["V"]
    if trims:
        rows = check_rows(side.rows, size, degrees.tp, padded_vocab_size)
    notes = [note for one in facts for note in compare_facts(one, dims, config, chosen, rows)]
    fits = (
        [] if layout is None else [one.name for one in _fitting(reader.held, dims, degrees.ep)[0]]
    )
    if len(fits) > 1:
        notes.append(
            f"the tensors fit the layouts {' and '.join(fits)} alike: nothing but layout= says "
            f"that they are in {chosen.name}, so compare the export's logits with the trainer's"
        )
    return side, tied_head, tuple(notes), rows


def _head_of(layout: TensorLayout, role: str = "head") -> str:
    """The name of the output head in a layout, or of another role outside its layers."""
    return next((r.name for r in layout.rows if r.roles == (role,) and not r.of_layers), "")


def find_further(
    reader: Holder, config: ModelConfig | None, mtp: str | None
) -> tuple[Mapping[str, int], int, bool]:
    """The tensors of layers that predict further tokens, as `further_layers` gives them; how many
    of the layers are kept; and whether what is kept is whole and has the names of releases,
    although the model itself may have others. mtp: as in `kept_layers`."""
    family = model_dims(config, reader.url).family
    further = further_layers(reader.held, family, config)
    kept = kept_layers(further, family, config, mtp)
    if not kept:
        return further, 0, False
    dims = model_dims(config, reader.url, kept)
    released = {p.name for p in tensors_of(family.hub, dims, 1) if p.layer >= dims.layers}
    held = [reader.held[name] for name in further]
    is_whole = all(t.whole is not None or t.shards.keys() == {(0, 0)} for t in held)
    return further, kept, is_whole and released.issuperset(further)


def side_of_reader(reader: Holder, layout: TensorLayout, dims: Dims, degrees: Degrees) -> Side:
    side = Side(layout, dims, degrees)
    for tensor in tensors_of(layout, dims, degrees.ep):
        held = reader.held[tensor.name]
        side.add(tensor, held)
        if not held.dtype.startswith(("float", "bfloat")):
            raise TensorMismatchError(
                f"{held.name} has dtype {held.dtype}, but weights must be floating point",
                remedy="translate the weights before they are quantized",
            )
    return side


def hub_side(dims: Dims) -> Side:
    """Hugging Face's tensors, as a layout of one rank."""
    side = Side(dims.family.hub, dims, Degrees.of(1, 1))
    for tensor in tensors_of(side.layout, dims, 1):
        shape = side.local_shape(tensor, dims.sizes["V"], 1, 1)
        side.add(tensor, RankTensors(tensor.name, "", {(0, 0): shape}))
    return side


def side_of_ranks(layout: TensorLayout, dims: Dims, degrees: Degrees, multiple: int) -> Side:
    """The tensors that ranks would hold, with the vocabulary padded to a multiple for each rank."""
    side = Side(layout, dims, degrees)
    vocabulary = padded_rows(dims.sizes["V"], degrees.tp, multiple)
    for tensor in tensors_of(layout, dims, degrees.ep):
        parts = degrees.etp if tensor.row.of_experts else degrees.tp
        parts = 1 if tensor.row.tp is None else parts
        shape = side.local_shape(tensor, vocabulary, parts, degrees.ep)
        stored = folded(tensor.row, shape)
        shards = {(t, c): stored for c in range(degrees.columns) for t in range(degrees.tp)}
        side.add(tensor, RankTensors(tensor.name, "", shards))
    return side


def source_of_ranks(
    reader: TensorReader, config: ModelConfig, layout: str | TensorLayout | None, degrees: Degrees,
    padded_vocab_size: int | None = None, mtp: str | None = DROP,
    facts: Sequence[SourceFacts] = (), *, equal_ranks: bool = False,
) -> tuple[Side, int, tuple[str, ...]]:  # fmt: skip
    """The tensors of a layout's ranks as a side, how many layers that predict further tokens are
    among them, and notes. equal_ranks: ranks may hold the same.

    Raises:
        as `prove`; or copies differ.
    """
    further, kept, released = find_further(reader, config, mtp)
    if released:
        raise UsageError(
            "layers that predict further tokens have the names of releases here, and the others "
            "those of a layout",
            remedy=f"leave mtp= out, or export with mtp={KEEP!r}, and import that",
        )
    rest = reader if kept else some(reader, [n for n in reader.held if n not in further])
    side, tied_head, notes, _ = _source_side(
        rest, config, layout, degrees, padded_vocab_size, trims=True, predicting=kept, facts=facts,
        keep_tied=False,
    )  # fmt: skip
    if tied_head:
        _refuse_other_head(reader, side)
    alike = refuse_unequal(reader, side, equal_ranks)
    return side, kept, (*notes, *alike, *(() if kept else left_out_note(further)))


def source_of_release(reader: TensorReader, dims: Dims) -> Side:
    """The whole tensors of a release as a side.

    Raises:
        KeysMismatchError, TensorMismatchError: they are not a whole model.
    """
    hub = dims.family.hub
    missing, unexpected = unmatched(reader.held, hub, dims, 1)
    if missing or unexpected:
        raise KeysMismatchError(
            f"the files are not a whole {dims.family.name} model: missing {missing[:8]}, "
            "unexpected "
            f"{unexpected[:8]}",
            remedy="pass a directory with all weights and the config that belongs to them; one "
            "that transformers saved of a model that was never loaded gets released names by "
            "export_hf",
        )
    side = side_of_reader(reader, hub, dims, Degrees.of(1, 1))
    if dims.tied and _head_of(hub) in reader.held:
        _refuse_other_head(reader, side)
    refuse_unequal(reader, side, equal_ranks=True)  # no ranks wrote them
    return side


def to_ranks(
    reader: TensorReader, source: Side, layout: TensorLayout, degrees: Degrees, multiple: int
) -> tuple[TranslatedSource, dict[tuple[int, int], dict[str, Translated]]]:
    """The tensors of each rank (tp, column) in a layout, by name, made from those of a reader."""
    target = side_of_ranks(layout, source.dims, degrees, multiple)
    blocks = compile_blocks(source, target)
    dtypes = {key: held.dtype for held in reader.held.values() for key in held.keyed}
    out: dict[tuple[int, int], dict[str, Translated]] = {}
    for key in target.shapes:
        made = target_of(key, source, target, blocks[key], dtypes)
        out.setdefault((key.tp, key.ep), {})[key.name] = made
    return TranslatedSource(reader), out


def _refuse_other_head(reader: TensorReader, side: Side) -> None:
    """Refuse a head that differs from the embedding to which the config ties it."""
    head, embed = (reader.held[_head_of(side.layout, role)] for role in ("head", "embed"))
    for one, two in zip(embed.keyed, head.keyed, strict=False):
        a, b = (
            whole(key, held.keyed[key], held.dtype) for key, held in ((one, embed), (two, head))
        )
        if not equal(TranslatedSource(reader), a, b):
            raise TensorMismatchError(
                f"tie_word_embeddings is true, but {head.name} and {embed.name} differ",
                remedy="set tie_word_embeddings to false in the config if the model has both",
            )


def refuse_unequal(reader: TensorReader, side: Side, equal_ranks: bool) -> tuple[str, ...]:
    """Refuse copies that differ, and layers of two ranks that do not: as `refuse_equal_layers`."""
    source, differ = TranslatedSource(reader), []
    for key, other in side.copies:
        dtype = reader.held[key.name].dtype
        one, two = (whole(k, side.shapes[k], dtype) for k in (key, other))
        if not equal(source, one, two):
            differ.append(
                f"{key.name} (tp, ep) {key.tp, key.ep} and {other.tp, other.ep}"
                if key.name == other.name else f"{other.name} and {key.name}"
            )  # fmt: skip
    if differ:
        raise TensorMismatchError(
            f"{len(differ)} tensors that should be copies differ: {'; '.join(differ[:8])}",
            remedy="pass states of one model and step, and check layout=; if they belong to layers "
            f"that predict further tokens, mtp={DROP!r} leaves these out",
        )
    return () if equal_ranks else refuse_equal_layers(reader, side)


def target_of(
    key: TensorKey, source: Side, side: Side, blocks: list[Block], dtypes: Mapping[TensorKey, str]
) -> Translated:
    found = {dtypes[block.source] for block in blocks}
    if not found and side.padding.get(side.original(key)):  # all rows of this rank are padding
        found = {max(dtypes.values(), key=list(dtypes.values()).count)}
    if len(found) != 1:
        raise TensorMismatchError(
            f"{key.name} would be made from parts of different dtypes: {sorted(found)}",
            remedy="save all parts in one dtype",
        )
    (dtype,) = found
    shape = side.shapes[key]
    stored = side.stored.get(key)
    made = Translated(
        key.name, dtype, stored or shape, dtype, tuple(blocks),
        side.padding.get(side.original(key), 0), view=shape if stored else None,
    )  # fmt: skip
    shifts = {side.shifts.get(key, 0.0) - source.shifts.get(b.source, 0.0) for b in blocks}
    joins = {source.joined[b.source][0] if b.source in source.joined else "" for b in blocks}
    if len(shifts) > 1 or len(joins) > 1:
        raise TensorMismatchError(
            f"{key.name} would be made from parts with different shift= or copies=",
            remedy="give the rows of the parts that are fused there the same shift= and copies=",
        )
    if not any(shifts | joins):
        return made
    if made.dtype not in CASTABLE:
        raise TensorMismatchError(
            f"{made.name} has dtype {made.dtype}, with which smckpt does not compute",
            remedy=f"rows with shift= or copies= are for {', '.join(CASTABLE)}",
        )
    ranks = {len(source.joined[b.source][1]) for b in made.blocks if b.source in source.joined}
    terms = tuple(
        tuple(replace(b, source=source.joined[b.source][1][number]) for b in made.blocks)
        for number in range(max(ranks, default=0))
    )
    return replace(made, terms=terms, mean=joins == {"mean"}, shift=next(iter(shifts)))
