"""The refusal of saves that differ, by which the coordinator compares the ranks' moments."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from smckpt.engine.saving.moment import NAMED, Moment
from smckpt.errors import UsageError, as_checkpoint_error, few

T = TypeVar("T")

# A checkpoint id that names a step: "run/step_5", "checkpoint-5", "0005"
_STEP_IN_ID = re.compile(r"(step|iter\w*|epoch|update|checkpoint|ckpt)?[-_=]?(\d+)/?$", re.I)
# A counter of steps. In the plural it may be an option, such as train_steps
_OF_STEPS = re.compile(r"(.*[._])?((step|iter|iteration|update)(s?)|last_epoch)")


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


def tells_nothing(moments: Mapping[Any, Moment], last: Mapping[Any, Moment]) -> bool:
    """Whether ranks have tensors and nothing in them tells a skipped save: there is no counter in
    common, and each optimizer rests on one of the ranks while another one trains.

    Args:
        last: who → its moment in the last save that was not refused.
    """
    holders = {who: moment for who, moment in moments.items() if moment.holds}
    names = {name for moment in holders.values() for name in moment.of_parameters}
    if len(holders) < 2 or set.intersection(*(set(m.signs) for m in holders.values())) - names:
        return False
    since = [
        [name in moment.signs and _gone(moment, last.get(who, Moment()), name) for name in names]
        for who, moment in holders.items()
    ]
    trains = any(map(any, since)) or not any(moment.signs for moment in holders.values())
    return trains and not any(map(all, zip(*since, strict=True)))


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
    signs = _comparable(moments, last or {}, earlier or {})
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
        went = {who: one[field_name] for who, one in signs.items() if field_name in one}
        steps = {who: moments[who].of_parameters.get(field_name, {}) for who in went}
        # the steps of other parameters have no scale
        if went and (not any(steps.values()) or _first_different(steps) is not None):
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


def _comparable(
    moments: Mapping[Any, Moment], last: Mapping[Any, Moment], earlier: Mapping[Any, str]
) -> dict[Any, dict[str, int | float]]:
    """The signs of each. Ranks may hold other parameters of an optimizer, of which some begin to
    train later, or rest. So its steps since the last save count, where that is known; and nothing
    of it where else tells that no rank skipped a save: what changes with each save, or shared
    parameters that still train."""
    signs = {who: dict(moment.signs) for who, moment in moments.items()}
    names = {name: None for moment in moments.values() for name in moment.of_parameters}
    common = set.intersection(*map(set, signs.values())) - names.keys()
    for name in names:
        holders = {who: moments[who] for who, one in signs.items() if name in one}
        before = {who: last.get(who, Moment()) for who in holders}
        then = {who: moment.of_parameters.get(name, {}) for who, moment in before.items()}
        of = {who: moment.of_parameters.get(name, {}) for who, moment in holders.items()}
        own = {  # by the names of parameters that each rank has of its own
            digest for digest in set().union(*of.values())
            if len({then[who].get(digest) for who in of if digest in of[who]}) > 1
        }  # fmt: skip
        shared = {w: {d: n for d, n in each.items() if d not in own} for w, each in of.items()}
        most = max(moment.signs[name] for moment in holders.values())
        loaded = any(name in moment.since_load for moment in holders.values())
        alike = _first_different(shared) is None
        together = not loaded and alike and _joined(shared.values())
        sure = together or _changes(moments, last, earlier if alike else {}, common, most)
        if sure or loaded or before.keys() <= last.keys():
            counted = {
                one: moment.since_load.get(name, _gone(moment, before[one], name))
                for one, moment in holders.items()
            }
            # A rank whose parameters all began to train since then has made as many steps or more,
            # and one whose parameters all rest may have made any number.
            began = {
                one: name not in before[one].signs and name not in moment.since_load
                for one, moment in holders.items()
            }
            most_since = max((n for one, n in counted.items() if not began[one]), default=math.inf)
            for one, since in counted.items():
                del signs[one][name]
                if not sure and since > (most_since if began[one] else 0):
                    signs[one][f"{name} since the last save"] = since
    return signs


def _gone(moment: Moment, last: Moment, name: str) -> int | float:
    """The steps since the last save: of the parameter that made the most, since the one with the
    largest step may rest."""
    then, of = last.of_parameters.get(name, {}), moment.of_parameters.get(name, {})
    steps = [n - then.get(digest, 0) for digest, n in of.items()]
    return max([moment.signs[name] - last.signs.get(name, 0), *steps])


def _changes(
    moments: Mapping[Any, Moment],
    last: Mapping[Any, Moment],
    earlier: Mapping[Any, str],
    common: Iterable[str],
    steps: float,
) -> bool:
    """Whether something that ranks have in common changes with each save: the caller's step, or
    what names a step and differs from the last save. So do ids that none brought to a refused save
    just before: of ranks that are apart, one brought the id there."""
    ids = {moment.directory for moment in moments.values()}
    before = {earlier.get(who, "") for who in moments}
    if "" not in before and ids.isdisjoint(before):
        return True
    who, moment = next(iter(moments.items()))
    then = last.get(who)
    found = None if then and then.directory in ids else _STEP_IN_ID.search(moment.directory)
    if found and (found[1] or int(found[2]) >= steps):  # else it may be the number of a trial
        return True
    counters = [(match, one) for one in common if (match := _OF_STEPS.fullmatch(one))]
    return "step" in common or any(
        moment.signs[one] >= steps
        and (then.signs.get(one) != moment.signs[one] if then else not match[4])
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
