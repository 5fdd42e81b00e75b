"""What tells one save of a queue from the next one, and the refusal of saves that differ.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from smckpt.errors import UsageError, as_checkpoint_error, few
from smckpt.layout.entries import Path, dotted
from smckpt.state_dict.select import Selection

__all__ = [
    "Moment",
    "moment_of",
    "moment_read",
    "of_moment",
    "ranks_text",
    "refuse_different",
    "tells_nothing",
]

T = TypeVar("T")

# A checkpoint id that names a step: "run/step_5", "checkpoint-5", "0005"
_STEP_IN_ID = re.compile(r"(step|iter\w*|epoch|update|checkpoint|ckpt)?[-_=]?(\d+)/?$", re.I)
# A counter of steps. In the plural it may be an option, such as train_steps
_OF_STEPS = re.compile(r"(.*[._])?((step|iter|iteration|update)(s?)|last_epoch)")

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
    that the rank holds → the step of each.
    """

    directory: str = ""
    signs: dict[str, int | float] = field(default_factory=dict)  # of a number, its own kind
    values: dict[str, str] = field(default_factory=dict)
    holds: bool = True
    planned: bool = False
    metadata: str = ""
    of_parameters: dict[str, dict[str, int | float]] = field(default_factory=dict)

    def is_beyond(self, refused: Moment | None) -> bool:
        """Whether this is a later save than the one that was refused."""
        if refused is None:
            return False
        own = self._telling()
        for name, value in refused._telling().items():
            mine = own.get(name)
            if mine is not None and mine != value:
                return mine > value
        return bool(refused.directory and self.directory) and self.directory != refused.directory

    def _telling(self) -> dict[str, int | float]:
        """What tells who is behind. An optimizer's own step comes last, since ranks may hold other
        parameters of it."""
        counters = {n: value for n, value in self.signs.items() if n not in self.of_parameters}
        steps = {digest: n for of in self.of_parameters.values() for digest, n in of.items()}
        return {**counters, **steps, **self.signs}


def moment_read(data: Any) -> Moment | None:
    """The moment that an error of a peer carries, if it carries one."""
    return Moment(**data) if isinstance(data, dict) else None


def moment_of(
    directory: str,
    step: int | None,
    metadata: Mapping[str, Any],
    selection: Selection | None,
    per_rank: Sequence[str] = (),
) -> Moment:
    """The moment of a save.

    Args:
        selection: its state; None if it could not be selected.
        per_rank: globs of names that differ between ranks on purpose.
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
        steps = found.steps(selection)
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
    )


class _Differing:
    """Counters and values that were found in a state."""

    def __init__(self) -> None:
        self.signs: dict[str, float] = {}
        self.values: dict[str, str] = {}
        self.of_parameters: dict[str, dict[str, float]] = {}
        self._each: dict[Path, float] = {}  # path of a parameter's state → its step
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
                self._each[path[:-1]] = value
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

    def steps(self, selection: Selection) -> dict[str, float]:
        """The steps of the optimizers. Of many optimizers (one for each parameter, say) the largest
        step counts."""
        tensors: dict[tuple[Any, Any], dict[Path, torch.Tensor]] = {}
        held: dict[Path, int] = {}  # a parameter's state → how many elements of it this rank has
        divided: set[Path] = set()  # other ranks have elements of these parameters too
        counts: list[tuple[Path, torch.Tensor]] = []
        for entry, tensor in zip(selection.entries, selection.tensors, strict=True):
            path = entry.path
            if len(path) < 3 or path[-3] != "state":
                continue
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
            self._each.update(zip(alike, torch.stack([*alike.values()]).tolist(), strict=True))
        optimizers = sorted({path[:-2] for path in self._each}, key=dotted)
        names = {p: dotted((*p, "step")) if p else "optimizer step" for p in optimizers}
        if len(optimizers) > NAMED // 2:
            names = dict.fromkeys(optimizers, "optimizers' step")
        each: dict[str, dict[Path, float]] = {names[path]: {} for path in optimizers}
        for path, step in self._each.items():
            each[names[path[:-2]]][path] = step
        # under FSDP1, ranks share the parameters that are divided between them, and no others
        for name, steps in each.items():
            some = heapq.nsmallest(
                max(NAMED // 2 // len(each), 1), steps,
                key=lambda path: (path not in divided, zlib.crc32(str(path[-1]).encode())),
            )  # fmt: skip
            self.of_parameters[name] = {_digest(dotted(path)): _whole(steps[path]) for path in some}
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


# -- the coordinator -------------------------------------------------------------------------------


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks, for a message: "rank 3", "ranks 0, 2 and 5 more"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {few(ranks, NAMED)}"


def of_moment(moment: Moment, decide: Callable[[], T]) -> T:
    """Decide. An error carries the moment of the save that was refused, so that a rank whose save
    is a later one brings it to the next round."""
    try:
        return decide()
    except Exception as error:
        ours = as_checkpoint_error(error)
        if ours.moment is None:
            ours.moment = vars(moment)
        if ours is error:
            raise
        raise ours from error


def tells_nothing(moments: Iterable[Moment]) -> bool:
    """Whether ranks have tensors, and none of them has a counter."""
    holders = [moment for moment in moments if moment.holds]
    return len(holders) > 1 and not any(moment.signs for moment in holders)


def refuse_different(
    moments: Mapping[Any, Moment],
    name: Any,
    *,
    values: bool = False,
    earlier: Mapping[Any, str] | None = None,
    last: Mapping[Any, Moment] | None = None,
) -> None:
    """Refuse saves that differ. The error carries the moment of those that are behind, if that is
    known: the others were made later, and may meet again in the next round.

    Args:
        moments: who → its moment.
        name: what to call a list of those.
        values: also compare the values, where no counter is common.
        earlier: who → its directory in the refused save before this one. It tells who is behind.
        last: who → its moment in the last save that was not refused.

    Raises:
        UsageError: they differ.
    """
    planned = _grouped({who: moment.planned for who, moment in moments.items()})
    if len(planned) > 1:
        mixed = UsageError(
            f"{name(planned[True])} gave planner= or a writer of DCP's to this save, and "
            f"{name(planned[False])} did not",
            remedy="pass the same planner= and storage_writer= on all ranks of process_group",
        )
        mixed.moment = vars(Moment())  # none is beyond that
        raise mixed
    apart = _of_other_parameters(moments, last or {})
    signs = {
        who: {name: sign for name, sign in moment.signs.items() if name not in apart}
        for who, moment in moments.items()
    }
    sign = _first_different(signs)
    directories = _grouped({who: moment.directory for who, moment in moments.items()})
    if sign is None and len(directories) < 2:
        # Where those that hold tensors have a counter in common, it would tell them apart. Else
        # nothing but their values does.
        counters = [set(signs[who]) for who, moment in moments.items() if moment.holds]
        if not values or len(counters) < 2 or set.intersection(*counters):
            return
        sign = _first_different({who: moment.values for who, moment in moments.items()})
        if sign is None:
            return
    differences, behind = [], None
    if len(directories) > 1:
        differences.append(
            "the ranks of one group passed different checkpoint ids: " + _listed(directories, name)
        )
        behind = _repeated(directories, earlier or {})
    if sign is not None:
        field_name, by_value = sign
        differences.append(f"{field_name} is {_listed(by_value, name)}")
        numbers = [value for value in by_value if not isinstance(value, str)]
        if numbers:
            went = {w: m.signs[field_name] for w, m in moments.items() if field_name in m.signs}
            since = {}
            if last and last.keys() >= went.keys():
                since = {who: n - last[who].signs.get(field_name, 0) for who, n in went.items()}
            steps = {who: moments[who].of_parameters.get(field_name, {}) for who in went}
            if len(set(since.values())) > 1:
                behind = [who for who, n in since.items() if n == min(since.values())]
            elif not any(steps.values()) or _first_different(steps) is not None:  # else no scale
                behind = [who for who, n in went.items() if n == min(went.values())]
    message = "; ".join(differences)
    if len(directories) < 2:
        message = f"the ranks would save different steps as one: {message}"
    if behind is not None:
        ahead = [who for who in moments if who not in behind]
        message += f": {name(ahead)} skipped the save that {name(behind)} made"
    error = UsageError(
        message,
        remedy="save on all ranks of process_group or on none, with one checkpoint_id, and pass "
        "step=; a counter that differs between ranks on purpose goes into "
        "SaveOptions(per_rank=)",
        path=next(iter(directories)) or None,
    )
    error.moment = vars(Moment() if behind is None else moments[behind[0]])  # none is beyond that
    raise error


def _of_other_parameters(moments: Mapping[Any, Moment], last: Mapping[Any, Moment]) -> set[str]:
    """The optimizers whose steps differ only because ranks hold other parameters, of which some
    began to train later. What the ranks share has the same step then. And something tells that no
    rank skipped a save: what changes with each save, the shared parameters if they still train, or
    as many steps on all ranks since the last save."""
    names = {name for moment in moments.values() for name in moment.of_parameters}
    common = set.intersection(*(set(moment.signs) for moment in moments.values())) - names
    apart, (who, any_one) = set(), next(iter(moments.items()))
    for name in names:
        steps = {who: moment.signs[name] for who, moment in moments.items() if name in moment.signs}
        parameters = {who: moments[who].of_parameters.get(name, {}) for who in steps}
        if _first_different(parameters) is None and (
            _changes(any_one, last.get(who), common, max(steps.values()))
            or _joined(parameters.values())
            or (
                last.keys() >= steps.keys()
                and len({step - last[who].signs.get(name, 0) for who, step in steps.items()}) == 1
            )
        ):
            apart.add(name)
    return apart


def _changes(moment: Moment, last: Moment | None, common: Iterable[str], steps: float) -> bool:
    """Whether something that ranks have in common changes with each save: the caller's step, or
    what differs from the last save. Before there is one, its name has to tell."""
    same = last is not None and last.directory == moment.directory
    found = None if same else _STEP_IN_ID.search(moment.directory)
    if found and (found[1] or int(found[2]) >= steps):  # else it may be the number of a trial
        return True
    counters = [(match, one) for one in common if (match := _OF_STEPS.fullmatch(one))]
    return "step" in common or any(
        moment.signs[one] >= steps
        and (last.signs.get(one) != moment.signs[one] if last else not match[4])
        for match, one in counters
    )


def _joined(parameters: Iterable[Mapping[str, float]]) -> bool:
    """Whether ranks share, one with the next, parameters that are the newest on one of both."""
    waiting = [(set(of), {p for p, n in of.items() if n == max(of.values())}) for of in parameters]
    every, newest = waiting.pop()
    while waiting:
        near = [one for one in waiting if one[0] & newest or one[1] & every]
        if not near:
            return False
        waiting = [one for one in waiting if one not in near]
        every, newest = every.union(*(a for a, _ in near)), newest.union(*(n for _, n in near))
    return True


def _first_different(
    fields: Mapping[Any, Mapping[str, Any]],
) -> tuple[str, dict[Any, list[Any]]] | None:
    """The first field that has two values: its name, and who has which."""
    for field_name in dict.fromkeys(key for one in fields.values() for key in one):
        by_value = _grouped(
            {who: one[field_name] for who, one in fields.items() if field_name in one}
        )
        if len(by_value) > 1:
            return field_name, by_value
    return None


def _repeated(directories: Mapping[str, list[Any]], earlier: Mapping[Any, str]) -> list[Any] | None:
    """Those that come only now to the directory that others brought before."""
    late = [
        members
        for directory, members in directories.items()
        if any(was == directory for who, was in earlier.items() if who not in members)
    ]
    return late[0] if len(late) == 1 else None


def _grouped(values: Mapping[Any, Any]) -> dict[Any, list[Any]]:
    grouped: dict[Any, list[Any]] = {}
    for who, value in values.items():
        grouped.setdefault(value, []).append(who)
    return grouped


def _listed(by_value: Mapping[Any, list[Any]], name: Any) -> str:
    shown = [f"{value} on {name(who)}" for value, who in list(by_value.items())[:4]]
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if shown[1:] else shown[0]
