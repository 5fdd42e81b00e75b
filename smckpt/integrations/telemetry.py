"""Sinks of events (`smckpt.add_sink`) for JSON lines, TensorBoard, Weights & Biases, Prometheus and
OpenTelemetry.

Each is made once and called with every `SaveEvent` and `LoadEvent` of its rank. A library is
imported when its sink is made. The log has a line for each commit without any sink.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from smckpt.engine.events import LoadEvent, SaveEvent
from smckpt.errors import UsageError

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from prometheus_client import CollectorRegistry
    from torch.utils.tensorboard import SummaryWriter
    from wandb.sdk.wandb_run import Run

__all__ = ["JsonLines", "OpenTelemetry", "Prometheus", "TensorBoard", "WeightsAndBiases", "record"]

_STAGES = {
    "save": ("blocked", "waited", "staged", "written", "committed"),
    "load": ("chosen", "planned", "read", "ended"),
}


def record(event: SaveEvent | LoadEvent) -> dict[str, Any]:
    """An event as JSON data: its fields, with "kind" ("save" or "load"), "rate", "host" and "time"
    (seconds since 1970). "error" is text."""
    fields = dict(vars(event))
    error = fields.pop("error")
    return {
        "kind": _kind(event),
        "time": time.time(),
        "host": socket.gethostname(),
        **fields,
        "rate": event.rate,
        "error": None if error is None else str(error),
    }


class JsonLines:
    """Appends a line of JSON for each event to a file.

    Args:
        path: "{rank}" in it becomes the event's rank. Ranks of one host may share a file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)

    def __call__(self, event: SaveEvent | LoadEvent) -> None:
        line = json.dumps(record(event)).encode() + b"\n"
        path = self._path.replace("{rank}", str(event.rank))
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line)  # one call, so that lines of several processes do not mix
        finally:
            os.close(file)


class TensorBoard:
    """Writes scalars `smckpt/save/blocked`, `smckpt/load/read` and so on.

    Their step is the event's step, or the number of the save if it has none.

    Args:
        writer: a `SummaryWriter` of torch, or the directory for one.
    """

    def __init__(self, writer: SummaryWriter | str | os.PathLike[str]) -> None:
        if isinstance(writer, (str, os.PathLike)):
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise _missing("tensorboard") from error
            make: Any = SummaryWriter  # torch gives it no types
            self._writer = make(os.fspath(writer))
        else:
            self._writer = writer

    def __call__(self, event: SaveEvent | LoadEvent) -> None:
        kind = _kind(event)
        for name, value in _numbers(event).items():
            self._writer.add_scalar(f"smckpt/{kind}/{name}", value, _step(event))
        self._writer.flush()


class WeightsAndBiases:
    """Logs `smckpt/save/blocked`, `smckpt/load/read` and so on to a run of Weights & Biases, over
    `smckpt/step`: the event's step, or the number of the save if it has none.

    A save ends in the background. Its values join the row that training logs next, so that they
    never move W&B's own step: W&B drops what training logs for an earlier step. Of two saves
    between two rows of training, the later one's values stay.

    Args:
        run: what `wandb.init` returned; None: the run of this process.
    """

    def __init__(self, run: Run | None = None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb") from error
        run = wandb.run if run is None else run
        if run is None:
            raise UsageError(
                "this process has no run of Weights & Biases",
                remedy="call wandb.init() first, or pass its run",
            )
        self._run = run
        self._run.define_metric("smckpt/*", step_metric="smckpt/step")

    def __call__(self, event: SaveEvent | LoadEvent) -> None:
        kind = _kind(event)
        values = {f"smckpt/{kind}/{name}": value for name, value in _numbers(event).items()}
        self._run.log({**values, "smckpt/step": _step(event)}, commit=False)


class Prometheus:
    """Metrics of prometheus_client, `smckpt_…`. Your program serves them.

    Seconds, bytes and rate are those of the last save or load. `smckpt_durable_age_seconds` rises
    while no save is committed.

    Args:
        registry: the registry of the metrics; None: the library's own.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            import prometheus_client as client
        except ImportError as error:
            raise _missing("prometheus") from error
        where = {} if registry is None else {"registry": registry}
        by = ["kind", "queue"]
        made: Any = client
        self._ended = made.Counter("smckpt_ended", "Saves and loads", [*by, "outcome"], **where)
        self._bytes = made.Counter("smckpt_bytes", "Bytes written or read", by, **where)
        self._retries = made.Counter("smckpt_retries", "Requests sent again", by, **where)
        self._alarms = made.Counter("smckpt_alarms", "What saves warned of", by, **where)
        self._seconds = made.Gauge(
            "smckpt_seconds", "Seconds until a stage had ended", [*by, "stage"], **where
        )
        self._rate = made.Gauge("smckpt_bytes_per_second", "Rate of a rank", by, **where)
        self._step = made.Gauge("smckpt_durable_step", "Newest committed step", ["queue"], **where)
        self._age = made.Gauge(
            "smckpt_durable_age_seconds", "Age of the newest committed state", ["queue"], **where
        )

    def __call__(self, event: SaveEvent | LoadEvent) -> None:
        kind, queue = _kind(event), _queue(event)
        self._ended.labels(kind, queue, event.outcome).inc()
        self._bytes.labels(kind, queue).inc(event.nbytes)
        self._retries.labels(kind, queue).inc(event.retries or 0)
        self._rate.labels(kind, queue).set(event.rate)
        for stage in _STAGES[kind]:
            self._seconds.labels(kind, queue, stage).set(getattr(event, stage))
        if not isinstance(event, SaveEvent):
            return
        self._alarms.labels(kind, queue).inc(len(event.alarms))
        if event.outcome == "committed" and event.step is not None:
            self._step.labels(queue).set(event.step)
        if event.age is not None:
            taken = time.monotonic() - event.age
            self._age.labels(queue).set_function(lambda: time.monotonic() - taken)


class OpenTelemetry:
    """Metrics of OpenTelemetry, `smckpt.…`, with the attributes kind, queue, outcome and stage.

    Args:
        provider: the provider of the meter; None: the one that the program has set.
    """

    def __init__(self, provider: MeterProvider | None = None) -> None:
        try:
            from opentelemetry import metrics
        except ImportError as error:
            raise _missing("opentelemetry") from error
        self._taken: dict[str, float] = {}  # queue → when its newest committed state was taken
        meter = metrics.get_meter("smckpt", meter_provider=provider)
        self._seconds = meter.create_histogram("smckpt.duration", "s", "Until a stage had ended")
        self._rate = meter.create_histogram("smckpt.rate", "By/s", "Rate of a rank")
        self._ended = meter.create_counter("smckpt.ended", "1", "Saves and loads")
        self._bytes = meter.create_counter("smckpt.io", "By", "Bytes written or read")
        self._retries = meter.create_counter("smckpt.retries", "1", "Requests sent again")
        self._alarms = meter.create_counter("smckpt.alarms", "1", "What saves warned of")

        def ages(options: CallbackOptions) -> Iterable[Observation]:
            now, taken = time.monotonic(), list(self._taken.items())
            return [metrics.Observation(now - at, {"queue": queue}) for queue, at in taken]

        meter.create_observable_gauge(
            "smckpt.durable.age", [ages], "s", "Age of the newest committed state"
        )

    def __call__(self, event: SaveEvent | LoadEvent) -> None:
        kind = _kind(event)
        of = {"kind": kind, "queue": _queue(event), "outcome": event.outcome}
        self._ended.add(1, of)
        self._bytes.add(event.nbytes, of)
        self._retries.add(event.retries or 0, of)
        self._rate.record(event.rate, of)
        for stage in _STAGES[kind]:
            self._seconds.record(getattr(event, stage), {**of, "stage": stage})
        if isinstance(event, SaveEvent):
            self._alarms.add(len(event.alarms), of)
            if event.age is not None:
                self._taken[event.queue] = time.monotonic() - event.age


def _kind(event: SaveEvent | LoadEvent) -> str:
    return "save" if isinstance(event, SaveEvent) else "load"


def _queue(event: SaveEvent | LoadEvent) -> str:
    return event.queue if isinstance(event, SaveEvent) else ""


def _step(event: SaveEvent | LoadEvent) -> int:
    return event.step if event.step is not None else getattr(event, "number", 0)


def _numbers(event: SaveEvent | LoadEvent) -> dict[str, float]:
    """The values for a chart."""
    found: dict[str, float] = {stage: getattr(event, stage) for stage in _STAGES[_kind(event)]}
    found |= {"bytes": event.nbytes, "rate": event.rate, "failed": float(event.error is not None)}
    if event.retries is not None:
        found["retries"] = event.retries
    if isinstance(event, SaveEvent):
        found["alarms"] = len(event.alarms)
        if event.age is not None:
            found["age"] = event.age
    return found


def _missing(extra: str) -> UsageError:
    return UsageError(
        f"this sink needs a library that is not installed: {extra}",
        remedy=f"pip install 'smckpt[{extra}]'",
    )
