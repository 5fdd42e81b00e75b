"""A translation: the targets in Hugging Face's layout that a store's tensors make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from smckpt.errors import KeysMismatchError, TensorMismatchError, UsageError
from smckpt.layout.mesh import Shape
from smckpt.translate.cast import CASTABLE
from smckpt.translate.compile import Block, compile_blocks
from smckpt.translate.config import ModelConfig
from smckpt.translate.degrees import Degrees
from smckpt.translate.detect import choose_layout, unmatched
from smckpt.translate.dims import Dims, read_dims
from smckpt.translate.hub import FAMILIES
from smckpt.translate.names import find_ties
from smckpt.translate.pieces import Held, Key, Side, folded, places_of
from smckpt.translate.stores import Store
from smckpt.translate.stream import CHUNK
from smckpt.translate.table import Layout
from smckpt.translate.translated import Translated, TranslatedSource, whole
from smckpt.translate.vocabulary import check_rows, padded_rows

__all__ = [
    "Holder",
    "Proof",
    "Translation",
    "from_hub",
    "model_dims",
    "prove",
    "target_of",
    "to_hub",
]


class Holder(Protocol):
    """What a proof needs of a store."""

    @property
    def url(self) -> str: ...

    @property
    def held(self) -> Mapping[str, Held]: ...

    def view(self, key: Key, shape: Shape) -> None:
        """Give a tensor out in another shape from now on, its elements in the same order."""


@dataclass(frozen=True)
class Translation:
    """Targets, in the source's dtypes, and what reads them; `left_out` are tied to another.
    vocabulary: how many rows of it are written, and how many are stored."""

    layout: str
    targets: tuple[Translated, ...]
    source: TranslatedSource
    left_out: tuple[str, ...]
    vocabulary: tuple[int, int]


def model_dims(config: ModelConfig | None, where: str) -> Dims:
    """The sizes that a translation needs.

    Raises:
        UsageError: no config, or one of a family that no table knows.
    """
    if config is None:
        raise UsageError(
            "a tensor-parallel layout is translated by the sizes in the model's config, and none "
            "was given",
            remedy="pass config= (a directory, a config.json, or model.config)",
            path=where,
        )
    family = str(config.values["model_type"])
    if family not in FAMILIES:
        raise UsageError(
            f"no table knows the model type {family!r}",
            remedy=f"translated are {', '.join(sorted(FAMILIES))}; others are exported by their "
            "own names, which this source does not have",
            path=where,
        )
    return read_dims(config.values)


@dataclass(frozen=True)
class Proof:
    """A translation to the hub that was proven on shapes; `tied_head`: the source has a head that
    the config ties to the embedding; `rows`: of the vocabulary, as it is stored."""

    layout: Layout
    side: Side
    hub: Side
    blocks: dict[Key, list[Block]]
    tied_head: bool
    rows: int


def prove(
    store: Holder, config: ModelConfig | None, layout: str | Layout | None, degrees: Degrees,
    padded_vocab_size: int | None = None, *, trims: bool = True,
) -> Proof:  # fmt: skip
    """Show that what a store holds makes the hub's tensors; nothing is read. Padding is judged
    where it is cut off (`trims`).

    Raises:
        as `to_hub`.
    """
    dims = model_dims(config, store.url)
    chosen = choose_layout(store.held, dims, layout, degrees.ep, store.url)
    heads = [row.name for row in chosen.rows if row.roles == ("head",)]
    tied_head = dims.tied and any(name in store.held for name in heads)
    if tied_head:
        dims = replace(dims, once=dims.once | {"head"})
    side = side_of_store(store, chosen, dims, degrees)
    rows = size = dims.sizes["V"]
    if trims:
        rows = check_rows(side.rows, size, degrees.tp, padded_vocab_size, store.url)
    hub = hub_side(dims)
    return Proof(chosen, side, hub, compile_blocks(side, hub), tied_head, rows)


def to_hub(
    store: Store, config: ModelConfig | None, layout: str | Layout | None, degrees: Degrees,
    padded_vocab_size: int | None = None,
) -> Translation:  # fmt: skip
    """Translate the tensors of a store; nothing but headers, and what must be equal, is read.

    Args:
        padded_vocab_size: rows of the vocabulary that are stored; None: as `check_rows` has it.

    Raises:
        UsageError, KeysMismatchError: names fit no layout, or several; lists them.
        TensorMismatchError, TopologyError: shapes, degrees or dtypes do not fit; copies differ.
    """
    proof = prove(store, config, layout, degrees, padded_vocab_size)
    source = TranslatedSource(store)
    _refuse_unequal(source, proof.side, store)
    dtypes = {key: held.dtype for held in store.held.values() for key in _keys(held)}
    hub = proof.hub
    targets = [target_of(k, proof.side, hub, proof.blocks[k], dtypes) for k in hub.shapes]
    left_out: tuple[str, ...] = ()
    if proof.tied_head:
        targets, left_out = _without_tied(targets, source)
    vocabulary = proof.side.dims.sizes["V"], proof.rows
    return Translation(proof.layout.name, tuple(targets), source, left_out, vocabulary)


def side_of_store(store: Holder, layout: Layout, dims: Dims, degrees: Degrees) -> Side:
    side = Side(layout, dims, degrees)
    for place in places_of(layout, dims, degrees.ep):
        side.add(place, store.held[place.name])
        _refuse_no_weight(store.held[place.name])
    for key in side.stored:
        store.view(key, side.shapes[key])
    return side


def _refuse_no_weight(held: Held) -> None:
    if not held.dtype.startswith(("float", "bfloat")):
        raise TensorMismatchError(
            f"{held.name} is {held.dtype}, which is no weight of a table's",
            remedy="translate weights in floating point, before they are quantized",
        )


def hub_side(dims: Dims) -> Side:
    """Hugging Face's tensors: of one rank."""
    side = Side(FAMILIES[dims.family], dims, Degrees.of(1, 1))
    for place in places_of(side.layout, dims, 1):
        shape = side.local_shape(place, dims.sizes["V"], 1, 1)
        side.add(place, Held(place.name, "", {(0, 0): shape}))
    return side


def side_of_ranks(layout: Layout, dims: Dims, degrees: Degrees, multiple: int) -> Side:
    """The tensors that ranks would hold, the vocabulary padded to a multiple for each rank."""
    side = Side(layout, dims, degrees)
    vocabulary = padded_rows(dims.sizes["V"], degrees.tp, multiple)
    for place in places_of(layout, dims, degrees.ep):
        parts = degrees.etp if place.row.of_experts else degrees.tp
        parts = 1 if place.row.tp is None else parts
        shape = side.local_shape(place, vocabulary, parts, degrees.ep)
        said = folded(place.row, shape)
        shards = {(t, c): said for c in range(degrees.columns) for t in range(degrees.tp)}
        side.add(place, Held(place.name, "", shards))
    return side


def from_hub(
    store: Store, dims: Dims, layout: Layout, degrees: Degrees, multiple: int
) -> tuple[TranslatedSource, dict[tuple[int, int], list[Translated]]]:
    """The tensors of each rank (tp, column) in a layout, made of Hugging Face's."""
    hub = FAMILIES[dims.family]
    missing, unexpected = unmatched(store.held, hub, dims, 1)
    if missing or unexpected:
        raise KeysMismatchError(
            f"the files are no whole {dims.family} model: missing {missing[:8]}, unexpected "
            f"{unexpected[:8]}",
            remedy="pass a directory with all weights and the config that belongs to them",
            path=store.url,
        )
    _refuse_other_head(store, hub, dims)
    source = side_of_store(store, hub, dims, Degrees.of(1, 1))
    target = side_of_ranks(layout, dims, degrees, multiple)
    blocks = compile_blocks(source, target)
    dtypes = {Key(name, 0, 0): held.dtype for name, held in store.held.items()}
    out: dict[tuple[int, int], list[Translated]] = {}
    for key in target.shapes:
        out.setdefault((key.tp, key.ep), []).append(
            target_of(key, source, target, blocks[key], dtypes)
        )
    return TranslatedSource(store), out


def _refuse_other_head(store: Store, hub: Layout, dims: Dims) -> None:
    """A head that the config ties to the embedding may be there, if it is the same."""
    names = {row.roles[0]: row.name for row in hub.rows if row.roles[0] in ("embed", "head")}
    if not dims.tied or names.get("head") not in store.held:
        return
    one, two = (
        whole(Key(n, 0, 0), store.held[n].shards[0, 0], store.held[n].dtype)
        for n in (names["embed"], names["head"])
    )
    if not TranslatedSource(store).equal(one, two, CHUNK):
        raise TensorMismatchError(
            f"tie_word_embeddings is true, but {two.name} and {one.name} differ",
            remedy="set tie_word_embeddings to false in the config if the model has both",
            path=store.url,
        )


def _keys(held: Held) -> list[Key]:
    if held.whole is not None:
        return [Key(held.name)]
    return [Key(held.name, tp, ep) for tp, ep in held.shards]


def _refuse_unequal(source: TranslatedSource, side: Side, store: Store) -> None:
    differ = []
    for key, other in side.copies:
        dtype = store.held[key.name].dtype
        one, two = (whole(k, side.shapes[k], dtype) for k in (key, other))
        if not source.equal(one, two, CHUNK):
            differ.append(f"{key.name} (tp, ep) {key.tp, key.ep} and {other.tp, other.ep}")
    if differ:
        raise TensorMismatchError(
            f"{len(differ)} tensors that ranks hold in copies differ: {'; '.join(differ[:8])}",
            remedy="these ranks' states are not of one model and step, or layout= is wrong",
            path=store.url,
        )


def target_of(
    key: Key, source: Side, side: Side, blocks: list[Block], dtypes: Mapping[Key, str]
) -> Translated:
    found = {dtypes[block.source] for block in blocks}
    if not found and side.padding.get(side.original(key)):  # a rank's rows are all padding
        found = {max(dtypes.values(), key=list(dtypes.values()).count)}
    if len(found) != 1:
        raise TensorMismatchError(
            f"{key.name} would be made of parts of different dtypes: {sorted(found)}",
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
            f"{key.name} would be made of parts that are computed in different ways",
            remedy="give the rows of what is fused there the same shift= and copies=",
        )
    return _computed(made, source, shifts, joins)


def _computed(made: Translated, source: Side, shifts: set[float], joins: set[str]) -> Translated:
    """With the terms and the shift of its blocks."""
    if not any(shifts | joins):
        return made
    if made.dtype not in CASTABLE:
        raise TensorMismatchError(
            f"{made.name} has dtype {made.dtype}, which is not computed with",
            remedy=f"rows with shift= or copies= are for {', '.join(CASTABLE)}",
        )
    ranks = {len(source.joined[b.source][1]) for b in made.blocks if b.source in source.joined}
    terms = tuple(
        tuple(replace(b, source=source.joined[b.source][1][number]) for b in made.blocks)
        for number in range(max(ranks, default=0))
    )
    return replace(made, terms=terms, mean=joins == {"mean"}, shift=next(iter(shifts)))


def _without_tied(
    targets: list[Translated], source: TranslatedSource
) -> tuple[list[Translated], tuple[str, ...]]:
    by_name = {target.name: target for target in targets}
    ties = find_ties(by_name)
    for tie in ties:
        if not source.equal(by_name[tie.kept], by_name[tie.left_out], CHUNK):
            raise TensorMismatchError(
                f"tie_word_embeddings is true, but {tie.left_out} and {tie.kept} differ",
                remedy="set tie_word_embeddings to false in the config if the model was trained "
                "with both; else the source is not of this model",
                path=source.store.url,
            )
    names = tuple(tie.left_out for tie in ties)
    return [t for t in targets if t.name not in names], names
