"""Sinks of telemetry, each read back by the library that it is for."""

from __future__ import annotations

import importlib
import json
import logging
import queue
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import smckpt
from smckpt import Alarms, SaveOptions
from smckpt.integrations import telemetry
from tests.support.faults.proxy import faulty_proxy
from tests.support.limits import seconds
from tests.support.s3 import Server

STAGES = ["blocked", "committed", "staged", "waited", "written"]


@pytest.fixture
def hearing() -> Iterator[Callable[[Any], None]]:
    """Adds sinks, and removes them."""
    removes = []

    def hear(sink: Any) -> None:
        removes.append(smckpt.add_sink(sink))

    yield hear
    for remove in removes:
        remove()


def saves_and_a_load(folder: Path, name: str) -> list[Any]:
    """Steps 1 and 2, of which the second warns; a save that fails; a load. Returns the events."""
    told: list[Any] = []
    heard = threading.Semaphore(0)

    def hear(event: Any) -> None:  # after the sinks under test
        told.append(event)
        heard.release()

    remove = smckpt.add_sink(hear)
    model = torch.nn.Linear(64, 64)
    options = SaveOptions(alarms=Alarms(nonfinite="warn", unchanged="off"), sweep=False)
    try:
        for step in (1, 2):
            with smckpt.sm_state_dict_type(model, smckpt.LOCAL):
                state = {"model": model.state_dict()}
            place = folder / f"step_{step}"
            smckpt.save(state, checkpoint_id=place, step=step, options=replace(options, queue=name))
            with torch.no_grad():
                model.weight[0, 0] = float("inf")
        with pytest.raises(smckpt.CheckpointError):
            smckpt.save(
                {"model": lambda: None},
                checkpoint_id=place,
                step=3,
                options=smckpt.SaveOptions(queue=name),
            )
        for _ in range(3):  # the queue's thread tells, a moment after
            assert heard.acquire(timeout=seconds(60))
        smckpt.load(state, checkpoint_id=folder / "step_1")
    finally:
        remove()
    assert [event.outcome for event in told] == ["committed", "committed", "failed", "loaded"]
    return told


def test_json_lines_have_a_record_of_each(tmp_path: Path, hearing: Any, caplog: Any) -> None:
    hearing(telemetry.JsonLines(tmp_path / "events-{rank}.jsonl"))
    with caplog.at_level(logging.INFO, "smckpt"):
        events = saves_and_a_load(tmp_path, "json")
    lines = [json.loads(line) for line in (tmp_path / "events-0.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["save", "save", "save", "load"]
    for line, event in zip(lines, events, strict=True):
        assert (line["outcome"], line["step"], line["nbytes"]) == (
            event.outcome, event.step, event.nbytes,
        )  # fmt: skip
        assert line["rate"] == event.rate and line["host"] and line["time"] > 1.7e9
    first, second, failed, _ = lines
    for stage in STAGES:
        assert first[stage] == getattr(events[0], stage)
    assert first["alarms"] == [] and "model.weight (1, on rank 0)" in second["alarms"][0]
    assert "cannot be saved" in failed["error"] or "function" in failed["error"]
    # the newest durable state is that of step 2, also after the save that failed
    assert 0 < first["age"] < 60 and failed["age"] > second["age"] > 0
    assert sum("committed step" in record.getMessage() for record in caplog.records) == 2


def test_tensorboards_reader_finds_the_scalars(tmp_path: Path, hearing: Any) -> None:
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    hearing(telemetry.TensorBoard(tmp_path / "board"))
    events = saves_and_a_load(tmp_path, "board")
    found = reader.EventAccumulator(str(tmp_path / "board"))
    found.Reload()
    names = {f"smckpt/save/{stage}" for stage in STAGES}
    assert names | {"smckpt/save/age", "smckpt/load/read"} <= set(found.Tags()["scalars"])
    for name in STAGES:
        scalars = found.Scalars(f"smckpt/save/{name}")
        assert [scalar.step for scalar in scalars] == [1, 2, 3]
        assert scalars[0].value == pytest.approx(getattr(events[0], name), rel=1e-5)
    assert [scalar.value for scalar in found.Scalars("smckpt/save/failed")] == [0, 0, 1]
    assert [scalar.value for scalar in found.Scalars("smckpt/save/alarms")] == [0, 1, 0]
    (read,) = found.Scalars("smckpt/load/bytes")
    assert (read.step, read.value) == (1, events[3].nbytes)


def history(folder: Path) -> list[dict[str, Any]]:
    """The rows in the file of an offline run: a log in LevelDB's format of W&B's own records."""
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, at, parts, rows = file.read_bytes(), 7, b"", []  # after the file's own header
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:  # no room for a header in this block
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            record = records.Record.FromString(parts)
            parts = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append(
                    {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}
                )
    return rows


def test_weights_and_biases_offline_file_has_the_values(
    tmp_path: Path, hearing: Any, monkeypatch: Any
) -> None:
    wandb = importlib.import_module("wandb")
    with pytest.raises(smckpt.UsageError, match=r"wandb\.init"):
        telemetry.WeightsAndBiases()
    for name, value in (("HOME", tmp_path), ("WANDB_MODE", "offline"), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, str(value))
    run = wandb.init(project="p", dir=tmp_path, settings=wandb.Settings(x_disable_stats=True))
    try:
        run.log({"loss": 2.0}, step=10)
        hearing(telemetry.WeightsAndBiases())
        events = saves_and_a_load(tmp_path, "wandb")
        run.log({"loss": 1.0}, step=11)  # which W&B drops if a sink has moved its step
        run.log({"loss": 0.5}, step=12)
    finally:
        run.finish()
        wandb.teardown()
    rows = {row["_step"]: row for row in history(tmp_path)}
    assert [rows[step]["loss"] for step in (10, 11, 12)] == [2.0, 1.0, 0.5]
    (row,) = (row for row in rows.values() if "smckpt/save/blocked" in row)
    for stage in STAGES:  # the third save, which failed, is the last one before the row
        assert row[f"smckpt/save/{stage}"] == pytest.approx(getattr(events[2], stage))
    assert (row["smckpt/save/failed"], row["smckpt/step"]) == (1, 1)
    assert row["smckpt/load/bytes"] == events[3].nbytes


def test_prometheus_exposes_the_metrics_as_text(tmp_path: Path, hearing: Any) -> None:
    client = importlib.import_module("prometheus_client")
    parser = importlib.import_module("prometheus_client.parser")
    registry = client.CollectorRegistry()
    hearing(telemetry.Prometheus(registry))
    events = saves_and_a_load(tmp_path, "prom")

    def exposed() -> dict[tuple[str, ...], float]:
        text = client.generate_latest(registry).decode()
        return {
            (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in parser.text_string_to_metric_families(text)
            for sample in family.samples
        }

    found = exposed()
    assert found["smckpt_ended_total", "save", "committed", "prom"] == 2
    assert found["smckpt_ended_total", "save", "failed", "prom"] == 1
    assert found["smckpt_ended_total", "load", "loaded", ""] == 1
    assert found["smckpt_bytes_total", "save", "prom"] == sum(e.nbytes for e in events[:3])
    assert found["smckpt_alarms_total", "save", "prom"] == 1
    assert found["smckpt_durable_step", "prom"] == 2
    assert found["smckpt_seconds", "load", "", "read"] == events[3].read
    age = found["smckpt_durable_age_seconds", "prom"]
    assert age > events[2].age
    assert exposed()["smckpt_durable_age_seconds", "prom"] > age  # it rises while nothing happens


def test_opentelemetrys_reader_collects_the_metrics(tmp_path: Path, hearing: Any) -> None:
    sdk = importlib.import_module("opentelemetry.sdk.metrics")
    export = importlib.import_module("opentelemetry.sdk.metrics.export")
    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider([reader])
    hearing(telemetry.OpenTelemetry(provider))
    events = saves_and_a_load(tmp_path, "otel")
    found = {
        metric.name: list(metric.data.data_points)
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    provider.shutdown()
    ended = {
        (p.attributes["kind"], p.attributes["outcome"]): p.value for p in found["smckpt.ended"]
    }
    assert ended == {("save", "committed"): 2, ("save", "failed"): 1, ("load", "loaded"): 1}
    written = [
        point
        for point in found["smckpt.duration"]
        if (point.attributes["outcome"], point.attributes.get("stage")) == ("committed", "written")
    ]
    assert [(p.count, p.sum) for p in written] == [
        (2, pytest.approx(events[0].written + events[1].written))
    ]
    (age,) = found["smckpt.durable.age"]
    assert dict(age.attributes) == {"queue": "otel"} and age.value > events[2].age
    assert sum(point.value for point in found["smckpt.alarms"]) == 1


def test_requests_that_s3_was_sent_again_are_counted(
    s3_root: str, s3_server: Server, hearing: Any
) -> None:
    told: queue.Queue[Any] = queue.Queue()
    hearing(told.put)
    state = {"w": torch.ones(4)}
    with faulty_proxy(s3_server.endpoint) as proxy:
        config = {"endpoint": proxy.endpoint}
        proxy.spoil("PUT", "503", 2, "data-")
        smckpt.save(
            state, checkpoint_id=s3_root, options=smckpt.SaveOptions(queue="s3"), storage=config
        )
        save = told.get(timeout=seconds(60))
        proxy.spoil("GET", "500", 1, "data-")
        smckpt.load(state, checkpoint_id=s3_root, storage=config)
        load = told.get(timeout=seconds(60))
        smckpt.load(state, checkpoint_id=s3_root, storage=config)
    assert (save.retries, load.retries) == (2, 1)
    assert told.get(timeout=seconds(60)).retries == 0
    assert telemetry.record(save)["retries"] == 2


def test_a_sink_without_its_library_says_what_to_install(monkeypatch: Any) -> None:
    for module, sink, extra in (
        ("prometheus_client", telemetry.Prometheus, "prometheus"),
        ("wandb", telemetry.WeightsAndBiases, "wandb"),
        ("torch.utils.tensorboard", lambda: telemetry.TensorBoard("x"), "tensorboard"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(smckpt.UsageError) as refused:
            sink()
        assert f"smckpt[{extra}]" in str(refused.value)
