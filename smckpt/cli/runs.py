"""Commands for the checkpoints of a run: `doctor`, `status`, `prune`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from smckpt.cli.output import bytes_text, count_text, print_json, print_line, print_table

if TYPE_CHECKING:
    from smckpt.storage import Storage

__all__ = ["doctor", "prune", "status"]

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


@click.command()
@click.argument("root")
@as_json
def doctor(root: str, as_json: bool) -> None:
    """Say which step below ROOT can be restored, and why each newer one cannot.

    It reads records, manifests and the sizes of files; `smckpt verify` reads every byte. Exit
    status 1: the newest step cannot be restored, or none can.
    """
    from smckpt.manager.doctor import examine
    from smckpt.storage import open_storage

    conditions = examine(open_storage(root))
    whole = next((i for i, one in enumerate(conditions) if one.state == "whole"), None)
    if as_json:
        restorable = None if whole is None else conditions[whole].place
        told = {"restorable": restorable, "steps": [one.to_json() for one in conditions]}
        print_json(told)
    else:
        for one in conditions[:whole]:
            print_line(f"{one.place or '.'}: {one.state}: {one.why}. What to do: {one.remedy}")
        if whole is None:
            print_line(f"nothing below {root} can be restored")
        else:
            step = conditions[whole].step
            print_line(f"restorable: {conditions[whole].place or '.'}, step {step}")
    sys.exit(0 if whole == 0 else 1)


@click.command()
@click.argument("root")
@as_json
def status(root: str, as_json: bool) -> None:
    """Show unfinished saves and deletions below ROOT, and the age of the newest step. For a run
    with a manager, also show its failures and the interval that "auto" has chosen."""
    from smckpt.manager.doctor import examine
    from smckpt.storage import open_storage

    top = open_storage(root)
    conditions = examine(top)
    whole = [one for one in conditions if one.state == "whole"]
    newest = max(whole, key=lambda one: one.committed_at, default=None)
    under_way = [one for one in conditions if one.state in ("unfinished", "removing")]
    age = None if newest is None else max(time.time() - newest.committed_at / 1e9, 0)
    run = None if newest is None else _run_of(top.join(newest.place))
    if as_json:
        print_json(
            {
                "newest": None if newest is None else newest.to_json(),
                "age_seconds": age,
                "run": run,
                "under_way": [one.to_json() for one in under_way],
                "steps": len(whole),
                "bytes": sum(one.nbytes for one in whole),
            }
        )
        return
    if newest is None or age is None:
        print_line(f"no step below {root} is committed")
    else:
        total = bytes_text(sum(one.nbytes for one in whole))
        print_line(f"{count_text(len(whole), 'step')}, {total}; the newest is {newest.place}, "
                   f"committed {age:.0f} s ago")  # fmt: skip
    if run is not None:
        print_line(f"the run has trained for {run['seconds'] / 3600:.3g} h, with "
                   f"{count_text(run['failures'], 'failure')}")  # fmt: skip
        if run["interval"] is not None:
            chosen = run["interval"]
            print_line(f'interval="auto" is {chosen["seconds"]:.3g} s: {chosen["why"]}')
    for one in under_way:
        print_line(f"{one.place or '.'}: {one.state}: {one.why}, {bytes_text(one.nbytes)}")


def _run_of(place: Storage) -> dict[str, Any] | None:
    """The manager's record of its run in the newest step."""
    from smckpt.checkpoint.discover import found_at
    from smckpt.manager.record import run_of

    found = found_at(place)
    return None if found is None else run_of(found)


def _best(_: Any, __: Any, text: str | None) -> Any:
    from smckpt.manager.retention import Best

    if text is None:
        return None
    metric, _, rest = text.partition(":")
    mode, _, count = rest.partition(":")
    if not count.isdigit():
        raise click.BadParameter("write METRIC:min:N or METRIC:max:N")
    return Best(metric, mode, int(count))


@click.command()
@click.argument("root")
@click.option("--keep-last", type=click.IntRange(1), required=True, help="The newest N steps.")
@click.option("--keep-every", type=click.IntRange(1), help="Also multiples of this number.")
@click.option("--keep-best", callback=_best, help="Also the N best: METRIC:min:N.")
@click.option("--layout", default="{step}", show_default=True, help="Names of steps' directories.")
@click.option("--dry-run", is_flag=True, help="List the steps to delete, and delete nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
def prune(
    root: str,
    keep_last: int,
    keep_every: int | None,
    keep_best: Any,
    layout: str,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete the steps of any run below ROOT that the rules do not keep.

    It deletes nothing if the newest step is not whole, and keeps steps that a reader has pinned. It
    finishes deletions that were cut short.
    """
    from smckpt.manager.book import Book
    from smckpt.manager.retention import Keep, Keeper
    from smckpt.manager.template import Template
    from smckpt.storage import open_storage

    book = Book(open_storage(root), Template(layout))
    keeper = Keeper(book, Keep(keep_last, keep_every, keep_best), None)
    doomed = keeper.doomed()
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
        gone = [one for one in doomed if keeper.remove(one)]
    if not dry_run:
        keeper.finish()
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
    print_line(f"{count_text(len(gone), 'step')} deleted, {len(doomed) - len(gone)} not")
