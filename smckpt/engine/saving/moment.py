"""What tells one save of a queue from the next one.

Ranks meet by the count of their calls. A rank that skips one save would bring its next step where
the others bring this one. So each rank sends a few numbers with its part, and the coordinator
compares them: the step, counters in the state and in the metadata, the optimizers' and schedulers'
own. Only what all ranks have alike counts. Positions of data loaders and random generators do not.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import heapq
import math
import operator
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from smckpt.layout.entries import Path, dotted
from smckpt.state_dict.select import Selection

NAMED = 8  # ranks, or counters, that are named one by one
_DEEP = 5  # how many dicts deep counters are looked for

_COUNTERS = re.compile(
    r"((global|current|train|training|optimizer|completed|num|total|last)_?)?"
    r"(step|steps|epoch|iter|iteration|iterations|update|updates)(_(count|num|idx))?"
    r"|consumed_(train_)?samples"
)
# What each rank has of its own: a counter below such a name is not compared,
_OWN = re.compile(
    r"load|(?<!meta)(?<!meta_)data|sampler|rng|rand|seed|shard|worker|local|rank|host|stream|reader"
    r"|(^|_)(dl|ds|manager|metrics)($|_)"
)
# nor one beside such a name, which belongs to a position in the data.
_POSITION = re.compile(r"offset|position|sampler|shard|yield|buffer|examples|(^|_)(pos|index)($|_)")


@dataclass(frozen=True)
class Moment:
    """The moment of training that a rank saves.

    directory: its checkpoint id; "" if the moment is that of several groups. signs: counters, the
    most telling first. values: what often changes from step to step; compared only where ranks
    share no counter. holds: whether the rank has tensors. planned: whether a planner or writer of
    DCP's makes the save. metadata: a digest of what the caller records with it. of_parameters:
    the sign of an optimizer, which is its largest step on this rank → digests of a few parameters
    that the rank holds → the step of each. since_load: the sign of an optimizer → its steps since
    a load of the group; until a save after that load is committed.
    """

    directory: str = ""
    signs: dict[str, int | float] = field(default_factory=dict)  # of a number, its own kind
    values: dict[str, str] = field(default_factory=dict)
    holds: bool = True
    planned: bool = False
    metadata: str = ""
    of_parameters: dict[str, dict[str, int | float]] = field(default_factory=dict)
    since_load: dict[str, int | float] = field(default_factory=dict)

    def is_beyond(self, refused: Moment | None) -> bool:
        """Whether this is a later save than the one that was refused."""
        if refused is None:
            return False
        own, other = self._telling(), refused._telling()
        if "step" in own and own["step"] == other.get("step"):  # the caller's
            return False
        for name, value in other.items():
            mine = own.get(name)
            if mine is not None and mine != value:
                return mine > value
        return bool(refused.directory and self.directory) and self.directory != refused.directory

    def _telling(self) -> dict[str, int | float]:
        """What tells who is behind. Ranks may hold other parameters of an optimizer, whose steps
        have no common scale."""
        counters = {n: value for n, value in self.signs.items() if n not in self.of_parameters}
        steps = {digest: n for of in self.of_parameters.values() for digest, n in of.items()}
        return {**counters, **steps}


def moment_read(data: Any) -> Moment | None:
    """The moment that an error of a peer carries, if it carries one."""
    return Moment(**data) if isinstance(data, dict) else None


def moment_of(
    directory: str,
    step: int | None,
    metadata: Mapping[str, Any],
    selection: Selection | None,
    per_rank: Sequence[str] = (),
    loaded: Mapping[Path, float] | None = None,
) -> Moment:
    """The moment of a save.

    Args:
        selection: its state; None if it could not be selected.
        per_rank: globs of names that differ between ranks on purpose.
        loaded: what `loaded_steps` found in a load.
    """
    found = _Differing()
    steps: dict[str, float] = {}
    if selection is not None:
        found.note_positions(selection)
        for leaf in selection.objects:
            found.look(leaf.path, leaf.value)
        for entry, tensor in zip(selection.entries, selection.tensors, strict=True):
            # counters that are tensors of one element
            if tensor.numel() == 1 and not tensor.is_meta and _is_counter(entry.path):
                found.look(entry.path, _whole(tensor.detach().reshape(()).item()))
        steps = found.steps(selection, loaded or {})
    found.look(("metadata",), metadata)
    for path, value in _leaves(metadata, ("metadata",)):
        if type(value) in (int, bool, str) and not _is_own(path):
            text = str(value)
            found.values[dotted(path)] = (
                text if len(text) <= 24 else hashlib.sha256(text.encode()).hexdigest()[:16]
            )
    with contextlib.suppress(TypeError):  # the save refuses a step that is no whole number
        steps = {"step": operator.index(step), **steps}  # type: ignore[arg-type]
    signs = {**steps, **found.signs}

    def kept(named: dict[str, Any], most: int) -> dict[str, Any]:
        known = {
            name: value
            for name, value in named.items()
            if not any(fnmatch.fnmatchcase(name, glob) for glob in per_rank)
        }
        return dict(list(known.items())[:most])

    recorded = {dotted(p): repr(v) for p, v in _leaves(metadata, ("metadata",))}
    others = {k: v for k, v in recorded.items() if not k.startswith("metadata.manager.")}
    text = repr(sorted(kept(others, len(others)).items())) if others else ""
    return Moment(
        directory,
        kept(signs, NAMED),
        kept(found.values, NAMED // 2),
        holds=selection is None or bool(selection.entries),
        metadata=_digest(text) if text else "",
        of_parameters=kept(found.of_parameters, NAMED),
        since_load=kept(found.since_load, NAMED),
    )


def loaded_steps(state_dict: Any, selection: Selection) -> Mapping[Path, float]:
    """The steps in a state that was loaded: the path of a parameter's state → its step."""
    found = _Differing()
    found.look((), state_dict)
    found.steps(selection, {})
    return found.each


class _Differing:
    """Counters and values that were found in a state."""

    def __init__(self) -> None:
        self.signs: dict[str, float] = {}
        self.values: dict[str, str] = {}
        self.of_parameters: dict[str, dict[str, float]] = {}
        self.since_load: dict[str, float] = {}
        self.each: dict[Path, float] = {}  # path of a parameter's state → its step
        self._positions: set[Path] = set()  # dicts that hold a position in the data

    def note_positions(self, selection: Selection) -> None:
        paths = [entry.path for entry in selection.entries]
        for path in (*paths, *(leaf.path for leaf in selection.objects)):
            if len(path) > 1 and _names_position(str(path[-1])):
                self._positions.add(path[:-1])

    def look(self, path: Path, value: Any) -> None:
        """Look at a plain value, or at the values in a dict or list."""
        if len(path) > 2 and path[-1] == "step" and path[-3] == "state":
            if _is_number(value):
                self.each[path[:-1]] = value
            return
        if path and path[-1] == "param_groups" and isinstance(value, (list, tuple)):
            # The hyperparameters of an optimizer: the first learning rate, and a digest of all
            plain = [
                sorted(
                    (str(k), repr(v)) for k, v in group.items() if k != "params" and _is_plain(v)
                )
                for group in value
                if isinstance(group, Mapping)
            ]
            digest = _digest(repr(plain))
            rate = value[0].get("lr") if value and isinstance(value[0], Mapping) else None
            self.values[dotted(path)] = (
                f"lr {rate:.6g} (digest {digest})" if _is_number(rate) else f"digest {digest}"
            )
            return
        if isinstance(value, Mapping):
            if "last_epoch" in value and ("_step_count" in value or "_last_lr" in value):
                if _is_number(value["last_epoch"]):
                    self.signs[dotted((*path, "last_epoch"))] = value["last_epoch"]
                return
            if len(path) < _DEEP:
                own = bool(path) and any(_names_position(str(key)) for key in value)
                for key, child in value.items():
                    if not own or isinstance(child, (Mapping, list, tuple)):
                        self.look((*path, key), child)
            return
        if isinstance(value, (list, tuple)):
            if len(path) < _DEEP and len(value) <= NAMED * NAMED:
                for index, child in enumerate(value):
                    if isinstance(child, (Mapping, list, tuple)):
                        self.look((*path, index), child)
            return
        if not path or not _is_number(value) or _is_own(path) or path[:-1] in self._positions:
            return
        if _is_counter(path):
            self.signs[dotted(path)] = value

    def steps(self, selection: Selection, loaded: Mapping[Path, float]) -> dict[str, float]:
        """The steps of the optimizers. Of many optimizers (one for each parameter, say) the largest
        step counts."""
        tensors: dict[tuple[Any, Any], dict[Path, torch.Tensor]] = {}
        held: dict[Path, int] = {}  # a parameter's state → how many elements of it this rank has
        divided: set[Path] = set()  # other ranks have elements of these parameters too
        logical: dict[Path, Path] = {}  # under other names than numbers, which each rank counts
        counts: list[tuple[Path, torch.Tensor]] = []
        for entry, tensor in zip(selection.entries, selection.tensors, strict=True):
            path = entry.path
            if len(path) < 3 or path[-3] != "state":
                continue
            if path[:-1] not in logical:
                logical[path[:-1]] = entry.logical_path(entry.fqns[0])[:-1]
            if path[-1] == "step":
                counts.append((path, tensor))
                continue
            held[path[:-1]] = held.get(path[:-1], 0) + tensor.numel()
            if path[:-1] not in divided and tensor.numel() < sum(
                math.prod(entry.geometry.shape_of(fqn)) for fqn in entry.fqns
            ):
                divided.add(path[:-1])
        for path, tensor in counts:
            if tensor.numel() != 1 or tensor.is_meta:
                continue
            if held.get(path[:-1], 1):  # without elements a rank may count no steps
                alike = tensors.setdefault((tensor.device, tensor.dtype), {})
                alike[path[:-1]] = tensor.detach().reshape(())
        for alike in tensors.values():
            self.each.update(zip(alike, torch.stack([*alike.values()]).tolist(), strict=True))
        self.each = {logical.get(path, path): step for path, step in self.each.items()}
        divided = {logical[path] for path in divided}
        optimizers = sorted({path[:-2] for path in self.each}, key=dotted)
        names = {p: dotted((*p, "step")) if p else "optimizer step" for p in optimizers}
        if len(optimizers) > NAMED // 2:
            names = dict.fromkeys(optimizers, "optimizers' step")
        each: dict[str, dict[Path, float]] = {names[path]: {} for path in optimizers}
        for path, step in self.each.items():
            each[names[path[:-2]]][path] = step
        # under FSDP1, ranks share the parameters that are divided between them, and no others
        for name, steps in each.items():
            some = heapq.nsmallest(
                max(NAMED // 2 // len(each), 1), steps,
                key=lambda path: (path not in divided, zlib.crc32(str(path[-1]).encode())),
            )  # fmt: skip
            self.of_parameters[name] = {_digest(dotted(path)): _whole(steps[path]) for path in some}
            if gone := [step - loaded[path] for path, step in steps.items() if path in loaded]:
                self.since_load[name] = _whole(max(gone))
        return {name: _whole(max(steps.values())) for name, steps in each.items()}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _leaves(tree: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(tree, Mapping) and len(path) < _DEEP:
        for key, value in tree.items():
            yield from _leaves(value, (*path, key))
    else:
        yield path, tree


@functools.lru_cache(maxsize=1 << 10)  # most tensors share a few names
def _names_position(name: str) -> bool:
    return _POSITION.search(name.lower()) is not None


def _is_counter(path: Path) -> bool:
    return _COUNTERS.fullmatch(str(path[-1]).lower()) is not None and "state" not in path[1:-1]


def _is_own(path: Path) -> bool:
    return any(isinstance(key, str) and _OWN.search(key.lower()) for key in path)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _whole(value: float) -> float:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (int, float, bool, str)
