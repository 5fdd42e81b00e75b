"""Reports what a run did, from its log: the proof, the table and the figure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from accident import Log
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from rich.console import Console
from rich.table import Table

ATTEMPT_COLORS = ("#e08214", "#2a6fbb", "#3a9d5d", "#7b52ab")
RED, GREY = "#c0392b", "#c4c4c4"

Row = dict[str, Any]  # one event of the log


@dataclass(frozen=True)
class SaveCost:
    """One save.

    blocked to committed: seconds since the call, of the slowest rank. stall: seconds that training
    lost: `blocked`, plus the time by which rank 0's steps until the commit exceeded the median.
    bytes: of all ranks; None if a rank died before it logged its own.
    """

    attempt: int
    step: int
    blocked: float
    staged: float
    written: float
    committed: float
    stall: float
    bytes: int | None


class History:
    """A run's log, sorted."""

    def __init__(self, log: Log) -> None:
        starts, steps, texts = log.events("start"), log.events("step"), log.events("text")
        self.attempts = [row for row in starts if row["phase"] == "run"]
        self.steps = [row for row in steps if row["phase"] == "run"]
        self.reference = {row["step"]: row for row in steps if row["phase"] == "reference"}
        self.kills = log.events("kill")
        self.text: str = texts[-1]["text"] if texts else ""
        self._save_rows = log.events("save")

    def steps_of(self, attempt: Row) -> list[Row]:
        return [row for row in self.steps if row["attempt"] == attempt["attempt"]]

    @cached_property
    def median_step(self) -> float:
        return statistics.median(row["seconds"] for row in self.steps)

    @cached_property
    def compared(self) -> list[tuple[Row, Row]]:
        """Pairs: a step, and the same step of the uninterrupted run."""
        rows = [row for row in self.steps if row["step"] in self.reference]
        return [(row, self.reference[row["step"]]) for row in rows]

    @cached_property
    def differences(self) -> list[str]:
        """The steps whose losses differ in any bit from those of the uninterrupted run."""
        return [
            f"step {row['step']}: {row['losses']}, uninterrupted {expected['losses']}"
            for row, expected in self.compared
            if row["losses"] != expected["losses"]
        ]

    @cached_property
    def saves(self) -> list[SaveCost]:
        saves: dict[tuple[int, int], list[Row]] = {}
        for row in self._save_rows:
            saves.setdefault((row["attempt"], row["step"]), []).append(row)
        return [self._cost(rows) for _, rows in sorted(saves.items())]

    def _cost(self, rows: list[Row]) -> SaveCost:
        names = ("blocked", "staged", "written", "committed")
        slowest = {name: max(row[name] for row in rows) for name in names}
        first = min(rows, key=lambda row: row["rank"])
        end = first["began"] + slowest["committed"]
        slower = sum(
            step["seconds"] - self.median_step
            for step in self.steps
            # the step began while the save was under way
            if first["began"] <= step["time"] - step["seconds"] < end
        )
        stall = slowest["blocked"] + max(0.0, slower)
        whole = len(rows) == len(self.steps[0]["losses"])
        size = sum(row["bytes"] for row in rows) if whole else None
        return SaveCost(first["attempt"], first["step"], **slowest, stall=stall, bytes=size)


def publish(directory: Path, log: Log, look: str = "") -> bool:
    """Print table and proof, and draw the figure. Returns whether all losses equal the
    uninterrupted run's.

    Args:
        look: the command that lists the checkpoints.
    """
    history, console = History(log), Console(width=100, highlight=False)
    console.print(_table(history))
    for kill in history.kills:
        console.print(f"SIGKILL hit rank {kill['rank']} in step {kill['step']}.")
    console.print("\n[bold]The exported model writes:[/]")
    console.print(history.text + "\n", markup=False, style="dim")
    draw(history, directory / "train.png")
    console.print(f"Figure: {directory / 'train.png'}", soft_wrap=True)
    if look:  # in one line, for pasting
        console.print(f"Checkpoints: {look}", markup=False, soft_wrap=True)
    if history.differences:
        console.print("LOSSES DIFFER", *history.differences[:5], sep="\n", style="bold red")
    elif history.compared:
        console.print(proof(history), style="bold green")
    return not history.differences


def proof(history: History) -> str:
    """A sentence that says what was compared."""
    resumed = [str(attempt["step"]) for attempt in history.attempts if attempt["step"]]
    how = f", resumed after step {', '.join(resumed)}" if resumed else ""
    ranks = len(history.reference[1]["losses"])
    return (
        f"{len(history.compared)} steps in {len(history.attempts)} attempts{how}: the losses of "
        f"all {ranks} ranks equal the uninterrupted run's bit for bit."
    )


def _table(history: History) -> Table:
    table = Table(
        title=f"Saves, in milliseconds after the call (median step: "
        f"{history.median_step * 1e3:.0f} ms)"
    )
    names = ("attempt", "step", "blocked", "staged", "written", "committed", "stall", "MB", "MB/s")
    for name in names:
        table.add_column(name, justify="right")
    number = {row["attempt"]: str(n) for n, row in enumerate(history.attempts, 1)}
    for save in history.saves:
        times = (save.blocked, save.staged, save.written, save.committed, save.stall)
        table.add_row(
            number[save.attempt],
            str(save.step),
            *(f"{seconds * 1e3:.1f}" for seconds in times),
            "-" if save.bytes is None else f"{save.bytes / 1e6:.1f}",
            "-" if save.bytes is None else f"{save.bytes / 1e6 / save.written:.0f}",
        )
    return table


def draw(history: History, path: Path) -> None:
    """Above: the loss by step. Below: how long each save blocked training, and how long it took."""
    style = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(style):
        figure, (top, bottom) = plt.subplots(
            2, 1, figsize=(10, 7.5), sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        colors = [ATTEMPT_COLORS[n % 4] for n in range(len(history.attempts))]
        figure.suptitle(_title(history))
        _draw_losses(history, top, colors)
        _draw_saves(history, bottom, colors)
        for axes in (top, bottom):
            axes.grid(alpha=0.25)
            for kill in history.kills:
                axes.axvline(kill["moment"], color=RED, linestyle="--", linewidth=1.5, zorder=0)
        bottom.set_xlabel("training step")
        bottom.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _title(history: History) -> str:
    killed = "Killed, resumed" if history.kills else "Not killed"
    if not history.compared:
        return killed
    equal = "LOSSES DIFFER" if history.differences else "every loss equals the uninterrupted run's"
    return f"{killed}: {equal}"


def mean_loss(row: Row) -> float:
    return statistics.fmean(float.fromhex(loss) for loss in row["losses"])


def _draw_losses(history: History, axes: Axes, colors: list[str]) -> None:
    if history.reference:
        rows = sorted(history.reference.values(), key=lambda row: row["step"])
        steps, losses = [row["step"] for row in rows], [mean_loss(row) for row in rows]
        axes.plot(steps, losses, color=GREY, alpha=0.7, linewidth=7, label="uninterrupted run")
    for number, (attempt, color) in enumerate(zip(history.attempts, colors, strict=True), 1):
        rows = history.steps_of(attempt)
        label = f"attempt {number}" + (f", resumed after step {attempt['step']}" * bool(number > 1))
        axes.plot([r["step"] for r in rows], [mean_loss(r) for r in rows], color=color, label=label)
    for kill in history.kills:
        late = kill["moment"] > 0.75 * max(row["step"] for row in history.steps)
        axes.annotate(
            f" SIGKILL to rank {kill['rank']} \n in step {kill['step']} ",
            (kill["moment"], 0.98),
            xycoords=("data", "axes fraction"),
            color=RED,
            ha="right" if late else "left",
            va="top",
        )
    axes.set_ylabel("loss (nats per byte)")
    axes.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _draw_saves(history: History, axes: Axes, colors: list[str]) -> None:
    by_attempt = dict(zip((row["attempt"] for row in history.attempts), colors, strict=True))
    for save in history.saves:
        color = by_attempt[save.attempt]
        blocked, committed = save.blocked * 1e3, save.committed * 1e3
        axes.vlines(save.step, blocked, committed, color=color, alpha=0.3, linewidth=4)
        axes.plot(save.step, committed, "^", color=color, markersize=7)
        axes.plot(save.step, save.stall * 1e3, "_", color="black", markersize=14)
        axes.plot(save.step, blocked, "o", color=color, markersize=7)
        axes.annotate(
            f"{blocked:.1f}", (save.step, blocked), (0, -8), textcoords="offset points",
            ha="center", va="top", fontsize=9,
        )  # fmt: skip
    step = axes.axhline(history.median_step * 1e3, color="#777777", linestyle=":")
    axes.set_yscale("log")
    axes.margins(y=0.2)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("ms after the call to save")
    point = {"linestyle": "", "color": "#444444"}
    axes.legend(
        [Line2D([], [], marker="^", **point), Line2D([], [], marker="_", **point, markersize=12),
         Line2D([], [], marker="o", **point), step],
        ["committed", "stall of the training", "call returned", "median step"],
        frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0),
    )  # fmt: skip
