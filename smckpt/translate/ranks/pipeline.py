"""Ranks and pipeline stages as one model: the tensors of all stages, by the whole model's names.

A stage often numbers its layers from 0. In Megatron-core's order, chunk v of stage p holds the
layers that follow those of chunk v of stage p - 1, and chunk v of the first stage those that follow
chunk v - 1 of the last one. So with n layers in each chunk, layer i of it is layer
(v * pp + p) * n + i of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from smckpt.errors import TensorMismatchError, TopologyError, UsageError
from smckpt.formats.degrees import Degrees
from smckpt.formats.readers.rank_files import open_stages
from smckpt.formats.readers.rank_sources import RankFilesFound
from smckpt.formats.source_facts import VPP
from smckpt.formats.tensors import Block, RankTensors, TensorReader
from smckpt.translate.facts import refuse_other_ranks
from smckpt.translate.ranks.copied import refuse_equal_ranks
from smckpt.translate.ranks.translated import Translated, TranslatedSource, whole
from smckpt.translate.stream import equal
from smckpt.translate.tables.dims import Dims
from smckpt.translate.tables.pieces import tensors_of
from smckpt.translate.tables.table import TensorLayout

_CHUNK = re.compile(r"(\d+)\.(.+)")  # of a list of chunks' state dicts, or of model0, model1, …
_TOWER = r"^(?:model\.)?(?:visual|vision_\w+|multi_modal_projector)\."  # before all layers
# what has numbers of its own: a vision tower, and what follows all layers
_OUTSIDE = re.compile(rf"mtp\.|{_TOWER}")
_FIRST = re.compile(rf"({_TOWER}|embed(?!_out)|\bwte\b|\bwpe\b)")  # the first stage's names
_BEFORE_LAYERS = frozenset({"embed", "pos", "embed_norm", "embed_norm_b"})  # roles
_LAST = re.compile(r"(norm|\bln_f\b)")  # the last norm's


@dataclass
class _Chunk:
    """A stage's part of the model that is not interrupted by another stage's. layers: number in the
    chunk's names → the names without that number, before and after it, and the stored name."""

    stage: int
    number: int
    layers: dict[int, list[tuple[str, str, str]]] = field(default_factory=dict)
    outside: dict[str, str] = field(default_factory=dict)  # name → stored name

    @property
    def text(self) -> str:
        return f"stage {self.stage}" + (f", chunk {self.number}" if self.number else "")

    def add(self, name: str, stored: str) -> None:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if at is None or _OUTSIDE.match(name):
            self.outside[name] = stored
        else:
            split = ".".join(parts[:at]), ".".join(parts[at + 1 :]), stored
            self.layers.setdefault(int(parts[at]), []).append(split)


class JoinedTensors:
    """Tensors of several readers as one, by other names; of all stages, by those of the whole
    model."""

    def __init__(
        self, stages: Sequence[TensorReader], stored_tensors: Mapping[str, tuple[int, str]],
        copies: Sequence[tuple[str, int, str]] = (),
    ) -> None:  # fmt: skip
        """
        Args:
            stored_tensors: name → the stage that is read, and the name there.
            copies: (name, stage, name there): another stage's tensor, which must be equal.

        Raises:
            TensorMismatchError: copies differ.
        """
        self.url = stages[0].url
        self._stages = stages
        self._stored = dict(stored_tensors)
        self.held: Mapping[str, RankTensors] = {
            name: replace(stages[stage].held[stored], name=name)
            for name, (stage, stored) in stored_tensors.items()
        }
        source = TranslatedSource(self)
        for name, stage, stored in copies:
            other = replace(self._stages[stage].held[stored], name=name)
            alias = f"{name} of stage {stage}"
            self._stored[alias] = stage, stored
            for key, shape in self.held[name].keyed.items():
                theirs = other.keyed.get(key)
                one = whole(key, shape, self.held[name].dtype)
                two = None if theirs is None else whole(
                    key._replace(name=alias), theirs, other.dtype
                )  # fmt: skip
                if two is None or not equal(source, one, two):
                    raise TensorMismatchError(
                        f"the first stage's {name} and that of stage {stage} differ, but the "
                        "model has one",
                        remedy="pass the stages of one model and step, in their order",
                        path=self.url,
                    )

    def plan(self, blocks: Sequence[Block]) -> list[tuple[int, Any]]:
        by_stage: dict[int, list[Block]] = {}
        for block in blocks:
            stage, stored = self._stored[block.source.name]
            key = block.source._replace(name=stored)
            by_stage.setdefault(stage, []).append(replace(block, source=key))
        return [(stage, self._stages[stage].plan(own)) for stage, own in by_stage.items()]

    def read(self, plan: list[tuple[int, Any]], buffers: Sequence[memoryview]) -> None:
        for stage, own in plan:
            self._stages[stage].read(own, buffers)

    def close(self) -> None:
        for stage in self._stages:
            stage.close()


def some(reader: TensorReader, names: Iterable[str]) -> JoinedTensors:
    """Some of a reader's tensors."""
    return JoinedTensors((reader,), {name: (0, name) for name in names})


def by_name(stages: Sequence[TensorReader]) -> JoinedTensors:
    """The parts of one model, by its own names, whichever stage has them.

    Raises:
        TensorMismatchError: a tensor that several stages hold differs.
    """
    stored_tensors: dict[str, tuple[int, str]] = {}
    copies: list[tuple[str, int, str]] = []
    for number, stage in enumerate(stages):
        copies += [(name, number, name) for name in stage.held if name in stored_tensors]
        stored_tensors = {**{name: (number, name) for name in stage.held}, **stored_tensors}
    return JoinedTensors(stages, stored_tensors, copies)


def merged(
    stages: Sequence[TensorReader], layers: int | None, vpp: int | None, where: str,
    stated: int | None = None,
) -> JoinedTensors:  # fmt: skip
    """The stages of a model as one reader.

    Args:
        stages: in their order.
        layers: how many layers the model has, if that is known.
        vpp: how many chunks each stage has; None: as many as the names show, or one. If the names
            show none, a stage's layers are cut into so many equal chunks.
        stated: how many chunks the source says that each stage has, if it does.

    Raises:
        TopologyError: a stage or chunk is missing or in another place, or the layers are not those
            of one model.
        UsageError: `vpp` is not what the names show.
        TensorMismatchError: a tensor that several stages hold differs.
    """
    out: dict[tuple[int, int], _Chunk] = {}
    for number, stage in enumerate(stages):
        named = [(name, _CHUNK.fullmatch(name)) for name in stage.held]
        split = all(match for _, match in named)
        for name, match in named:
            at, own = (int(match[1]), match[2]) if split and match else (0, name)
            out.setdefault((number, at), _Chunk(number, at)).add(own, name)
    counts = {p: sum(stage == p for stage, _ in out) for p in range(len(stages))}
    if len(set(counts.values())) > 1:
        _refuse(f"the stages have different numbers of chunks: {counts}", where)
    chunks = list(out.values())
    found = 1 + max(chunk.number for chunk in chunks)
    numbers = [number for chunk in chunks for number in chunk.layers]
    names_are_global = sorted(numbers) == list(range(len(numbers)))
    if not names_are_global:
        for chunk in chunks:
            if sorted(chunk.layers) != list(range(len(chunk.layers))):
                _refuse(
                    f"{chunk.text} has layers {sorted(chunk.layers)[:8]}, which are neither "
                    "numbered from 0 nor, with those of the other stages, all layers of a model",
                    where,
                )  # fmt: skip
    if vpp is None and stated not in (None, found) and not names_are_global:
        _refuse(
            f"the source says that each stage has {stated} chunks, but the names show {found}",
            where,
        )
    if vpp is not None and vpp != found and (found > 1 or names_are_global):
        raise UsageError(
            f"vpp={vpp}, but each stage has {found} chunks"
            + (", whose layers have the model's numbers" if names_are_global else ""),
            remedy="leave vpp= out",
            path=where,
        )
    if vpp is not None and vpp != found:
        chunks = [part for chunk in chunks for part in _cut(chunk, vpp, where)]
    chunks.sort(key=lambda chunk: (chunk.number, chunk.stage))
    first, last = chunks[0], chunks[-1]
    for chunk in chunks:
        for name in chunk.outside:
            begins, ends = _FIRST.search(name), _LAST.search(name)
            # the last stage may have a copy of the embedding, for a tied head
            if begins and chunk is not first and not (chunk is last and name in first.outside):
                _refuse(f"{chunk.text} holds {name}, which the first stage should have", where)
            if ends and not begins and chunk is not last:
                _refuse(f"{chunk.text} holds {name}, which the last stage should have", where)
    total = sum(len(chunk.layers) for chunk in chunks)
    if layers is not None and total != layers:
        _refuse(
            f"the {len(stages)} stages hold {total} layers ("
            + ", ".join(f"{chunk.text}: {len(chunk.layers)}" for chunk in chunks[:8])
            + f"), but the config says {layers}", where,
        )  # fmt: skip
    stored_tensors: dict[str, tuple[int, str]] = {}
    copies: list[tuple[str, int, str]] = []
    before = 0
    for chunk in chunks:
        for number, tensors in chunk.layers.items():
            layer = str(number if names_are_global else number + before)
            for head, tail, stored in tensors:
                name = ".".join(filter(None, (head, layer, tail)))
                stored_tensors[name] = chunk.stage, stored
        before += len(chunk.layers)
        for name, stored in chunk.outside.items():
            if name in stored_tensors:
                copies.append((name, chunk.stage, stored))
            else:
                stored_tensors[name] = chunk.stage, stored
    return JoinedTensors(stages, stored_tensors, copies)


def _cut(chunk: _Chunk, count: int, where: str) -> list[_Chunk]:
    """A chunk as `count` equal ones. What is outside the layers goes with the first or the last,
    where it belongs."""
    if len(chunk.layers) % count:
        _refuse(f"{chunk.text} holds {len(chunk.layers)} layers, which vpp={count} does not divide",
                where)  # fmt: skip
    each = len(chunk.layers) // count
    out = [_Chunk(chunk.stage, number) for number in range(count)]
    for number, tensors in chunk.layers.items():
        out[min(number // each, count - 1)].layers[number % each] = tensors
    for name, stored in chunk.outside.items():
        out[0 if _FIRST.search(name) else -1].outside[name] = stored
    return out


def _refuse(what: str, where: str) -> NoReturn:
    raise TopologyError(
        what,
        remedy="pass all stages of one model in their order, with pp= and vpp= as it was trained, "
        "and its own config",
        path=where,
    )


# -- stages that are written -----------------------------------------------------------------------


@dataclass(frozen=True)
class RankStage:
    """names: name in the whole model → name in the stage. copies: (name there, name in the whole
    model): what the stage has besides."""

    names: Mapping[str, str]
    copies: tuple[tuple[str, str], ...] = ()

    def of(self, tensors: Mapping[str, Translated]) -> list[Translated]:
        """The stage's tensors out of those of a rank with all layers."""
        own = [replace(t, name=self.names[n]) for n, t in tensors.items() if n in self.names]
        return own + [replace(tensors[name], name=here) for here, name in self.copies]


def stages_of_ranks(layout: TensorLayout, dims: Dims, ep: int, pp: int) -> list[RankStage]:
    """What each of `pp` stages holds, with the same number of layers each. Those of Megatron's
    layouts number their layers from 0.

    Raises:
        TopologyError: the stages do not divide the layers, or the model predicts further tokens.
    """
    stored_tensors = list(tensors_of(layout, dims, ep))
    if pp == 1:
        return [RankStage({tensor.name: tensor.name for tensor in stored_tensors})]
    if dims.layers % pp or len(dims.kinds) > dims.layers:
        extra = len(dims.kinds) - dims.layers
        raise TopologyError(
            f"{pp} pipeline stages do not divide {dims.layers} layers"
            if not extra
            else f"{extra} layers predict further tokens, and have no place in {pp} stages",
            remedy="pass pp= a degree that divides the layers, and leave mtp= out",
        )
    each, own = dims.layers // pp, layout.name.startswith("mcore_")
    names: list[dict[str, str]] = [{} for _ in range(pp)]
    for tensor in stored_tensors:
        stage = pp - 1
        if tensor.row.tower or _BEFORE_LAYERS.intersection(tensor.row.roles):
            stage = 0
        elif tensor.layer >= 0:
            stage = tensor.layer // each
        name = tensor.name
        if own and tensor.layer >= 0 and not tensor.row.tower:
            name = tensor.row.name.replace("{i}", str(tensor.layer % each))
            name = name.replace("{e}", str(tensor.expert))
        names[stage][tensor.name] = name
    outer = {row.roles: row.name for row in layout.rows if not row.of_layers}
    head = outer.get(("head",)) if dims.tied else None
    copies = () if head is None else ((head, outer[("embed",)]),)
    return [RankStage(held, copies if stage == pp - 1 else ()) for stage, held in enumerate(names)]


def open_ranks(
    found: RankFilesFound, degrees: Degrees, pp: int, layers: int | None, vpp: int | None,
    *, equal_ranks: bool = False,
) -> tuple[TensorReader, tuple[str, ...]]:  # fmt: skip
    """A reader of the files of `pp` stages, and notes. layers, vpp: as of `merged`. equal_ranks:
    ranks may hold the same.

    Raises:
        as `open_files`, `refuse_equal_ranks` and `merged`.
    """
    stages = open_stages(found.states, degrees, pp, found.source, found.alone)
    refuse_other_ranks([(file, state.facts) for file, state in found.states.items()], degrees, pp)
    notes = () if equal_ranks else refuse_equal_ranks(stages, degrees, [*found.states])
    if pp == 1:
        return stages[0], notes
    if found.alone:
        return by_name(stages), notes
    stated = None if layers is None else found.degree(VPP)  # what is shown may be of any model
    return merged(stages, layers, vpp, found.url, stated), notes
