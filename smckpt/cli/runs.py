"""Commands for the checkpoints of a run: `ls`, `doctor`, `status`, `prune`."""

from __future__ import annotations

import logging
import re
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from smckpt.cli.output import (
    as_json,
    bytes_text,
    print_json,
    print_line,
    print_table,
    span_text,
    time_text,
)
from smckpt.errors import CheckpointError, UsageError, count_text, few

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smckpt.checkpoint.commits.discover import FoundCheckpoint
    from smckpt.checkpoint.commits.run_directory import Template
    from smckpt.manager.doctor import Condition
    from smckpt.storage import Storage


log = logging.getLogger("smckpt")


def best_of(_: Any, __: Any, text: str | None) -> Any:
    from smckpt.manager.retention import Best

    if text is None:
        return None
    metric, _, rest = text.partition(":")
    mode, _, count = rest.partition(":")
    if mode not in ("min", "max") or not count.isdecimal() or not int(count):
        raise click.BadParameter(f"{text!r}: write METRIC:min:N or METRIC:max:N, N from 1")
    return Best(metric, int(count), mode)


def _refuse_unrecorded(best: Any, steps: Sequence[FoundCheckpoint], option: str) -> None:
    """
    Raises:
        UsageError: no step has the metric, so that the option would keep none.
    """
    if best is None or not steps or best.ranked(steps):
        return
    known = sorted({name for one in steps for name in one.metadata.get("metrics") or ()})
    raise UsageError(
        f"no step has recorded a number as the metric {best.metric!r}",
        remedy=f"give {option} one of {', '.join(known)}" if known
        else f"leave {option} out: the saves had no metrics=",
    )  # fmt: skip


@click.command()
@click.argument("root")
@click.option("--state", is_flag=True,
              help="Look at the sizes of files too: whole, or what is missing.")  # fmt: skip
@click.option("--best", callback=best_of, metavar="METRIC:min:N",
              help="Number the N best by this metric of a run (or METRIC:max:N).")  # fmt: skip
@as_json
def ls(root: str, state: bool, best: Any, as_json: bool) -> None:
    """List the committed checkpoints in and below ROOT, and the run's in memory, newest first, with
    the metrics that a manager has recorded. Lines below name what a save or deletion left that was
    cut short, or that still runs."""
    from smckpt.checkpoint.commits.contents import what_is_missing
    from smckpt.checkpoint.commits.discover import find_checkpoints, in_order, refuse_absent
    from smckpt.manager.record import memory_of
    from smckpt.storage import open_storage
    from smckpt.storage.urls import is_in_memory

    top = open_storage(root)
    refuse_absent(top)
    found = find_checkpoints(root)
    memory, away = memory_of(found[-1]) if found else "", ""
    if memory and not is_in_memory(root):
        try:
            found = in_order([*found, *find_checkpoints(memory)])
        except CheckpointError as error:  # anybody may have written that address
            away = f"the steps in memory cannot be seen from here: {error}"
    found.reverse()
    states = {}
    for one in found if state else ():
        try:
            states[one] = what_is_missing(open_storage(one)) or "whole"
        except CheckpointError as error:
            states[one] = error.message
    _refuse_unrecorded(best, found, "--best")
    ranked = best.ranked(found)[: best.count] if best is not None else []
    if as_json:
        print_json(
            [
                {
                    **one.to_json(),
                    **({"state": states[one]} if state else {}),
                    **({"best": _number(ranked, one)} if best is not None else {}),
                }
                for one in found
            ]
        )
        return
    if not found:
        print_line(f"no committed checkpoint in or below {root}" + _of_others(top))
        _name_uncommitted(top, found)
        return
    print_line(f"in {root}:")
    columns: dict[str, list[Any]] = {
        "checkpoint": [_below(root, one.path) for one in found],
        "step": [one.step for one in found],
        "kind": [one.kind for one in found],
        "size": [bytes_text(one.nbytes) for one in found],
        "groups": [len(one.groups) for one in found],
        "committed": [time_text(one.committed_at) for one in found],
    }
    metrics = [one.metadata.get("metrics") for one in found]
    names = sorted({name for each in metrics if isinstance(each, dict) for name in each})
    for name in names:
        values = [each.get(name) if isinstance(each, dict) else None for each in metrics]
        columns[name] = [f"{v:.6g}" if isinstance(v, (int, float)) else None for v in values]
    if best is not None:
        columns["best"] = [_number(ranked, one) for one in found]
    if state:
        columns["state"] = [states[one] for one in found]
    right = ("step", "size", "groups", "best", *names)
    print_table("", tuple(columns), zip(*columns.values(), strict=True), right=right)
    if away:
        print_line(away)
    _name_uncommitted(top, found)


def _name_uncommitted(top: Storage, found: Sequence[str]) -> None:
    from smckpt.manager.doctor import examine

    for one in examine(top, known={str(each).rstrip("/") for each in found}):
        if one.state in ("unfinished", "removing"):
            print_line(f"{one.place or '.'}: {one.state}, {bytes_text(one.nbytes)}: `smckpt doctor "
                       f"{top.url}` says more")  # fmt: skip


def _of_others(top: Storage) -> str:
    """The end of a line that says that nothing is there: what is, in another format."""
    from smckpt.checkpoint.commits.foreign import foreign_below

    known = next(foreign_below(top), None)
    return f". {known}" if known else ""


def _number(ranked: list[Any], one: Any) -> int | None:
    return ranked.index(one) + 1 if one in ranked else None


def _below(root: str, path: str) -> str:
    """A path as seen from the root; of another store its URL."""
    from smckpt.storage.urls import is_in_memory, normal_url, relative_url

    if is_in_memory(path) != is_in_memory(root):
        return path
    return relative_url(normal_url(path), normal_url(root)).rstrip("/") or "."


@click.command()
@click.argument("root")
@click.option("--read", is_flag=True, help="Compare every byte of the step with its checksum too.")
@as_json
def doctor(root: str, read: bool, as_json: bool) -> None:
    """Say which step below ROOT can be restored, and why each newer one cannot.

    It reads records, manifests, headers and the sizes of files; with --read, and as `smckpt verify`
    does, every byte of the step that it finds. Exit status 1: the newest step cannot be restored,
    or none can.
    """
    from smckpt.checkpoint.commits.discover import refuse_absent
    from smckpt.manager.doctor import examine
    from smckpt.storage import open_storage

    top = open_storage(root)
    refuse_absent(top)
    for _ in range(3):  # beside a job that deletes, all that were there may be gone meanwhile
        found, whole = examine(top), None
        conditions: list[Condition] = []
        for one in found:
            checked = one if whole is not None else _checked(top, one, read)
            if whole is None and checked.state == "whole":
                whole = len(conditions)
            if checked.state != "gone":
                conditions.append(checked)
        if whole is not None or len(conditions) == len(found):
            break
    if as_json:
        restorable = None if whole is None else conditions[whole].place
        report = {"restorable": restorable, "steps": [one.to_json() for one in conditions]}
        print_json(report)
    else:
        away = [one for one in conditions if one.state == "away"]
        for one in [*(each for each in conditions[:whole] if each not in away), *away]:
            print_line(f"{one.place or '.'}: {one.state}: {one.why}. What to do: {one.remedy}")
        if whole is None:
            known = "" if conditions else _of_others(top)
            print_line(f"nothing below {root} can be restored{known}")
        else:
            one = conditions[whole]
            unread = "" if read else f"; its data was not read: `smckpt doctor --read {root}` does"
            print_line(f"restorable: {one.place or root}, step {one.step}{unread}")
            _name_left(conditions[whole + 1 :], one.url)
    sys.exit(0 if whole == 0 else 1)


def _name_left(older: Sequence[Condition], newest: str) -> None:
    """Name unfinished saves of steps that a run has passed: no save and no policy sweeps them.

    Args:
        newest: the URL of its newest step. Other directories may be of other runs.
    """
    from smckpt.storage.urls import parent_url

    for one in older:
        if one.state != "unfinished" or not one.nbytes:
            continue
        if parent_url(one.url) == parent_url(newest):
            print_line(f"{one.place}: unfinished, {bytes_text(one.nbytes)}: a run that has passed "
                       "this step does not delete it. If no job is writing it, delete the "
                       "directory")  # fmt: skip


def _checked(top: Storage, condition: Condition, read: bool) -> Condition:
    """The condition of a step whose files have their sizes, after a look into them."""
    from smckpt.checkpoint.commits.discover import found_at
    from smckpt.checkpoint.upkeep.verify import verify_checkpoint
    from smckpt.manager.doctor import mend_remedy, what_of

    if condition.state != "whole":
        return condition
    at = top.at(condition.url)
    try:
        found = [
            f"{one.path}: {one.what}" for one in verify_checkpoint(at.url, quick=not read).problems
        ]
    except CheckpointError as error:
        found = [what_of(error)]
    if not found:
        return condition
    with suppress(CheckpointError):
        if found_at(at) is None:  # it was deleted since it was listed
            return replace(condition, state="gone")
    return replace(condition, state="damaged", why=few(found, 1), remedy=mend_remedy(at))


@click.command()
@click.argument("root")
@as_json
def status(root: str, as_json: bool) -> None:
    """Show unfinished saves and deletions below ROOT, and the age of the newest step. For a run
    with a manager, also show its failures, the interval that "auto" has chosen, and what the
    keepers of its steps in memory hold."""
    from smckpt.checkpoint.commits.discover import in_order, refuse_absent
    from smckpt.manager.doctor import examine
    from smckpt.storage import open_storage
    from smckpt.storage.memory.store import KeeperStorage

    top = open_storage(root)
    refuse_absent(top)
    conditions = examine(top)
    whole = [one for one in conditions if one.state == "whole"]
    steps = {one.checkpoint: one for one in whole if one.checkpoint is not None}
    newest = steps[in_order([*steps])[-1]] if steps else None
    incomplete = [one for one in conditions if one.state in ("unfinished", "removing", "away")]
    age = None if newest is None else max(time.time() - newest.committed_at / 1e9, 0)
    run = _run_at(top, newest)
    seen = [one for one in conditions if one.in_memory and one.state != "away"]
    memory_store = open_storage(seen[0].url) if seen else None
    held = memory_store.held() if isinstance(memory_store, KeeperStorage) else []
    if as_json:
        print_json(
            {
                "newest": None if newest is None else newest.to_json(),
                "age_seconds": age,
                "run": run,
                "under_way": [one.to_json() for one in incomplete],
                "steps": len(whole),
                "bytes": sum(one.nbytes for one in whole),
                "keepers": [asdict(one) for one in held],
            }
        )
        return
    if newest is None or age is None:
        after = f", after {count_text(run['failures'], 'failure')}" if run else ""
        known = "" if conditions else _of_others(top)
        print_line(f"no step below {root} is committed{after}{known}")
    else:
        total = bytes_text(sum(one.nbytes for one in whole))
        memory = sum(one.in_memory for one in whole)
        among = f" ({memory} in memory)" if memory else ""
        print_line(f"{count_text(len(whole), 'step')}{among}, {total}; the newest is "
                   f"{newest.place or root}, committed {span_text(age)} ago")  # fmt: skip
    if newest is not None and run is not None:
        print_line(f"the run has trained for {timedelta(seconds=round(run['seconds']))}, with "
                   f"{count_text(run['failures'], 'failure')}")  # fmt: skip
        if run["interval"] is not None:
            chosen = run["interval"]
            print_line(f'interval="auto" is {chosen["seconds"]:.3g} s: {chosen["why"]}')
    for one in incomplete:
        print_line(f"{one.place or '.'}: {one.state}: {one.why}, {bytes_text(one.nbytes)}")
    for each in held:
        of = f"holds {bytes_text(each.nbytes)} of {bytes_text(each.budget)}"
        print_line(f"keeper of {each.host}: {each.error or of}")


def _refuse_other_names(root: str, top: Storage, template: Template) -> None:
    """
    Raises:
        UsageError: checkpoints are below the root of a run without a step, in directories of other
            names.
    """
    from smckpt.checkpoint.commits.discover import find_checkpoints

    found = find_checkpoints(top.url)
    if not found:
        return
    name = _below(top.url, found[-1].path)
    if name == ".":
        remedy = "pass the directory above it: that of the run"
    else:
        number = re.search(rf"(?<!\d)0*{found[-1].step}(?!\d)", name)
        fits = "step_{step}"
        if number is not None:
            field = f"{{step:0{len(number[0])}d}}" if number[0][0] == "0" != number[0] else "{step}"
            fits = name[: number.start()] + field + name[number.end() :]
        remedy = f"end ROOT in their names, such as {root.rstrip('/')}/{fits}"
    raise UsageError(
        f"no directory below it is a step of the name {template.text}, but checkpoints are here: "
        f"{name}" + (f" and {len(found) - 1} more" if found[1:] else ""),
        remedy=remedy,
        path=root,
    )


def _run_at(root: Storage, newest: Any) -> dict[str, Any] | None:
    """The manager's record of its run in the newest step, with the failures since. newest: the
    condition of that step; None: there is none."""
    from smckpt.checkpoint.commits.discover import found_at
    from smckpt.manager.record import history_of, run_of, uncommitted_at

    if newest is None:
        failed = uncommitted_at(root, "").failed
        return {"failures": failed, "seconds": 0.0, "interval": None} if failed else None
    directory = root.at(newest.url)
    found = found_at(directory)
    run = None if found is None else run_of(found)
    if found is None or run is None:
        return None
    since = uncommitted_at(directory, found.identity)
    return {**run, "failures": history_of(found).failures + since.failed} if since.count else run


@click.command()
@click.argument("root")
@click.option("--keep-last", type=click.IntRange(1), required=True, help="The newest N steps.")
@click.option("--keep-every", type=click.IntRange(1), help="Also multiples of this number.")
@click.option("--keep-best", callback=best_of, help="Also the N best: METRIC:min:N.")
@click.option("--dry-run", is_flag=True, help="List the steps to delete, and delete nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
def prune(
    root: str,
    keep_last: int,
    keep_every: int | None,
    keep_best: Any,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete the steps of any run below ROOT that the rules do not keep. ROOT may end in the names
    of the steps' directories, such as run/step-{step}.

    It deletes nothing if the newest step is not whole, and keeps steps that a reader has pinned. It
    finishes deletions that were cut short.
    """
    from smckpt.checkpoint.commits.discover import refuse_absent
    from smckpt.checkpoint.commits.run_directory import RunDirectory, rooted
    from smckpt.checkpoint.upkeep.verify import verify_checkpoint
    from smckpt.manager.doctor import examine
    from smckpt.manager.retention import Every, policies_of
    from smckpt.storage import open_storage

    above, template = rooted(root)
    top = open_storage(above)
    refuse_absent(top)
    run = RunDirectory(top, template)
    steps = run.all()
    if not steps:
        _refuse_other_names(root, top, template)
    _refuse_unrecorded(keep_best, steps, "--keep-best")
    every = [Every(keep_every)] if keep_every else []
    best = [keep_best] if keep_best else []
    doomed = run.doomed(policies_of(keep_last, (*every, *best))) if steps else []
    if doomed:
        # a person waits, so more is read than after each commit of a run: what `doctor` reads
        problems = verify_checkpoint(steps[-1].path, quick=True).problems
        if problems:
            log.warning("old checkpoints stay: %s: %s", problems[0].path, problems[0].what)
            doomed = []
    size = bytes_text(sum(one.nbytes for one in doomed))
    if dry_run or not doomed:
        gone: list[Any] = []
    else:
        if not yes:
            click.confirm(
                f"Delete {count_text(len(doomed), 'step')} ({size}) below {root}?",
                abort=True,
                err=True,
            )
        gone = [one for one in doomed if run.remove(one, logging.WARNING)]
    if not dry_run:
        run.finish()
    if as_json:
        print_json(
            {"doomed": [one.to_json() for one in doomed], "deleted": [one.path for one in gone]}
        )
        return
    rows = [
        (one.path, one.step, bytes_text(one.nbytes), "yes" if one in gone else "") for one in doomed
    ]
    if rows:
        print_table("", ("checkpoint", "step", "size", "deleted"), rows, right=("step", "size"))
    if dry_run:
        print_line(f"{count_text(len(doomed), 'step')} ({size}) would be deleted")
        return
    stay = f", {count_text(len(steps) - len(gone), 'step')} kept" if steps else ": there is none"
    print_line(f"{count_text(len(gone), 'step')} deleted{stay}")
    newest = run.newest()
    if newest is not None and newest.step is not None:
        older = (one for one in examine(top) if one.step is not None)
        _name_left([one for one in older if (one.step or 0) < newest.step], newest.path)
